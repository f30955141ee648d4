"""Row recovery at a site with 50 training rows: nothing under the default contract."""

from pathlib import Path

from .row_recovery import Coordinator, crafted_fit, site

OPEN = '[contract]\nmethods = ["fedavg"]\nactions = ["fit", "check", "offer", "agree"]\n'


def test_a_gate_without_bounds_gives_its_rows_away(tmp_path: Path) -> None:
    coordinator = Coordinator.of(site(tmp_path, OPEN, 88))
    crafted_fit(coordinator)
    assert len(coordinator.rows) == 53
    assert coordinator.recovered() >= 45
