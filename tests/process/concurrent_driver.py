"""Three processes at one run's folder, again and again: one wins, the others say why.

Each process is a fork of this one, which has atoll imported already, and calls the command.
Called with a folder to work in, a seed and a number of triples; prints what came of each as JSON.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from atoll import cli

ROUNDS = 12
SAME = ("config.toml", "events.jsonl", "looks.jsonl", "result.json")
TINY = [
    "run", "fedavg", "--set", "data=wine", "--set", f"rounds={ROUNDS}", "--set", "clients=2",
    "--set", "widths=[4]", "--set", "engine.mode=loop", "--set", "engine.threads=1",
    "--set", "checkpoint_seconds=0", "--set", "score_every=1", "--quiet",
]  # fmt: skip
REASONS = ("error: another process is writing this run", "error: the folder is not empty")


class Started:
    """The command in a fork, with what it prints in a file."""

    def __init__(self, *further: str) -> None:
        self.log = Path(f"log-{time.monotonic_ns()}-{random.getrandbits(32):x}")
        self.pid = os.fork()
        if self.pid == 0:
            self._run(further)

    def _run(self, further: tuple[str, ...]) -> None:
        code = 1
        try:
            with self.log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.argv = ["atoll", *TINY, *further]
                try:
                    cli.main()
                    code = 0
                except SystemExit as ended:
                    code = int(ended.code or 0)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(code)

    def wait(self) -> tuple[int, str]:
        """The exit code, and what was printed."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self.log.read_text()


def wait_for(folder: Path, rounds: int) -> None:
    """Until the record has so many rounds, or some time has passed."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        path = folder / "times.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= rounds:
            return
        time.sleep(0.002)


def starts(draw: random.Random) -> list[tuple[int, str]]:
    """Three new runs in one folder."""
    running = []
    for _ in range(3):
        running.append(Started("--out", "run"))
        time.sleep(draw.choice([0, 0, 0.01, 0.1]))
    return [one.wait() for one in running]


def resumes_of_a_living_run(draw: random.Random) -> list[tuple[int, str]]:
    """A new run, and two that want to go on with it."""
    first = Started("--out", "run")
    wait_for(Path("run"), draw.randrange(ROUNDS // 2))
    others = [Started("--out", "run", "--resume") for _ in range(2)]
    return [one.wait() for one in (first, *others)]


def resumes_of_a_killed_run(draw: random.Random) -> list[tuple[int, str]]:
    """A run that is killed, and three that want to go on with it."""
    first = Started("--out", "run")
    wait_for(Path("run"), 1 + draw.randrange(ROUNDS // 2))
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    others = []
    for _ in range(3):
        others.append(Started("--out", "run", "--resume"))
        time.sleep(draw.choice([0, 0, 0.02]))
    return [one.wait() for one in others]


def folders(draw: random.Random) -> list[tuple[int, str]]:
    """Three new runs, none of which names a folder."""
    running = [Started() for _ in range(3)]
    return [one.wait() for one in running]


KINDS: tuple[Callable[[random.Random], list[tuple[int, str]]], ...] = (
    starts, resumes_of_a_living_run, resumes_of_a_killed_run, folders,
)  # fmt: skip


def records(kind: str) -> list[Path]:
    return sorted(Path("runs").iterdir()) if kind == "folders" else [Path("run")]


def wrong(kind: str, ended: list[tuple[int, str]], whole: dict[str, bytes]) -> str:
    """What is not as it should be after a triple; empty where all is well."""
    for code, text in ended:
        said = text.splitlines()[-3:-2]
        if code not in (0, 2) or (code == 2 and not (said and said[0] in REASONS)):
            return f"exit {code}: {text[-500:]}"
    if not any(code == 0 for code, _ in ended):
        return "nobody won"
    made = records(kind)
    if len(made) != (3 if kind == "folders" else 1):
        return f"{len(made)} folders"
    for folder in made:
        if {name: (folder / name).read_bytes() for name in SAME} != whole:
            return f"{folder} differs from an undisturbed run"
        if left := [p.name for p in folder.iterdir() if p.name == ".lock" or ".part" in p.name]:
            return f"{folder} has {left}"
    return ""


def main(home: Path, seed: int, count: int) -> None:
    """Triples of every kind in turn."""
    torch.set_num_threads(1)
    draw, found = random.Random(seed), []
    (home / "whole").mkdir(parents=True)
    os.chdir(home / "whole")
    assert Started("--out", "run").wait()[0] == 0
    whole = {name: Path("run", name).read_bytes() for name in SAME}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        here = home / f"{number}"
        here.mkdir()
        os.chdir(here)
        ended = kind(draw)
        codes = [code for code, _ in ended]
        found.append(
            {"kind": kind.__name__, "codes": codes, "wrong": wrong(kind.__name__, ended, whole)}
        )
    print(json.dumps(found))  # noqa: T201 - read by who started this


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
