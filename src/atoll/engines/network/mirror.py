"""A copy of an egress log's end outside the store, which detects a missing log.

The copy is next to the site's kit. It contains the number of lines, the last hash, the bytes that
have left, and the used budgets over all runs. If the system supports it, the log itself
is append-only while a site has joined.
"""

import array
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.record import disk_errors

__all__ = ["ENVIRONMENT", "End", "Mirror", "append_only"]

ENVIRONMENT = "ATOLL_MIRROR"  # variable with the path of the copy for a site's job process
GET_FLAGS, SET_FLAGS, APPEND = 0x80086601, 0x40086602, 0x20  # flag of Linux file systems


@dataclass(frozen=True)
class End:
    """The end of a log."""

    lines: int = 0
    hash: str = ""
    left: int = 0  # bytes sent, over all lines
    size: int = 0  # size of the log in bytes
    spent: dict[str, list[int]] = field(default_factory=dict)  # by data; see Spent


@dataclass(frozen=True)
class Mirror:
    """The copy of a log's end."""

    path: Path

    @classmethod
    def of_kit(cls, folder: Path) -> "Mirror":
        """The mirror of a kit: a file next to the kit's folder."""
        home = folder.resolve()
        return cls(home.with_name(f"{home.name}-egress.json"))

    @classmethod
    def of_store(cls, store: Path) -> "Mirror | None":
        """The mirror for a store next to its kit, as `atoll network init` names both; else None."""
        home = store.resolve()
        path = home.with_name(f"{home.name.removesuffix('-store')}-egress.json")
        return cls(path) if home.name.endswith("-store") and path.exists() else None

    @property
    def absent(self) -> UserError:
        """The error for a log with lines but without a mirror."""
        what = "no copy of the egress log's end is here: a log that was cut would not be noticed"
        remedy = (
            f"restore {self.path.name}; or check the log with atoll egress, and write down that"
        )
        return UserError(what, str(self.path), f"{remedy} you accept it: atoll join --accept-log")

    def read(self) -> End:
        """The last written end; empty if there is none."""
        with disk_errors(self.path):
            content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            return End()
        try:
            return End(**json.loads(content))
        except (ValueError, TypeError) as error:
            raise UserError(
                "the copy of the egress log's end is damaged", str(self.path),
                "look at the log with atoll egress; remove the copy if the log is whole",
            ) from error  # fmt: skip

    def write(self, end: End) -> None:
        """Write the end of the log."""
        part = self.path.with_name(f".{self.path.name}.part")
        with disk_errors(self.path):
            part.write_text(json.dumps(vars(end)))
            part.replace(self.path)

    def check(self, log: Path, lines: int, hash_there: str, end: End) -> None:
        """Refuse a log that is shorter than the mirror, or a different log."""
        if lines < end.lines:
            what = f"the egress log has {lines:,} lines and had {end.lines:,}"
            raise UserError(what, str(log), self.remedy)
        if end.lines and hash_there != end.hash:
            what = f"line {end.lines:,} of the egress log is not the one that was written"
            raise UserError(what, str(log), self.remedy)

    def watch(self, log: Path) -> None:
        """Refuse to continue with a log that has become shorter; cheap enough to call often."""
        with disk_errors(log):
            size = log.stat().st_size if log.exists() else 0
        if size and not self.path.exists():
            raise self.absent
        if size < self.read().size:
            what = "the egress log has vanished or become shorter while the site had joined"
            raise UserError(what, str(log), self.remedy)

    @property
    def remedy(self) -> str:
        """The remedy for a changed log."""
        return f"restore the log; to begin anew, move the store and {self.path.name} away together"


def append_only(path: Path, on: bool) -> bool:
    """Make a file append-only, or writable again; return whether the system supports it."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            flags = array.array("l", [0])
            fcntl.ioctl(handle, GET_FLAGS, flags)
            flags[0] = flags[0] | APPEND if on else flags[0] & ~APPEND
            fcntl.ioctl(handle, SET_FLAGS, flags)
        finally:
            os.close(handle)
        return True
    return False
