"""Reads answer.json, which `atoll answer` writes: the paired gain of joining, with its verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.metrics.answer import ERRORS
from atoll.metrics.verdicts import beats_linear, linear_beats
from atoll.report.tables import Group
from atoll.runs.result import ANSWER, read_answer, variant_means

__all__ = [
    "Answer",
    "Gain",
    "Overall",
    "Quality",
    "SiteAnswer",
    "Verdict",
    "answer_of",
    "home_of",
    "primary_scores",
]

FORMAT = 1
NUMBERS = ("gain", "error", "low", "high", "p")
LOSSES = ("brier score", "brier", "log loss", "mse", "rmse", "mae")
KINDS = ("helps", "hurts", "no difference", "cannot tell")


@dataclass(frozen=True)
class Gain:
    """A paired difference with its interval; NaN if a number is undefined."""

    gain: float
    error: float  # standard error
    low: float
    high: float
    p: float
    units: int  # number of rows, groups or splits in the test


@dataclass(frozen=True)
class Verdict:
    """The verdict's kind, one of four, and its sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class SiteAnswer:
    """The effect of joining at one site."""

    site: str
    test_rows: int
    smallest_class: int | None  # test rows of the rarest class; None for a regression
    scores: Mapping[str, float]  # scores by predictor, in the order of the file; NaN: not measured
    gain: Gain
    unadjusted: tuple[float, float] | None  # the interval of a single site
    verdict: Verdict
    rows_needed: int | None  # number of test rows that would detect the margin
    beats_linear: bool | None = None  # by the verdict's test; None: not compared
    linear_beats: bool = False  # the opposite comparison
    remarks: tuple[str, ...] = ()
    quality: tuple["Quality", ...] = ()  # quality of each measured model

    def score(self, name: str) -> float:
        """The score of a predictor; NaN if it was not measured."""
        return self.scores.get(name, math.nan)


@dataclass(frozen=True)
class Quality:
    """Other metrics of one model on a site's test rows."""

    model: str
    metrics: Mapping[str, float]  # NaN if undefined
    reliability: tuple[tuple[float, float, float], ...]  # predicted, observed, rows
    classes: tuple[tuple[float, float, int], ...] = ()  # recall, precision and rows of each class
    confusion: tuple[tuple[int, ...], ...] = ()  # rows by true and predicted class


@dataclass(frozen=True)
class Overall:
    """The unweighted mean over the sites."""

    gain: Gain | None
    verdict: Verdict
    helps: int
    hurts: int


@dataclass(frozen=True)
class Answer:
    """Whether joining helps, site by site and overall."""

    metric: str
    margin: float  # in the unit of the metric; in regression the mean over sites
    level: float
    unit: str  # rows, rows and seeds, or splits
    seeds: tuple[int, ...]
    variant: str
    baseline: str
    sites: tuple[SiteAnswer, ...]  # sorted by gain, descending
    withheld: Mapping[str, str]  # site -> reason
    overall: Overall
    notes: tuple[str, ...]
    variants: Mapping[str, float] = field(default_factory=dict)  # mean score of each model
    classes: tuple[str, ...] = ()  # class names, if known
    margin_share: float = math.nan  # regression: the margin as a share of the label's deviation

    @property
    def regression(self) -> bool:
        """Whether models predict numbers."""
        return self.metric in ERRORS

    @property
    def references(self) -> tuple[str, str]:
        """The simple predictors besides the models: guessing and a linear one."""
        if self.regression:
            return "mean", "ridge regression"
        return "majority", "logistic regression"

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller score is better; for gains, larger is always better."""
        return self.metric.lower() in LOSSES

    @property
    def site_count(self) -> int:
        """The number of sites, including those with withheld numbers."""
        return len(self.sites) + len(self.withheld)


def home_of(group: Group) -> Path | None:
    """The folder that `atoll answer` takes for these runs; None if they have no common one."""
    if len(group.runs) == 1:
        return group.first.folder
    parents = {run.folder.parent for run in group.runs}
    return parents.pop() if len(parents) == 1 else None


def answer_of(group: Group) -> Answer | None:
    """The answer for exactly the seeds of a group; None if it has not been computed."""
    home = home_of(group)
    if home is None:
        return None
    folders = (home, home.parent) if len(group.runs) == 1 else (home,)
    for folder in folders:
        body = read_answer(folder, group.runs)
        if body is not None:
            return parse_answer(body, folder / ANSWER)
    return None


def primary_scores(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """For each metric except accuracy, the score of each model by title."""
    scores: dict[str, dict[str, float]] = {}
    for group in groups:
        answer = answer_of(group)
        if answer is not None and answer.variants:
            titled = {group.title(name): score for name, score in answer.variants.items()}
            scores.setdefault(answer.metric, {}).update(titled)
    return scores


def parse_answer(body: Mapping[str, Any], path: Path) -> Answer:
    """Parse the content of an answer file; malformed content raises a user error."""
    remedy = f"remove it and run atoll answer {path.parent}"
    if body.get("format") != FORMAT:
        what = f"{ANSWER} has format {body.get('format')}, and this atoll reads format {FORMAT}"
        raise UserError(what, str(path), remedy)
    try:
        return _answer(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{ANSWER} is malformed: {reason}", str(path), remedy) from error


def _answer(body: Mapping[str, Any]) -> Answer:
    sites = [_site(name, one) for name, one in body["sites"].items()]
    sites.sort(key=lambda site: (-_finite(site.gain.gain), site.site))
    overall = _overall(body["overall"])
    return Answer(
        metric=_text(body["metric"]),
        margin=_number(body["overall"].get("margin", body["margin"])),
        level=_number(body["level"]),
        unit=_text(body["unit"]),
        seeds=tuple(_count(seed) for seed in body["seeds"]),
        variant=_text(body["variant"]),
        baseline=_text(body["baseline"]),
        sites=tuple(sites),
        withheld={name: _text(reason) for name, reason in body["withheld"].items()},
        overall=overall,
        notes=_texts(body["notes"]),
        variants=variant_means(body),
        classes=_texts(body.get("classes", [])),
        margin_share=_number(body["margin"]) if body["metric"] in ERRORS else math.nan,
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _overall(body: Mapping[str, Any]) -> Overall:
    gain = _gain(body["gain"]) if body["gain"] is not None else None
    return Overall(gain, _verdict(body["verdict"]), _count(body["helps"]), _count(body["hurts"]))


def _site(name: str, body: Mapping[str, Any]) -> SiteAnswer:
    alone = body["unadjusted"]
    return SiteAnswer(
        site=name,
        test_rows=_count(body["test_rows"]),
        smallest_class=_optional_count(body["smallest_class"]),
        scores={key: _number(value) for key, value in body["scores"].items()},
        gain=_gain(body["gain"]),
        unadjusted=None if alone is None else (_number(alone["low"]), _number(alone["high"])),
        verdict=_verdict(body["verdict"]),
        rows_needed=_optional_count(body["rows_needed"]),
        beats_linear=beats_linear(body),
        linear_beats=linear_beats(body),
        remarks=_texts(body.get("remarks", [])),
        quality=tuple(_quality(model, one) for model, one in body.get("quality", {}).items()),
    )


def _quality(model: str, body: Mapping[str, Any]) -> Quality:
    """The scalar metrics and the reliability diagram."""
    plain = {k: _number(v) for k, v in body.items() if v is None or type(v) in (int, float)}
    bins = body.get("reliability") or []
    curve = tuple((_number(x), _number(y), _number(rows)) for x, y, rows in bins)
    kinds = [(one["recall"], one["precision"], one["support"]) for one in body.get("classes", [])]
    classes = tuple((_number(a), _number(b), _count(rows)) for a, b, rows in kinds)
    matrix = tuple(tuple(map(_count, row)) for row in body.get("confusion", []))
    return Quality(model, plain, curve, classes, matrix)


def _gain(body: Mapping[str, Any]) -> Gain:
    gain, error, low, high, p = (_number(body[name]) for name in NUMBERS)
    return Gain(gain, error, low, high, p, _count(body["units"]))


def _verdict(body: Mapping[str, Any]) -> Verdict:
    kind = _text(body["kind"])
    if kind not in KINDS:
        raise ValueError(f"unknown verdict '{kind}'")
    return Verdict(kind, _text(body["text"]))


def _number(value: Any) -> float:
    """A number; null becomes NaN."""
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not text")
    return value


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is not a list")
    return tuple(_text(value) for value in values)
