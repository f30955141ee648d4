"""Simulated prediction sets: how often intervals cover the true gain, and how often one is found.

No model is trained. Scores of two correlated models are drawn, with rows in groups of a size, so
that the true gain of a metric is known from a very large set.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from atoll.metrics.answer import (
    ALONE,
    ERRORS,
    FEWEST,
    JOINED,
    Metric,
    Outcome,
    SiteOutcomes,
    by_unit,
    compare,
    needed_rows,
)
from atoll.metrics.quality import auprc_contributions, balanced_contributions
from atoll.metrics.statistics import (
    LEVEL,
    Comparison,
    combine,
    compare_accuracy,
    compare_auroc,
    compare_losses,
    compare_over_seeds,
    compare_units,
    rows_needed,
    tango,
    with_least_width,
)

Array = np.ndarray[Any, Any]
Set = dict[str, Array]
LARGE = 2_000_000  # rows that the true gain is computed from


def draw(stream: np.random.Generator, rows: int, size: int) -> Set:
    """Scores of two models on rows in groups of a size, with one label for a group."""
    count = -(-rows // size)
    groups = np.repeat(np.arange(count), size)[:rows]
    labels = np.repeat(stream.random(count) < 0.4, size)[:rows]
    common = np.repeat(stream.normal(size=count), size)[:rows] + 0.6 * stream.normal(size=rows)
    first = 1.2 * labels + 0.8 * common + 0.5 * stream.normal(size=rows)
    second = 1.0 * labels + 0.8 * common + 0.7 * stream.normal(size=rows)
    number = 1.1 * labels + 0.5 * common  # the label of a regression
    return {
        "groups": groups, "labels": labels, "first": first, "second": second, "number": number,
    }  # fmt: skip


def brier(rows: Set, model: str) -> Array:
    """Squared errors of a model's probabilities."""
    probability = 1 / (1 + np.exp(-2 * (rows[model] - 0.5)))
    return np.asarray((probability - rows["labels"]) ** 2)


def log_loss(rows: Set, model: str) -> Array:
    """Negative log-likelihoods of a model's probabilities."""
    sign = np.where(rows["labels"], 1.0, -1.0)
    return np.logaddexp(0, -2 * sign * (rows[model] - 0.5))


def errors(rows: Set, model: str, power: int) -> Array:
    """Absolute or squared errors of a model that predicts a number."""
    return np.asarray(np.abs(rows[model] - rows["number"]) ** power)


def right(rows: Set, model: str) -> Array:
    """On which rows a model is right."""
    return np.asarray((rows[model] > 0.5) == rows["labels"])


def balanced(rows: Set, groups: Array | None) -> Comparison:
    """The gain in balanced accuracy by its contributions."""
    y = rows["labels"].astype(int)
    values = [balanced_contributions(y, right(rows, m).astype(float)) for m in ("first", "second")]
    return compare_losses(-values[0], -values[1], groups)


def precision(rows: Set, groups: Array | None) -> Comparison:
    """The gain in average precision by its contributions."""
    values = [auprc_contributions(rows["labels"], rows[m]) for m in ("first", "second")]
    return compare_losses(-values[0], -values[1], groups)


Compare = Callable[[Set, Array | None], Comparison]
METRICS: dict[str, Compare] = {
    "accuracy": lambda r, g: compare_accuracy(right(r, "first"), right(r, "second"), g),
    "auroc": lambda r, g: compare_auroc(r["labels"], r["first"], r["second"], g),
    "auprc": precision,
    "balanced accuracy": balanced,
    "brier score": lambda r, g: compare_losses(brier(r, "first"), brier(r, "second"), g),
    "log loss": lambda r, g: compare_losses(log_loss(r, "first"), log_loss(r, "second"), g),
    "mae": lambda r, g: compare_losses(errors(r, "first", 1), errors(r, "second", 1), g),
    "mse": lambda r, g: compare_losses(errors(r, "first", 2), errors(r, "second", 2), g),
}
NEEDS_CLASSES = ("auroc", "auprc", "balanced accuracy")


def released(metric: str, rows: Set) -> bool:
    """Whether a metric of these rows is released: 10 units of each class that it needs."""
    if metric not in NEEDS_CLASSES:
        return True
    units = [len(np.unique(rows["groups"][rows["labels"] == kind])) for kind in (True, False)]
    return min(units) >= FEWEST


@cache
def true_gain(metric: str) -> float:
    """The gain in a very large set; groups do not change it."""
    stream = np.random.default_rng(11)
    return METRICS[metric](draw(stream, LARGE, 1), None).gain


@dataclass(frozen=True)
class Coverage:
    """How often intervals cover the true gain, among sets that are released."""

    share: float
    sets: int


def coverage(metric: str, rows: int, size: int, sets: int, seed: int = 7) -> Coverage:
    """Draw sets until so many are released, or none is for long."""
    stream = np.random.default_rng([seed, rows, size])
    truth, covered, count = true_gain(metric), 0, 0
    for _ in range(20 * sets):
        drawn = draw(stream, rows, size)
        if not released(metric, drawn):
            continue
        result = METRICS[metric](drawn, drawn["groups"] if size > 1 else None)
        covered += result.low <= truth <= result.high
        count += 1
        if count == sets:
            break
    return Coverage(covered / count if count else math.nan, count)


def overall_coverage(rows: Sequence[int], sets: int, seed: int = 8, size: int = 1) -> float:
    """The mean over sites of the gain in accuracy; each site has rows, or groups, of its own."""
    stream = np.random.default_rng([seed, *rows])
    truth, covered = true_gain("accuracy"), 0
    for _ in range(sets):
        drawn = [draw(stream, count, size) for count in rows]
        groups = [one["groups"] if size > 1 else None for one in drawn]
        pairs = zip(drawn, groups, strict=True)
        result = combine([METRICS["accuracy"](one, mine) for one, mine in pairs])
        covered += result.low <= truth <= result.high
    return covered / sets


def shared_coverage(rows: int, sites: int, sets: int, seed: int = 8) -> float:
    """The same where the models of all sites are tested on the same rows."""
    stream = np.random.default_rng([seed, rows, sites])
    truth, covered = _mean_of_noisy(), 0
    for _ in range(sets):
        base = draw(stream, rows, 1)
        gains = np.mean([_noisy(stream, base, (0.0, 0.0)) for _ in range(sites)], 0)
        result = with_least_width(compare_units(gains), rows)
        covered += result.low <= truth <= result.high
    return covered / sets


def _noisy(stream: np.random.Generator, base: Set, shift: tuple[float, float]) -> Array:
    """Gains of rows where both models are shifted and have noise of their own."""
    both = dict(base)
    for name, by in zip(("first", "second"), shift, strict=True):
        both[name] = base[name] + by + 0.3 * stream.normal(size=len(base[name]))
    return right(both, "first").astype(float) - right(both, "second")


@cache
def _mean_of_noisy() -> float:
    stream = np.random.default_rng(13)
    return float(_noisy(stream, draw(stream, LARGE, 1), (0.0, 0.0)).mean())


def seeds_coverage(seeds: int, rows: int, sets: int, seed: int = 9, size: int = 1) -> float:
    """Rows, or groups, and seeds as crossed factors: each seed shifts both models for all rows."""
    stream = np.random.default_rng([seed, seeds, rows])
    truth, covered = _mean_with_seeds(), 0
    for _ in range(sets):
        gains = _crossed(stream, seeds, rows, size)
        units = np.arange(rows) // size
        result = compare_over_seeds(np.stack([by_unit(one, units) for one in gains]))
        result = with_least_width(result, -(-rows // size))
        covered += result.low <= truth <= result.high
    return covered / sets


def _crossed(stream: np.random.Generator, seeds: int, rows: int, size: int = 1) -> Array:
    """Gains (seeds, rows) of right over wrong."""
    base = draw(stream, rows, size)
    shifts = 0.15 * stream.normal(size=(seeds, 2))
    return np.stack([_noisy(stream, base, (first, second)) for first, second in shifts])


@cache
def _mean_with_seeds() -> float:
    stream = np.random.default_rng(12)
    return float(np.mean([_crossed(stream, 1, 20_000).mean() for _ in range(400)]))


def power(rows: int, discordant: float, gain: float, sets: int, seed: int = 10) -> float:
    """How often an accuracy gain is found at a share of discordant rows."""
    stream = np.random.default_rng([seed, rows])
    chances = [(discordant + gain) / 2, (discordant - gain) / 2, 1 - discordant]
    counts = stream.multinomial(rows, chances, size=sets)
    return float(np.mean([tango(int(a), int(b), rows)[0] > 0 for a, b, _ in counts]))


def announced_power(discordant: float, margin: float, sets: int) -> tuple[int, float]:
    """The announced number of test rows, and how often they detect the margin."""
    rows = rows_needed(discordant, margin)
    return rows, power(rows, discordant, margin, sets)


def needed_power(
    metric: str, size: int, sets: int, sites: int = 1, seed: int = 14
) -> tuple[int, float]:
    """The rows announced for a margin that is the true gain, and how often they detect it.

    Several sites share the rows, and the mean over them is tested.
    """
    stream = np.random.default_rng([seed, size, sites])
    large = _site(metric, draw(stream, 100_000, size), size)
    gain = compare(large, JOINED, ALONE, LEVEL)
    count = needed_rows(large, gain, true_gain(metric), LEVEL)
    assert count is not None  # one seed: never "more seeds"
    detected = 0
    for _ in range(sets):
        drawn = [draw(stream, -(-count // sites), size) for _ in range(sites)]
        results = [METRICS[metric](one, one["groups"] if size > 1 else None) for one in drawn]
        detected += (combine(results) if sites > 1 else results[0]).low > 0
    return count, detected / sets


def _site(metric: str, rows: Set, size: int) -> SiteOutcomes:
    """The rows as a site's outcome, whose joined model is the first one."""
    if metric in ERRORS:
        y, outputs = rows["number"], [rows[model][:, None] for model in ("first", "second")]
    else:
        logits = [2 * (rows[model] - 0.5) for model in ("first", "second")]
        y, outputs = rows["labels"].astype(int), [np.stack([0 * z, z], 1) for z in logits]
    models = dict(zip((JOINED, ALONE), outputs, strict=True))
    groups = rows["groups"] if size > 1 else None
    one = Outcome(np.arange(len(y)), y, models, len(y), groups=groups)
    return SiteOutcomes((one,), cast(Metric, metric))
