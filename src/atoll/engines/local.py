"""The local engine: clients are objects in this process, asked one after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.compute.deterministic import deterministic_torch
from atoll.compute.executor import Workshop
from atoll.core.errors import ClientFailedError, UserError, memory_error, out_of_memory
from atoll.core.federation import SERVER, Moment, begin
from atoll.core.messages import Packet, Tensors, pack, wrap_all
from atoll.core.record import Look, Record
from atoll.core.storage import FolderLock, disk_errors
from atoll.data.dataset import Dataset
from atoll.engines.plan import Peak, plan, write_plan
from atoll.learning.weights import copied
from atoll.runs.config import EngineOptions, RunConfig, resolve, to_toml
from atoll.runs.loop import Progress, facts, go, same_data
from atoll.runs.parts import Parts, parts
from atoll.runs.result import Run, write_result

__all__ = [
    "LocalEngine",
    "execute",
    "fresh_folder",
    "last_folder",
    "prepare",
    "recorded",
    "refuse_absent",
    "run_folder",
    "workshop",
]


class Bench(Protocol):
    """Where work is done."""

    @property
    def mode(self) -> str:
        """auto, loop or stacked."""
        ...

    def do(self, jobs: Mapping[str, Any], moment: Moment | None = None) -> dict[str, Any]:
        """The results of jobs by the id of who asked for them."""
        ...


class LocalEngine:
    """Clients in this process; each is built when it is first asked."""

    at_least = 0  # nobody is ever absent here

    def __init__(self, parts: Parts, workshop: Bench | None = None, ahead: bool = False) -> None:
        """`ahead`: whether a round is sent off before the numbers of the one before are there."""
        self._parts, self.ahead = parts, ahead
        self._clients: dict[str, Any] = {}
        self.workshop: Bench = workshop or Workshop("loop")

    def _client(self, id: str) -> Any:
        if id not in self._clients:
            self._clients[id] = self._parts.client(id)
        return self._clients[id]

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Ask the clients; the work they yield is done in the workshop."""
        answers: dict[str, Packet] = {}
        unpacked: dict[str, Any] = {}
        steps = {
            id: begin(self._client(id), action, moment, packet) for id, packet in packets.items()
        }
        results: dict[str, Any] = dict.fromkeys(steps)
        while results:
            jobs = {}
            with _named("", action) as whose:
                for id, result in results.items():
                    whose.name = id
                    try:
                        jobs[id] = steps[id].send(result)
                    except StopIteration as end:
                        if packets[id].message is None:
                            answers[id] = pack(end.value)
                        else:
                            unpacked[id] = end.value
            with _named("of this round", action):
                results = self.workshop.do(jobs, moment)
        with _named("of this round", action):
            return answers | wrap_all(unpacked)

    def whole(self, work: Any, moment: Moment) -> Any:
        """Many exchanges as one piece of work on the device; None: it is to be done by messages."""
        clients = {id: self._client(id) for id in work.ids}
        if self.workshop.mode == "loop" or not all(hasattr(c, "lend") for c in clients.values()):
            return None
        lent = []
        for id, client in clients.items():
            with _named(id, "lend"):
                lent.append(client.lend(moment, work))
        with _named("of this round", "whole"):
            asked = {SERVER: replace(work, lent=tuple(lent))}
            done = self.workshop.do(asked, moment)[SERVER]
        if done is not None:
            for client, half in zip(clients.values(), done.halves, strict=True):
                client.take(half, moment, work.steps)
        return done

    def looks(self, moment: Moment) -> list[Look]:
        """What the clients that have been asked see of themselves."""
        seeing = [id for id in sorted(self._clients) if hasattr(self._clients[id], "look")]
        found = []
        for id in seeing:
            with _named(id, "look"):
                found += self._clients[id].look(moment)
        return found

    def states(self, place: str = "") -> dict[str, Tensors]:
        """The state of every client that has been asked."""
        return {id: self._clients[id].state() for id in sorted(self._clients)}

    def restore(self, states: Mapping[str, Tensors], place: str = "") -> None:
        """Give clients their state back; those without one begin anew."""
        for id, state in states.items():
            if state:
                self._client(id).restore(copied(state))


@dataclass
class _Whose:
    """The client that is asked now."""

    name: str


@contextmanager
def _named(client: str, action: str) -> Iterator[_Whose]:
    """Whatever fails is told with the client it failed at."""
    whose = _Whose(client)
    try:
        yield whose
    except (UserError, ClientFailedError):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise memory_error(f"{whose.name}, {action}") from error
        raise ClientFailedError(whose.name, action, f"{type(error).__name__}: {error}") from error


def workshop(options: EngineOptions, folder: Path, rounds: int, parts: int = 1) -> Workshop:
    """The workshop that a run's options ask for; `rounds`: how often works of a form come back."""
    keep = Path(options.keep) if options.keep else None
    return Workshop(
        options.mode,
        folder,
        tf32=options.tf32,
        streams=options.streams,
        keep=keep,
        tune=options.tune,
        parts=parts,
        rounds=rounds,
        deterministic=options.deterministic,
        verify=options.verify,
    )


def execute(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
    loaded: dict[str, Dataset] | None = None,
) -> None:
    """Run a config in a folder, or go on with the run that is there.

    `loaded` is filled with the data, so that several runs load them once.
    """
    data: dict[str, Dataset] = {} if loaded is None else loaded
    with deterministic_torch(config.engine_options().deterministic):
        made, record = prepare(config, folder, resume, data)
        with record:
            if not (resume and record.ended(config.checkpoints)):
                _execute(config, made, record, data, watch, stopping)


def _execute(
    config: RunConfig,
    made: Parts,
    record: Record,
    data: dict[str, Dataset],
    watch: Callable[[Progress], None],
    stopping: Callable[[], bool],
) -> None:
    folder, options = record.folder, config.engine_options()
    where = made.site(made.scenario.clients[0]).device
    ahead = where.type == "cuda"  # a CPU does its work at once: nothing is ever late there
    planned = plan(
        lambda: parts(config, data),
        lambda few: LocalEngine(few, Workshop("stacked", tf32=options.tf32), ahead),
    )
    if planned is not None:
        write_plan(folder, planned)
    peak = Peak(where)
    rounds = config.rounds * made.scenario.stages
    works = workshop(options, folder, rounds, planned.parts if planned else 1)
    engine = LocalEngine(made, works, ahead)
    go(made, engine, record, watch, stopping)
    if planned is not None:
        write_plan(folder, planned, peak.bytes)
    write_result(folder, record.extents)


def prepare(
    config: RunConfig,
    folder: Path,
    resume: bool,
    data: dict[str, Dataset] | None = None,
    patience: float = 0.0,
) -> tuple[Parts, Record]:
    """The parts of a run and its open record; every mistake is found before anything is written.

    The record is locked for this process; `patience`: seconds to wait for one that is locked.
    """
    if not patience:
        FolderLock.check(folder)
    threads = config.engine_options().threads
    if threads:
        torch.set_num_threads(threads)
    made = parts(config, data)
    made.client(made.scenario.clients[0])
    if resume and (folder / "config.toml").exists():
        same_data(made, Run(folder).facts, str(folder))
        return made, Record.reopen(folder, patience)
    return made, Record.create(folder, to_toml(config), facts(made), patience)


@contextmanager
def run_folder(name: str, chosen: Path | None, resume: bool) -> Iterator[Path]:
    """The folder of a run: the one that was chosen, else the last of its name, else a new one."""
    if chosen is not None or resume:
        yield chosen or last_folder(name)
    else:
        with fresh_folder(name) as folder:
            yield folder


@contextmanager
def fresh_folder(name: str) -> Iterator[Path]:
    """The next folder runs/NAME-1, runs/NAME-2, ..., made now, so that no other process takes it.

    A folder that is still empty at the end goes.
    """
    new = not Path("runs").exists()
    number = max((number for number, _ in _folders(name)), default=0) + 1
    while not _claimed(folder := Path("runs") / f"{name}-{number}"):
        number += 1
    try:
        yield folder
    finally:
        with suppress(OSError):  # what is not empty stays
            folder.rmdir()
            if new:
                folder.parent.rmdir()


def _claimed(folder: Path) -> bool:
    """Whether the folder is made here and now."""
    with disk_errors(folder):
        while True:
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:  # another process removed the parent, which was empty
                continue


def refuse_absent(folders: Iterable[Path]) -> None:
    """Refuse to go on with runs of which none has left anything in its folder."""
    every = list(folders)
    for folder in every:
        with disk_errors(folder):
            if folder.is_dir() and any(folder.iterdir()):
                return
    remedy = "name the folder of a run, or leave --resume out to start one"
    raise UserError("no run to go on with in this folder", str(every[0]), remedy)


def last_folder(name: str) -> Path:
    """The newest folder runs/NAME-N that has something in it."""
    found = [one for one in _folders(name) if one[1].is_dir() and any(one[1].iterdir())]
    if not found:
        raise UserError(
            f"no run of '{name}' to go on with", "runs", "leave --resume out, or give --out"
        )
    return max(found)[1]


def _folders(name: str) -> list[tuple[int, Path]]:
    found = []
    for path in Path("runs").glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdigit():
            found.append((int(number), path))
    return found


def recorded(folder: Path) -> RunConfig:
    """The config that a run's folder was made with."""
    return resolve(Run(folder).config, str(folder / "config.toml"))
