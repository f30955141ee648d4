"""Rows of data as training reads them; shared by the data and the learning packages."""

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["PIECE", "Bounds", "Public", "Rows", "distinct", "pieces", "room"]

PIECE: Final = 16  # entries of a sequence that are processed together


@dataclass(frozen=True)
class Bounds:
    """How much room the sequences of a batch need, known before it is drawn: shapes are fixed."""

    pieces: int  # of the sequences of all members, at most
    tokens: int  # distinct ones of a member's sequences, at most


def pieces(x: Tensor) -> Tensor:
    """How many pieces each sequence fills, 0 being padding: (..., rows, length) -> (..., rows)."""
    place = torch.arange(1, x.shape[-1] + 1, device=x.device)
    return torch.where(x != 0, place, 0).amax(-1) // PIECE + 1


def distinct(x: Tensor, tokens: int) -> Tensor:
    """Which of so many tokens occur in sequences: (..., rows, length) -> (..., tokens), 0 or 1."""
    marks = torch.zeros((*x.shape[:-2], tokens), dtype=torch.int32, device=x.device)
    return marks.scatter_(-1, x.flatten(-2).long(), 1)


def room(x: Tensor) -> Bounds:
    """The room that these sequences need: (members, rows, length)."""
    tokens = distinct(x, int(x.amax()) + 1).sum(-1)
    return Bounds(int(pieces(x).sum()), int(tokens.amax()))


@dataclass(frozen=True)
class Rows:
    """Rows on the device: common inputs, inputs of one site alone, labels.

    A stack of clients has one more axis in front of every tensor.
    """

    x: Tensor  # (rows, common columns), or (rows, channels, height, width)
    own: Tensor  # (rows, own columns)
    y: Tensor  # (rows,)
    share: Tensor | None = None  # (rows,) weight of a row in the mean; 0 where a batch is padded
    bounds: Bounds | None = field(
        default=None, kw_only=True
    )  # of sequences, where shapes are fixed

    def __len__(self) -> int:
        """The number of rows."""
        return self.y.shape[-1]

    @property
    def sequences(self) -> bool:
        """Whether rows are sequences of tokens, padded with zeros at their end."""
        return not self.x.is_floating_point()

    def at(self, index: Tensor | slice) -> "Rows":
        """The rows with these numbers, in this order."""
        share = None if self.share is None else self.share[index]
        return Rows(self.x[index], self.own[index], self.y[index], share)

    @property
    def all(self) -> Tensor:
        """Common and own columns side by side."""
        return torch.cat([self.x, self.own], -1) if self.own.shape[-1] else self.x


@dataclass(frozen=True)
class Public:
    """Images without labels that every part has, in the same order."""

    x: Tensor  # (rows, channels, height, width), 0 to 1
    mean: Tensor  # (channels, 1, 1), to be taken off
    deviation: Tensor  # (channels, 1, 1), to be divided by
    fingerprint: str  # a hash of content and order
    cache: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)  # a cache

    def __len__(self) -> int:
        """The number of images."""
        return len(self.x)
