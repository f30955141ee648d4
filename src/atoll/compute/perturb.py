"""Exact and perturbed versions of values, for the proof.

A proof runs in double precision, from values that are perturbed for each member independently. A
term that is zero when a run begins (control variates, an anchor equal to the weights, importances)
is not zero then, so it cannot hide a mistake.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.core.rng import Stream, normals
from atoll.core.rows import Rows

__all__ = [
    "ACTUAL",
    "AS_RUN",
    "DRAWS",
    "Draw",
    "flattened",
    "of_member",
    "perturbed",
    "perturbed_rows",
    "stream_of",
    "tiled",
    "typed",
    "typed_rows",
]


@dataclass(frozen=True)
class Draw:
    """How far values are moved, and which signs they may have."""

    scale: float
    signed: bool = False  # constants of a single sign get either sign, by member
    member: int = 0  # whose values they are
    double: bool = True  # in double precision; else in the type that they have


# The first at which the reference is finite is taken: roots, logarithms and ratios among a loss's
# constants may not bear the larger ones.
DRAWS = (Draw(0.1, signed=True), Draw(0.1), Draw(0.01), Draw(0.001))
ACTUAL = (Draw(0.0),)  # the values of a round, as they are
PATTERNS = ((1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1))  # signs of constants by member
AS_RUN = Draw(0.0, double=False)  # in the run's own type too: what rounding alone does


def stream_of(number: int, draw: Draw) -> Stream:
    """The random stream of a member in a proof."""
    return Stream.of("engine").child("proof", number, str(draw))


def flattened(**parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of several parts under the names PART/NAME."""
    return {f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()}


def tiled(rows: Rows, count: int) -> Rows:
    """So many rows, from the first again where there are not as many."""
    if not len(rows):
        return rows
    return rows.at(torch.arange(count, device=rows.y.device) % len(rows))


def typed(tensor: Tensor, draw: Draw) -> Tensor:
    """A tensor in the precision of a draw."""
    return tensor.double() if draw.double and tensor.is_floating_point() else tensor


def typed_rows(rows: Rows, draw: Draw) -> Rows:
    """Rows in the precision of a draw."""
    share = None if rows.share is None else typed(rows.share, draw)
    return replace(rows, x=typed(rows.x, draw), own=typed(rows.own, draw), share=share)


def perturbed_rows(rows: Rows, stream: Stream, draw: Draw) -> Rows:
    """Rows of which no two are equal, where inputs are numbers."""
    inputs = {"x": rows.x, "own": rows.own}
    moved = perturbed(inputs, stream, replace(draw, signed=False), frozenset(inputs))
    share = None if rows.share is None else typed(rows.share, draw)
    return replace(rows, x=moved["x"], own=moved["own"], share=share)


def of_member(draw: Draw, number: int) -> Draw:
    """A draw whose constants have the signs of this member."""
    return replace(draw, member=number) if draw.signed else draw


def perturbed(
    tensors: Mapping[str, Tensor], stream: Stream, draw: Draw, trained: frozenset[str]
) -> Tensors:
    """Every floating-point tensor moved at random, in double precision; others as they are.

    Constants are moved by more than trained weights: a loss bears it, a deep network may not.
    """
    if not draw.scale:
        return {name: typed(t.detach(), draw) for name, t in tensors.items()}
    return {
        name: _moved(t.detach(), stream.child(name), draw, _sign(name, draw, name in trained))
        if t.is_floating_point()
        else t
        for name, t in tensors.items()
    }


def _sign(name: str, draw: Draw, trained: bool) -> int:
    """The sign of a constant in a member: a term behind `strength > 0` is there in some members.

    Two constants have the same pattern over members, or all four pairs of signs in four members.
    0: a weight that is trained, whose sign does not matter.
    """
    if trained or not draw.signed:
        return 0 if trained else 1
    pattern = PATTERNS[Stream.of("signs", name).key % len(PATTERNS)]
    return pattern[draw.member % len(pattern)]


def _moved(tensor: Tensor, stream: Stream, draw: Draw, sign: int) -> Tensor:
    """A tensor of both signs is moved; one of a single sign gets this sign, or stays positive."""
    value, least = tensor.double(), 1.0 if sign else 0.1
    if not value.numel():
        return value
    finite = torch.where(value.isfinite(), value, 0.0)
    spread = draw.scale * (float(finite.square().mean().sqrt()) + least)
    noise = normals(torch.tensor(stream.key, device=value.device), tuple(value.shape))
    moved, low, high = value + spread * noise, float(finite.min()), float(finite.max())
    if sign and draw.signed and not low < 0 < high:
        return moved.abs() * sign
    free = draw.signed and not (low or high)  # a trained weight of zeros
    return moved if free or low < 0 else moved.abs()
