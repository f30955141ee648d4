"""What somebody at a terminal sees of `init`, and what a large file costs in memory."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
PATIENCE = 120.0  # seconds
ROWS = ["age,sex,outcome", *(f"{40 + i % 9},{'fm'[i % 2]},{'xy'[i % 3 % 2]}" for i in range(30))]


def conversation(folder: Path, answers: dict[str, str]) -> tuple[str, int]:
    """`atoll init` on a terminal, each question answered once: what was shown, how it ended."""
    ours, theirs = pty.openpty()
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([*ATOLL, "init"], cwd=folder, **ends)  # type: ignore[call-overload]
    os.close(theirs)
    shown, left = "", dict(answers)
    while select.select([ours], [], [], PATIENCE)[0]:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the terminal was closed at the other end
            break
        if not piece:
            break
        shown += piece.decode()
        for question in [q for q in left if q in shown]:
            os.write(ours, left.pop(question).encode() + b"\n")
    os.close(ours)
    return shown, process.wait(PATIENCE)


QUESTIONS = {"Files, one for each site": "a.csv b.csv", "to predict": "outcome", "Method": ""}


def test_init_asks_for_what_it_was_not_given(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("\n".join(ROWS) + "\n")
    shown, status = conversation(tmp_path, QUESTIONS)
    assert status == 0, shown
    text = (tmp_path / "run.toml").read_text()
    assert 'files = ["a.csv", "b.csv"]' in text
    assert 'name = "chfl"' in text  # what Enter chooses
    assert "next: atoll inspect run.toml" in shown


def test_a_wrong_answer_is_told_and_writes_nothing(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("\n".join(ROWS) + "\n")
    shown, status = conversation(tmp_path, {**QUESTIONS, "to predict": "outcom"})
    assert status == 3
    assert "no column 'outcom' for the label" in shown
    assert "did you mean 'outcome'?" in shown
    assert not (tmp_path / "run.toml").exists()


LOOK = """
import resource, sys
from atoll.data.own import sheets
from atoll.data.own import tables
sheets.BLOCK = 1 << 19
found = tables.survey(files=[sys.argv[1]], label="outcome")
tables.widths(found)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_looking_at_a_file_takes_no_memory_for_its_size(tmp_path: Path) -> None:
    """The text of the larger file would take 60 MB more if it stayed."""
    cells = [",".join(f"{i % 97}.{column:09d}" for column in range(20)) for i in range(500)]
    piece = "".join(f"{line},{'xy'[i % 3 % 2]}\n" for i, line in enumerate(cells))
    held = {}
    for name, times in (("small", 200), ("large", 700)):
        path = tmp_path / f"{name}.csv"
        with path.open("w") as file:
            file.write(",".join(f"c{column}" for column in range(20)) + ",outcome\n")
            file.writelines([piece] * times)
        command = [sys.executable, "-c", LOOK, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        held[name] = int(done.stdout)
    more = (tmp_path / "large.csv").stat().st_size - (tmp_path / "small.csv").stat().st_size
    assert more > 60e6
    assert held["large"] - held["small"] < 20  # MB: what the allocator keeps
