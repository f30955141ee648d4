"""Ridge regression from sums over rows: Gram and cross matrices, fixed-point numbers, the solution.

With features F (rows, width) and one-hot labels Y, the classifier (F'F + s I)^-1 F'Y needs the sums
F'F and F'Y alone. Sums over parts of the rows add up to the sums over all rows.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.messages import Tensors
from atoll.learning.models import MLP, Architecture, features, outputs

__all__ = [
    "FIXED_LIMIT", "added", "from_fixed", "frozen_features", "implausible_sums", "packed_sums",
    "random_features", "solved", "square", "to_fixed", "triangle", "with_constant",
]  # fmt: skip

# Largest absolute fixed-point number, 5.5e11: below the 1e12 that a message or state may hold.
FIXED_LIMIT: Final = 1 << 39


def random_features(weights: Mapping[str, Tensor], x: Tensor, offset: float) -> Tensor:
    """ReLU of a random linear layer: (rows, ...) -> (rows, width); `offset` is added to inputs."""
    return torch.relu(F.linear(x.flatten(1) + offset, weights["weight"], weights["bias"]))


def frozen_features(network: Architecture, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The inputs of the last linear layer: (rows, ...) -> (rows, width), without gradient."""
    model = network.model
    if isinstance(model, MLP):
        flat = x.flatten(-model.axes)
        return outputs(weights, flat, model.depth)[-2] if model.depth > 1 else flat
    hidden = features(network, weights, x)
    if hidden is None:
        what, remedy = "a network without a linear layer has no features", "choose another network"
        raise UserError(what, "model.name", remedy)
    return hidden


def with_constant(hidden: Tensor) -> Tensor:
    """Features in double precision with a last column of ones, for the intercept."""
    return F.pad(hidden.double(), (0, 1), value=1.0)


def triangle(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix, row by row: (width, width) -> (entries,)."""
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def square(entries: Tensor, width: int) -> Tensor:
    """The symmetric matrix of a lower triangle: (width (width + 1) / 2,) -> (width, width)."""
    rows, columns = torch.tril_indices(width, width, device=entries.device)
    matrix = entries.new_zeros((width, width))
    matrix[rows, columns] = entries
    matrix[columns, rows] = entries
    return matrix


def packed_sums(
    inputs: Tensor, y: Tensor, classes: int, share: Tensor | None = None, bits: int = 0
) -> Tensors:
    """The triangle of F'F, and F'Y with one column for each class; rows count by their share.

    Shares are rounded to steps of 2^-bits (0: 20 bits), so that sums of them are exact.
    """
    step = 2.0 ** -(min(bits, 20) or 20)
    counted = inputs if share is None else inputs * (share.double() / step).round()[:, None] * step
    cross = inputs.new_zeros((classes, inputs.shape[1])).index_add_(0, y, counted)
    return {"gram": triangle(inputs.T @ counted), "cross": cross.T.contiguous()}


def to_fixed(values: Tensor, bits: int) -> Tensor:
    """Values in steps of 2^-bits as int64; 0 bits: unchanged. Too large a value raises an error."""
    if not bits:
        return values
    scaled = (values * 2.0**bits).round()
    if scaled.numel() and float(scaled.abs().max()) > FIXED_LIMIT:
        most = FIXED_LIMIT / 2.0**bits
        what = f"a sum is larger than the {most:.3g} that {bits} fraction bits leave room for"
        raise UserError(what, "method.bits", "lower it")
    return scaled.long()


def added(total: Tensors, sums: Tensors, sign: int) -> Tensors:
    """The total plus or minus further sums; an overflow of fixed-point numbers raises an error."""
    changed = {n: total[n] + sign * t if total else sign * t for n, t in sums.items()}
    for tensor in changed.values():
        if not tensor.is_floating_point() and int(tensor.abs().max()) > FIXED_LIMIT:
            what = "the sum over all sites has no room in fixed-point numbers"
            raise UserError(what, "method.bits", "lower it")
    return changed


def implausible_sums(sums: Tensors, classes: int, width: int, bits: int) -> str:
    """Why these cannot be the sums of any rows; empty if they can. `width`: 0 if not known yet."""
    kind = torch.int64 if bits else torch.float64
    if sums.keys() != {"gram", "cross"} or any(t.dtype != kind for t in sums.values()):
        return "other sums than a Gram and a cross matrix"
    gram, cross = sums["gram"], sums["cross"]
    size = width or (len(cross) if cross.dim() else 0)
    if not size or cross.shape != (size, classes) or gram.shape != (size * (size + 1) // 2,):
        return "a Gram or cross matrix of another form"
    squares = square(gram, size).diagonal()
    if bool((squares < 0).any()) or int(squares[-1]) != int(cross[-1].sum()):
        return "sums that no rows have"
    return ""


def from_fixed(values: Tensor, bits: int) -> Tensor:
    """The float64 values of fixed-point numbers; 0 bits: as they are."""
    return values.double() / 2.0**bits if bits else values


def solved(gram: Tensor, cross: Tensor, strength: float) -> Tensor:
    """(F'F + strength I)^-1 F'Y, by Cholesky: (width, width), (width, classes) -> as `cross`."""
    ridge = gram + strength * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solution: Tensor = torch.cholesky_solve(cross, torch.linalg.cholesky(ridge))
    return solution
