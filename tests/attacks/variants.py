"""All variants of the row recovery in one run, with every config a coordinator may try.

As a script it prints how many of a site's 50 training rows come out, for each variant and
contract the most over all configs:

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.attacks.variants
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.federation import Moment
from atoll.core.messages import Tensors
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.explain import warnings
from atoll.runs.config import RunConfig

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

Goal = Callable[[Tensors], Tensors]
ROWS = 83  # of a site's table: 50 of them are trained on
DEFAULT = Contract(methods=("chfl", "fedavg"), actions=("fit", "check", "settle", "offer", "agree"))
OPEN: dict[str, Any] = {
    "initial_weights": "any", "move": 0.0, "drift": 0.0, "unit_rows": 1, "steps": 1,
    "shown_rows": "allow", "repeats": 1000,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "honest": HONEST,
    "wide": {**HONEST, "widths": [512]},
    "one step": {**HONEST, "widths": [512], "epochs": 1},
    "sgd": {**HONEST, "widths": [512], "optimiser": "sgd", "rate": 0.1},
    "C3": CRAFTED,
}
ADAM_ONLY = ("chfl",)  # methods without the option `optimiser`
CONTRACTS: dict[str, Callable[[RunConfig, RunConfig], Contract]] = {  # of (config, honest config)
    "default": lambda config, honest: DEFAULT,
    "drafted": lambda config, honest: drafted_contract(honest),
    "loosened": lambda config, honest: replace(drafted_contract(config), **OPEN),
}
GOALS: dict[str, Goal] = {
    "stepped": craft,
    "steep head": partial(craft, gain=0.01),
    "tiny": partial(craft, scale=1e-6, gain=5e-11),
    "biases": trap,
    "small head": quiet_trap,
}


def _one_bit(weights: Tensors) -> Tensors:
    """The same weights but for the last bit of one bias."""
    bias = weights["bias0"].clone()
    bias[0] = bias[0].nextafter(bias[1])
    return {**weights, "bias0": bias}


def _try(coordinator: Coordinator, weights: Tensors, round: int = 0, stage: int = 0) -> None:
    """Send weights of every making; a refused one leaves the round open for the next."""
    for goal in (*GOALS.values(), _one_bit):
        coordinator.fit(goal(weights), round, stage)


def _learn(coordinator: Coordinator, rounds: int, stage: int = 0) -> Tensors:
    """Honest rounds as far as the site takes part; the weights after them."""
    weights = coordinator.first
    for number in range(rounds):
        weights = coordinator.fit(weights, number, stage) or weights
    return weights


def first_round(coordinator: Coordinator) -> int:
    """Crafted weights at once."""
    _try(coordinator, coordinator.first)
    return coordinator.recovered()


def later_round(coordinator: Coordinator) -> int:
    """Crafted weights after three honest rounds."""
    weights = _learn(coordinator, 3)
    for number, goal in enumerate(GOALS.values()):
        coordinator.fit(goal(weights), 3 + number)
    return coordinator.recovered()


def skipped_rounds(coordinator: Coordinator) -> int:
    """Crafted weights in the last round, with none before it."""
    _try(coordinator, coordinator.first, coordinator.config.rounds - 1)
    return coordinator.recovered()


def later_stage(coordinator: Coordinator) -> int:
    """Crafted weights at the second stage."""
    _try(coordinator, _learn(coordinator, 2), 0, stage=1)
    return coordinator.recovered(1)


def resumed(coordinator: Coordinator, restored: bool) -> int:
    """Crafted weights after the site's process has started again."""
    weights = _learn(coordinator, 2)
    coordinator.gate.keep("0-2")
    coordinator.reopen("attack")
    if restored:
        coordinator.gate.restore("0-2")
    _try(coordinator, weights, 2)
    _try(coordinator, weights, 0)
    return coordinator.recovered()


def second_name(coordinator: Coordinator) -> int:
    """Crafted weights in a run under another name."""
    _learn(coordinator, 2)
    if coordinator.open("second", coordinator.config):
        _try(coordinator, coordinator.first)
    return coordinator.recovered()


def small_moves(coordinator: Coordinator, goal: Goal) -> int:
    """Crafted weights reached in forty rounds."""
    creep(coordinator, goal(coordinator.first), 0.45, 40)
    return coordinator.recovered()


def hit_counts(coordinator: Coordinator) -> int:
    """Test rows out of the counts of `check`, at once, later, and after small moves."""
    rounds = coordinator.config.rounds
    most = recover_by_tests(coordinator, Moment(0, 0, rounds), 1)
    weights = _learn(coordinator, 2)
    most = max(most, recover_by_tests(coordinator, Moment(0, 1, rounds), 1))
    goal = band(coordinator.first, 0.0, 1.0, 1, 0.0)
    for number in range(60):
        weights = towards(weights, goal, 0.45, {})
        spotted(coordinator, Moment(0, number % rounds, rounds), weights)
    return max(most, recover_by_tests(coordinator, Moment(0, 1, rounds), 1))


VARIANTS: dict[str, Callable[[Coordinator], int]] = {
    "first round": first_round,
    "later round": later_round,
    "skipped rounds": skipped_rounds,
    "later stage": later_stage,
    "after a resume": partial(resumed, restored=True),
    "after a resume, nothing restored": partial(resumed, restored=False),
    "second name": second_name,
    **{f"small moves: {name}": partial(small_moves, goal=goal) for name, goal in GOALS.items()},
    "test counts (of 1 row)": hit_counts,
}


@dataclass(frozen=True)
class Trial:
    """One variant with one config against one contract."""

    variant: str
    contract: str
    config: str
    method: str = "fedavg"

    def run(self, folder: Path) -> tuple[int, Sequence[str]]:
        """The rows that came out, and what `contract explain` warns of."""
        changes, honest = CONFIGS[self.config], HONEST
        if self.method in ADAM_ONLY:
            changes = {key: value for key, value in changes.items() if key != "optimiser"}
        if self.variant == "later stage":
            staged = {key: STAGED[key] for key in ("data.ignore", "data.stage")}
            changes, honest = {**changes, **staged}, STAGED
        config = run_config(changes, self.method)
        terms = CONTRACTS[self.contract](config, run_config(honest, self.method))
        stage = changes.get("data.stage", "")
        coordinator = Coordinator(site(folder, written(terms), ROWS, stage))
        if not coordinator.open("attack", config):
            return 0, warnings(terms)
        return VARIANTS[self.variant](coordinator), warnings(terms)


def trials(
    variants: Sequence[str], contracts: Sequence[str], methods: Sequence[str]
) -> Iterator[Trial]:
    """Every trial; for each variant those of one contract come together."""
    for method in methods:
        for variant in variants:
            for contract in contracts:
                for config in CONFIGS:
                    yield Trial(variant, contract, config, method)


def most_rows(chosen: Sequence[Trial], folder: Path) -> Mapping[tuple[str, str, str], int]:
    """The most rows over all configs, by method, variant and contract."""
    most: dict[tuple[str, str, str], int] = {}
    for number, trial in enumerate(chosen):
        rows, warned = trial.run(folder / str(number))
        assert not rows or warned, f"{trial}: {rows} rows, and `contract explain` warns of nothing"
        key = trial.method, trial.variant, trial.contract
        most[key] = max(most.get(key, 0), rows)
    return most


def main() -> None:
    """Print the table of docs/network.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", nargs="*", default=["fedavg", "chfl"])
    parser.add_argument("--variant", nargs="*", default=list(VARIANTS))
    given = parser.parse_args()
    for method in given.method:
        for variant in given.variant:
            chosen = list(trials([variant], list(CONTRACTS), [method]))
            with tempfile.TemporaryDirectory() as folder:
                most = most_rows(chosen, Path(folder))
            shown = " | ".join(str(most[method, variant, name]) for name in CONTRACTS)
            sys.stdout.write(f"| {method} | {variant} | {shown} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
