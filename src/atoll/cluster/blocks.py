"""Points of a sweep in blocks: what one task of the cluster runs, and how far it is."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from atoll.runs.config import RunConfig

if TYPE_CHECKING:
    from atoll.runs.sweep import Point

__all__ = ["STATES", "Block", "Table", "blocks", "shape"]

PER_SLOT = 4  # blocks for each CPU slot, so that a slow node and a new one even out
State = Literal["waiting", "running", "done", "failed", "interrupted"]
STATES: tuple[State, ...] = ("waiting", "running", "done", "failed", "interrupted")


@dataclass
class Block:
    """Points that one task runs together, and how far they are."""

    number: int
    points: tuple[int, ...]  # by their number in the sweep
    state: State = "waiting"
    where: str = ""  # the node of the last attempt
    attempts: int = 0
    rounds: int = 0  # that have ended, of all its points
    of: int = 0  # rounds that its points have at most; 0 before the first one
    seconds: float = 0.0  # of the last attempt at its node
    overhead: float = 0.0  # seconds of these that were no training: checks, loading, sending
    choices: Mapping[str, Any] = field(default_factory=dict)  # how jobs were computed

    @property
    def share(self) -> float:
        """How much of it is over, from 0 to 1."""
        if self.state in ("done", "failed"):
            return 1.0
        return min(1.0, self.rounds / self.of) if self.of else 0.0


@dataclass
class Table:
    """The blocks of a sweep while it runs."""

    blocks: Sequence[Block]
    finished: int = 0  # points that had ended before
    began: float = field(default_factory=time.monotonic)

    def count(self, state: State) -> int:
        """How many blocks are in a state."""
        return sum(block.state == state for block in self.blocks)

    @property
    def share(self) -> float:
        """How much of all blocks is over, by their points."""
        points = sum(len(block.points) for block in self.blocks)
        return sum(block.share * len(block.points) for block in self.blocks) / max(1, points)

    @property
    def seconds_left(self) -> float | None:
        """Seconds to go at the speed so far; None before the first round."""
        share, elapsed = self.share, time.monotonic() - self.began
        return elapsed * (1 - share) / share if share > 0 else None


def shape(config: RunConfig) -> str:
    """What points must share to be one stack: all but the seed, the name and decimal numbers."""
    values = dataclasses.asdict(config)
    del values["seed"], values["name"]
    values["method"] = {k: v for k, v in values["method"].items() if not isinstance(v, float)}
    return json.dumps(values, sort_keys=True)


def blocks(
    members: Sequence["Point"], todo: Sequence[int], slots: int, most: int, gpus: bool
) -> list[Block]:
    """Deal points out: blocks of one shape and about one size, for this many slots.

    A GPU gets one block, as large as possible; its node splits the block by its own memory.
    """
    groups: dict[str, list[int]] = {}
    for number in todo:
        groups.setdefault(shape(members[number].config), []).append(number)
    target = max(1, slots * (1 if gpus else PER_SLOT))
    size = max(1, -(-len(todo) // target))
    size = min(size, most) if most else size
    dealt: list[Block] = []
    for group in groups.values():
        for start in range(0, len(group), size):
            dealt.append(Block(len(dealt), tuple(group[start : start + size])))
    return dealt
