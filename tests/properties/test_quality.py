"""Qualities of predictions: equal to scikit-learn to 1e-12; calibration errors by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from sklearn.calibration import calibration_curve

from atoll.metrics import quality

Array = np.ndarray[Any, Any]
EXACT = 1e-12


@st.composite
def scored(draw: st.DrawFn) -> tuple[Array, Array]:
    """Rows of both classes, and scores with ties."""
    rows = draw(st.integers(4, 60))
    stream = np.random.default_rng(draw(st.integers(0, 10_000)))
    positive = stream.random(rows) < draw(st.floats(0.1, 0.9))
    positive[:2] = [True, False]
    steps = draw(st.sampled_from([3, 10, 10_000]))
    return positive, np.floor(stream.random(rows) * steps) / steps


@st.composite
def predicted(draw: st.DrawFn) -> tuple[Array, Array]:
    """True classes, all of which occur, and probabilities."""
    classes, rows = draw(st.integers(2, 5)), draw(st.integers(10, 60))
    stream = np.random.default_rng(draw(st.integers(0, 10_000)))
    y = stream.integers(0, classes, rows)
    y[:classes] = np.arange(classes)
    spread = draw(st.sampled_from([0.1, 1.0, 50.0]))
    return y, quality.softmax(stream.normal(0, spread, (rows, classes)))


@given(scored())
def test_areas_equal_scikit_learn(rows: tuple[Array, Array]) -> None:
    positive, scores = rows
    area = reference.roc_auc_score(positive, scores)
    assert abs(quality.auroc(positive, scores) - area) < EXACT
    precision = reference.average_precision_score(positive, scores)
    assert abs(quality.auprc(positive, scores) - precision) < EXACT
    assert abs(quality.auroc_contributions(positive, scores).mean() - area) < EXACT
    assert abs(quality.auprc_contributions(positive, scores).mean() - precision) < EXACT


@given(scored())
def test_contributions_to_the_average_precision_are_jackknife_values(
    rows: tuple[Array, Array],
) -> None:
    positive, scores = rows
    positive[2] = True  # one positive row is left in any case
    count, area = len(scores), quality.auprc(positive, scores)
    kept = [np.arange(count) != row for row in range(count)]
    without = np.array([quality.auprc(positive[one], scores[one]) for one in kept])
    expected = area + (count - 1) * (without.mean() - without)
    values = quality.auprc_contributions(positive, scores)
    assert np.allclose(values, expected, rtol=0, atol=1e-10)


@given(predicted())
def test_losses_equal_scikit_learn(rows: tuple[Array, Array]) -> None:
    y, p = rows
    loss = reference.log_loss(y, p)
    assert abs(quality.log_loss(y, p) - loss) < EXACT * max(1, loss)
    if p.shape[1] == 2:
        assert abs(quality.brier_score(y, p) - reference.brier_score_loss(y, p[:, 1])) < EXACT
    else:
        by_class = [reference.brier_score_loss(y == k, p[:, k]) for k in range(p.shape[1])]
        assert abs(quality.brier_score(y, p) - sum(by_class)) < EXACT


@given(predicted())
def test_classes_equal_scikit_learn(rows: tuple[Array, Array]) -> None:
    y, p = rows
    guess, classes = p.argmax(1), p.shape[1]
    labels = list(range(classes))
    assert np.array_equal(
        quality.confusion(y, guess, classes), reference.confusion_matrix(y, guess, labels=labels)
    )
    balanced = np.mean(reference.recall_score(y, guess, labels=labels, average=None))
    assert abs(quality.balanced_accuracy(y, guess) - balanced) < EXACT
    right = (guess == y).astype(float)
    assert abs(quality.balanced_contributions(y, right).mean() - balanced) < EXACT
    recalls = reference.recall_score(y, guess, labels=labels, average=None)
    named = np.bincount(guess, minlength=classes)
    precision = reference.precision_score(y, guess, labels=labels, average=None, zero_division=0)
    for kind, one in enumerate(quality.by_class(y, guess, classes)):
        assert abs(one.recall - recalls[kind]) < EXACT
        assert one.support == int((y == kind).sum())
        assert (
            math.isnan(one.precision)
            if not named[kind]
            else (abs(one.precision - precision[kind]) < EXACT)
        )


@given(scored(), st.integers(1, 20))
def test_the_reliability_curve_equals_scikit_learn(rows: tuple[Array, Array], bins: int) -> None:
    positive, scores = rows
    observed, mean = calibration_curve(positive, scores, n_bins=bins)
    curve = quality.reliability(positive, scores, bins)
    assert np.allclose([one.observed for one in curve], observed, rtol=0, atol=EXACT)
    assert np.allclose([one.predicted for one in curve], mean, rtol=0, atol=EXACT)
    assert sum(one.rows for one in curve) == len(scores)


@given(scored(), st.floats(0.05, 1.0))
def test_a_threshold_has_its_specificity_and_no_lower_score_does(
    rows: tuple[Array, Array], specificity: float
) -> None:
    positive, scores = rows
    threshold = quality.threshold_at(positive, scores, specificity)
    negatives = scores[~positive]
    assert (negatives <= threshold).mean() >= specificity - EXACT
    lower = negatives[negatives < threshold]
    assert not len(lower) or (negatives <= lower.max()).mean() < specificity + EXACT


def test_sensitivity_at_a_threshold_of_other_rows_by_hand() -> None:
    """Validation negatives 0.1 to 0.5: at a specificity of 0.8 the threshold is 0.4."""
    valid = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.9])
    threshold = quality.threshold_at(np.arange(6) == 5, valid, 0.8)
    assert threshold == 0.4
    positive = np.array([True, True, True, True, False])
    scores = np.array([0.4, 0.41, 0.9, 0.2, 0.95])
    assert quality.sensitivity(positive, scores, threshold) == 0.5
    assert math.isnan(quality.sensitivity(np.zeros(2, bool), scores[:2], threshold))
    assert math.isnan(quality.threshold_at(np.ones(2, bool), scores[:2]))


def test_calibration_errors_by_hand() -> None:
    """Two rows at 0.95, one right: |0.95 - 0.5|; two at 0.75, both right: 0.25; means 0.35."""
    p = np.array([0.95, 0.95, 0.75, 0.75])
    both = np.stack([1 - p, p], 1)
    y = np.array([1, 0, 1, 1])
    assert quality.expected_calibration_error(y, both) == pytest.approx((0.45 + 0.25) / 2)
    assert quality.expected_calibration_error(y, both, bins=1) == pytest.approx(0.1)
    sure = np.eye(2)[y]
    assert quality.expected_calibration_error(y, sure) == 0.0
    assert quality.expected_calibration_error(1 - y, sure) == 1.0


def test_what_is_not_defined_is_nan() -> None:
    ones = np.ones(3, bool)
    assert math.isnan(quality.auroc(ones, np.arange(3)))
    assert math.isnan(quality.auroc(~ones, np.arange(3)))
    assert math.isnan(quality.auprc(~ones, np.arange(3)))
    assert quality.by_class(np.zeros(2, int), np.zeros(2, int), 2)[1].support == 0


def test_probabilities_of_logits_that_exclude_a_class() -> None:
    p = quality.softmax(np.array([[0.0, -math.inf], [1000.0, 999.0]]))
    assert p[0].tolist() == [1.0, 0.0]
    assert p[1, 1] == pytest.approx(1 / (1 + math.e))
