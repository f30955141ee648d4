"""A probe copies what one member of an accelerated computation has after its first steps.

It computes nothing: the computation copies what its buffers hold at that step and continues.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from atoll.core.messages import Tensors

__all__ = ["Probe", "Seen"]


@dataclass(frozen=True)
class Seen:
    """Trained weights, and sums of losses, after some steps."""

    weights: Mapping[str, Tensor]
    losses: Mapping[str, Tensor]


@dataclass
class Probe:
    """Asks for what one member has after at most so many steps."""

    member: int  # its place among the jobs
    steps: int
    seen: Seen | None = field(default=None, repr=False)

    def take(self, weights: Tensors, losses: Tensors) -> None:
        """Copy these."""
        copies = ({n: t.detach().clone() for n, t in part.items()} for part in (weights, losses))
        self.seen = Seen(*copies)
