"""Runs that are killed, at every point that touches the disk and from outside, and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

pytestmark = pytest.mark.process

COMMAND = Path(sys.executable).with_name("atoll")
DRIVER = Path(__file__).with_name("kill_driver.py")
JOB = [
    "run", "chfl", "--set", "data=wine", "--set", "clients=2", "--set", "rounds=30",
    "--set", "patience=100", "--set", "epochs=1", "--set", "mu=[0.1]", "--set", "widths=[4]",
    "--set", "checkpoint_seconds=0", "--set", "threads=1", "--set", "engine.mode=loop", "--quiet",
]  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home / "cache")}


def kill_at_points(mode: str, every: int, folder: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, DRIVER, folder, mode, str(every)],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize(("mode", "every"), [("loop", 1), ("stacked", 3)])
def test_a_run_killed_at_any_point_resumes_to_the_same_bits(
    mode: str, every: int, tmp_path: Path
) -> None:
    found = kill_at_points(mode, every, tmp_path)
    tried = found["tried"]
    assert len(tried) >= 50
    assert len({attempt["point"] for attempt in tried}) == len(tried)
    assert [a for a in tried if a["signals"][0] != signal.SIGKILL] == []
    assert sum(len(a["signals"]) > 1 and a["signals"][1] == signal.SIGKILL for a in tried) >= 10
    assert [a for a in tried if a["differences"]] == []
    assert any(not attempt["created"] for attempt in tried)  # killed while the folder was made
    reached = {name.partition(" .")[0].split()[1] for name in found["points"]}
    assert reached >= {"answer", "fsync", "mkdir", "open", "replace", "truncate", "write"}


def start(folder: Path, *further: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(COMMAND), *JOB, "--out", str(folder), *further],
        env=environment(folder.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rounds(folder: Path, rounds: int, process: subprocess.Popen[str]) -> None:
    """Until the run has written so many rounds; -1: until its folder is there."""
    path = folder / "times.jsonl" if rounds >= 0 else folder
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and (rounds < 0 or path.read_bytes().count(b"\n") >= rounds):
            return
        time.sleep(0.001)
    raise AssertionError(f"no round {rounds}: {process.communicate()}")


def finish(folder: Path, *further: str) -> None:
    process = start(folder, *further)
    printed, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint
    assert "auto" in printed


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: (folder / name).read_bytes()
        for name in ("config.toml", "events.jsonl", "result.json")
    }
    tensors = load((folder / "checkpoint.safetensors").read_bytes())
    return found | {name: array.tobytes() for name, array in tensors.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder)
    return outcome(folder)


@pytest.mark.parametrize("rounds", [-1, 0, 2, 9, 21])
def test_the_command_killed_from_outside_resumes_to_the_same_bits(
    rounds: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_rounds(folder, rounds, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    begun = folder.is_dir() and any(folder.iterdir())  # else there is nothing to go on with
    finish(folder, *(["--resume"] if begun else []))
    assert outcome(folder) == whole


def test_the_command_interrupted_by_ctrl_c_saves_its_state_and_resumes(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_rounds(folder, 4, process)
    process.send_signal(signal.SIGINT)
    printed, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    assert complaint.splitlines() == [
        "stopping after this round; press Ctrl-C again to stop at once",
        "error: interrupted; the state is saved",
        f"where: {folder}",
        "to do: continue with --resume",
    ]
    assert not (folder / "result.json").exists()
    finish(folder, "--resume")
    assert outcome(folder) == whole
