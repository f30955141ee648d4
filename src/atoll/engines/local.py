"""The local engine: clients are objects in this process, asked one after another."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.compute.executor import Executor, JobExecutor
from atoll.core.errors import ClientFailedError, UserError, memory_error, out_of_memory
from atoll.core.federation import SERVER, Moment, begin
from atoll.core.messages import Packet, Tensors, pack, wrap_all
from atoll.core.record import Look
from atoll.learning.weights import copied
from atoll.runs.execute import executor_for
from atoll.runs.memory import Peak, plan, write_plan
from atoll.runs.parts import Parts

__all__ = ["LocalEngine", "local_engine"]


class LocalEngine:
    """Clients in this process; each is built when it is first asked."""

    at_least = 0  # nobody is ever absent here

    def __init__(
        self, parts: Parts, executor: JobExecutor | None = None, ahead: bool = False
    ) -> None:
        """`ahead`: whether a round is sent off before the numbers of the one before are there."""
        self._parts, self.ahead = parts, ahead
        self._clients: dict[str, Any] = {}
        self.executor: JobExecutor = executor or Executor("loop")

    def _client(self, id: str) -> Any:
        if id not in self._clients:
            self._clients[id] = self._parts.client(id)
        return self._clients[id]

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Ask the clients; the work they yield runs in the executor."""
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
                results = self.executor.do(jobs, moment)
        with _named("of this round", action):
            return answers | wrap_all(unpacked)

    def whole(self, work: Any, moment: Moment) -> Any:
        """Many exchanges as one piece of work on the device; None: it is to be done by messages."""
        clients = {id: self._client(id) for id in work.ids}
        if self.executor.mode == "loop" or not all(hasattr(c, "lend") for c in clients.values()):
            return None
        lent = []
        for id, client in clients.items():
            with _named(id, "lend"):
                lent.append(client.lend(moment, work))
        with _named("of this round", "whole"):
            asked = {SERVER: replace(work, lent=tuple(lent))}
            done = self.executor.do(asked, moment)[SERVER]
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


@contextmanager
def local_engine(parts: Parts, again: Callable[[], Parts], folder: Path) -> Iterator[LocalEngine]:
    """An engine for a run in this process, with a plan of its memory where it is large."""
    options = parts.config.engine_options()
    device = parts.site(parts.scenario.clients[0]).device
    ahead = device.type == "cuda"  # a CPU does its work at once: nothing is ever late there
    planned = plan(
        parts,
        again,
        lambda few: LocalEngine(few, Executor("stacked", tf32=options.tf32), ahead),
    )
    if planned is not None:
        write_plan(folder, planned)
    peak = Peak(device)
    rounds = parts.config.rounds * parts.scenario.stages
    executor = executor_for(options, folder, rounds, planned.parts if planned else 1)
    yield LocalEngine(parts, executor, ahead)
    if planned is not None:
        write_plan(folder, planned, peak.bytes)
