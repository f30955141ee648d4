"""Results of measured runs: means, paired comparisons, published orders, and recommendations."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.benchmark.measure import Ledger, names, run_key
from atoll.benchmark.protocol import BOUNDS, Table, budget, settings, stored_bytes
from atoll.metrics.statistics import LEVEL, Comparison, compare_units, holm
from atoll.metrics.verdicts import MARGIN
from atoll.reproduce.claims import Claim, Judged, above, judge

__all__ = [
    "CLAIMS", "SITUATIONS", "Choice", "Line", "Situation", "choose", "gains", "judged",
    "lines", "uses_budget", "verdicts",
]  # fmt: skip

LEAST_USE: Final = 0.8  # minimum share of a budget that a contender at equal cost uses
HEADERS: Final = 1.01  # tolerance: messages have headers, which budgets do not count


@dataclass(frozen=True)
class Line:
    """One contender in one table: values by seed, and mean costs."""

    name: str
    accuracies: tuple[float, ...]
    forgetting: float  # NaN with one stage
    by_stage: tuple[float, ...]
    bytes: float
    steps: float
    memory: int  # bytes of earlier stages stored at a site
    seconds: float

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds."""
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; NaN with one seed."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else math.nan


def lines(ledger: Ledger, table: Table | None) -> dict[str, Line]:
    """The lines of a table; None: all contenders at their own cost."""
    measured = [name for name in names(ledger.plan) if ledger.is_whole(name)]
    return {name: _line(ledger, name, table) for name in measured}


def _line(ledger: Ledger, name: str, table: Table | None) -> Line:
    changes = settings(name, ledger.plan, ledger.sizes)
    label = table if table in changes else "own"
    runs = [
        ledger.runs[run_key("measured", name, label, number)]
        for number in range(ledger.plan.seeds)
    ]  # fmt: skip
    forgetting = [run["forgetting"] for run in runs]
    stored = stored_bytes(name, ledger.plan, ledger.sizes, changes[label])
    return Line(
        name,
        accuracies=tuple(run["accuracy"] for run in runs),
        forgetting=float(np.mean(forgetting)) if len(runs[0]["by_stage"]) > 1 else math.nan,
        by_stage=tuple(np.mean([run["by_stage"] for run in runs], axis=0).tolist()),
        bytes=float(np.mean([run["bytes"] for run in runs])),
        steps=float(np.mean([run["steps"] for run in runs])),
        memory=stored,
        seconds=float(np.mean([run["seconds"] for run in runs])),
    )


def uses_budget(line: Line, table: Table, ledger: Ledger, base: Line) -> bool:
    """Whether a line uses the budget of its table instead of its own cost."""
    if table == "memory":
        return LEAST_USE <= line.memory / budget(table, ledger.plan, ledger.sizes) <= 1
    used = line.bytes / base.bytes if table == "bytes" else line.steps / base.steps
    return LEAST_USE <= used <= HEADERS


def gains(of: Sequence[Line], over: Line) -> list[Comparison]:
    """Paired comparisons over seeds; empty with a single seed."""
    comparisons = []
    for line in of:
        values = np.array(line.accuracies) - np.array(over.accuracies)
        if len(values) > 1:
            comparisons.append(compare_units(values))
        else:
            comparisons.append(Comparison(float(values[0]), math.inf, -math.inf, math.inf, 1.0, 1))
    return comparisons


def verdict(comparison: Comparison, adjusted: float) -> str:
    """Above or below at the joint level of all comparisons, equal within the margin, or open."""
    if adjusted < 1 - LEVEL:
        return "above" if comparison.gain > 0 else "below"
    if comparison.low > -MARGIN and comparison.high < MARGIN:
        return f"within {100 * MARGIN:g} points"
    return "cannot tell"


def verdicts(comparisons: Sequence[Comparison]) -> list[tuple[str, float]]:
    """The verdicts of comparisons that share one error rate, with adjusted p-values (Holm)."""
    adjusted = holm([comparison.p for comparison in comparisons])
    return [(verdict(one, p), p) for one, p in zip(comparisons, adjusted, strict=True)]


# Published orders

CLAIMS: Final = (  # pairs in descending order, and the source
    ("ewc", "fedavg", "Kirkpatrick et al. 2017: EWC is above plain training"),
    ("lwf", "fedavg", "Li and Hoiem 2016: LwF is above fine-tuning"),
    ("lwf", "ewc", "Zhang et al. 2023 (TARGET): FedLwF is above FedEWC"),
    ("replay", "fedavg", "Chaudhry et al. 2019: a tiny memory is above fine-tuning"),
    ("replay", "ewc", "Chaudhry et al. 2019: a tiny memory is above EWC"),
    ("fot", "fedavg", "Bakman et al. 2024: FOT is above FedAvg"),
    ("target", "fedavg", "Zhang et al. 2023: TARGET is above fine-tuning"),
    ("target", "ewc", "Zhang et al. 2023: TARGET is above FedEWC"),
    ("target", "lwf", "Zhang et al. 2023: TARGET is above FedLwF"),
)


def judged(ledger: Ledger) -> list[Judged]:
    """The published orders at own cost, on this data set."""
    by_name = lines(ledger, None)
    claims = []
    for upper, lower, text in CLAIMS:
        if upper in by_name and lower in by_name:
            one, other = (dict(enumerate(by_name[name].accuracies)) for name in (upper, lower))
            part = above(f"{upper} - {lower}", one, other)
            claims.append(Claim(text, "paper", (part,)))
    return judge(claims)


# Recommendations


@dataclass(frozen=True)
class Situation:
    """The constraints of a use case, and the resource that is equal."""

    text: str
    table: Table
    excluded: Collection[str] = ()
    only: Collection[str] = ()


STATISTICS: Final = ("fot", "lorm", "analytic")  # they send Gram matrices, or their diagonals
ROWS: Final = ("replay", "herding")  # methods that store rows of earlier stages
STATELESS: Final = ("fedavg", "fedprox", "fot", "lowrank", "lorm")  # at a site
SITUATIONS: Final = (
    Situation("nothing rules a method out; bytes are what counts", "bytes"),
    Situation("local computation is what counts", "steps"),
    Situation("memory at a site is what counts", "memory"),
    Situation("rows must not be kept after their stage", "bytes", ROWS),
    Situation("only weights may leave a site, no Gram matrices", "bytes", STATISTICS),
    Situation("both: only weights leave, and no rows are kept", "bytes", (*ROWS, *STATISTICS)),
    Situation("a site keeps nothing of earlier stages", "bytes", only=STATELESS),
    Situation("the network itself must be trained on the sites' rows", "bytes", ("analytic",)),
    Situation("a site must be able to withdraw, exactly", "bytes", only=("analytic",)),
)


@dataclass(frozen=True)
class Choice:
    """The best contender in a situation, and those not significantly different from it."""

    situation: Situation
    best: Line
    alike: tuple[str, ...]


def choose(ledger: Ledger) -> list[Choice]:
    """For each situation, the allowed contender with the highest accuracy."""
    choices = []
    for situation in SITUATIONS:
        allowed = [
            line for name, line in lines(ledger, situation.table).items()
            if name not in BOUNDS and name not in situation.excluded
            and (not situation.only or name in situation.only)
        ]  # fmt: skip
        if allowed:
            best = max(allowed, key=lambda line: line.mean)
            others = [line for line in allowed if line is not best]
            pairs = zip(others, verdicts(gains(others, best)), strict=True)
            alike = tuple(line.name for line, (word, _) in pairs if word != "below")
            choices.append(Choice(situation, best, alike))
    return choices
