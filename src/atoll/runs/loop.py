"""The loop of a run: stages, rounds, scores, checkpoints, and going on where a run was cut."""

import gc
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from atoll import methods
from atoll.core import VERSION
from atoll.core.errors import InterruptedRunError, UserError
from atoll.core.federation import Clients, Moment, Server, Transport
from atoll.core.influence import Guard, implausible_state
from atoll.core.late import now
from atoll.core.messages import Tensors
from atoll.core.record import Event, Look, Record, Round, Stage, write_whole
from atoll.data.dataset import array_fingerprint, file_fingerprint
from atoll.learning.weights import prefixed, without
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts

__all__ = ["Engine", "Progress", "facts", "go", "holdings", "same_data", "write_recipe"]


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
MOST_NAMES = 300  # a table with more columns is told by numbers alone
SETTLED = 40  # rounds after which most of what a run keeps has been made


def facts(parts: Parts) -> dict[str, Any]:
    """What a run was made under: versions, machine, data."""
    dataset = parts.dataset
    packages = ("torch", "numpy", "safetensors", "scikit-learn", "pydantic")
    return {
        "atoll": VERSION,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": str(parts.site(parts.scenario.clients[0]).device),
        "data": {
            "name": dataset.name,
            "title": dataset.title,
            "rows": len(dataset),
            "classes": len(dataset.classes),
            "source": dataset.source,
            "partial": dataset.partial,
            "fingerprint": dataset.fingerprint,
        },
        **_public(parts),
        **({"vectors": parts.vectors.facts} if dataset.kind == "text" else {}),
        "clients": list(parts.scenario.clients),
        "tasks": list(parts.scenario.tasks),
        "known_at": list(parts.scenario.known_at),
        "stages": parts.scenario.stages,
        "headline": methods.load(parts.config.method["name"]).headline,
        "holdings": holdings(parts),
    }


def _public(parts: Parts) -> dict[str, Any]:
    """Which public images a run has, where its config names some."""
    if not parts.config.public:
        return {}
    public = parts.public
    found = {"rows": len(public), "fingerprint": public.fingerprint}
    options = parts.config.public_options()
    name = f"own images, {Path(options.images).name}" if options.images else options.name
    return {"public": {"name": name, **found}}


def holdings(parts: Parts) -> dict[str, Any]:
    """Who holds what, in numbers and names of columns: rows by stage, test rows by task."""
    scenario, dataset = parts.scenario, parts.dataset
    named = dataset.columns if len(dataset.columns) <= MOST_NAMES else ()
    sites = {}
    for id in scenario.clients:
        holdings, columns = scenario.holdings[id], scenario.holdings[id][-1].own
        sites[id] = {
            "train": [len(held.train) for held in holdings],
            "valid": [len(held.valid) for held in holdings],
            "test": [len(rows) for rows in scenario.tests[id]],
            "classes": [len(np.unique(dataset.y[held.train])) for held in holdings],
            "own": len(columns),
            "own_names": [named[i] for i in columns] if named else [],
        }
    names = [named[i] for i in scenario.common] if named else []
    return {"common": len(scenario.common), "common_names": names, "sites": sites}


def write_recipe(parts: Parts, folder: Path) -> None:
    """For own tables and images, write how files become what models read: for predictions."""
    layout, scenario, dataset = parts.dataset.layout, parts.scenario, parts.dataset
    if dataset.kind == "image" and not scenario.labels_at_server:
        body = _picture_recipe(parts)
        write_whole(folder / "recipe.json", json.dumps(body, indent=1).encode() + b"\n")
    if layout is None:
        return
    if dataset.group is None:
        _write_recipe_of_parties(parts, layout.recipe, folder)
        return
    alone = not parts.config.data.get("site")  # each site has a file of its own
    sites = {}
    for number, id in enumerate(dataset.groups):  # at a site of a network, that site alone
        common, own = parts.site(id).scaling()
        rows = np.flatnonzero(dataset.group == number)
        first = int(rows[0]) if alone else 0
        sites[id] = {
            "own": scenario.holdings[id][-1].own.tolist(),
            "scaling": {"common": common.tolist(), "own": own.tolist()},
            "rows": len(rows) if alone else len(dataset),
            "held_out": [(tested - first).tolist() for tested in scenario.tests[id]],
        }
    body = {**layout.recipe, "common": scenario.common.tolist(), "sites": sites}
    write_whole(folder / "recipe.json", json.dumps(body, indent=1).encode() + b"\n")


def _write_recipe_of_parties(parts: Parts, recipe: Mapping[str, Any], folder: Path) -> None:
    """The same where sites hold columns of the same rows; the rows told are the active party's."""
    scenario = parts.scenario
    tested = np.unique(np.concatenate(scenario.tests[scenario.clients[0]]))
    sites, files, first = {}, [], 0
    for id in scenario.clients:
        held = [len(holding.own) > 0 for holding in scenario.holdings[id]]
        own, scaling = scenario.holdings[id][-1].own, parts.site(id).party_scaling()
        since = held.index(True)
        sites[id] = {"own": own.tolist(), "since": since, "scaling": scaling.tolist()}
    for name, count, rows in recipe["files"]:
        here = tested[(tested >= first) & (tested < first + len(rows))] - first
        files.append([name, count, np.array(rows)[here].tolist()])
        first += len(rows)
    given = [[p] if isinstance(p, str) else p for p in parts.config.data["parties"]]
    prints = {
        name: [file_fingerprint(Path(path)) for path in own]
        for name, own in zip(recipe["parties"], given, strict=True)
    }
    told = {"files": files, "fingerprints": prints, "stages": scenario.stages, "sites": sites}
    body = {**recipe, **told}
    write_whole(folder / "recipe.json", json.dumps(body, indent=1).encode() + b"\n")


def _picture_recipe(parts: Parts) -> dict[str, Any]:
    """The classes, the size of an image, the sites; of own images the rows kept for tests."""
    scenario, dataset, config = parts.scenario, parts.dataset, parts.config
    sites: dict[str, dict[str, Any]] = {id: {"called": id} for id in scenario.clients}
    if config.scenario_options().split == "domains" and dataset.group is not None:
        for number, (id, name) in enumerate(zip(scenario.clients, dataset.groups, strict=True)):
            sites[id] = {"called": name}
            if config.data.get("images"):
                rows = np.flatnonzero(dataset.group == number)
                tested = scenario.tests[id][number] - rows[0]
                own = array_fingerprint(dataset.x[rows])
                sites[id] |= {"rows": len(rows), "held_out": tested.tolist(), "fingerprint": own}
    return {
        "kind": "image",
        "classes": list(dataset.classes),
        "shape": list(dataset.x.shape[1:]),
        "columns": [config.data.get(key, key) for key in ("image", "label")],
        "sites": sites,
    }


def same_data(parts: Parts, recorded: Mapping[str, Any], where: str) -> None:
    """Refuse to go on with other data than the run began with."""
    if recorded.get("data", {}).get("fingerprint") != parts.dataset.fingerprint:
        raise UserError(
            f"the data of '{parts.dataset.name}' have changed since the run began",
            where,
            "bring the old data back, or start a new run without --resume",
        )


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
