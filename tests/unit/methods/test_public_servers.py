"""Rounds of the servers that exchange logits, with clients that answer as written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.core.errors import ClientFailedError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Packet, Weights, wrap
from atoll.core.rng import Stream
from atoll.core.rows import Public
from atoll.families.distillation import Aligned, Joined, Trained
from atoll.methods import fccl, fedmatch, fedmd, fml

IMAGES, BATCH, CLASSES = 5, 2, ["x", "y"]  # two steps; the image that is left over is dropped
PUBLIC = Public(torch.zeros(IMAGES, 1, 2, 2), torch.zeros(1, 1, 1), torch.ones(1, 1, 1), "print")
FIRST = Moment(0, 0, 4)
SMALL = {"public_batch": BATCH}
Answer = Callable[[str, Any, Moment], Any]


def site(*ids: str) -> Any:
    return SimpleNamespace(
        public=lambda: PUBLIC,
        classes=CLASSES,
        clients=list(ids),
        stream=lambda *parts: Stream.of(*map(str, parts)),
        shared_model=lambda: torch.nn.Linear(1, 1),
    )


LOSSES = {"a": 1.0, "b": 4.0, "c": 7.0}


@dataclass
class Scripted:
    """A transport whose clients answer with numbers of their own."""

    answers: dict[str, Answer] = field(default_factory=dict)  # by action, others as usual
    asked: list[tuple[str, str, Any]] = field(default_factory=list)

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        self.asked += [(action, id, packet.message) for id, packet in packets.items()]
        answer = self.answers.get(action, self.usual(action))
        return {id: wrap(answer(id, packet.message, moment)) for id, packet in packets.items()}

    def usual(self, action: str) -> Answer:
        return {
            "join": lambda id, request, moment: Joined("print", IMAGES, CLASSES),
            "prepare": lambda id, request, moment: Trained(LOSSES[id]),
            "align": aligned,
            "share": lambda id, request, moment: Weights({"w": torch.tensor([LOSSES[id]])}),
            "rate": lambda id, request, moment: fedmd.Rated(torch.tensor([0.5, 0.5])),
            "fit": lambda id, request, moment: Trained(LOSSES[id]),
        }[action]

    def actions(self) -> list[str]:
        """What was asked, exchange by exchange."""
        return [action for action, id, _ in self.asked if id == "a"]

    def requests(self, action: str, id: str = "a") -> list[Any]:
        return [request for what, who, request in self.asked if (what, who) == (action, id)]


def aligned(id: str, request: Any, moment: Moment) -> Aligned:
    """Rising logits in two steps; the third exchange asks for none."""
    rising = torch.tensor([[0.0, 0.0], [1.0, 2.0]]) * LOSSES[id]
    return Aligned(rising if request.step < 2 else torch.zeros(0), LOSSES[id])


def round_of(
    server: Any, transport: Scripted, moment: Moment = FIRST, ids: str = "ab"
) -> dict[str, float]:
    clients = Clients(list(ids), transport, moment, packing=False)
    return dict(server.round(clients, moment))


def fccl_server(**options: Any) -> fccl.Server:
    return fccl.Server(fccl.Options(**{**SMALL, **options}), site("a", "b"))


def fedmd_server(**options: Any) -> fedmd.Server:
    return fedmd.Server(fedmd.Options(**{**SMALL, **options}), site("a", "b"))


def fedmatch_server(**options: Any) -> fedmatch.Server:
    return fedmatch.Server(fedmatch.Options(**{**SMALL, **options}), site("a", "b", "c"))


SERVERS = [fccl_server, fedmd_server, fedmatch_server]


@pytest.mark.parametrize("server", SERVERS)
def test_clients_join_and_train_alone_before_the_first_round_of_the_run_only(
    server: Callable[..., Any],
) -> None:
    every, usual = server(), ["align"] * 3 + ["fit"]
    for moment, begins in (
        (Moment(0, 0, 4), True),
        (Moment(0, 1, 4), False),
        (Moment(1, 0, 4), False),
    ):
        transport = Scripted()
        notes = round_of(every, transport, moment)
        assert transport.actions() == (["join", "prepare"] if begins else []) + usual
        assert notes["loss"] == (1 + 4) / 2
        assert notes["aligned"] == (1 + 4) / 2
        assert notes.get("prepared") == (2.5 if begins else None)


@pytest.mark.parametrize("server", SERVERS)
def test_with_averaging_all_train_from_the_mean_of_all_weights(server: Callable[..., Any]) -> None:
    transport = Scripted()
    round_of(server(average=True), transport)
    assert transport.actions()[-2:] == ["share", "fit"]
    assert transport.requests("fit")[0].weights["w"].tolist() == [2.5]
    plain = Scripted()
    round_of(server(), plain)
    assert plain.requests("fit")[0].weights == {}


@pytest.mark.parametrize("server", [fccl_server(collaborate=False), fedmd_server(loss="none")])
def test_without_the_collaborative_part_clients_only_train(server: Any) -> None:
    transport = Scripted()
    notes = round_of(server, transport, Moment(0, 1, 4))
    assert transport.actions() == ["fit"]
    assert notes == {"loss": 2.5}


def test_fccl_with_one_exchange_a_round_asks_for_all_images_at_once() -> None:
    def all_at_once(id: str, request: Any, moment: Moment) -> Aligned:
        rows = torch.arange(10.0).view(IMAGES, 2) * LOSSES[id]
        return Aligned(torch.zeros(0) if request.step else rows, 3.0)

    transport = Scripted({"align": all_at_once})
    round_of(fccl_server(exchange="round"), transport, Moment(0, 1, 4))
    assert [request.step for request in transport.requests("align")] == [0, 1]


def test_fccl_notes_the_correlations_of_those_who_answered_the_last_exchange() -> None:
    """Alone, a client is its own mean: 1 on the diagonal, and its columns rise and fall."""

    def one_leaves(id: str, request: Any, moment: Moment) -> Aligned:
        if id == "b" and request.step == 1:
            raise ClientFailedError(id, "align", "its machine is gone")
        sign = torch.tensor([1.0, -1.0]) if id == "a" else torch.tensor([-1.0, -1.0])
        rows = torch.tensor([[0.0], [1.0]]) * sign * LOSSES[id]
        return Aligned(rows if request.step < 2 else torch.zeros(0), 1.0)

    notes = round_of(fccl_server(absent=1), Scripted({"align": one_leaves}), Moment(0, 1, 4))
    assert notes["excluded b"] == 1.0
    assert notes["diagonal"] == pytest.approx(1.0)
    assert notes["off diagonal"] == pytest.approx(-1.0)


@pytest.mark.parametrize("classes", [["x"], ["x", "y"], ["x", "y", "z"]])
@pytest.mark.parametrize(("slopes", "mean"), [((1.0, 2.0), 1.0), ((1.0, -3.0), 0.0)])
def test_fccl_notes_the_mean_correlation_on_and_off_the_diagonal(
    classes: list[str], slopes: tuple[float, float], mean: float
) -> None:
    """All columns are alike; with slopes 1 and -3 the mean falls, against the first."""

    def sloped(id: str, request: Any, moment: Moment) -> Aligned:
        rows = torch.tensor([[0.0], [1.0]]) * slopes["ab".index(id)] * torch.ones(len(classes))
        return Aligned(rows if request.step < 2 else torch.zeros(0), 1.0)

    server = fccl_server()
    server.site.classes = tuple(classes)
    notes = round_of(server, Scripted({"align": sloped}), Moment(0, 1, 4))
    assert notes["diagonal"] == pytest.approx(mean, abs=1e-6)
    assert notes["off diagonal"] == pytest.approx(mean if len(classes) > 1 else 0.0, abs=1e-6)


def test_rcfl_asks_each_client_how_far_it_is_to_be_trusted() -> None:
    def trusted(id: str, request: Any, moment: Moment) -> fedmd.Rated:
        return fedmd.Rated(torch.tensor({"a": [0.75, 1.0], "b": [0.25, 1.0]}[id]))

    transport = Scripted({"rate": trusted})
    round_of(fedmd_server(loss="rcfl"), transport, Moment(0, 1, 4))
    assert transport.actions()[0] == "rate"
    target = transport.requests("align")[1].target
    assert target.tolist() == [[0.0, 0.0], [0.75 * 1 + 0.25 * 4, 0.5 * 2 + 0.5 * 8]]
    plain = Scripted()
    round_of(fedmd_server(), plain, Moment(0, 1, 4))
    assert "rate" not in plain.actions()
    assert plain.requests("align")[1].target.tolist() == [[0.0, 0.0], [2.5, 5.0]]


def test_fedmatch_chooses_helpers_anew_every_few_rounds_and_keeps_them_between() -> None:
    def moving(id: str, request: Any, moment: Moment) -> Aligned:
        """In even rounds b is near a, in odd ones c is."""
        far = "b" if moment.round % 2 else "c"
        logits = torch.full((BATCH, 2), 0.0)
        logits[:, 0] = {"a": 0.0, far: 5.0}.get(id, 1.0)
        return Aligned(logits if request.step < 2 else torch.zeros(0), 1.0)

    server, helpers = fedmatch_server(helpers=1, refresh=3), []
    for number in range(4):
        round_of(server, Scripted({"align": moving}), Moment(0, number, 4), "abc")
        helpers.append(server.helpers["a"])
    assert helpers == [["b"], ["b"], ["b"], ["c"]]


def test_fedmatch_sends_each_client_the_logits_of_its_helpers_the_nearest_first() -> None:
    server = fedmatch_server(helpers=2)
    logits = {"a": [[0.0, 0.0]], "b": [[3.0, 0.0]], "c": [[1.0, 0.0]]}
    sent = server._help({id: torch.tensor(z) for id, z in logits.items()})
    assert sent["a"].tolist() == [logits["c"], logits["b"]]
    assert sent["c"].tolist() == [logits["b"], logits["a"]]  # of 0.73: 0.95, then 0.5
    few = fedmatch_server(helpers=2)._help({id: torch.tensor(logits[id]) for id in "ab"})
    assert few["a"].tolist() == [logits["b"]]  # there is no other


def test_fedmatch_chooses_anew_where_a_helper_is_gone_or_somebody_came() -> None:
    server = fedmatch_server(helpers=1)
    near = {"a": torch.zeros(1, 2), "b": torch.tensor([[1.0, 0.0]])}
    far = {"c": torch.tensor([[9.0, 0.0]])}
    server._help({**near, **far})
    assert server.helpers == {"a": ["b"], "b": ["a"], "c": ["b"]}
    server._help({"a": near["a"], **far})
    assert server.helpers == {"a": ["c"], "c": ["a"]}
    server._help({**near, **far})
    assert server.helpers == {"a": ["b"], "b": ["a"], "c": ["b"]}


def test_fedmatch_keeps_helpers_within_a_round_though_others_come_nearer() -> None:
    server = fedmatch_server(helpers=2)
    near = {"a": [[0.0, 0.0]], "b": [[1.0, 0.0]], "c": [[3.0, 0.0]]}
    server._help({id: torch.tensor(z) for id, z in near.items()})
    moved = {"a": near["a"], "b": near["c"], "c": near["b"]}
    server._help({id: torch.tensor(z) for id, z in moved.items()})
    assert server.helpers["a"] == ["b", "c"]


def test_fml_takes_the_mean_of_the_shared_networks_that_come_back() -> None:
    def fitted(id: str, request: Any, moment: Moment) -> fml.Fitted:
        moved = {n: w + LOSSES[id] for n, w in request.weights.items()}
        return fml.Fitted(moved, LOSSES[id])

    server = fml.Server(fml.Options(), site("a", "b"))
    before = {n: w.clone() for n, w in server.weights.items()}
    for moment, begins in ((Moment(0, 0, 4), True), (Moment(1, 0, 4), False)):
        transport = Scripted({"fit": fitted})
        notes = round_of(server, transport, moment)
        assert transport.actions() == (["prepare"] if begins else []) + ["fit"]
        assert notes["loss"] == 2.5
        assert transport.requests("fit")[0].own == {}
    for name, tensor in server.weights.items():
        torch.testing.assert_close(tensor, before[name] + 5.0)  # by 2.5 in each of two rounds
    averaging = Scripted({"fit": fitted})
    round_of(fml.Server(fml.Options(average=True), site("a", "b")), averaging, Moment(0, 1, 4))
    assert averaging.actions() == ["share", "fit"]
    assert averaging.requests("fit")[0].own["w"].tolist() == [2.5]


def test_fml_goes_on_from_the_shared_network_of_a_state() -> None:
    server = fml.Server(fml.Options(), site("a", "b"))
    state = {name: torch.full_like(w, 3.0) for name, w in server.state().items()}
    server.restore(state)
    state["weight"].zero_()  # the server has a copy of its own
    assert {float(value) for w in server.state().values() for value in w.flatten()} == {3.0}
