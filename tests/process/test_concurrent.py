"""Several processes that want to write one run: one wins, the others say why, nothing mixes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.core.record import Round, read_events
from tests.process.concurrent_driver import ROUNDS, SAME, TINY

pytestmark = pytest.mark.process

COMMAND = Path(sys.executable).with_name("atoll")
DRIVER = Path(__file__).with_name("concurrent_driver.py")


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home / "cache")}


def triples(home: Path, seed: int, count: int) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, DRIVER, home / "work", str(seed), str(count)],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return list(json.loads(ended.stdout))


def check(found: list[dict[str, Any]]) -> None:
    assert [one for one in found if one["wrong"]] == []
    for one in found:
        if one["kind"] == "folders":
            assert one["codes"] == [0, 0, 0]
        elif one["held"]:  # the others came while the winner was at work
            assert sorted(one["codes"]) == [0, 2, 2], one
    assert any(one["held"] for one in found)


def test_of_three_processes_one_wins_and_the_others_say_why(tmp_path: Path) -> None:
    found = triples(tmp_path, 0, 10)
    assert len(found) == 10
    check(found)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_of_many_triples_no_record_mixes(seed: int, tmp_path: Path) -> None:
    found = triples(tmp_path, seed, 20)
    assert len(found) == 20
    check(found)


def start(folder: Path, *further: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(COMMAND), *TINY, *further],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_installed_command_refuses_to_resume_a_run_that_goes_on(tmp_path: Path) -> None:
    more = ["--set", "rounds=3000", "--out", "run"]
    first, times = start(tmp_path, *more), tmp_path / "run" / "times.jsonl"
    end = time.monotonic() + 60
    while not (times.exists() and times.stat().st_size) and time.monotonic() < end:
        time.sleep(0.01)
    others = [start(tmp_path, *more, "--resume") for _ in range(2)]
    for other in others:
        _, complaint = other.communicate(timeout=120)
        what, where, remedy = complaint.splitlines()
        assert other.returncode == 2
        assert what == "error: another process is writing this run"
        assert where.startswith(f"where: run (process {first.pid} on ")
        assert remedy == "to do: wait for it, or choose another --out"
    assert first.poll() is None  # it was not disturbed
    first.kill()
    first.communicate()
    rounds = [e.round for e in read_events(tmp_path / "run") if isinstance(e, Round)]
    assert rounds == list(range(len(rounds)))
    assert rounds


def test_three_commands_without_a_folder_get_three(tmp_path: Path) -> None:
    running = [start(tmp_path) for _ in range(3)]
    assert [one.communicate(timeout=120)[1] for one in running] == [""] * 3
    made = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in made] == ["fedavg-1", "fedavg-2", "fedavg-3"]
    for name in SAME:
        assert len({(folder / name).read_bytes() for folder in made}) == 1
    rounds = [e.round for e in read_events(made[0]) if isinstance(e, Round)]
    assert rounds == list(range(ROUNDS))
