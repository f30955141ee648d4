"""A look at what one member of an accelerated computation has after its first steps.

Nothing is computed for it: the computation copies what its buffers hold at that step and goes on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.core.messages import Tensors

__all__ = ["Probe", "Seen", "distance"]


@dataclass(frozen=True)
class Seen:
    """Weights that move, and sums of losses, after some steps."""

    weights: Mapping[str, Tensor]
    losses: Mapping[str, Tensor]


@dataclass
class Probe:
    """Asks for what one member has after at most so many steps."""

    member: int  # its place among the jobs
    steps: int
    seen: Seen | None = field(default=None, repr=False)

    def take(self, weights: Tensors, losses: Tensors) -> None:
        """Keep copies of these."""
        copies = ({n: t.detach().clone() for n, t in part.items()} for part in (weights, losses))
        self.seen = Seen(*copies)


def distance(start: Mapping[str, Tensor], expected: Seen, actual: Seen) -> tuple[float, float]:
    """How far two members are apart: in their weights, relative to how far they went from the
    start, and in their losses.

    Lengths of all weights together are compared, not single entries: in single precision Adam's
    first steps follow the sign of rounding errors where a gradient is next to nothing. Results that
    are not finite on both sides count as equal, since nothing can be told from them.
    """
    apart = _length({n: t - actual.weights[n] for n, t in expected.weights.items()})
    moved = _length({n: t - start[n] for n, t in expected.weights.items()})
    size = _length(dict(expected.weights))
    losses = [
        _relative(float((t - actual.losses[n]).abs().max()), float(t.abs().max()), 1e-3)
        for n, t in expected.losses.items()
        if t.numel()
    ]
    if not math.isfinite(moved):
        both = not all(bool(t.isfinite().all()) for t in actual.weights.values())
        return (0.0, 0.0) if both else (math.inf, math.inf)
    return _relative(apart, moved, 1e-4 * size), max(losses, default=0.0)


def _length(tensors: Mapping[str, Tensor]) -> float:
    squares = [t.double().square().sum() for t in tensors.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _relative(apart: float, size: float, least: float) -> float:
    if apart == 0.0:
        return 0.0
    found = apart / max(size, least, 1e-30)
    return math.inf if math.isnan(found) else found
