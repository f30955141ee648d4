"""Whose doing forgetting is: held to what real runs forget."""

from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.report import attribution
from atoll.runs.result import Run

TINY: dict[str, Any] = {
    "data": "wine", "clients": 3, "widths": [8], "engine.mode": "loop", "split": "classes",
    "stages": 3, "rounds": 3, "rate": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "alone", "chfl"])
def test_the_parts_add_up_to_backward_transfer(method: str, tmp_path: Path) -> None:
    found = atoll.run(method, out=tmp_path, attribution=True, **TINY)
    shares = attribution.shares(found.runs[0]).values()
    total = sum(share.total for share in shares) / len(shares)
    assert total == pytest.approx(found.metrics[found.headline]["backward_transfer"], abs=1e-9)
    assert any(abs(share.own) > 1e-6 for share in shares)  # something moved
    if method == "alone":
        assert all(share.others == 0 for share in shares)
    if method != "chfl":  # it keeps the best round, not the last
        assert all(share.choice == pytest.approx(0, abs=1e-12) for share in shares)


@pytest.mark.parametrize("method", ["fedavg", "alone", "chfl"])
def test_looking_changes_nothing_that_is_measured(method: str, tmp_path: Path) -> None:
    for name, wanted in (("with", True), ("without", False)):
        atoll.run(method, out=tmp_path / name, attribution=wanted, **TINY)
    one, other = ((tmp_path / name / "events.jsonl").read_bytes() for name in ("with", "without"))
    assert one == other
    names = [snapshot.name for snapshot in Run(tmp_path / "without").snapshots]
    assert not any(name.startswith("after ") for name in names)


def test_texts_and_domains_are_probed_too(tmp_path: Path) -> None:
    texts = atoll.run("demo-text", out=tmp_path / "text", epochs=1, attribution=True)
    shares = attribution.shares(texts.runs[0]).values()
    total = sum(share.total for share in shares) / len(shares)
    assert any(abs(share.others) > 1e-6 for share in shares)
    assert total == pytest.approx(texts.metrics["own"]["backward_transfer"], abs=1e-9)
    atoll.run("demo-models", out=tmp_path / "fccl", rounds=2, epochs=1, attribution=True,
              pretrain_epochs=1, public={"name": "digits-public", "rows": 128})  # fmt: skip
    names = {snapshot.name for snapshot in Run(tmp_path / "fccl").snapshots}
    assert names >= {"after own", "after others"}
