"""A look at an answer before it leaves: does it show a training row?

The update of a linear layer that reads the inputs is, unit by unit, a sum of training rows. Where
a single unit, or two units together, hold one row alone, whoever gets the answer can read it off.
This finds such rows for any combination of two units. It cannot find all ways to read rows.
"""

from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

__all__ = ["shown_rows"]

TOLERANCE = 0.005  # relative distance of a combination of units from the row
FEWEST = 5  # columns with many values, below which a combination meets a row by chance
MANY = 10  # distinct values from which a column counts as having many
MOST = 50_000_000  # rows x units x units, above which only neighbours are compared
NOISE = 1e-10  # squared sine between two updates, below which their difference is rounding


def shown_rows(before: Mapping[str, Tensor], after: Mapping[str, Tensor], rows: Tensor) -> int:
    """How many of these training rows can be read off the update from `before` to `after`."""
    inputs = rows.detach().reshape(len(rows), -1).double().cpu()
    if not len(inputs) or not _enough_values(inputs):
        return 0
    shown = torch.zeros(len(inputs), dtype=torch.bool)
    for name, tensor in before.items():
        bias = name.replace("weight", "bias")
        paired = bias != name and bias in before and bias in after and name in after
        if paired and tensor.dim() == 2 and tensor.shape[1] == inputs.shape[1]:
            shown |= _of_layer(before, after, (name, bias), inputs)
    return int(shown.sum())


def _enough_values(inputs: Tensor) -> bool:
    """Whether rows have so many different values that they do not meet by chance."""
    varied = (len(column.unique()) >= min(MANY, len(inputs)) for column in inputs.T)
    return sum(islice(filter(None, varied), FEWEST)) == FEWEST


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
    cosines, along = units @ units.T, ends @ units.T
    if len(ends) * len(units) ** 2 > MOST:
        one, two = along[:, :-1], along[:, 1:]
        cosine, scale = cosines.diagonal(1), _scale(cosines.diagonal(1))
        inside = (one.square() + two.square() - 2 * cosine * one * two) * scale
        return (inside >= 1 - TOLERANCE**2).any(1)
    scale, squares = _scale(cosines), along.square()
    return torch.stack(
        [
            (((s[:, None] + s) - 2 * cosines * torch.outer(a, a)) * scale).amax()
            >= 1 - TOLERANCE**2
            for a, s in zip(along, squares, strict=True)
        ]
    )


def _scale(cosines: Tensor) -> Tensor:
    """1 / sin^2 of the angle between two units; 0 where they differ by rounding alone."""
    square = 1 - cosines.square()
    return torch.where(square > NOISE, 1 / square.clamp(min=NOISE), 0.0)
