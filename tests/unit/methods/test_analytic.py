"""The closed form: equal to all rows in one place; sites come late, are absent, and withdraw."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Check, Packet, Tensors
from atoll.engines.local import LocalEngine
from atoll.learning import ridge
from atoll.methods import analytic
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts

STAGES = 3
SMALL = {
    "data": "digits-table", "split": "classes", "clients": 4, "stages": STAGES, "rows": "dirichlet",
    "width": 40, "floor": 1, "engine.mode": "loop",
}  # fmt: skip


def made(**options: Any) -> Parts:
    return parts(resolve(change({"method": "analytic"}, {**SMALL, **options}), "test"))


class Absent:
    """A transport at whose end some clients are away at some stages, or lose their answers."""

    def __init__(self, found: Parts, away: Mapping[int, set[str]], lost: bool = False) -> None:
        self.engine, self.away, self.lost = LocalEngine(found), away, lost

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        away = self.away.get(moment.stage, set())
        asked = packets if self.lost else {id: p for id, p in packets.items() if id not in away}
        replies = self.engine.carry(action, moment, asked)
        return {id: reply for id, reply in replies.items() if id not in away}


def run(found: Parts, away: Mapping[int, set[str]] | None = None, **how: Any) -> Any:
    """The server after all stages; `ids` are the clients that it knows."""
    ids = how.pop("ids", found.scenario.clients)
    transport, server = Absent(found, away or {}, **how), found.server()
    for stage in range(STAGES):
        moment = Moment(stage, 0, 1)
        server.round(Clients(ids, transport, moment, at_least=1), moment)
    return server


def equal(one: Tensors, two: Tensors) -> bool:
    """Whether two states have the same names and the same bits."""
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def pooled(found: Parts) -> tuple[Tensor, Tensor]:
    """The features and one-hot labels of all training rows in one place."""
    inputs, labels = [], []
    for id in found.scenario.clients:
        client = found.client(id)
        for stage in range(STAGES):
            rows = client.site.train(stage)
            inputs.append(client._inputs(client.frozen, rows))
            labels.append(rows.y)
    return torch.cat(inputs), F.one_hot(torch.cat(labels), 10).double()


def test_float_sums_give_the_ridge_regression_of_all_rows() -> None:
    found = made(bits=0, strength=0.5)
    inputs, labels = pooled(found)
    # least squares with sqrt(strength) I below the rows is the same problem, solved another way
    below = 0.5**0.5 * torch.eye(inputs.shape[1], dtype=torch.float64)
    targets = torch.cat([labels, labels.new_zeros((len(below), 10))])
    expected = torch.linalg.lstsq(torch.cat([inputs, below]), targets).solution
    solution = run(found)._solution()
    torch.testing.assert_close(solution.weight, expected, rtol=1e-9, atol=1e-9)
    assert solution.seen.all()


def test_fixed_point_sums_are_within_half_a_step_for_each_site_and_stage() -> None:
    found = made(bits=12)
    inputs, labels = pooled(found)
    sums = run(found).sums
    room = 4 * STAGES * 2.0**-13 * (1 + 1e-6)
    gram = ridge.square(ridge.from_fixed(sums["gram"], 12), inputs.shape[1])
    cross = ridge.from_fixed(sums["cross"], 12)
    assert float((gram - inputs.T @ inputs).abs().max()) <= room
    assert float((cross - inputs.T @ labels).abs().max()) <= room
    assert not torch.equal(gram, inputs.T @ inputs)


@pytest.mark.parametrize("lost", [False, True])
def test_a_site_that_comes_late_or_whose_answer_is_lost_ends_as_one_that_was_there(
    lost: bool,
) -> None:
    found = made()
    away = {0: {"site-1", "site-2"}, 1: {"site-2"}}
    state = run(found, away, lost=lost).state()
    assert equal(state, run(found).state())
    assert state["stages/site-2"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("away", [{}, {0: {"site-2"}}, {1: {"site-2"}}])
@pytest.mark.parametrize("lost", [False, True])
def test_after_a_withdrawal_the_state_is_that_of_a_federation_without_the_site(
    away: dict[int, set[str]], lost: bool
) -> None:
    found = made(withdraw=["site-2"])
    state = run(found, away, lost=lost).state()
    others = [id for id in found.scenario.clients if id != "site-2"]
    never = run(made(), ids=others).state()
    assert equal(state, never)
    assert not equal(state, run(made()).state())


def test_a_site_restored_from_its_state_withdraws_the_very_sums_that_it_sent() -> None:
    found = made()
    client, moment = found.client("site-1"), Moment(0, 0, 1)
    reply = client.add(analytic.Ask(()), moment)
    other = made(projection=1).client("site-1")  # computes other sums from its rows
    other.restore(client.state())
    again = other.withdraw(analytic.Ask((0,)), moment)
    assert equal(again.sums, reply.sums)


def test_a_second_round_of_a_stage_sends_nothing() -> None:
    found = made()
    server, engine = found.server(), LocalEngine(found)
    sizes = []
    for number in range(2):
        moment = Moment(0, number, 2)
        clients = Clients(found.scenario.clients, engine, moment)
        server.round(clients, moment)
        sizes.append(sum(message.payload for message in clients.traffic))
    triangle, cross = 41 * 42 // 2, 41 * 10
    assert sizes == [4 * 8 * (triangle + cross), 0]


def test_classes_below_the_floor_are_not_sent() -> None:
    found = made(stages=1, rows="even", clients=8)
    client = found.client("site-0")
    counts = client.site.train(0).y.bincount(minlength=10)
    floor = int(counts.sort().values[5])  # between the classes with fewest and most rows
    client.options = dataclasses.replace(client.options, floor=floor)
    reply = client.add(analytic.Ask(()), Moment(0, 0, 1))
    sent = (ridge.from_fixed(reply.sums["cross"][-1], 20)).long()
    assert sent.tolist() == [int(n) if n >= floor else 0 for n in counts]
    assert reply.held_back == int(counts[counts < floor].sum()) > 0


def test_a_class_that_nobody_had_yet_is_not_predicted() -> None:
    found = made()
    server, moment = found.server(), Moment(0, 0, 1)
    server.round(Clients(found.scenario.clients, LocalEngine(found), moment), moment)
    client = found.client("site-0")
    client.receive(server._solution(), moment)
    rows = client.site.test(2)  # digits of the last stage
    guesses = client.predict(client.final_model({}, "", 0), rows).argmax(1)
    assert set(guesses.tolist()) <= set(found.client("site-0").site.test(0).y.tolist())
    assert client.check(Check(2, {}), moment).correct == {"": 0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"withdraw": ["site-9"]}, "unknown site 'site-9'"),
        ({"withdraw": ["site-1"], "trained_by": ["site-0", "site-1"]}, "'site-1' trained"),
    ],
)
def test_a_withdrawal_that_cannot_be_exact_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        made(**options).server()
    made(withdraw=["site-1"], trained_by=["site-0"]).server()


class Lying(Absent):
    """A transport that shows the server other sums of one site."""

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        replies = dict(super().carry(action, moment, packets))
        message: Any = replies["site-1"].message
        sums = {**message.sums, "gram": message.sums["gram"] - 1}
        replies["site-1"] = dataclasses.replace(
            replies["site-1"], message=dataclasses.replace(message, sums=sums)
        )
        return replies


def test_sums_that_no_rows_have_are_refused_with_the_name_of_the_site() -> None:
    found, moment = made(), Moment(0, 0, 1)
    clients = Clients(found.scenario.clients, Lying(found, {}), moment, packing=False)
    with pytest.raises(BadMessageError, match="site-1 refused: sums that no rows have"):
        found.server().round(clients, moment)


def test_features_of_the_network_are_used_where_asked() -> None:
    found = made(features="network", widths=[7])
    assert run(found).sums["cross"].shape == (8, 10)


def test_texts_have_no_random_features() -> None:
    found = made(data="synthetic-text", stages=1, rows="even", clients=2)
    moment = Moment(0, 0, 1)
    clients = Clients(found.scenario.clients, LocalEngine(found), moment)
    with pytest.raises(UserError, match="texts have no random features"):
        found.server().round(clients, moment)
