"""Sentences of a paper as tests: paired comparisons, adjusted for their number.

A claim is a conjunction of parts. Each part compares two series of values, unit by unit. A claim is
reproduced if all of its parts hold, and refuted if one of them is contradicted; the p-value of the
first is the largest of its parts (intersection-union), that of the second the smallest times their
number (Bonferroni). Holm's method adjusts the smaller of both for the number of claims of the
paper that can be decided here. Orders of single cells and our own studies are not adjusted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from atoll.metrics.replication import interval
from atoll.metrics.statistics import LEVEL, holm

__all__ = [
    "OURS", "Claim", "Judged", "Part", "Series", "Verdict", "above", "judge", "mean_of", "near",
]  # fmt: skip

Verdict = Literal["reproduced", "refuted", "undecided", "undecidable here"]
Series = Mapping[Any, float]  # a value for each unit of replication: a seed, a feature split
ALPHA = 1 - LEVEL
MOST_RUNS = 1000
DIGITS = 12  # differences of equal values may differ from 0 in the last bits
OURS = ("expectation", "order", "study")  # sources of claims that the paper does not state itself
ADJUSTED = ("paper", "expectation")  # the others are many, like cells: 5 % of them err by chance


@dataclass(frozen=True)
class Part:
    """One comparison of a claim: that gains are above a value, or within a margin of it."""

    text: str
    gains: tuple[float, ...]  # one for each unit of replication
    at: float = 0.0
    margin: float | None = None  # None: above `at`

    @property
    def mean(self) -> float:
        """The mean gain over units."""
        return float(np.mean(self.gains))

    @property
    def p_holds(self) -> float:
        """The p-value against the negation of this part."""
        if self.margin is None:
            return min(1.0, 2 * _p_greater(self.gains, self.at))
        return max(
            _p_greater(self.gains, self.at - self.margin),
            _p_less(self.gains, self.at + self.margin),
        )

    @property
    def p_contradicted(self) -> float:
        """The p-value against this part."""
        if self.margin is None:
            return min(1.0, 2 * _p_less(self.gains, self.at))
        below = _p_less(self.gains, self.at - self.margin)
        return min(1.0, 2 * min(below, _p_greater(self.gains, self.at + self.margin)))

    @property
    def evidence(self) -> str:
        """The mean gain with its 95 % interval."""
        if len(self.gains) < 2:
            return f"{self.text} {self.mean:+.4f} (one run)"
        low, high = interval(self.gains, LEVEL)
        return f"{self.text} {self.mean:+.4f} ({low:+.4f} to {high:+.4f}, n = {len(self.gains)})"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the comparisons that it stands for."""

    text: str
    source: str  # where the paper states it; one of OURS where it does not
    parts: tuple[Part, ...] = ()
    obstacle: str = ""  # why it cannot be decided here: a stand-in, partial data, no data
    missing: str = ""  # what was not measured
    note: str = ""

    @property
    def family(self) -> str:
        """The claims of one kind."""
        return self.source if self.source in OURS else "paper"

    @property
    def is_tested(self) -> bool:
        """Whether all of its parts were measured more than once."""
        counts = [len(part.gains) for part in self.parts]
        return not self.missing and min(counts, default=0) > 1

    @property
    def tested_with(self) -> tuple[str, bool]:
        """The claims that share one error rate: of a family, decidable here or not."""
        return self.family, bool(self.obstacle)


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict."""

    claim: Claim
    p: float  # the smaller one of both directions; 1 where nothing was measured
    adjusted: float  # by Holm, over the claims of its family
    holds: bool  # the direction that `p` speaks for
    runs: int | None  # units that would decide it at these means and deviations

    @property
    def here(self) -> Verdict:
        """What the rule says of the data that are here."""
        if self.adjusted >= ALPHA:
            return "undecided"
        return "reproduced" if self.holds else "refuted"

    @property
    def verdict(self) -> Verdict:
        """The verdict; never reproduced or refuted on a stand-in or a part of the data."""
        return "undecidable here" if self.claim.obstacle else self.here

    @property
    def evidence(self) -> str:
        """All comparisons, or what is missing."""
        listed = [part.evidence for part in self.claim.parts]
        return "; ".join([*listed, *filter(None, (self.claim.missing, self.claim.note))])


def mean_of(*several: Series) -> Series:
    """The mean of several series, on the units that all of them have."""
    units = set.intersection(*(set(series) for series in several))
    return {unit: float(np.mean([one[unit] for one in several])) for unit in sorted(units)}


def _gains(one: Series, other: Series | None) -> tuple[float, ...]:
    units = sorted(one.keys() if other is None else one.keys() & other.keys())
    return tuple(round(one[u] - (0.0 if other is None else other[u]), DIGITS) for u in units)


def above(text: str, one: Series, other: Series | None = None, at: float = 0.0) -> Part:
    """That one is above the other by more than `at`, on the units that both have."""
    return Part(text, _gains(one, other), at)


def near(
    text: str, one: Series, other: Series | None = None, *, at: float = 0.0, margin: float
) -> Part:
    """That one minus the other is within a margin of `at`, on the units that both have."""
    return Part(text, _gains(one, other), at, margin)


def judge(claims: Sequence[Claim]) -> list[Judged]:
    """The verdicts of claims, adjusted for the number that is tested together."""
    directions = [_direction(claim) for claim in claims]
    adjusted = [1.0] * len(claims)
    sizes: dict[tuple[str, bool], int] = {}
    for group in dict.fromkeys(claim.tested_with for claim in claims):
        tested = [
            n for n, claim in enumerate(claims)
            if claim.tested_with == group and claim.is_tested
        ]  # fmt: skip
        values = [directions[n][0] for n in tested]
        sizes[group] = len(tested) if group[0] in ADJUSTED else 1
        corrected = holm(values) if group[0] in ADJUSTED else values
        for place, p in zip(tested, corrected, strict=True):
            adjusted[place] = p
    judged = []
    for claim, (p, holds), p_adjusted in zip(claims, directions, adjusted, strict=True):
        alpha = ALPHA / max(1, sizes[claim.tested_with])
        runs = _runs_needed(claim, alpha) if p_adjusted >= ALPHA else None
        judged.append(Judged(claim, p, p_adjusted, holds, runs))
    return judged


def _direction(claim: Claim) -> tuple[float, bool]:
    """The smaller p-value, and whether it speaks for the claim."""
    if not claim.is_tested:
        return 1.0, False
    holds = max(part.p_holds for part in claim.parts)
    smallest = min(part.p_contradicted for part in claim.parts)
    contradicted = min(1.0, len(claim.parts) * smallest)
    return (holds, True) if holds <= contradicted else (contradicted, False)


def _runs_needed(claim: Claim, alpha: float) -> int | None:
    """The units that decide a claim if means and deviations stay; None: unknown or too many."""
    if not claim.is_tested:
        return None
    against = [n for part in claim.parts if (n := _units(part, alpha / len(claim.parts), False))]
    every = [_units(part, alpha, True) for part in claim.parts]
    favour = [max(n for n in every if n)] if all(every) else []
    return min([*against, *favour], default=None)


def _units(part: Part, alpha: float, holds: bool) -> int | None:
    """The units at which a part holds, or is contradicted, at this level."""
    deviation = float(np.std(part.gains, ddof=1))
    distance = part.mean - part.at
    if part.margin is None:
        distance, level = (distance if holds else -distance), alpha / 2
    else:
        inside = part.margin - abs(distance)
        distance, level = (inside, alpha) if holds else (-inside, alpha / 2)
    if distance <= 0:
        return None
    for count in range(2, MOST_RUNS + 1):
        if stats.t.ppf(1 - level, count - 1) * deviation / math.sqrt(count) < distance:
            return count
    return None


def _p_greater(gains: Sequence[float], at: float) -> float:
    """The one-sided p-value for a mean above a value (t test); 1 for a single run."""
    if len(gains) < 2:
        return 1.0
    distance = float(np.mean(gains)) - at
    error = float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(distance / error, len(gains) - 1))


def _p_less(gains: Sequence[float], at: float) -> float:
    return _p_greater([-gain for gain in gains], -at)
