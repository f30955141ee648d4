"""The shared parts of finished tasks, and which of them a client receives for a new task."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from atoll.core.messages import Tensors
from atoll.learning.centres import Task, nearest_tasks
from atoll.learning.weights import prefixed, without

__all__ = ["TaskIndex"]

Row = tuple[float, ...]


class TaskIndex:
    """Sparse parts of finished tasks, and descriptions by which tasks are compared."""

    def __init__(self, keep: int, compare: Callable[[Tensor, Tensor], float] | None) -> None:
        self.keep, self.compare = keep, compare  # without `compare`: every client's last task
        self.adaptive: dict[Task, Tensors] = {}
        self.described: dict[Task, Tensor] = {}

    def chosen(self, ids: Sequence[str], id: str, stage: int) -> tuple[list[Task], list[float]]:
        """The tasks whose parts a client receives, and their scores where they were compared."""
        if self.compare is None:
            return [(stage - 1, other) for other in ids], []
        description = self.described[stage, id]
        past = [task for task in self.adaptive if task[0] < stage]
        return nearest_tasks(
            {task: self.compare(description, self.described[task]) for task in past}, self.keep
        )

    def parts(self, tasks: Sequence[Task]) -> Tensors:
        """The sparse parts of tasks as SLOT/NAME, in this order."""
        codes = [prefixed(str(slot), self.adaptive[task]) for slot, task in enumerate(tasks)]
        return {name: tensor for code in codes for name, tensor in code.items()}

    def tables(
        self, ids: Sequence[str], stage: int
    ) -> tuple[tuple[str, ...], tuple[Row, ...], tuple[Row, ...]]:
        """Names of all past tasks; for each client their slots, and their scores; else NaN."""
        past = sorted(task for task in self.adaptive if task[0] < stage)
        slots, scores = list[Row](), list[Row]()
        for id in ids:
            chosen, scored = self.chosen(ids, id, stage)
            place = {task: float(slot) for slot, task in enumerate(chosen)}
            score = dict(zip(chosen, scored, strict=False))
            slots.append(tuple(place.get(task, math.nan) for task in past))
            scores.append(tuple(score.get(task, math.nan) for task in past))
        names = tuple(f"{other} task {number}" for number, other in past)
        return names, tuple(slots), tuple(scores)

    def state(self) -> Tensors:
        """All of it as named tensors."""
        tensors: Tensors = {}
        for (stage, id), code in self.adaptive.items():
            tensors |= prefixed(f"adaptive/{stage}/{id}", code)
        for (stage, id), vectors in self.described.items():
            tensors[f"described/{stage}/{id}"] = vectors
        return tensors

    def restore(self, state: Tensors) -> None:
        """Continue from a state."""
        self.adaptive, self.described = {}, {}
        for name, tensor in without("adaptive", state).items():
            stage, id, kind = name.split("/")
            self.adaptive.setdefault((int(stage), id), {})[kind] = tensor
        for name, tensor in without("described", state).items():
            stage, id = name.split("/")
            self.described[int(stage), id] = tensor
