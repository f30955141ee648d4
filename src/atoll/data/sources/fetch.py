"""Files of public data sets: look in the data folder, else download once, verify, keep.

A file whose sha256 (or at least md5) has been published is pinned: any other content is refused.
Where nobody has published one (`sha256=None`) the first download is trusted, and so may be a file
that was put there by hand (`trust`): its sha256 is written beside it and every later load must
agree, so a change is seen, but a wrong first copy is caught only by the checks of rows, columns and
classes.
"""

import hashlib
import http.client
import os
import ssl
import struct
import tarfile
import tomllib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from atoll.core.errors import EXIT_DATA_MISSING, UserError

__all__ = [
    "File", "Group", "find", "folder", "obtain", "own", "reading", "refused", "registry", "trust",
]  # fmt: skip

TIMEOUT_SECONDS = 30.0
BLOCK = 1 << 20  # bytes read at once
DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, NotImplementedError),  # pyarrow's too
    *(struct.error, zlib.error, zipfile.BadZipFile, tarfile.TarError),
)  # what readers raise on a file that is cut, changed or of another format


@dataclass(frozen=True)
class File:
    """One file of a data set: its place in the data folder, its hash, where it can be had."""

    path: str  # below the data folder, with forward slashes
    sha256: str | None = None  # None: nobody has published one
    url: str = ""  # the official source; empty: there is no single file to download
    page: str = ""  # where it is described, for a file that must be put there by hand
    md5: str = ""  # where only that has been published


Group = tuple[File, ...]  # files that are read together


def registry(kind: str) -> dict[str, tuple[Group, ...]]:
    """The files of all public data sets of a kind; alternatives of a set, the best first."""
    content = (files("atoll") / "data" / "sources" / "registry.toml").read_text(encoding="utf-8")
    return {
        name: tuple(tuple(File(**file) for file in group) for group in groups)
        for name, groups in tomllib.loads(content)[kind].items()
    }


def folder() -> Path:
    """The folder of all data: ATOLL_DATA, else the user's cache folder."""
    if path := os.environ.get("ATOLL_DATA"):
        return Path(path).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "atoll"


def find(names: Sequence[str]) -> Path | None:
    """The first of these files that is in the data folder."""
    paths = [folder() / name for name in names]
    return next((path for path in paths if path.is_file()), None)


def obtain(name: str, groups: Sequence[Group]) -> list[Path]:
    """The verified files of the first group that is there, else that can be downloaded."""
    for group in groups:
        if all(find([file.path]) for file in group):
            return [_verified(file) for file in group]
    for group in groups:
        if all(file.url for file in group):
            return [_verified(file) if find([file.path]) else _download(file) for file in group]
    file = groups[0][0]
    raise UserError(
        f"data set '{name}' is not here: no file {_names(groups)}",
        f"looked in {folder()}",
        f"put {file.path} there (see {file.page}) or point ATOLL_DATA at a folder that has it",
        EXIT_DATA_MISSING,
    )


def _names(groups: Sequence[Group]) -> str:
    return " or ".join(" + ".join(file.path for file in group) for group in groups)


def _hash(path: Path, kind: str = "sha256") -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _beside(path: Path) -> Path:
    """Where the hash of a file without a published one is kept."""
    return path.with_name(path.name + ".sha256")


def _verified(file: File) -> Path:
    """The file in the data folder, if its content is what it must be."""
    path = folder() / file.path
    try:
        hash_file = _beside(path)
        expected = file.sha256 or (
            hash_file.read_text().split()[0] if hash_file.is_file() else None
        )
        if expected is None and file.md5:
            return _agrees(path, "md5", _hash(path, "md5"), file.md5)
        if expected is None:
            return path
        actual = _hash(path)
    except (OSError, IndexError) as error:
        raise refused(path, f"cannot be checked: {error}") from error
    return _agrees(path, "sha256", actual, expected)


def trust(path: Path) -> None:
    """Keep the hash of a file that was put there by hand and has just been read without fault."""
    with suppress(OSError):  # a folder that cannot be written: the next load trusts it too
        if not _beside(path).exists():
            _beside(path).write_text(f"{_hash(path)}  {path.name}\n")


def _agrees(path: Path, kind: str, actual: str, expected: str) -> Path:
    if actual != expected:
        raise refused(path, f"has {kind} {actual}, expected {expected}")
    return path


def _download(file: File) -> Path:
    """Fetch, check, then rename into place: no half file is ever seen under the final name."""
    path = folder() / file.path
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        actual = _receive(file.url, part)
        if file.sha256 not in (None, actual):
            raise refused(path, f"came with sha256 {actual}, expected {file.sha256}", file.url)
        if file.sha256 is None:
            _beside(path).write_text(f"{actual}  {path.name}\n")
        part.replace(path)
        _settle(path.parent)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        raise _unreachable(file, path, error) from error
    except (TimeoutError, ssl.SSLError, ValueError) as error:
        raise _unreachable(file, path, error) from error
    except OSError as error:
        remedy = "free some space, or point ATOLL_DATA at a folder you can write to"
        raise UserError(f"cannot keep {path.name}: {error}", str(path.parent), remedy) from error
    finally:
        with suppress(OSError):  # the folder itself may be the trouble
            part.unlink(missing_ok=True)
    return path


def _receive(url: str, part: Path) -> str:
    """Write what the address gives to this file, down to the disk; its sha256."""
    digest, count = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, part.open("wb") as stream:
        while block := answer.read(BLOCK):
            stream.write(block)
            digest.update(block)
            count += len(block)
        length = answer.headers.get("Content-Length")
        if length is not None and count != int(length):
            raise http.client.HTTPException(f"{count} of {length} bytes came")
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _settle(parent: Path) -> None:
    """Bring a rename to the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unreachable(file: File, path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path.name} is not here and could not be downloaded: {error}",
        f"looked for {path}",
        f"curl -fL --create-dirs -o '{path}' '{file.url}'",
        EXIT_DATA_MISSING,
    )


def refused(path: Path, reason: str, url: str = "") -> UserError:
    """A file that is there but cannot be used."""
    remedy = (
        f"look at {url} in a browser: the source has changed, or a proxy replaces it"
        if url
        else "delete it, then run again or put the right file there"
    )
    return UserError(f"{path.name} {reason}", str(path), remedy, EXIT_DATA_MISSING)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into ones that name it."""
    try:
        yield
    except DAMAGE as error:
        words = " ".join(str(error).split())[:200]
        raise refused(path, f"cannot be read: {words}") from error


@contextmanager
def own(path: Path, kind: str) -> Iterator[None]:
    """Turn errors of reading a user's own file into ones that name it; atoll never deletes it.

    The words of the reader are left out: they may quote the data, or advise what is not safe.
    """
    try:
        yield
    except PermissionError as error:
        remedy = "ask for permission to read it"
        raise UserError("you may not read it", str(path), remedy, EXIT_DATA_MISSING) from error
    except DAMAGE as error:
        remedy = "it is damaged or has another format: export it again from its source"
        what = f"not {kind} that can be read"
        raise UserError(what, str(path), remedy, EXIT_DATA_MISSING) from error
