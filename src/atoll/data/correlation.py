"""How strongly a set of common columns is correlated with the rest (CHFL, Table IV).

The score of a set S of columns is the sum of |R_ij| over i in S and j outside S, with R the
Pearson matrix. All sets of a size are scored in chunks, as one matrix product each.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["common_sets", "correlation", "scores_of_sets"]

Array = np.ndarray[Any, Any]
CHUNK = 100_000  # sets per matrix product
DIGITS = 9  # decimals of compared scores


def correlation(x: Array, absolute: bool = True) -> Array:
    """The Pearson matrix of columns; constant columns have zero correlation."""
    centred = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    norm = np.sqrt((centred**2).sum(0))
    moving = x.min(0) < x.max(0)  # exact: the mean of equal values may have a rounding error
    scaled = np.where(moving, centred, 0) / np.where(moving, norm, 1)
    matrix: Array = scaled.T @ scaled
    return np.asarray(np.abs(matrix)) if absolute else matrix


def _chunks(columns: int, size: int) -> Iterator[Array]:
    every = itertools.combinations(range(columns), size)
    while chunk := list(itertools.islice(every, CHUNK)):
        yield np.array(chunk, dtype=np.int16)


def scores_of_sets(matrix: Array, size: int) -> tuple[Array, Array]:
    """Every set of so many columns, in lexicographic order, and its score 1_S' |R| (1 - 1_S)."""
    columns, chunks, scores = len(matrix), [], []
    for sets in _chunks(columns, size):
        inside = np.zeros((len(sets), columns))
        np.put_along_axis(inside, sets.astype(np.int64), 1.0, axis=1)
        scores.append(((inside @ matrix) * (1 - inside)).sum(1))
        chunks.append(sets)
    assert sum(map(len, chunks)) == math.comb(columns, size)
    return np.concatenate(chunks), np.concatenate(scores)


def common_sets(matrix: Array, size: int, count: int = 3) -> dict[str, Array]:
    """The sets with the largest, middle and smallest scores, the same number of each.

    Of equal scores the first set comes first. Scores that differ only by rounding count as equal:
    half of the columns has the same score as the other half.
    """
    sets, scores = scores_of_sets(matrix, size)
    scores = scores.round(DIGITS)
    order = np.argsort(scores, kind="stable")
    middle = len(order) // 2
    first = max(0, middle - count // 2)
    return {
        "maximum": sets[np.argsort(-scores, kind="stable")[:count]],
        "median": sets[order[first : first + count]],
        "minimum": sets[order[:count]],
    }
