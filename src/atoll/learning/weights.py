"""Arithmetic on named tensors."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["copied", "copied_at_once", "into", "mean", "prefixed", "without"]

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


def copied_at_once(weights: Named) -> dict[str, Tensor]:
    """The same as `copied` in few kernels, for many small tensors on a GPU."""
    found = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    into(found, weights)
    return found


@torch.no_grad()
def into(buffers: Named, weights: Named) -> None:
    """Copy values into tensors of the same names, those of one type in few kernels."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in buffers.items():
        alike.setdefault((tensor.dtype, tensor.device), []).append(name)
    for names in alike.values():
        torch._foreach_copy_([buffers[n] for n in names], [weights[n] for n in names])


def prefixed(prefix: str, weights: Named) -> dict[str, Tensor]:
    """The same tensors under prefix/name."""
    return {f"{prefix}/{name}": tensor for name, tensor in weights.items()}


def without(prefix: str, weights: Named) -> dict[str, Tensor]:
    """The tensors whose names begin with prefix/, under the rest of their names."""
    start = f"{prefix}/"
    return {n.removeprefix(start): tensor for n, tensor in weights.items() if n.startswith(start)}
