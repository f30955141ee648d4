"""A choice of the autotuner: how jobs of one key run."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Choice"]


@dataclass(frozen=True)
class Choice:
    """How jobs of one key run, and why."""

    work: str  # what it is, in short
    members: int
    mode: Literal["loop", "stacked", "captured"]
    reason: str
    difference: float = 0.0  # between the two ways, relative, largest over all weights
    tolerance: float = 0.0
    ratio: float = 0.0  # time of the loop over time of the other way, in the trial
    way: str = ""  # how many members go through one computation
    parts: int = 1  # stacks that members are dealt to: as memory allows, as a cache is large
    rounding: float = 0.0  # between the two ways in the run's own type, which checks allow for
    refuted: str = ""  # where a check during a run found another result than the loop's
