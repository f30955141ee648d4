"""The loop of a run: stages, rounds, scores, checkpoints, and resuming an interrupted run."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from atoll import methods
from atoll.core.errors import InterruptedRunError, UserError
from atoll.core.federation import Clients, Moment, Server, Transport
from atoll.core.influence import Guard, implausible_state
from atoll.core.messages import Tensors
from atoll.core.record import Event, Record, Round, Snapshot, Stage
from atoll.learning.weights import prefixed, without
from atoll.runs.config import RunConfig
from atoll.runs.recipe import write_recipe

if TYPE_CHECKING:
    from atoll.runs.parts import Parts

__all__ = ["Engine", "Progress", "go"]


class Engine(Transport, Protocol):
    """A transport that can save and restore its clients.

    A place identifies a checkpoint. Remote clients keep their states under that name, and `states`
    does not return them.
    """

    at_least: int  # minimum number of answers, for methods that tolerate missing clients; 0: all

    def states(self, place: str) -> dict[str, Tensors]:
        """The states of the clients that belong in the run's own checkpoint."""
        ...

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Restore the state of every client from a place."""
        ...

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """The snapshots of the local clients at the end of a stage."""
        ...


@dataclass(frozen=True)
class Progress:
    """The argument of a run's watcher after each round."""

    stage: int
    stages: int
    round: int
    rounds: int
    events: tuple[Event, ...]
    seconds: float


Watch = Callable[[Progress], None]
SETTLED = 40  # rounds after which most long-lived objects exist


@dataclass
class _Run:
    parts: "Parts"
    server: Server
    engine: Engine
    record: Record
    watch: Watch
    stopping: Callable[[], bool]
    saved: float = 0.0
    open: tuple[Callable[[], None], ...] = ()  # checks and records the last round

    @property
    def config(self) -> RunConfig:
        return self.parts.config

    @cached_property
    def packing(self) -> bool:
        return self.config.engine_options().packing

    @cached_property
    def guard(self) -> Guard | None:
        """Checks answers; None without packing, as all clients are then local and trusted."""
        options, scenario = self.config.robust_options(), self.parts.scenario
        if options.rule == "none" or not self.packing:
            return None
        rows = {
            id: [len(holding.train) for holding in scenario.holdings[id]] for id in scenario.clients
        }
        return Guard(options, methods.load(self.config.method["name"]).quorum, rows)

    def clients(self, moment: Moment) -> Clients:
        scenario, packing = self.parts.scenario, self.packing
        quorum = methods.load(self.config.method["name"]).quorum
        return Clients(
            *(scenario.clients, self.engine, moment, scenario.tasks_at(moment.stage), packing),
            at_least=self.engine.at_least if quorum else 0,
            guard=self.guard,
        )

    def settle(self) -> None:
        """Write the last round to the record, if it is pending."""
        steps, self.open = self.open, ()
        for step in steps:
            step()

    def checks(self) -> Callable[[], None]:
        """Take over the checks of messages that the engine has begun; called, it finishes them."""
        take = getattr(self.engine, "pending", None)
        return take() if take else lambda: None

    def save(self, stage: int, number: int, always: bool = False) -> None:
        """Save a checkpoint; the next round is `number` of `stage`."""
        due = time.monotonic() - self.saved >= self.config.checkpoint_seconds
        if not (due or always) or not self.config.checkpoints:
            return
        self.settle()
        state = prefixed("server", self._plausible(self.server.state()))
        for id, tensors in self.engine.states(f"{stage}-{number}").items():
            state |= prefixed(f"client/{id}", tensors)
        arrays = {k: np.asarray(t.detach().cpu().numpy(), order="C") for k, t in state.items()}
        self.record.checkpoint(arrays, {"stage": stage, "round": number})
        self.saved = time.monotonic()

    def _plausible(self, state: Tensors) -> Tensors:
        """The server's state; raises before saving if no honest round can produce it."""
        reason = implausible_state(state)
        if not reason and self.guard is not None:
            first = methods.load(self.config.method["name"]).first
            reason = self.guard.beyond(state, first(self.server) if first else None)
        if reason:
            raise UserError(
                f"the state of the server is implausible and was not saved: {reason}",
                str(self.record.folder),
                "continue with --resume; if sites diverge, start anew with a smaller rate",
            )
        return state

    def load(self) -> tuple[int, int]:
        """Restore the last checkpoint; return the stage and round to continue with."""
        checkpoint = self.record.resume()
        if checkpoint is None:
            return 0, 0
        state = {name: torch.from_numpy(array) for name, array in checkpoint[0].items()}
        where = self.parts.site(self.parts.scenario.clients[0]).device
        self.server.restore(without("server", state))
        self.engine.restore(
            {
                id: {n: t.to(where) for n, t in without(f"client/{id}", state).items()}
                for id in self.parts.scenario.clients
            },
            f"{checkpoint[1]['stage']}-{checkpoint[1]['round']}",
        )
        return checkpoint[1]["stage"], checkpoint[1]["round"]


def go(
    parts: "Parts", engine: Engine, record: Record, watch: Watch, stopping: Callable[[], bool]
) -> None:
    """Run, or resume an interrupted run; calls `stopping` after each round."""
    run = _Run(parts, parts.server(), engine, record, watch, stopping)
    write_recipe(parts, record.folder)
    place = run.load()
    run.saved = time.monotonic()
    try:
        _rounds(run, *place)
    except InterruptedRunError:
        raise
    except Exception as error:
        record.write_failure(error)
        raise
    finally:
        gc.unfreeze()
        run.settle()  # record a completed round, whatever ended the run


def _rounds(run: _Run, stage: int, number: int) -> None:
    """Run all remaining rounds."""
    stages, count = run.parts.scenario.stages, 0
    while stage < stages:
        stage, number = _round(run, stage, number)
        ended = stage == stages
        run.save(stage, number, always=ended)
        if not ended and run.stopping():
            run.save(stage, number, always=True)
            raise InterruptedRunError
        count += 1
        if count == SETTLED:  # otherwise the garbage collector scans all these objects repeatedly
            gc.collect()
            gc.freeze()


def _round(run: _Run, stage: int, number: int) -> tuple[int, int]:
    """Run one round, and end its stage after the last one; return the next stage and round."""
    began, config = time.monotonic(), run.config
    moment = Moment(stage, number, config.rounds)
    clients = run.clients(moment)
    try:
        notes = dict(run.server.round(clients, moment))
    except Exception:
        run.settle()
        clients.settle()  # a refused message may be the cause
        raise
    checks = run.checks()
    run.settle()  # settle the previous round: the device has computed its numbers by now
    ended = notes.pop("finished", 0.0) > 0 or moment.last
    further: list[Event] = []
    scored = ended or (config.score_every > 0 and (number + 1) % config.score_every == 0)
    if scored:
        checks()
        further += _scores(run, moment)
    snapshots = [*run.parts.probe.collect()]
    if ended:
        further.append(Stage(stage, number + 1))
        if config.looks:
            own: list[Snapshot] = getattr(run.server, "snapshot", lambda moment: [])(moment)
            snapshots += [*own, *run.engine.snapshots(moment)]
    seconds = time.monotonic() - began
    run.open = (checks, partial(_write, run, moment, notes, clients, (further, snapshots), seconds))
    if scored or not getattr(run.engine, "deferred", False):  # otherwise the next round can begin
        run.settle()
    return (stage + 1, 0) if ended else (stage, number + 1)


def _scores(run: _Run, moment: Moment) -> list[Event]:
    """The scores at a moment, and the messages of the test."""
    clients = run.clients(moment)
    scores = run.server.evaluate(clients, moment)
    clients.settle()
    return [*scores, *clients.traffic, *clients.absences, *clients.exclusions]


def _write(
    run: _Run,
    moment: Moment,
    notes: Mapping[str, float],
    clients: Clients,
    more: tuple[Iterable[Event], Iterable[Snapshot]],
    seconds: float,
) -> None:
    """Write a round to the record."""
    further, snapshots = more
    run.record.write_snapshots(snapshots)
    values = {n: value if isinstance(value, int) else float(value) for n, value in notes.items()}
    summary = Round(moment.stage, moment.round, values)
    events = (summary, *clients.traffic, *clients.absences, *clients.exclusions, *further)
    run.record.add(events)
    run.record.time(stage=moment.stage, round=moment.round, seconds=seconds)
    stages = run.parts.scenario.stages
    run.watch(Progress(moment.stage, stages, moment.round, moment.rounds, events, seconds))
