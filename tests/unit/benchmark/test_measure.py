"""The whole benchmark in small, on scikit-learn's digits: stopped, continued, rendered."""

import itertools
import json
from pathlib import Path

import pytest

from atoll.benchmark.measure import Clock, Ledger
from atoll.benchmark.protocol import CONTENDERS, QUICK
from atoll.cli.bench import fcl_command
from atoll.core.errors import UserError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick benchmark: stopped in a batch, one contender first, then all."""
    home = tmp_path_factory.mktemp("bench") / "fcl"
    asked = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "is_over", lambda *_: next(asked) >= 3)
        fcl_command(to=home, device="cpu", quick=True, minutes=1)
    assert next(asked) >= 3
    assert list(home.glob("*")) == []
    one = ['contenders=["analytic"]']
    fcl_command(to=home, device="cpu", quick=True, set_=one)
    assert len(Ledger.read(home / "digits-table.json").batches) == 2
    fcl_command(to=home, device="cpu", quick=True)
    return home


def test_everything_is_measured_once(home: Path) -> None:
    ledger = Ledger.read(home / "digits-table.json")
    assert all(ledger.is_whole(name) for name in CONTENDERS)
    assert list(ledger.lacking()) == []
    parts = [batch["what"] for batch in ledger.batches]
    assert len(parts) == len(set(parts)) == 2 * len(CONTENDERS)
    before = (home / "digits-table.json").read_bytes()
    fcl_command(to=home, device="cpu", quick=True)
    assert (home / "digits-table.json").read_bytes() == before
    assert sorted(path.name for path in home.iterdir()) == ["digits-table.json", "figure.svg"]


def test_another_plan_is_measured_again(home: Path) -> None:
    fewer = Ledger.open(
        home / "digits-table.json", "digits-table", Ledger.read(home / "digits-table.json").plan
    )
    key = "measured/fedavg/own/0"
    fewer.runs[key] = {**fewer.runs[key], "digest": "of another config"}
    (batch,) = fewer.lacking()
    assert list(batch.runs) == [key]
    assert not fewer.is_whole("fedavg")


def test_costs_are_those_of_the_tables(home: Path) -> None:
    runs = Ledger.read(home / "digits-table.json").runs
    fedavg = runs["measured/fedavg/own/0"]
    assert fedavg["bytes"] > 2 * 5 * 5 * 3 * 4 * (65 * 32 + 33 * 10)  # both ways, without tests
    assert 0.8 < runs["measured/analytic/bytes/0"]["bytes"] / fedavg["bytes"] <= 1
    assert runs["measured/analytic/own/0"]["steps"] == 0
    assert runs["measured/ewc/own/0"]["steps"] == fedavg["steps"] > 0
    assert runs["measured/replay/own/0"]["steps"] > fedavg["steps"]
    assert runs["measured/replay/steps/0"]["steps"] <= fedavg["steps"]
    assert runs["measured/analytic/own/0"]["accuracy"] > 0.85 > fedavg["accuracy"]
    assert len(fedavg["by_stage"]) == 5


def test_the_page_has_three_tables_with_every_contender(home: Path) -> None:
    page = home.with_name("fcl.md").read_text()
    for title in ("Equal bytes", "Equal local steps", "Equal memory at a site"):
        table = page.split(f"### {title}\n")[1].split("\n#")[0]
        for name in CONTENDERS:
            assert f"\n| `{name}` | 0." in table
    assert "(fcl/figure.svg)" in page
    written = home.with_name("fcl.md").read_bytes()
    home.with_name("fcl.md").unlink()
    fcl_command(to=home, render=True)
    assert home.with_name("fcl.md").read_bytes() == written


def test_a_trial_that_diverges_is_not_chosen(home: Path) -> None:
    ledger = Ledger.read(home / "digits-table.json")
    best = ledger.tuned("fedavg")[1]
    for trial in range(QUICK.trials):
        run = ledger.runs[f"tuning/fedavg/{trial}/0"]
        if run["method"]["rate"] == best["rate"]:
            del run["accuracy"]
            run["failed"] = "numbers that are not finite"
    assert ledger.tuned("fedavg")[1] != best


def test_a_clock_counts_the_batch_to_come() -> None:
    clock = Clock(1.0)
    assert not clock.is_over(30)
    assert clock.is_over(61)
    assert not Clock(0).is_over(1e9)


def test_damaged_measurements_and_unknown_contenders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"plan": {}}))
    with pytest.raises(UserError, match="not a file of measurements"):
        Ledger.read(tmp_path / "x.json")
    with pytest.raises(UserError, match="nothing is measured"):
        fcl_command(to=tmp_path / "none", render=True)
    with pytest.raises(UserError, match="unknown contender 'fedagv'"):
        fcl_command(to=tmp_path, quick=True, set_=['contenders=["fedagv"]'])
