"""Arithmetic of split learning: a client's half of a network, and how to join embeddings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from atoll.core.errors import BadMessageError, UserError
from atoll.core.messages import Tensors
from atoll.core.rng import Stream, normals, uniforms
from atoll.learning.models import Architecture
from atoll.learning.split_nets import Bottom
from atoll.learning.weights import copied

__all__ = [
    "Agg",
    "Batches",
    "Half",
    "chunks",
    "distance_gradient",
    "dropout",
    "finite",
    "fitting",
    "guarded",
    "joined",
    "not_declared",
    "parts_of",
    "pixels",
    "rounded",
    "stepped",
    "union",
]

Agg = Literal["sum", "mean", "concat"]
CHUNK = 1024  # rows per pass without gradient
MESSAGE = 2048  # rows per message without gradient
ROUNDING = 64  # a distance below this many units of rounding error counts as 0


def joined(embeddings: Sequence[Tensor], agg: Agg) -> Tensor:
    """The joint embedding of rows from those of each client."""
    if agg == "concat":
        return torch.cat(list(embeddings), -1)
    total = torch.stack(list(embeddings)).sum(0)
    return total if agg == "sum" else total / len(embeddings)


def parts_of(gradient: Tensor, count: int, agg: Agg) -> list[Tensor]:
    """The gradient of each client's embedding, from that of the joint one."""
    if agg == "concat":
        return list(gradient.chunk(count, -1))
    return [gradient if agg == "sum" else gradient / count] * count


@dataclass(frozen=True)
class Batches:
    """The batches of several epochs, which both halves derive from one seed."""

    rows: int
    size: int
    key: int  # of the stream that orders the rows, anew in each pass

    def __len__(self) -> int:
        """The number of batches in a pass; the last batch may be smaller."""
        return (self.rows + self.size - 1) // self.size

    def at(self, step: int, device: torch.device) -> Tensor:
        """The rows of a step; steps continue from one pass to the next."""
        epoch, batch = divmod(step, len(self))
        return _order(self.rows, self.key, epoch, device)[batch * self.size :][: self.size]


@lru_cache(maxsize=4)
def _order(rows: int, key: int, epoch: int, device: torch.device) -> Tensor:
    return Stream(key).child("epoch", epoch).permutation(rows, device)


def dropout(share: float, shape: tuple[int, ...], key: Tensor, like: Tensor) -> Tensor | None:
    """A mask that keeps the mean: 0 for the share that is dropped, 1 / (1 - share) elsewhere."""
    if not share:
        return None
    return (uniforms(key, shape) >= share).to(like.dtype) / (1 - share)


def pixels(x: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Images that are given from -1 to 1, with another mean and deviation for each channel."""
    if not mean or x.dim() != 4:
        return x
    middle, spread = (x.new_tensor(v).view(1, -1, 1, 1) for v in (mean, deviation))
    return ((x + 1) / 2 - middle) / spread


@dataclass
class Half:
    """A client's half of the network; the graph of the last batch is only a cache."""

    network: Bottom
    weights: Tensors
    _cached: tuple[object, dict[str, Tensor], Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """The network as a function of its weights."""
        self.function = Architecture(self.network)

    @torch.no_grad()
    def embed(self, x: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The embeddings of many rows, without gradient and dropout."""
        used = self.weights if weights is None else weights
        parts = [self.function(used, part) for part in x.split(CHUNK)] if len(x) else []
        return torch.cat(parts) if parts else x.new_zeros((0, self.network.width))

    def forward(self, key: object, x: Tensor, mask: Tensor | None) -> Tensor:
        """The embeddings of a batch; stores the graph under the key until the next call."""
        moving = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        with torch.enable_grad():
            embedding = self.function(moving, x)
            if mask is not None:
                embedding = embedding * mask
        self._cached = (key, moving, embedding)
        return embedding

    def again(self, key: object, inputs: Callable[[], tuple[Tensor, Tensor | None]]) -> Tensor:
        """The embeddings of the last batch; a rebuilt client repeats its pass."""
        if self._cached is None or self._cached[0] != key:
            self.forward(key, *inputs())
        assert self._cached is not None  # forward() has just filled it
        return self._cached[2]

    def backward(self, gradient: Tensor) -> Tensors:
        """The gradient by the weights, from that by the embeddings of the last batch."""
        assert self._cached is not None  # again() comes first
        _, moving, embedding = self._cached
        gradients = torch.autograd.grad(embedding, list(moving.values()), gradient)
        self._cached = None
        return dict(zip(moving, gradients, strict=True))

    def descend(self, gradients: Tensors, rate: float, frozen: Tensors | None = None) -> None:
        """One plain gradient step; frozen entries are restored exactly."""
        self.weights = stepped(self.weights, gradients, rate, frozen)


def stepped(weights: Tensors, gradients: Tensors, rate: float, frozen: Tensors | None) -> Tensors:
    """Weights after one plain gradient step; frozen entries are written back as they were."""
    after = {n: w - rate * gradients[n] if n in gradients else w for n, w in weights.items()}
    if frozen is not None:
        after = {n: torch.where(frozen[n], weights[n], w) for n, w in after.items()}
    return copied(after)


def fitting(embedding: Tensor, rows: int, width: int, sender: str) -> Tensor:
    """Check that an embedding has a row for each label; the error names its sender."""
    if embedding.shape != (rows, width):
        shown = tuple(embedding.shape)
        raise BadMessageError(sender, f"embeddings {shown}, not {(rows, width)}: rows not aligned?")
    return embedding


def guarded(gradient: Tensor, clip: float, noise: float, key: Tensor) -> Tensor:
    """A gradient with rows no longer than `clip` and Gaussian noise: both hide labels a little."""
    if clip:
        length = gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        gradient = gradient * (clip / length).clamp(max=1)
    if noise:
        gradient = gradient + noise * normals(key, tuple(gradient.shape)).to(gradient.dtype)
    return gradient


def distance_gradient(now: Tensor, before: Tensor) -> Tensor:
    """The gradient of the distance |now - before| by now, over the last two axes.

    At distance 0 the gradient is 0. Two computations of one embedding differ by rounding errors,
    and dividing those by their norm would give a random direction of full length; so a distance
    within rounding of 0 counts as 0.
    """
    difference = now - before
    distance = difference.flatten(-2).norm(dim=-1)
    rounding = ROUNDING * torch.finfo(now.dtype).eps * before.flatten(-2).norm(dim=-1)
    divisor = torch.where(distance > rounding, distance, torch.inf)
    return difference / divisor[..., None, None]


def rounded(embedding: Tensor, digits: int) -> Tensor:
    """Embeddings rounded to this many decimals; 0: unchanged."""
    return torch.round(embedding, decimals=digits) if digits else embedding


def union(
    predictions: Mapping[int, tuple[Tensor, Tensor]], fresh: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits and labels of all tasks; `fresh` marks the rows that no earlier task has."""
    parts = [tuple(part[fresh(task)] for part in predictions[task]) for task in sorted(predictions)]
    logits, labels = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(labels)


def finite(loss: float, stage: int, number: int) -> None:
    """Raise for a loss that is not finite."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is no longer finite at stage {stage}, round {number}",
            "method.rate",
            "choose a smaller rate",
        )


def chunks(rows: Sequence[int], size: int = MESSAGE) -> list[int]:
    """The sizes of the pieces in which each number of rows is processed."""
    return [min(size, count - start) for count in rows for start in range(0, count, size)]


def not_declared(name: str, stage: int, classes: int) -> UserError:
    """The error for a class beyond the outputs of the top network."""
    return UserError(
        f"class '{name}' of stage {stage} is not among the {classes} declared",
        "method.declared",
        "declare more classes, or set undeclared = 'widen'",
    )
