"""Who holds which rows and columns at which stage: index arrays only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["ABSENT", "Holding", "Scenario", "Split"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Holding:
    """What one client has at one stage."""

    train: Array  # rows it learns from
    valid: Array  # rows it chooses by
    own: Array  # columns that it alone holds, beside the common ones
    before: Array | None = None  # rows it learns from before the first round; None: train


_NONE: Final = np.empty(0, dtype=np.int64)
ABSENT: Final = Holding(_NONE, _NONE, _NONE)  # of a client that has not joined yet


@dataclass(frozen=True)
class Scenario:
    """Clients, stages, and the tasks that are tested; holds no values of the data."""

    clients: tuple[str, ...]  # ids, sorted
    holdings: Mapping[str, tuple[Holding, ...]]  # one for each stage
    common: Array  # columns that every client holds
    tests: Mapping[str, tuple[Array, ...]]  # for each client the test rows of each task
    tasks: tuple[str, ...]  # what is tested, by name
    known_at: tuple[int, ...]  # for each task the stage from which it can be tested
    labels_at_server: bool = False  # vertical: clients hold columns, the server holds the labels
    joint_aug: bool = False  # vertical: whole images are changed before they are cut

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.holdings[self.clients[0]])

    def tasks_at(self, stage: int) -> list[int]:
        """The tasks that can be tested at a stage."""
        return [task for task, since in enumerate(self.known_at) if since <= stage]


@dataclass(frozen=True)
class Split:
    """What a split's module offers."""

    options: type
    deal: Callable[[Any, Any, int], Scenario]  # (data set, options, seed) -> who holds what
    vertical: bool = False  # clients hold columns of the same rows, the server holds the labels
