"""Files that are written whole, and folders that one process at a time writes in."""

import errno
import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.storage import LOCK, FolderLock, is_temporary, remove_temporary, write_whole

HOLDER = """
import sys
from pathlib import Path
from atoll.core.storage import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_folder_that_another_process_writes_is_refused_with_its_name(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(UserError) as caught:
            FolderLock(tmp_path)
        with pytest.raises(UserError):
            FolderLock.check(tmp_path)
        assert caught.value.what == "another process is writing this run"
        assert f"process {process.pid} on " in caught.value.where
        assert caught.value.where.startswith(str(tmp_path))
        assert caught.value.exit_code == 2
        process.kill()
    assert (tmp_path / LOCK).exists()  # it was killed: the file stays, the lock does not
    FolderLock.check(tmp_path)
    with FolderLock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    threading.Timer(0.3, lock.release).start()
    with pytest.raises(UserError):
        FolderLock(tmp_path)
    FolderLock(tmp_path, patience=10).release()


def test_a_lock_that_is_forgotten_is_given_back(tmp_path: Path) -> None:
    FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_fork_does_not_give_the_lock_of_its_parent_back(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(UserError):
        FolderLock(tmp_path)
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_and_can_be_used_all_the_same(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError) as caught:
        FolderLock(tmp_path)
    assert caught.value.what == "this file system has no file locks"
    assert "ATOLL_LOCKS=off" in caught.value.remedy
    monkeypatch.setenv("ATOLL_LOCKS", "off")
    FolderLock(tmp_path).release()


def test_two_writers_of_one_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, names = os.fsync, list[set[str]]()

    def meddle(handle: int) -> None:
        if len(names) < 2:
            names.append({path.name for path in tmp_path.iterdir()})
        if len(names) == 1:
            write_whole(tmp_path / "file", b"of the second")
        real(handle)

    monkeypatch.setattr(os, "fsync", meddle)
    write_whole(tmp_path / "file", b"of the first")
    assert (tmp_path / "file").read_bytes() == b"of the first"
    assert len(names[1]) == 2  # each had a file of its own
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = [".facts.json.part", ".facts.json.12-0a1b2c3d.part", ".config.toml.9-ffffffff.part"]
    others = [".thesis.tex.part", ".facts.json.x.part", "facts.json", ".page.html.1-00000000.part"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    remove_temporary(tmp_path, ["facts.json", "config.toml"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    assert is_temporary(left[1], ["facts.json"])
    assert not is_temporary(left[1], ["config.toml"])


def test_the_lock_file_names_its_process_and_nothing_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on a host with a very long name, " + "x" * 300)
    with FolderLock(tmp_path):
        text = (tmp_path / LOCK).read_text()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"process {os.getpid()} on \S+, {stamp}", text)


def test_of_an_endless_lock_file_two_hundred_letters_are_shown(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        (tmp_path / LOCK).write_text("y" * 1000)
        with pytest.raises(UserError) as caught:
            FolderLock(tmp_path)
    assert caught.value.where == f"{tmp_path} ({'y' * 200})"


@pytest.mark.parametrize(("locks", "writes"), [("off", True), ("on", False), (None, False)])
def test_without_a_lock_file_somebody_may_write_only_where_locks_are_off(
    locks: str | None, writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_LOCKS", raising=False)
    if locks is not None:
        monkeypatch.setenv("ATOLL_LOCKS", locks)
    assert FolderLock.has_writer(tmp_path) is writes


def test_a_writer_is_known_by_its_process_and_its_host(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        assert FolderLock.has_writer(tmp_path) is True
    here = socket.gethostname()
    for text, writes in (
        (f"process 999999999 on {here}, 2026-01-01 00:00:00", False),  # no such process
        (f"process {2**70} on {here}, 2026-01-01 00:00:00", False),
        ("process 999999999 on another-host, 2026-01-01 00:00:00", True),  # who can tell?
        ("", True),
    ):
        (tmp_path / LOCK).write_text(text)
        assert FolderLock.has_writer(tmp_path) is writes


def test_a_file_and_then_its_folder_are_flushed_and_no_handle_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, flushed = os.fsync, list[bool]()

    def noted(handle: int) -> None:
        flushed.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    before = sorted(Path("/proc/self/fd").iterdir())
    write_whole(tmp_path / "file", b"whole")
    assert flushed == [False, True]  # the file, then the folder that names it
    assert sorted(Path("/proc/self/fd").iterdir()) == before
