"""Errors between two results of the same computation.

`max_relative_error` compares entry by entry, for results in double precision. `norm_errors`
compares the norms of all weights together, for results in single precision: there Adam's first
steps follow the sign of rounding errors where a gradient is next to nothing, so single entries say
little.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.compute.probe import Seen

__all__ = ["max_relative_error", "norm_errors"]

FLOOR = 1e-3  # a tensor of smaller numbers counts as one of this size
CHANGE = 1e-4  # a change that is a smaller share of its tensor counts as this share


def max_relative_error(
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    start: Mapping[str, Tensor] | None = None,
) -> float:
    """The largest difference of equally named tensors, relative to the largest entry of each.

    With `start`, the values before training, it is relative to the largest change instead: a
    mistake in a gradient shows however small the learning rate is. Missing names, other shapes and
    numbers that are NaN on one side only give infinity.
    """
    if expected.keys() != actual.keys():
        return math.inf
    before = start or {}
    errors = [_error(tensor, actual[n], before.get(n)) for n, tensor in expected.items()]
    return max(errors, default=0.0)


def _error(expected: Tensor, actual: Tensor, start: Tensor | None) -> float:
    if expected.shape != actual.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    first, second = expected.double(), actual.to(expected.device).double()
    same = (first == second) | (first.isnan() & second.isnan())
    error = torch.where(same, 0.0, (first - second).abs()).max()
    finite = torch.where(first.isfinite(), first, 0.0)
    size = max(float(finite.abs().max()), FLOOR)
    if start is not None and start.is_floating_point() and start.shape == expected.shape:
        change = (finite - start.to(finite.device).double()).nan_to_num(0.0, 0.0, 0.0)
        size = max(float(change.abs().max()), CHANGE * size)
    return _ratio(float(error), size)


def norm_errors(start: Mapping[str, Tensor], expected: Seen, actual: Seen) -> tuple[float, float]:
    """The error of the weights relative to how far they moved from the start, and of the losses.

    Results that are not finite on both sides count as equal, since nothing can be learned of them.
    """
    moved = _norm({n: t - start[n] for n, t in expected.weights.items()})
    if not math.isfinite(moved):
        finite = all(bool(t.isfinite().all()) for t in actual.weights.values())
        return (math.inf, math.inf) if finite else (0.0, 0.0)
    error = _norm({n: t - actual.weights[n] for n, t in expected.weights.items()})
    size = max(moved, CHANGE * _norm(expected.weights), 1e-30)
    return _ratio(error, size), max_relative_error(expected.losses, actual.losses)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    squares = [t.double().square().sum() for t in tensors.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _ratio(error: float, size: float) -> float:
    return math.inf if math.isnan(error) else error / size
