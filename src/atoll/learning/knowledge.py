"""Knowledge of earlier tasks: prototypes and their drift, Fisher diagonals, frozen entries.

Letters and equations are those of V-LETO's specification: mu are class means of embeddings, beta
the weight of the new one, s the drift, F the Fisher diagonal, kappa the threshold.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.learning.split_nets import Bottom

__all__ = [
    "LmoRule",
    "added",
    "batch_means",
    "class_means",
    "combined",
    "delta",
    "drift",
    "drift_scalar",
    "drift_vector",
    "evolved",
    "fisher",
    "frozen",
    "pairwise_sum",
    "share",
    "threshold",
]

LmoRule = Literal["paper", "code", "quantile", "off"]
CHUNK = 64  # maximum samples with gradients in memory


def class_means(embeddings: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Eq. 2: the mean embedding of each class (classes, width), and the rows it is the mean of.

    Sums use double precision, so that order and batching do not change the result.
    """
    total = embeddings.new_zeros((classes, embeddings.shape[1]), dtype=torch.float64)
    total.index_add_(0, y, embeddings.double())
    counts = torch.bincount(y, minlength=classes)
    return (total / counts.clamp(min=1)[:, None]).to(embeddings.dtype), counts


def evolved(old: Tensor, learned: Tensor, new: Tensor, counts: Tensor, beta: float) -> Tensor:
    """Eq. 5: insert new classes, mix known ones, and keep those without rows."""
    mixed = beta * new + (1 - beta) * old
    prototypes = torch.where(learned[:, None], mixed, new)
    return torch.where((counts > 0)[:, None], prototypes, old)


def batch_means(embeddings: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean embedding of each class in a batch, and its rows: a product, which vmap batches."""
    kinds = (y[:, None] == torch.arange(classes, device=y.device)).to(embeddings.dtype)
    counts = kinds.sum(0)
    return kinds.T @ embeddings / counts.clamp(min=1)[:, None], counts


def drift_scalar(before: Tensor, now: Tensor, present: Tensor) -> Tensor:
    """Eq. 3 and 4: the mean of the cosine between old and new means, over the classes `present`."""
    near = torch.nn.functional.cosine_similarity(before, now, dim=-1)
    return torch.where(present, near, 0).sum() / present.sum()


def drift_vector(before: Tensor, now: Tensor, present: Tensor) -> Tensor:
    """The mean shift of class means over the classes `present`: (width,)."""
    return torch.where(present[:, None], now - before, 0).sum(0) / present.sum()


def drift(kind: str, before: Tensor, now: Tensor, y: Tensor, classes: int) -> Tensor:
    """Eq. 3 and 4: the drift of a batch's classes, between its old and its new embeddings."""
    past, _ = batch_means(before, y, classes)
    means, counts = batch_means(now.detach(), y, classes)
    return (drift_scalar if kind == "scalar" else drift_vector)(past, means, counts > 0)


def combined(parts: list[Tensor], rule: str, beta: float) -> Tensor:
    """d.3 step 11: the input of the top at a test where each client was trained by itself.

    mix: H_k = beta E_k + (1 - beta) H_(k-1), whose class means are the prototypes of eq. 5.
    """
    if rule == "sum":
        return torch.stack(parts).sum(0)
    mixed = parts[0]
    for part in parts[1:]:
        mixed = beta * part + (1 - beta) * mixed
    return parts[-1] if rule == "current" else mixed


def fisher(network: Bottom, weights: Mapping[str, Tensor], x: Tensor, g: Tensor) -> Tensors:
    """Eq. 7: the mean over samples of the squared gradient, g being each sample's by its embedding.

    One gradient for each sample: the square of a batch's mean gradient would be another number. So
    each sample gets weights of its own, equal to all the others. Every entry sums its samples in
    the same order, so entries that are equal in theory (the weight of a constant pixel and the
    bias) are equal to the last bit, and what `frozen` selects does not depend on the CPU.
    """
    total = {name: torch.zeros_like(w) for name, w in weights.items()}
    for rows, gradients in zip(x.split(CHUNK), g.split(CHUNK), strict=True):
        own = {
            name: w.detach().expand(len(rows), *w.shape).clone().requires_grad_()
            for name, w in weights.items()
        }
        with torch.enable_grad():
            embedding = network.unfolded(own, rows[:, None])
        # copied: the rounding of a product may depend on the alignment of a message's bytes
        slopes = torch.autograd.grad(embedding, list(own.values()), gradients[:, None].clone())
        for name, each in zip(own, slopes, strict=True):
            total[name] += pairwise_sum(each**2)
    return {name: summed / len(x) for name, summed in total.items()}


def pairwise_sum(values: Tensor) -> Tensor:
    """Sum over the first axis in a fixed order: halves are added until one is left.

    `Tensor.sum` chooses the order of additions by shape, layout and CPU.
    """
    if not len(values):
        return values.new_zeros(values.shape[1:])
    while len(values) > 1:
        half = len(values) // 2
        odd = values[2 * half :]
        values = torch.cat([values[:half] + values[half : 2 * half], odd])
    return values[0]


def added(one: Tensors, other: Tensors) -> Tensors:
    """The sum; an empty tensor counts as 0."""
    return {name: one[name] + t if one else t for name, t in other.items()}


def delta(task: int, k0: float, alpha: float) -> float:
    """How many deviations the threshold is below the mean at a task, counted from 1."""
    return k0 + alpha * math.log(task + 1)


def threshold(f: Tensors, deviations: float) -> float:
    """Kappa: the mean of all entries minus this many standard deviations."""
    flat = torch.cat([f[name].flatten() for name in sorted(f)]).double()
    return float(flat.mean() - deviations * flat.std(correction=0))


def frozen(f: Tensors, rule: LmoRule, deviations: float, rho: float) -> Tensors:
    """Which entries keep their value.

    paper: F >= kappa. code: F > max(kappa, 0). quantile: the share rho with the largest F.
    """
    if rule == "off":
        return {name: torch.zeros_like(t, dtype=torch.bool) for name, t in f.items()}
    if rule == "quantile":
        return _largest(f, rho)
    kappa = threshold(f, deviations)
    if rule == "code":
        return {name: t.double() > max(kappa, 0.0) for name, t in f.items()}
    return {name: t.double() >= kappa for name, t in f.items()}


def _largest(f: Tensors, rho: float) -> Tensors:
    """The largest entries, a share rho of all; ties go to the first by name and index."""
    names = sorted(f)  # a restored client may have them in another order
    flat = torch.cat([f[name].flatten() for name in names])
    order = torch.argsort(flat, descending=True, stable=True)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[order[: round(rho * len(flat))]] = True
    pieces = chosen.split([f[name].numel() for name in names])
    masks = {name: piece.view(f[name].shape) for name, piece in zip(names, pieces, strict=True)}
    return {name: masks[name] for name in f}


def share(mask: Tensors) -> float:
    """The fraction of frozen entries."""
    entries = sum(tensor.numel() for tensor in mask.values())
    return sum(int(tensor.sum()) for tensor in mask.values()) / max(1, entries)
