"""Measures random cells again and compares them with what is stored."""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import stats

from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.core.source import source
from atoll.reproduce.measured import Measurement, Storage
from atoll.reproduce.origin import machine

__all__ = ["Check", "prediction_interval", "verify"]

LEVEL = 0.99
LEAST = 0.001  # half-width of an interval, where all stored runs agree
SCORES = ("accuracy", "tasks", "union", "matrix")  # what a run stores of its tests
Say = Callable[[str], None]


class Measurable(Protocol):
    """What is needed of a paper: its settings, what is stored of them, and how to measure them."""

    @property
    def name(self) -> str:
        """The name of the paper."""

    @property
    def settings(self) -> Sequence[Any]:
        """What the paper prints."""

    @property
    def studies(self) -> Sequence[Any]:
        """What we add to it."""

    @property
    def storage(self) -> Storage:
        """Where measurements lie."""

    def stored(self, setting: Any, plan: Any) -> Measurement | None:
        """The stored measurement of a setting."""

    def measure(self, settings: Sequence[Any], plan: Any, say: Say) -> dict[str, Measurement]:
        """Measure settings as one sweep."""


@dataclass(frozen=True)
class Check:
    """A cell that was measured again."""

    setting: str
    cell: str  # the run and the score
    stored: float
    again: float
    low: float
    high: float
    exact: bool  # same GPU model and source: all bits must be equal

    @property
    def passed(self) -> bool:
        """Whether the cell is the same: to the last bit, or inside its prediction interval."""
        return self.again == self.stored if self.exact else self.low <= self.again <= self.high

    def __str__(self) -> str:
        """The check in words."""
        rule = "equal bits" if self.exact else f"{self.low:.4f} to {self.high:.4f}"
        result = "passed" if self.passed else "FAILED"
        return (
            f"{result}: {self.setting}, {self.cell}: {self.stored!r}, again {self.again!r} ({rule})"
        )


def verify(paper: Measurable, plan: Any, count: int, say: Say) -> list[Check]:
    """Measure `count` random cells again, each of another setting where there are enough."""
    every = [*paper.settings, *paper.studies]
    stored = {setting.name: (setting, one) for setting in every
              if (one := paper.stored(setting, plan))}  # fmt: skip
    if not stored:
        raise UserError("there is nothing to verify", str(plan.folder), "measure something first")
    draws = Stream.of("verify", paper.name, source()).numpy()
    chosen = draws.permutation(sorted(stored))[:count]
    checks = []
    for name in map(str, chosen):
        setting, one = stored[name]
        check = _check(paper, plan, setting, one, draws, say)
        say(str(check))
        checks.append(check)
    return checks


def _check(
    paper: Measurable, plan: Any, setting: Any, one: Measurement, draws: Any, say: Say
) -> Check:
    place = int(draws.integers(len(one["runs"])))
    run = one["runs"][place]
    leaf = str(draws.choice(sorted(_scores(run))))
    exact = _same_machine_and_source(plan, one, run)
    own = _plan_of(paper, plan, setting, one, run)
    with tempfile.TemporaryDirectory() as folder:
        own = replace(own, folder=Path(folder))
        names = {setting.name}
        if exact:  # a sweep of the same settings
            names |= {*(one.get("provenance") or {}).get("together", ())}
        _copy_others(paper, plan, own, names)
        several = [s for s in (*paper.settings, *paper.studies) if s.name in names]
        fresh = paper.measure(several, own, say)[setting.name]
    again = next(r for r in fresh["runs"] if _key(r) == _key(run))
    low, high = prediction_interval([_scores(r)[leaf] for r in one["runs"] if leaf in _scores(r)])
    label = f"seed {run['seed']}, {leaf}"
    return Check(setting.name, label, _scores(run)[leaf], _scores(again)[leaf], low, high, exact)


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["seed"], run.get("feature_seed")


def _same_machine_and_source(plan: Any, one: Measurement, run: dict[str, Any]) -> bool:
    origin = one.get("provenance") or run.get("provenance") or {}
    return (origin.get("machine"), origin.get("source")) == (machine(plan.device), source())


def _plan_of(
    paper: Measurable, plan: Any, setting: Any, one: Measurement, run: dict[str, Any]
) -> Any:
    """The plan that a setting was measured with: seeds, precision and mode."""
    sizes: dict[str, Any] = paper.storage.sizes(setting.name, plan)
    if paper.storage.pairs_seeds:
        sizes = {"seeds": (run["seed"],)}
    engine = {**one.get("engine", {}), **run.get("engine", {}), **run.get("model", {})}
    own = [field.name for field in fields(plan) if field.name not in ("folder", "device", "rates")]
    return replace(plan, **{key: engine[key] for key in own if key in engine}, **sizes)


def _copy_others(paper: Measurable, plan: Any, own: Any, names: set[str]) -> None:
    """Give the new measurement what others stored: a study takes the rate of its setting."""
    left_out = [setting for setting in (*paper.settings, *paper.studies) if setting.name in names]
    stale = {path.name for s in left_out for path in paper.storage.paths(s.name, plan)}
    for path in plan.folder.glob("*.json"):
        if path.name not in stale and "config" in json.loads(path.read_text()):
            shutil.copy(path, own.folder / path.name)


def _scores(run: dict[str, Any]) -> dict[str, float]:
    """All accuracies of a run, by their place."""
    return dict(_leaves({key: run[key] for key in SCORES if key in run}))


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{place} {key}".strip())
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{place} {number}".strip())
    else:
        yield place, float(value)


def prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval for one more run (t, 99 %); everything where there is one run alone."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    half = max(LEAST, quantile * deviation * math.sqrt(1 + 1 / len(values)))
    return mean - half, mean + half
