"""Small runs of a method, and an engine that records every packet."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll import methods
from atoll.core.federation import Moment, answer
from atoll.core.messages import Packet, Tensors
from atoll.core.record import Record, Snapshot
from atoll.data import splits
from atoll.engines.local import local_engine
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import Parts

__all__ = ["Case", "RecordingEngine", "run", "run_on"]

DATA = {"tasks": "synthetic-text", "domains": "synthetic-images"}  # by split
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A method to check, on small made-up data unless `changes` name other data.

    >>> case = Case("fedavg", {"rate": 0.01})
    >>> str(case)
    'fedavg-rate=0.01'
    >>> case.config().rounds
    3
    """

    name: str  # a method: built in, an entry point, package.module:object or ./file.py:object
    changes: Mapping[str, Any] = field(default_factory=dict)  # options, as after --set
    rounds: int = 15  # after which the method has to be better than chance
    margin: float = 0.1  # accuracy above that of the commonest class, after these rounds

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.changes.items())])

    @property
    def split(self) -> str:
        """The split of the runs."""
        changed = self.changes.get("split", self.changes.get("scenario.split"))
        return str(changed or methods.load(self.name).split)

    def config(self, **changes: Any) -> RunConfig:
        """A run that is small enough to be repeated many times."""
        values: dict[str, Any] = {
            "name": "conformance",
            "rounds": ROUNDS,
            "data": {"name": DATA.get(self.split, "synthetic-table")},
            "method": {"name": self.name},
            "engine": {"mode": "loop"},
            "checkpoint_seconds": 0,
        }
        own_network = any(key.partition(".")[0] == "model" for key in self.changes)
        if self.split != "parties" and not own_network:
            values["model"] = {"widths": [16, 8]}
        return resolve(change(change(values, self.changes), changes), "conformance")

    def options_of_split(self) -> set[str]:
        """The names of the options that the split has."""
        return splits.option_names(self.split)


def run(config: RunConfig, folder: Path) -> bytes:
    """The events of a run in one process."""
    execute(config, folder, local_engine)
    return (folder / "events.jsonl").read_bytes()


def run_on(parts: Parts, engine: Any, folder: Path) -> bytes:
    """The events of a run on another engine."""
    record = Record.create(folder, "", facts(parts))
    go(parts, engine, record, lambda progress: None, lambda: False)
    return (folder / "events.jsonl").read_bytes()


@dataclasses.dataclass
class RecordingEngine:
    """Carries messages in one process and records every packet and job."""

    parts: Parts
    rebuild: bool = False  # build a client anew from its state before every message
    backwards: bool = False  # ask the clients in the opposite order
    packets: list[tuple[str, str, Packet]] = field(default_factory=list)  # sender, action, packet
    at_least: int = 0
    jobs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clients = {id: self.parts.client(id) for id in self.parts.scenario.clients}

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Ask the clients one by one."""
        answers = {}
        for id in sorted(packets, reverse=self.backwards):
            if self.rebuild:
                memory = {name: tensor.clone() for name, tensor in self.clients[id].state().items()}
                self.clients[id] = self.parts.client(id)
                self.clients[id].restore(memory)
            answers[id] = answer(self.clients[id], action, moment, packets[id], self)
            self.packets += [("server", action, packets[id]), (id, action, answers[id])]
        return answers

    def on_request(self, request: Any) -> None:
        """Nothing to do."""

    def on_job(self, job: Any) -> None:
        """Record a job that a client hands over."""
        self.jobs.append(job)

    def on_reply(self, reply: Any) -> None:
        """Nothing to do."""

    def states(self, place: str) -> dict[str, Tensors]:
        """The states of the clients."""
        return {id: client.state() for id, client in self.clients.items()}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Never called: these runs are not resumed."""
        raise NotImplementedError

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """None."""
        return []
