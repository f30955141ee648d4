"""How far two results of the same computation are apart."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["difference"]

FLOOR = 1e-3  # a tensor of smaller numbers counts as one of this size
CHANGE = 1e-4  # a change that is a smaller share of its tensor counts as this share


def difference(
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
    return max((_apart(t, actual[n], before.get(n)) for n, t in expected.items()), default=0.0)


def _apart(expected: Tensor, actual: Tensor, start: Tensor | None) -> float:
    if expected.shape != actual.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    one, other = expected.double(), actual.to(expected.device).double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (one - other).abs()).max()
    finite = torch.where(one.isfinite(), one, 0.0)
    size = max(float(finite.abs().max()), FLOOR)
    if start is not None and start.is_floating_point() and start.shape == expected.shape:
        change = (finite - start.to(finite.device).double()).nan_to_num(0.0, 0.0, 0.0)
        size = max(float(change.abs().max()), CHANGE * size)
    found = float(apart) / size
    return math.inf if math.isnan(found) else found
