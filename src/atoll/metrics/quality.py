"""The quality of predicted probabilities, with a definition of each metric. Needs no torch.

`y` are true classes, `probabilities` (rows, classes). Metrics of two classes take the second class
as the positive one. An undefined metric, such as the AUROC of one class, is NaN.
In regression `y` and `predicted` are numbers.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from atoll.metrics.statistics import placements

__all__ = [
    "Bin",
    "OfClass",
    "at_threshold",
    "auprc",
    "auprc_contributions",
    "auroc",
    "auroc_contributions",
    "balanced_accuracy",
    "balanced_contributions",
    "brier_losses",
    "brier_score",
    "by_class",
    "confusion",
    "describe",
    "describe_numbers",
    "expected_calibration_error",
    "log_loss",
    "log_losses",
    "mean_absolute_error",
    "mean_squared_error",
    "r2",
    "reliability",
    "sensitivity",
    "softmax",
    "threshold_at",
]

Array = np.ndarray[Any, Any]
BINS = 10  # bins of equal width, for calibration
SPECIFICITY = 0.9  # specificity at which the sensitivity is reported


class OfClass(NamedTuple):
    """How well a model separates one class from the others."""

    recall: float  # NaN if no row has the class
    precision: float  # NaN if the class is never predicted
    support: int  # number of rows of the class


class Bin(NamedTuple):
    """The rows whose probability falls into one bin."""

    predicted: float  # their mean probability
    observed: float  # the fraction of them that is positive, or correct
    rows: int


def softmax(outputs: Array) -> Array:
    """The probabilities of logits or log-probabilities: (rows, classes)."""
    outputs = np.asarray(outputs, float)
    shifted = np.exp(outputs - outputs.max(1, keepdims=True))
    probabilities: Array = shifted / shifted.sum(1, keepdims=True)
    return probabilities


def auroc(positive: Array, scores: Array) -> float:
    """The probability that a positive row scores higher than a negative one; ties count half."""
    positive = np.asarray(positive, bool)
    if positive.all() or not positive.any():
        return math.nan
    return float(placements(positive, np.asarray(scores))[positive].mean())


def auroc_contributions(positive: Array, scores: Array) -> Array:
    """Per-row numbers whose mean is the AUROC: it plus the row's influence times the rows."""
    values = placements(positive, scores)
    area, rows = float(values[positive].mean()), len(scores)
    for part in (positive, ~positive):
        values[part] = area + (values[part] - area) * rows / part.sum()
    return values


def auprc(positive: Array, scores: Array) -> float:
    """Average precision: the mean precision at each positive row, by decreasing score."""
    positive, scores = np.asarray(positive, bool), np.asarray(scores, float)
    if not positive.any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    last = np.append(np.diff(scores[order]) != 0, True)  # equal scores are one threshold
    hits, predicted = hits[last], np.flatnonzero(last) + 1
    gained = np.diff(hits, prepend=0)
    return float((gained * hits / predicted).sum() / positive.sum())


def auprc_contributions(positive: Array, scores: Array) -> Array:
    """Per-row numbers whose mean is the average precision, plus jackknife influences.

    Removing a row removes it from the precision counts at all positive rows with equal or lower
    scores. Sums over positive rows are cumulative sums by decreasing score.
    """
    positive, scores = np.asarray(positive, bool), np.asarray(scores, float)
    rows, total = len(scores), int(positive.sum())
    order = np.argsort(-scores, kind="stable")
    sorted_scores, hit = scores[order], positive[order].astype(float)
    last = np.searchsorted(-sorted_scores, -sorted_scores, side="right")  # rows above, ties too
    first = np.searchsorted(-sorted_scores, -sorted_scores, side="left")
    hits, others = np.cumsum(hit)[last - 1], np.maximum(last - 1, 1)
    above = _sum_before(hit * hits / last)[first]
    below = {
        one: (hit * (hits - one) / others).sum() - _sum_before(hit * (hits - one) / others)[first]
        for one in (0, 1)
    }
    own = hit * (hits - 1) / others  # removing the row also removes its term
    without = np.where(hit > 0, (above + below[1] - own) / max(total - 1, 1),
                       (above + below[0]) / total)  # fmt: skip
    values = np.empty(rows)
    values[order] = auprc(positive, scores) + (rows - 1) * (without.mean() - without)
    return values


def _sum_before(values: Array) -> Array:
    """For each position, the sum of the preceding values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def by_class(y: Array, predicted: Array, classes: int) -> list[OfClass]:
    """Recall, precision and support of each class."""
    matrix = confusion(y, predicted, classes)
    result = []
    for number in range(classes):
        right, support = matrix[number, number], int(matrix[number].sum())
        guesses = matrix[:, number].sum()
        recall = right / support if support else math.nan
        result.append(
            OfClass(float(recall), float(right / guesses) if guesses else math.nan, support)
        )
    return result


def balanced_accuracy(y: Array, predicted: Array) -> float:
    """The mean recall of the classes that occur in the labels."""
    right = np.asarray(predicted) == y
    return float(np.mean([right[y == kind].mean() for kind in np.unique(y)]))


def balanced_contributions(y: Array, right: Array) -> Array:
    """Per-row numbers whose mean is the balanced accuracy."""
    kinds = np.unique(y)
    recalls = {kind: float(right[y == kind].mean()) for kind in kinds}
    mean = float(np.mean(list(recalls.values())))
    values = np.empty(len(y))
    for kind in kinds:
        rows = y == kind
        weight = len(y) / (len(kinds) * rows.sum())
        values[rows] = mean + (right[rows] - recalls[kind]) * weight
    return values


def confusion(y: Array, predicted: Array, classes: int) -> Array:
    """Counts of (true class, predicted class)."""
    counts = np.bincount(np.asarray(y) * classes + predicted, minlength=classes**2)
    return counts.reshape(classes, classes)


def brier_losses(y: Array, probabilities: Array) -> Array:
    """Squared errors of rows: of the positive class, or summed over more than two classes."""
    if probabilities.shape[1] == 2:
        return np.asarray((probabilities[:, 1] - (y == 1)) ** 2)
    truth = np.eye(probabilities.shape[1])[y]
    return np.asarray(((probabilities - truth) ** 2).sum(1))


def brier_score(y: Array, probabilities: Array) -> float:
    """The mean squared error of probabilities."""
    return float(brier_losses(y, probabilities).mean())


def log_losses(y: Array, probabilities: Array) -> Array:
    """Negative log-probabilities of the true class, clipped at the float epsilon."""
    epsilon = np.finfo(float).eps
    chosen = np.clip(probabilities, epsilon, 1 - epsilon)
    chosen = chosen / chosen.sum(1, keepdims=True)
    return np.asarray(-np.log(chosen[np.arange(len(y)), y]))


def log_loss(y: Array, probabilities: Array) -> float:
    """The mean log loss of rows."""
    return float(log_losses(y, probabilities).mean())


def reliability(outcome: Array, probabilities: Array, bins: int = BINS) -> list[Bin]:
    """Predicted and observed frequencies in bins of equal width from 0 to 1, without empty bins.

    A bin includes its upper edge; the first bin also includes 0.
    """
    edges = np.linspace(0, 1, bins + 1)
    place = np.searchsorted(edges[1:-1], probabilities)
    result = []
    for number in range(bins):
        rows = place == number
        if rows.any():
            predicted, observed = (
                probabilities[rows].mean(),
                np.asarray(outcome, float)[rows].mean(),
            )
            result.append(Bin(float(predicted), float(observed), int(rows.sum())))
    return result


def expected_calibration_error(y: Array, probabilities: Array, bins: int = BINS) -> float:
    """The mean distance between confidence and accuracy over bins, weighted by rows.

    Confidence is the probability of the predicted class (Naeini et al., 2015; Guo et al., 2017).
    """
    right = probabilities.argmax(1) == y
    curve = reliability(right, probabilities.max(1), bins)
    return sum(abs(one.predicted - one.observed) * one.rows for one in curve) / len(y)


def threshold_at(positive: Array, scores: Array, specificity: float = SPECIFICITY) -> float:
    """The lowest threshold at which these rows have the specificity; choose it on validation rows.

    A row is predicted positive if its score is above the threshold.
    """
    negatives = np.sort(np.asarray(scores)[~np.asarray(positive, bool)])
    if not len(negatives):
        return math.nan
    return float(negatives[math.ceil(specificity * len(negatives) - 1e-9) - 1])


def sensitivity(positive: Array, scores: Array, threshold: float) -> float:
    """The fraction of positive rows with a score above the threshold."""
    scores = np.asarray(scores)[np.asarray(positive, bool)]
    return float((scores > threshold).mean()) if len(scores) else math.nan


def at_threshold(positive: Array, scores: Array, threshold: float) -> dict[str, float]:
    """Sensitivity and specificity at a threshold selected on other rows."""
    negatives = np.asarray(scores)[~np.asarray(positive, bool)]
    specificity = float((negatives <= threshold).mean()) if len(negatives) else math.nan
    return {
        "threshold": threshold,
        "stated specificity": SPECIFICITY,
        "specificity": specificity,
        "sensitivity": sensitivity(positive, scores, threshold),
    }


def describe(y: Array, probabilities: Array) -> dict[str, Any]:
    """The metrics above as plain values, for a site's own report."""
    classes, predicted = probabilities.shape[1], probabilities.argmax(1)
    two = classes == 2
    return {
        "accuracy": float((predicted == y).mean()),
        "balanced accuracy": balanced_accuracy(y, predicted),
        "auroc": auroc(y == 1, probabilities[:, 1]) if two else None,
        "auprc": auprc(y == 1, probabilities[:, 1]) if two else None,
        "brier score": brier_score(y, probabilities),
        "log loss": log_loss(y, probabilities),
        "expected calibration error": expected_calibration_error(y, probabilities),
        "reliability": [list(one) for one in reliability(predicted == y, probabilities.max(1))],
        "classes": [one._asdict() for one in by_class(y, predicted, classes)],
        "confusion": confusion(y, predicted, classes).tolist(),
    }


def mean_squared_error(y: Array, predicted: Array) -> float:
    """The mean of the squared differences."""
    return float(np.mean((predicted - y) ** 2))


def mean_absolute_error(y: Array, predicted: Array) -> float:
    """The mean of the absolute differences."""
    return float(np.mean(np.abs(predicted - y)))


def r2(y: Array, predicted: Array) -> float:
    """The fraction of the label variance that is explained; NaN if all labels are equal."""
    total = float(((y - y.mean()) ** 2).sum())
    return 1 - float(((predicted - y) ** 2).sum()) / total if total > 0 else math.nan


def describe_numbers(y: Array, predicted: Array) -> dict[str, Any]:
    """The quality of predicted numbers as plain values, for a site's own report."""
    explained = r2(y, predicted)
    return {
        "mse": mean_squared_error(y, predicted),
        "mae": mean_absolute_error(y, predicted),
        "r2": None if math.isnan(explained) else explained,
    }
