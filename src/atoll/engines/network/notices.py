"""Notices of NVFlare's process to the command that started it: lines of a file in the kit."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Notice", "Notices", "readable"]

FILE = "notices.jsonl"
MOST_BYTES = 1 << 20  # maximum bytes of the file; later notices are only in the log
MOST_WORDS = 300  # maximum characters of one notice


def readable(words: str) -> str:
    """Text from an untrusted source as one line of printable characters."""
    return words[:MOST_WORDS].encode("unicode_escape").decode()


@dataclass(frozen=True)
class Notice:
    """An event that the operator of a party should see."""

    kind: str  # key, second, refused, taken, large
    words: str


class Notices:
    """The notices of one kit: one process writes them, one command reads them."""

    def __init__(self, kit: Path) -> None:
        self.path, self._read = kit / FILE, 0

    def clear(self) -> None:
        """Remove all notices."""
        self.path.unlink(missing_ok=True)
        self._read = 0

    def write(self, kind: str, words: str) -> None:
        """Add a notice; ignores a full disk."""
        line = json.dumps({"time": time.time(), "kind": kind, "words": readable(words)})
        with suppress(OSError):
            if not self.path.exists() or self.path.stat().st_size < MOST_BYTES:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")

    def new(self) -> Iterator[Notice]:
        """The notices since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, TypeError, KeyError):
                fields = json.loads(line)
                yield Notice(str(fields["kind"]), str(fields["words"]))
