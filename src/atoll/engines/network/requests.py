"""Requests at the end of a run that belong to no method, and words known to both ends."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import Tensors

__all__ = ["COMPARE", "FEW_COLUMNS", "LARGEST", "Compare", "Finish"]

COMPARE = "compare"  # the action, in logs and ledgers
LARGEST = 10_000  # maximum bytes of its answer
FEW_COLUMNS = "columns with many values"  # that the sites have in common: in a site's refusal


@dataclass(frozen=True)
class Finish:
    """What a site needs for predictions after a run on own tables."""

    state: Tensors  # of the server
    events: Tensor  # this client's scores from the record, as bytes, since they may be many
    facts: Tensor  # of the record, likewise

    @classmethod
    def of(cls, state: Tensors, events: str, facts: str) -> "Finish":
        """The message of these texts."""
        arrays = [np.frombuffer(text.encode(), np.uint8).copy() for text in (events, facts)]
        return cls(state, *map(torch.from_numpy, arrays))


@dataclass(frozen=True)
class Compare:
    """The server's final state, and the variant to compare with training alone."""

    variant: str
    state: Tensors
