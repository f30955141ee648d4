"""Weights and rows of all members of a stack, one tensor for each name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.core.rows import Bounds, Rows

__all__ = ["Buffer", "Bundle", "by_member", "load", "place_of", "stacked"]


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the last axis of the longest, zeros at its end."""
    widest = max(t.shape[-1] for t in tensors) if tensors[0].dim() else 0
    return [
        torch.nn.functional.pad(t, (0, widest - t.shape[-1]))
        if t.dim() and t.shape[-1] < widest
        else t
        for t in tensors
    ]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(_padded(tensors))


class Buffer:
    """One tensor of all members; those with a shorter last axis have zeros at its end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.whole = torch.zeros_like(stacked(tensors))
        widths = [t.shape[-1] if t.dim() else 0 for t in tensors]
        self.widths = widths if len(set(widths)) > 1 else []
        self.places = self.parts(self.whole)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Each member's part of such a tensor."""
        parts = whole.unbind(0)
        if not self.widths:
            return list(parts)
        return [part[..., :width] for part, width in zip(parts, self.widths, strict=True)]

    def copies(self) -> list[Tensor]:
        """What each member has now, apart from what comes later."""
        return self.parts(self.whole.clone())


def load(
    buffers: Mapping[str, Buffer],
    brought: Sequence[Mapping[str, Tensor]],
    outputs: Sequence[Mapping[str, Tensor]],
) -> None:
    """Copy what the members bring into the buffers, in few kernels; zeros for what is missing.

    Tensors that the stack returned last, and that come back unchanged, are in the buffers already.
    """
    places, tensors = [], []
    for name, buffer in buffers.items():
        new = [tensor.get(name) for tensor in brought]
        if outputs and all(n is g.get(name) for n, g in zip(new, outputs, strict=True)):
            continue
        shared = new[0]
        if shared is not None and not buffer.widths and all(tensor is shared for tensor in new):
            buffer.whole.copy_(shared)  # all members bring the very same tensor
            continue
        if any(tensor is None for tensor in new):
            buffer.whole.zero_()
        pairs = [(p, t) for p, t in zip(buffer.places, new, strict=True) if t is not None]
        places += [place for place, _ in pairs]
        tensors += [tensor for _, tensor in pairs]
    if places:
        torch._foreach_copy_(places, tensors)


def by_member(columns: Mapping[str, Sequence[Tensor]], count: int) -> list[Tensors]:
    """By name each member's tensor -> for each member its tensors by name."""
    rows = zip(*columns.values(), strict=True) if columns else ([()] * count)
    return [dict(zip(columns, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class Bundle:
    """The rows of all members end to end; members that share rows share them here."""

    x: Tensor
    own: Tensor
    y: Tensor
    share: Tensor | None  # weights of rows; None: all count the same
    first: tuple[int, ...]  # where each member's rows begin

    @staticmethod
    def of(rows: Sequence[Rows], into: "Bundle | None" = None) -> "Bundle":
        """A bundle of these rows; reuses the tensors of `into` if the layout is the same."""
        places: dict[tuple[int, ...], int] = {}
        first, distinct, count = [], [], 0
        for part in rows:
            key = place_of(part)
            if key not in places:
                places[key], count = count, count + len(part)
                distinct.append(part)
            first.append(places[key])
        x, own, y = (
            [r.x for r in distinct],
            _padded([r.own for r in distinct]),
            [r.y for r in distinct],
        )
        # all have some, or none
        shares = [part.share for part in distinct if part.share is not None]
        shape = (count, *x[0].shape[1:]), (count, own[0].shape[-1])
        if into is None or (into.first, into.x.shape, into.own.shape) != (tuple(first), *shape):
            share = torch.cat(shares) if shares else None
            return Bundle(torch.cat(x), torch.cat(own), torch.cat(y), share, tuple(first))
        for parts, whole in ((x, into.x), (own, into.own), (y, into.y), (shares, into.share)):
            if whole is not None:
                torch.cat(parts, out=whole)
        return into

    def at(self, index: Tensor, share: Tensor, bounds: Bounds | None = None) -> Rows:
        """The rows with these numbers: (members, batch); `share` is 0 where a batch is padded."""
        flat, lead = index.flatten(), index.shape
        if self.share is not None:
            share = share * self.share[flat].view(lead)
        x, own, y = self.x[flat], self.own[flat], self.y[flat]
        return Rows(
            x.view(*lead, *x.shape[1:]), own.view(*lead, -1), y.view(lead), share, bounds=bounds
        )

    @property
    def sequences(self) -> bool:
        """Whether rows are sequences of tokens."""
        return Rows(self.x, self.own, self.y).sequences


def place_of(rows: Rows) -> tuple[int, ...]:
    """The address of rows in memory."""
    share = 0 if rows.share is None else rows.share.data_ptr()
    return rows.x.data_ptr(), rows.own.data_ptr(), rows.y.data_ptr(), share, len(rows)
