"""Regression: metrics, comparisons and verdicts, with values worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn

from atoll.metrics import quality
from atoll.metrics.answer import (
    ALONE,
    JOINED,
    MEAN,
    RIDGE,
    Outcome,
    SiteOutcomes,
    answer,
    metric_of,
)
from atoll.metrics.release import Release, assemble, fault, release
from atoll.metrics.selection import selection_score
from atoll.metrics.verdicts import in_words

Y = np.array([1.0, 2.0, 4.0, 5.0])  # mean 3, variance 2.5


def test_errors_by_hand() -> None:
    predicted = np.array([2.0, 2.0, 2.0, 5.0])  # off by 1, 0, -2, 0
    assert quality.describe_numbers(Y, predicted) == {"mse": 1.25, "mae": 0.75, "r2": 0.5}
    assert quality.describe_numbers(np.ones(3), np.ones(3))["r2"] is None


@given(st.integers(0, 2**32 - 1), st.integers(2, 200), st.sampled_from([1e-6, 1.0, 1e6]))
def test_errors_equal_scikit_learn(seed: int, rows: int, scale: float) -> None:
    draws = np.random.default_rng(seed)
    y, predicted = scale * draws.normal(size=(2, rows))
    pairs = (
        (quality.mean_squared_error, sklearn.mean_squared_error),
        (quality.mean_absolute_error, sklearn.mean_absolute_error),
        (quality.r2, sklearn.r2_score),
    )
    for ours, theirs in pairs:
        assert ours(y, predicted) == pytest.approx(theirs(y, predicted), rel=1e-12, abs=1e-300)


def outcome(rows: int = 200, joined: float = 0.5, alone: float = 1.0, seed: int = 0) -> Outcome:
    """Errors of these deviations around labels of deviation 4."""
    draws = np.random.default_rng(seed)
    y = 20 + 4 * draws.normal(size=rows)
    models = {JOINED: y + joined * draws.normal(size=rows)}
    models[ALONE] = y + alone * draws.normal(size=rows)
    models |= {MEAN: np.full(rows, 20.0), RIDGE: y + draws.normal(size=rows)}
    columns = {name: values[:, None] for name, values in models.items()}
    return Outcome(np.arange(rows), y, columns, 3 * rows, deviation=4.0)


def test_the_gain_is_a_paired_t_interval_of_row_errors_in_the_unit_of_the_label() -> None:
    one = outcome()
    site = answer({"north": [one]}, "mae")["sites"]["north"]
    errors = {m: np.abs(one.outputs[m][:, 0] - one.y) for m in (JOINED, ALONE)}
    gains = errors[ALONE] - errors[JOINED]
    low, high = stats.t.interval(0.95, 199, gains.mean(), stats.sem(gains))
    assert site["gain"]["gain"] == pytest.approx(gains.mean(), abs=1e-12)
    assert (site["gain"]["low"], site["gain"]["high"]) == pytest.approx((low, high), abs=1e-12)
    assert site["scores"][JOINED] == pytest.approx(errors[JOINED].mean(), abs=1e-12)
    assert site["margin"] == pytest.approx(0.08)  # 2 % of 4
    assert site["smallest_class"] is None
    assert site["verdict"] == {"kind": "helps", "text": "helps"}
    assert list(site["scores"])[2:4] == [MEAN, RIDGE]


def test_squared_errors_have_a_margin_in_squared_units() -> None:
    site = SiteOutcomes((outcome(),), "mse")
    assert site.scale == 16
    assert answer({"a": [outcome()]}, "mse")["overall"]["margin"] == pytest.approx(0.32)


def test_helping_requires_to_beat_the_mean() -> None:
    poor = outcome(joined=4.0, alone=6.0)
    verdict = answer({"a": [poor]}, "mae")["overall"]["verdict"]["text"]
    assert verdict == "cannot tell: neither model is shown to beat guessing"


def test_a_small_gain_reads_by_less_than_the_margin_in_words() -> None:
    one = outcome(rows=400)
    alone = one.outputs[JOINED] + 0.01 * np.sign(one.outputs[JOINED] - one.y[:, None])
    body = answer({"a": [replace(one, outputs={**one.outputs, ALONE: alone})]}, "mae")
    assert body["overall"]["verdict"]["text"] == "helps, by less than 0.08 in mean absolute error"
    assert in_words(body)[1] == (
        "  a: helps, by less than 0.08 in mean absolute error; change in mean absolute error -0.01 "
        "(-0.01 to -0.01), 400 test rows"
    )


def test_outputs_that_differ_by_rounding_are_the_same() -> None:
    one = outcome()
    shifted = one.outputs[JOINED] + 1e-6
    body = answer({"a": [replace(one, outputs={**one.outputs, ALONE: shifted})]}, "mae")
    assert body["overall"]["gain"]["gain"] == 0
    assert body["overall"]["verdict"]["text"] == "no difference: both models give the same outputs"


def test_overall_is_the_unweighted_mean_and_its_margin_that_of_the_deviations() -> None:
    other = outcome(seed=1)
    sites = {"a": [outcome()], "b": [replace(other, rows=other.rows + 1000, deviation=2.0)]}
    body = answer(sites, "mae")
    gains = [body["sites"][id]["gain"]["gain"] for id in "ab"]
    assert body["overall"]["gain"]["gain"] == pytest.approx(sum(gains) / 2)
    assert body["overall"]["margin"] == pytest.approx(0.06)
    assert {id: body["sites"][id]["margin"] for id in "ab"} == pytest.approx({"a": 0.08, "b": 0.04})


def test_what_a_site_releases_gives_the_same_verdict() -> None:
    one = outcome()
    leaves = release(one, "mae", 0.02, 1)
    assert fault(leaves) == ""
    assert leaves.scale == 4.0
    assert leaves.smallest_class == 0
    body = assemble({"a": leaves}, {}, "mae", 0.02)
    whole = answer({"a": [one]}, "mae")
    assert body["sites"]["a"]["verdict"] == whole["sites"]["a"]["verdict"]
    assert body["sites"]["a"]["gain"] == pytest.approx(whole["sites"]["a"]["gain"])
    assert body["overall"]["margin"] == pytest.approx(0.08)
    assert fault(replace(leaves, scale=-1.0)) == "a scale that cannot be"
    assert fault(replace(leaves, scale=math.inf)) == "a scale that cannot be"
    few = release(outcome(rows=9), "mae", 0.02, 1)
    assert few == Release("too few test rows")


def test_the_metric_of_regression_is_mae_unless_the_config_says_mse() -> None:
    assert metric_of("accuracy", regression=True) == "mae"
    assert metric_of("mse", regression=True) == "mse"
    assert metric_of("accuracy", regression=False) == "accuracy"


def test_selection_falls_with_the_error() -> None:
    outputs = np.array([[2.0], [2.0], [2.0], [5.0]])
    assert selection_score("mse", Y, outputs) == 0.4444  # 1 / 2.25
    assert selection_score("mae", Y, outputs) == 0.5714  # 1 / 1.75
