"""NVFlare's processes at one end, and locks that prevent two commands from sharing a folder."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import UserError
from atoll.core.record import disk_errors
from atoll.engines.network import GUARD

__all__ = [
    "ENDS", "STANDING", "Process", "alone", "certificates", "end_former", "environment",
    "nvflare", "own_store", "provision", "read_json", "running", "shorten",
]  # fmt: skip

STANDING = "standing.json"  # in a site's kit: the server's last answer
LOG_BYTES = 100_000_000  # maximum size of nvflare.log before it is rotated
ENDS = "ends.json"  # in the coordinator's work folder: which site's job ended first


class KitFolder(Protocol):
    """What a process needs of a party's kit."""

    @property
    def folder(self) -> Path:
        """The folder of the kit."""
        ...

    @property
    def name(self) -> str:
        """The party's name."""
        ...


def nvflare() -> Any:
    """The module that starts NVFlare's processes and jobs, or how to install what it needs."""
    with _installed():
        from atoll.engines.network import session as found  # noqa: PLC0415 - only where it is needed
    return found


def provision() -> Any:
    """The module that creates NVFlare's settings."""
    with _installed():
        from atoll.engines.network import provision as found  # noqa: PLC0415
    return found


def certificates() -> Any:
    """The module that creates and reads certificates, with a package installed with NVFlare."""
    with _installed():
        from atoll.engines.network import certificates as found  # noqa: PLC0415
    return found


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            "NVFlare is not installed", str(error), "pip install 'atoll[nvflare]'"
        ) from error


def environment(**further: str) -> dict[str, str]:
    return {**os.environ, **nvflare().ENVIRONMENT, **further}


def shorten(log: Path, most: int = LOG_BYTES) -> None:
    """Move the content of a long log to a second file; its writers continue with the log.

    Writers only append; the amount depends on what others send.
    """
    with disk_errors(log):
        if log.exists() and log.stat().st_size > most:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


class Process:
    """NVFlare's own process at one end; restarted if it ends."""

    def __init__(self, kind: str, kit: KitFolder, environment: Mapping[str, str]) -> None:
        self.kit, self.environment = kit, dict(environment)
        self.command = nvflare().command(kind, kit.folder.resolve(), kit.name)
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def ensure(self) -> bool:
        """Start the process if it is not running; returns whether it was started."""
        log = self.kit.folder / "nvflare.log"
        shorten(log)
        if self.process is not None and self.process.poll() is None:
            return False
        with disk_errors(log), log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip
        (self.kit.folder / "pid").write_text(f"{self.process.pid}\n")
        self.starts += 1
        return True

    def stop(self) -> None:
        """End the process and all its children."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
        (self.kit.folder / "pid").unlink(missing_ok=True)


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Try to lock a file; yield whether that succeeded. The lock of a killed command is free."""
    with disk_errors(path):
        file = path.open("w")
    with file:
        yield _lock(file, path)


def _lock(file: Any, path: Path) -> bool:
    with disk_errors(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def alone(kit: KitFolder) -> Iterator[None]:
    """Refuse a kit that another command uses."""
    with _held(kit.folder / "lock") as free:
        if not free:
            raise UserError(
                "another command uses this kit now", str(kit.folder), "stop that one first"
            )
        yield


@contextmanager
def own_store(store: Path) -> Iterator[None]:
    """Refuse a store that another site uses: two writers would break the hash chain of its log."""
    with disk_errors(store):
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.chmod(0o700)
    with _held(store / ".lock") as free:
        if not free:
            remedy = "give each site a store of its own in its site.toml"
            raise UserError("another site uses this store", str(store), remedy)
        yield


def end_former(kit: KitFolder) -> None:
    """End processes of this kit left running by an earlier, killed command."""
    for _ in range(20):
        pids = running(str(kit.folder.resolve()))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.2)
    (kit.folder / "pid").unlink(missing_ok=True)


def running(folder: str, kind: str = "") -> list[int]:
    """The ids of NVFlare's processes that use a folder, if the system lists processes."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().decode(errors="replace").split("\0")
            if folder in line and GUARD in line and (not kind or kind in line):
                pids.append(int(path.parent.name))
    return pids


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
