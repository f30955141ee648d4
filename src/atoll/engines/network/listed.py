"""The coordinator's list of sites, reloaded whenever it changes."""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Listed"]

LOOK_SECONDS = 0.5  # seconds between checks of the file


@dataclass
class Listed:
    """Who may take part; a list that cannot be read lets nobody in who was not on the last one."""

    path: Path
    _names: frozenset[str] = frozenset()
    _looked: float = float("-inf")
    _stamp: tuple[int, int] = (0, 0)  # modification time of the file, and its bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refusal(self, name: str) -> str:
        """Why a site is refused; empty if it is on the list."""
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self._looked = time.monotonic()
                self._look()
            return "" if name in self._names else f"'{name[:80]}' is not in the list of sites"

    def _look(self) -> None:
        try:
            about = self.path.stat()
            if (about.st_mtime_ns, about.st_size) == self._stamp:
                return
            self._names = frozenset(map(str, json.loads(self.path.read_bytes())["sites"]))
            self._stamp = (about.st_mtime_ns, about.st_size)
        except (OSError, ValueError, TypeError, KeyError):
            return
