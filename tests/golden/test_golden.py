"""Tiny full runs of every method, held to the numbers they gave before."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from atoll import methods
from atoll.core.record import Exclusion, Round, Score, read_events
from atoll.engines.local import local_engine
from atoll.runs.config import RunConfig, change, read, resolve
from atoll.runs.execute import execute

pytestmark = pytest.mark.numerics

HERE = Path(__file__).parent
DATA = {"tasks": "synthetic-text", "domains": "synthetic-images"}  # by split; else a table
# Runs of a method whose parts are replaced; recorded before replacements took the place of options.
REPLACED = {"fedseit-released": "atoll.reproduce.faults.fedseit:released"}
DEMOS = ("demo", "demo-digits")
NUMBERS = ("alone", "chfl", "fedavg")  # methods whose regression has a run, too
CASES = [*methods.names(), *REPLACED, *DEMOS, *(f"{name}-numbers" for name in NUMBERS)]
TOLERANCE = 1e-5


def case(name: str) -> RunConfig:
    """A run of seconds, one client after another, in double precision."""
    values: dict[str, Any] = {"engine.mode": "loop", "engine.device": "cpu", "dtype": "float64"}
    if name in DEMOS:
        return resolve(change(read(name), {**values, "rounds": 2}), name)
    if name in REPLACED:
        values |= {"replace": REPLACED[name], "stages": 2, "epochs": 2, "transfer": "sit"}
        name = name.partition("-")[0]
    data: dict[str, Any] = {}
    if name.endswith("-numbers"):
        name, data = name.removesuffix("-numbers"), {"task": "regression"}
    split = methods.load(name).split
    values |= {"rounds": 3, "data": {"name": DATA.get(split, "synthetic-table"), **data}}
    values |= {} if split == "parties" else {"model.widths": [8]}
    return resolve(change({"name": name, "method": {"name": name}}, values), name)


def found(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The scores and the notes of a run."""
    execute(case(name), folder, local_engine)
    events = read_events(folder)
    assert not [event for event in events if isinstance(event, Exclusion)]  # all are honest
    scores = [dict(vars(event)) for event in events if isinstance(event, Score)]
    for score in scores:
        if not score["errors"]:  # as in the record: classes have none
            del score["errors"]
    return {
        "scores": scores,
        "notes": [vars(event) for event in events if isinstance(event, Round)],
    }


def unlike(kept: Any, now: Any, where: str = "") -> list[str]:
    """Where two values differ; numbers may by a little."""
    if isinstance(kept, dict) and isinstance(now, dict) and kept.keys() == now.keys():
        return [line for key in kept for line in unlike(kept[key], now[key], f"{where}.{key}")]
    if isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        pairs = enumerate(zip(kept, now, strict=True))
        return [line for i, (a, b) in pairs for line in unlike(a, b, f"{where}[{i}]")]
    if isinstance(kept, float) and isinstance(now, float):
        return [] if abs(kept - now) <= TOLERANCE else [f"{where}: {kept} is now {now}"]
    return [] if kept == now else [f"{where}: {kept} is now {now}"]


@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_the_numbers_it_gave_before(name: str, tmp_path: Path) -> None:
    path, now = HERE / f"{name}.json", found(name, tmp_path / "run")
    assert now["scores"]
    assert now["notes"]
    if os.environ.get("ATOLL_GOLDEN") == "renew":
        path.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    assert path.exists(), f"{name} has no golden run: make golden, and commit {path.name}"
    differences = unlike(json.loads(path.read_text()), now)
    assert not differences, (
        f"{name} gives other numbers; if that is meant: make golden, with the reason in the "
        "commit\n" + "\n".join(differences[:10])
    )


def test_every_golden_run_belongs_to_a_method_or_preset() -> None:
    assert sorted(path.stem for path in HERE.glob("*.json")) == sorted(CASES)


@pytest.mark.parametrize(
    ("now", "count"),
    [
        ({"a": [1.0, 2]}, 0),
        ({"a": [1.0 + 9e-6, 2]}, 0),
        ({"a": [1.0 + 2e-5, 2]}, 1),
        ({"a": [1.0, 3]}, 1),
        ({"a": [1.0]}, 1),
        ({"b": [1.0, 2]}, 1),
        ({"a": [float("nan"), 2]}, 1),
    ],
)
def test_a_number_that_moved_is_seen(now: Any, count: int) -> None:
    assert len(unlike({"a": [1.0, 2]}, now)) == count
