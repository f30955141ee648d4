"""A sweep: many runs at once, in step with each other, so that works of one form are one stack.

Each run has a thread, a server and a record of its own and knows nothing of the others. A thread
that has work to be done waits until every other run has some too, or has ended; then all of it is
done at once. Nothing depends on which thread comes first.
"""

import itertools
import json
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.compute.deterministic import deterministic_torch
from atoll.compute.executor import Executor, JobExecutor
from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.record import Record, disk_errors, write_whole
from atoll.data.dataset import Dataset
from atoll.runs.config import RunConfig, change, place, resolve
from atoll.runs.execute import executor_for, prepare
from atoll.runs.loop import Engine, Progress, go
from atoll.runs.parts import Parts
from atoll.runs.result import Run, write_result

__all__ = ["Point", "points", "sweep"]

MakeEngine = Callable[[Parts, JobExecutor], Engine]  # the engine of one run of a sweep
SPARE = 256  # open files beside those of the records


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its place on the axes, its config, its folder."""

    axes: dict[str, Any]
    config: RunConfig
    folder: Path


def points(values: dict[str, Any], axes: Mapping[str, Sequence[Any]], folder: Path) -> list[Point]:
    """Every combination of the axes' values; each gets a folder named after it."""
    with _of_an_axis():
        full = {place(key, values): list(items) for key, items in axes.items()}
    if not full or not all(full.values()):
        raise UserError("an axis without values", "--axis", "write for example --axis seed=0..4")
    if len(full) < len(axes):
        raise UserError("two axes of one option", "--axis", "write one, with the values of both")
    for key, items in full.items():
        twice = [item for item in items if items.count(item) > 1]
        if twice:
            what = f"an axis has the value {twice[0]!r} twice"
            raise UserError(what, f"--axis {key}", "name each value once")
    found = []
    for number, chosen in enumerate(itertools.product(*full.values())):
        here = dict(zip(full, chosen, strict=True))
        with _of_an_axis():
            config = resolve(change(values, here), "sweep")
        found.append(Point(here, config, folder / f"point-{number:04d}"))
    return found


@contextmanager
def _of_an_axis() -> Iterator[None]:
    """What is wrong with a key is told of the option that named it."""
    try:
        yield
    except UserError as error:
        where = error.where.replace("--set", "--axis")
        raise UserError(error.what, where, error.remedy, error.exit_code) from error


class _Meeting:
    """Where runs that have work wait for each other.

    Only the run whose turn it is computes: threads that all want Python's lock back after every
    tensor operation are much slower than the same threads one after another.
    """

    def __init__(self, executor: Executor, count: int) -> None:
        self.executor, self.alive = executor, count
        self.waiting: dict[int, dict[str, Any]] = {}
        self.moment: Moment | None = None  # of the run that came last
        self.results: dict[int, Any] = {}
        self.changed = threading.Condition()
        self.turn = threading.Lock()

    def do(self, number: int, jobs: dict[str, Any], moment: Moment | None) -> dict[str, Any]:
        """The results of one run's jobs, done with those of all the others."""
        if not jobs:
            return {}
        self.turn.release()
        try:
            with self.changed:
                self.waiting[number], self.moment = jobs, moment
                self._work_if_all_wait()
                self.changed.wait_for(lambda: number in self.results)
                result = self.results.pop(number)
        finally:
            self.turn.acquire()
        if isinstance(result, BaseException):
            raise result
        return dict(result)

    def leave(self) -> None:
        """A run has ended; the others wait for one less."""
        with self.changed:
            self.alive -= 1
            self._work_if_all_wait()

    def _work_if_all_wait(self) -> None:
        if not self.waiting or len(self.waiting) < self.alive:
            return
        asked = {n: self.waiting[n] for n in sorted(self.waiting)}
        self.waiting = {}
        together = {f"{n}/{id}": job for n, jobs in asked.items() for id, job in jobs.items()}
        try:
            done = self.executor.do(together, self.moment)
            self.results = {n: {id: done[f"{n}/{id}"] for id in jobs} for n, jobs in asked.items()}
        except Exception as error:  # every run is told
            self.results = dict.fromkeys(asked, error)
        self.changed.notify_all()


class _Seat:
    """A run's place at the meeting, in the form of an executor."""

    def __init__(self, meeting: _Meeting, number: int) -> None:
        self.meeting, self.number, self.mode = meeting, number, meeting.executor.mode

    def do(self, jobs: Mapping[str, Any], moment: Moment | None = None) -> dict[str, Any]:
        """What an executor does."""
        return self.meeting.do(self.number, dict(jobs), moment)


def sweep(  # noqa: PLR0913 - what a caller may set, by keyword
    found: Sequence[Point],
    folder: Path,
    engine: MakeEngine,
    *,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
    failed: dict[int, BaseException] | None = None,
) -> list[Run]:
    """Run all points; one record each, and sweep.json that says which is which.

    A point that fails ends the sweep with its error once the others are done; with `failed`, the
    error is put there by the point's number and the runs of all others are given.
    """
    deterministic = found[0].config.engine_options().deterministic
    with deterministic_torch(deterministic):
        return _sweep(found, _Together(folder, engine, watch, stopping), resume, failed)


@dataclass(frozen=True)
class _Together:
    """What all points of a sweep share."""

    folder: Path
    engine: MakeEngine
    watch: Callable[[Progress], None]
    stopping: Callable[[], bool]


def _sweep(
    found: Sequence[Point],
    shared: _Together,
    resume: bool,
    failed: dict[int, BaseException] | None,
) -> list[Run]:
    data: dict[str, Dataset] = {}
    failures: dict[int, BaseException] = {} if failed is None else failed
    with ExitStack() as records:
        _allow_files(len(found))
        ready = []
        for point in found:
            made, record = prepare(point.config, point.folder, resume, data)
            records.enter_context(record)
            ended = resume and record.ended(point.config.checkpoints)
            ready.append(_Ready(made, record, ended))
        _run(found, shared, ready, failures)
    if failures and failed is None:
        number = min(failures)
        failures[number].add_note(str(found[number].folder))
        raise failures[number]
    return [Run(point.folder) for n, point in enumerate(found) if n not in failures]


@dataclass(frozen=True)
class _Ready:
    """A run that can start: its parts, its open record, whether it has ended before."""

    parts: Parts
    record: Record
    ended: bool


def _allow_files(records: int) -> None:
    """Let this process open a lock file for each record, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = records + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _run(
    found: Sequence[Point],
    shared: _Together,
    ready: Sequence[_Ready],
    failures: dict[int, BaseException],
) -> None:
    """Run all points in threads that meet; errors are put into `failures`."""
    folder = shared.folder
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    index = [{"folder": p.folder.name, "axes": p.axes} for p in found]
    write_whole(folder / "sweep.json", json.dumps(index, indent=1).encode() + b"\n")
    options = found[0].config.engine_options()
    rounds = found[0].config.rounds * ready[0].parts.scenario.stages
    meeting = _Meeting(executor_for(options, folder, rounds), len(found))

    def run(number: int) -> None:
        one, seat = ready[number], _Seat(meeting, number)
        try:
            with meeting.turn:
                if not one.ended:
                    engine = shared.engine(one.parts, seat)
                    go(one.parts, engine, one.record, shared.watch, shared.stopping)
                    write_result(found[number].folder, one.record.extents)
        except BaseException as error:  # raised again by the caller
            failures[number] = error
        finally:
            meeting.leave()

    threads = [
        threading.Thread(target=copy_context().run, args=(run, n), daemon=True)
        for n in range(len(found))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # so that Ctrl-C is heard
