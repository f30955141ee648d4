"""Reproductions and benchmarks on a cluster measure what they measure in one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.benchmark.measure import Clock, Ledger
from atoll.benchmark.protocol import QUICK
from atoll.cluster.driver import ClusterSweep
from atoll.cluster.failures import as_text
from atoll.cluster.options import ClusterOptions
from atoll.core.errors import EXIT_INTERRUPTED, UserError
from atoll.reproduce import fccl
from atoll.reproduce.sweeps import sweeping_with, swept
from tests.unit.cluster.test_driver import VALUES, Here

SETTING = next(setting for setting in fccl.SETTINGS if setting.method == "FedAvg")


def test_a_reproduction_has_the_scores_of_one_process(tmp_path: Path) -> None:
    axes = {"seed": (0, 1)}
    expected = swept(VALUES, axes, tmp_path / "a")
    cluster = ClusterSweep(Here(), ClusterOptions())
    with sweeping_with(cluster):
        runs = swept(VALUES, axes, tmp_path / "b")
    assert [run.scores for run in runs] == [run.scores for run in expected]
    assert not list((tmp_path / "b" / "runs").glob("*/*"))


class Lost(Here):
    """A cluster that goes after the first block."""

    def ended(self, handles: Any, seconds: float) -> Any:
        if len(handles) < len(self.specs):
            raise UserError("the Ray cluster is gone", "ray", "again", EXIT_INTERRUPTED)
        return super().ended(handles, seconds)


def test_a_lost_cluster_leaves_what_is_measured_and_the_next_goes_on(tmp_path: Path) -> None:
    axes = {"seed": (0, 1, 2)}
    with (
        sweeping_with(ClusterSweep(Lost(), ClusterOptions(points=1))),
        pytest.raises(UserError, match="is gone"),
    ):
        swept(VALUES, axes, tmp_path)
    assert len(list(tmp_path.glob("runs/*/0/point-*/result.json"))) == 1
    backend = Here()
    with sweeping_with(ClusterSweep(backend, ClusterOptions(points=1))):
        assert len(swept(VALUES, axes, tmp_path)) == 3
    assert len(backend.specs) == 2


def test_fccl_on_a_cluster_stores_each_seed(tmp_path: Path) -> None:
    here, there = (fccl.Plan.quick(tmp_path / name, "cpu") for name in "ab")
    expected = fccl.PAPER.measure([SETTING], here)[SETTING.name]["runs"]
    backend = Here()
    with sweeping_with(ClusterSweep(backend, ClusterOptions())):
        runs = fccl.PAPER.measure([SETTING], there)[SETTING.name]["runs"]
        assert fccl.PAPER.measure([SETTING], there)[SETTING.name]["runs"] == runs
    assert len(backend.specs) == 1
    for one, other in zip(runs, expected, strict=True):
        for key in ("seed", "rounds", "matrix", "bytes_up", "config"):
            assert one[key] == other[key], key


class OneFails(Here):
    """The second seed fails after the first has ended."""

    def ended(self, handles: Any, seconds: float) -> Any:
        spec = json.loads(self.specs[handles[0]])
        if spec["numbers"] == [0]:
            return super().ended(handles, seconds)
        error = as_text(UserError("a node died", "node b", "again"))
        return [(handles[0], json.dumps({"error": error, "interrupted": False}))]


def test_fccl_stores_the_seeds_that_have_ended_where_one_fails(tmp_path: Path) -> None:
    plan = replace(fccl.Plan.quick(tmp_path, "cpu"), seeds=(0, 1))
    with (
        sweeping_with(ClusterSweep(OneFails(), ClusterOptions(points=1))),
        pytest.raises(UserError, match="a node died"),
    ):
        fccl.PAPER.measure([SETTING], plan)
    backend = Here()
    with sweeping_with(ClusterSweep(backend, ClusterOptions(points=1))):
        runs = fccl.PAPER.measure([SETTING], plan)[SETTING.name]["runs"]
    assert [one["seed"] for one in runs] == [0, 1]
    assert len(backend.specs) == 1


def test_a_benchmark_counts_the_same_steps_and_bytes(tmp_path: Path) -> None:
    plan = replace(QUICK, contenders=("fedavg",))
    ledgers = [
        Ledger.open(tmp_path / name / "digits-table.json", "digits-table", plan) for name in "ab"
    ]
    sweepers = (None, ClusterSweep(Here(lose=1), ClusterOptions(), count_steps=True))
    for ledger, sweeper in zip(ledgers, sweepers, strict=True):
        assert ledger.measure("cpu", Clock(0), lambda words: None, sweeper)
    mine, other = (ledger.runs for ledger in ledgers)
    assert mine.keys() == other.keys()
    for key in mine:
        assert (mine[key]["steps"], mine[key]["bytes"]) == (
            other[key]["steps"],
            other[key]["bytes"],
        )
        assert mine[key]["accuracy"] == pytest.approx(other[key]["accuracy"], abs=0.02)
    assert all(run["steps"] > 0 for run in other.values())
