"""The coordinator's answer for a run whose parties have columns of the same rows.

It has the labels, so it compares, and sends no label itself. For the joined model each party
sends the embeddings of the test rows once more. For the same method alone, each party whose
contract allows it trains anew with the server, using the run's messages but without the others:
it receives a further sequence of gradients of its rows, which depend on the labels.
Simple models need columns and labels in one place and are left out.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from atoll import methods
from atoll.core.errors import (
    BadMessageError,
    ClientFailedError,
    InterruptedRunError,
    SiteLostError,
    UserError,
    printable,
)
from atoll.core.federation import SERVER, Clients, Moment, actions, kinds
from atoll.core.messages import Packet, Tensors
from atoll.core.record import Message, Snapshot
from atoll.engines.network.requests import COMPARE
from atoll.learning.weights import without
from atoll.metrics.answer import ALONE, BOOSTING, GUESS, JOINED, MEAN, Outcome, answer, models_of
from atoll.metrics.release import assemble
from atoll.runs.alone import alone_parts, train_parts
from atoll.runs.baselines import class_shares
from atoll.runs.outcomes import own_tasks, without_classes
from atoll.runs.parts import Parts

__all__ = ["AWAY", "REFUSED", "STOPPED", "Parties", "compare_parties"]

Array = np.ndarray[Any, Any]
REFUSED = "the contract of the site does not allow it"
STOPPED = "the coordinator was stopped"
AWAY = "the site was away"
APART = "columns and labels are at different places"
Failure = ClientFailedError | BadMessageError | SiteLostError | UserError
FAILURES = (ClientFailedError, BadMessageError, SiteLostError, UserError)  # none ends the run


class Parties(Protocol):
    """The interface to the engine between sites."""

    @property
    def present(self) -> list[str]:
        """The clients with connected sites."""
        ...

    def willing(self, id: str) -> bool:
        """Whether a site's contract allows a comparison."""
        ...

    def alone(self, id: str) -> None:
        """Restart one party as the only one besides the server."""
        ...

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Send each packet to its site and return the answers."""
        ...


class _Ledger:
    """The messages as lines at the end of the run's ledger, grouped by form."""

    def __init__(self, parts: Parts) -> None:
        self._place = parts.scenario.stages - 1, parts.config.rounds - 1
        self._actions = actions(methods.load(str(parts.config.method["name"])).client)
        self._amounts = dict[Message, tuple[int, int, int]]()

    def enter(self, action: str, id: str, packet: Packet, replied: Packet) -> None:
        """Log a request to a party and its answer."""
        request, reply = kinds(self._actions[action])
        self._add(SERVER, id, request, packet)
        self._add(id, SERVER, reply, replied)

    def _add(self, sender: str, receiver: str, kind: type, packet: Packet) -> None:
        where = (*self._place, sender, receiver, COMPARE)
        form = Message(*where, kind.__name__, packet.tensors, 0, 0, 0)
        count, payload, size = self._amounts.get(form, (0, 0, 0))
        self._amounts[form] = (count + 1, payload + packet.payload, size + packet.size)

    @property
    def lines(self) -> list[Message]:
        """The messages so far."""
        return [
            replace(form, count=count, payload=payload, bytes=size)
            for form, (count, payload, size) in self._amounts.items()
        ]


@dataclass
class _Engine:
    """Carries the messages of a training that cannot be resumed: it saves no client states."""

    parties: Parties
    ledger: _Ledger
    at_least: int = 0

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Send each packet to its site, log both, and return the answers."""
        replies = self.parties.carry(action, moment, packets)
        for id, reply in replies.items():
            self.ledger.enter(action, id, packets[id], reply)
        return replies

    def states(self, place: str) -> dict[str, Tensors]:
        """Empty: sites keep their own states."""
        return {}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Do nothing: the training starts anew."""

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """Empty."""
        return []


def compare_parties(
    parties: Parties,
    parts: Parts,
    variant: str,
    arrays: Mapping[str, Array],
    stopping: Callable[[], bool],
    comparing: Callable[[str], None],
) -> tuple[dict[str, Any], list[Message]]:
    """The answer and the ledger lines; `arrays` is the final state of the run.

    `stopping` is called after each round; `comparing` receives the party that trains alone.
    """
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tasks = {id: own_tasks(parts.scenario, id) for id in parts.scenario.clients}
    ids, withheld = parts.scenario.clients, _withheld(parties, parts.scenario.clients)
    if len(withheld) == len(ids):
        return _answer(parts, {}, withheld), []
    if stopping():  # nothing was sent: a resumed run compares
        raise InterruptedRunError
    ledger, outcomes = _Ledger(parts), dict[str, list[Outcome]]()
    engine = _Engine(parties, ledger)
    try:
        joined = _outputs(engine, parts, variant, state, tasks[ids[0]])
    except FAILURES as error:
        reason = _needed(_culprit(error), _reason(error))
        return _answer(parts, {}, dict.fromkeys(ids, reason)), ledger.lines
    for id in (id for id in ids if id not in withheld):
        one = alone_parts(parts, id)
        try:
            if stopping():
                raise InterruptedRunError
            comparing(id)
            alone = _trained_alone(engine, one, variant, tasks[id], stopping)
        except (*FAILURES, InterruptedRunError) as error:
            withheld[id] = _reason(error)
            continue
        outcomes[id] = [_outcome(one, id, tasks[id], {JOINED: joined, ALONE: alone})]
    return _answer(parts, outcomes, withheld), ledger.lines


def _withheld(parties: Parties, ids: Sequence[str]) -> dict[str, str]:
    """The parties that cannot be compared, and why: the joined model needs all parties."""
    away = [id for id in ids if id not in parties.present]
    withheld = {}
    for id in ids:
        if id in away:
            withheld[id] = AWAY
        elif not parties.willing(id):
            withheld[id] = REFUSED
        elif away:
            withheld[id] = _needed(away[0], AWAY)
    return withheld


def _needed(id: str, reason: str) -> str:
    """Why no party is compared if one fails."""
    return f"the joined model needs {id}: {reason}" if id else reason


def _culprit(error: Failure) -> str:
    """The party that failed; empty if it is not a party."""
    if isinstance(error, UserError):
        return ""
    if isinstance(error, SiteLostError):
        return printable(error.site)
    return error.sender if isinstance(error, BadMessageError) else error.client


def _reason(error: Failure | InterruptedRunError) -> str:
    """Why there is nothing to compare, as in the answer."""
    if isinstance(error, InterruptedRunError):
        return STOPPED
    return printable(error.what if isinstance(error, UserError) else error.reason)


def _answer(
    parts: Parts, outcomes: Mapping[str, list[Outcome]], withheld: Mapping[str, str]
) -> dict[str, Any]:
    """The answer for all parties that could be compared."""
    margin = parts.config.report_options().margin / 100
    if not outcomes:
        return assemble({}, withheld, parts.metric, margin)
    body = answer(outcomes, parts.metric, margin)
    body["withheld"] = dict(sorted({**body["withheld"], **withheld}.items()))
    body["classes"] = list(parts.dataset.classes)
    return body


def _outputs(
    engine: _Engine, parts: Parts, variant: str, state: Tensors, tasks: Sequence[int]
) -> Array:
    """The outputs of test rows, from the embeddings of all parties."""
    scenario, rounds, server = parts.scenario, parts.config.rounds, parts.server()
    where = parts.site(SERVER).device
    server.restore({name: tensor.to(where) for name, tensor in without("server", state).items()})
    moment = Moment(scenario.stages - 1, rounds - 1, rounds)
    clients = Clients(scenario.clients, engine, moment, tasks)
    pieces = []
    with torch.no_grad():
        for task in tasks:
            halves = server.head.embedded(clients, scenario.clients, "test", task)
            logits = server.predict(server.final_model({}, variant, task), halves)
            if parts.dataset.regression:
                logits = parts.site(SERVER).target.restore(logits)
            pieces.append(np.asarray(logits.double().cpu().numpy()))
    clients.settle()
    return np.concatenate(pieces)


def _trained_alone(
    engine: _Engine,
    one: Parts,
    variant: str,
    tasks: Sequence[int],
    stopping: Callable[[], bool],
) -> Array:
    """Train one party with the server; returns its outputs of test rows."""
    (id,) = one.scenario.clients
    engine.parties.alone(id)

    @contextmanager
    def open_engine(*arguments: Any) -> Iterator[_Engine]:
        yield engine

    with tempfile.TemporaryDirectory(prefix="atoll-alone-") as folder:
        state = train_parts(one, Path(folder), open_engine, stopping)
    return _outputs(engine, one, variant, state, tasks)


def _outcome(one: Parts, id: str, tasks: Sequence[int], outputs: Mapping[str, Array]) -> Outcome:
    """The outcome of a party: the outputs of networks and of guessing, and the labels."""
    scenario, dataset = one.scenario, one.dataset
    rows = np.concatenate([scenario.tests[id][task] for task in tasks])
    train = np.unique(np.concatenate([holding.train for holding in scenario.holdings[id]]))
    y, count = dataset.y[train], len(rows)
    skipped = dict.fromkeys((models_of(one.metric)[3], BOOSTING), APART)
    people = dataset.people
    outcome = Outcome(
        rows,
        dataset.y[rows],
        outputs,
        len(train),
        skipped,
        groups=None if people is None else people[rows],
    )
    if dataset.regression:
        guess = {MEAN: np.full((count, 1), y.mean())}
        return replace(outcome, outputs={**outputs, **guess}, deviation=float(y.std()) or 1.0)
    shares = class_shares(y, len(dataset.classes), count)
    guess = {GUESS: without_classes(shares, np.isneginf(outputs[JOINED]))}
    return replace(outcome, outputs={**outputs, **guess})
