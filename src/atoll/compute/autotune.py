"""The autotuner: proves and times an accelerated way on the first batches, and stores the choice.

An accelerated way is compared with the loop in double precision (proof.py). What was chosen and why
is kept with the run, and on this machine for later runs (choice_files.py).
"""

import json
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.compute.accelerated import Kind, Rules
from atoll.compute.cache import UNRESOLVED, Key, cache_key
from atoll.compute.choice import Choice
from atoll.compute.choice_files import choices, name_of, remember, remembered
from atoll.compute.proof import SAMPLE, TOLERANCE, prove
from atoll.core.record import write_whole

__all__ = ["TRIAL", "Subject", "Tuner", "faster", "proved", "summary", "timed", "tune"]

TRIAL = 3  # batches that are timed
FAR = 1e300  # written in place of a difference that is not finite, for JSON
GAIN = 0.95  # the accelerated way must need less than this share of the loop's time
PLANNED = "; in parts: planned"
HALVED = "; in parts: out of memory"


def tune(rules: Rules, kind: Kind, work: str, jobs: Sequence[Any]) -> Choice:
    """The accelerated way if it is proved and these rules prefer it, else the loop."""
    choice = proved(kind, work, jobs)
    return choice if choice.mode == "loop" else rules.finish(kind, jobs, choice)


def proved(kind: Kind, work: str, jobs: Sequence[Any], way: str = "") -> Choice:
    """The first way that gives what the loop gives, in double precision; else the loop."""
    verdict, mode = prove(kind, jobs, way=way), kind.mode(jobs)
    error = min(verdict.difference, FAR)
    if not verdict.way:
        return Choice(work, len(jobs), "loop", verdict.reason, error, TOLERANCE)
    stacked_way = "" if verdict.way == "captured" else verdict.way
    choice = Choice(work, len(jobs), mode, kind.reason, error, TOLERANCE, way=stacked_way)
    return replace(choice, rounding=verdict.rounding)


def faster(choice: Choice, ratio: float, reason: str, otherwise: str) -> Choice:
    """A choice if it is this many times as fast as the loop, by a margin; else the loop."""
    if 1 / ratio > GAIN:
        return replace(choice, mode="loop", reason=otherwise, ratio=ratio, way="")
    return replace(choice, reason=reason, ratio=ratio)


def timed(call: Callable[[], Any]) -> float:
    """Seconds, the better of two tries."""
    seconds = []
    for _ in range(2):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(key: Any) -> str:
    """The name of jobs of this key in the record."""
    return str(key[0]) if isinstance(key, tuple) else "work"


@dataclass(frozen=True)
class Subject:
    """What a choice is about."""

    kind: Kind
    about: Hashable  # identifies it in this process
    cached: Hashable  # identifies it in the cache, together with the device
    device: torch.device
    name: str  # in the record

    @property
    def work(self) -> tuple[Kind, str]:
        """The kind of the jobs, and their name in the record."""
        return self.kind, self.name


class Tuner:
    """Chooses for each key of jobs, and remembers what it chose."""

    def __init__(
        self, mode: str, folder: Path | None, rules: Rules, parts: int = 1, rounds: int = 0
    ) -> None:
        """`parts`: how many stacks jobs of one key are dealt to, by a plan of memory.

        `rounds`: how often jobs of one key will come; 0: unknown.
        """
        self.mode, self.folder, self.rules = mode, folder, rules
        self.parts, self.rounds = parts, rounds
        stored = choices(folder) if folder else {}
        self.choices = {n: c for n, c in stored.items() if not n.startswith(UNRESOLVED)}
        self._decided: dict[Hashable, str] = {}

    def __getitem__(self, about: Hashable) -> Choice:
        """The choice for this key."""
        return self.choices[self._decided[about]]

    def __contains__(self, about: Hashable) -> bool:
        """Whether there is a choice for this key."""
        return about in self._decided

    def key(self, about: Hashable, device: torch.device) -> Key:
        """The key of a choice by these rules: timed and fixed choices have different keys."""
        return cache_key((about, self.rules.name), device)

    def stack(
        self,
        kind: Kind,
        key: Hashable,
        jobs: Sequence[Any],
        device: torch.device,
        steps: int | None = None,
    ) -> Choice:
        """How to run jobs of this key; tuned once, even if their number changes later.

        If their `steps` in all rounds are too few to repay the tuning, they run one by one.
        """
        if key in self:  # names for the cache take time
            return self[key]
        size = len(jobs).bit_length()  # a choice for 60 members also holds for 50
        few = steps is not None and self.rounds and self.rounds * steps < 2 * _trial(len(jobs))
        if few and self.mode != "stacked":
            little = Choice(summary(key), len(jobs), "loop", "too little to try both ways")
            return self.decide(key, self.key((key, size), device), lambda: little)
        return self.tuned(Subject(kind, key, (key, size), device, summary(key)), jobs)

    def tuned(self, subject: Subject, jobs: Sequence[Any]) -> Choice:
        """Decide by a proof alone where the mode asks for it, else by the rules."""
        if subject.about in self:
            return self[subject.about]
        key = self.key(subject.cached, subject.device)
        if self.mode == subject.kind.mode(jobs):
            return self.decide(subject.about, key, lambda: proved(*subject.work, jobs))
        find = lambda: tune(self.rules, *subject.work, jobs)  # noqa: E731
        return self.decide(subject.about, key, lambda: remembered(key, find))

    def proved(self, subject: Subject, jobs: Sequence[Any]) -> Choice:
        """Decide by a proof alone, in any mode."""
        if subject.about in self:
            return self[subject.about]
        key = cache_key(subject.cached, subject.device)
        find = lambda: proved(*subject.work, jobs)  # noqa: E731
        return self.decide(subject.about, key, lambda: remembered(key, find))

    def decide(self, about: Hashable, key: Key, find: Callable[[], Choice]) -> Choice:
        """The known choice of this name, else the result of `find`."""
        if about not in self:
            if key.name not in self.choices:
                self.note(key.name, find())
            self._decided[about] = key.name
        return self[about]

    def refuse(self, job: Any, reason: str) -> None:
        """Record why a job is not stacked."""
        self.note(name_of(reason), Choice(type(job).__name__, 1, "loop", reason))

    def halve(self, about: Hashable) -> None:
        """Deal the jobs to twice as many stacks."""
        choice = self[about]
        reason = choice.reason.removesuffix(HALVED).removesuffix(PLANNED) + HALVED
        self.set(self._decided[about], replace(choice, parts=2 * choice.parts, reason=reason))

    def refute(self, about: Hashable, reason: str) -> None:
        """Run such jobs by the loop from now on, in later runs on this machine too."""
        name = self._decided[about]
        choice = replace(self.choices[name], mode="loop", reason=reason, refuted=reason)
        self.set(name, choice)
        if not name.startswith(UNRESOLVED):
            remember(name, choice)

    def note(self, name: str, choice: Choice) -> None:
        """Remember a choice, with the run too, so that it resumes the same way."""
        if name not in self.choices:
            if self.parts > choice.parts and choice.mode == "stacked":
                choice = replace(choice, parts=self.parts, reason=choice.reason + PLANNED)
            self.set(name, choice)

    def set(self, name: str, choice: Choice) -> None:
        """Store a choice."""
        self.choices[name] = choice
        if self.folder:
            body = {key: asdict(value) for key, value in self.choices.items()}
            write_whole(self.folder / "engine.json", json.dumps(body, indent=1).encode() + b"\n")


def _trial(members: int) -> int:
    """The steps that tuning takes.

    Of each job in the sample: twice in double precision, twice in its own, twice timed, and some
    that warm up; and stacks of all.
    """
    return TRIAL * (8 * min(members, SAMPLE) + 2 * members)
