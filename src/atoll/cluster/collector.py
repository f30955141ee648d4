"""Receives what nodes send: the state of each block, and checkpoints and records as bytes.

It runs as an actor on the driver's node; arguments and results are only `str` and `bytes`.
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
    """The driver's view of all blocks.

    Each retry of a block is a new attempt. The collector refuses data from older attempts, so a
    node that was presumed dead cannot overwrite the work of its successor.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.blocks: dict[str, dict[str, Any]] = {}
        self.stopping = False

    def begin(self, block: str, attempt: str, where: str) -> str:
        """Register the start of an attempt of a block on a node."""
        before = self.blocks.get(block, {"attempts": 0})
        count = before["attempts"] + 1
        self.blocks[block] = {"attempt": attempt, "where": where, "attempts": count}
        return STOP if self.stopping else GO

    def fetch(self, path: str) -> bytes:
        """The saved files of a point as a parcel; empty if there are none."""
        folder = self._point(path)
        return pack(folder) if (folder / "config.toml").exists() else b""

    def put(self, block: str, attempt: str, path: str, parcel: bytes) -> str:
        """Write a node's files of a point; never overwrites a finished point."""
        if not self._is_current(block, attempt):
            return REPLACED
        folder = self._point(path)
        if not (folder / "result.json").exists():
            unpack(parcel, folder)
        return STOP if self.stopping else GO

    def report(self, block: str, attempt: str, rounds: str, of: str) -> str:
        """Update a block's number of completed rounds and its maximum number of rounds."""
        if not self._is_current(block, attempt):
            return REPLACED
        self.blocks[block] |= {"rounds": int(rounds), "of": int(of)}
        return STOP if self.stopping else GO

    def stop(self) -> str:
        """Ask all blocks to save their state and end."""
        self.stopping = True
        return STOP

    def states(self) -> str:
        """The node, attempts and progress of each started block, as JSON."""
        return json.dumps(self.blocks)

    def _is_current(self, block: str, attempt: str) -> bool:
        """Whether no later attempt has started; an unknown attempt counts as current.

        A restarted actor knows no attempts.
        """
        status = self.blocks.setdefault(block, {"attempt": attempt, "where": "", "attempts": 1})
        return bool(status["attempt"] == attempt)

    def _point(self, path: str) -> Path:
        """The folder of a point; raises ValueError if it is outside the sweep's folder."""
        folder = (self.folder / path).resolve()
        if not folder.is_relative_to(self.folder.resolve()):
            raise ValueError(path)
        return folder
