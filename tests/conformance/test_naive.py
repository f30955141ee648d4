"""Losses written for one client, as papers state them, run under `auto` to the loop's result.

The methods in the folder `naive` reduce over all entries of a weight, which are those of all
members in a stack; their extra terms are zero, or the same for all members, in the first round.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from atoll import methods
from atoll.compute import autotune
from atoll.core.record import Score, read_events
from atoll.engines.local import local_engine
from atoll.runs.config import RunConfig, resolve
from atoll.runs.execute import execute

FOLDER = Path(__file__).parent / "naive"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
ROUNDS = 5


@pytest.fixture(autouse=True)
def naive_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The methods can be found; a stack that is right is taken, however slow it is."""
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(FOLDER)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "GAIN", float("inf"))
    monkeypatch.setattr(autotune, "_trial", lambda members: 0)
    yield
    for name in NAMES:
        sys.modules.pop(f"atoll.methods.{name}", None)
        vars(methods).pop(name, None)


def config(name: str, mode: str) -> RunConfig:
    values: dict[str, Any] = {
        "name": name,
        "rounds": ROUNDS,
        "dtype": "float64",
        "data": {"name": "synthetic-table"},
        "scenario": {"clients": 4, "rows": "dirichlet", "alpha": 1.0},
        "method": {"name": name},
        "model": {"widths": [16, 8]},
        "engine": {"mode": mode},
        "checkpoint_seconds": 0,
    }
    return resolve(values, "naive")


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load((folder / "checkpoint.safetensors").read_bytes())


def test_both_are_there() -> None:  # docs/method.md has a third, SCAFFOLD
    assert NAMES == ["naive_ewc", "naive_fedprox"]


@pytest.mark.parametrize("mode", ["auto", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_a_naive_loss_gives_the_result_of_the_loop(name: str, mode: str, tmp_path: Path) -> None:
    """To 1e-10 after five rounds in double precision, and still stacked: mapped over members."""
    for way in ("loop", mode):
        execute(config(name, way), tmp_path / way, local_engine)
    wanted, found = final(tmp_path / "loop"), final(tmp_path / mode)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-10, atol=1e-10)
    one, other = (read_events(tmp_path / way) for way in ("loop", mode))
    assert [e for e in one if isinstance(e, Score)] == [e for e in other if isinstance(e, Score)]
    choices = json.loads((tmp_path / mode / "engine.json").read_text()).values()
    assert [(choice["mode"], choice["way"]) for choice in choices] == [("stacked", "mapped")]


@pytest.mark.parametrize("name", NAMES)
def test_a_naive_method_learns(name: str, tmp_path: Path) -> None:
    execute(config(name, "loop"), tmp_path, local_engine)
    scores = [e for e in read_events(tmp_path) if isinstance(e, Score)]
    assert min(score.accuracy for score in scores) > 0.5
