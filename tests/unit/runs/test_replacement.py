"""A run may replace parts of its method by name: in its record, when resumed, and in a sweep."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from atoll import methods
from atoll.core.errors import InterruptedRunError, UserError
from atoll.engines.local import LocalEngine, local_engine
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.replacement import check_replacement, replaced
from atoll.runs.result import Run
from atoll.runs.sweep import points, sweep

HEAD = "atoll.reproduce.faults.fedseit:head"
SMALL: dict[str, Any] = {
    "name": "replaced",
    "rounds": 2,
    "data": {"name": "synthetic-text", "rows": 60, "classes": 4, "length": 5},
    "scenario": {"split": "tasks", "clients": 2, "stages": 2, "task_classes": 2},
    "model": {"widths": [2]},
    "method": {"name": "fedseit", "epochs": 1, "batch": 16, "rate": 0.01},
    "engine": {"mode": "loop", "device": "cpu"},
}


def config(**changes: Any) -> RunConfig:
    return resolve(change(SMALL, changes), "test")


def head(folder: Path) -> torch.Tensor:
    state = load((folder / "checkpoint.safetensors").read_bytes())
    return state["client/site-0/weights/now/dense/head"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("os:system", "is not a replacement"),
        ("atoll.reproduce.faults.fedseit", "is not a replacement"),
        ("atoll.reproduce.faults.fedseit.os:system", "is not a replacement"),
        ("atoll.reproduce.faults:fedseit", "is not a replacement"),
        ("atoll.reproduce.faultsy.fedseit:head", "is not a replacement"),
        ("atoll.reproduce.faults.nobody:head", "no module"),
        ("atoll.reproduce.faults.fedseit:heads", "no replacement 'heads'"),
        ("atoll.reproduce.faults.fedseit:brought_back", "no replacement 'brought_back'"),
    ],
)
def test_only_installed_replacements_are_imported(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        execute(config(replace=name), tmp_path / "run", local_engine)
    assert not (tmp_path / "run").exists()


def test_nothing_else_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="is not a replacement"):
        replaced("fedseit", "strange:head")
    assert "strange" not in sys.modules
    check_replacement(HEAD)


def test_a_replacement_belongs_to_one_method() -> None:
    with pytest.raises(UserError, match="replaces parts of 'fedseit', not of 'fedavg'"):
        replaced("fedavg", HEAD)
    assert replaced("fedavg", "") is methods.load("fedavg")
    assert replaced("fedseit", HEAD).options is methods.load("fedseit").options


def test_a_record_names_its_replacement_and_goes_on_with_it(tmp_path: Path) -> None:
    made = config(replace=HEAD, checkpoint_seconds=0)
    execute(made, tmp_path / "whole", local_engine)
    calls = iter(range(1, 99))
    with pytest.raises(InterruptedRunError):
        execute(made, tmp_path / "cut", local_engine, stopping=lambda: next(calls) == 3)
    assert Run(tmp_path / "cut").config["replace"] == HEAD
    execute(made, tmp_path / "cut", local_engine, resume=True)
    one, other = ((tmp_path / part / "events.jsonl").read_bytes() for part in ("whole", "cut"))
    assert one == other
    execute(config(), tmp_path / "plain", local_engine)
    assert not torch.equal(head(tmp_path / "plain"), head(tmp_path / "whole"))


def test_a_sweep_may_have_it_as_an_axis(tmp_path: Path) -> None:
    runs = sweep(points(SMALL, {"replace": ["", HEAD]}, tmp_path), tmp_path, LocalEngine)
    assert [run.config["replace"] for run in runs] == ["", HEAD]
    for run, name in zip(runs, ("", HEAD), strict=True):
        execute(config(replace=name), tmp_path / "alone" / run.folder.name, local_engine)
        assert torch.equal(head(run.folder), head(tmp_path / "alone" / run.folder.name))
