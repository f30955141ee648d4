"""Three processes at one run's folder, again and again: one wins, the others say why.

Each process is a fork of this one, which has atoll imported already, and calls the command. In
every other group of triples the winner waits in a round until the others have ended, so that they
surely met; else they meet as it happens, and one may come when the winner has ended.
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

from atoll import cli, data
from atoll.core.record import Record

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

    def __init__(self, *further: str, hold: int = 0) -> None:
        """`hold`: the round after which it waits for the file `go`; 0: it does not wait."""
        self.log = Path(f"log-{time.monotonic_ns()}-{random.getrandbits(32):x}")
        self.pid = os.fork()
        if self.pid == 0:
            if hold:
                _wait_after(hold)
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


def _wait_after(rounds: int) -> None:
    """Let this process wait in its record after so many rounds."""
    inner, count = Record.time, 0

    def time_and_wait(record: Record, **values: float) -> None:
        nonlocal count
        inner(record, **values)
        count += 1
        while count == rounds and not Path("go").exists():
            time.sleep(0.01)

    Record.time = time_and_wait  # type: ignore[method-assign,assignment]


def settle(running: list[Started], held: bool) -> list[tuple[int, str]]:
    """How all ended; those that wait may go on when all but one have ended."""
    if held:
        end, alive = time.monotonic() + 120, {one.pid for one in running}
        while len(alive) > 1 and time.monotonic() < end:
            time.sleep(0.01)
            ended = [
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in alive
            ]
            alive -= {one.si_pid for one in ended if one is not None}
        Path("go").touch()
    return [one.wait() for one in running]


def wait_for(folder: Path, rounds: int) -> None:
    """Until the record has so many rounds."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        path = folder / "times.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= rounds:
            return
        time.sleep(0.002)
    raise TimeoutError(f"no round {rounds} in {folder}")


def starts(draw: random.Random, held: bool) -> list[tuple[int, str]]:
    """Three new runs in one folder."""
    running, hold = [], draw.randrange(1, ROUNDS) if held else 0
    for _ in range(3):
        running.append(Started("--out", "run", hold=hold))
        time.sleep(draw.choice([0, 0, 0.01, 0.1]))
    return settle(running, held)


def resumes_of_a_living_run(draw: random.Random, held: bool) -> list[tuple[int, str]]:
    """A new run, and two that want to go on with it."""
    rounds = draw.randrange(1, ROUNDS // 2)
    first = Started("--out", "run", hold=rounds if held else 0)
    wait_for(Path("run"), rounds)
    others = [Started("--out", "run", "--resume") for _ in range(2)]
    return settle([first, *others], held)


def resumes_of_a_killed_run(draw: random.Random, held: bool) -> list[tuple[int, str]]:
    """A run that is killed, and three that want to go on with it."""
    rounds = draw.randrange(1, ROUNDS // 2)
    first = Started("--out", "run", hold=rounds)
    wait_for(Path("run"), rounds)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    others = []
    for _ in range(3):
        others.append(Started("--out", "run", "--resume", hold=1 if held else 0))
        time.sleep(draw.choice([0, 0, 0.02]))
    return settle(others, held)


def folders(draw: random.Random, held: bool) -> list[tuple[int, str]]:
    """Three new runs, none of which names a folder."""
    return settle([Started() for _ in range(3)], held=False)


Kind = Callable[[random.Random, bool], list[tuple[int, str]]]
KINDS: tuple[Kind, ...] = (starts, resumes_of_a_living_run, resumes_of_a_killed_run, folders)


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
    data.load("wine")  # so that no fork needs to import what reads the data
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
        held = number // len(KINDS) % 2 == 0
        ended = kind(draw, held)
        name, codes = kind.__name__, [code for code, _ in ended]
        bad = wrong(name, ended, whole)
        found.append({"kind": name, "held": held, "codes": codes, "wrong": bad})
    print(json.dumps(found))  # noqa: T201 - read by who started this


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
