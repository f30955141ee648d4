"""Subspaces of the inputs of a network's layers, and updates that leave outputs on them unchanged.

A layer computes W a + b = [W b] [a; 1]. An update of [W b] that maps every vector of a subspace to
0 changes no output for inputs in it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.learning.models import MLP, outputs
from atoll.learning.ridge import with_constant

__all__ = ["enlarged", "input_grams", "projected"]


def input_grams(model: MLP, weights: Mapping[str, Tensor], x: Tensor) -> Tensors:
    """For each layer the Gram matrix of its inputs, each with a constant 1 at the end."""
    flat = x.flatten(-model.axes)
    hidden = [flat, *outputs(weights, flat, model.depth)[:-1]]
    grams = {}
    for number, values in enumerate(hidden):
        inputs = with_constant(values)
        grams[str(number)] = inputs.T @ inputs
    return grams


def enlarged(basis: Tensor, gram: Tensor, energy: float) -> Tensor:
    """An orthonormal basis with further columns, until it holds this share of the inputs' energy.

    (width, columns), (width, width) -> (width, as many columns or more). The energy of a subspace
    is the sum of squares of the inputs' parts in it; new columns are the principal directions of
    what the basis leaves.
    """
    total = float(gram.diagonal().sum())
    rest = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - basis @ basis.T
    values, vectors = torch.linalg.eigh(rest @ gram @ rest)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    inside = total - float(values.sum())
    count = 0
    while inside < energy * total and count < len(gram) - basis.shape[1]:
        inside += float(values[count])
        count += 1
    # orthonormal again: eigenvectors of small values may lean towards the basis by rounding
    orthonormal: Tensor = torch.linalg.qr(torch.cat([basis, vectors[:, :count]], 1))[0]
    return orthonormal.contiguous()  # as a checkpoint restores it: products round by layout


def projected(before: Mapping[str, Tensor], after: Mapping[str, Tensor], bases: Tensors) -> Tensors:
    """`after` without the part of its difference to `before` that acts on the subspaces."""
    moved = dict(after)
    for layer, basis in bases.items():
        names = (f"weight{layer}", f"bias{layer}")
        old, new = (
            torch.cat([w[names[0]], w[names[1]][:, None]], 1).double() for w in (before, after)
        )
        update = new - old
        update = update - update @ basis @ basis.T
        whole = (old + update).to(after[names[0]].dtype)
        moved[names[0]], moved[names[1]] = whole[:, :-1].contiguous(), whole[:, -1].contiguous()
    return moved
