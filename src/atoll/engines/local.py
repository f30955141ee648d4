"""The local engine: clients are objects in this process and run one after another."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.compute.deferred import HostCopy
from atoll.compute.executor import Executor, JobExecutor
from atoll.core.errors import (
    BadMessageError,
    ClientFailedError,
    UserError,
    memory_error,
    noted_client,
    out_of_memory,
)
from atoll.core.federation import SERVER, Moment, begin
from atoll.core.messages import (
    Packet,
    Tensors,
    admit,
    finite_values,
    pack,
    plain_values,
    wrap_all,
)
from atoll.core.record import Snapshot
from atoll.learning.weights import copied
from atoll.runs.executors import executor_for
from atoll.runs.memory import Peak, plan, write_plan
from atoll.runs.parts import Parts

__all__ = ["ENGINE", "LocalEngine", "local_engine"]


class LocalEngine:
    """Clients in this process; each is built at its first request."""

    at_least = 0  # local clients are never absent

    def __init__(
        self, parts: Parts, executor: JobExecutor | None = None, deferred: bool = False
    ) -> None:
        """`deferred`: whether `settle` checks messages that are not packed, instead of `carry`.

        Then a round can begin while the device still computes the previous one.
        """
        self._parts, self.deferred = parts, deferred
        self._checks: list[_Check] = []
        self._clients: dict[str, Any] = {}
        self.executor: JobExecutor = executor or Executor("loop")

    def _client(self, id: str) -> Any:
        if id not in self._clients:
            self._clients[id] = self._parts.client(id)
        return self._clients[id]

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Ask the clients; the executor runs the jobs they yield."""
        answers: dict[str, Packet] = {}
        unpacked: dict[str, Any] = {}
        packets = self._checked_requests(packets)
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
                results = self.executor.do(jobs, moment)
        with _named("of this round", action):
            wrapped = wrap_all(unpacked, checked=True)
        self._check(wrapped.items())
        return answers | wrapped

    def _checked_requests(self, packets: Mapping[str, Packet]) -> dict[str, Packet]:
        """The same packets, checked; a message to many clients is checked only once."""
        several = {id(packet): packet for packet in packets.values() if packet.message is not None}
        self._check([(SERVER, packet) for packet in several.values()])
        checked = {key: replace(packet, checked=True) for key, packet in several.items()}
        return {client: checked.get(id(packet), packet) for client, packet in packets.items()}

    def _check(self, packets: Iterable[tuple[str, Packet]]) -> None:
        """Begin to check messages that were not packed; without `deferred`, also finish."""
        alike: dict[int, list[tuple[str, Packet]]] = {}
        for sender, packet in packets:
            admit(packet, sender)
            alike.setdefault(id(packet.wholes), []).append((sender, packet))
        self._checks += [_Check(several) for several in alike.values()]
        if not self.deferred:
            self.settle()

    def settle(self) -> None:
        """Finish all checks; raises BadMessageError for numbers that are not finite."""
        self.pending()()

    def pending(self) -> Callable[[], None]:
        """Hand over the unfinished checks as a function that finishes them."""
        checks, self._checks = self._checks, []
        return partial(_finish, checks)

    def whole(self, work: Any, moment: Moment) -> Any:
        """Run many exchanges as one operation on the device; None if they need messages."""
        clients = {id: self._client(id) for id in work.ids}
        if self.executor.mode == "loop" or not all(hasattr(c, "lend") for c in clients.values()):
            return None
        lent = []
        for id, client in clients.items():
            with _named(id, "lend"):
                lent.append(client.lend(moment, work))
        with _named("of this round", "whole"):
            jobs = {SERVER: replace(work, lent=tuple(lent))}
            result = self.executor.do(jobs, moment)[SERVER]
        if result is not None:
            for client, half in zip(clients.values(), result.halves, strict=True):
                client.take(half, moment, work.steps)
        return result

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """The snapshots of the clients that have been asked."""
        seeing = [id for id in sorted(self._clients) if hasattr(self._clients[id], "snapshot")]
        snapshots = []
        for id in seeing:
            with _named(id, "snapshot"):
                snapshots += self._clients[id].snapshot(moment)
        return snapshots

    def states(self, place: str = "") -> dict[str, Tensors]:
        """The states of the clients that have been asked."""
        return {id: self._clients[id].state() for id in sorted(self._clients)}

    def restore(self, states: Mapping[str, Tensors], place: str = "") -> None:
        """Restore the states of clients; clients without a state start anew."""
        for id, state in states.items():
            if state:
                self._client(id).restore(copied(state))


class _Check:
    """Checks on the device that all numbers of messages of one shape are finite.

    It reads every tensor of all messages once, as a whole. Only if a norm is not finite does it
    search for the message, so it keeps the tensors until it is finished.
    """

    def __init__(self, packets: Sequence[tuple[str, Packet]]) -> None:
        """`packets`: each with its sender."""
        self._values = [(sender, plain_values(packet.message)) for sender, packet in packets]
        first = packets[0][1]
        self._wholes: dict[str, Tensor] = {}
        by_device: dict[torch.device, list[Tensor]] = {}
        for (name, _, _), whole in zip(first.tensors, first.wholes, strict=True):
            if whole.is_floating_point() and whole.numel():
                self._wholes[name] = whole
                by_device.setdefault(whole.device, []).append(whole)
        self._norms = [HostCopy(_norms(wholes)) for wholes in by_device.values()]

    def finish(self) -> None:
        """Refuse the first message with a number that is not finite."""
        doubtful = not all(map(math.isfinite, (n for copy in self._norms for n in copy.numbers)))
        for place, (sender, values) in enumerate(self._values):
            finite_values(values, sender)
            for name, whole in self._wholes.items() if doubtful else ():
                if not bool(whole[place].isfinite().all()):
                    reason = f"tensor {name!r} has numbers that are not finite"
                    raise BadMessageError(sender, reason)


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor; not finite if a number is not, or if the squares overflow."""
    return torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])


def _finish(checks: list[_Check]) -> None:
    while checks:
        checks.pop(0).finish()


@dataclass
class _Whose:
    """Records the client of the current request."""

    name: str


@contextmanager
def _named(client: str, action: str) -> Iterator[_Whose]:
    """Attach the client's id to every error."""
    whose = _Whose(client)
    try:
        yield whose
    except (UserError, ClientFailedError):
        raise
    except Exception as error:
        name = noted_client(error) or whose.name
        if out_of_memory(error):
            raise memory_error(f"{name}, {action}") from error
        raise ClientFailedError(name, action, f"{type(error).__name__}: {error}") from error


@contextmanager
def local_engine(parts: Parts, again: Callable[[], Parts], folder: Path) -> Iterator[LocalEngine]:
    """The engine of a run in this process, with a memory plan if the run is large."""
    options = parts.config.engine_options()
    device = parts.site(parts.scenario.clients[0]).device
    deferred = device.type == "cuda"  # on the CPU all numbers are computed when a call returns
    planned = plan(
        parts,
        again,
        lambda few: LocalEngine(few, Executor("stacked", tf32=options.tf32), deferred),
    )
    if planned is not None:
        write_plan(folder, planned)
    peak = Peak(device)
    rounds = parts.config.rounds * parts.scenario.stages
    executor = executor_for(options, folder, rounds, planned.parts if planned else 1)
    yield LocalEngine(parts, executor, deferred)
    if planned is not None:
        write_plan(folder, planned, peak.bytes)


ENGINE = local_engine
