"""Files on a disk: written whole or not at all, locked against a second writer. Needs no torch."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import time
import tomllib
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError

__all__ = [
    "LOCK",
    "FolderLock",
    "disk_errors",
    "is_temporary",
    "locked",
    "read_toml",
    "remove_temporary",
    "temporary_name",
    "write_whole",
]

LOCK = ".lock"  # the lock file of a folder
SWITCH = "ATOLL_LOCKS"  # an environment variable; "off" for file systems without locks
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into errors that the user can fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "the disk is full", str(path), "free some space, then use --resume"
            ) from error
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot read or write: {reason.lower()}",
            str(path),
            "check that the folder exists and its permissions",
        ) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; a file that cannot be read or parsed is a user error."""
    with disk_errors(path):
        content = path.read_bytes()
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:
        raise UserError(f"not TOML: {error}", str(path), "fix that line") from error


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Hold a lock between processes; a process that ends releases it."""
    while True:
        with disk_errors(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file.fileno(), lock):
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        # its owner removed the file while this process waited: another file is the lock now


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


class FolderLock:
    """The right to write in a folder, until it is released or the process ends.

    The lock is advisory (flock): the system drops it with the process, so the lock file of a
    killed process blocks no other. The file names the process, for error messages.
    """

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        """Take the lock of an existing folder, waiting for it at most `patience` seconds."""
        self.path = folder / LOCK
        self._finalizer: weakref.finalize[[int, int, Path], FolderLock] | None = None
        if os.environ.get(SWITCH) == "off":
            return
        deadline = time.monotonic() + patience
        while (handle := self._try()) is None:
            if time.monotonic() >= deadline:
                raise _taken(folder)
            time.sleep(0.1)
        self._finalizer = weakref.finalize(self, _release, handle, os.getpid(), self.path)
        with disk_errors(self.path):
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, {started}".encode())

    def _try(self) -> int | None:
        """The open lock file if it could be locked; None where another process has it."""
        with disk_errors(self.path):
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            os.close(handle)
            if error.errno not in WITHOUT_LOCKS:
                raise
            remedy = f"use a folder on another disk, or set {SWITCH}=off if no other process writes"
            raise UserError("this file system has no file locks", str(self.path), remedy) from error
        if _is_at(handle, self.path):
            return handle
        os.close(handle)  # its owner removed it just now: the next one is tried
        return self._try()

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._finalizer is not None:
            self._finalizer()

    @staticmethod
    def check(folder: Path) -> None:
        """Refuse a folder in which another process writes; changes nothing."""
        with disk_errors(folder):
            exists = (folder / LOCK).exists()
        if exists:
            FolderLock(folder).release()

    @staticmethod
    def has_writer(folder: Path) -> bool:
        """Whether a process writes in a folder, by its lock file; takes no lock."""
        try:
            holder = (folder / LOCK).read_text(errors="replace")
        except OSError:
            return os.environ.get(SWITCH) == "off"  # locks are off, so assume a writer
        match = re.match(r"process (\d+) on (.*), ", holder)
        if match is None or match[2] != socket.gethostname():
            return True
        try:
            os.kill(int(match[1]), 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return True

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _release(handle: int, owner: int, path: Path) -> None:
    if os.getpid() == owner:  # a fork has a copy of the handle, but not the lock
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(handle)


def _taken(folder: Path) -> UserError:
    try:
        holder = (folder / LOCK).read_text(errors="replace")[:200]
    except OSError:
        holder = ""
    where = f"{folder} ({holder or 'process unknown'})"
    remedy = "wait for it, or choose another --out"
    return UserError("another process is writing this run", where, remedy)


def temporary_name(path: Path) -> Path:
    """A name beside a file that no other writer uses, for its content until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")


def is_temporary(name: str, final: Iterable[str]) -> bool:
    """Whether a file holds the unfinished content of one of these files."""
    match = re.fullmatch(r"\.(.+?)(\.\d+-[0-9a-f]{8})?\.part", name)
    return match is not None and match[1] in final


def remove_temporary(folder: Path, final: Iterable[str]) -> None:
    """Remove what killed writers of these files left; only for the sole writer of a folder."""
    names = set(final)
    with disk_errors(folder):
        for path in list(folder.iterdir()):
            if is_temporary(path.name, names):
                path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = temporary_name(path)
    with disk_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
