"""A look at an answer before it leaves: does it show a training row?

The update of a linear layer that reads the inputs is, unit by unit, a sum of training rows. Where
a single unit, or two units together, hold one row alone, whoever gets the answer can read it off.
This finds such rows for any combination of two units. It cannot find all ways to read rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["shown_rows"]

TOLERANCE = 0.005  # relative distance of a combination of units from the row
FEWEST = 5  # columns with many values, below which a combination meets a row by chance
MANY = 10  # distinct values from which a column counts as having many
MOST = 20_000_000  # rows x pairs of units that are compared at most; else neighbours alone
NOISE = 1e-10  # squared sine between two updates, below which their difference is rounding


def shown_rows(before: Mapping[str, Tensor], after: Mapping[str, Tensor], rows: Tensor) -> int:
    """How many of these training rows can be read off the update from `before` to `after`."""
    inputs = rows.detach().reshape(len(rows), -1).double().cpu()
    if not len(inputs) or _varied(inputs) < FEWEST:
        return 0
    shown = torch.zeros(len(inputs), dtype=torch.bool)
    for name, tensor in before.items():
        bias = name.replace("weight", "bias")
        paired = bias != name and bias in before and bias in after and name in after
        if paired and tensor.dim() == 2 and tensor.shape[1] == inputs.shape[1]:
            shown |= _of_layer(before, after, (name, bias), inputs)
    return int(shown.sum())


def _varied(inputs: Tensor) -> int:
    """Columns with so many values that rows do not meet in them by chance."""
    return sum(len(column.unique()) >= min(MANY, len(inputs)) for column in inputs.T)


def _of_layer(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    names: tuple[str, str],
    inputs: Tensor,
) -> Tensor:
    weight, bias = (
        (after[name].detach().double() - before[name].detach().double()).cpu() for name in names
    )
    updates = torch.cat([weight, bias[:, None]], 1)
    moved = updates.norm(dim=1) > 0
    order = before[names[1]].detach().cpu()[moved].argsort()
    units = torch.nn.functional.normalize(updates[moved][order], dim=1)
    ends = torch.nn.functional.normalize(torch.cat([inputs, torch.ones(len(inputs), 1)], 1), dim=1)
    if not len(units):
        return torch.zeros(len(inputs), dtype=torch.bool)
    return _alone(units, ends) | _by_pairs(units, ends)


def _alone(units: Tensor, ends: Tensor) -> Tensor:
    """Rows that a single unit holds alone."""
    return ((ends @ units.T).square().amax(1)) >= 1 - TOLERANCE**2


def _by_pairs(units: Tensor, ends: Tensor) -> Tensor:
    """Rows that lie in the plane of two units; of many units, in that of neighbours by bias."""
    count = len(units)
    if count * count * len(ends) <= MOST:
        one, two = torch.triu_indices(count, count, 1)
    else:
        one, two = torch.arange(count - 1), torch.arange(1, count)
    cosine = (units[one] * units[two]).sum(1)
    square = 1 - cosine.square()
    clear = square > NOISE
    one, two, cosine, square = one[clear], two[clear], cosine[clear], square[clear]
    shown = torch.zeros(len(ends), dtype=torch.bool)
    if not len(one):
        return shown
    along = ends @ units.T
    for start in range(0, len(ends), 256):
        a, b = along[start : start + 256][:, one], along[start : start + 256][:, two]
        inside = (a.square() + b.square() - 2 * cosine * a * b) / square
        shown[start : start + 256] = inside.amax(1) >= 1 - TOLERANCE**2
    return shown
