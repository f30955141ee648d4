"""The contract between servers, clients and transports, with a transport of the test's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from atoll.core.errors import BadMessageError, ClientFailedError
from atoll.core.federation import Clients, Moment, actions, answer, possible, scores, shares
from atoll.core.influence import Guard, RobustOptions
from atoll.core.messages import Check, Checked, Empty, Packet, Tensors, Weights, pack, wrap
from atoll.core.record import Absence, Exclusion, Message

NOW = Moment(0, 1, 3)
MANY = [str(number) for number in range(20_000)]


@dataclass
class Counter:
    """A client that adds its number to weights."""

    number: int = 1
    reply: Checked | None = None
    helper: ClassVar[type] = dict

    def fit(self, request: Weights, moment: Moment) -> Weights:
        return Weights({name: t + self.number for name, t in request.weights.items()})

    def widen(self, request: Weights, moment: Moment) -> Weights:
        return Weights({name: torch.ones(9) for name in request.weights})

    def rename(self, request: Weights, moment: Moment) -> Weights:
        return Weights({f"{name}2": t for name, t in request.weights.items()})

    def spoil(self, request: Weights, moment: Moment) -> Weights:
        return Weights({name: t / 0 for name, t in request.weights.items()})

    def check(self, request: Check, moment: Moment) -> Checked:
        return self.reply or Checked(
            4, {"own": request.task, "": self.number}, {"": 0.5, "own": 0.25}
        )

    def confuse(self, request: Empty, moment: Moment) -> Weights:
        return Empty()  # type: ignore[return-value]

    def size(self) -> int:
        return self.number

    def state(self) -> Tensors:
        return {}

    def restore(self, state: Tensors) -> None:
        pass

    def _secret(self, request: Empty, moment: Moment) -> Empty:
        return request


@dataclass
class Backwards:
    """A transport whose clients answer in the reverse of the order they were asked in."""

    clients: Mapping[str, Any]
    silent: tuple[str, ...] = ()
    seen: list[tuple[str, Moment, list[str]]] = field(default_factory=list)

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        self.seen.append((action, moment, list(packets)))
        return {
            id: answer(self.clients[id], action, moment, packets[id])
            for id in reversed(list(packets))
            if id not in self.silent
        }


def federation(packing: bool = True, silent: tuple[str, ...] = ()) -> Clients:
    ids = ["a", "b", "c"]
    transport = Backwards({id: Counter(number) for number, id in enumerate(ids)}, silent)
    return Clients(ids, transport, NOW, (0, 1), packing)


def weights(**values: float) -> Weights:
    return Weights({name: torch.full((2,), float(value)) for name, value in values.items()})


def test_a_moment_knows_the_first_and_the_last_round_of_its_stage() -> None:
    assert [Moment(2, i, 3).first for i in range(3)] == [True, False, False]
    assert [Moment(2, i, 3).last for i in range(3)] == [False, False, True]
    assert Moment(0, 0, 1).first
    assert Moment(0, 0, 1).last


def test_actions_are_the_public_methods_that_take_a_request_and_a_moment() -> None:
    assert set(actions(Counter)) == {"fit", "widen", "rename", "spoil", "check", "confuse"}


class Predicting:
    """A client with methods that no server can ask for."""

    def fit(self, request: Weights, moment: Moment) -> Weights:
        return request

    def predict(self, model: Weights, rows: Weights) -> Weights:
        return model

    def final_model(self, shared: Weights, variant: str, task: int) -> Weights:
        return shared

    def snapshot(self, moment: Moment) -> list[str]:
        return []


def test_only_methods_that_take_a_request_and_a_moment_are_actions() -> None:
    assert set(actions(Predicting)) == {"fit"}
    for name in ("predict", "final_model", "snapshot"):
        with pytest.raises(BadMessageError, match="not an action"):
            answer(Predicting(), name, NOW, pack(weights(a=1)))


@pytest.mark.parametrize("packing", [True, False])
def test_replies_come_in_the_order_of_ids_whoever_answers_first(packing: bool) -> None:
    clients = federation(packing)
    replies = clients.ask(Counter.fit, {id: weights(w=10) for id in ("c", "a", "b")})
    assert list(replies) == ["a", "b", "c"]
    assert [float(r.weights["w"][0]) for r in replies.values()] == [10, 11, 12]
    assert clients.transport.seen == [("fit", NOW, ["a", "b", "c"])]  # type: ignore[attr-defined]


def test_each_client_gets_its_own_request_and_others_none() -> None:
    replies = federation().ask(Counter.fit, {"c": weights(w=1), "a": weights(w=5)})
    assert {id: float(r.weights["w"][0]) for id, r in replies.items()} == {"a": 5, "c": 3}


@pytest.mark.parametrize("packing", [True, False])
def test_clients_cannot_change_what_the_server_holds(packing: bool) -> None:
    mine = weights(w=1)
    replies = federation(packing).ask_all(Counter.fit, mine)
    replies["a"].weights["w"].zero_()
    assert mine.weights["w"].tolist() == [1, 1]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("action", "part"),
    [(Counter.widen, "(9,)"), (Counter.rename, "'w'"), (Counter.spoil, "finite")],
)
def test_a_reply_of_another_shape_or_poisoned_is_refused_by_the_clients_name(
    action: Any, part: str, packing: bool
) -> None:
    with pytest.raises(BadMessageError) as caught:
        federation(packing).ask(action, {"b": weights(w=1)})
    assert caught.value.sender == "b"
    assert part in caught.value.reason


@pytest.mark.parametrize("packing", [True, False])
def test_a_reply_of_another_kind_is_refused_by_the_clients_name(packing: bool) -> None:
    with pytest.raises(BadMessageError) as caught:
        federation(packing).ask(Counter.confuse, {"c": Empty()})
    assert caught.value.sender == "c"


def test_a_client_that_does_not_answer_is_named() -> None:
    with pytest.raises(ClientFailedError) as caught:
        federation(silent=("b",)).ask_all(Counter.fit, weights(w=1))
    assert (caught.value.client, caught.value.action) == ("b", "fit")


@pytest.mark.parametrize(
    "action",
    [
        "state",
        "restore",
        "_secret",
        "__init__",
        "number",
        "helper",
        "size",
        "nothing",
        "",
        "x" * 999,
    ],
)
def test_what_is_not_an_action_is_refused(action: str) -> None:
    with pytest.raises(BadMessageError) as caught:
        answer(Counter(), action, NOW, pack(Empty()))
    assert caught.value.sender == "server"
    assert "is not an action" in caught.value.reason
    assert len(caught.value.reason) < 200


def test_a_request_of_another_kind_never_reaches_the_client() -> None:
    with pytest.raises(BadMessageError, match="server"):
        answer(Counter(), "fit", NOW, pack(Empty()))


def test_an_answer_travels_the_way_its_request_did() -> None:
    assert answer(Counter(), "fit", NOW, pack(weights(w=1))).message is None
    assert answer(Counter(), "fit", NOW, wrap(weights(w=1))).message is not None


def test_the_ledger_has_a_line_for_each_form_of_message_and_counts_them() -> None:
    clients = federation()
    for _ in range(3):
        clients.ask(Counter.fit, {"a": weights(w=1)})
    clients.ask(Counter.fit, {"a": weights(longer=1)})
    clients.ask(Counter.check, {"a": Check(0, {})})
    packet = pack(weights(w=1))
    form = (("weights/w", "float32", (2,)),)
    assert clients.traffic[:2] == [
        Message(0, 1, "server", "a", "fit", "Weights", form, 3, 24, 3 * packet.size),
        Message(0, 1, "a", "server", "fit", "Weights", form, 3, 24, 3 * packet.size),
    ]
    assert [(m.sender, m.action, m.kind, m.count) for m in clients.traffic[2:]] == [
        ("server", "fit", "Weights", 1),
        ("a", "fit", "Weights", 1),
        ("server", "check", "Check", 1),
        ("a", "check", "Checked", 1),
    ]


def test_the_ledger_is_the_same_with_and_without_packing() -> None:
    ledgers = []
    for packing in (True, False):
        clients = federation(packing)
        clients.ask_all(Counter.fit, weights(w=1, v=2))
        scores(clients, Counter.check, {"w": torch.ones(3)}, NOW)
        ledgers.append(clients.traffic)
    assert ledgers[0] == ledgers[1]
    assert sum(line.count for line in ledgers[0]) == 2 * (3 + 2 * 3)


def test_another_moment_has_the_same_clients_and_an_empty_ledger() -> None:
    clients = federation(packing=False)
    clients.ask_all(Counter.fit, weights(w=1))
    later = clients.at(Moment(1, 0, 3), (0, 1, 2))
    assert later.traffic == []
    assert (later.ids, later.tasks, later.packing) == (clients.ids, (0, 1, 2), False)
    later.ask(Counter.fit, {"a": weights(w=1)})
    assert {(m.stage, m.round) for m in later.traffic} == {(1, 0)}
    assert len(clients.traffic) == 6


def test_scores_are_those_of_every_client_on_every_task_and_variant() -> None:
    found = scores(federation(), Counter.check, {}, NOW)
    assert [(s.task, s.client, s.variant) for s in found] == [
        (task, id, variant) for task in (0, 1) for id in "abc" for variant in ("", "own")
    ]
    assert all((s.stage, s.round, s.part, s.rows) == (0, 1, "test", 4) for s in found)
    assert [s.correct for s in found if s.variant == "own"] == [0, 0, 0, 1, 1, 1]
    assert [s.macro_f1 for s in found[:2]] == [0.5, 0.25]


@pytest.mark.parametrize(
    "reply",
    [
        Checked(4, {"": 5}, {"": 0.5}),
        Checked(4, {"": -1}, {"": 0.5}),
        Checked(-1, {}, {}),
        Checked(4, {"": 1}, {}),
        Checked(4, {"": 1}, {"": 0.5, "own": 0.5}),
        Checked(10**400, {"": 1, "own": 1}, {"": 0.5, "own": 0.5}),
        Checked(1 << 53, {"": 1, "own": 1}, {"": 0.5, "own": 0.5}),
        Checked(4, {"": 1, "own": 1}, {"": 1e300, "own": 0.5}),
        Checked(4, {"": 1, "own": 1}, {"": -0.5, "own": 0.5}),
        Checked(4, {"": 1, "<script>": 1}, {"": 0.5, "<script>": 0.5}),
        Checked(4, {"": 1}, {"": 0.5}),
        Checked(4, dict.fromkeys(MANY, 1), dict.fromkeys(MANY, 0.5)),
    ],
)
def test_scores_that_cannot_be_are_refused_by_the_clients_name(reply: Checked) -> None:
    clients = Clients(["a", "b"], Backwards({"a": Counter(), "b": Counter(reply=reply)}), NOW)
    with pytest.raises(BadMessageError) as caught:
        scores(clients, Counter.check, {}, NOW)
    assert caught.value.sender == "b"
    assert len(caught.value.reason) < 200


@pytest.mark.parametrize(("f1", "fits"), [(0.0, True), (1.0, True), (1.5, False), (-0.5, False)])
def test_a_macro_f1_is_between_0_and_1_and_may_be_either(f1: float, fits: bool) -> None:
    reply = Checked(4, {"": 1, "own": 1}, {"": f1, "own": 0.5})
    clients = Clients(["a"], Backwards({"a": Counter(reply=reply)}), NOW, [0])
    if fits:
        assert [s.macro_f1 for s in scores(clients, Counter.check, {}, NOW)] == [f1, 0.5]
        return
    with pytest.raises(BadMessageError, match="not between 0 and 1"):
        scores(clients, Counter.check, {}, NOW)


def test_of_several_clients_the_one_with_other_variants_is_refused() -> None:
    other = Counter(reply=Checked(4, {"x": 1}, {"x": 0.5}))
    clients = Clients(["a", "b", "c"], Backwards({"a": other, "b": Counter(), "c": Counter()}), NOW)
    with pytest.raises(BadMessageError, match="not those of the other clients") as caught:
        scores(clients, Counter.check, {}, NOW)
    assert caught.value.sender == "a"


def test_a_reason_is_recorded_with_at_most_300_letters() -> None:
    judge = Guard(RobustOptions(), quorum=True)
    clients = Clients(["a", "b", "c"], Backwards({}), Moment(1, 2, 9), guard=judge)
    clients.exclude(Counter.check, {"c": BadMessageError("c", "x" * 400)}, 3)
    assert clients.exclusions == [Exclusion(1, 2, "c", "check", "x" * 300)]


class Away:
    """A transport that brings answers of some clients only."""

    def __init__(self, answers: dict[str, Packet]) -> None:
        self.answers = answers

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        return {id: self.answers[id] for id in packets if id in self.answers}


@pytest.mark.parametrize(
    ("at_least", "there", "fails"), [(0, 2, True), (2, 2, False), (2, 1, True)]
)
def test_a_client_that_is_away_is_named_or_missed(at_least: int, there: int, fails: bool) -> None:
    ids = ("a", "b", "c")
    transport = Away({id: pack(Checked(1, {"": 1}, {"": 1.0})) for id in ids[:there]})
    clients = Clients(ids, transport, Moment(1, 2, 9), at_least=at_least)
    if fails:
        with pytest.raises(ClientFailedError, match=f"client {ids[there]} failed in check"):
            clients.ask_all(Counter.check, Check(0, {}))
        return
    assert list(clients.ask_all(Counter.check, Check(0, {}))) == ["a", "b"]
    assert clients.absences == [Absence(1, 2, "c", "check")]
    assert {message.receiver for message in clients.traffic} == {"server", "a", "b"}


@pytest.mark.parametrize(("asked", "fails"), [("ade", False), ("cde", True), ("de", True)])
def test_of_some_that_are_asked_as_many_may_be_away_as_of_all(asked: str, fails: bool) -> None:
    ids = ("a", "b", "c", "d", "e")
    transport = Away({id: pack(Checked(1, {"": 1}, {"": 1.0})) for id in "ab"})
    clients = Clients(ids, transport, NOW, at_least=3)
    requests = dict.fromkeys(asked, Check(0, {}))
    if fails:
        with pytest.raises(ClientFailedError, match="it did not answer"):
            clients.ask(Counter.check, requests)
        return
    assert list(clients.ask(Counter.check, requests)) == ["a"]
    assert [absence.client for absence in clients.absences] == ["d", "e"]


def test_hits_of_as_many_variants_as_there_may_be_are_possible_and_of_one_more_are_not() -> None:
    many = {str(number): 1 for number in range(1000)}
    possible(many, 1, "site")
    with pytest.raises(BadMessageError, match="hits of"):
        possible({**many, "more": 1}, 1, "site")


@pytest.mark.parametrize("hits", [{"a": 2, "b": -1}, {"a": 2, "b": 6}])
def test_one_count_that_cannot_be_is_refused_among_others_that_can(hits: dict[str, int]) -> None:
    possible({"a": 0, "b": 5}, 5, "site")
    with pytest.raises(BadMessageError, match="on 5 rows") as caught:
        possible(hits, 5, "site")
    assert caught.value.sender == "site"


def test_a_mean_by_rows_weighs_each_client_by_its_rows_and_refuses_what_cannot_be() -> None:
    assert shares({"a": 3, "b": 0, "c": (1 << 53) - 1}) == [3.0, 0.0, 2.0**53 - 1]
    for rows in (-1, 1 << 53):
        with pytest.raises(BadMessageError, match="rows") as caught:
            shares({"a": 3, "b": rows})
        assert caught.value.sender == "b"


def test_an_answer_that_is_not_admitted_is_refused_or_with_a_guard_left_out() -> None:
    def admit(id: str, reply: Weights) -> None:
        if id == "b":
            raise BadMessageError(id, "not this one")

    ids = ["a", "b", "c", "d"]
    transport = Backwards({id: Counter() for id in ids})
    with pytest.raises(BadMessageError, match="not this one") as caught:
        Clients(ids, transport, NOW).ask_all(Counter.fit, weights(w=1.0), admit)
    assert caught.value.sender == "b"
    guard = Guard(RobustOptions(), quorum=True)
    guarded = Clients(ids, transport, NOW, guard=guard)
    assert list(guarded.ask_all(Counter.fit, weights(w=1.0), admit)) == ["a", "c", "d"]
    assert [(out.client, out.reason) for out in guarded.exclusions] == [("b", "not this one")]
