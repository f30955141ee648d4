"""Does joining help? Turns comparisons into verdicts in words. Needs no torch.

The margin is set before a run. A verdict is never stronger than the interval shown: both
have the same level, which several sites share (Bonferroni).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from atoll.metrics.statistics import LEVEL, Comparison

__all__ = [
    "MARGIN",
    "Verdict",
    "beats_linear",
    "in_unit",
    "in_words",
    "judge",
    "linear_beats",
    "shared_level",
]

MARGIN = 0.02  # smaller gains are not worth the effort
ERRORS = {"mae": "mean absolute error", "mse": "mean squared error"}  # metrics of regression
LOSSES = {**ERRORS, "brier score": "Brier score", "log loss": "log loss"}  # they have no percent
Kind = Literal["helps", "hurts", "no difference", "cannot tell"]


@dataclass(frozen=True)
class Verdict:
    """What the test rows show about joining."""

    kind: Kind
    text: str


def shared_level(sites: int) -> float:
    """The level of each of several intervals with this joint level (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(1, sites)


def in_unit(margin: float, metric: str) -> str:
    """A margin with its unit: percentage points, or the unit of the loss."""
    return f"{margin:.3g} in {LOSSES[metric]}" if metric in LOSSES else f"{100 * margin:g} points"


def judge(
    gain: Comparison,
    joined: Comparison,
    alone: Comparison,
    margin: float = MARGIN,
    needed: str = "more test rows",
    points: str = "",
) -> Verdict:
    """Decide from the gain of joining and each model's gain over guessing.

    Guessing is the majority class, an AUROC of 0.5, or the mean. `needed` says what would decide
    an open case: a number of test rows, or more seeds. `points` is the margin in words.
    """
    points = points or in_unit(margin, "accuracy")
    if joined.low <= 0 and alone.low <= 0:
        return Verdict("cannot tell", "cannot tell: neither model is shown to beat guessing")
    if gain.low > 0 and joined.low <= 0:
        return Verdict("cannot tell", "cannot tell: the joined model is not shown to beat guessing")
    if gain.low > 0:
        return Verdict("helps", f"helps, by less than {points}" if gain.high < margin else "helps")
    if gain.high < 0:
        return Verdict("hurts", f"hurts, by less than {points}" if gain.low > -margin else "hurts")
    if -margin < gain.low and gain.high < margin:
        return Verdict("no difference", f"no difference larger than {points}")
    return Verdict("cannot tell", f"cannot tell: needs {needed}")


def in_words(answer: Mapping[str, Any]) -> list[str]:
    """An answer as one sentence on all sites, a line per site, and one on a simple linear model."""
    metric = answer["metric"]
    sites, lines = answer["sites"], [_overall(answer["overall"], answer["level"], metric)]
    for id, site in sites.items():
        verdict, rows = site["verdict"]["text"], f"{site['test_rows']:,} test rows"
        if answer["unit"].startswith("groups"):
            rows += f" of {site['gain']['units']:,} groups"
        lines.append(f"  {id}: {verdict}; {_points(site['gain'], metric)}, {rows}")
    lines += [f"  {id}: {reason}" for id, reason in answer["withheld"].items()]
    shown = [beats_linear(site) for site in sites.values()]
    beaten, count = shown.count(True), len(shown) - shown.count(None)
    if count:
        linear = "ridge" if metric in ERRORS else "logistic"
        sentence = f"The joined model is shown to beat {linear} regression of the site alone at"
        lines.append(f"{sentence} {beaten} of {count} site{'s' if count > 1 else ''}.")
    better = sum(map(linear_beats, sites.values()))
    if better:
        lines[-1] = lines[-1].removesuffix(".") + f"; {linear} regression beats it at {better}."
    return lines


def beats_linear(site: Mapping[str, Any]) -> bool | None:
    """Whether the joined model significantly beats a site's linear model; None: not compared."""
    over = site["joined_over_logistic"]
    return None if over is None else over["low"] > 0


def linear_beats(site: Mapping[str, Any]) -> bool:
    """Whether a site's linear model significantly beats the joined model."""
    over = site["joined_over_logistic"]
    return over is not None and bool(over["high"] < 0)


def _points(gain: Mapping[str, float], metric: str) -> str:
    """A gain and its interval, in percentage points or as the change of a loss."""
    if metric in LOSSES:
        change, low, high = (0.0 - gain[name] for name in ("gain", "high", "low"))
        return f"change in {LOSSES[metric]} {change:+.3g} ({low:.3g} to {high:.3g})"
    value, low, high = (100 * gain[name] + 0.0 for name in ("gain", "low", "high"))
    return f"{value:+.1f} points ({low:.1f} to {high:.1f})".replace("-0.0", "0.0")


def _overall(overall: Mapping[str, Any], level: float, metric: str) -> str:
    """The sentence on all sites."""
    kind, text = overall["verdict"]["kind"], overall["verdict"]["text"]
    counts = [f"{word} at {overall[word]}" for word in ("helps", "hurts") if overall[word]]
    if counts:
        sentence = f"Joining {' and '.join(counts)} of {overall['sites']} sites"
    elif kind == "cannot tell":
        sentence = f"Cannot tell whether joining helps{text.removeprefix(kind)}"
    elif kind == "no difference":
        sentence = f"Joining makes {text}"
    else:
        sentence = f"Joining {text} overall, and no single site is certain"
    if overall["gain"] is None:
        return f"{sentence}."
    mean = _points(overall["gain"], metric).replace(" (", f" ({100 * level:g} % interval ")
    return f"{sentence}; on average {mean}."
