"""What measured runs show, worked out by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

from atoll.benchmark.compare import Line, choose, gains, judged, lines, verdicts
from atoll.benchmark.measure import Ledger, names
from atoll.benchmark.protocol import Plan, Sizes
from atoll.metrics.statistics import Comparison

PLAN = Plan(contenders=("fedavg", "ewc", "analytic"), seeds=3, trials=1, streams=1)
VALUES = {"fedavg": (0.2, 0.2, 0.2), "ewc": (0.3, 0.2, 0.25), "analytic": (0.9, 0.91, 0.92)}


def line(name: str, *accuracies: float) -> Line:
    return Line(name, accuracies, 0.1, accuracies, 1e6, 10, 0, 1.0)


def words(comparisons: Sequence[Comparison]) -> list[str]:
    return [word for word, _ in verdicts(comparisons)]


def test_seeds_are_paired() -> None:
    """Gains 0.1 and 0.3: mean 0.2, standard error 0.1, t of one degree of freedom 12.706."""
    (gain,) = gains([line("other", 0.6, 1.0)], line("fedavg", 0.5, 0.7))
    assert math.isclose(gain.gain, 0.2)
    assert math.isclose(gain.low, 0.2 - 12.7062 * 0.1, abs_tol=1e-4)


def test_nothing_is_decided_by_one_seed() -> None:
    assert words(gains([line("other", 0.9)], line("fedavg", 0.1))) == ["cannot tell"]


def test_verdicts_share_one_error_rate() -> None:
    """p = 0.03 alone is decided, beside another one it is not (Holm: 0.06)."""
    base = line("fedavg", 0.0, 0.0, 0.0)
    near = line("near", 0.10, 0.15, 0.20)  # t = 5.196, p = 0.035
    assert words(gains([near], base)) == ["above"]
    both = verdicts(gains([near, near], base))
    assert [word for word, _ in both] == ["cannot tell", "cannot tell"]
    assert all(math.isclose(p, 2 * 0.03515, rel_tol=1e-2) for _, p in both)
    same = line("same", 0.001, -0.001, 0.0)
    assert words(gains([same], base)) == ["within 2 points"]


def measured() -> Ledger:
    """A ledger whose runs have these accuracies, whatever their setting."""
    ledger = Ledger(Path("none.json"), "digits-table", PLAN, Sizes(64, 10))
    for name in names(PLAN):
        for _ in range(2):  # tuning, then what it leads to
            for batch in ledger.lacking():
                if batch.name != name:
                    continue
                for key, config in batch.runs.items():
                    accuracy = VALUES[name][int(key[-1])]
                    ledger.store(key, config, {
                        "accuracy": accuracy, "forgetting": 0.5, "by_stage": [1.0, accuracy],
                        "bytes": 100, "steps": 10, "seconds": 1.0,
                    })  # fmt: skip
                break
    return ledger


def test_the_best_of_those_that_a_situation_allows() -> None:
    ledger = measured()
    assert set(lines(ledger, "bytes")) == {"fedavg", "ewc", "analytic"}
    best = {choice.situation.text: choice for choice in choose(ledger)}
    assert best["a site must be able to withdraw, exactly"].best.name == "analytic"
    weights = best["only weights may leave a site, no Gram matrices"]
    assert weights.best.name == "ewc"
    assert weights.alike == ("fedavg",)


def test_an_order_that_is_not_certain_is_undecided() -> None:
    """Gains of EWC 0.1, 0, 0.05: mean 0.05, t = 1.73, p = 0.23."""
    (order,) = judged(measured())
    assert order.verdict == "undecided"
    assert "ewc - fedavg +0.0500" in order.evidence
