"""Rows of data as training sees them; both the data and the learning layer speak of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bounds", "Public", "Rows"]


@dataclass(frozen=True)
class Bounds:
    """How much room the texts of a batch need, known before it is drawn: shapes can be fixed."""

    pieces: int  # of the texts of all members, at most
    words: int  # different ones of a member's texts, at most


@dataclass(frozen=True)
class Rows:
    """Rows on the device: common inputs, inputs of one site alone, labels.

    A stack of clients has one more axis in front of every tensor.
    """

    x: Tensor  # (rows, common columns), or (rows, channels, height, width)
    own: Tensor  # (rows, own columns)
    y: Tensor  # (rows,)
    share: Tensor | None = None  # (rows,) how much a row counts, where some stand in for none
    bounds: Bounds | None = field(default=None, kw_only=True)  # of texts, where shapes are fixed

    def __len__(self) -> int:
        """The number of rows."""
        return self.y.shape[-1]

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
    made: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)  # a cache

    def __len__(self) -> int:
        """The number of images."""
        return len(self.x)
