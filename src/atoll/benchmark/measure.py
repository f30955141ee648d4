"""Runs the missing measurements of a benchmark in batches; never repeats a measurement.

A batch is one contender's trials, or its measured runs: one sweep, so that equal jobs of all runs
are one computation. Each data set has a JSON file, written after every batch.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atoll import data
from atoll.benchmark.protocol import CONTENDERS, Plan, Sizes, settings, trial_options, values
from atoll.compute.executor import JobExecutor
from atoll.core.errors import (
    BadMessageError,
    ClientFailedError,
    InterruptedRunError,
    UserError,
)
from atoll.core.options import build, nearest
from atoll.core.record import Message, disk_errors, write_whole
from atoll.engines.local import LocalEngine
from atoll.metrics.scores import primary
from atoll.reproduce.origin import provenance
from atoll.runs.config import resolve
from atoll.runs.parts import Parts
from atoll.runs.result import Run, plain
from atoll.runs.steps import StepCounter
from atoll.runs.sweep import Point, sweep

if TYPE_CHECKING:
    from atoll.cluster.driver import ClusterSweep

__all__ = ["Clock", "Ledger", "names", "run_key"]

Phase = Literal["tuning", "measured"]


@dataclass
class Clock:
    """When to stop: a batch starts only if it can end in time."""

    minutes: float  # 0: never
    longest: float = 0.0  # duration of a batch in seconds
    began: float = field(default_factory=time.monotonic)

    def is_over(self, further: float = 0.0) -> bool:
        """Whether the time will be over in this many seconds."""
        elapsed = time.monotonic() - self.began + further
        return self.minutes > 0 and elapsed > 60 * self.minutes


@dataclass(frozen=True)
class Batch:
    """Runs of one contender in one sweep."""

    phase: Phase
    name: str
    runs: dict[str, dict[str, Any]]  # configs by key


def names(plan: Plan) -> list[str]:
    """The contenders of a plan, in table order."""
    for name in plan.contenders:
        if name not in CONTENDERS:
            raise UserError(f"unknown contender '{name}'", "contenders", nearest(name, CONTENDERS))
    return [name for name in CONTENDERS if not plan.contenders or name in plan.contenders]


def run_key(phase: Phase, name: str, label: str | int, number: int) -> str:
    """The key of a run: `label` is a trial or a setting, `number` a stream or a seed."""
    return f"{phase}/{name}/{label}/{number}"


def sizes_of(name: str) -> Sizes:
    """The sizes of a data set."""
    loaded = data.load(name)
    return Sizes(math.prod(loaded.x.shape[1:]), len(loaded.classes))


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The measurements of one data set, in a file."""

    def __init__(self, path: Path, data: str, plan: Plan, sizes: Sizes | None = None) -> None:
        self.path, self.data, self.plan = path, data, plan
        self.sizes = sizes or sizes_of(data)
        self.runs: dict[str, dict[str, Any]] = {}
        self.batches: list[dict[str, Any]] = []

    @staticmethod
    def read(path: Path) -> "Ledger":
        """Read the measurements from a file."""
        try:
            with disk_errors(path):
                body = json.loads(path.read_bytes())
            plan = build(Plan, body["plan"], str(path))
            ledger = Ledger(path, body["data"], plan, Sizes(**body["sizes"]))
            ledger.runs, ledger.batches = body["runs"], body["batches"]
        except (ValueError, KeyError, TypeError) as error:
            remedy = "remove it, and measure again with atoll bench fcl"
            raise UserError("not a file of measurements", str(path), remedy) from error
        return ledger

    @staticmethod
    def open(path: Path, data: str, plan: Plan) -> "Ledger":
        """Read the measurements of a file if it exists, to continue with this plan."""
        ledger = Ledger(path, data, plan)
        if path.exists():
            before = Ledger.read(path)
            ledger.runs, ledger.batches = before.runs, before.batches
        return ledger

    def write(self) -> None:
        """Write the file atomically."""
        body = {
            "data": self.data, "plan": asdict(self.plan), "sizes": asdict(self.sizes),
            "batches": self.batches, "runs": self.runs,
        }  # fmt: skip
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(plain(body), indent=1).encode() + b"\n")

    def lacking(self) -> Iterator[Batch]:
        """The missing batches; those after tuning use its result."""
        phases: tuple[Phase, ...] = ("tuning", "measured")
        for phase in phases:
            for name in names(self.plan):
                configs = self._tuning(name) if phase == "tuning" else self._measured(name)
                runs = {key: one for key, one in configs.items() if not self._has(key, one)}
                if runs:
                    yield Batch(phase, name, runs)

    def is_whole(self, name: str) -> bool:
        """Whether a contender is tuned and measured as planned."""
        tuning = self._tuning(name)
        if not all(self._has(key, config) for key, config in tuning.items()):
            return False
        return all(self._has(key, config) for key, config in self._measured(name).items())

    def store(self, key: str, config: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """Store the results of a run, with its config."""
        about = {"digest": _digest(config), "method": config["method"], "rounds": config["rounds"]}
        self.runs[key] = {**about, **entry}

    def _has(self, key: str, config: Mapping[str, Any]) -> bool:
        return key in self.runs and self.runs[key]["digest"] == _digest(config)

    def _tuning(self, name: str) -> dict[str, dict[str, Any]]:
        return {
            run_key("tuning", name, trial, number): values(
                name, self.data, self.plan, options, True, number
            )
            for trial, options in enumerate(trial_options(name, self.plan))
            for number in range(self.plan.streams)
        }

    def _measured(self, name: str) -> dict[str, dict[str, Any]]:
        tuned = self.tuned(name)[1]
        return {
            run_key("measured", name, label, number): values(
                name, self.data, self.plan, tuned | change, False, number
            )
            for label, change in settings(name, self.plan, self.sizes).items()
            for number in range(self.plan.seeds)
        }

    def tuned(self, name: str) -> tuple[float, dict[str, Any]]:
        """The best mean accuracy on validation streams, with its options; the first if equal."""
        results = []
        for trial, options in enumerate(trial_options(name, self.plan)):
            keys = [run_key("tuning", name, trial, n) for n in range(self.plan.streams)]
            scores = [self.runs[key].get("accuracy") for key in keys]
            if None not in scores:
                results.append((float(np.mean([s for s in scores if s is not None])), options))
        if not results:
            remedy = "lower the rates of its ranges"
            raise UserError(f"every trial of '{name}' failed", self.data, remedy)
        return max(results, key=lambda one: one[0])

    def measure(
        self,
        device: str,
        clock: Clock,
        say: Callable[[str], None],
        sweeper: "ClusterSweep | None" = None,
    ) -> bool:
        """Run the missing measurements, here or on a cluster; returns False if time runs out."""
        for batch in self.lacking():
            if clock.is_over(clock.longest):
                return False
            began = time.monotonic()
            entries = _run(batch, device, self.path.parent, clock, sweeper)
            if entries is None:
                return False
            seconds = time.monotonic() - began
            clock.longest = max(clock.longest, seconds)
            for key, entry in entries.items():
                self.store(key, batch.runs[key], {**entry, "seconds": seconds / len(entries)})
            what = f"{batch.phase} {batch.name}"
            self.batches.append({"what": what, **provenance(device, seconds, [])})
            self.write()
            say(f"{self.data}, {what}: {len(entries)} runs in {seconds:.1f} s")
        return True


def _run(
    batch: Batch, device: str, home: Path, clock: Clock, sweeper: "ClusterSweep | None"
) -> dict[str, dict[str, Any]] | None:
    """The entries of a batch; None if time ran out."""
    run = _swept if sweeper is None else partial(_swept_on, sweeper)
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix="work-") as scratch:
        members = []
        for number, config in enumerate(batch.runs.values()):
            placed = {**config, "engine": {"device": device, "packing": False}}
            folder = Path(scratch) / f"point-{number:04d}"
            members.append(Point({}, resolve(placed, "bench"), folder))
        failed: dict[int, BaseException] = {}
        steps = run(members, Path(scratch), clock, failed)
        if any(isinstance(error, InterruptedRunError) for error in failed.values()):
            return None
        entries: dict[str, dict[str, Any]] = {}
        for number, key in enumerate(batch.runs):
            if number in failed:
                entries[key] = {"failed": _reason(failed[number], batch.phase)}
            else:
                entries[key] = _entry(Run(members[number].folder), steps[number])
    return entries


def _swept(
    members: list[Point], folder: Path, clock: Clock, failed: dict[int, BaseException]
) -> dict[int, int]:
    """Run a batch in this process; returns the gradient steps of each finished run."""
    counters: dict[int, StepCounter] = {}

    def engine(parts: Parts, executor: JobExecutor) -> LocalEngine:
        counter = StepCounter(executor)
        counters[id(parts.config)] = counter
        return LocalEngine(parts, counter)

    sweep(members, folder, engine, stopping=clock.is_over, failed=failed)
    ended = {n: point for n, point in enumerate(members) if n not in failed}
    return {number: counters[id(point.config)].steps for number, point in ended.items()}


def _swept_on(
    sweeper: "ClusterSweep",
    members: list[Point],
    folder: Path,
    clock: Clock,
    failed: dict[int, BaseException],
) -> dict[int, int]:
    """Run a batch on a cluster; returns the gradient steps of each finished run."""
    try:
        sweeper(members, folder, stopping=clock.is_over, failed=failed)
    except InterruptedRunError as error:
        failed[0] = error
    return dict(sweeper.steps)


def _reason(error: BaseException, phase: Phase) -> str:
    """Why a trial has no result: a site failed, for example with non-finite numbers."""
    if phase == "tuning" and isinstance(error, BadMessageError | ClientFailedError):
        return str(error)
    raise error


def _entry(run: Run, steps: int) -> dict[str, Any]:
    """The numbers of a run; bytes are those of training, without tests."""
    metrics, result = run.metrics[run.headline], primary(run.events, run.headline)
    stages = range(len(result.stages))
    accuracies = [result.accuracy[:, : stage + 1, stage] for stage in stages]  # (clients, tasks)
    crossed = [e for e in run.events if isinstance(e, Message) and e.action != "check"]
    return {
        "accuracy": metrics["final_accuracy"],
        "forgetting": metrics["forgetting_best_last"],
        "by_stage": [float(np.nanmean(accuracy)) for accuracy in accuracies],
        "bytes": sum(message.bytes for message in crossed),
        "steps": steps,
    }
