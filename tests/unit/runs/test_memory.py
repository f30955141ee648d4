"""A plan tells the memory of a large run from two small trials."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.compute.executor import Executor
from atoll.engines import local
from atoll.engines.local import LocalEngine, local_engine
from atoll.runs.config import RunConfig, resolve
from atoll.runs.execute import execute, prepare
from atoll.runs.loop import go
from atoll.runs.memory import FEWEST, Meter, Plan, plan
from atoll.runs.parts import parts

UNPACKED = {"mode": "stacked", "packing": False}


def config(clients: int, **more: Any) -> RunConfig:
    values = {
        "name": "many",
        "rounds": 2,
        "data": {"name": "synthetic-table", "rows": 40 * clients},
        "scenario": {"split": "rows", "clients": clients},
        "model": {"widths": [24, 16]},
        "method": {"name": "fedavg", "batch": 8, "epochs": 1, "tester": "first", **more},
        "engine": {"mode": "stacked"},
    }
    return resolve(values, "test")


def engine(made: Any) -> LocalEngine:
    return LocalEngine(made, Executor("stacked"))


def planned(given: RunConfig, engine: Any, fewest: int = FEWEST) -> Plan | None:
    return plan(parts(given), lambda: parts(given), engine, fewest)


def test_a_meter_counts_what_is_alive() -> None:
    with Meter() as meter:
        kept = torch.zeros(1000)
        lost = torch.ones(2000)
        view = kept[:10].view(2, 5)
        assert meter.now == 12_000
        del lost
        assert (meter.now, meter.peak) == (4_000, 12_000)
        meter.again()
        assert meter.peak == 4_000
        del kept
        assert meter.now == 4_000  # the view still holds it
        del view
        assert meter.now == 0


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_plan_is_within_a_fifth_of_what_a_run_takes(optimiser: str, tmp_path: Path) -> None:
    given = config(120, optimiser=optimiser)
    found = planned(given, engine, fewest=100)
    assert found is not None
    with Meter() as meter:
        execute(given, tmp_path, local_engine)
    assert meter.peak / 1.2 < found.peak < meter.peak * 1.2
    assert found.peak == found.fixed + 120 * found.each


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not say")
def test_a_deterministic_run_is_planned_by_all_memory_of_the_machine() -> None:
    engines = {"mode": "stacked", "deterministic": True}
    given = resolve({**vars(config(16)), "engine": engines}, "test")
    made = planned(given, engine, fewest=16)
    lines = Path("/proc/meminfo").read_text().splitlines()
    (total,) = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")]
    assert made is not None
    assert made.free == total


def test_checks_that_are_not_finished_hold_no_tensors(tmp_path: Path) -> None:
    given = resolve({**vars(config(120)), "rounds": 4, "engine": UNPACKED}, "test")
    found = planned(given, engine, 100)
    assert found is not None
    made, record = prepare(given, tmp_path / "run", False)
    with Meter() as meter:
        run = LocalEngine(made, Executor("stacked"), deferred=True)
        go(made, run, record, lambda progress: None, lambda: False)
    assert meter.peak / 1.2 < found.peak < meter.peak * 1.2


def test_clients_that_are_not_asked_cost_their_rows_only(tmp_path: Path) -> None:
    few, all_of_them = (planned(config(60, cohort=cohort), engine, fewest=20) for cohort in (20, 0))
    assert few is not None
    assert all_of_them is not None
    assert few.clients == 20
    assert few.each == pytest.approx(all_of_them.each, rel=0.05)
    assert few.peak < all_of_them.peak


def test_small_runs_and_those_one_by_one_are_not_planned() -> None:
    small = config(20)
    assert planned(small, engine) is None
    loop = resolve({**vars(config(30)), "engine": {"mode": "loop"}}, "test")
    assert planned(loop, engine, fewest=20) is None


def test_a_plan_beyond_the_free_memory_asks_for_parts() -> None:
    assert Plan(100, fixed=10, each=10, peak=1010, free=0).parts == 1
    assert Plan(100, fixed=10, each=10, peak=1010, free=2000).parts == 1
    assert Plan(100, fixed=10, each=10, peak=1010, free=700).parts == 2
    assert Plan(100, fixed=10, each=10, peak=1010, free=1).parts == 128


def test_a_large_run_keeps_its_plan_and_runs_in_the_parts_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Plan(40, fixed=10, each=10, peak=410, free=250)
    execute(config(40), tmp_path / "whole", local_engine)
    monkeypatch.setattr(local, "plan", lambda *given: small)
    execute(config(40), tmp_path / "parts", local_engine)
    body = json.loads((tmp_path / "parts" / "memory.json").read_text())
    assert body["peak"] == 410
    assert body["parts"] == 2
    assert body["measured"] >= 0
    assert not (tmp_path / "whole" / "memory.json").exists()
    (choice,) = json.loads((tmp_path / "parts" / "engine.json").read_text()).values()
    assert choice["parts"] == 2
    assert "planned" in choice["reason"]
