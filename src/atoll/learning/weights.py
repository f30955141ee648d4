"""Arithmetic on named tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["copied", "mean", "prefixed", "without"]

Named = Mapping[str, Tensor]


def mean(items: Sequence[Named], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The mean of named tensors; equal weights unless others are given.

    Summed in double precision, so that equal copies give the copy exactly.
    """
    shares = [1.0] * len(items) if weights is None else list(weights)
    total = sum(shares)
    found = {}
    for name, first in items[0].items():
        stacked = torch.stack([item[name] for item in items]).to(torch.float64)
        share = torch.tensor(shares, dtype=torch.float64, device=first.device)
        summed = torch.tensordot(share, stacked, 1) if weights else stacked.sum(0)
        found[name] = (summed / total).to(first.dtype)
    return found


def copied(weights: Named) -> dict[str, Tensor]:
    """The same names with tensors of their own."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def prefixed(prefix: str, weights: Named) -> dict[str, Tensor]:
    """The same tensors under prefix/name."""
    return {f"{prefix}/{name}": tensor for name, tensor in weights.items()}


def without(prefix: str, weights: Named) -> dict[str, Tensor]:
    """The tensors whose names begin with prefix/, under the rest of their names."""
    start = f"{prefix}/"
    return {n.removeprefix(start): tensor for n, tensor in weights.items() if n.startswith(start)}
