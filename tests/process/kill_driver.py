"""Kills small runs at every point in turn, resumes them, and says what came out otherwise.

A point is a moment before, after or in the middle of something that touches the disk, or before or
after a client's answer. Each run is a fork of this process, which has atoll imported already.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load

from atoll.engines import local
from atoll.runs.config import RunConfig, change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts

SAME = ("config.toml", "events.jsonl", "result.json")
TINY = {
    "data": "wine", "clients": 2, "rounds": 3, "epochs": 1, "mu": [0.1], "widths": [4],
    "ratio": 0.4, "checkpoint_seconds": 0, "threads": 1, "batch": 32,
}  # fmt: skip


class Points:
    """Counts points, and dies at one of them."""

    def __init__(self, fatal: int, log: Path | None = None) -> None:
        self.fatal, self.log, self.count = fatal, log, 0

    def reach(self, what: str) -> None:
        if self.log is not None:
            with open(self.log, "a") as file:  # noqa: PTH123 - Path.open is wrapped
                file.write(f"{what}\n")
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def around(self, owner: Any, name: str) -> None:
        """A point before and a point after every call of a function."""
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*given: Any, **named: Any) -> Any:
            self.reach(f"before {name}")
            result = inner(*given, **named)
            self.reach(f"after {name}")
            return result

        setattr(owner, name, outer)

    def in_answers(self) -> None:
        """A point before and a point after every answer of a client."""
        engine: Any = local
        inner = engine.begin

        def outer(*given: Any) -> Generator[Any, Any, Any]:
            self.reach("before answer")
            reply = yield from inner(*given)
            self.reach("after answer")
            return reply

        engine.begin = outer

    def in_files(self) -> None:
        """Points around the opening of files for writing, and in the middle of every write."""
        inner, points = Path.open, self

        def outer(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+"):
                return inner(path, mode, *given, **named)
            points.reach(f"before open {path.name}")
            file = Torn(inner(path, mode, *given, **named), points, path.name)
            points.reach(f"after open {path.name}")
            return file

        Path.open = outer  # type: ignore[method-assign,assignment]


class Torn:
    """A file whose every write reaches the disk in two halves."""

    def __init__(self, file: Any, points: Points, name: str) -> None:
        self.file, self.points, self.name = file, points, name

    def write(self, content: bytes) -> int:
        for half in (content[: len(content) // 2], content[len(content) // 2 :]):
            self.file.write(half)
            self.file.flush()
            self.points.reach(f"in write {self.name}")
        return len(content)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return int(self.file.fileno())

    def __enter__(self) -> "Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def run(config: RunConfig, folder: Path, points: Points, resume: bool) -> None:
    for owner, name in ((os, "fsync"), (os, "truncate"), (Path, "replace"), (Path, "mkdir")):
        points.around(owner, name)
    points.in_answers()
    points.in_files()
    execute(config, folder, local.local_engine, resume=resume)


def fork(config: RunConfig, folder: Path, points: Points, resume: bool = False) -> int:
    """A run in a process of its own: its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(config, folder, points, resume)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be equal: every file but the facts and the seconds, and the tensors."""
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in SAME}
    tensors = load((folder / "checkpoint.safetensors").read_bytes())
    for name, array in tensors.items():
        found[f"tensor {name}"] = (str(array.dtype), array.shape, array.tobytes())
    found["files"] = sorted(path.name for path in folder.iterdir())
    return found


def differences(folder: Path, whole: dict[str, Any]) -> list[str]:
    try:
        found = outcome(folder)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return sorted(
        name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name)
    )


def attempt(config: RunConfig, folder: Path, fatal: int, whole: dict[str, Any]) -> dict[str, Any]:
    """A run killed at a point and resumed; every third time the resumed run is killed as well."""
    deaths = [fork(config, folder, Points(fatal))]
    there = (folder / "config.toml").exists()
    if fatal % 3 == 0:
        deaths.append(fork(config, folder, Points(fatal % 20), resume=True))
    ended = fork(config, folder, Points(-1), resume=True)
    signals = [os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0 for status in deaths]
    wrong = differences(folder, whole) if ended == 0 else [f"resuming ended with {ended}"]
    return {"point": fatal, "signals": signals, "created": there, "differences": wrong}


def main(work: Path, mode: str, every: int) -> None:
    torch.set_num_threads(1)
    config = resolve(change(read("chfl"), {**TINY, "engine.mode": mode}), "kill")
    parts(config)  # so that no fork needs to import what reads the data
    log = work / "points.txt"
    assert fork(config, work / "whole", Points(-1, log)) == 0
    whole = outcome(work / "whole")
    names = log.read_text().splitlines()
    tried = [attempt(config, work / f"cut-{n}", n, whole) for n in range(0, len(names), every)]
    sys.stdout.write(json.dumps({"points": names, "tried": tried}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
