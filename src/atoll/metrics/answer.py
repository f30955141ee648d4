"""Does joining help? Comparisons and verdicts from the outcomes of sites. Needs no torch.

An outcome contains the outputs of several models on the same test rows of a site: the joined model,
the same method alone, class shares (guessing), and simple classifiers; in regression the mean of
the training labels (guessing) and simple regressors. Each comparison is a mean over rows of
differences of contributions: one number per row, whose mean is the metric. For accuracy they are
1 and 0. For metrics that are not a mean over rows, they are jackknife values: the metric plus
the influence of the row times the number of rows.

Overall is the unweighted mean over sites, which are taken as fixed. If sites share test rows, the
row is the unit.
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
from atoll.metrics.verdicts import MARGIN, Verdict, in_unit, judge, shared_level

__all__ = [
    "ALONE", "BOOSTING", "ERRORS", "FEWEST", "GUESS", "JOINED", "LOGISTIC", "MEAN", "MODELS",
    "OF_TWO", "POOLED", "RIDGE", "UNITS", "Metric", "Numbers", "Outcome", "SiteOutcomes", "about",
    "answer", "by_unit", "compare", "entry_of", "level_note", "measured", "metric_of", "models_of",
    "needed_overall", "needed_rows", "overall_of", "row_errors", "too_few",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Metric = Literal[
    "accuracy", "auroc", "auprc", "balanced accuracy", "brier score", "log loss", "mae", "mse"
]
JOINED: Final = "joined"
ALONE: Final = "alone"
GUESS: Final = "majority"  # class shares, whose most likely class is the majority class
LOGISTIC: Final = "logistic regression"
BOOSTING: Final = "gradient boosting"
POOLED: Final = "pooled"  # the same method at one site with all rows: an upper bound
MODELS = (JOINED, ALONE, GUESS, LOGISTIC, BOOSTING)
MEAN: Final = "mean"  # regression: the mean of the training labels, in place of the majority class
RIDGE: Final = "ridge regression"  # instead of logistic regression
ERRORS: Final = ("mae", "mse")  # metrics of regression
OF_CLASSES = ("auroc", "auprc", "balanced accuracy")  # metrics that need rows of all classes
OF_TWO = ("auroc", "auprc")  # metrics of two classes
LOSSES = ("brier score", "log loss", *ERRORS)  # smaller is better
ROUNDING: Final = 1e-5  # relative to the label's deviation: networks compute with about six digits
FEWEST: Final = 10  # test rows of a site, or of a class that the metric needs
SEEDS: Final = "more seeds or splits, not rows"
UNITS: Final = {
    "rows": "intervals cover the choice of test rows, not the choice of the seed (use --seeds)",
    "rows and seeds": "all seeds have the same test rows; intervals cover the choice of rows and "
    "of seeds",
    "splits": "each seed redraws the split; intervals have the correction of Nadeau and Bengio",
    "groups": "rows of a group depend on each other; intervals cover the choice of groups, not the "
    "choice of the seed (use --seeds)",
    "groups and seeds": "all seeds have the same test rows; intervals cover the choice of groups "
    "and of seeds",
}


@dataclass(frozen=True)
class Outcome:
    """The outputs of several models on the test rows of one site."""

    rows: Array  # (rows,) row numbers in the data set; equal numbers are one unit
    y: Array  # (rows,) true classes; in regression the labels
    # per model (rows, classes): logits or log-probabilities; in regression (rows, 1): predictions
    outputs: Mapping[str, Array]
    train_rows: int
    skipped: Mapping[str, str] = field(default_factory=dict)  # why models were not trained
    valid_y: Array | None = None  # true classes of validation rows
    valid: Mapping[str, Array] = field(default_factory=dict)  # outputs there, for thresholds
    variants: Mapping[str, Array] = field(default_factory=dict)  # outputs of the method's variants
    deviation: float = 1.0  # regression: of the training labels, in the unit of the label
    groups: Array | None = None  # (rows,) numbers of groups, such as patients, of all sites

    @property
    def units(self) -> Array:
        """The independent units: groups, else rows; equal numbers are one unit."""
        return self.rows if self.groups is None else self.groups


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
        """The differences of contributions for each seed."""
        return [
            contributions(self.metric, one.y, one.outputs[model])
            - contributions(self.metric, one.y, one.outputs[other])
            for one in self.seeds
        ]

    def score(self, model: str) -> float | None:
        """The metric of a model, averaged over seeds."""
        return self._mean([one.outputs.get(model) for one in self.seeds])

    def variant_scores(self) -> dict[str, float | None]:
        """The metric of each of the method's variants, averaged over seeds."""
        names = self.first.variants
        return {name: self._mean([one.variants.get(name) for one in self.seeds]) for name in names}

    def _mean(self, outputs: Sequence[Array | None]) -> float | None:
        """The metrics of outputs, averaged over seeds; None if a seed has none."""
        values = []
        for one, logits in zip(self.seeds, outputs, strict=True):
            if logits is None:
                return None
            values.append(contributions(self.metric, one.y, logits).mean())
        mean = float(np.mean(values))
        return -mean if self.metric in LOSSES else mean

    @property
    def scale(self) -> float:
        """The unit of a margin of 1: a deviation or variance of the label."""
        if self.metric not in ERRORS:
            return 1.0
        power = 2 if self.metric == "mse" else 1
        return float(np.mean([one.deviation**power for one in self.seeds]))

    @property
    def identical(self) -> bool:
        """Whether the joined model and the one trained alone have the same outputs, bit for bit.

        In regression, numbers that differ by less than rounding count as equal.
        """
        return all(_same_outputs(one, self.metric) for one in self.seeds)


def _same_outputs(one: Outcome, metric: Metric) -> bool:
    joined, alone = one.outputs[JOINED], one.outputs[ALONE]
    if metric not in ERRORS:
        return np.array_equal(joined, alone)
    return bool((np.abs(joined - alone) <= ROUNDING * one.deviation).all())


def contributions(metric: Metric, y: Array, outputs: Array) -> Array:
    """Per-row numbers whose mean is the metric; larger is better."""
    if metric in ERRORS:
        return -row_errors(metric, y, outputs)
    return _of_classes(metric, y, outputs)


def row_errors(metric: Metric, y: Array, outputs: Array) -> Array:
    """The squared or absolute error of each row in regression."""
    residuals = outputs[:, 0] - y
    return np.asarray(residuals**2 if metric == "mse" else np.abs(residuals))


def _of_classes(metric: Metric, y: Array, outputs: Array) -> Array:
    right = np.asarray(outputs.argmax(1) == y, float)
    if metric == "accuracy":
        return right
    if metric == "balanced accuracy":
        return quality.balanced_contributions(y, right)
    probabilities = quality.softmax(outputs)
    if metric == "brier score":
        return -quality.brier_losses(y, probabilities)
    if metric == "log loss":
        return -quality.log_losses(y, probabilities)
    if metric == "auprc":
        return quality.auprc_contributions(y == 1, probabilities[:, 1])
    return quality.auroc_contributions(y == 1, probabilities[:, 1])


def metric_of(chosen: Metric, regression: bool) -> Metric:
    """The metric that compares models: the config's choice, in regression mae by default."""
    return "mae" if regression and chosen == "accuracy" else chosen


def models_of(metric: Metric) -> tuple[str, str, str, str, str]:
    """The compared models: joined, alone, guessing, a linear one, boosting."""
    return (JOINED, ALONE, MEAN, RIDGE, BOOSTING) if metric in ERRORS else MODELS


def answer(
    sites: Mapping[str, Sequence[Outcome]],
    metric: Metric = "accuracy",
    margin: float = MARGIN,
    sharing: int = 0,
) -> dict[str, Any]:
    """Compute the answer of a run as plain values: comparisons and verdicts per site and overall.

    `sites` maps each site to its outcomes, one per seed. `sharing` is the number of sites sharing
    the level of the intervals; 0: all sites with released numbers. The margin of a
    regression is a share of the deviation (mse: variance) of the training labels at the site.
    """
    every = {id: SiteOutcomes(tuple(seeds), metric) for id, seeds in sites.items()}
    withheld = {id: reason for id, site in every.items() if (reason := too_few(site))}
    released = {id: site for id, site in every.items() if id not in withheld}
    level = shared_level(sharing or len(released))
    entries = {id: _entry(site, margin, level) for id, site in released.items()}
    first = next(iter(every.values()))
    unit = _unit(every, len(first.seeds))
    variants = {id: site.variant_scores() for id, site in released.items() if site.first.variants}
    return {
        "metric": metric,
        "margin": margin,
        "level": LEVEL,
        "unit": unit,
        "sites": entries,
        "withheld": withheld,
        "overall": _overall(released, entries, margin, metric),
        "notes": _notes(every, unit, level),
        **({"variants": variants} if variants else {}),
    }


def _unit(sites: Mapping[str, SiteOutcomes], seeds: int) -> str:
    """The unit of the intervals: rows or groups, with seeds if all share test rows, or splits."""
    if seeds > 1 and not all(site.same_rows for site in sites.values()):
        return "splits"
    grouped = any(site.first.groups is not None for site in sites.values())
    return ("groups" if grouped else "rows") + (" and seeds" if seeds > 1 else "")


def too_few(site: SiteOutcomes) -> str:
    """Why a site releases nothing; empty if it has enough test rows."""
    for outcome in site.seeds:
        if len(np.unique(outcome.units)) < FEWEST:
            return "too few test rows"
        if site.metric not in OF_CLASSES:
            continue
        kinds = (0, 1) if site.metric in OF_TWO else np.unique(outcome.y)
        counts = [len(np.unique(outcome.units[outcome.y == kind])) for kind in kinds]
        if min(counts) < FEWEST:
            return "too few test rows of a class"
    return ""


def compare(site: SiteOutcomes, model: str, other: str, level: float) -> Comparison:
    """The gain of one model over another at a site, over rows, or over rows and seeds."""
    if model == JOINED and other == ALONE and site.identical:
        units = len(np.unique(site.first.units))
        return Comparison(0.0, 0.0, 0.0, 0.0, 1.0, units)
    if len(site.seeds) == 1:
        return _compare_rows(site, model, other, level)
    gains = site.gains(model, other)
    if site.same_rows:
        values = [by_unit(one, site.first.units) for one in gains]
        result = compare_over_seeds(np.stack(values), level)
    else:
        means = [float(one.mean()) for one in gains]
        result = compare_over_splits(means, site.first.train_rows, len(site.first.rows), level)
    if site.metric == "accuracy":
        result = with_least_width(result, len(np.unique(site.first.units)), level)
    return result


def _compare_rows(site: SiteOutcomes, model: str, other: str, level: float) -> Comparison:
    """Compare two models on the rows of one seed, with the interval of the metric."""
    one = site.first
    first, second = one.outputs[model], one.outputs[other]
    groups = one.units if len(np.unique(one.units)) < len(one.rows) else None
    if site.metric == "accuracy":
        right = [outputs.argmax(1) == one.y for outputs in (first, second)]
        return compare_accuracy(right[0], right[1], groups, level)
    if site.metric == "auroc":
        scores = [quality.softmax(outputs)[:, 1] for outputs in (first, second)]
        return compare_auroc(one.y == 1, scores[0], scores[1], groups, level)
    gains = site.gains(model, other)[0]
    return compare_losses(-gains, np.zeros(len(gains)), groups, level)


def by_unit(values: Array, rows: Array) -> Array:
    """Values whose mean over units is the mean over rows; a row tested twice is one unit."""
    units, places = np.unique(rows, return_inverse=True)
    return np.bincount(places, values, len(units)) * len(units) / len(rows)


def _entry(site: SiteOutcomes, margin: float, level: float) -> dict[str, Any]:
    """The entry of one site."""
    margin *= site.scale
    entry = entry_of(measured(site, margin, level), margin, site.metric)
    if POOLED in site.first.outputs:
        entry["scores"][POOLED] = site.score(POOLED)
    return entry | {"quality": {model: _quality(site, model) for model in (JOINED, ALONE)}}


@dataclass(frozen=True)
class Numbers:
    """The numbers of one site's entry."""

    test_rows: int
    smallest_class: int | None
    scores: Mapping[str, float | None]  # scores by model
    gain: Comparison  # gain of joining; like the others at the level that sites share
    unadjusted: tuple[float, float]  # its interval at the level of a single site
    joined: Comparison  # gain of the joined model over guessing
    alone: Comparison  # gain of the other models over guessing
    logistic: Comparison | None  # of joining over logistic or ridge regression
    needed: int | None  # number of test rows that detect the margin; None: needs more seeds
    identical: bool  # whether both models have equal outputs


def measured(site: SiteOutcomes, margin: float, level: float) -> Numbers:
    """Compute the numbers of a site from its outcomes."""
    gain = compare(site, JOINED, ALONE, level)
    plain = compare(site, JOINED, ALONE, LEVEL)
    models = models_of(site.metric)
    guess, linear = models[2:4]
    logistic = None
    if all(linear in one.outputs for one in site.seeds):
        logistic = compare(site, JOINED, linear, level)
    smallest = None
    if site.metric not in ERRORS:
        smallest = min(int(np.bincount(one.y)[np.unique(one.y)].min()) for one in site.seeds)
    return Numbers(
        len(site.first.rows),
        smallest,
        {model: site.score(model) for model in models},
        gain,
        (plain.low, plain.high),
        compare(site, JOINED, guess, level),
        compare(site, ALONE, guess, level),
        logistic,
        needed_rows(site, gain, margin, level),
        site.identical,
    )


def entry_of(numbers: Numbers, margin: float, metric: Metric) -> dict[str, Any]:
    """The entry of a site with these numbers and its verdict; the margin is in their unit."""
    comparisons = (numbers.gain, numbers.joined, numbers.alone)
    words = _in_words(numbers.needed, numbers.test_rows)
    verdict = _judged(numbers.identical, comparisons, (margin, metric), words)
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
        "remarks": _remarks(numbers.logistic, models_of(metric)[3]),
        **({"margin": margin} if metric in ERRORS else {}),
    }


def _quality(site: SiteOutcomes, model: str) -> dict[str, Any]:
    """The quality metrics of a model with the first seed."""
    one = site.first
    if site.metric in ERRORS:
        return quality.describe_numbers(one.y, one.outputs[model][:, 0])
    probabilities = quality.softmax(one.outputs[model])
    described = quality.describe(one.y, probabilities)
    if model in one.valid and one.valid_y is not None:
        scores = quality.softmax(one.valid[model])[:, 1]
        threshold = quality.threshold_at(one.valid_y == 1, scores)
        described |= quality.at_threshold(one.y == 1, probabilities[:, 1], threshold)
    return described


def _remarks(linear: Comparison | None, name: str) -> list[str]:
    if linear is None or linear.low > 0:
        return []
    if linear.high < 0:
        return [f"{name} at the site beats the joined model"]
    return [f"the joined model is not shown to beat {name} at the site"]


def _judged(
    identical: bool,
    comparisons: tuple[Comparison, Comparison, Comparison],
    margin: tuple[float, Metric],
    needed: str,
) -> Verdict:
    """The verdict from the gain of joining and each model's gain over guessing."""
    if identical:
        return Verdict("no difference", "no difference: both models give the same outputs")
    gain, joined, alone = comparisons
    return judge(gain, joined, alone, margin[0], needed, in_unit(*margin))


def needed_rows(site: SiteOutcomes, gain: Comparison, margin: float, level: float) -> int | None:
    """The number of test rows that would detect the margin; None if more seeds are needed."""
    gains = site.gains(JOINED, ALONE)
    rows = len(site.first.rows)
    variance = float(np.mean([one.var() for one in gains]))  # of one row
    effect = _design_effect(site, gains)
    sampling = effect * variance / rows
    if len(gains) > 1 and _seeds_dominate(gain.error, sampling, site.same_rows, len(gains)):
        return None
    if site.metric == "accuracy":
        discordant = float(np.mean([np.mean(one != 0) for one in gains]))
        return math.ceil(effect * rows_needed(discordant, margin, level))
    return rows_for_error(math.sqrt(effect * variance), margin, level)


def _design_effect(site: SiteOutcomes, gains: Sequence[Array]) -> float:
    """The design effect: the factor of rows needed because rows of a group resemble each other.

    The variance of the mean by groups divided by that by rows; 1 without groups, and never less.
    """
    effects = [1.0]
    for one, values in zip(site.seeds, gains, strict=True):
        by_row = float(values.var(ddof=1)) / len(values)
        if one.groups is not None and by_row > 0:
            zeros = np.zeros(len(values))
            effects.append(compare_losses(-values, zeros, one.groups).error ** 2 / by_row)
    return max(1.0, float(np.mean(effects[1:] or effects)))


def _seeds_dominate(error: float, sampling: float, same_rows: bool, seeds: int) -> bool:
    """Whether most of the variance would remain with infinitely many test rows.

    `sampling` is the part of one seed's variance due to its test rows. Redrawn splits average it
    over seeds; with fixed test rows it remains.
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
    """A number rounded to two digits, the precision of the estimates."""
    return round(float(f"{count:.1e}"))


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values."""
    values = asdict(replace(comparison))
    values.pop("freedom")
    return values


def _overall(
    sites: Mapping[str, SiteOutcomes],
    entries: Mapping[str, dict[str, Any]],
    margin: float,
    metric: Metric,
) -> dict[str, Any]:
    """The unweighted mean over the released sites."""
    several = list(sites.values())
    if not several:
        return overall_of((), entries, (margin, metric))
    margin *= float(np.mean([site.scale for site in several]))
    guess = models_of(several[0].metric)[2]
    pairs = ((JOINED, ALONE), (JOINED, guess), (ALONE, guess))
    comparisons = [mean_gain(several, *pair) for pair in pairs]
    numbers = []
    for site in several:
        gain = compare(site, JOINED, ALONE, LEVEL)
        numbers.append(needed_rows(site, gain, margin, LEVEL))
    tested = [site.first.rows for site in several]
    rows = len(np.unique(np.concatenate(tested)))
    identical = all(site.identical for site in several)
    needed = needed_overall(numbers, rows)
    return overall_of(comparisons, entries, (margin, metric), needed, identical)


def overall_of(
    comparisons: Sequence[Comparison],
    entries: Mapping[str, dict[str, Any]],
    margin: tuple[float, Metric],  # in the unit of the metric
    needed: str = "",
    identical: bool = False,
) -> dict[str, Any]:
    """The entry of all sites together.

    `comparisons` has the gain of joining and each model's gain over guessing; it is empty if no
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
        **({"margin": margin[0]} if margin[1] in ERRORS else {}),
        **counts,
    }


def needed_overall(numbers: Sequence[int | None], rows: int) -> str:
    """What would decide the mean over sites, from what each site alone would need."""
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
    rows = [site.first.units for site in sites]
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
    """(seeds, units) values whose mean is the mean over sites; site means are fixed effects."""
    seeds = len(sites[0].seeds)
    values = np.zeros((seeds, len(units)))
    means = []
    for site in sites:
        gains = np.stack(site.gains(model, other))
        places = np.searchsorted(units, site.first.units)
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
    """Describe the level of the intervals of several sites."""
    return (
        f"each site's interval has a level of {100 * level:.4g} %, so that the intervals of all "
        f"sites hold together at {100 * LEVEL:g} %"
    )


def _notes(sites: Mapping[str, SiteOutcomes], unit: str, level: float) -> list[str]:
    """Describe how the numbers are computed."""
    result = [UNITS[unit]]
    if len(sites) > 1:
        result.append(level_note(level))
        units = [np.unique(site.first.units) for site in sites.values()]
        if len(np.unique(np.concatenate(units))) < sum(map(len, units)):
            what = "rows" if all(one.first.groups is None for one in sites.values()) else "groups"
            result.append(f"sites share test {what}; overall, each {what[:-1]} counts once")
    skipped: dict[str, str] = {}
    for site in sites.values():
        skipped |= site.first.skipped
    return result + [f"no {name}: {reason}" for name, reason in skipped.items()]
