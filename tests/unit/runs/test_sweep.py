"""Runs of a sweep are the runs they would be alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import InterruptedRunError, UserError
from atoll.core.record import Score, Stage, read_events
from atoll.engines.local import LocalEngine, local_engine
from atoll.runs.config import change
from atoll.runs.execute import execute
from atoll.runs.sweep import points, sweep

VALUES: dict[str, Any] = {
    "name": "small",
    "rounds": 3,
    "dtype": "float64",
    "data": {"name": "synthetic-table", "rows": 240},
    "scenario": {"split": "columns", "clients": 3},
    "model": {"widths": [8, 6]},
    "method": {"name": "chfl", "epochs": 1, "batch": 16, "mu": [0.1]},
    "engine": {"mode": "stacked", "packing": False},
}


def test_every_point_gives_the_scores_it_gives_alone(tmp_path: Path) -> None:
    axes: dict[str, list[Any]] = {"seed": [0, 1], "rate": [0.001, 0.01]}
    found = points(VALUES, axes, tmp_path / "sweep")
    runs = sweep(found, tmp_path / "sweep", LocalEngine)
    assert [p.axes for p in found] == [
        {"seed": s, "method.rate": r} for s in (0, 1) for r in (0.001, 0.01)
    ]
    for number, point in enumerate(found):
        alone = replace(point.config, engine={**point.config.engine, "mode": "loop"})
        execute(alone, tmp_path / str(number), local_engine)
        expected = [e for e in read_events(tmp_path / str(number)) if isinstance(e, Score)]
        assert runs[number].scores == expected
    assert len({run.accuracy for run in runs}) > 1
    index = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [entry["axes"] for entry in index] == [p.axes for p in found]


def test_points_of_other_shapes_are_run_too(tmp_path: Path) -> None:
    runs = sweep(points(VALUES, {"clients": [2, 4]}, tmp_path), tmp_path, LocalEngine)
    assert [len(run.facts["clients"]) for run in runs] == [2, 4]


def test_a_run_that_ends_early_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    values = change(VALUES, {"rounds": 6, "patience": 1})
    runs = sweep(points(values, {"rate": [1e-12, 0.01]}, tmp_path), tmp_path, LocalEngine)
    lengths = [next(e.rounds for e in run.events if isinstance(e, Stage)) for run in runs]
    assert lengths[0] < lengths[1]


def test_a_sweep_that_was_cut_is_resumed_to_the_same_scores(tmp_path: Path) -> None:
    values = change(VALUES, {"checkpoint_seconds": 0})
    whole = sweep(points(values, {"seed": [0, 1]}, tmp_path / "a"), tmp_path / "a", LocalEngine)
    cut = points(values, {"seed": [0, 1]}, tmp_path / "b")
    with pytest.raises(InterruptedRunError):
        sweep(cut, tmp_path / "b", LocalEngine, stopping=lambda: True)
    resumed = sweep(cut, tmp_path / "b", LocalEngine, resume=True)
    assert [run.scores for run in resumed] == [run.scores for run in whole]


def test_an_axis_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="axis without values"):
        points(VALUES, {"seed": []}, tmp_path)
    with pytest.raises(UserError, match="unknown option"):
        points(VALUES, {"sede": [1]}, tmp_path)
