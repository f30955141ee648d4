"""Low-rank adapters are looked at as the network that they make, and as matrices of their own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.messages import Tensors
from atoll.engines.network import egress
from atoll.engines.network.audit import shown_rows
from atoll.engines.network.drafts import drafted_contract, written
from atoll.learning import adapters

from .row_recovery import HONEST, Coordinator, run_config, site

ANY: dict[str, Any] = {"initial_weights": "any", "move": 0.0, "drift": 0.0}


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    """A coordinator that may send any weights."""
    config = run_config(HONEST, "lowrank")
    terms = replace(drafted_contract(config), **ANY)
    made = Coordinator(site(tmp_path, written(terms)))
    assert made.open("attack", config), made.refusals
    return made


def first(coordinator: Coordinator) -> Tensors:
    """The weights that an honest coordinator begins with."""
    found: Tensors = coordinator.gate._checked.derived["shared"]
    return {name: tensor.clone() for name, tensor in found.items()}


def reached_by_one(coordinator: Coordinator) -> Tensors:
    """Adapters that turn one unit with a negative bias until a single row reaches it."""
    base, rows = coordinator.gate._client.base, coordinator.rows()
    made, unit = first(coordinator), int(base["bias0"].argmin())
    assert base["bias0"][unit] < 0
    for row in rows:
        direction = row - rows.mean(0)
        reach, order = (rows @ direction).sort()
        second, highest = reach[-2:]
        if torch.equal(rows[order[-1]], row) and float(highest - second) > 0.01:
            wanted = direction * -base["bias0"][unit] / ((highest + second) / 2)
            made["up/weight0"] = torch.zeros_like(made["up/weight0"])
            made["up/weight0"][unit, 0] = 1.0
            made["down/weight0"][0] = wanted - base["weight0"][unit]
            return made
    raise AssertionError("no row lies outside")


def test_honest_adapters_pass(coordinator: Coordinator) -> None:
    weights = first(coordinator)
    for number in range(2):
        back = coordinator.fit(weights, number)
        assert back is not None, coordinator.refusals
        weights = back


def test_adapters_that_make_a_unit_of_one_row_are_refused(coordinator: Coordinator) -> None:
    weights = reached_by_one(coordinator)
    whole = adapters.merged(coordinator.gate._client.base, weights)
    reached = (coordinator.rows() @ whole["weight0"].T + whole["bias0"] > 0).sum(0)
    assert int(reached.min()) == 1
    assert coordinator.fit(weights, 0) is None
    log = egress.lines(coordinator.path.parent / "store" / "egress.jsonl")
    assert any("the weights single out rows of this site in" in line.words for line in log)


def test_an_adapter_that_moves_along_a_row_shows_it() -> None:
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(20, 6, generator=draws)
    before = {"down/weight0": torch.randn(4, 6, generator=draws), "up/weight0": torch.zeros(9, 4)}
    along = {**before, "down/weight0": before["down/weight0"].clone()}
    along["down/weight0"][2] -= 0.01 * rows[7]
    assert shown_rows(before, along, rows) == 1
    mixed = {
        **before,
        "down/weight0": before["down/weight0"] + 0.01 * rows[:12].view(4, 3, 6).sum(1),
    }
    assert shown_rows(before, mixed, rows) == 0
