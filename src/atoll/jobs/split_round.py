"""The description of one round of split learning.

The server describes the steps (`SplitJob`), and each client lends its half (`Lent`). The reference
implementation is the exchange message by message in `families/vertical.py`. Where one process holds
all halves, `compute/split_rounds.py` runs the round as one computation.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.core.rng import Stream, hashes
from atoll.jobs.identity import identities, shapes
from atoll.learning.models import Architecture
from atoll.learning.split import Agg, Batches

__all__ = [
    "Lent",
    "Loss",
    "SplitJob",
    "SplitResult",
    "Step",
    "View",
    "draws",
    "viewed",
]


class Step(NamedTuple):
    """The inputs of one step of the server's half."""

    joint: Tensor  # (rows, width), the joined embeddings
    before: Tensor  # joined embeddings by the reference weights; no rows unless they are sent
    y: Tensor  # (rows,)
    key: Tensor  # seeds the random draws of this step


# (weights, constants of the round, step) -> the terms of the loss by name
Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Step], dict[str, Tensor]]
View = Callable[[Tensor], Tensor]  # (..., rows, *shape) -> the same rows, augmented


def viewed(x: Tensor, views: Sequence[View], axis: int = 0) -> Tensor:
    """Rows followed by each further view of them."""
    return torch.cat([x, *(view(x) for view in views)], axis) if views else x


def draws(key: Tensor, number: int) -> Tensor:
    """A child key for the draw of this number."""
    return hashes(key, torch.full_like(key, number))


@dataclass(frozen=True)
class Lent:
    """A client's half and its rows, for the steps of one round."""

    function: Architecture
    weights: Tensors
    x: Tensor  # (rows, ...)
    rate: float
    frozen: Tensors | None = None  # masks of entries that keep their value
    still: bool = False  # whether the masks cover every entry
    before: Tensors = field(default_factory=dict)  # reference weights; empty: none
    penalty: float = 0.0  # weight of the distance to the embeddings by the reference weights
    digits: int = 0  # decimals of the embeddings that are sent; 0: all
    dropped: float = 0.0  # dropout rate of the embedding
    keys: tuple[int, ...] = ()  # seeds of the dropout, one per step

    @property
    def form(self) -> Hashable:
        """Halves of equal form can be stacked."""
        settings = (self.rate, self.frozen is None, self.still, bool(self.before))
        x = (tuple(self.x.shape), str(self.x.dtype))
        return (self.function, x, *settings, self.penalty, self.digits, self.dropped)


@dataclass(frozen=True)
class SplitJob:
    """The steps of one round: the server's half, its loss, and the rows of each step."""

    ids: tuple[str, ...]  # participating clients
    places: tuple[int, ...]  # position of each client in a concatenation
    parties: int  # pieces of a concatenation
    y: Tensor  # label of each row
    batches: Batches
    steps: int
    weights: Tensors
    constants: Tensors  # constants of the round that the loss reads
    loss: Loss  # the term "loss" is minimised
    stream: Stream  # random draws of the steps
    rate: float
    agg: Agg = "sum"
    clip: float = 0.0
    noise: float = 0.0
    views: tuple[View, ...] = ()  # further views of each row, with labels of their own
    sends_before: bool = False  # whether clients also send embeddings by their reference weights
    class_sums: int = 0  # classes to sum the joined embeddings over; 0: no sums
    lent: tuple[Lent, ...] = ()  # one half per client

    def labels(self, y: Tensor) -> Tensor:
        """Labels of viewed rows: view v of class y is the class `y * (1 + views) + v`."""
        count = 1 + len(self.views)
        return torch.cat([count * y + view for view in range(count)], -1) if self.views else y

    def key(self) -> Hashable | None:
        """Halves, shapes and loss; rounds with equal keys can be one computation."""
        loss = identities(self.functions)
        if loss is None:
            return None
        tensors = {**self.weights, **{f"given {n}": t for n, t in self.constants.items()}}
        halves = tuple(lent.form for lent in self.lent)
        rows = (
            self.batches.rows,
            self.batches.size,
            self.steps,
            self.sends_before,
            self.class_sums,
        )
        settings = (self.rate, self.agg, self.places, self.parties, self.clip, self.noise)
        return ("passes", loss, shapes(tensors), halves, rows, settings, str(self.y.device))

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The loss and the views."""
        return (self.loss, *self.views)

    def run(self) -> None:
        """Compute nothing: without a stack, the family exchanges messages instead."""


@dataclass(frozen=True)
class SplitResult:
    """The outcome of one round."""

    weights: Tensors
    halves: tuple[Tensors, ...]  # weights of each client
    totals: dict[str, float]  # each term of the loss, summed over rows
    sums: Tensor  # (classes, width), joined embeddings summed by class; empty unless requested
