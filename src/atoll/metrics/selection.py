"""One score to select models by, for each metric of a run. Needs no torch."""

import math
from typing import Any

import numpy as np

from atoll.metrics import quality
from atoll.metrics.answer import ERRORS, Metric, row_errors

__all__ = ["selection_score"]

Array = np.ndarray[Any, Any]


def selection_score(metric: Metric, y: Array, outputs: Array) -> float:
    """The score of outputs (rows, classes) for true classes: from 0 to 1, larger is better.

    Losses are mapped monotonically to this range. NaN if the rows do not define the
    metric, such as the AUROC of one class.
    """
    if not len(y):
        return math.nan
    if metric in ERRORS:
        # four digits, as sites send it
        return round(1 / (1 + float(row_errors(metric, y, outputs).mean())), 4)
    return _of_classes(metric, y, outputs)


def _of_classes(metric: Metric, y: Array, outputs: Array) -> float:
    probabilities = quality.softmax(outputs)
    predicted = outputs.argmax(1)
    if metric == "accuracy":
        return float((predicted == y).mean())
    if metric == "balanced accuracy":
        return quality.balanced_accuracy(y, predicted)
    if metric == "brier score":
        return 1 - quality.brier_score(y, probabilities) / 2
    if metric == "log loss":
        return math.exp(-quality.log_loss(y, probabilities))
    score = quality.auroc if metric == "auroc" else quality.auprc
    return score(y == 1, probabilities[:, 1])
