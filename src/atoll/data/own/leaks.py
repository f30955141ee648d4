"""Detects columns that leak the label: one column alone predicts it on held-out rows."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from atoll.data.own.encoding import as_numbers

__all__ = ["gives_label_away", "strength"]

Array = np.ndarray[Any, Any]
ENOUGH = 20  # minimum number of rows for any suspicion
FEWEST = 5  # minimum number of rows of a class; rarer classes are not judged
STRONG = 0.95  # balanced accuracy or AUROC from which a single column is suspect
FOLDS = 5
BINS = 16  # bins by rank for a number with more distinct values than MOST_LEVELS
MOST_LEVELS = 32
MANY = 100  # minimum number of rows for AUROC: its standard error is too small for few rows


def gives_label_away(values: Sequence[str], labels: Sequence[str], numeric: bool) -> bool:
    """Whether the lower bound of a column's strength reaches 0.95; see `strength`."""
    return strength(values, labels, numeric) >= STRONG


def strength(values: Sequence[str], labels: Sequence[str], numeric: bool) -> float:
    """How well one column predicts the label: a lower bound, one standard error below the estimate.

    The estimate is the cross-validated balanced accuracy of the most probable class of a level (of
    a range of values, for numbers), of one threshold, or the AUROC of a number for two classes,
    whichever bound is highest. So neither random levels nor rare classes make a column a suspect.
    0 if there are too few rows.
    """
    counts = Counter(labels)
    frequent = {label for label, count in counts.items() if count >= FEWEST}
    rows = [row for row, label in enumerate(labels) if label in frequent]
    if len(rows) < ENOUGH or len(frequent) < 2:
        return 0.0
    _, y = np.unique([labels[row] for row in rows], return_inverse=True)
    text = [values[row] for row in rows]
    if not numeric:
        return _accuracy_bound(np.unique(text, return_inverse=True)[1], y)
    numbers = as_numbers(pa.array(text), comma=True).to_numpy(zero_copy_only=False)
    x = np.nan_to_num(numbers, nan=0.0)  # a value that is not a number has no information here
    distinct, codes = np.unique(x, return_inverse=True)
    if len(distinct) <= MOST_LEVELS:
        return _accuracy_bound(codes, y)
    ranks = np.argsort(np.argsort(x, kind="stable"), kind="stable")
    bounds = [_accuracy_bound(ranks * BINS // len(x), y)]
    if len(frequent) == 2:
        bounds.append(_threshold_bound(codes, y))
        if len(x) >= MANY:
            bounds.append(_auroc_bound(codes, y))
    return max(bounds)


def _folds(y: Array) -> Array:
    """The fold of each row: rows of each class in turn, so that folds are stratified."""
    fold = np.empty(len(y), dtype=np.int64)
    for label, size in enumerate(np.bincount(y)):
        fold[y == label] = np.arange(size) % FOLDS
    return fold


def _bound(right: Array, sizes: Array) -> float:
    """Balanced accuracy less its standard error, from the rows of each class that are right."""
    smoothed = (right + 1) / (sizes + 2)  # few rows give no certainty
    variance = smoothed * (1 - smoothed) / (sizes + 2)
    return float((right / sizes).mean() - np.sqrt(variance.sum()) / len(sizes))


def _threshold_bound(ranks: Array, y: Array) -> float:
    """Balanced accuracy of one threshold, chosen on other rows than it is tested on."""
    sizes, fold = np.bincount(y), _folds(y)
    right = np.zeros(2)
    for number in range(FOLDS):
        seen = fold != number
        below = np.stack([
            np.cumsum(np.bincount(ranks[seen & (y == label)], minlength=ranks.max() + 1))
            for label in (0, 1)
        ])  # fmt: skip
        gap = below[0] / sizes[0] - below[1] / sizes[1]
        place = int(np.abs(gap).argmax())
        lower = 0 if gap[place] > 0 else 1  # the class below the threshold
        predicted = np.where(ranks[~seen] <= place, lower, 1 - lower)
        right += np.bincount(y[~seen], predicted == y[~seen], 2)
    return _bound(right, sizes)


def _accuracy_bound(levels: Array, y: Array) -> float:
    """Balanced accuracy on held-out rows minus its standard error; unknown levels count as errors.

    A level predicts the class with the largest share of its rows at this level, so that frequent
    classes have no advantage.
    """
    classes, count = int(y.max()) + 1, int(levels.max()) + 1
    sizes = np.bincount(y)
    fold = _folds(y)
    cells = (fold * count + levels) * classes + y
    held_out = np.bincount(cells, minlength=FOLDS * count * classes).reshape(FOLDS, count, classes)
    training = held_out.sum(0) - held_out
    predicted = (training / sizes).argmax(2)
    seen = training.any(2)
    hits = np.take_along_axis(held_out, predicted[..., None], 2)[..., 0] * seen
    right = np.bincount(predicted.ravel(), hits.ravel(), classes)
    return _bound(right, sizes)


def _auroc_bound(ranks: Array, y: Array) -> float:
    """AUROC of a number for two classes, in either direction, minus its standard error.

    The standard error follows Hanley and McNeil (1982).
    """
    sizes = np.bincount(y)
    by_rank = np.stack(
        [np.bincount(ranks[y == label], minlength=ranks.max() + 1) for label in (0, 1)]
    )
    below = np.cumsum(by_rank[0]) - by_rank[0]
    area = float((by_rank[1] * (below + by_rank[0] / 2)).sum() / (sizes[0] * sizes[1]))
    area = max(area, 1 - area)
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area)
    spread += (sizes[1] - 1) * (one - area**2) + (sizes[0] - 1) * (two - area**2)
    return area - float(np.sqrt(max(0.0, spread) / (sizes[0] * sizes[1])))
