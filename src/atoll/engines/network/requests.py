"""Requests at the end of a run that are of no method, and words that both ends know."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import Tensors

__all__ = ["COMPARE", "FEW_COLUMNS", "LARGEST", "Compare", "Finish"]

COMPARE = "compare"  # the action, in logs and ledgers
LARGEST = 10_000  # bytes of the answer to it
FEW_COLUMNS = "columns with many values"  # that the sites have in common: in a site's refusal


@dataclass(frozen=True)
class Finish:
    """What a site needs to predict by itself when a run on own tables is over."""

    state: Tensors  # of the server
    events: Tensor  # this client's scores, as the record has them: bytes, as they may be many
    facts: Tensor  # of the record, likewise

    @classmethod
    def of(cls, state: Tensors, events: str, facts: str) -> "Finish":
        """The message of these texts."""
        arrays = [np.frombuffer(text.encode(), np.uint8).copy() for text in (events, facts)]
        return cls(state, *map(torch.from_numpy, arrays))


@dataclass(frozen=True)
class Compare:
    """What the server holds at the end of a run, and the variant that is compared with alone."""

    variant: str
    state: Tensors
