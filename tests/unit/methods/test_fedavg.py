"""Plain averaging where some clients are away."""

from collections.abc import Mapping
from typing import Any

import pytest

from atoll.core.federation import Clients, Moment
from atoll.core.messages import Packet
from atoll.engines.local import LocalEngine
from atoll.methods import fedavg
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts


class Some:
    """A transport at whose end some clients are away."""

    def __init__(self, made: Parts, present: list[str]) -> None:
        self.engine, self.present = LocalEngine(made), present

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        there = {id: packet for id, packet in packets.items() if id in self.present}
        return self.engine.carry(action, moment, there)


def made(**options: Any) -> Parts:
    small = {"data": "wine", "clients": 4, "widths": [4], "epochs": 1}
    return parts(resolve(change({"method": "fedavg"}, {**small, **options}), "test"))


def test_the_first_that_is_there_tests_for_all() -> None:
    found = made(tester="first")
    ids, moment = found.scenario.clients, Moment(0, 0, 1)
    clients = Clients(ids, Some(found, [*ids[1:]]), moment, at_least=3)
    assert {s.client for s in found.server().evaluate(clients, moment)} == {ids[1]}


@pytest.mark.parametrize("cohort", [1, 2, 4])
def test_a_cohort_is_drawn_among_those_that_are_there(cohort: int) -> None:
    found = made(cohort=cohort)
    ids, server = found.scenario.clients, found.server()
    for number in range(6):
        moment = Moment(0, number, 6)
        clients = Clients(ids, Some(found, [*ids[2:]]), moment, at_least=2)
        server.round(clients, moment)
        asked = {message.receiver for message in clients.traffic} - {"server"}
        assert asked <= {*ids[2:]}
        assert len(asked) == min(cohort, 2)


def test_a_round_can_do_without_a_client_and_asks_a_cohort_or_all() -> None:
    assert fedavg.METHOD.quorum is True
    assert fedavg.METHOD.concurrency is not None
    sizes = [fedavg.METHOD.concurrency(fedavg.Options(cohort=cohort), 10) for cohort in (0, 3, 30)]
    assert sizes == [10, 3, 10]
