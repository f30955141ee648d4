"""The driver of a sweep on a cluster: splits points into blocks and collects their records."""

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atoll.cluster.blocks import Block, Table, blocks
from atoll.cluster.failures import NodeError, from_text
from atoll.cluster.options import ClusterOptions
from atoll.core.errors import EXIT_DATA_MISSING, EXIT_USER, InterruptedRunError, UserError
from atoll.core.plugins import MEMORY
from atoll.core.record import Record
from atoll.core.source import source
from atoll.core.storage import FolderLock, disk_errors, write_whole
from atoll.runs.config import to_toml
from atoll.runs.folders import refuse_other_config, write_index
from atoll.runs.loop import Progress
from atoll.runs.result import Run

if TYPE_CHECKING:
    from atoll.runs.sweep import Point

__all__ = ["Backend", "ClusterSweep", "Watch"]

Watch = Callable[[Table], None]
POLL = 0.5  # seconds between two polls of the cluster
APPEARS = 60.0  # timeout in seconds until a record written by a node is visible here
PATIENCE = 60.0  # seconds to wait for a record that a worker of an earlier driver still locks


class Backend(Protocol):
    """The interface of a cluster to the driver; `ray.py` implements it for Ray."""

    def slots(self, threads: int, gpus: float) -> int:
        """The number of blocks that can run at the same time."""

    def has_gpus(self) -> bool:
        """Whether any node has a GPU."""

    def check(self, spec: str) -> Mapping[str, str]:
        """The result of `node.check` on each node, by node name."""

    def open(self, folder: Path) -> None:
        """Start the collector of a sweep."""

    def submit(self, spec: str, threads: int, gpus: float) -> Any:
        """Queue a block and return a handle."""

    def ended(self, handles: Sequence[Any], seconds: float) -> list[tuple[Any, str]]:
        """Finished blocks, with the result of `node.run_block` or a NodeError as text."""

    def states(self) -> str:
        """The result of `Collector.states`."""

    def stop(self, waiting: Sequence[Any]) -> None:
        """Ask running blocks to save and end; queued blocks do not start."""

    def close(self) -> None:
        """Stop the collector of a sweep."""


@dataclasses.dataclass(frozen=True)
class ClusterSweep:
    """Runs sweeps on a cluster; called like `runs.sweep.sweep`.

    It always resumes from the sweep's folder: finished points do not run again.
    """

    backend: Backend
    options: ClusterOptions
    show: Watch = lambda table: None
    count_steps: bool = False  # if true, an attempt of a block restarts its points
    steps: dict[int, int] = dataclasses.field(default_factory=dict)  # of the last sweep, by point

    def __call__(
        self,
        members: Sequence["Point"],
        folder: Path,
        *,
        resume: bool = False,
        watch: Callable[[Progress], None] = lambda progress: None,
        stopping: Callable[[], bool] = lambda: False,
        failed: dict[int, BaseException] | None = None,
    ) -> list[Run]:
        """Run the unfinished points; calls `show` with the table, and never `watch`."""
        failures: dict[int, BaseException] = {} if failed is None else failed
        _refuse_objects(members)
        with _folder(members, folder.resolve()) as (home, todo):
            if todo:
                self._run(members, home, todo, stopping, failures)
        if failures and failed is None:
            raise failures[min(failures)]
        return [Run(point.folder) for n, point in enumerate(members) if n not in failures]

    def _run(
        self,
        members: Sequence["Point"],
        home: Path,
        todo: Sequence[int],
        stopping: Callable[[], bool],
        failures: dict[int, BaseException],
    ) -> None:
        """Check the nodes, then run all blocks to their end."""
        threads = max(members[n].config.engine_options().threads for n in todo) or 1
        gpus = self._gpus(members[todo[0]])
        with _token(home) as token:
            base: dict[str, Any] = {
                "folder": str(home), "token": token, "home": str(Path.cwd()),
                "source": source(), "threads": threads, "shared": self.options.shared,
                "share": min(1.0, gpus), "gpus": gpus, "count_steps": self.count_steps,
            }  # fmt: skip
            self._check(members, base, todo)
            write_index(members, home)
            slots = self.backend.slots(threads, gpus)
            if slots < 1:
                raise _too_small(self.options, threads, gpus)
            dealt = blocks(members, todo, slots, self.options.points, gpus > 0)
            self.steps.clear()
            table = Table(dealt, len(members) - len(todo))
            follow = _Follower(self, members, table, failures)
            self.backend.open(home)
            try:
                for block in dealt:
                    spec = json.dumps(base | _of_block(block, members, home))
                    follow.handles[self.backend.submit(spec, threads, gpus)] = block
                follow.run(stopping)
            finally:
                self.backend.close()
                _write_blocks(home, follow.table)

    def _gpus(self, point: "Point") -> float:
        """The GPUs of a block: the requested number, else 1 if the run may use a GPU."""
        if self.options.gpus is not None:
            return self.options.gpus
        device = point.config.engine_options().device
        return 1.0 if device != "cpu" and self.backend.has_gpus() else 0.0

    def _check(self, members: Sequence["Point"], base: dict[str, Any], todo: Sequence[int]) -> None:
        """Refuse nodes with another version of atoll, or without the data of the points."""
        kinds: dict[str, str] = {}
        for number in todo:
            config = members[number].config
            kind = json.dumps([config.data, config.public, config.method["name"], config.replace])
            kinds.setdefault(kind, to_toml(config))
        answers = self.backend.check(json.dumps(base | {"configs": list(kinds.values())}))
        for node, text in answers.items():
            _refuse_node(node, text, base["source"])


class _Follower:
    """Monitors the blocks of a sweep until all have ended."""

    def __init__(
        self,
        sweep: ClusterSweep,
        members: Sequence["Point"],
        table: Table,
        failures: dict[int, BaseException],
    ) -> None:
        self.backend, self.show, self.steps = sweep.backend, sweep.show, sweep.steps
        self.members = members
        self.table, self.failures = table, failures
        self.handles: dict[Any, Block] = {}

    def run(self, stopping: Callable[[], bool]) -> None:
        """Wait for all blocks; raises InterruptedRunError if the user stopped them."""
        while self.handles:
            for handle, text in self.backend.ended(list(self.handles), POLL):
                self._end(self.handles.pop(handle), text)
            self._update(json.loads(self.backend.states()))
            self.show(self.table)
            if stopping():  # repeat it: a restarted collector has lost the request
                waiting = [h for h, block in self.handles.items() if block.state == "waiting"]
                self.backend.stop(waiting)
        if self.table.count("interrupted") or self.table.count("waiting"):
            raise InterruptedRunError

    def _update(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the reported states of the nodes to the blocks."""
        for block in self.table.blocks:
            state = states.get(str(block.number))
            if state is None:
                continue
            block.where, block.attempts = state["where"], state["attempts"]
            block.rounds, block.of = state.get("rounds", 0), state.get("of", 0)
            if block.state == "waiting" and block in self.handles.values():
                block.state = "running"

    def _end(self, block: Block, text: str) -> None:
        """Handle the end of a block: finished, failed or interrupted."""
        result = json.loads(text)
        if "error" in result:  # the task itself failed: all workers died, or atoll is not installed
            result = {"failed": dict.fromkeys(map(str, block.points), result["error"]), **result}
        block.seconds, block.overhead = result.get("seconds", 0.0), result.get("overhead", 0.0)
        block.choices = result.get("choices", {})
        self.steps |= {int(number): count for number, count in result.get("steps", {}).items()}
        errors: dict[int, Exception] = {
            int(number): from_text(one) for number, one in result["failed"].items()
        }
        if not result["interrupted"]:
            errors |= self._without_record([n for n in block.points if n not in errors])
        self.failures |= errors
        block.state = "interrupted" if result["interrupted"] else "failed" if errors else "done"

    def _without_record(self, numbers: Sequence[int]) -> dict[int, Exception]:
        """Points whose record does not appear in time; a network disk may show it with a delay."""
        deadline = time.monotonic() + APPEARS
        while True:
            paths = {n: self.members[n].folder / "result.json" for n in numbers}
            absent = {n: path for n, path in paths.items() if not path.exists()}
            if not absent or time.monotonic() > deadline:
                break
            time.sleep(POLL)
        what, remedy = "a node has left no record of this point", "start the same command again"
        return {n: UserError(what, str(path), remedy) for n, path in absent.items()}


@contextmanager
def _folder(members: Sequence["Point"], folder: Path) -> Iterator[tuple[Path, list[int]]]:
    """The sweep's folder, locked against a second driver, and the unfinished points."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with FolderLock(folder):
            for point in members:
                refuse_other_config(point.config, point.folder)
            yield folder, [n for n, point in enumerate(members) if not _has_ended(point)]
    finally:
        with suppress(OSError):  # a folder with anything in it stays
            folder.rmdir()


def _has_ended(point: "Point") -> bool:
    """Whether a point has its final record; checks the files of the record."""
    if not (point.folder / "result.json").exists():
        return False
    with Record.reopen(point.folder, PATIENCE) as record:
        return record.ended(point.config.checkpoints)


@contextmanager
def _token(folder: Path) -> Iterator[str]:
    """Write a file that shows nodes whether they share the folder; return its name."""
    for left in folder.glob(".shared-*"):  # left by a killed driver
        left.unlink(missing_ok=True)
    path = folder / f".shared-{secrets.token_hex(8)}"
    write_whole(path, b"")
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def _of_block(block: Block, members: Sequence["Point"], home: Path) -> dict[str, Any]:
    """The description of a block that a node receives."""
    points = [members[number] for number in block.points]
    return {
        "block": block.number,
        "numbers": list(block.points),
        "paths": [point.folder.resolve().relative_to(home).as_posix() for point in points],
        "configs": [to_toml(point.config) for point in points],
    }


def _write_blocks(folder: Path, table: Table) -> None:
    """Write blocks.json: where each block ran, how often, how long, and how jobs were computed."""
    body = [dataclasses.asdict(block) for block in table.blocks]
    write_whole(folder / "blocks.json", json.dumps(body, indent=1).encode() + b"\n")


def _refuse_objects(members: Sequence["Point"]) -> None:
    """Refuse networks defined in this Python session: other processes cannot load them."""
    for point in members:
        if MEMORY in json.dumps([point.config.model, point.config.models, point.config.method]):
            what = "an object of this Python session cannot go to a cluster"
            remedy = "name it package.module:object, in a package that every node has"
            raise UserError(what, "model", remedy)


def _refuse_node(node: str, text: str, own: str) -> None:
    """Refuse a node whose results would differ or that cannot run the sweep."""
    answer = json.loads(text)
    error = from_text(answer["error"]) if answer["error"] else None
    if isinstance(error, NodeError):
        what, remedy = f"a node cannot run atoll: {error}", "on every node, install the same atoll"
        raise UserError(what, node, remedy) from error
    if isinstance(error, UserError):
        missing = error.exit_code == EXIT_DATA_MISSING
        code = EXIT_DATA_MISSING if missing else EXIT_USER
        raise UserError(error.what, f"{node}, {error.where}", error.remedy, code) from error
    if error is not None:
        raise error
    if answer["source"] != own:
        what = f"a node has another atoll: source {answer['source']}, here {own}"
        raise UserError(what, node, "on every node, install the same version of atoll")


def _too_small(options: ClusterOptions, threads: int, gpus: float) -> UserError:
    """The error for a cluster on which no block can run."""
    what = f"no node has {threads} CPUs and {gpus:g} GPUs for a block"
    return UserError(what, options.name, "change --gpus-per-block or engine.threads, or add nodes")
