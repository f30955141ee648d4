"""The answered requests of a run at a site, with digests of their weights; a restore keeps them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.integrity import read_json
from atoll.core.record import write_whole

__all__ = ["Answered"]


@dataclass
class Answered:
    """The digests of the weights in the answered requests of a run."""

    path: Path
    digests: dict[str, list[str]] = field(default_factory=dict)  # by request and moment
    repeats: int = 0  # number of answers repeated with other weights

    @classmethod
    def read(cls, path: Path) -> "Answered":
        """Read the file that `add` wrote; empty if there is no file."""
        if not path.exists():
            return cls(path)
        what = "the list of answered rounds is damaged"
        error = UserError(what, str(path), "restore it from a copy")
        return read_json(path, lambda b: cls(path, dict(b["digests"]), int(b["repeats"])), error)

    def other(self, key: str, digest: str) -> bool:
        """Whether this request was answered before with other weights."""
        return digest not in self.digests.get(key, [digest])

    def add(self, asked: dict[str, str]) -> None:
        """Add the requests that are being answered."""
        new = {key: one for key, one in asked.items() if one not in self.digests.get(key, [])}
        for key, digest in new.items():
            self.repeats += self.other(key, digest)
            self.digests.setdefault(key, []).append(digest)
        if new:
            body = {"digests": self.digests, "repeats": self.repeats}
            write_whole(self.path, json.dumps(body).encode())
