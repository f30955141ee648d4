"""Paired comparisons of two models, with intervals. Needs no torch.

Every comparison pairs two models on the same test rows. The gain is a mean over these rows, or a
difference of two AUROCs; it is always "first minus second, larger is better". Without groups:

| metric | interval | p-value |
|---|---|---|
| accuracy | score interval for paired proportions (Tango, 1998) | mid-p McNemar |
| AUROC | DeLong, DeLong and Clarke-Pearson, 1988 | the same, normal |
| losses of rows | paired t | paired t |

With groups (several rows of one patient) the group is the unit: the variance is that of groups,
and the quantile is that of t with one degree of freedom less than there are groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize, stats

__all__ = [
    "LEVEL",
    "Comparison",
    "combine",
    "combine_dependent",
    "compare_accuracy",
    "compare_auroc",
    "compare_losses",
    "compare_over_seeds",
    "compare_over_splits",
    "compare_units",
    "holm",
    "placements",
    "rows_for_error",
    "rows_needed",
    "with_least_width",
]

Array = np.ndarray[Any, Any]
LEVEL = 0.95  # level of every interval, unless several comparisons share it
POWER = 0.8  # power to detect a gain of the margin


@dataclass(frozen=True)
class Comparison:
    """The gain of one model over another on the same rows."""

    gain: float
    error: float  # standard error of the gain
    low: float
    high: float
    p: float  # two-sided, for the null hypothesis of no gain
    units: int  # number of rows, or of groups if rows are grouped
    freedom: float = math.inf  # degrees of freedom of the interval; inf: normal


def compare_accuracy(
    first: Array, second: Array, groups: Array | None = None, level: float = LEVEL
) -> Comparison:
    """Compare two models by which of the same rows they predict correctly (True)."""
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    if groups is not None:
        by_group = _compare_groups(first.astype(float) - second, groups, level)
        return by_group if by_group.error else with_least_width(by_group, by_group.units, level)
    rows = len(first)
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    gain = (only_first - only_second) / rows
    error = math.sqrt(max(0.0, (only_first + only_second) / rows - gain**2) / rows)
    low, high = tango(only_first, only_second, rows, level)
    return Comparison(gain, error, low, high, mid_p(only_first, only_second), rows)


def tango(
    only_first: int, only_second: int, rows: int, level: float = LEVEL
) -> tuple[float, float]:
    """The score interval for a difference of paired proportions (Tango, 1998).

    It contains the differences that the score test does not reject. The counts are those of rows
    that only one of the models predicts correctly.
    """
    quantile = float(stats.norm.ppf((1 + level) / 2))
    gain = (only_first - only_second) / rows

    def excess(difference: float, sign: int) -> float:
        return sign * _score(difference, only_first, only_second, rows) - quantile

    low, high = -1.0, 1.0
    if excess(-1 + 1e-12, 1) > 0 and gain > -1:
        low = float(optimize.brentq(excess, -1 + 1e-12, gain, args=(1,), xtol=1e-12))
    if excess(1 - 1e-12, -1) > 0 and gain < 1:
        high = float(optimize.brentq(excess, gain, 1 - 1e-12, args=(-1,), xtol=1e-12))
    return low, high


def _score(difference: float, only_first: int, only_second: int, rows: int) -> float:
    """The score statistic of a difference, with Tango's restricted estimate."""
    a = 2 * rows
    b = (2 * rows - only_first + only_second) * difference - only_first - only_second
    c = -only_second * difference * (1 - difference)
    share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = rows * (2 * share + difference * (1 - difference))
    distance = only_first - only_second - rows * difference
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def mid_p(only_first: int, only_second: int) -> float:
    """The two-sided mid-p value of McNemar's test."""
    total = only_first + only_second
    if total == 0:
        return 1.0
    smaller = min(only_first, only_second)
    tail = stats.binom.cdf(smaller, total, 0.5) - 0.5 * stats.binom.pmf(smaller, total, 0.5)
    return float(min(1.0, 2 * tail))


def compare_losses(
    first: Array, second: Array, groups: Array | None = None, level: float = LEVEL
) -> Comparison:
    """Compare two models by a loss per row, such as the Brier score; smaller is better."""
    gains = np.asarray(second, float) - np.asarray(first, float)
    if groups is not None:
        return _compare_groups(gains, groups, level)
    rows = len(gains)
    return _by_t(float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(rows), rows, level)


def _compare_groups(gains: Array, groups: Array, level: float) -> Comparison:
    """Compare a mean over rows of independent groups: a ratio with its jackknife variance."""
    names, places = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.bincount(places, gains, len(names))
    sizes = np.bincount(places, minlength=len(names)).astype(float)
    gain = sums.sum() / sizes.sum()
    without = (sums.sum() - sums) / (sizes.sum() - sizes)  # the mean without each group
    count = len(names)
    error = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return _by_t(float(gain), error, count, level)


def _by_t(
    gain: float, error: float, units: int, level: float, freedom: float | None = None
) -> Comparison:
    freedom = units - 1 if freedom is None else freedom
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(gain) / error, freedom)) if error > 0 else float(gain == 0)
    return Comparison(gain, error, gain - half, gain + half, p, units, freedom)


def compare_auroc(
    labels: Array, first: Array, second: Array, groups: Array | None = None, level: float = LEVEL
) -> Comparison:
    """Compare the AUROCs of two scores of the same rows (DeLong et al., 1988).

    With groups, the influence values are summed by group (Obuchowski, 1997).
    """
    labels = np.asarray(labels, bool)
    one, other = placements(labels, np.asarray(first)), placements(labels, np.asarray(second))
    gain = float(one[labels].mean() - other[labels].mean())
    influence = one - other
    positives, negatives = int(labels.sum()), int((~labels).sum())
    influence[labels] = (influence[labels] - influence[labels].mean()) / positives
    influence[~labels] = (influence[~labels] - influence[~labels].mean()) / negatives
    if groups is None:
        variance = sum(
            float((influence[part] ** 2).sum()) * count / (count - 1)
            for part, count in ((labels, positives), (~labels, negatives))
        )
        return _by_t(gain, math.sqrt(variance), len(labels), level, min(positives, negatives) - 1)
    names, places = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.bincount(places, influence, len(names))
    error = math.sqrt(len(names) / (len(names) - 1) * float((sums**2).sum()))
    smaller = min(len(np.unique(places[part])) for part in (labels, ~labels))
    return _by_t(gain, error, len(names), level, smaller - 1)


def placements(labels: Array, scores: Array) -> Array:
    """For each row, the fraction of rows of the other class that it is ranked correctly against."""
    ranks = stats.rankdata(scores)
    result = np.empty(len(scores))
    positives, negatives = int(labels.sum()), int((~labels).sum())
    result[labels] = (ranks[labels] - stats.rankdata(scores[labels])) / negatives
    result[~labels] = 1 - (ranks[~labels] - stats.rankdata(scores[~labels])) / positives
    return result


def compare_units(gains: Array) -> Comparison:
    """The mean of independent values, with a t interval."""
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return _by_t(float(gains.mean()), error, len(gains), LEVEL)


def combine(comparisons: Sequence[Comparison]) -> Comparison:
    """The mean over fixed sites with independent rows.

    Limits are combined as in Zou and Donner, 2008 (MOVER), which preserves asymmetric intervals;
    the p-value uses t with Satterthwaite's degrees of freedom. The result has the level of
    the given limits.
    """
    count = len(comparisons)
    gain = sum(one.gain for one in comparisons) / count
    below = math.sqrt(sum((one.gain - one.low) ** 2 for one in comparisons)) / count
    above = math.sqrt(sum((one.high - one.gain) ** 2 for one in comparisons)) / count
    variances = [(comparison.error / count) ** 2 for comparison in comparisons]
    parts = [
        v**2 / min(one.freedom, one.units - 1)
        for v, one in zip(variances, comparisons, strict=True)
    ]
    freedom = sum(variances) ** 2 / sum(parts) if sum(parts) else math.inf
    units = sum(one.units for one in comparisons)
    by_t = _by_t(gain, math.sqrt(sum(variances)), units, LEVEL, freedom)
    return replace(by_t, low=gain - below, high=gain + above)


def combine_dependent(comparisons: Sequence[Comparison]) -> Comparison:
    """The mean over fixed sites that may share rows, if the shared rows are unknown.

    Errors and limits are the means of those of the sites, as if all depended on the same rows: an
    upper bound of the error of a mean.
    """
    count = len(comparisons)
    gain, error, low, high = (
        sum(getattr(one, name) for one in comparisons) / count
        for name in ("gain", "error", "low", "high")
    )
    freedom = min(min(comparison.freedom, comparison.units - 1) for comparison in comparisons)
    by_t = _by_t(gain, error, max(one.units for one in comparisons), LEVEL, freedom)
    return replace(by_t, low=low, high=high)


def with_least_width(result: Comparison, units: int, level: float = LEVEL) -> Comparison:
    """Widen an interval of accuracy to at least Tango's width without discordant rows.

    A variance estimated as 0 from few rows is not reliable.
    """
    square = float(stats.norm.ppf((1 + level) / 2)) ** 2
    half = square / (units + square)
    low, high = min(result.low, result.gain - half), max(result.high, result.gain + half)
    return replace(result, low=max(-1.0, low), high=min(1.0, high))


def compare_over_seeds(gains: Array, level: float = LEVEL) -> Comparison:
    """Compare with rows and seeds as crossed random factors; `gains` is (seeds, rows).

    The variance of the grand mean is (MS_seeds + MS_rows - MS_rest) / (seeds * rows), never below
    either factor alone; degrees of freedom by Satterthwaite.
    """
    gains = np.asarray(gains, float)
    seeds, rows = gains.shape
    gain = float(gains.mean())
    by_seed, by_row = gains.mean(1), gains.mean(0)
    rest = gains - by_seed[:, None] - by_row[None, :] + gain
    squares = {
        "seeds": rows * float(by_seed.var(ddof=1)),
        "rows": seeds * float(by_row.var(ddof=1)),
        "rest": float((rest**2).sum()) / ((seeds - 1) * (rows - 1)),
    }
    total = max(squares["seeds"] + squares["rows"] - squares["rest"], squares["rows"])
    if total == 0:
        return _by_t(gain, 0.0, rows, level)
    parts = squares["seeds"] ** 2 / (seeds - 1) + squares["rows"] ** 2 / (rows - 1)
    parts += squares["rest"] ** 2 / ((seeds - 1) * (rows - 1))
    return _by_t(gain, math.sqrt(total / (seeds * rows)), rows, level, total**2 / parts)


def compare_over_splits(
    gains: Sequence[float], train_rows: int, test_rows: int, level: float = LEVEL
) -> Comparison:
    """Gains of seeds that each redraw the split of the same rows (Nadeau and Bengio, 2003)."""
    values = np.asarray(gains, float)
    count = len(values)
    variance = (1 / count + test_rows / train_rows) * float(values.var(ddof=1))
    return _by_t(float(values.mean()), math.sqrt(variance), count, level)


def rows_needed(discordant: float, margin: float, level: float = LEVEL) -> int:
    """The test rows that detect an accuracy gain of the margin at a fraction of discordant rows.

    Bisection refines the first power of two with enough power; the power of the score test
    is computed exactly, because few discordant rows are far from normal.
    """
    discordant = max(discordant, margin)
    most = 1
    while _power(most, discordant, margin, level) < POWER:
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        if _power(middle, discordant, margin, level) < POWER:
            least = middle
        else:
            most = middle
    return most


def _power(rows: int, discordant: float, gain: float, level: float) -> float:
    """The power of the score test with the statistic (b - c) / sqrt(b + c)."""
    quantile = float(stats.norm.ppf((1 + level) / 2))
    spread = math.sqrt(rows * discordant)
    first = max(1, math.floor(rows * discordant - 8 * spread))
    totals = np.arange(first, min(rows, math.ceil(rows * discordant + 8 * spread + 8)) + 1)
    least = np.floor((totals + quantile * np.sqrt(totals)) / 2)  # b must exceed it
    powers = stats.binom.sf(least, totals, min(1.0, (1 + gain / discordant) / 2))
    return float((stats.binom.pmf(totals, rows, min(1.0, discordant)) * powers).sum())


def rows_for_error(deviation: float, margin: float, level: float = LEVEL) -> int:
    """The test rows that detect a gain of the margin at this deviation of row gains."""
    quantiles = float(stats.norm.ppf((1 + level) / 2)) + float(stats.norm.ppf(POWER))
    return math.ceil((quantiles * deviation / margin) ** 2)


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's method (1979), in the order given."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted = [0.0] * len(values)
    largest = 0.0
    for step, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - step) * values[place]))
        adjusted[place] = largest
    return adjusted
