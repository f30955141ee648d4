"""A number of rows that a site tells and cannot have is refused by the site's name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from atoll.core.errors import BadMessageError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Packet, wrap
from atoll.engines.local import LocalEngine
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts


class Lying:
    """A transport at whose end one client tells other values than it has."""

    def __init__(self, made: Parts, **told: Any) -> None:
        self.engine, self.told, self.liar = LocalEngine(made), told, made.scenario.clients[1]

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        found = dict(self.engine.carry(action, moment, packets))
        message = found[self.liar].message
        assert message is not None
        found[self.liar] = wrap(dataclasses.replace(message, **self.told))
        return found


def made(method: str, **options: Any) -> Parts:
    small = {
        "rounds": 2,
        "data": {"name": "synthetic-table", "rows": 120},
        "scenario": {"split": "columns", "clients": 2, "ratio": 0.4},
        "model": {"widths": [6, 4]},
        "method": {"name": method, "epochs": 1, "batch": 16, **options},
    }
    return parts(resolve(change(small, {}), "test"))


def rounds(parts: Parts, count: int, **told: Any) -> None:
    server, lying = parts.server(), Lying(parts, **told)
    for number in range(count):
        moment = Moment(0, number, 2)
        server.round(Clients(parts.scenario.clients, lying, moment, packing=False), moment)


@pytest.mark.parametrize("rows", [-1, -70, 1 << 53, pytest.param(10**400, id="huge")])
@pytest.mark.parametrize("method", ["fedavg", "chfl"])
def test_a_mean_weighted_by_rows_takes_no_rows_that_cannot_be(method: str, rows: int) -> None:
    found = made(method, weighting="rows")
    with pytest.raises(BadMessageError) as caught:
        rounds(found, 1, rows=rows)
    assert caught.value.sender == found.scenario.clients[1]
    assert caught.value.reason.endswith(" rows")


@pytest.mark.parametrize(
    "told", [{"valid": {}}, {"valid_rows": -1}, {"valid_rows": 0}, {"valid_rows": 10**400}]
)
def test_hits_on_validation_rows_that_cannot_be_are_refused(told: dict[str, Any]) -> None:
    found = made("chfl")
    with pytest.raises(BadMessageError) as caught:
        rounds(found, 2, **told)
    assert caught.value.sender == found.scenario.clients[1]
