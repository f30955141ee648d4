"""Verdicts on published numbers, worked out by hand."""

import math

import numpy as np
import pytest

from atoll.metrics.replication import interval, replicate, runs_needed


def test_the_interval_uses_t() -> None:
    """Mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.3027."""
    half = 4.302652729749462 / math.sqrt(3)
    assert interval([1.0, 2.0, 3.0], 0.95) == pytest.approx((2 - half, 2 + half))
    assert interval([1.0], 0.95) == (-math.inf, math.inf)


def test_a_tight_mean_inside_the_margin_is_reproduced() -> None:
    assert replicate([0.80, 0.81, 0.79, 0.80, 0.80], 0.81, 0.03) == "reproduced"


def test_a_tight_mean_outside_the_margin_is_refuted() -> None:
    assert replicate([0.80, 0.81, 0.79, 0.80, 0.80], 0.86, 0.03) == "refuted"
    assert replicate([0.80, 0.81, 0.79, 0.80, 0.80], 0.74, 0.03) == "refuted"


def test_a_wide_mean_decides_nothing() -> None:
    assert replicate([0.70, 0.90, 0.80], 0.80, 0.03) == "undecided"
    assert replicate([0.80], 0.80, 0.03) == "undecided"


def test_an_interval_across_the_edge_is_undecided() -> None:
    assert replicate([0.80, 0.81, 0.79, 0.80, 0.80], 0.83, 0.03) == "undecided"


@pytest.mark.parametrize(("shift", "verdict"), [(0.03, "reproduced"), (0.0301, "refuted")])
def test_errors_are_at_most_five_percent(shift: float, verdict: str) -> None:
    """A true mean on the edge is called reproduced, or refuted, in at most 5 % of the trials."""
    stream = np.random.default_rng(5)
    runs = stream.normal(0.8 + shift, 0.01, size=(2000, 5))
    share = np.mean([replicate(list(values), 0.8, 0.03) == verdict for values in runs])
    assert share <= 0.06


def test_runs_that_would_decide() -> None:
    few = [0.80, 0.84, 0.76]
    count = runs_needed(few, 0.80, 0.03)
    assert count is not None
    spread = 0.04 * math.sqrt((count - 1) / count)  # two values that have the deviation of `few`
    many = [0.80 - spread, 0.80 + spread] * (count // 2 + 1)
    assert replicate(many, 0.80, 0.03) == "reproduced"
    assert runs_needed([0.8], 0.8, 0.03) is None
    assert runs_needed([0.80, 0.86], 0.86, 0.03) is None


def test_two_runs_are_enough_to_tell_how_many_would_decide() -> None:
    """Deviation 0.02 sqrt(2), distance 0.05: t(0.95, 1) gives 0.126, t(0.95, 2) gives 0.0477."""
    assert runs_needed([0.80, 0.84], 0.82, 0.05) == 3
