"""Receives what nodes send: the state of each block, and checkpoints and records as bytes.

It runs on the driver's node, as an actor, and takes and gives `str` and `bytes` only.
"""

import json
from pathlib import Path
from typing import Any

from atoll.cluster.parcel import pack, unpack

__all__ = ["GO", "REPLACED", "STOP", "Collector"]

GO = "go"
STOP = "stop"  # the user asks to stop: save the state and end
REPLACED = "replaced"  # another attempt of the block has begun: end and send nothing


class Collector:
    """The driver's side of all blocks.

    A block that is tried again has a new attempt; what an older one sends is refused, so that a
    node that was believed dead cannot write over the work of its successor.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.blocks: dict[str, dict[str, Any]] = {}
        self.stopping = False

    def begin(self, block: str, attempt: str, where: str) -> str:
        """An attempt of a block has begun at a node."""
        before = self.blocks.get(block, {"attempts": 0})
        count = before["attempts"] + 1
        self.blocks[block] = {"attempt": attempt, "where": where, "attempts": count}
        return STOP if self.stopping else GO

    def fetch(self, path: str) -> bytes:
        """What there is of a point."""
        folder = self._point(path)
        return pack(folder) if (folder / "config.toml").exists() else b""

    def put(self, block: str, attempt: str, path: str, parcel: bytes) -> str:
        """Write what a node has of a point; a point that has ended is not written again."""
        if not self._is_current(block, attempt):
            return REPLACED
        folder = self._point(path)
        if not (folder / "result.json").exists():
            unpack(parcel, folder)
        return STOP if self.stopping else GO

    def report(self, block: str, attempt: str, rounds: str, of: str) -> str:
        """So many rounds of the points of a block have ended, of at most so many."""
        if not self._is_current(block, attempt):
            return REPLACED
        self.blocks[block] |= {"rounds": int(rounds), "of": int(of)}
        return STOP if self.stopping else GO

    def stop(self) -> str:
        """Ask all blocks to save their state and end."""
        self.stopping = True
        return STOP

    def states(self) -> str:
        """For each block that has begun: where, how often, and how far."""
        return json.dumps(self.blocks)

    def _is_current(self, block: str, attempt: str) -> bool:
        """Whether no later attempt has begun; one that is not known is current.

        An actor that was restarted knows none.
        """
        status = self.blocks.setdefault(block, {"attempt": attempt, "where": "", "attempts": 1})
        return bool(status["attempt"] == attempt)

    def _point(self, path: str) -> Path:
        """The folder of a point; never outside that of the sweep."""
        folder = (self.folder / path).resolve()
        if not folder.is_relative_to(self.folder.resolve()):
            raise ValueError(path)
        return folder
