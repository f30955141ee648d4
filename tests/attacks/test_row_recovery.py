"""Row recovery at a site with 50 training rows: nothing under the default contract.

Every attack has a control: the same attack on a contract that was loosened on purpose, where it
finds rows, and where `atoll contract explain` names each term that was loosened.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.data.own import agreement
from atoll.engines.network import egress
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.explain import warnings
from atoll.runs.config import RunConfig

from . import last_step, row_recovery
from .row_recovery import (
    CRAFTED,
    HONEST,
    STAGED,
    Coordinator,
    band,
    craft,
    creep,
    quiet_trap,
    recover_by_tests,
    run_config,
    site,
    spotted,
    towards,
    trap,
)

ONCE = {**HONEST, "epochs": 1}  # one step in a round: a batch holds all rows
STEP: dict[str, Any] = {"steps": 1}
SGD = {**HONEST, "optimiser": "sgd", "rate": 0.1}
EMPTY = Contract(methods=("chfl", "fedavg"), actions=("fit", "check", "settle", "offer", "agree"))
ANY: dict[str, Any] = {"initial_weights": "any", "move": 0.0, "drift": 0.0}
MIXED: dict[str, Any] = {"unit_rows": 1, "steps": 1}
SHOWN: dict[str, Any] = {"unit_rows": 1, "shown_rows": "allow"}
OPEN: dict[str, Any] = {**ANY, **MIXED, **SHOWN}


def tiny(like: Tensors) -> Tensors:
    """Weights so small that Adam's first step is linear in the gradient."""
    return craft(like, scale=1e-6, gain=5e-11)


def attacked(folder: Path, contract: Contract, rows: int = 83, stage: str = "") -> Coordinator:
    """A hostile coordinator of a site with this contract and 50 training rows."""
    return Coordinator(site(folder, written(contract), rows, stage))


def defaults(changes: dict[str, Any], method: str = "fedavg") -> list[tuple[str, Contract]]:
    """The default contracts: one that says no more than it must, one drafted from the run."""
    return [("empty", EMPTY), ("drafted", drafted_contract(run_config(changes, method)))]


each_default = pytest.mark.parametrize("kind", ["empty", "drafted"])
each_method = pytest.mark.parametrize("method", ["fedavg", "chfl"])


# The control: what an open contract gives away


C3 = ("dtype", "scale", "method.batch", "method.rate", "method.optimiser", "model.widths")


@pytest.mark.parametrize(
    ("changes", "weights", "loosened", "options", "least"),
    [
        (CRAFTED, craft, OPEN, C3, 45),
        ({**CRAFTED, "dtype": "float32"}, craft, OPEN, C3[1:], 40),
        ({**CRAFTED, "scale": "local", "widths": [512]}, craft, OPEN, C3[2:5], 30),
        ({**SGD, "widths": [512]}, trap, {**ANY, **SHOWN}, ("method.optimiser",), 10),
        ({**HONEST, "widths": [512], "epochs": 1}, tiny, OPEN, (), 5),
        ({**HONEST, "widths": [512], "epochs": 1}, quiet_trap, OPEN, (), 20),
    ],
    ids=["C3", "float32", "scaled", "biases alone", "tiny weights", "small head"],
)
def test_a_loosened_contract_gives_rows_away_and_explain_names_why(
    changes: dict[str, Any],
    weights: Callable[[Any], Any],
    loosened: dict[str, Any],
    options: tuple[str, ...],
    least: int,
    tmp_path: Path,
) -> None:
    config = run_config(changes)
    contract = replace(drafted_contract(config), **loosened)
    coordinator = attacked(tmp_path, contract)
    assert coordinator.open("attack", config)
    coordinator.fit(weights(coordinator.first))
    assert len(coordinator.rows()) == 50
    assert coordinator.recovered() >= least
    explained = "\n".join(warnings(contract))
    for name in loosened:
        assert f"{name} = " in explained
    for name in options:
        assert f"fedavg {name} " in explained


def test_a_drafted_contract_for_an_honest_run_needs_no_warning() -> None:
    for method in ("fedavg", "chfl"):
        assert warnings(drafted_contract(run_config(HONEST, method))) == []
    assert warnings(drafted_contract(run_config(ONCE))) == []
    (only,) = warnings(replace(drafted_contract(run_config(ONCE)), **STEP))
    assert only.startswith("steps = 1: ")
    assert warnings(EMPTY) == []


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose training the site does not foresee: it looks at each piece of work by itself."""
    monkeypatch.setattr("atoll.engines.network.policy.unfit", lambda *_: "")


@each_default
def test_runs_with_too_little_behind_an_update_do_not_begin(kind: str, tmp_path: Path) -> None:
    """One step in all, a last step of one row, two steps on parts of the rows."""
    for changes in (ONCE, {**SHORT, "batch": 49}, {**SHORT, "batch": 25}):
        contract = dict(defaults(changes))[kind]
        coordinator = attacked(tmp_path / str(changes.get("batch", 0)), contract)
        assert not coordinator.open("attack", run_config(changes))
        assert "the contract wants at least" in str(coordinator.refusals)
        log = egress.lines(coordinator.path.parent / "store" / "egress.jsonl")
        assert any(coordinator.refusals[-1] in line.words for line in log)


@pytest.mark.usefixtures("unforeseen")
def test_an_update_of_a_single_step_is_refused_under_a_drafted_contract(tmp_path: Path) -> None:
    coordinator, _ = opened(tmp_path, "drafted", ONCE)
    assert coordinator.fit(coordinator.first) is None
    assert "1 steps behind an answer" in str(coordinator.refusals)


def test_check_gives_test_rows_away_where_any_weights_may_come(tmp_path: Path) -> None:
    config = run_config(HONEST)
    contract = replace(drafted_contract(config), **ANY)
    coordinator = attacked(tmp_path, contract)
    assert coordinator.open("attack", config)
    assert recover_by_tests(coordinator, Moment(0, 0, config.rounds), 1) == 1
    assert "'check'" in "\n".join(warnings(contract))


# The same under default contracts


def test_the_crafted_config_is_refused_with_option_value_and_limit(tmp_path: Path) -> None:
    for kind, contract in defaults(HONEST):
        coordinator = attacked(tmp_path / kind, contract)
        assert not coordinator.open("attack", run_config(CRAFTED))
        (line,) = egress.lines(tmp_path / kind / "store" / "egress.jsonl")
        assert 'option \'dtype\' = "float64": the contract allows "float32"' in line.words


def nothing_found(coordinator: Coordinator, stage: int = 0) -> None:
    """The site refused, wrote it down, and no row came out."""
    assert coordinator.refusals
    assert coordinator.recovered(stage) == 0
    log = egress.lines(coordinator.path.parent / "store" / "egress.jsonl")
    assert any(line.words.startswith("refused") for line in log)


def opened(
    folder: Path, kind: str, changes: dict[str, Any], method: str = "fedavg"
) -> tuple[Coordinator, RunConfig]:
    config = run_config(changes, method)
    contract = dict(defaults(changes, method))[kind]
    coordinator = attacked(folder, contract, stage=changes.get("data.stage", ""))
    assert coordinator.open("attack", config), coordinator.refusals
    return coordinator, config


@each_method
@each_default
def test_nothing_in_the_first_round(kind: str, method: str, tmp_path: Path) -> None:
    coordinator, _ = opened(tmp_path, kind, HONEST, method)
    assert coordinator.fit(craft(coordinator.first)) is None
    assert coordinator.fit(trap(coordinator.first)) is None
    first = coordinator.first
    first["bias0"][0] = first["bias0"][0].nextafter(first["bias0"][1])
    assert coordinator.fit(first) is None  # a single bit
    nothing_found(coordinator)


@each_method
@each_default
def test_nothing_in_a_later_round(kind: str, method: str, tmp_path: Path) -> None:
    coordinator, _ = opened(tmp_path, kind, HONEST, method)
    weights = coordinator.honest(3)
    for number, goal in enumerate((craft(weights), trap(weights), craft(weights, 1e-6, 5e-11))):
        assert coordinator.fit(goal, 3 + number) is None
    nothing_found(coordinator)


@each_default
def test_nothing_when_rounds_are_skipped(kind: str, tmp_path: Path) -> None:
    coordinator, _ = opened(tmp_path, kind, HONEST)
    assert coordinator.fit(craft(coordinator.first), 39) is None
    nothing_found(coordinator)


@each_default
def test_nothing_at_a_later_stage(kind: str, tmp_path: Path) -> None:
    coordinator, _ = opened(tmp_path, kind, STAGED)
    weights = coordinator.honest(2)
    assert coordinator.fit(craft(weights), 0, stage=1) is None
    nothing_found(coordinator, 1)
    assert coordinator.fit(weights, 0, stage=1) is not None  # honest ones pass


@each_default
@pytest.mark.parametrize("restored", [True, False])
def test_nothing_after_a_resume(kind: str, restored: bool, tmp_path: Path) -> None:
    coordinator, _ = opened(tmp_path, kind, HONEST)
    weights = coordinator.honest(2)
    coordinator.gate.keep("0-2")
    assert coordinator.reopen("attack")
    if restored:
        assert coordinator.gate.restore("0-2")
    assert coordinator.fit(craft(weights), 2) is None
    assert coordinator.fit(craft(weights), 0) is None
    nothing_found(coordinator)
    assert (coordinator.fit(weights, 2) is not None) == restored


@each_default
def test_nothing_under_a_second_name(kind: str, tmp_path: Path) -> None:
    coordinator, config = opened(tmp_path, kind, HONEST)
    coordinator.honest(2)
    assert coordinator.open("second", config)
    assert coordinator.fit(craft(coordinator.first)) is None
    nothing_found(coordinator)


GOALS: dict[str, Callable[[Tensors], Tensors]] = {
    "stepped": partial(craft, gain=0.01),
    "biases": trap,
    "small head": quiet_trap,
}


@pytest.mark.parametrize(
    ("changes", "loosened"),
    [(HONEST, {}), (ONCE, STEP), (SGD, {})],
    ids=["adam", "one step", "sgd"],
)
@pytest.mark.parametrize("goal", GOALS)
def test_nothing_in_small_moves_over_many_rounds(
    changes: dict[str, Any], loosened: dict[str, Any], goal: str, tmp_path: Path
) -> None:
    config = run_config(changes)
    coordinator = attacked(tmp_path, replace(drafted_contract(config), **loosened))
    assert coordinator.open("attack", config)
    creep(coordinator, GOALS[goal](coordinator.first), 0.45, 40)
    assert len(coordinator.pairs) > 2
    nothing_found(coordinator)


@pytest.mark.parametrize("loosened", [{"unit_rows": 1}, {"shown_rows": "allow"}], ids=str)
@pytest.mark.parametrize(("changes", "goal"), [(SGD, trap), (ONCE, quiet_trap)])
def test_either_look_for_single_rows_stops_small_moves(
    changes: dict[str, Any],
    goal: Callable[[Any], Any],
    loosened: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = run_config(changes)
    coordinator = attacked(tmp_path, replace(drafted_contract(config), **STEP, **loosened))
    assert coordinator.open("attack", config)
    creep(coordinator, goal(coordinator.first), 0.45, 40)
    nothing_found(coordinator)


@pytest.mark.parametrize(
    ("changes", "goal", "loosened"),
    [(SGD, trap, SHOWN), (ONCE, quiet_trap, {**SHOWN, **STEP})],
    ids=["biases", "small head"],
)
def test_small_moves_find_rows_where_units_may_single_them_out(
    changes: dict[str, Any],
    goal: Callable[[Any], Any],
    loosened: dict[str, Any],
    tmp_path: Path,
) -> None:
    config = run_config(changes)
    contract = replace(drafted_contract(config), **loosened)
    coordinator = attacked(tmp_path, contract)
    assert coordinator.open("attack", config)
    creep(coordinator, goal(coordinator.first), 0.45, 40)
    assert coordinator.recovered() >= 3
    explained = "\n".join(warnings(contract))
    for name in loosened:
        assert f"{name} = " in explained


@each_method
@each_default
def test_nothing_through_tests(kind: str, method: str, tmp_path: Path) -> None:
    coordinator, config = opened(tmp_path, kind, HONEST, method)
    assert recover_by_tests(coordinator, Moment(0, 0, config.rounds)) == 0
    if method == "fedavg":  # chfl tests its own models: what a request holds does not matter
        assert coordinator.refusals
    weights = coordinator.honest(2)
    assert recover_by_tests(coordinator, Moment(0, 1, config.rounds)) == 0
    goal = band(coordinator.first, 0.0, 1.0, 1, 0.0)
    for number in range(60):  # as many small moves, none of them an update
        weights = towards(weights, goal, 0.45, {})
        spotted(coordinator, Moment(0, number % config.rounds, config.rounds), weights)
    assert recover_by_tests(coordinator, Moment(0, 1, config.rounds)) == 0
    assert coordinator.refusals


# Fewer columns than the looks for single rows need


def fewer(monkeypatch: pytest.MonkeyPatch, count: int, gaps: bool = False) -> None:
    """The coordinator says that sites have these few columns in common."""
    usual, planned = agreement.common, agreement.planned

    def common(*given: Any) -> list[str]:
        return usual(*given)[:count]

    def plan(*given: Any) -> agreement.Plan:
        made = planned(*given)
        columns = (replace(column, gaps=gaps) for column in made.columns)
        return replace(made, columns=tuple(columns))

    for module in (agreement, row_recovery):
        monkeypatch.setattr(module, "common", common)
    monkeypatch.setattr(row_recovery, "planned", plan)


@pytest.mark.parametrize("gaps", [False, True], ids=["columns", "and gaps"])
@pytest.mark.parametrize("count", [2, 3, 4])
@each_default
def test_nothing_by_a_plan_with_few_columns(
    kind: str, count: int, gaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer(monkeypatch, count, gaps)
    contract = dict(defaults(HONEST))[kind]
    coordinator = attacked(tmp_path, contract)
    assert not coordinator.open("attack", run_config(HONEST))
    (reason,) = coordinator.refusals
    assert f"{count} columns with many values; the contract wants at least 5" in reason
    log = egress.lines(tmp_path / "store" / "egress.jsonl")
    assert any(reason in line.words for line in log)


def test_few_columns_give_rows_away_where_the_contract_allows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer(monkeypatch, 3)
    config = run_config(SGD)
    contract = replace(drafted_contract(config), columns=3)
    coordinator = attacked(tmp_path, contract)
    assert coordinator.open("attack", config)
    creep(coordinator, trap(coordinator.first), 0.45, 40)
    assert coordinator.recovered() >= 3
    assert "columns = 3: " in "\n".join(warnings(contract))


# The last, smaller step of an epoch

SHORT: dict[str, Any] = {**HONEST, "epochs": 1, "widths": [16], "rounds": 200}


@pytest.mark.usefixtures("unforeseen")
@pytest.mark.parametrize("batch", [49, 43])
@each_default
def test_nothing_by_a_last_step_of_few_rows(kind: str, batch: int, tmp_path: Path) -> None:
    changes = {**SHORT, "batch": batch}
    coordinator, _ = opened(tmp_path, kind, changes)
    last_step.repeat(coordinator, 3)
    words = f"{50 - batch} rows in the last step of an epoch; the contract wants at least 8"
    assert words in str(coordinator.refusals)
    assert last_step.recovered(coordinator) == 0
    nothing_found(coordinator)


@pytest.mark.usefixtures("unforeseen")
@each_default
def test_nothing_by_two_steps_on_parts_of_the_rows(kind: str, tmp_path: Path) -> None:
    """Of the same weights in every round: parts of known rows, which many rounds separate."""
    coordinator, _ = opened(tmp_path, kind, {**SHORT, "batch": 25})
    last_step.repeat(coordinator, 3)
    words = "2 steps on parts of the rows behind an answer; the contract wants at least 5"
    assert words in str(coordinator.refusals)
    nothing_found(coordinator)


@each_default
def test_no_units_so_small_that_the_first_step_makes_them(kind: str, tmp_path: Path) -> None:
    """Two steps: the first one would turn small units to where one row reaches them."""
    coordinator, _ = opened(tmp_path, kind, {**HONEST, "epochs": 2})
    goal = {name: weights.clone() for name, weights in coordinator.first.items()}
    goal["weight0"][1:], goal["bias0"][1:] = 1e-3 * goal["weight0"][1:].sign(), 0.0
    now = creep(coordinator, goal, 0.45, 20)
    assert "weights 'weight0' have almost vanished" in str(coordinator.refusals)
    assert float(now["weight0"].norm(dim=1).min()) > 0.01
    nothing_found(coordinator)


@pytest.mark.parametrize("apart", [0.0, 0.001], ids=["the same weights", "nearly the same"])
def test_a_last_step_of_one_row_gives_rows_away_where_the_contract_allows_it(
    apart: float, tmp_path: Path
) -> None:
    config = run_config({**SHORT, "batch": 49})
    contract = replace(drafted_contract(config), step_rows=1, steps=1)
    coordinator = attacked(tmp_path, contract)
    assert coordinator.open("attack", config)
    last_step.repeat(coordinator, 70, apart)
    assert last_step.recovered(coordinator) >= 20
    assert last_step.recovered_without_order(coordinator) >= 20  # a secret order helps nothing
    assert "step_rows = 1: " in "\n".join(warnings(contract))
