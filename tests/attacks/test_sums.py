"""Sums over rows that give rows away are refused by default, and explained where they are not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.errors import BadMessageError
from atoll.core.federation import Moment
from atoll.core.messages import Check, Weights
from atoll.engines.network import egress
from atoll.engines.network.bounds import Bounds
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.explain import explained, warnings
from atoll.methods import analytic
from atoll.runs.config import RunConfig

from .row_recovery import HONEST, STAGED, Coordinator, run_config, site
from .sums import recovered_by_span, recovered_by_units, staircase

ANALYTIC: dict[str, Any] = {
    "data.ignore": ["phase"], "rounds": 1, "width": 128, "engine.mode": "loop", "threads": 1,
}  # fmt: skip
FOT: dict[str, Any] = {**STAGED, "widths": [24], "rounds": 2, "batch": 1024}
ANY: dict[str, Any] = {"initial_weights": "any", "move": 0.0, "drift": 0.0}


def default(method: str, *actions: str) -> Contract:
    return Contract(methods=(method,), actions=(*actions, "check", "offer", "agree"))


def opened(folder: Path, contract: Contract, config: RunConfig, rows: int = 83) -> Coordinator:
    coordinator = Coordinator(
        site(folder, written(contract), rows, str(config.data.get("stage", "")))
    )
    assert coordinator.open("attack", config), coordinator.refusals
    return coordinator


def logged(coordinator: Coordinator, words: str) -> bool:
    log = egress.lines(coordinator.path.parent / "store" / "egress.jsonl")
    return any(words in line.words for line in log if line.words.startswith("refused"))


def test_sums_of_fewer_rows_than_features_give_the_rows_away(tmp_path: Path) -> None:
    config = run_config(ANALYTIC, "analytic")
    loose = replace(drafted_contract(config), sums="allow")
    coordinator = opened(tmp_path, loose, config)
    assert len(coordinator.rows()) == 50
    assert recovered_by_span(coordinator) >= 40
    assert any(line.startswith("sums = allow: ") for line in warnings(loose))


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sites prepare runs whose sums they will refuse."""
    monkeypatch.setattr(Bounds, "unfit", lambda bounds: "")


@pytest.mark.parametrize("kind", ["default", "drafted"])
def test_sums_of_fewer_rows_than_features_are_refused_before_the_run(
    kind: str, tmp_path: Path
) -> None:
    config = run_config(ANALYTIC, "analytic")
    terms = {"default": default("analytic", "add"), "drafted": drafted_contract(config)}[kind]
    coordinator = Coordinator(site(tmp_path, written(terms)))
    assert not coordinator.open("attack", config)
    assert logged(coordinator, "'prepare': sums of 129 columns over 50 training rows")
    assert coordinator.gate._client is None


@pytest.mark.usefixtures("unforeseen")
@pytest.mark.parametrize("kind", ["default", "drafted"])
def test_nothing_by_sums_of_fewer_rows_than_features(kind: str, tmp_path: Path) -> None:
    config = run_config(ANALYTIC, "analytic")
    terms = {"default": default("analytic", "add"), "drafted": drafted_contract(config)}[kind]
    coordinator = opened(tmp_path, terms, config)
    assert recovered_by_span(coordinator) == 0
    words = "sums of 129 columns over 50 training rows; the contract wants at least as many rows"
    assert logged(coordinator, words)
    assert not any(line.startswith("sums") for line in warnings(terms))
    assert any("sums over its training rows" in line for line in explained(terms))


def test_sums_with_enough_rows_leave(tmp_path: Path) -> None:
    config = run_config({**ANALYTIC, "width": 49}, "analytic")
    coordinator = opened(tmp_path, drafted_contract(config), config)
    assert coordinator.ask("add", Moment(0, 0, 1), analytic.Ask(())) is not None


@pytest.mark.usefixtures("unforeseen")
def test_every_stage_has_enough_rows_by_itself(tmp_path: Path) -> None:
    """Two answers can be subtracted, so 50 rows of two stages do not stand for each other."""
    config = run_config(
        {**ANALYTIC, "data.ignore": [], "data.stage": "phase", "width": 40}, "analytic"
    )
    coordinator = opened(tmp_path, drafted_contract(config), config)
    assert coordinator.ask("add", Moment(1, 0, 1), analytic.Ask(())) is None
    assert logged(coordinator, "sums of 41 columns over 25 training rows")


@pytest.mark.parametrize("action", ["add", "withdraw"])
def test_sums_of_a_stage_to_come_are_refused(action: str, tmp_path: Path) -> None:
    config = run_config(
        {**ANALYTIC, "data.ignore": [], "data.stage": "phase", "width": 8}, "analytic"
    )
    coordinator = opened(tmp_path, drafted_contract(config), config)
    for stages in ((1,), (0, 1), (-1,)):
        with pytest.raises(BadMessageError, match="sums of a stage that has not come yet"):
            coordinator.ask(action, Moment(0, 0, 1), analytic.Ask(stages))
    assert logged(coordinator, f"'{action}': sums of a stage that has not come yet")
    assert coordinator.ask("withdraw", Moment(1, 0, 1), analytic.Ask((0, 1))) is not None


@pytest.mark.usefixtures("unforeseen")
def test_rows_that_sums_leave_out_stand_for_none(tmp_path: Path) -> None:
    """Classes below the floor are in no sum, also in one that is sent once more."""
    config = run_config({**ANALYTIC, "width": 30, "floor": 25}, "analytic")
    coordinator = opened(tmp_path, drafted_contract(config), config)
    assert coordinator.rows().shape[0] == 50
    labels = coordinator.gate._client.site.train(0).y
    few = int(labels.bincount().amax())
    assert 25 < few < 31  # one of two classes
    assert coordinator.ask("add", Moment(0, 0, 1), analytic.Ask(())) is None
    assert coordinator.ask("withdraw", Moment(0, 0, 1), analytic.Ask((0,))) is None
    assert logged(coordinator, f"sums of 31 columns over {few} training rows")


def test_a_round_has_one_classifier(tmp_path: Path) -> None:
    """Each classifier of the coordinator's making tells the label of a test row by its hits."""
    config = run_config({**ANALYTIC, "rounds": 3, "width": 8}, "analytic")
    coordinator = opened(tmp_path, drafted_contract(config), config)
    both, draws = torch.tensor([True, True]), torch.Generator().manual_seed(1)
    one, two = (torch.randn(9, 2, dtype=torch.float64, generator=draws) for _ in range(2))
    for number in (0, 1):
        now = Moment(0, number, 3)
        assert coordinator.ask("receive", now, analytic.Classifier(one, both)) is not None
        assert coordinator.ask("check", now, Check(0, {})) is not None
        assert coordinator.ask("receive", now, analytic.Classifier(one, both)) is not None
        assert coordinator.ask("receive", now, analytic.Classifier(two, both)) is None
    assert logged(coordinator, "other weights for a second test in one round")
    assert coordinator.reopen("attack")
    again = coordinator.ask("receive", Moment(0, 0, 3), analytic.Classifier(two, both))
    assert again is None
    assert logged(coordinator, "round 1 of stage 1 had other weights when it came first")


# Sums of what a network of the coordinator's computes


def test_units_give_rows_away_where_any_weights_may_come(tmp_path: Path) -> None:
    config = run_config({**FOT, "widths": [512], "dtype": "float64"}, "fot")
    loose = {**ANY, "unit_rows": 1, "sums": "allow"}
    coordinator = opened(tmp_path, replace(drafted_contract(config), **loose), config)
    weights = staircase(coordinator.first)
    assert recovered_by_units(coordinator, weights, Moment(0, 1, 2)) >= 8


def test_nothing_by_the_sums_of_weights_that_single_out_rows(tmp_path: Path) -> None:
    """What training with such weights would be refused for, their sums are refused for too."""
    config = run_config(FOT, "fot")
    terms = replace(drafted_contract(config), **ANY)
    coordinator = opened(tmp_path, terms, config)
    weights = staircase(coordinator.first)
    assert recovered_by_units(coordinator, weights, Moment(0, 1, 2)) == 0
    assert logged(coordinator, "rows of this site in")


def test_sums_are_for_the_end_of_a_stage(tmp_path: Path) -> None:
    config = run_config({**FOT, "rounds": 3}, "fot")
    coordinator = opened(tmp_path, drafted_contract(config), config)
    first = coordinator.first
    assert coordinator.ask("activations", Moment(0, 0, 3), Weights(first)) is None
    assert logged(coordinator, "sums over rows are for the last round of a stage")
    assert coordinator.ask("activations", Moment(0, 2, 3), Weights(first)) is not None


def test_a_network_that_is_wider_than_a_stage_has_rows_is_refused_before_the_run(
    tmp_path: Path,
) -> None:
    config = run_config({**FOT, **HONEST, "data.ignore": [], "data.stage": "phase"}, "fot")
    coordinator = Coordinator(site(tmp_path, written(drafted_contract(config)), 83, "phase"))
    assert not coordinator.open("attack", config)
    assert logged(coordinator, "sums of 33 columns over 25 training rows")
