"""Checks whether weights single out a training row, and whether an update reveals one.

The update of a linear layer that reads the inputs is, for each unit, a sum of the rows that
activate the unit. If a single row activates a unit, or if two units of the same direction differ by
one or two rows, the update reveals that row. Both checks cover one and two units. They cannot find
every way to read rows, and they cover only linear layers with ReLU.
"""

import math
from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

__all__ = ["FEWEST", "plain_step", "shown_rows", "singling_units", "varied_columns"]

TOLERANCE = 0.005  # relative distance of a combination of units from the row
FEWEST = 5  # number of columns with many values below which a combination matches a row by chance
MANY = 10  # number of distinct values from which a column counts as having many
MOST = 50_000_000  # rows x units x units, above which only neighbours are compared
PARALLEL = 0.999  # cosine from which two units count as parallel
NEARLY = 2  # maximum number of rows by which twins differ
SMALL_SHARE = 16  # one row in this many may always reach a unit
FEW, ENOUGH = 8, 40  # rows that are few for a unit, of a table with at least as many
NOISE = 1e-10  # squared sine between two updates, below which their difference is rounding


def singling_units(weights: Mapping[str, Tensor], rows: Tensor, least: int) -> int:
    """The number of units that some rows activate, but fewer than `least`; twins count as well.

    Twins: two parallel units that differ by one or two rows, and two that few rows reach
    and that differ by one. Tables with few columns, and small ones, have such units by chance:
    `least` is at most one in sixteen rows, and fewer than five columns are not looked at. Nor are
    images, whose pixels are not centred: there such units are common.
    """
    if least < 2 or not len(rows) or rows.dim() != 2 or rows.shape[1] < FEWEST:
        return 0
    inputs = rows.detach().double().cpu()
    least = min(least, math.ceil(len(inputs) / SMALL_SHARE))
    count = 0
    for names in _layers(weights, inputs.shape[1]):
        if not names[1]:
            continue  # not a unit but a part of one, such as an adapter
        weight, bias = (weights[name].detach().double().cpu() for name in names)
        count += _singling(weight, bias, inputs, least)
    return count


def _layers(weights: Mapping[str, Tensor], columns: int) -> list[tuple[str, str]]:
    """The names of weight and bias of every matrix that reads the inputs; the bias may be empty."""
    layers = []
    for name, tensor in weights.items():
        bias = name.replace("weight", "bias")
        if tensor.dim() == 2 and tensor.shape[1] == columns:
            layers.append((name, bias if bias != name and bias in weights else ""))
    return layers


def _singling(weight: Tensor, bias: Tensor, inputs: Tensor, least: int) -> int:
    reached = ((inputs @ weight.T + bias) > 0).double()
    counts = reached.sum(0)
    few = int(((counts > 0) & (counts < least)).sum())
    units = torch.nn.functional.normalize(weight, dim=1)
    apart = counts[:, None] + counts - 2 * reached.T @ reached
    twins = ((units @ units.T) > PARALLEL) & (apart > 0) & (apart <= NEARLY)
    if len(inputs) >= ENOUGH:
        twins |= (torch.minimum(counts[:, None], counts) < FEW) & (apart == 1)
    return few + int(twins.sum()) // 2


def shown_rows(before: Mapping[str, Tensor], after: Mapping[str, Tensor], rows: Tensor) -> int:
    """The number of these training rows that the update from `before` to `after` reveals."""
    inputs = rows.detach().reshape(len(rows), -1).double().cpu()
    if not len(inputs) or varied_columns(inputs) < FEWEST:
        return 0
    shown = torch.zeros(len(inputs), dtype=torch.bool)
    for names in _layers(before, inputs.shape[1]):
        if all(name in after for name in names if name):
            shown |= _of_layer(before, after, names, inputs)
    return int(shown.sum())


def varied_columns(inputs: Tensor, most: int = FEWEST) -> int:
    """The number of columns with many values, counted up to `most`.

    With fewer than `FEWEST`, a combination of units matches a row by chance.
    """
    varied = (len(column.unique()) >= min(MANY, len(inputs)) for column in inputs.T)
    return sum(islice(filter(None, varied), most))


def plain_step(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], rate: float, epsilon: float
) -> dict[str, Tensor]:
    """The weights after a plain gradient step, if `after` is Adam's first step from `before`."""
    weights = {}
    for name, tensor in before.items():
        update = after[name].detach().double().cpu() - tensor.detach().double().cpu()
        left = (rate - update.abs()).clamp(min=rate * 1e-9)
        weights[name] = tensor.detach().double().cpu() + update / left * epsilon
    return weights


def _of_layer(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    names: tuple[str, str],
    inputs: Tensor,
) -> Tensor:
    parts = [
        (after[name].detach().double() - before[name].detach().double()).cpu()
        for name in names
        if name
    ]
    updates = torch.cat([part.reshape(len(part), -1) for part in parts], 1)
    moved = updates.norm(dim=1) > 0
    order = (
        before[names[1] or names[0]].detach().cpu().reshape(len(updates), -1)[moved, 0].argsort()
    )
    units = torch.nn.functional.normalize(updates[moved][order], dim=1)
    read = torch.cat([inputs, torch.ones(len(inputs), 1)], 1) if names[1] else inputs
    ends = torch.nn.functional.normalize(read, dim=1)
    if not len(units):
        return torch.zeros(len(inputs), dtype=torch.bool)
    by_one = (ends @ units.T).square().amax(1) >= 1 - TOLERANCE**2
    return by_one | _by_pairs(units, ends)


def _by_pairs(units: Tensor, ends: Tensor) -> Tensor:
    """Rows in the plane of two units; with many units, only of neighbours by bias."""
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
    """1 / sin^2 of the angle between two units; 0 if they differ only by rounding."""
    square = 1 - cosines.square()
    return torch.where(square > NOISE, 1 / square.clamp(min=NOISE), 0.0)
