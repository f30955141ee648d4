"""Arithmetic on named tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from atoll.core.views import stacked_view

__all__ = [
    "copied",
    "copied_at_once",
    "into",
    "mean",
    "placed",
    "prefixed",
    "sent",
    "without",
]

Named = Mapping[str, Tensor]


def mean(items: Sequence[Named], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The mean of named tensors, with equal weights by default.

    Sums in double precision, so that the mean of equal copies is exact.
    """
    if weights is not None and len(set(weights)) == 1:
        weights = None  # a sum needs fewer passes than a product with shares
    total, means = float(len(items)) if weights is None else sum(weights), {}
    for name in items[0]:
        tensors = [item[name] for item in items]
        whole = stacked_view(tensors)
        stacked = torch.stack(tensors) if whole is None else whole
        if weights is None:
            summed = stacked.sum(0, dtype=torch.float64)
        else:
            share = sent(weights, stacked.device, torch.float64)
            summed = torch.tensordot(share, stacked.to(torch.float64), 1)
        means[name] = (summed / total).to(stacked.dtype)
    return means


def copied(weights: Named) -> dict[str, Tensor]:
    """Copy all tensors."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def placed(weights: Named, device: torch.device) -> dict[str, Tensor]:
    """Move tensors to a device; tensors already there are shared, not copied."""
    if all(t.device == device for t in weights.values()):
        return cast("dict[str, Tensor]", weights)
    return {n: t.to(device) for n, t in weights.items()}


def copied_at_once(weights: Named) -> dict[str, Tensor]:
    """Like `copied` in few kernels, for many small tensors on a GPU."""
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    into(copies, weights)
    return copies


@torch.no_grad()
def into(buffers: Named, weights: Named) -> None:
    """Copy values into tensors of the same names, in few kernels per dtype."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in buffers.items():
        alike.setdefault((tensor.dtype, tensor.device), []).append(name)
    for names in alike.values():
        torch._foreach_copy_([buffers[n] for n in names], [weights[n] for n in names])


def prefixed(prefix: str, weights: Named) -> dict[str, Tensor]:
    """The same tensors with prefix/name as names."""
    return {f"{prefix}/{name}": tensor for name, tensor in weights.items()}


def without(prefix: str, weights: Named) -> dict[str, Tensor]:
    """The tensors whose names start with prefix/, without the prefix."""
    start = f"{prefix}/"
    return {n.removeprefix(start): tensor for n, tensor in weights.items() if n.startswith(start)}


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers copied to a device asynchronously."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
