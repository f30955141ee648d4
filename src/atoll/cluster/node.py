"""A node's side: checks before anything trains, and the run of one block. Knows nothing of Ray."""

import json
import os
import secrets
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.cluster.collector import GO, REPLACED
from atoll.cluster.failures import as_text
from atoll.cluster.parcel import pack, unpack
from atoll.compute.executor import JobExecutor
from atoll.core.errors import InterruptedRunError
from atoll.core.record import CHECKPOINT
from atoll.core.source import source
from atoll.core.storage import FolderLock
from atoll.engines.local import LocalEngine
from atoll.runs.config import RunConfig, resolve
from atoll.runs.loop import Progress
from atoll.runs.memory import FEWEST, points_per_stack
from atoll.runs.parts import Parts, parts
from atoll.runs.steps import StepCounter
from atoll.runs.sweep import Point, sweep

__all__ = ["Driver", "check", "run_block"]

BETWEEN = 0.5  # seconds between two reports
PATIENCE = 120.0  # seconds to wait for a record that a dying worker still locks

Spec = Mapping[str, Any]  # a request of the driver to a node: plain values


class Driver(Protocol):
    """The methods of the driver that a node calls; see `Collector`."""

    def begin(self, block: str, attempt: str, where: str) -> str:
        """Register the start of an attempt on this node."""

    def fetch(self, path: str) -> bytes:
        """The driver's files of a point."""

    def put(self, block: str, attempt: str, path: str, parcel: bytes) -> str:
        """Send a point."""

    def report(self, block: str, attempt: str, rounds: str, of: str) -> str:
        """Report progress; returns whether to continue."""


def check(spec: Spec) -> dict[str, Any]:
    """Describe this node, and why it cannot run the blocks of a sweep, if it cannot."""
    facts: dict[str, Any] = {"source": source(), "error": ""}
    if facts["source"] != spec["source"]:
        return facts
    try:
        _enter(spec)
        for text in spec["configs"]:
            config = _config(text)
            run_parts = parts(config, {})
            run_parts.client(run_parts.scenario.clients[0])
    except Exception as error:
        facts["error"] = as_text(error)
    return facts


def _sees_folder(spec: Spec) -> bool:
    """Whether this node sees the sweep's folder and may write to it."""
    return bool(spec["shared"] and os.access(Path(spec["folder"]) / spec["token"], os.W_OK))


def _enter(spec: Spec) -> None:
    """Use the driver's working directory if it exists: config paths are relative to it."""
    if Path(spec["home"]).is_dir():
        os.chdir(spec["home"])


def _config(text: str) -> RunConfig:
    return resolve(tomllib.loads(text), "the driver's config")


def run_block(spec: Spec, driver: Driver, where: str) -> dict[str, Any]:
    """Run or resume the points of a block; return the failures and the duration."""
    began, attempt = time.monotonic(), secrets.token_hex(8)
    order = driver.begin(str(spec["block"]), attempt, where)
    result: dict[str, Any] = {"failed": {}, "interrupted": order != GO, "steps": {}, "choices": {}}
    if order == GO:
        try:
            torch.set_num_threads(spec["threads"])
            _enter(spec)
            shared = _sees_folder(spec)
            with _workplace(spec, driver, shared) as (members, scratch):
                job = _BlockRun(spec, driver, members, scratch, attempt)
                job.sends = not shared
                result |= job.run()
        except Exception as error:  # an error of the whole block: no disk, another config, a lock
            result["failed"] = {str(n): as_text(error) for n in spec["numbers"]}
    total = time.monotonic() - began
    return {**result, "seconds": total, "overhead": total - result.get("trained", 0.0)}


@contextmanager
def _workplace(spec: Spec, driver: Driver, shared: bool) -> Iterator[tuple[list[Point], Path]]:
    """The points with their folders, and a temporary folder for the block.

    The points are in the sweep's folder if it is `shared`, else in the temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-block-") as name:
        scratch = Path(name)
        root = Path(spec["folder"]) if shared else scratch / "points"
        members = []
        for path, text in zip(spec["paths"], spec["configs"], strict=True):
            folder = root / path
            if spec["count_steps"]:  # count the steps of one whole attempt
                _empty(folder)
            elif not shared:
                unpack(driver.fetch(path), folder)
            members.append(Point({}, _config(text), folder))
        yield members, scratch


def _empty(folder: Path) -> None:
    """Remove the files of an earlier attempt once it stops writing; keep its lock."""
    if not folder.is_dir():
        return
    with FolderLock(folder, PATIENCE) as lock:
        for path in folder.iterdir():
            if path != lock.path:
                path.unlink()


class _BlockRun:
    """One attempt of a block."""

    def __init__(
        self, spec: Spec, driver: Driver, members: Sequence[Point], scratch: Path, attempt: str
    ) -> None:
        self.spec, self.driver, self.members = spec, driver, members
        self.scratch, self.attempt = scratch, attempt
        self.order, self.reported = GO, 0.0
        self.rounds = sum(_lines(point.folder / "times.jsonl") for point in members)
        self.sends = True  # false if this node sees the sweep's folder
        self.sent = {point.folder: _stamp(point.folder) for point in members}

    def run(self) -> dict[str, Any]:
        """Run stack by stack; every point ends with a record or an error."""
        began = time.monotonic()
        size = self._points_per_stack()
        failed: dict[int, BaseException] = {}
        steps: dict[int, int] = {}
        choices: dict[str, Any] = {}
        for start in range(0, len(self.members), size):
            stack = self.members[start : start + size]
            try:
                further, counted, chosen = self._run_stack(stack, self.scratch / str(start))
            except Exception as error:  # an error of the stack: the other stacks continue
                further, counted, chosen = dict.fromkeys(range(len(stack)), error), {}, {}
            failed |= {start + number: error for number, error in further.items()}
            steps |= {start + number: count for number, count in counted.items()}
            choices |= chosen
        trained = time.monotonic() - began
        self._send(always=True)
        stopped = any(isinstance(error, InterruptedRunError) for error in failed.values())
        numbers = self.spec["numbers"]
        return {
            "failed": {
                str(numbers[n]): as_text(error)
                for n, error in sorted(failed.items())
                if not isinstance(error, InterruptedRunError)
            },
            "interrupted": stopped,
            "steps": {str(numbers[n]): count for n, count in steps.items()},
            "choices": choices,
            "trained": trained,
        }

    def _run_stack(
        self, stack: Sequence[Point], scratch: Path
    ) -> tuple[dict[int, BaseException], dict[int, int], dict[str, Any]]:
        """Run one sweep in this process; return errors and steps by point, and the job choices."""
        counters: dict[int, StepCounter] = {}

        def engine(run_parts: Parts, executor: JobExecutor) -> LocalEngine:
            counter = counters[id(run_parts.config)] = StepCounter(executor)
            return LocalEngine(run_parts, counter)

        failed: dict[int, BaseException] = {}
        kwargs: Any = {"watch": self._watch, "stopping": self._is_stopped, "patience": PATIENCE}
        sweep(stack, scratch, engine, resume=True, failed=failed, **kwargs)
        steps = {
            number: counters[id(point.config)].steps
            for number, point in enumerate(stack)
            if id(point.config) in counters
        }
        path = scratch / "engine.json"
        return failed, steps, json.loads(path.read_text()) if path.exists() else {}

    def _points_per_stack(self) -> int:
        """The number of points that fit into this node's memory; does not measure small blocks."""
        count, data = len(self.members), {}  # type: int, dict[str, Any]
        config = self._first_config(data)
        if config is None:
            return count

        def again() -> Parts:
            return parts(config, data)

        run_parts = again()
        if count == 1 or run_parts.concurrency * count < FEWEST:
            return count
        return min(count, points_per_stack(run_parts, again, LocalEngine, self.spec["share"]))

    def _first_config(self, data: dict[str, Any]) -> RunConfig | None:
        """The config of the first point that can start; the sweep reports other points' errors."""
        for point in self.members:
            with suppress(Exception):
                parts(point.config, data)
                return point.config
        return None

    def _watch(self, progress: Progress) -> None:
        """Count a round, send new checkpoints, and ask the driver whether to continue."""
        self.rounds += 1
        now = time.monotonic()
        if now - self.reported < BETWEEN:
            return
        self.reported = now
        of = len(self.members) * progress.stages * progress.rounds
        block = str(self.spec["block"])
        self.order = self.driver.report(block, self.attempt, str(self.rounds), str(of))
        self._send()

    def _is_stopped(self) -> bool:
        return self.order != GO

    def _send(self, always: bool = False) -> None:
        """Send points with a new checkpoint, or all at the end; nothing if the disk is shared."""
        if not self.sends or self.order == REPLACED:
            return
        for point, path in zip(self.members, self.spec["paths"], strict=True):
            stamp = _stamp(point.folder)
            if point.folder.is_dir() and (always or stamp != self.sent[point.folder]):
                parcel = pack(point.folder)
                self.order = self.driver.put(str(self.spec["block"]), self.attempt, path, parcel)
                self.sent[point.folder] = stamp


def _stamp(folder: Path) -> int:
    """The modification time of a run's checkpoint; 0 if there is none."""
    path = folder / CHECKPOINT
    return path.stat().st_mtime_ns if path.exists() else 0


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
