"""Pooled training: one site with the rows of all, as an upper bound of joining."""

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
    score = dict(verdict.card(group).numbers)["Trained on the rows of all sites together"]
    assert score.endswith("only a comparison: in practice rows may not leave a site")
    scores = [site["scores"] for site in body["sites"].values()]
    assert all(set(one) >= {JOINED, POOLED} for one in scores)


def test_it_can_be_left_out(tmp_path: Path) -> None:
    execute(config(**{"report.pooled": False}), tmp_path / "run", local_engine)
    body = write_answer([tmp_path / "run"], engines.load)
    assert all(POOLED not in site["scores"] for site in body["sites"].values())
