"""What the command prints: tables, progress, errors; and what stops it."""

import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll.core.errors import (
    EXIT_INTERRUPTED,
    InterruptedRunError,
    UserError,
    printable,
)
from atoll.core.record import Message, Round, Score
from atoll.runs.config import RunConfig
from atoll.runs.loop import Progress

__all__ = [
    "Watching",
    "aside",
    "complain",
    "counted",
    "err",
    "guarded",
    "out",
    "print_grid",
    "print_pairs",
    "size",
    "traceback_file",
]


def _console(stderr: bool) -> Console:
    """As wide as the terminal; in a file or a pipe so wide that hardly a line is broken."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=wide, markup=False, emoji=False, highlight=False)


T = TypeVar("T")


PLAIN_WIDTH = 240  # characters


out, err = _console(stderr=False), _console(stderr=True)


def aside(words: str) -> None:
    err.print(words, soft_wrap=True)


def guarded(folder: Path, work: Callable[[Callable[[], bool]], T]) -> T:
    """Do it; the first Ctrl-C ends the round and saves, the second stops at once."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        err.print("stopping after this round; press Ctrl-C again to stop at once", soft_wrap=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        return work(lambda: bool(asked))
    except KeyboardInterrupt as error:
        raise _stopped("interrupted, state of the last checkpoint kept", folder) from error
    except InterruptedRunError as error:
        raise _stopped("interrupted, state saved", folder) from error
    except UserError:
        raise
    except Exception as error:
        error.add_note(traceback_file(error, folder))
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _stopped(what: str, folder: Path) -> UserError:
    return UserError(what, str(folder), "go on with --resume", EXIT_INTERRUPTED)


def traceback_file(error: Exception, folder: Path | None) -> str:
    """The file with all that is known of a fault: in the run's folder, else a temporary one."""
    content = "".join(traceback.format_exception(error))
    try:
        whole = folder is not None and (folder / "config.toml").exists()
        home = folder if folder and whole else Path(tempfile.mkdtemp(prefix="atoll-"))
        path = home / "traceback.txt"
        path.write_text(content)
        return str(path)
    except OSError as refused:
        return f"no traceback file, {refused.strerror}: {error}"


class Watching:
    """Shows a run as it goes: live on a terminal, plain lines in a log, nothing when quiet."""

    def __init__(self, config: RunConfig, quiet: bool) -> None:
        self.config, self.quiet = config, quiet
        self.bytes, self.seconds, self.done = 0, 0.0, 0
        self.live = Live(console=err, transient=True) if err.is_terminal and not quiet else None

    def __enter__(self) -> Callable[[Progress], None]:
        if self.live:
            self.live.start()
        return self.watch

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def watch(self, progress: Progress) -> None:
        self.bytes += sum(e.bytes for e in progress.events if isinstance(e, Message))
        self.seconds += progress.seconds
        self.done += 1
        if self.quiet:
            return
        line = self._line(progress)
        if self.live:
            self.live.update(Text(line))
        else:
            err.print(line, soft_wrap=True)

    def _line(self, progress: Progress) -> str:
        left = (progress.stages - progress.stage) * progress.rounds - progress.round - 1
        pieces = [
            f"{self.config.method['name']} seed {self.config.seed}",
            f"stage {progress.stage + 1}/{progress.stages}",
            f"round {progress.round + 1}/{progress.rounds}",
            *_progress_numbers(progress),
            f"{size(self.bytes)} moved",
            f"{self.seconds / self.done * left:.0f} s left at most",
        ]
        return "  ".join(pieces)


def _progress_numbers(progress: Progress) -> list[str]:
    tests = [e.accuracy for e in progress.events if isinstance(e, Score)]
    notes = next((e.notes for e in progress.events if isinstance(e, Round)), {})
    found = [f"loss {notes['loss']:.4f}"] if "loss" in notes else []
    valid = [value for name, value in notes.items() if name.startswith("valid ")]
    if valid:
        found.append(f"valid {max(valid):.4f}")
    if tests:
        found.append(f"accuracy {sum(tests) / len(tests):.4f}")
    return found


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def print_pairs(pairs: list[tuple[str, str]], title: str | None = None) -> None:
    shown = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for pair in pairs:
        shown.add_row(*map(Text, pair))
    out.print(shown)


def complain(what: str, where: str, remedy: str, exit_code: int) -> None:
    """Three lines on what is wrong, where, and what to do; then the end."""
    for name, text in (("error", what), ("where", where), ("to do", remedy)):
        print(f"{name}: {printable(text)}", file=sys.stderr)
    raise SystemExit(exit_code)


def counted(counts: Mapping[str, int]) -> str:
    shown = [f"{name}: {count:,}" if name else f"{count:,}" for name, count in counts.items()]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def print_grid(title: str, header: list[str], rows: list[list[str]]) -> None:
    shown = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in header:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    out.print(shown)
