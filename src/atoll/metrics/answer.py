"""Does joining help? Comparisons and verdicts from the outcomes of sites. Needs no torch.

An outcome has the outputs of several models on the very same test rows of a site: the joined model,
the same method alone, class shares (guessing), and simple classifiers. Each comparison is a mean
over rows of a difference of contributions: numbers of rows whose mean is the metric. For accuracy
they are 1 and 0. For metrics that are no mean over rows, they are jackknife values: the metric plus
the influence of the row times the number of rows.

Overall is the unweighted mean over sites, taken as fixed. Where sites share test rows, the row is
the unit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from atoll.metrics import quality
from atoll.metrics.statistics import (
    LEVEL,
    Comparison,
    combine,
    compare_accuracy,
    compare_auroc,
    compare_losses,
    compare_over_seeds,
    compare_over_splits,
    compare_units,
    rows_for_error,
    rows_needed,
    with_least_width,
)
from atoll.metrics.verdicts import MARGIN, Verdict, judge, shared_level

__all__ = [
    "ALONE", "BOOSTING", "FEWEST", "GUESS", "JOINED", "LOGISTIC", "MODELS", "UNITS", "Metric",
    "Numbers", "Outcome", "SiteOutcomes", "about", "answer", "compare", "entry_of", "level_note",
    "measured", "needed_overall", "needed_rows", "overall_of", "too_few",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Metric = Literal["accuracy", "auroc", "balanced accuracy", "brier score"]
JOINED: Final = "joined"
ALONE: Final = "alone"
GUESS: Final = "majority"  # class shares, whose likeliest class is the majority class
LOGISTIC: Final = "logistic regression"
BOOSTING: Final = "gradient boosting"
MODELS = (JOINED, ALONE, GUESS, LOGISTIC, BOOSTING)
OF_CLASSES = ("auroc", "balanced accuracy")  # metrics that need rows of every class
FEWEST: Final = 10  # test rows of a site, or of a class that the metric needs
SEEDS: Final = "more seeds or splits, not rows"
UNITS: Final = {
    "rows": "intervals of test rows; another seed is not considered",
    "rows and seeds": "all seeds have the same test rows: intervals of rows and seeds together",
    "splits": "each seed redraws the split: intervals with the correction of Nadeau and Bengio",
}


@dataclass(frozen=True)
class Outcome:
    """What several models say of the test rows of one site."""

    rows: Array  # (rows,) numbers of rows in the data set; equal numbers are one unit
    y: Array  # (rows,) true classes
    outputs: Mapping[str, Array]  # of each model (rows, classes): logits or log-probabilities
    train_rows: int
    skipped: Mapping[str, str] = field(default_factory=dict)  # models that were not trained, why
    valid_y: Array | None = None  # true classes of validation rows
    valid: Mapping[str, Array] = field(default_factory=dict)  # outputs there, for thresholds


@dataclass(frozen=True)
class SiteOutcomes:
    """The outcomes of one site, one for each seed."""

    seeds: tuple[Outcome, ...]
    metric: Metric

    @property
    def first(self) -> Outcome:
        return self.seeds[0]

    @property
    def same_rows(self) -> bool:
        """Whether all seeds have the same test rows."""
        return all(np.array_equal(one.rows, self.first.rows) for one in self.seeds)

    def gains(self, model: str, other: str) -> list[Array]:
        """For each seed the differences of contributions."""
        return [
            contributions(self.metric, one.y, one.outputs[model])
            - contributions(self.metric, one.y, one.outputs[other])
            for one in self.seeds
        ]

    def score(self, model: str) -> float | None:
        """The metric of a model, the mean over seeds."""
        if any(model not in one.outputs for one in self.seeds):
            return None
        values = [contributions(self.metric, o.y, o.outputs[model]).mean() for o in self.seeds]
        mean = float(np.mean(values))
        return -mean if self.metric == "brier score" else mean

    @property
    def identical(self) -> bool:
        """Whether the joined model and the one alone have the same outputs, bit for bit."""
        return all(np.array_equal(o.outputs[JOINED], o.outputs[ALONE]) for o in self.seeds)


def contributions(metric: Metric, y: Array, outputs: Array) -> Array:
    """Numbers of rows whose mean is the metric; a larger one is better."""
    right = np.asarray(outputs.argmax(1) == y, float)
    if metric == "accuracy":
        return right
    if metric == "balanced accuracy":
        return quality.balanced_contributions(y, right)
    probabilities = quality.softmax(outputs)
    if metric == "brier score":
        return -quality.brier_losses(y, probabilities)
    return quality.auroc_contributions(y == 1, probabilities[:, 1])


def answer(
    sites: Mapping[str, Sequence[Outcome]],
    metric: Metric = "accuracy",
    margin: float = MARGIN,
    sharing: int = 0,
) -> dict[str, Any]:
    """The answer of a run, as plain values: comparisons and verdicts per site and overall.

    `sites` has for each site its outcomes, one for each seed. `sharing` is the number of sites
    whose intervals have the level together; 0: those whose numbers are released.
    """
    every = {id: SiteOutcomes(tuple(seeds), metric) for id, seeds in sites.items()}
    withheld = {id: reason for id, site in every.items() if (reason := too_few(site))}
    released = {id: site for id, site in every.items() if id not in withheld}
    level = shared_level(sharing or len(released))
    entries = {id: _entry(site, margin, level) for id, site in released.items()}
    first = next(iter(every.values()))
    unit = "rows" if len(first.seeds) == 1 else "rows and seeds" if _same(every) else "splits"
    return {
        "metric": metric,
        "margin": margin,
        "level": LEVEL,
        "unit": unit,
        "sites": entries,
        "withheld": withheld,
        "overall": _overall(released, entries, margin),
        "notes": _notes(every, unit, level),
    }


def _same(sites: Mapping[str, SiteOutcomes]) -> bool:
    return all(site.same_rows for site in sites.values())


def too_few(site: SiteOutcomes) -> str:
    """Why nothing of a site is released; empty where there are enough test rows."""
    for outcome in site.seeds:
        if len(np.unique(outcome.rows)) < FEWEST:
            return "too few test rows"
        kinds = (0, 1) if site.metric == "auroc" else np.unique(outcome.y)
        counts = [len(np.unique(outcome.rows[outcome.y == kind])) for kind in kinds]
        if site.metric in OF_CLASSES and min(counts) < FEWEST:
            return "too few test rows of a class"
    return ""


def compare(site: SiteOutcomes, model: str, other: str, level: float) -> Comparison:
    """The gain of one model over another at a site, over rows, or over rows and seeds."""
    if model == JOINED and other == ALONE and site.identical:
        rows = len(np.unique(site.first.rows))
        return Comparison(0.0, 0.0, 0.0, 0.0, 1.0, rows)
    if len(site.seeds) == 1:
        return _compare_rows(site, model, other, level)
    gains = site.gains(model, other)
    if site.same_rows:
        values = [_by_unit(one, site.first.rows) for one in gains]
        result = compare_over_seeds(np.stack(values), level)
    else:
        means = [float(one.mean()) for one in gains]
        result = compare_over_splits(means, site.first.train_rows, len(site.first.rows), level)
    if site.metric == "accuracy":
        result = with_least_width(result, len(np.unique(site.first.rows)), level)
    return result


def _compare_rows(site: SiteOutcomes, model: str, other: str, level: float) -> Comparison:
    """One seed: the comparison that the metric has of its own."""
    one = site.first
    first, second = one.outputs[model], one.outputs[other]
    groups = one.rows if len(np.unique(one.rows)) < len(one.rows) else None
    if site.metric == "accuracy":
        right = [outputs.argmax(1) == one.y for outputs in (first, second)]
        return compare_accuracy(right[0], right[1], groups, level)
    if site.metric == "auroc":
        scores = [quality.softmax(outputs)[:, 1] for outputs in (first, second)]
        return compare_auroc(one.y == 1, scores[0], scores[1], groups, level)
    gains = site.gains(model, other)[0]
    return compare_losses(-gains, np.zeros(len(gains)), groups, level)


def _by_unit(values: Array, rows: Array) -> Array:
    """Values whose mean over units is the mean over rows; a row that is tested twice is a unit."""
    units, places = np.unique(rows, return_inverse=True)
    return np.bincount(places, values, len(units)) * len(units) / len(rows)


def _entry(site: SiteOutcomes, margin: float, level: float) -> dict[str, Any]:
    """What is said of one site."""
    entry = entry_of(measured(site, margin, level), margin)
    return entry | {"quality": {model: _quality(site, model) for model in (JOINED, ALONE)}}


@dataclass(frozen=True)
class Numbers:
    """The numbers behind what is said of one site."""

    test_rows: int
    smallest_class: int | None
    scores: Mapping[str, float | None]  # by model
    gain: Comparison  # of joining; this and the others at the level that sites share
    unadjusted: tuple[float, float]  # its interval at the level of one site
    joined: Comparison  # over guessing
    alone: Comparison  # over guessing
    logistic: Comparison | None  # of joining over logistic regression
    needed: int | None  # test rows that detect the margin; None: more seeds
    identical: bool  # whether both models have the same outputs


def measured(site: SiteOutcomes, margin: float, level: float) -> Numbers:
    """The numbers of a site, from its outcomes."""
    gain = compare(site, JOINED, ALONE, level)
    plain = compare(site, JOINED, ALONE, LEVEL)
    logistic = None
    if all(LOGISTIC in one.outputs for one in site.seeds):
        logistic = compare(site, JOINED, LOGISTIC, level)
    counts = [np.bincount(one.y)[np.unique(one.y)].min() for one in site.seeds]
    return Numbers(
        len(site.first.rows),
        int(min(counts)),
        {model: site.score(model) for model in MODELS},
        gain,
        (plain.low, plain.high),
        compare(site, JOINED, GUESS, level),
        compare(site, ALONE, GUESS, level),
        logistic,
        needed_rows(site, gain, margin, level),
        site.identical,
    )


def entry_of(numbers: Numbers, margin: float) -> dict[str, Any]:
    """What is said of a site with these numbers, with its verdict."""
    comparisons = (numbers.gain, numbers.joined, numbers.alone)
    words = _in_words(numbers.needed, numbers.test_rows)
    verdict = _judged(numbers.identical, comparisons, margin, words)
    low, high = numbers.unadjusted
    return {
        "test_rows": numbers.test_rows,
        "smallest_class": numbers.smallest_class,
        "scores": dict(numbers.scores),
        "gain": as_json(numbers.gain),
        "unadjusted": {"low": low, "high": high},
        "joined_over_guessing": as_json(numbers.joined),
        "alone_over_guessing": as_json(numbers.alone),
        "joined_over_logistic": None if numbers.logistic is None else as_json(numbers.logistic),
        "verdict": asdict(verdict),
        "rows_needed": numbers.needed if verdict.kind == "cannot tell" else None,
        "remarks": _remarks(numbers.logistic),
    }


def _quality(site: SiteOutcomes, model: str) -> dict[str, Any]:
    """The qualities of a model with the first seed."""
    one = site.first
    probabilities = quality.softmax(one.outputs[model])
    described = quality.describe(one.y, probabilities)
    if model in one.valid and one.valid_y is not None:
        scores = quality.softmax(one.valid[model])[:, 1]
        threshold = quality.threshold_at(one.valid_y == 1, scores)
        described |= quality.at_threshold(one.y == 1, probabilities[:, 1], threshold)
    return described


def _remarks(logistic: Comparison | None) -> list[str]:
    if logistic is None or logistic.low > 0:
        return []
    if logistic.high < 0:
        return ["logistic regression at the site beats the joined model"]
    return ["the joined model does not beat logistic regression at the site"]


def _judged(
    identical: bool,
    comparisons: tuple[Comparison, Comparison, Comparison],
    margin: float,
    needed: str,
) -> Verdict:
    """The verdict of the gain, and of each model's gain over guessing."""
    if identical:
        return Verdict("no difference", "no difference: both models give the same outputs")
    gain, joined, alone = comparisons
    return judge(gain, joined, alone, margin, needed)


def needed_rows(site: SiteOutcomes, gain: Comparison, margin: float, level: float) -> int | None:
    """How many test rows would detect the margin; None where more seeds are needed instead."""
    gains = site.gains(JOINED, ALONE)
    rows = len(site.first.rows)
    variance = float(np.mean([one.var() for one in gains]))  # of one row
    if len(gains) > 1 and _seeds_dominate(gain.error, variance / rows, site.same_rows, len(gains)):
        return None
    if site.metric == "accuracy":
        discordant = float(np.mean([np.mean(one != 0) for one in gains]))
        return rows_needed(discordant, margin, level)
    return rows_for_error(math.sqrt(variance), margin, level)


def _seeds_dominate(error: float, sampling: float, same_rows: bool, seeds: int) -> bool:
    """Whether most of the variance would remain with any number of test rows.

    `sampling` is the variance of one seed's gain that its test rows explain. Redrawn splits average
    it over seeds; with fixed test rows it stays.
    """
    explained = sampling if same_rows else sampling / seeds
    return error**2 > 2 * explained


def _in_words(needed: int | None, rows: int) -> str:
    if needed is None:
        return SEEDS
    if needed > rows:
        return f"about {about(needed):,} test rows"
    return f"more than these {rows:,} test rows"


def about(count: int) -> int:
    """A number with two digits: no estimate is better than that."""
    return round(float(f"{count:.1e}"))


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values."""
    values = asdict(replace(comparison))
    values.pop("freedom")
    return values


def _overall(
    sites: Mapping[str, SiteOutcomes], entries: Mapping[str, dict[str, Any]], margin: float
) -> dict[str, Any]:
    """The unweighted mean over the sites that are released."""
    several = list(sites.values())
    if not several:
        return overall_of((), entries, margin)
    pairs = ((JOINED, ALONE), (JOINED, GUESS), (ALONE, GUESS))
    comparisons = [mean_gain(several, *pair) for pair in pairs]
    numbers = []
    for site in several:
        gain = compare(site, JOINED, ALONE, LEVEL)
        numbers.append(needed_rows(site, gain, margin, LEVEL))
    rows = len(np.unique(np.concatenate([site.first.rows for site in several])))
    identical = all(site.identical for site in several)
    return overall_of(comparisons, entries, margin, needed_overall(numbers, rows), identical)


def overall_of(
    comparisons: Sequence[Comparison],
    entries: Mapping[str, dict[str, Any]],
    margin: float,
    needed: str = "",
    identical: bool = False,
) -> dict[str, Any]:
    """What is said of all sites together.

    `comparisons` has the gain of joining and each model's gain over guessing; it is empty where no
    site is released.
    """
    kinds = [entry["verdict"]["kind"] for entry in entries.values()]
    counts = {"sites": len(entries), "helps": kinds.count("helps"), "hurts": kinds.count("hurts")}
    if not comparisons:
        verdict = Verdict("cannot tell", "cannot tell: too few test rows at every site")
        return {"gain": None, "unadjusted": None, "verdict": asdict(verdict), **counts}
    gain, joined, alone = comparisons
    verdict = _judged(identical, (gain, joined, alone), margin, needed)
    return {
        "gain": as_json(gain),
        "unadjusted": None,
        "joined_over_guessing": as_json(joined),
        "alone_over_guessing": as_json(alone),
        "verdict": asdict(verdict),
        **counts,
    }


def needed_overall(numbers: Sequence[int | None], rows: int) -> str:
    """What would decide the mean over sites, from what each would need by itself."""
    if any(number is None for number in numbers):
        return SEEDS
    total = round(float(np.mean([number or 0 for number in numbers])))
    if total > rows:
        return f"about {about(total):,} test rows at all sites together"
    return f"more than these {rows:,} test rows"


def mean_gain(sites: Sequence[SiteOutcomes], model: str, other: str) -> Comparison:
    """The mean over sites of the gain of one model over another."""
    if len(sites) == 1:
        return compare(sites[0], model, other, LEVEL)
    first, seeds = sites[0], len(sites[0].seeds)
    if all(site.identical for site in sites) and (model, other) == (JOINED, ALONE):
        return compare(first, model, other, LEVEL)
    if seeds > 1 and not all(site.same_rows for site in sites):
        return _mean_over_splits(sites, model, other)
    rows = [site.first.rows for site in sites]
    units = np.unique(np.concatenate(rows))
    disjoint = len(units) == sum(len(np.unique(one)) for one in rows)
    if disjoint and seeds == 1:
        return combine([compare(site, model, other, LEVEL) for site in sites])
    values = _values_of_units(sites, model, other, units)
    result = compare_over_seeds(values) if seeds > 1 else compare_units(values[0])
    if first.metric == "accuracy":
        result = with_least_width(result, len(units), LEVEL)
    return result


def _values_of_units(sites: Sequence[SiteOutcomes], model: str, other: str, units: Array) -> Array:
    """(seeds, units) whose mean is the mean over sites; the means of sites are fixed."""
    seeds = len(sites[0].seeds)
    values = np.zeros((seeds, len(units)))
    means = []
    for site in sites:
        gains = np.stack(site.gains(model, other))
        places = np.searchsorted(units, site.first.rows)
        share = len(units) / (len(sites) * gains.shape[1])
        means.append(gains.mean())
        for seed, one in enumerate(gains):
            values[seed] += np.bincount(places, (one - gains.mean()) * share, len(units))
    return values + float(np.mean(means))


def _mean_over_splits(sites: Sequence[SiteOutcomes], model: str, other: str) -> Comparison:
    """Each seed redraws the splits: its mean over sites is one value."""
    by_site = [[float(one.mean()) for one in site.gains(model, other)] for site in sites]
    ratio = max(len(site.first.rows) / site.first.train_rows for site in sites)
    test = sum(len(site.first.rows) for site in sites)
    result = compare_over_splits(np.mean(by_site, 0).tolist(), round(test / ratio), test)
    if sites[0].metric == "accuracy":
        result = with_least_width(result, test, LEVEL)
    return result


def level_note(level: float) -> str:
    """The level of the intervals of several sites, in words."""
    return f"intervals of sites have the level {level:.4g}, so that all hold together"


def _notes(sites: Mapping[str, SiteOutcomes], unit: str, level: float) -> list[str]:
    """How the numbers were made."""
    result = [UNITS[unit]]
    if len(sites) > 1:
        result.append(level_note(level))
        rows = [np.unique(site.first.rows) for site in sites.values()]
        if len(np.unique(np.concatenate(rows))) < sum(map(len, rows)):
            result.append("sites share test rows: overall, the row is the unit")
    skipped: dict[str, str] = {}
    for site in sites.values():
        skipped |= site.first.skipped
    return result + [f"no {name}: {reason}" for name, reason in skipped.items()]
