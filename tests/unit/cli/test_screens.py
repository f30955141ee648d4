"""What the command shows: a bar that never wraps, the next step, options that apply, spellings."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from atoll.cli import main, terminal
from atoll.cli.terminal import Watching
from atoll.runs.config import read, resolve
from atoll.runs.loop import Progress
from atoll.runs.pace import duration


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Call the command; its output, its errors and its exit code."""
    monkeypatch.setattr(sys, "argv", ["atoll", *words])
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    return SimpleNamespace(out=printed.out, err=printed.err, code=code)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_bar_never_wraps(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(terminal, "err", screen)
    config = resolve(read("fedavg"), "test")
    watching = Watching(config, False, Path("nowhere"))
    watching.pace.rounds = 1  # the first round reads the record
    assert watching.live is not None
    shown: list[Any] = []
    monkeypatch.setattr(watching.live, "update", shown.append)
    watching.watch(Progress(0, 2, 3, 10, (), 2.0))
    assert shown[0].cell_len < width
    assert shown[0].plain.startswith("━" * min(width - 2, 20))
    if width > 40:
        assert "16 s left at most" in shown[0].plain
    if width == 200:
        assert "stage 1/2  round 4/10" in shown[0].plain
        assert {span.style for span in shown[0].spans} >= {"green", "dim"}


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 90, 7300)] == [
        "0 s", "59 s", "1 min 30 s", "2 h 1 min",
    ]  # fmt: skip


TINY = ("--set", "data=wine", "--set", "clients=2", "--set", "rounds=1", "--no-answer")


def test_the_next_step_and_the_list_of_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = call(capsys, monkeypatch, "list", "runs")
    assert (absent.out, absent.err) == ("", "no runs here; atoll run writes to the folder runs\n")
    ended = call(capsys, monkeypatch, "run", "fedavg", *TINY)
    assert ended.err.splitlines()[-1] == "next: atoll report runs/fedavg-1"
    assert "next:" not in call(capsys, monkeypatch, "run", "fedavg", "-q", *TINY).err
    loud = call(capsys, monkeypatch, "run", "fedavg", "-v", *TINY)
    assert "2 clients: " in loud.err
    listed = call(capsys, monkeypatch, "list", "runs").out
    assert [line.split()[0] for line in listed.splitlines()] == [
        "runs/fedavg-1", "runs/fedavg-2", "runs/fedavg-3",
    ]  # fmt: skip
    unknown = call(capsys, monkeypatch, "export", "runs/fedavg-1", "--site", "unknown")
    assert unknown.err.splitlines() == [
        "error: no site 'unknown' in this run", "where: --site", "to do: known: site-0, site-1",
    ]  # fmt: skip
    words = ("export", "runs/fedavg-1", "--site", "site-0", "--model", "x")
    model = call(capsys, monkeypatch, *words)
    assert model.err.splitlines()[-1] == "to do: known: none"  # the run has one model, unnamed
    absent = call(capsys, monkeypatch, "export", "nowhere", "--site", "x")
    assert absent.err.startswith("error: no run in this folder")
    assert len(absent.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("demo", "--rounds", "5"), "to set an option, write --set rounds=5"),
        (("demo", "--rounds=5"), "to set an option, write --set rounds=5"),
        (("demo", "--rounds"), "to set an option, write --set rounds=VALUE"),
        (("demo", "rounds=5"), "to set an option, write --set rounds=5"),
        (("demo", "--seed", "1"), "to set an option, write --set seed=1"),
        (("demo", "rounds=5", "seed=1"), "to set an option, write --set rounds=5 --set seed=1"),
        (("fedavg", "--strength", "1"), "to set an option, write --set strength=1"),
        (("fedavg", "--model", "cnn"), "to set an option, write --set model=cnn"),
        (("demo", "--lr", "0.1"), "to set an option, write --set rate=0.1"),
        (("demo", "--set", "lr=0.1"), "did you mean 'rate'?"),
    ],
)
def test_a_wrong_spelling_is_answered_with_the_right_one(
    words: tuple[str, ...],
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = call(capsys, monkeypatch, "run", *words)
    assert ended.code == 2
    assert ended.err.splitlines()[-1] == f"to do: {remedy}"


def test_a_wrong_spelling_is_answered_under_python_m_too() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "atoll", "run", "demo", "--rounds", "5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr.splitlines()[-1] == "to do: to set an option, write --set rounds=5"


def test_a_preset_in_the_place_of_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = call(capsys, monkeypatch, "demo")
    assert ended.err.splitlines()[-1] == "to do: to run it, write atoll run demo"


def shown_options(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line[:1].isalpha()}


def test_show_lists_what_applies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = shown_options(call(capsys, monkeypatch, "show", "fedavg").out)
    texts = shown_options(call(capsys, monkeypatch, "show", "fedseit").out)
    images = shown_options(call(capsys, monkeypatch, "show", "fccl").out)
    assert "scale" in tables
    assert not tables & {"vectors", "norm", "precision", "layout", "frozen", "initial"}
    assert {"vectors", "norm"} <= texts
    assert not texts & {"scale", "layout"}
    assert {"precision", "layout"} <= images
    assert "vectors" not in images
    every = shown_options(call(capsys, monkeypatch, "show", "fedavg", "--all").out)
    assert {"vectors", "layout", "frozen"} <= every
    assert "widths" not in shown_options(call(capsys, monkeypatch, "show", "splitnn").out)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_show_fits_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.cli import data  # noqa: PLC0415

    screen = Console(width=width, file=io.StringIO(), markup=False, highlight=False)
    monkeypatch.setattr(data, "out", screen)
    monkeypatch.setattr(terminal, "out", screen)
    call(capsys, monkeypatch, "show", "chfl")
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) > 30
    assert max(map(len, lines)) <= width


def first_sign(master: int) -> tuple[str, float]:
    """What a terminal shows first, and after how many seconds."""
    start = time.monotonic()
    readable, _, _ = select.select([master], [], [], 60)
    assert readable
    return os.read(master, 4096).decode(), time.monotonic() - start


@pytest.mark.parametrize("width", [40, 80, 140, 240])
def test_pairs_lose_nothing_however_narrow_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    monkeypatch.setattr(terminal, "out", screen)
    pairs = "0 and no, No and no, NO and no, 1 and yes, Yes and yes"
    finding = f"labels that may mean the same class: {pairs}"
    remedy = 'write labels = { 0 = "no", No = "no", NO = "no", 1 = "yes", Yes = "yes" }'
    terminal.print_pairs([(finding, remedy), ("lund has 15 rows", "add rows")], "worth knowing")
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert finding in shown
    assert remedy in shown  # in one line, to be copied into the config
    assert "add rows" in shown
    assert shown.splitlines()[0].strip() == "worth knowing"


@pytest.mark.process
def test_a_first_sign_of_life_on_a_terminal() -> None:
    """Within a second on an idle machine; here, before torch is imported, which takes longer."""
    master, terminal_end = pty.openpty()
    command = [sys.executable, "-m", "atoll", "run", "fedavg", *TINY]
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=terminal_end, stderr=terminal_end
    )
    try:
        words, _ = first_sign(master)
        maps = Path(f"/proc/{running.pid}/maps").read_text()
    finally:
        running.kill()
        running.wait()
    assert words.startswith("starting ...")
    assert "libtorch_cpu" not in maps
