"""The installed command, as a user's shell runs it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

COMMAND = Path(sys.executable).with_name("atoll")
TINY = [
    "run", "fedavg", "--set", "data=wine", "--set", "rounds=2", "--set", "clients=2",
    "--set", "widths=[4]", "--set", "checkpoint_seconds=0", "--set", "engine.mode=loop",
]  # fmt: skip


def call(
    folder: Path, *arguments: str, out: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [str(COMMAND), *arguments],
        cwd=folder,
        env=environment,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 KiB, where this user may mount one."""
    disk, mount = tmp_path / "disk", shutil.which("mount")
    disk.mkdir()
    if mount is None or os.geteuid() != 0:
        pytest.skip("needs to mount a file system, which this user may not")
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)],
        check=False,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("needs to mount a file system, which is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["run", "nowhere.toml"], 2, "nowhere.toml"),
        (["run", "fedavg", "--set", "raet=1"], 2, "did you mean 'rate'?"),
        ([*TINY, "--device", "tpu"], 2, "'tpu'"),
        ([*TINY, "--out", "file/child"], 2, "file/child"),
        ([*TINY, "--resume"], 2, "no run of 'fedavg'"),
    ],
)
def test_a_mistake_ends_in_three_lines(
    arguments: list[str], code: int, word: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    ended = call(tmp_path, *arguments)
    assert ended.returncode == code
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 3
    assert word in ended.stderr
    assert files(tmp_path) == ["file"]


def test_json_goes_through_a_pipe_unbroken(tmp_path: Path) -> None:
    ended = call(tmp_path, *TINY, "--json")
    assert ended.returncode == 0
    assert ended.stderr == ""
    assert json.loads(ended.stdout)["runs"][0]["folder"] == "runs/fedavg-1"


def test_a_result_that_cannot_be_printed_is_said(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = call(tmp_path, *TINY, "--json", out=full.fileno())
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: cannot print: no space left on device",
        "where: standard output",
        "to do: send it to another place",
    ]
    assert (tmp_path / "runs" / "fedavg-1" / "result.json").exists()


def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    shell = f"{COMMAND} list data | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    assert ended.stdout.startswith("adult")


def test_a_disk_that_is_really_full_is_said_and_the_run_resumes_once_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    ballast = small_disk / "ballast"
    arguments = [*TINY, "--set", "rounds=6", "--out", str(small_disk / "run"), "--quiet"]
    ballast.write_bytes(bytes(8192))
    ended = call(tmp_path, *arguments)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[0] == "error: the disk is full"
    assert len(ended.stderr.splitlines()) == 3
    assert not [name for name in files(small_disk) if name.endswith((".part", "traceback.txt"))]
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    ended = call(tmp_path, *arguments, "--resume")
    assert ended.returncode == 0, ended.stderr
    whole = [*TINY, "--set", "rounds=6", "--out", str(tmp_path / "whole"), "--quiet"]
    assert call(tmp_path, *whole).returncode == 0
    for name in ("config.toml", "events.jsonl", "result.json"):
        assert (small_disk / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
