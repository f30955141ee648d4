"""Pooled training: one site with the rows of all, as an upper bound of joining."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import engines, methods
from atoll.engines.local import local_engine
from atoll.metrics.answer import JOINED, POOLED
from atoll.report import verdict
from atoll.report.tables import gather
from atoll.runs.alone import pooled_parts
from atoll.runs.answer import write_answer
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.testing import Case


def config(**changes: Any) -> RunConfig:
    values = {"name": "fedavg", "method": {"name": "fedavg"}, "data": "breast-cancer", "rounds": 2}
    return resolve(change(values, {"clients": 3, "engine.mode": "loop", **changes}), "test")


def test_one_site_has_the_rows_of_all() -> None:
    made = parts(config())
    pooled = pooled_parts(made)
    held = [made.scenario.holdings[id][0] for id in made.scenario.clients]
    (mine,) = pooled.scenario.holdings[POOLED]
    assert sorted(mine.train) == sorted(np.concatenate([one.train for one in held]))
    assert sorted(mine.valid) == sorted(np.concatenate([one.valid for one in held]))
    assert not np.intersect1d(mine.train, np.concatenate(made.scenario.tests["site-0"])).size


def test_columns_that_only_some_have_are_common_or_own() -> None:
    split = {"scenario.split": "columns", "scenario.ratio": 0.4}
    made = parts(config(**split))
    every = set(made.scenario.common)
    for held in made.scenario.holdings.values():
        every |= set(held[0].own)
    plain = pooled_parts(made).scenario
    assert set(plain.common) == every
    chfl = resolve(change({"method": {"name": "chfl"}, "data": "breast-cancer"}, split), "test")
    scenario = pooled_parts(parts(chfl)).scenario
    assert set(scenario.holdings[POOLED][0].own) | set(scenario.common) == every
    assert not set(scenario.holdings[POOLED][0].own) & set(scenario.common)


QUADRANTS = {
    "data": "digits", "clients": 4, "scenario.split": "parties", "scenario.cut": "quadrants",
    "rate": 0.1, "batch": 32, "rounds": 10,
}  # fmt: skip


@pytest.mark.parametrize("network", ["auto", "mlp"])
@pytest.mark.parametrize("name", ["splitnn", "vleto"])
def test_columns_in_one_place_are_read_by_a_network_of_the_parties_kind(
    name: str, network: str
) -> None:
    made = parts(config(method={"name": name}, **QUADRANTS, **{"method.network": network}))
    pooled = pooled_parts(made)
    assert pooled.site(POOLED).inputs() == (1, 8, 8)  # `auto` alone would choose lenet3 for it
    kinds = {repr(made.client(id).learner.half.network) for id in made.scenario.clients}
    assert {repr(pooled.client(POOLED).learner.half.network)} == kinds == {"Bottom(blocks=0)"}
    assert repr(pooled.server().head.network) == repr(made.server().head.network)


def test_parties_with_several_kinds_of_networks_leave_the_choice_to_the_shape() -> None:
    strips = QUADRANTS | {"clients": 2, "scenario.cut": "strips"}
    made = parts(config(method={"name": "splitnn"}, **strips))
    pixels = np.arange(64)
    uneven = {
        id: tuple(dataclasses.replace(stage, own=own) for stage in made.scenario.holdings[id])
        for id, own in zip(made.scenario.clients, (pixels[:56], pixels[56:]), strict=True)
    }
    made = dataclasses.replace(made, scenario=dataclasses.replace(made.scenario, holdings=uneven))
    kinds = [repr(made.client(id).learner.half.network) for id in made.scenario.clients]
    assert kinds == ["Bottom(blocks=3)", "Bottom(blocks=0)"]  # of 7x8 and 1x8 pixels
    assert pooled_parts(made).config.method["network"] == "auto"


def test_all_columns_in_one_place_are_about_as_good_as_joined(tmp_path: Path) -> None:
    execute(config(method={"name": "vleto"}, **QUADRANTS), tmp_path / "run", local_engine)
    scores = write_answer([tmp_path / "run"], engines.load)["sites"]["site-0"]["scores"]
    assert scores[JOINED] > 0.9
    assert scores[POOLED] > scores[JOINED] - 0.05


@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_a_pooled_score(name: str, tmp_path: Path) -> None:
    execute(Case(name).config(rounds=1, **{"engine.mode": "loop"}), tmp_path / "run", local_engine)
    body = write_answer([tmp_path / "run"], engines.load)
    assert body["sites"] or body["withheld"]
    for site in body["sites"].values():
        assert 0 <= site["scores"][POOLED] <= 1


def test_the_report_shows_it_as_a_tick_and_in_the_card(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run", local_engine)
    body = write_answer([tmp_path / "run"], engines.load)
    (group,) = gather([tmp_path / "run"])
    plot = verdict.gain_plot(group)
    assert plot is not None
    assert all(POOLED in [tick.name for tick in row.ticks] for row in plot.rows)
    card = verdict.card(group)
    assert not any("party" in note for note in card.notes)
    score = dict(card.numbers)["Trained on the rows of all sites together"]
    assert score.endswith("only a comparison: in practice rows may not leave a site")
    scores = [site["scores"] for site in body["sites"].values()]
    assert all(set(one) >= {JOINED, POOLED} for one in scores)


def test_where_parties_hold_columns_the_card_says_so_and_why_joining_can_be_better(
    tmp_path: Path,
) -> None:
    case = Case("splitnn").config(rounds=1, **{"engine.mode": "loop"})
    execute(case, tmp_path / "run", local_engine)
    write_answer([tmp_path / "run"], engines.load)
    (group,) = gather([tmp_path / "run"])
    card, plot = verdict.card(group), verdict.gain_plot(group)
    score = dict(card.numbers)["Trained on the columns of all sites together"]
    assert score.endswith("only a comparison: in practice columns may not leave a site")
    assert card.notes[-1] == (
        "In one place, one network as wide as that of one party reads all columns; the parties "
        "together have more units, so joining can score higher."
    )
    assert plot is not None
    assert plot.held == "columns"


def test_it_can_be_left_out(tmp_path: Path) -> None:
    execute(config(**{"report.pooled": False}), tmp_path / "run", local_engine)
    body = write_answer([tmp_path / "run"], engines.load)
    assert all(POOLED not in site["scores"] for site in body["sites"].values())
