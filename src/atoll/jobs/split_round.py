"""A round of a split network, described once for all parts.

A server describes its steps (`SplitJob`), each client lends its half (`Lent`). The reference is the
exchange message by message in the method itself; `compute/split_rounds.py` does a round as one
computation where one process holds the halves of all parts.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.messages import Learn, Tensors
from atoll.core.rng import Stream, hashes
from atoll.jobs.identity import identities, shapes
from atoll.learning.models import Architecture
from atoll.learning.split import Agg, Batches, chunks

__all__ = ["Lent", "SplitJob", "SplitResult", "Step", "draws", "would_be"]


class Step(NamedTuple):
    """What a step of the server's half reads, beside weights and what is given for the round."""

    joint: Tensor  # (rows, width), the joined embeddings
    before: Tensor  # the same by the old halves; no rows where they are not sent
    y: Tensor  # (rows,)
    key: Tensor  # of the step's draws


Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Step], dict[str, Tensor]]


def draws(key: Tensor, number: int) -> Tensor:
    """A further key below this one."""
    return hashes(key, torch.full_like(key, number))


@dataclass(frozen=True)
class Lent:
    """A client's half and its rows, for the steps of a round."""

    function: Architecture
    weights: Tensors
    x: Tensor  # (rows, ...)
    rate: float
    frozen: Tensors | None = None  # entries that keep their value
    still: bool = False  # whether these are all
    before: Tensors = field(default_factory=dict)  # the weights at the end of the last stage
    shows: bool = False  # whether the embeddings by those weights are sent
    pull: float = 0.0  # weight of the distance to them
    digits: int = 0  # of what is sent
    dropped: float = 0.0  # share of the embedding
    keys: tuple[int, ...] = ()  # of that dropout, one for each step

    @property
    def form(self) -> Hashable:
        """Halves of equal form can be stacked."""
        how = (self.rate, self.frozen is None, self.still, bool(self.before), self.shows)
        x = (tuple(self.x.shape), str(self.x.dtype))
        return (self.function, x, *how, self.pull, self.digits, self.dropped)


@dataclass(frozen=True)
class SplitJob:
    """The steps of a round: the server's half, its loss, and which rows each step takes."""

    ids: tuple[str, ...]  # the clients that take part
    places: tuple[int, ...]  # of each in a concatenation
    parties: int  # pieces of a concatenation
    y: Tensor  # the label of each row
    batches: Batches
    steps: int
    weights: Tensors
    given: Tensors
    loss: Loss  # "loss" among what it gives is descended
    stream: Stream  # of each step's draws
    rate: float
    agg: Agg = "sum"
    clip: float = 0.0
    noise: float = 0.0
    turns: int = 1  # 2: each row is also shown turned, as a class of its own
    summed: int = 0  # classes, where the embeddings of each class are wanted; else 0
    lent: tuple[Lent, ...] = ()  # by client

    def key(self) -> Hashable | None:
        """Halves, shapes and loss; rounds with equal keys can be one computation."""
        loss = identities(self.functions)
        if loss is None:
            return None
        tensors = {**self.weights, **{f"given {n}": t for n, t in self.given.items()}}
        halves = tuple(lent.form for lent in self.lent)
        rows = (self.batches.rows, self.batches.size, self.steps, self.turns, self.summed)
        how = (self.rate, self.agg, self.places, self.parties, self.clip, self.noise)
        return ("passes", loss, shapes(tensors), halves, rows, how, str(self.y.device))

    @property
    def functions(self) -> tuple[Loss, ...]:
        """The loss, as the only one."""
        return (self.loss,)

    def run(self) -> None:
        """Alone, the exchange goes message by message: nothing is done here."""


@dataclass(frozen=True)
class SplitResult:
    """What the steps of a round gave."""

    weights: Tensors
    halves: tuple[Tensors, ...]  # by client
    totals: dict[str, float]  # each term of the loss, summed over rows
    sums: Tensor  # (classes, width) of the embeddings, where wanted


def would_be(work: SplitJob, width: int, dtype: torch.dtype) -> Iterator[tuple[Learn, Tensor, int]]:
    """The requests of a round and the embeddings of their replies, without values: for a ledger.

    Those of one size are given once, with how many there are.
    """
    sizes = chunks([len(work.y)] * (work.steps // len(work.batches)), work.batches.size)
    sizes = [size * work.turns for size in sizes]
    forms = [
        (last, now, len(str(step)), step < work.steps)
        for step, (last, now) in enumerate(zip([0, *sizes], [*sizes, 0], strict=True))
    ]
    for (last, now, digits, more), count in Counter(forms).items():
        gradient, embedding = (
            torch.empty((rows, width), dtype=dtype, device="meta") for rows in (last, now)
        )
        yield Learn(work.batches.key, 10 ** (digits - 1), more, gradient), embedding, count
