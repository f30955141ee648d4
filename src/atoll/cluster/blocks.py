"""Groups the points of a sweep into blocks, the unit of work and progress on a cluster."""

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

PER_SLOT = 4  # blocks per CPU slot, to balance the load of slow and new nodes
State = Literal["waiting", "running", "done", "failed", "interrupted"]
STATES: tuple[State, ...] = ("waiting", "running", "done", "failed", "interrupted")


@dataclass
class Block:
    """Points that one task runs together, with their progress."""

    number: int
    points: tuple[int, ...]  # indices of points in the sweep
    state: State = "waiting"
    where: str = ""  # the node of the last attempt
    attempts: int = 0
    rounds: int = 0  # completed rounds, summed over its points
    of: int = 0  # maximum number of rounds of its points; 0 before the first round
    seconds: float = 0.0  # duration of the last attempt on its node
    overhead: float = 0.0  # seconds of these not spent training: checks, loading, sending
    choices: Mapping[str, Any] = field(default_factory=dict)  # how jobs were computed

    @property
    def share(self) -> float:
        """The completed fraction, from 0 to 1."""
        if self.state in ("done", "failed"):
            return 1.0
        return min(1.0, self.rounds / self.of) if self.of else 0.0


@dataclass
class Table:
    """The blocks of a sweep while it runs."""

    blocks: Sequence[Block]
    finished: int = 0  # points that had finished earlier
    began: float = field(default_factory=time.monotonic)

    def count(self, state: State) -> int:
        """The number of blocks in a state."""
        return sum(block.state == state for block in self.blocks)

    @property
    def share(self) -> float:
        """The completed fraction of all blocks, weighted by their number of points."""
        points = sum(len(block.points) for block in self.blocks)
        return sum(block.share * len(block.points) for block in self.blocks) / max(1, points)

    @property
    def seconds_left(self) -> float | None:
        """The estimated remaining seconds at the current speed; None before the first round."""
        share, elapsed = self.share, time.monotonic() - self.began
        return elapsed * (1 - share) / share if share > 0 else None


def shape(config: RunConfig) -> str:
    """The key of points that fit into one stack: all options but seed, name and float options."""
    values = dataclasses.asdict(config)
    del values["seed"], values["name"]
    values["method"] = {k: v for k, v in values["method"].items() if not isinstance(v, float)}
    return json.dumps(values, sort_keys=True)


def blocks(
    members: Sequence["Point"], todo: Sequence[int], slots: int, most: int, gpus: bool
) -> list[Block]:
    """Split points into blocks of equal shape and similar size for this many slots.

    Each GPU gets one block, as large as possible; its node splits the block to fit its memory.
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
