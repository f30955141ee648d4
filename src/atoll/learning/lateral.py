"""A second column that reads the hidden layers of an MLP through lateral weights.

Letters follow section b of the CHFL specification: z_c and z_u are the layer outputs of column one
and column two, U are the lateral weights, mu is their strength. Layers count from 0. A bank is
several second columns that read the same column one: their weights, and mu, have one more axis in
front. In both cases weights may have further axes in front, one for each client.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning.models import draw_linear, linear, outputs
from atoll.learning.weights import without

__all__ = [
    "READ",
    "bank_of",
    "concat_logits",
    "correct_rows",
    "draw_laterals",
    "every_logits",
    "joint_logits",
    "lateral_column",
    "member",
    "stack_models",
]

READ = "said"  # prefix of the column one that column two reads in predictions


def draw_laterals(sizes: Sequence[int], stream: Callable[[int], Stream]) -> dict[str, Tensor]:
    """Initial lateral weights into layers of these sizes, each from a separate stream."""
    weights = {}
    for i, (below, above) in enumerate(pairwise(sizes), 1):
        (weights[f"lateral{i}"],) = draw_linear(above, below, stream(i), bias=False)
    return weights


def bank_of(column: Mapping[str, Tensor], strengths: Sequence[float]) -> dict[str, Tensor]:
    """A bank in which every strength has the same first weights; mu stands among them."""
    count = len(strengths)
    bank = {f"unique/{n}": w.expand(count, *w.shape).contiguous() for n, w in column.items()}
    return bank | {"mu": torch.tensor(strengths)[:, None, None]}


def member(bank: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """A copy of one second column of a bank and its mu."""
    column = {n: w[number].clone() for n, w in bank.items() if n.startswith("unique/")}
    return column | {"mu": bank["mu"][number, 0, 0]}


def lateral_column(
    weights: Mapping[str, Tensor], own: Tensor, z_c: list[Tensor], mu: Tensor
) -> Tensor:
    """z_u of the last layer: the logits that column two adds (eq. 6).

    weights: weight0, bias0, ..., and lateral1, ... (U of layers 1 to the last).
    """
    z_u, depth = own, len(z_c)
    for i in range(depth):
        z = linear(z_u, weights[f"weight{i}"], weights[f"bias{i}"])
        if i > 0:
            z = linear(mu * _broadcast(z_c[i - 1], mu), weights[f"lateral{i}"], plus=z)
        z_u = torch.relu(z) if i < depth - 1 else z
    return z_u


def joint_logits(weights: Mapping[str, Tensor], own: Tensor, z_c: list[Tensor]) -> Tensor:
    """z_c + z_u of the last layer: the logits of both columns (eq. 7)."""
    z_u = lateral_column(without("unique", weights), own, z_c, weights["mu"])
    return _broadcast(z_c[-1], weights["mu"]) + z_u


def _broadcast(z: Tensor, mu: Tensor) -> Tensor:
    """An output of column one with an axis for the bank, where mu is that of a bank."""
    return z.unsqueeze(-3) if mu.dim() > 2 else z


def concat_logits(weights: Mapping[str, Tensor], own: Tensor, z: Tensor, inputs: str) -> Tensor:
    """The logits of the concatenation baseline: an MLP on F_theta_c(x_c) and the own columns."""
    common = torch.softmax(z, -1) if inputs == "prob" else z
    column = without("concat", weights)
    return outputs(column, torch.cat([common, own], -1), len(column) // 2)[-1]


def every_logits(
    weights: Mapping[str, Tensor], rows: Rows, *, depth: int, concat: str, local: tuple[str, ...]
) -> Tensor:
    """Logits of column one, the bank, concatenation and networks alone: (models, rows, classes)."""
    z_c = outputs(without(READ, weights), rows.x, depth)
    logits = [outputs(without("common", weights), rows.x, depth)[-1]]
    bank = joint_logits(weights, rows.own, z_c) if "mu" in weights else None
    if concat:
        logits.append(concat_logits(weights, rows.own, z_c[-1], concat))
    for name in local:
        logits.append(outputs(without(name, weights), rows.all, depth)[-1])
    return stack_models(logits, bank)


def correct_rows(
    weights: Mapping[str, Tensor], rows: Rows, *, depth: int, concat: str, local: tuple[str, ...]
) -> Tensor:
    """Which rows each model gets right: (models, rows), in the order of `every_logits`."""
    logits = every_logits(weights, rows, depth=depth, concat=concat, local=local)
    return logits.argmax(-1) == rows.y.unsqueeze(-2)


def stack_models(logits: Sequence[Tensor], bank: Tensor | None) -> Tensor:
    """Logits of all models: (models, rows, classes); those of a bank after the first model."""
    stacked = [z.unsqueeze(-3) for z in logits]
    if bank is not None:
        stacked.insert(1, bank)
    return torch.cat(stacked, -3)
