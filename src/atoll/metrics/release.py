"""What a site releases of its comparison, and how the answer is assembled. Needs no torch.

A site computes everything on its own rows. It releases all or nothing: with fewer than ten test
rows (for class metrics: rows of a class) only the reason. Row counts are rounded down to tens. The
counts of rows on which only one model is right, confusion matrices and qualities never leave.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import numpy as np

from atoll.metrics.answer import (
    ALONE,
    FEWEST,
    JOINED,
    UNITS,
    Metric,
    Numbers,
    Outcome,
    SiteOutcomes,
    about,
    compare,
    entry_of,
    level_note,
    measured,
    models_of,
    needed_overall,
    needed_rows,
    overall_of,
    too_few,
)
from atoll.metrics.statistics import LEVEL, Comparison, combine, combine_dependent
from atoll.metrics.verdicts import shared_level

__all__ = ["Release", "assemble", "fault", "release", "rounded"]

TENS: Final = 10
PAIRS: Final = ("gain", "joined", "alone", "logistic")
NEEDED: Final = ("gain", "joined", "alone")  # pairs in every release
FIELDS: Final = ("gain", "error", "low", "high", "p", "plain_low", "plain_high")
Reason = Literal["", "too few test rows", "too few test rows of a class"]


@dataclass(frozen=True)
class Release:
    """The values that leave a site; with a reason all other fields are empty."""

    reason: Reason  # why nothing is released; empty if something is
    test_rows: int = 0  # rounded down to tens
    smallest_class: int = 0  # rounded down to tens; 0: fewer than ten
    scores: dict[str, float] = field(default_factory=dict)  # scores by model
    # of each pair: gain, error, limits that sites share the level of, p, and limits of one site
    comparisons: dict[str, dict[str, float]] = field(default_factory=dict)
    needed: int = 0  # test rows that detect the margin at the shared level, with two digits
    needed_plain: int = 0  # the same at the level of a single site
    identical: bool = False  # whether both models have equal outputs
    groups: int = 0  # groups of test rows, rounded down to tens; 0: rows are independent
    scale: float = 1.0  # regression: deviation (mse: variance) of the training labels, two digits


def rounded(count: int) -> int:
    """A row count rounded down to tens."""
    return count // TENS * TENS


def pairs_of(metric: Metric) -> dict[str, tuple[str, str]]:
    """The two models of each pair."""
    guess, linear = models_of(metric)[2:4]
    both = ((JOINED, ALONE), (JOINED, guess), (ALONE, guess), (JOINED, linear))
    return dict(zip(PAIRS, both, strict=True))


def release(outcome: Outcome, metric: Metric, margin: float, sites: int) -> Release:
    """Create the release of one of several sites from its outcome."""
    site = SiteOutcomes((outcome,), metric)
    reason = too_few(site)
    if reason:
        return Release(cast(Reason, reason))
    level, scale = shared_level(sites), float(f"{site.scale:.1e}")
    margin *= scale
    numbers = measured(site, margin, level)
    comparisons = {}
    for name, pair in pairs_of(metric).items():
        if pair[1] in outcome.outputs:
            shared, plain = compare(site, *pair, level), compare(site, *pair, LEVEL)
            comparisons[name] = _written(shared, plain)
    needed_plain = needed_rows(site, compare(site, JOINED, ALONE, LEVEL), margin, LEVEL)
    return Release(
        "",
        rounded(numbers.test_rows),
        rounded(numbers.smallest_class or 0),
        {model: score for model, score in numbers.scores.items() if score is not None},
        comparisons,
        about(numbers.needed or 0),
        about(needed_plain or 0),
        numbers.identical,
        0 if outcome.groups is None else rounded(len(np.unique(outcome.groups))),
        scale,
    )


def _written(shared: Comparison, plain: Comparison) -> dict[str, float]:
    values = {name: float(getattr(shared, name)) for name in FIELDS[:5]}
    return values | {"plain_low": plain.low, "plain_high": plain.high}


def fault(one: Release) -> str:
    """Why a received release is invalid; empty if it is valid."""
    if one.reason:
        return "" if one == Release(one.reason) else "numbers beside a reason to withhold them"
    counts = (one.test_rows, one.smallest_class)
    checks = {
        "row counts that are not tens": one.test_rows < FEWEST
        or any(count < 0 or count % TENS for count in counts),
        "a number of groups that is not tens": one.groups % TENS != 0
        or not 0 <= one.groups <= one.test_rows,
        "negative numbers of rows": min(one.needed, one.needed_plain) < 0,
        "scores of unknown models": not any(
            one.scores.keys() <= set(models_of(metric)) for metric in ("accuracy", "mae")
        ),
        "other comparisons than agreed": not set(NEEDED) <= one.comparisons.keys() <= set(PAIRS),
        "a scale that cannot be": not (math.isfinite(one.scale) and one.scale > 0),
        "a comparison that cannot be": not all(map(_plausible, one.comparisons.values())),
    }
    return next((words for words, wrong in checks.items() if wrong), "")


def _plausible(values: Mapping[str, float]) -> bool:
    if set(values) != set(FIELDS) or not all(map(math.isfinite, values.values())):
        return False
    ordered = values["low"] <= values["high"] and values["plain_low"] <= values["plain_high"]
    return ordered and values["error"] >= 0 and 0 <= values["p"] <= 1


def assemble(
    releases: Mapping[str, Release],
    withheld: Mapping[str, str],
    metric: Metric,
    margin: float,
    shared_rows: bool = False,
) -> dict[str, Any]:
    """Assemble the answer of a run from releases, in the format of an answer computed in one place.

    `withheld` has a reason for each site without a release; `shared_rows`: sites may share
    test rows.
    """
    reasons = dict(withheld) | {id: one.reason for id, one in releases.items() if one.reason}
    released = {id: one for id, one in releases.items() if not one.reason}
    entries = {
        id: entry_of(_numbers(one, metric), margin * one.scale, metric)
        for id, one in released.items()
    }
    count = len(releases) + len(withheld)
    unit = "groups" if any(one.groups for one in released.values()) else "rows"
    notes = [UNITS[unit], "each site computed its own numbers; row counts are rounded down to tens"]
    notes += [level_note(shared_level(count))] if count > 1 else []
    notes += ["sites share test rows; overall, standard errors are added"] if shared_rows else []
    return {
        "metric": metric,
        "margin": margin,
        "level": LEVEL,
        "unit": unit,
        "sites": entries,
        "withheld": {id: reasons[id] for id in sorted(reasons)},
        "overall": _overall(list(released.values()), entries, metric, margin, shared_rows),
        "notes": notes + [f"no {name}" for name in _missing(released.values(), metric)],
    }


def _missing(releases: Iterable[Release], metric: Metric) -> list[str]:
    """The models without a score at the site."""
    every = list(releases)
    return [model for model in models_of(metric) if any(model not in one.scores for one in every)]


def _numbers(one: Release, metric: Metric) -> Numbers:
    """The released numbers of a site."""
    shared = {name: _comparison(one, name, metric) for name in one.comparisons}
    gain = one.comparisons["gain"]
    return Numbers(
        test_rows=one.test_rows,
        smallest_class=one.smallest_class or None,
        scores={model: one.scores.get(model) for model in models_of(metric)},
        gain=shared["gain"],
        unadjusted=(gain["plain_low"], gain["plain_high"]),
        joined=shared["joined"],
        alone=shared["alone"],
        logistic=shared.get("logistic"),
        needed=one.needed,
        identical=one.identical,
    )


def _comparison(one: Release, name: str, metric: Metric) -> Comparison:
    """A comparison at the level that sites share, with degrees of freedom from rounded counts."""
    gain, error, low, high, p = (one.comparisons[name][key] for key in FIELDS[:5])
    units = one.groups or one.test_rows
    freedom = min(one.smallest_class, units) - 1 if metric == "auroc" else math.inf
    return Comparison(gain, error, low, high, p, units, freedom)


def _plain(one: Release, name: str, metric: Metric) -> Comparison:
    """A comparison at the level of a single site."""
    low, high = (one.comparisons[name][key] for key in ("plain_low", "plain_high"))
    return dataclasses.replace(_comparison(one, name, metric), low=low, high=high)


def _overall(
    releases: Sequence[Release],
    entries: Mapping[str, dict[str, Any]],
    metric: Metric,
    margin: float,
    shared_rows: bool,
) -> dict[str, Any]:
    """The unweighted mean over the released sites."""
    if not releases:
        return overall_of((), entries, (margin, metric))
    margin *= sum(one.scale for one in releases) / len(releases)
    means = []
    identical = all(one.identical for one in releases)
    for name in NEEDED:
        plain = [_plain(one, name, metric) for one in releases]
        if len(plain) == 1 or (identical and name == "gain"):
            means.append(plain[0])
        else:
            means.append(combine_dependent(plain) if shared_rows else combine(plain))
    counts = [one.test_rows for one in releases]
    rows = max(counts) if shared_rows else sum(counts)
    needed = needed_overall([one.needed_plain for one in releases], rows)
    return overall_of(means, entries, (margin, metric), needed, identical)
