"""Runs of several methods, ways to damage their folders, and what the commands say then."""

import contextlib
import io
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from atoll import cli, data
from atoll.core.errors import InterruptedRunError
from atoll.engines.local import local_engine
from atoll.runs.config import read, resolve
from atoll.runs.execute import execute

SHORT = """
rounds = 2
checkpoint_seconds = 0
engine = { mode = "MODE" }
method = METHOD
"""
TABLES = """
[data]
files = ["north.csv", "south.csv"]
label = "ill"
[model]
widths = [4]
"""
PARTIES = """
[data]
parties = ["bank.csv", "shop.csv"]
id = "customer"
label = "card"
assume_aligned = true
"""
IMAGES = """
[data]
images = ["paper.npz", "slate.npz"]
size = 8
channels = 1
[model]
name = "cnn"
[public]
name = "patterns"
rows = 16
"""


class Ended(NamedTuple):
    """How a command ended, and what it left: the text of its files by their names."""

    code: int
    out: str
    err: str
    files: dict[str, bytes]

    @property
    def refused(self) -> bool:
        """Whether it is a user error in three lines."""
        heads = [line.split(": ")[0] for line in self.err.splitlines()[-3:]]
        return self.code == 2 and heads == ["error", "where", "to do"]


@dataclass(frozen=True)
class Example:
    """A run, and what its owner does with it afterwards."""

    method: str
    config: str
    predict: tuple[str, ...]
    site: str = ""
    mode: str = "loop"


SAME = ("config.toml", "events.jsonl", "looks.jsonl", "result.json")
RESUME = ["run", "run.toml", "--out", "run", "--resume", "--quiet"]
FCCL = '{ name = "fccl", batch = 16, epochs = 1, public_batch = 8, pretrain_epochs = 1 }'
EXAMPLES = {
    "fedavg": Example('"fedavg"', TABLES, ("north.csv", "--site", "north"), "north", "stacked"),
    "chfl": Example('"chfl"', TABLES, ("south.csv", "--site", "south"), "south"),
    "vleto": Example('"vleto"', PARTIES, ("--data", "bank.csv", "--data", "shop.csv")),
    "fccl": Example(FCCL, IMAGES, ("paper.npz", "--site", "paper"), "paper"),
}


def call(*words: str) -> tuple[int, str, str]:
    """The command in this process: its exit code and what it printed."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["atoll", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def write_data() -> None:
    """Small files of each kind, in the working folder."""
    draw = random.Random(5)
    for name in ("north", "south"):
        rows = [(draw.gauss(0, 1), draw.gauss(1, 2), draw.choice("ab")) for _ in range(40)]
        lines = [f"{x:.3f},{y:.3f},{word},{int(x > 0)}" for x, y, word in rows]
        Path(f"{name}.csv").write_text("\n".join(["age,dose,ward,ill", *lines]) + "\n")
    people = [(number, draw.gauss(0, 1), draw.gauss(0, 1)) for number in range(60)]
    bank = [f"c{n},{x:.3f},{'gold' if x + y > 0 else 'blue'}" for n, x, y in people]
    shop = [f"c{n},{y:.3f}" for n, _, y in people]
    Path("bank.csv").write_text("\n".join(["customer,income,card", *bank]) + "\n")
    Path("shop.csv").write_text("\n".join(["customer,spent", *shop]) + "\n")
    made = data.load("synthetic-images", rows=80)
    for number, name in enumerate(("paper", "slate")):
        part = slice(40 * number, 40 * number + 40)
        names = [f"class {n}" for n in range(4)]
        np.savez(f"{name}.npz", x=made.x[part, 0], y=made.y[part], classes=names)


def write_run(name: str) -> None:
    """Run an example; its folder is `run`, with a copy in `pristine`."""
    example = EXAMPLES[name]
    text = SHORT.replace("METHOD", example.method).replace("MODE", example.mode)
    Path("run.toml").write_text(text + example.config)
    code, _, err = call("run", "run.toml", "--out", "run", "--quiet")
    assert code == 0, err
    shutil.copytree("run", "pristine")


def cut_run(name: str, rounds: int) -> None:
    """Run an example again and cut it after some rounds; it is in `pristine` then."""
    ended: list[int] = []

    def stopping() -> bool:
        ended.append(1)
        return len(ended) >= rounds

    shutil.rmtree("pristine")
    with contextlib.suppress(InterruptedRunError):
        execute(
            resolve(read("run.toml"), "run.toml"), Path("pristine"), local_engine, stopping=stopping
        )
    assert not Path("pristine", "result.json").exists()
    with Path("pristine", "events.jsonl").open("ab") as file:
        file.write(b'{"event":"round","stage":0,"round":1,"not')  # a line that was being written


def restore() -> None:
    """Bring the run back as it was."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree("pristine", "run")


def commands(name: str) -> dict[str, tuple[list[str], list[str]]]:
    """The commands that read a run, each with the files that it writes."""
    example = EXAMPLES[name]
    found = {
        "report": (["report", "run", "-o", "page.html"], ["page.html"]),
        "predict": (["predict", "run", *example.predict, "-o", "said.csv"], ["said.csv"]),
    }
    if example.site:
        made = ["export/model.safetensors", "export/card.json"]
        found["export"] = (["export", "run", "--site", example.site, "-o", "export"], made)
    found["resume"] = (RESUME, [f"run/{name}" for name in SAME])
    return found


def ask(name: str) -> dict[str, Ended]:
    """What each command says of the run as it is now; resume comes last, as it may write."""
    found = {}
    for command, (words, files) in commands(name).items():
        for file in files:
            if not file.startswith("run/"):
                Path(file).unlink(missing_ok=True)
        ended = call(*words)
        left = {file: Path(file).read_bytes() for file in files if Path(file).exists()}
        found[command] = Ended(*ended, left)
    return found


def flip(content: bytes, draw: random.Random) -> bytes:
    """One bit turned."""
    place = draw.randrange(len(content))
    changed = content[place] ^ (1 << draw.randrange(8))
    return content[:place] + bytes([changed]) + content[place + 1 :]


def digit(content: bytes, draw: random.Random) -> bytes:
    """One digit changed."""
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return flip(content, draw)
    place = draw.choice(places)
    other = draw.choice([byte for byte in b"0123456789" if byte != content[place]])
    return content[:place] + bytes([other]) + content[place + 1 :]


def drop(content: bytes, draw: random.Random) -> bytes:
    """One line gone."""
    lines = content.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def double(content: bytes, draw: random.Random) -> bytes:
    """One line twice."""
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def cut(content: bytes, draw: random.Random) -> bytes:
    """The end gone."""
    return content[: draw.randrange(len(content))]


def empty(content: bytes, draw: random.Random) -> bytes:
    """Nothing left."""
    return b""


def append(content: bytes, draw: random.Random) -> bytes:
    """Some bytes more."""
    return content + draw.randbytes(draw.randint(1, 40))


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip, digit, drop, double, cut, empty, append,
)  # fmt: skip


def damage(draw: random.Random) -> str:
    """Damage one file of the run in one way; which, in words."""
    path = draw.choice(sorted(path for path in Path("run").rglob("*") if path.is_file()))
    way = draw.choice([*DAMAGES, None])
    if way is None:
        path.unlink()
        return f"{path} deleted"
    before = path.read_bytes()
    after = way(before, draw) if before else append(before, draw)
    path.write_bytes(after)
    place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), -1)
    return f"{path} {way.__name__}, {len(before)} bytes to {len(after)}, first at {place}"


def verdict(expected: dict[str, Ended], found: dict[str, Ended]) -> dict[str, str]:
    """For each command `detected` or `harmless`, else what is wrong."""
    said = {}
    for command, ended in found.items():
        if ended.refused:
            said[command] = "detected"
        elif ended.code:
            said[command] = f"exit {ended.code}: {ended.err}"
        else:
            same = (ended.out, ended.files) == (expected[command].out, expected[command].files)
            said[command] = "harmless" if same else f"silent: {ended.out}"
    return said
