"""Digests of a run's files, which reveal later changes. Needs no torch.

A checkpoint has the length and the digest of every file at its moment; digests.json has those of
a finished run. A file that still grows is checked up to the length that is known.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from atoll.core.errors import UserError
from atoll.core.storage import disk_errors, write_whole

__all__ = [
    "DIGESTED",
    "DIGESTS",
    "FINAL",
    "FORMAT",
    "GROWING",
    "STATIC",
    "Extent",
    "Integrity",
    "Rolling",
    "damaged",
    "digest",
    "format_of",
    "read_digests",
    "read_json",
    "write_digests",
]

T = TypeVar("T")

FORMAT = 3  # of a run's folder; runs/convert.py reads older ones
DIGESTED = 2  # the first format with digests
DIGESTS = "digests.json"
GROWING = ("events.jsonl", "times.jsonl", "looks.jsonl")
STATIC = ("config.toml", "facts.json", "recipe.json", "agreed.json")  # written once
FINAL = ("engine.json", "memory.json")  # as they are when the run has ended
REMEDY = "restore it from a copy, or run it again in another folder"


@dataclass(frozen=True)
class Extent:
    """The length of a content and its digest."""

    length: int
    digest: str

    @staticmethod
    def of(content: bytes) -> "Extent":
        """The extent of a whole content."""
        return Extent(len(content), digest(content))


def digest(content: bytes) -> str:
    """The digest of a content, 128 bits as hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Rolling:
    """The extent of a file that grows, updated with what is appended."""

    def __init__(self, content: bytes = b"") -> None:
        self._hash, self.length = hashlib.blake2b(content, digest_size=16), len(content)

    def update(self, content: bytes) -> None:
        """Add appended bytes."""
        self._hash.update(content)
        self.length += len(content)

    @property
    def extent(self) -> Extent:
        """The current length and digest."""
        return Extent(self.length, self._hash.hexdigest())


@dataclass(frozen=True)
class Integrity:
    """The extents of a run's files; empty for a run that has none yet or is of an older format."""

    files: Mapping[str, Extent] = field(default_factory=dict)
    final: bool = False  # whether the run has ended: then no file may be longer

    def check(self, path: Path, content: bytes) -> None:
        """Refuse a content that is not the one that the run wrote."""
        extent = self.files.get(path.name)
        if extent is None:
            return
        grows = not self.final and path.name in GROWING
        covered = content[: extent.length] if grows else content
        if len(covered) < extent.length:
            raise UserError("a file of the record is shorter than it was", str(path), REMEDY)
        if Extent.of(covered) != extent:
            raise UserError("a file of the record was changed after the run", str(path), REMEDY)

    def read(self, path: Path, optional: bool = False) -> bytes | None:
        """The checked content of a file; None for an optional one that the run does not have."""
        if optional and not path.exists():
            if path.name in self.files:
                raise UserError("a file of the record is missing", str(path), REMEDY)
            return None
        with disk_errors(path):
            content = path.read_bytes()
        self.check(path, content)
        return content

    def as_json(self) -> dict[str, Any]:
        """The extents as plain values."""
        return {name: [extent.length, extent.digest] for name, extent in sorted(self.files.items())}

    @staticmethod
    def from_json(body: Mapping[str, Any], final: bool) -> "Integrity":
        """The extents that `as_json` gave; ValueError or TypeError where they are none."""
        files = {str(name): Extent(int(length), str(hex)) for name, (length, hex) in body.items()}
        return Integrity(files, final)


def damaged(path: Path, remedy: str = REMEDY) -> UserError:
    """The error for a file whose content cannot be parsed."""
    return UserError("the file is damaged", str(path), remedy)


def read_json(path: Path, build: Callable[[Any], T], error: UserError | None = None) -> T:
    """What `build` makes of a JSON file; `error` is raised where the content is not as expected."""
    with disk_errors(path):
        content = path.read_bytes()
    try:
        return build(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise error or damaged(path) from cause


def format_of(folder: Path) -> int:
    """The format of a run's folder, from its facts; 1 for folders without digests."""
    return read_json(folder / "facts.json", lambda facts: int(facts.get("format", 1)))


def read_digests(folder: Path) -> Integrity:
    """The contents of digests.json of a finished run; empty for an older format."""
    path = folder / DIGESTS
    if not path.exists():
        if format_of(folder) >= DIGESTED:
            raise UserError("a file of the record is missing", str(path), REMEDY)
        return Integrity(final=True)
    return read_json(path, _checked)


def _checked(body: dict[str, Any]) -> Integrity:
    if body.pop("digest") != _digest_of(body):
        raise ValueError("another digest")
    return Integrity.from_json(body["files"], final=True)


def write_digests(folder: Path, extents: Mapping[str, Extent]) -> None:
    """Write digests.json: these extents, and those of the run's other files as they are now."""
    files = dict(extents)
    for name in (*GROWING, *STATIC, *FINAL):
        path = folder / name
        if name not in files and path.exists():
            with disk_errors(path):
                files[name] = Extent.of(path.read_bytes())
    body: dict[str, Any] = {"format": FORMAT, "files": Integrity(files).as_json()}
    content = json.dumps(body | {"digest": _digest_of(body)}, indent=1).encode() + b"\n"
    write_whole(folder / DIGESTS, content)


def _digest_of(body: Mapping[str, Any]) -> str:
    return digest(json.dumps(body, sort_keys=True).encode())
