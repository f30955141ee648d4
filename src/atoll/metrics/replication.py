"""Tests whether measurements reproduce a published number, by one rule. Needs no torch.

The margin is fixed before measuring. A published mean without a deviation is treated as
exact, and the page states this. The unit of replication is a run: a seed, or a feature split.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

__all__ = ["Replication", "interval", "replicate", "runs_needed"]

Replication = Literal["reproduced", "refuted", "undecided"]


def interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """The t interval for the mean of independent runs; infinite for a single run."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean - half, mean + half


def replicate(values: Sequence[float], published: float, margin: float) -> Replication:
    """Compare the mean of runs with a published mean.

    Reproduced: the 90 % interval of the difference lies inside the margin (two one-sided tests at
    5 %). Refuted: the 95 % interval lies outside the margin. Otherwise undecided.
    """
    low, high = interval(values, 0.90)
    if published - margin < low and high < published + margin:
        return "reproduced"
    low, high = interval(values, 0.95)
    if low > published + margin or high < published - margin:
        return "refuted"
    return "undecided"


def runs_needed(values: Sequence[float], published: float, margin: float) -> int | None:
    """How many runs decide the cell if mean and deviation do not change; None: more than 1,000.

    With fewer than two runs the deviation is unknown.
    """
    if len(values) < 2:
        return None
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    distance = abs(abs(mean - published) - margin)
    level = 0.90 if abs(mean - published) < margin else 0.95
    for count in range(max(2, len(values)), 1001):
        if stats.t.ppf((1 + level) / 2, count - 1) * deviation / math.sqrt(count) < distance:
            return count
    return None
