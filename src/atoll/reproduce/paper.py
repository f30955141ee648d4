"""A paper whose tables can be run again: what its module offers, and what all papers share.

A module of a paper holds tables as data and one value, `PAPER`. Everything else is written once:
which settings a command selects, which of them are measured already, where measurements are
stored, and which settings run as one sweep.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from atoll.core.errors import UserError
from atoll.core.options import nearest
from atoll.reproduce.ledger import Ledger
from atoll.reproduce.measured import Measurement, OneFile, Plan, Storage, fingerprint
from atoll.reproduce.origin import provenance
from atoll.runs.loop import Progress
from atoll.runs.result import Run

__all__ = ["Measured", "Missing", "Paper", "Say", "Setting", "Stopwatch", "facts_of", "silent"]

Measured = Mapping[str, Measurement]  # by the name of a setting
Missing = Mapping[str, str]  # by the name of a setting, why it has no measurement
Say = Callable[[str], None]


def silent(text: str) -> None:
    """Report nothing."""


class Setting(Protocol):
    """What is measured at once: usually a method on a data set, with several seeds."""

    @property
    def name(self) -> str:
        """The name that `--only` takes."""

    def values(self) -> dict[str, Any]:
        """The values of its runs, before the plan changes their size."""


S = TypeVar("S", bound=Setting)
P = TypeVar("P", bound=Plan)


def _name(setting: Setting) -> Hashable:
    return setting.name


@dataclass(frozen=True)
class Paper(Generic[S, P]):
    """A paper's tables as data, and the few functions that are its own."""

    name: str  # as in `atoll reproduce NAME`
    settings: tuple[S, ...]  # all that the paper prints
    studies: tuple[S, ...]  # what we add to it
    plan: Callable[..., P]  # (folder, device, tf32=...): the paper's own sizes
    quick: Callable[[Path, str], P]  # (folder, device): a miniature
    tables: Mapping[str, Sequence[S]]  # the settings of each value of `--table`
    identity: Callable[[S, P], Any]  # plain values that identify a measurement
    execute: Callable[[Sequence[S], P, Say], Iterator[tuple[S, Measurement]]]  # as one sweep
    ledger: Callable[[Measured, Missing], Ledger]
    figures: Callable[[Measured], dict[str, bytes]]  # SVG by file name
    form: Callable[[S], Hashable] = _name  # settings of equal form run as one sweep
    storage: Storage = field(default_factory=OneFile)
    miniature: tuple[S, ...] = ()  # the settings of `--quick`, where all of them take too long

    def config(self, setting: S, plan: P) -> str:
        """The fingerprint under which a measurement counts for this plan."""
        return fingerprint(self.identity(setting, plan))

    def complete(self, setting: S, plan: P) -> Measurement | None:
        """The stored measurement of a setting, if it is complete."""
        return self.storage.complete(setting.name, plan, self.config(setting, plan))

    def partly(self, setting: S, plan: P) -> Measurement | None:
        """The stored measurement of a setting, complete or not."""
        return self.storage.partly(setting.name, plan, self.config(setting, plan))

    def stored(self, setting: S, plan: P) -> Measurement | None:
        """The stored measurement of a setting, with as many seeds as it has."""
        sizes = self.storage.sizes(setting.name, plan)
        own = replace(plan, **sizes) if sizes else plan  # type: ignore[type-var]
        return self.partly(setting, own)

    def conflicts(self, setting: S, plan: P) -> list[Path]:
        """The files of other measurements that measuring this setting would replace."""
        return self.storage.conflicts(setting.name, plan, self.config(setting, plan))

    def select(self, only: str, table: str) -> list[S]:
        """The settings that a command asks for: one by name, those of a table, or all."""
        every = {setting.name: setting for setting in (*self.settings, *self.studies)}
        if only and only not in every:
            raise UserError(f"no setting '{only}'", "--only", nearest(only, every))
        if only:
            return [every[only]]
        if table and table not in self.tables:
            raise UserError(f"no table '{table}'", "--table", f"use {', '.join(self.tables)}")
        if table and not self.tables[table]:
            usable = ", ".join(name for name, settings in self.tables.items() if settings)
            what = f"table '{table}' has no setting that atoll can measure"
            raise UserError(what, "--table", f"use {usable}")
        return list(self.tables[table] if table else self.settings)

    def together(self, settings: Sequence[S]) -> list[list[S]]:
        """The settings in groups that run as one sweep."""
        groups: dict[Hashable, list[S]] = {}
        for setting in settings:
            groups.setdefault(self.form(setting), []).append(setting)
        return list(groups.values())

    def measure(self, settings: Sequence[S], plan: P, say: Say = silent) -> dict[str, Measurement]:
        """Measure settings as one sweep and store them; complete ones are read, not run again."""
        stored = {setting.name: self.complete(setting, plan) for setting in settings}
        fresh = [setting for setting in settings if stored[setting.name] is None]
        names, began = [setting.name for setting in fresh], time.monotonic()
        for setting, body in self.execute(fresh, plan, say) if fresh else ():
            head: dict[str, Any] = {"setting": setting.name, "config": self.config(setting, plan)}
            seconds = time.monotonic() - began
            head["provenance"] = provenance(plan.device, seconds, names)
            stored[setting.name] = {**head, **body}
            self.storage.write(setting.name, plan, {**head, **body})
        return {name: one for name, one in stored.items() if one is not None}


class Stopwatch:
    """Reports the progress of a sweep whenever `mark` grows, with the seconds since it began."""

    def __init__(self, say: Say, name: str, mark: Callable[[Progress], tuple[int, ...]]) -> None:
        self.say, self.name, self.mark = say, name, mark
        self.began = time.monotonic()
        self.last: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self.began

    def __call__(self, progress: Progress) -> None:
        """Count a round."""
        mark = self.mark(progress)
        if mark > self.last:
            self.last = mark
            place = f"stage {progress.stage + 1}, round {progress.round + 1}"
            self.say(f"{self.name}: {place}, {self.seconds:.0f} s")


def facts_of(run: Run, *more: str) -> dict[str, Any]:
    """The facts of a run that are stored with a measurement: versions, device, data."""
    return {key: run.facts[key] for key in ("atoll", "packages", "device", "data", *more)}
