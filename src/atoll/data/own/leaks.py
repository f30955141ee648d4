"""Columns that give the label away: one column alone predicts it on rows that it has not seen."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from atoll.data.own.encoding import as_numbers

__all__ = ["gives_label_away"]

ENOUGH = 20  # rows below which nothing is suspected
FEWEST = 3  # rows of the rarest class, at least
SHARE = 0.1  # of the majority predictor's errors that remain, at most
FOLDS = 5


def gives_label_away(values: Sequence[str], labels: Sequence[str], numeric: bool) -> bool:
    """Whether a column alone makes at most a tenth of the errors of the majority class.

    Errors are counted on rows that were not used: by cross-validation of a small tree for numbers,
    by leaving one row out for text. So a column with few levels and random labels is no suspect.
    """
    classes = Counter(labels)
    if len(labels) < ENOUGH or len(classes) < 2 or min(classes.values()) < FEWEST:
        return False
    errors = _tree_errors(values, labels) if numeric else _level_errors(values, labels)
    return errors <= SHARE * (len(labels) - max(classes.values()))


def _level_errors(values: Sequence[str], labels: Sequence[str]) -> int:
    """Errors of the majority label among the other rows of a level; ties count as errors."""
    levels: dict[str, Counter[str]] = {}
    for value, label in zip(values, labels, strict=True):
        levels.setdefault(value, Counter())[label] += 1
    errors = 0
    for counts in levels.values():
        for label, count in counts.items():
            rival = max((n for other, n in counts.items() if other != label), default=0)
            errors += count if count - 1 <= rival else 0
    return errors


def _tree_errors(values: Sequence[str], labels: Sequence[str]) -> int:
    from sklearn.tree import DecisionTreeClassifier  # noqa: PLC0415 - takes a second to import

    numbers = as_numbers(pa.array(values), comma=True).to_numpy(zero_copy_only=False)
    x = np.nan_to_num(numbers, nan=0.0)[
        :, None
    ]  # a cell that is not a number carries no information here
    y = np.array(labels)
    fold = np.empty(len(y), dtype=int)  # rows of each class in turn, so that folds are stratified
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        fold[rows] = np.arange(len(rows)) % FOLDS
    errors = 0
    for number in range(FOLDS):
        held_out = fold == number
        tree = DecisionTreeClassifier(max_leaf_nodes=2 * len(np.unique(y)), random_state=0)
        tree.fit(x[~held_out], y[~held_out])
        errors += int((tree.predict(x[held_out]) != y[held_out]).sum())
    return errors
