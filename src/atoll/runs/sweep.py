"""A sweep: many runs in lockstep, so that jobs with the same key form one stack.

Each run has a separate thread, server and record, and does not access the others. A thread
with jobs waits until every other run has jobs too or has ended; then all jobs run together.
The results do not depend on the order of the threads.
"""

import itertools
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from atoll.compute.deterministic import deterministic_torch
from atoll.compute.executor import Executor, JobExecutor
from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.record import Record
from atoll.data.dataset import Dataset
from atoll.runs.config import RunConfig, change, place, resolve
from atoll.runs.execute import prepare
from atoll.runs.executors import executor_for
from atoll.runs.folders import write_index
from atoll.runs.loop import Engine, Progress, go
from atoll.runs.parts import Parts
from atoll.runs.result import Run, write_result

__all__ = ["Point", "Sweeper", "points", "sweep"]

MakeEngine = Callable[[Parts, JobExecutor], Engine]  # the engine of one run of a sweep
SPARE = 256  # open files in addition to those of the records


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its values on the axes, its config, its folder."""

    axes: dict[str, Any]
    config: RunConfig
    folder: Path


def points(values: dict[str, Any], axes: Mapping[str, Sequence[Any]], folder: Path) -> list[Point]:
    """Every combination of the axes' values, each with a numbered folder."""
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
    members = []
    for number, chosen in enumerate(itertools.product(*full.values())):
        setting = dict(zip(full, chosen, strict=True))
        with _of_an_axis():
            config = resolve(change(values, setting), "sweep")
        members.append(Point(setting, config, folder / f"point-{number:04d}"))
    return members


class Sweeper(Protocol):
    """A function that runs the points of a sweep: `sweep` in this process, or a cluster."""

    def __call__(
        self,
        members: Sequence[Point],
        folder: Path,
        *,
        resume: bool = False,
        watch: Callable[[Progress], None] = ...,
        stopping: Callable[[], bool] = ...,
        failed: dict[int, BaseException] | None = None,
    ) -> list[Run]:
        """Run all points, as `sweep` does."""


@contextmanager
def _of_an_axis() -> Iterator[None]:
    """Name --axis instead of --set in errors."""
    try:
        yield
    except UserError as error:
        where = error.where.replace("--set", "--axis")
        raise UserError(error.what, where, error.remedy, error.exit_code) from error


class _Meeting:
    """A barrier for runs with jobs.

    Only one run computes at a time: threads that compete for Python's global lock after every
    tensor operation are much slower than the same threads in sequence.
    """

    def __init__(self, executor: Executor, count: int) -> None:
        self.executor, self.alive = executor, count
        self.waiting: dict[int, dict[str, Any]] = {}
        self.moment: Moment | None = None  # moment of the last run that arrived
        self.results: dict[int, Any] = {}
        self.changed = threading.Condition()
        self.turn = threading.Lock()

    def do(self, number: int, jobs: dict[str, Any], moment: Moment | None) -> dict[str, Any]:
        """The results of one run's jobs, computed together with those of all other runs."""
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
        """Remove a finished run, so that the others no longer wait for it."""
        with self.changed:
            self.alive -= 1
            self._work_if_all_wait()

    def _work_if_all_wait(self) -> None:
        if not self.waiting or len(self.waiting) < self.alive:
            return
        waiting = {n: self.waiting[n] for n in sorted(self.waiting)}
        self.waiting = {}
        together = {f"{n}/{id}": job for n, jobs in waiting.items() for id, job in jobs.items()}
        try:
            results = self.executor.do(together, self.moment)
            self.results = {
                n: {id: results[f"{n}/{id}"] for id in jobs} for n, jobs in waiting.items()
            }
        except Exception as error:  # every run gets the error
            self.results = dict.fromkeys(waiting, error)
        self.changed.notify_all()


class _Seat:
    """A run's access to the barrier, as an executor."""

    def __init__(self, meeting: _Meeting, number: int) -> None:
        self.meeting, self.number, self.mode = meeting, number, meeting.executor.mode

    def do(self, jobs: Mapping[str, Any], moment: Moment | None = None) -> dict[str, Any]:
        """The results of jobs, as returned by an executor."""
        return self.meeting.do(self.number, dict(jobs), moment)


def sweep(  # noqa: PLR0913 - what a caller may set, by keyword
    members: Sequence[Point],
    folder: Path,
    engine: MakeEngine,
    *,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
    failed: dict[int, BaseException] | None = None,
    patience: float = 0.0,
) -> list[Run]:
    """Run all points; write one record each, and sweep.json, which lists them.

    If a point fails, its error is raised after the others end; at once if it cannot begin.
    `failed` collects errors instead, and the other runs are returned. `patience`: see `prepare`.
    """
    failures: dict[int, BaseException] = {} if failed is None else failed
    options = members[0].config.engine_options()
    with deterministic_torch(options.deterministic), ExitStack() as records:
        ready = _prepared(members, folder, resume, patience, records, failed)
        if not ready:
            return []
        meeting = _meeting(ready, folder)

        def run(number: int) -> None:
            parts, record, ended = ready[number]
            try:
                with meeting.turn:
                    if not ended:
                        go(parts, engine(parts, _Seat(meeting, number)), record, watch, stopping)
                        write_result(members[number].folder, record.extents)
            except BaseException as error:  # raised again below, in the caller's thread
                failures[number] = error
            finally:
                meeting.leave()

        _in_threads(run, list(ready))
    if failures and failed is None:
        raise _first(failures, members)
    return [Run(point.folder) for n, point in enumerate(members) if n not in failures]


def _meeting(ready: Mapping[int, tuple[Parts, Record, bool]], folder: Path) -> _Meeting:
    """The barrier for the points that can begin."""
    first = next(iter(ready.values()))[0]
    rounds = first.config.rounds * first.scenario.stages
    return _Meeting(executor_for(first.config.engine_options(), folder, rounds), len(ready))


def _first(failures: Mapping[int, BaseException], members: Sequence[Point]) -> BaseException:
    """The error of the first failed point, with its folder."""
    number = min(failures)
    failures[number].add_note(str(members[number].folder))
    return failures[number]


def _prepared(
    members: Sequence[Point],
    folder: Path,
    resume: bool,
    patience: float,
    records: ExitStack,
    failed: dict[int, BaseException] | None,
) -> dict[int, tuple[Parts, Record, bool]]:
    """The parts, open record and finished state of each point; also writes sweep.json.

    With `failed`, it collects the errors of points that cannot be prepared; they have no entry.
    """
    _allow_files(len(members))
    data: dict[str, Dataset] = {}
    ready = {}
    for number, point in enumerate(members):
        try:
            parts, record = prepare(point.config, point.folder, resume, data, patience)
            records.enter_context(record)
            ready[number] = (parts, record, resume and record.ended(point.config.checkpoints))
        except Exception as error:
            if failed is None:
                raise
            failed[number] = error
    write_index(members, folder)
    return ready


def _in_threads(run: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call a function with each number in a separate thread, until all have ended."""
    threads = [
        threading.Thread(target=copy_context().run, args=(run, number), daemon=True)
        for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # so that Ctrl-C interrupts


def _allow_files(records: int) -> None:
    """Raise this process's limit of open files for the lock of each record, as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = records + SPARE
    if soft != resource.RLIM_INFINITY and soft < files:
        limit = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
