"""The loop of a run: stages, rounds, scores, checkpoints, and going on where a run was cut."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from atoll import methods
from atoll.core.errors import InterruptedRunError, UserError
from atoll.core.federation import Clients, Moment, Server, Transport
from atoll.core.influence import Guard, implausible_state
from atoll.core.late import now
from atoll.core.messages import Tensors
from atoll.core.record import Event, Look, Record, Round, Stage
from atoll.learning.weights import prefixed, without
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts
from atoll.runs.recipe import write_recipe

__all__ = ["Engine", "Progress", "go"]


class Engine(Transport, Protocol):
    """A transport whose clients can be saved with the run.

    A place names a checkpoint. Where clients live elsewhere, their states stay there under that
    name, and none of them is in what `states` returns.
    """

    at_least: int  # clients that must answer, where a method can do without some; 0: all

    def states(self, place: str) -> dict[str, Tensors]:
        """The state of every client that is to be kept in the run's own checkpoint."""
        ...

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Give every client the state back that it had at a place."""
        ...

    def looks(self, moment: Moment) -> list[Look]:
        """What the clients here see of themselves at the end of a stage."""
        ...


@dataclass(frozen=True)
class Progress:
    """What somebody who watches a run is told after each round."""

    stage: int
    stages: int
    round: int
    rounds: int
    events: tuple[Event, ...]
    seconds: float


Watch = Callable[[Progress], None]
SETTLED = 40  # rounds after which most of what a run keeps has been made


@dataclass
class _Run:
    parts: Parts
    server: Server
    engine: Engine
    record: Record
    watch: Watch
    stopping: Callable[[], bool]
    saved: float = 0.0
    open: Callable[[], None] | None = None  # enters a round that was sent off in the record

    @property
    def config(self) -> RunConfig:
        return self.parts.config

    @cached_property
    def packing(self) -> bool:
        return self.config.engine_options().packing

    @cached_property
    def ahead(self) -> bool:
        """Whether a round is sent off before the numbers of the one before are there."""
        return bool(getattr(self.engine, "ahead", False)) and not self.packing

    @cached_property
    def guard(self) -> Guard | None:
        """What judges answers; without packing all clients are trusted parts of this process."""
        options, scenario = self.config.robust_options(), self.parts.scenario
        if options.rule == "none" or not self.packing:
            return None
        rows = {id: [len(held.train) for held in scenario.holdings[id]] for id in scenario.clients}
        return Guard(options, methods.load(self.config.method["name"]).quorum, rows)

    def clients(self, moment: Moment) -> Clients:
        scenario, packing = self.parts.scenario, self.packing
        quorum = methods.load(self.config.method["name"]).quorum
        return Clients(
            *(scenario.clients, self.engine, moment, scenario.tasks_at(moment.stage), packing),
            at_least=self.engine.at_least if quorum else 0,
            doubts=[] if self.ahead else None,
            guard=self.guard,
        )

    def settle(self) -> None:
        """Enter the round that is still open in the record."""
        enter, self.open = self.open, None
        if enter is not None:
            enter()

    def save(self, stage: int, number: int, always: bool = False) -> None:
        """A checkpoint: the next round is `number` of `stage`."""
        due = time.monotonic() - self.saved >= self.config.checkpoint_seconds
        if not (due or always) or not self.config.checkpoints:
            return
        self.settle()
        state = prefixed("server", self._plausible(self.server.state()))
        for id, tensors in self.engine.states(f"{stage}-{number}").items():
            state |= prefixed(f"client/{id}", tensors)
        self.record.checkpoint(_arrays(state), {"stage": stage, "round": number})
        self.saved = time.monotonic()

    def _plausible(self, state: Tensors) -> Tensors:
        """The server's state, refused before it is saved if no honest round can have made it."""
        reason = implausible_state(state)
        if not reason and self.guard is not None:
            reason = self.guard.beyond(state)
        if reason:
            raise UserError(
                f"the state of the server is implausible and was not saved: {reason}",
                str(self.record.folder),
                "go on with --resume; if sites diverge, start anew with a smaller rate",
            )
        return state

    def load(self) -> tuple[int, int]:
        """Become what the last checkpoint says; the stage and round to go on with."""
        found = self.record.resume()
        if found is None:
            return 0, 0
        state = {name: torch.from_numpy(array) for name, array in found[0].items()}
        where = self.parts.site(self.parts.scenario.clients[0]).device
        self.server.restore(without("server", state))
        self.engine.restore(
            {
                id: {n: t.to(where) for n, t in without(f"client/{id}", state).items()}
                for id in self.parts.scenario.clients
            },
            f"{found[1]['stage']}-{found[1]['round']}",
        )
        return found[1]["stage"], found[1]["round"]


def _arrays(state: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(t.detach().cpu().numpy(), order="C") for name, t in state.items()}


def go(
    parts: Parts, engine: Engine, record: Record, watch: Watch, stopping: Callable[[], bool]
) -> None:
    """Run, or go on with a run that was cut; `stopping` is asked after each round."""
    run = _Run(parts, parts.server(), engine, record, watch, stopping)
    write_recipe(parts, record.folder)
    place = run.load()
    run.saved = time.monotonic()
    try:
        _rounds(run, *place)
    finally:
        gc.unfreeze()
        run.settle()  # a round that was done is entered, whatever ended the run


def _rounds(run: _Run, stage: int, number: int) -> None:
    """All rounds from here on."""
    stages, done = run.parts.scenario.stages, 0
    while stage < stages:
        stage, number = _round(run, stage, number)
        ended = stage == stages
        run.save(stage, number, always=ended)
        if not ended and run.stopping():
            run.save(stage, number, always=True)
            raise InterruptedRunError
        done += 1
        if done == SETTLED:  # Python looks for garbage in all that it holds, again and again
            gc.collect()
            gc.freeze()


def _round(run: _Run, stage: int, number: int) -> tuple[int, int]:
    """One round, and the end of its stage where it was the last; where the run stands then."""
    began, config = time.monotonic(), run.config
    moment = Moment(stage, number, config.rounds)
    clients = run.clients(moment)
    try:
        notes = dict(run.server.round(clients, moment))
    except Exception:
        run.settle()
        clients.settle()  # numbers that nobody has looked at may be the reason
        raise
    run.settle()  # the round before: its numbers have come meanwhile
    ended = now(notes.pop("finished", 0.0)) > 0 or moment.last
    further: list[Event] = []
    scored = ended or (config.score_every > 0 and (number + 1) % config.score_every == 0)
    if scored:
        clients.settle()
        others = run.clients(moment)
        further += run.server.evaluate(others, moment)
        others.settle()
        further += [*others.traffic, *others.absences, *others.exclusions]
    looks = [*run.parts.witness.asked()]
    if ended:
        further.append(Stage(stage, number + 1))
        if config.looks:
            own: list[Look] = getattr(run.server, "look", lambda moment: [])(moment)
            looks += [*own, *run.engine.looks(moment)]
    seconds = time.monotonic() - began
    run.open = partial(_tell, run, moment, notes, clients, (further, looks), seconds)
    if scored or not clients.doubts:  # else the next round need not wait for this one's numbers
        run.settle()
    return (stage + 1, 0) if ended else (stage, number + 1)


def _tell(
    run: _Run,
    moment: Moment,
    notes: Mapping[str, float],
    clients: Clients,
    more: tuple[Iterable[Event], Iterable[Look]],
    seconds: float,
) -> None:
    """Enter a round in the record, once all that came in it has been looked at."""
    clients.settle()
    further, looks = more
    run.record.look(looks)
    known = {name: now(value) for name, value in notes.items()}
    said = Round(moment.stage, moment.round, known)
    told = (said, *clients.traffic, *clients.absences, *clients.exclusions, *further)
    run.record.add(told)
    run.record.time(stage=moment.stage, round=moment.round, seconds=seconds)
    stages = run.parts.scenario.stages
    run.watch(Progress(moment.stage, stages, moment.round, moment.rounds, told, seconds))
