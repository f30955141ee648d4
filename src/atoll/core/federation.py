"""The contract: servers ask, clients answer, a transport carries packets it does not read."""

import inspect
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints, overload

from atoll.core.errors import BadMessageError, ClientFailedError
from atoll.core.influence import Guard
from atoll.core.messages import (
    Check,
    Checked,
    Packet,
    Tensors,
    pack,
    same_shapes,
    unpack,
    wrap,
)
from atoll.core.record import Absence, Exclusion, Message, Score

__all__ = [
    "SERVER",
    "Admit",
    "Client",
    "ClientId",
    "Clients",
    "Job",
    "Moment",
    "Observer",
    "Server",
    "Transport",
    "Working",
    "actions",
    "answer",
    "begin",
    "counted",
    "kinds",
    "no_restore",
    "no_state",
    "possible",
    "scores",
    "shares",
]


class Job(Protocol):
    """A piece of work that a client hands to the engine; running it changes nothing."""

    def key(self) -> Hashable | None:
        """Jobs with equal keys may run as one computation; None: the job runs alone."""
        ...

    def run(self) -> Any:
        """Run it: the reference, one client in plain PyTorch."""
        ...


ClientId = str
Q = TypeVar("Q")
R = TypeVar("R")
Admit = Callable[[ClientId, Any], None]  # raises BadMessageError for an impossible reply
Working = Generator[Job, Any, R]  # what an action returns that hands jobs to the engine
SERVER = "server"
MOST_ROWS = 1 << 53  # from there on a float does not count one by one
MOST_VARIANTS = 1000  # of a method, in one answer
ERRORS = ("mse", "mae", "variance")  # of predicted numbers, and of the labels they are judged by
OWN = ("state", "restore", "snapshot", "lend", "take")  # what only the engine at the site may call


@dataclass(frozen=True)
class Moment:
    """Where a run stands: the stage, the round in it, and how many rounds a stage has at most."""

    stage: int
    round: int
    rounds: int

    @property
    def first(self) -> bool:
        """Whether this is the first round of its stage."""
        return self.round == 0

    @property
    def last(self) -> bool:
        """Whether this is the last round that its stage may have."""
        return self.round == self.rounds - 1


class Client(Protocol):
    """One site's half of a method; a public method that takes (request, moment) is an action.

    It may also have `final_model(shared, variant, task) -> Tensors` and `predict(model, rows) ->
    logits` for predictions after a run (see `core/method.py`), and `snapshot(moment) ->
    list[Snapshot]` for figures: numbers about the client at the end of a stage, which stay at the
    site. A server may have all three too.
    An engine that holds all clients calls `lend(moment, job)` and `take(weights, moment, steps)` to
    run many exchanges as one computation (`Clients.whole`). No server can ask for any of these.
    """

    def state(self) -> Tensors:
        """The state that must outlive a message."""
        ...

    def restore(self, state: Tensors) -> None:
        """Restore what `state` returned."""
        ...


class Server(Protocol):
    """The half of a method that asks."""

    def round(self, clients: "Clients", moment: Moment) -> Mapping[str, float]:
        """One round; its notes go into the record, and a note `finished` above 0 ends the stage."""
        ...

    def evaluate(self, clients: "Clients", moment: Moment) -> list[Score]:
        """The scores of every client on every task so far."""
        ...

    def state(self) -> Tensors:
        """The state that must outlive a round."""
        ...

    def restore(self, state: Tensors) -> None:
        """Restore what `state` returned."""
        ...


def no_state(self: object) -> Tensors:
    """The `state` of a half that keeps nothing between messages."""
    return {}


def no_restore(self: object, state: Tensors) -> None:
    """The `restore` of a half that keeps nothing between messages."""


class Transport(Protocol):
    """The one thing an engine provides."""

    def carry(
        self, action: str, moment: Moment, packets: Mapping[ClientId, Packet]
    ) -> Mapping[ClientId, Packet]:
        """Bring each packet to its client and bring back the answers."""
        ...


def actions(kind: Any) -> dict[str, Callable[..., Any]]:
    """The actions of a class of clients by name: what a server can ask for."""
    return _actions(cast(Hashable, kind))


@cache
def _actions(kind: Any) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(kind).items() if _is_action(name, value)}


def _is_action(name: str, value: Any) -> bool:
    """Whether a server can ask for it: a public method that takes (request, moment)."""
    if not inspect.isfunction(value) or name.startswith("_") or name in OWN:
        return False
    parameters = list(inspect.signature(value).parameters)
    return len(parameters) == 3 and parameters[2] == "moment"


class Observer(Protocol):
    """Inspects exchanges at a client, as a site's policy does; it may raise."""

    def on_request(self, request: Any) -> None:
        """Inspect a request before the client sees it."""
        ...

    def on_job(self, job: Job) -> None:
        """Inspect a job before it runs."""
        ...

    def on_reply(self, reply: Any) -> None:
        """Inspect a reply before it is packed."""
        ...


def begin(
    client: Any, action: str, moment: Moment, packet: Packet, observer: Observer | None = None
) -> Working[Any]:
    """The client's half of an exchange: yields jobs, returns the reply."""
    available = actions(type(client))
    if action not in available:
        raise BadMessageError(SERVER, f"{action[:80]!r} is not an action of this method")
    request: Any = unpack(packet, kinds(available[action])[0], SERVER)
    if observer:
        observer.on_request(request)
    reply = available[action](client, request, moment)
    if inspect.isgenerator(reply):
        reply = yield from reply
    return reply


def answer(
    client: Any, action: str, moment: Moment, packet: Packet, observer: Observer | None = None
) -> Packet:
    """What a client replies to a packet; its jobs run one by one."""
    steps = begin(client, action, moment, packet, observer)
    try:
        job = next(steps)
        while True:
            if observer:
                observer.on_job(job)
            job = steps.send(job.run())
    except StopIteration as end:
        if observer:
            observer.on_reply(end.value)
        return pack(end.value) if packet.message is None else wrap(end.value)


@cache
def kinds(action: Callable[..., Any]) -> tuple[type, type]:
    """The types of an action's request and reply, whether or not it yields jobs."""
    hints = get_type_hints(action)
    reply = hints.pop("return")
    requests = [hint for name, hint in hints.items() if name not in ("self", "moment")]
    if not requests:
        raise BadMessageError(SERVER, f"{action.__name__[:80]!r} is not an action of this method")
    return requests[0], get_args(reply)[2] if get_origin(reply) is Generator else reply


@dataclass
class Clients:
    """What a server sees of the sites: their ids, and a way to ask them."""

    ids: Sequence[ClientId]
    transport: Transport
    moment: Moment
    tasks: Sequence[int] = (0,)  # the tasks that can be tested by now
    packing: bool = True
    at_least: int = 0  # clients that must answer an exchange; 0: every one that is asked
    # what was sent, in the order of sending -> for each message how often it was, bytes of tensors,
    # bytes that travel but for the header, and what counts those of the header
    sent: dict[tuple[Any, ...], list[tuple[int, int, int, Callable[[], int]]]] = field(
        default_factory=dict
    )
    absent: dict[Absence, None] = field(default_factory=dict)  # in the order in which it was seen
    guard: Guard | None = None  # judges answers; None: a reply that cannot be ends the run
    excluded: dict[Exclusion, None] = field(default_factory=dict)  # in the order of exchanges

    def at(self, moment: Moment, tasks: Sequence[int]) -> "Clients":
        """The same clients at another moment, with an empty ledger."""
        return Clients(
            self.ids,
            self.transport,
            moment,
            tasks,
            self.packing,
            self.at_least,
            guard=self.guard,
        )

    @overload
    def ask(
        self,
        action: Callable[[Any, Q, Moment], Working[R]],
        requests: Mapping[ClientId, Q],
        admit: Admit | None = None,
    ) -> dict[ClientId, R]: ...

    @overload
    def ask(
        self,
        action: Callable[[Any, Q, Moment], R],
        requests: Mapping[ClientId, Q],
        admit: Admit | None = None,
    ) -> dict[ClientId, R]: ...

    def ask(
        self,
        action: Callable[..., Any],
        requests: Mapping[ClientId, Any],
        admit: Admit | None = None,
    ) -> dict[str, Any]:
        """One exchange: a request to some clients, their replies in the order of their ids.

        `admit` raises BadMessageError for an impossible reply. Where there is a guard and the
        method can do without a client, such replies and implausible ones are left out: the client
        is excluded from the rest of the round.
        """
        replies, errors = self._exchanged(action, requests, admit)
        return self._judged(action, requests, replies, errors)

    def ask_each(
        self,
        action: Callable[..., Any],
        requests: Mapping[ClientId, Any],
        failed: Callable[[ClientId, Exception], None],
        admit: Admit | None = None,
    ) -> dict[ClientId, Any]:
        """The same, client by client: `failed` receives a failure, and the others continue."""
        replies, errors = dict[ClientId, Any](), dict[ClientId, BadMessageError]()
        self.settle()  # refusals from here on belong to this exchange
        for id, request in requests.items():
            try:
                reply, bad = self._exchanged(action, {id: request}, admit)
                self.settle()
            except (ClientFailedError, BadMessageError) as error:
                failed(id, error)
                continue
            replies, errors = replies | reply, errors | bad
        return self._judged(action, requests, replies, errors)

    def _exchanged(
        self,
        action: Callable[..., Any],
        requests: Mapping[ClientId, Any],
        admit: Admit | None,
    ) -> tuple[dict[ClientId, Any], dict[ClientId, BadMessageError]]:
        """The replies as received; where there is a guard, impossible ones are errors."""
        out = {exclusion.client for exclusion in self.excluded}
        requests = {id: request for id, request in requests.items() if id not in out}
        name, (_, kind) = action.__name__, kinds(action)
        packets = self._packed(requests)
        answers = self.transport.carry(name, self.moment, packets)
        for id, packet in packets.items():
            if id not in answers:
                self._miss(id, name, len(packets), len(answers))
                continue
            self._count(name, SERVER, id, type(requests[id]), packet)
            self._count(name, id, SERVER, kind, answers[id])
        answers = {id: answers[id] for id in packets if id in answers}
        if self.guard is not None:
            return _opened(requests, answers, kind, admit)
        replies: dict[ClientId, Any] = {}
        for id, packet in answers.items():
            replies[id] = unpack(packet, kind, id)
        for id, reply in replies.items():
            if answers[id].message is None or answers[id].tensors != packets[id].tensors:
                same_shapes(requests[id], reply, id)
            if admit is not None:
                admit(id, reply)
        return replies, {}

    def _judged(
        self,
        action: Callable[..., Any],
        requests: Mapping[ClientId, Any],
        replies: dict[ClientId, Any],
        errors: dict[ClientId, BadMessageError],
    ) -> dict[ClientId, Any]:
        """The accepted replies, their updates bounded where the run's options ask for it."""
        if self.guard is None:
            return replies
        errors |= self.guard.faults(action.__name__, self.moment.stage, requests, replies)
        self.exclude(action, errors, len(replies.keys() | errors.keys()))
        left = {id: reply for id, reply in replies.items() if id not in errors}
        return self.guard.bounded(requests, left)

    def exclude(
        self, action: Callable[..., Any], errors: Mapping[ClientId, BadMessageError], answers: int
    ) -> None:
        """Exclude clients from the rest of the round; raise if the run needs them."""
        for error in errors.values():
            guard = self.guard
            if guard is None or not guard.quorum or answers - len(errors) < guard.least(answers):
                raise error
        for id, error in errors.items():
            place = (self.moment.stage, self.moment.round, id, action.__name__)
            self.excluded[Exclusion(*place, error.reason[:300])] = None

    def whole(self, work: Any) -> Any:
        """Run many exchanges as one job; None if the engine cannot: then ask step by step.

        The caller enters the messages it replaces in the ledger, with `note`.
        """
        do = getattr(self.transport, "whole", None)
        return do(work, self.moment) if do else None

    def note(
        self,
        action: Callable[..., Any],
        ids: Sequence[ClientId],
        messages: tuple[Any, Any],
        count: int,
    ) -> None:
        """Enter exchanges that were part of one job in the ledger, as request and reply.

        Their tensors need no values.
        """
        request, reply = wrap(messages[0]), wrap(messages[1])
        for id in ids:
            self._count(action.__name__, SERVER, id, type(messages[0]), request, count)
            self._count(action.__name__, id, SERVER, type(messages[1]), reply, count)

    @overload
    def ask_all(
        self,
        action: Callable[[Any, Q, Moment], Working[R]],
        request: Q,
        admit: Admit | None = None,
    ) -> dict[ClientId, R]: ...

    @overload
    def ask_all(
        self, action: Callable[[Any, Q, Moment], R], request: Q, admit: Admit | None = None
    ) -> dict[ClientId, R]: ...

    def ask_all(
        self, action: Callable[..., Any], request: Any, admit: Admit | None = None
    ) -> dict[str, Any]:
        """The same request to every client."""
        return self.ask(action, dict.fromkeys(self.ids, request), admit=admit)

    @property
    def present(self) -> Sequence[ClientId]:
        """The clients that the engine knows to be present."""
        present = getattr(self.transport, "present", None)
        return self.ids if present is None else [id for id in self.ids if id in present]

    def _miss(self, id: ClientId, action: str, sampled: int, answers: int) -> None:
        """Record that a client did not answer, or end the run if it needs the client.

        If only some were asked, as many of them may be absent as of all.
        """
        away = len(self.ids) - self.at_least
        if not self.at_least or answers < max(1, sampled - away):
            raise ClientFailedError(id, action, "it did not answer")
        self.absent[Absence(self.moment.stage, self.moment.round, id, action)] = None

    def _packed(self, requests: Mapping[ClientId, Any]) -> dict[ClientId, Packet]:
        """The requests as packets; what goes to several clients is packed once."""
        packed: dict[int, Packet] = {}
        for request in requests.values():
            if id(request) not in packed:
                packed[id(request)] = pack(request) if self.packing else wrap(request)
        return {client: packed[id(requests[client])] for client in sorted(requests)}

    def _count(
        self, action: str, sender: str, receiver: str, kind: type, packet: Packet, count: int = 1
    ) -> None:
        key = (sender, receiver, action, kind.__name__, packet.tensors)
        amounts = (count, packet.payload, packet.written, packet.header_size)
        self.sent.setdefault(key, []).append(amounts)

    def settle(self) -> None:
        """Wait until the engine has checked all messages so far; raise for a refused one."""
        finish = getattr(self.transport, "settle", None)
        if finish:
            finish()

    @property
    def traffic(self) -> list[Message]:
        """The ledger of this moment: messages with sender, receiver, count and bytes."""
        place = self.moment.stage, self.moment.round
        return [Message(*place, *key, *_summed(amounts)) for key, amounts in self.sent.items()]

    @property
    def absences(self) -> list[Absence]:
        """The absent clients, in the order of detection."""
        return list(self.absent)

    @property
    def exclusions(self) -> list[Exclusion]:
        """The excluded clients, in the order of exchanges."""
        return list(self.excluded)


def _opened(
    requests: Mapping[ClientId, Any],
    answers: Mapping[ClientId, Packet],
    kind: type,
    admit: Admit | None,
) -> tuple[dict[ClientId, Any], dict[ClientId, BadMessageError]]:
    """The answers that can be read, and errors for those that cannot."""
    replies, errors = dict[ClientId, Any](), dict[ClientId, BadMessageError]()
    for id, packet in answers.items():
        try:
            reply: Any = unpack(packet, kind, id)
            same_shapes(requests[id], reply, id)
            if admit is not None:
                admit(id, reply)
        except BadMessageError as error:
            errors[id] = error
        else:
            replies[id] = reply
    return replies, errors


def _summed(amounts: Sequence[tuple[int, int, int, Callable[[], int]]]) -> list[int]:
    """Messages, bytes of tensors, bytes that travel."""
    count, payload, size = 0, 0, 0
    for times, inside, written, header_size in amounts:
        count, payload = count + times, payload + times * inside
        size += times * (written + header_size())
    return [count, payload, size]


def scores(
    clients: Clients,
    check: Callable[[Any, Check, Moment], Checked],
    weights: Tensors,
    moment: Moment,
) -> list[Score]:
    """Every client's hits on every task so far, one score for each variant its reply names."""
    results = []
    for task in clients.tasks:
        replies = clients.ask_all(check, Check(task, weights), admit=_plausible)
        others = _other_variants(replies)
        clients.exclude(check, others, len(replies))
        for id in others:
            del replies[id]
        for id, reply in replies.items():
            results += _scores_of(id, reply, task, moment)
    return results


def _scores_of(id: ClientId, reply: Checked, task: int, moment: Moment) -> list[Score]:
    """A reply as one score for each variant."""
    where = (moment.stage, moment.round, id, task)
    results = []
    for variant in sorted(reply.errors or reply.correct):
        hits, f1 = reply.correct.get(variant, 0), reply.macro_f1.get(variant, 0.0)
        errors = reply.errors.get(variant, {})
        results.append(Score(*where, variant, "test", reply.rows, hits, f1, errors))
    return results


def _plausible(id: ClientId, reply: Checked) -> None:
    """Refuse impossible scores."""
    possible(reply.correct, reply.rows, id)
    if reply.correct.keys() != reply.macro_f1.keys():
        raise BadMessageError(id, "hits and macro-F1 name different variants")
    if not all(0 <= f1 <= 1 for f1 in reply.macro_f1.values()):
        raise BadMessageError(id, "a macro-F1 that is not between 0 and 1")
    for errors in reply.errors.values():
        if reply.correct or set(errors) != set(ERRORS) or min(errors.values()) < 0:
            raise BadMessageError(id, "errors of a regression that cannot be")


def _other_variants(replies: Mapping[ClientId, Checked]) -> dict[ClientId, BadMessageError]:
    """The clients that name other variants than most do."""
    variants = {id: (bool(r.errors), frozenset(r.errors or r.correct)) for id, r in replies.items()}
    counts = Counter(variants.values())
    usual = max(counts, key=counts.__getitem__, default=None)  # the first where two are equal
    reason = "its variants are not those of the other clients"
    return {id: BadMessageError(id, reason) for id, variant in variants.items() if variant != usual}


def possible(hits: Mapping[str, float], rows: int, sender: ClientId) -> None:
    """Refuse hits that are impossible for the number of rows that a client reports."""
    counted(rows, sender)
    if len(hits) > MOST_VARIANTS:
        raise BadMessageError(sender, f"hits of {len(hits)} variants")
    if not all(0 <= count <= rows for count in hits.values()):
        raise BadMessageError(sender, f"hits {str(list(hits.values()))[:80]} on {rows} rows")


def counted(rows: int, sender: ClientId) -> int:
    """The number of rows that a client reports; raises if it is impossible."""
    if not 0 <= rows < MOST_ROWS:
        raise BadMessageError(sender, f"{str(rows)[:20]} rows")
    return rows


def shares(rows: Mapping[ClientId, int]) -> list[float]:
    """The weight of each client in a mean weighted by the reported rows."""
    return [float(counted(count, id)) for id, count in rows.items()]
