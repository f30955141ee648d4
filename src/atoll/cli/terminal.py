"""Output of the command: tables, progress, errors; and interruption."""

import json
import math
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll import engines
from atoll.cli.console import aside, err, out, traceback_file
from atoll.core.errors import EXIT_INTERRUPTED, InterruptedRunError, UserError, printable
from atoll.core.record import Message, Round, Score
from atoll.metrics.verdicts import in_words
from atoll.runs.answer import answer_folder, write_answer
from atoll.runs.config import RunConfig
from atoll.runs.facts import few_rows
from atoll.runs.loop import Progress
from atoll.runs.pace import Pace, bar, one_line
from atoll.runs.result import Run, left_out, plain, shown_metrics, table, withheld_sites

__all__ = [
    "Watching",
    "compute_answer",
    "counted",
    "guarded",
    "print_answer",
    "print_choices",
    "print_grid",
    "print_pairs",
    "print_result",
    "size",
    "stoppable",
]


T = TypeVar("T")
NARROWEST = 60  # characters of a second column below which pairs are printed on separate lines


@contextmanager
def stoppable(words: str, *signals: int) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks to stop and prints `words`, the second stops immediately."""
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        aside(f"{words}; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, *signals)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def guarded(folder: Path, work: Callable[[Callable[[], bool]], T]) -> T:
    """Run a function until it ends or the user stops it; a fault leaves a traceback file."""
    with stoppable("stopping after this round") as stopping:
        try:
            return work(stopping)
        except KeyboardInterrupt as error:
            raise _stopped("interrupted; the last checkpoint is kept", folder) from error
        except InterruptedRunError as error:
            raise _stopped("interrupted; the state is saved", folder) from error
        except UserError:
            raise
        except Exception as error:
            error.add_note(traceback_file(error, folder))
            raise


def _stopped(what: str, folder: Path) -> UserError:
    return UserError(what, str(folder), "continue with --resume", EXIT_INTERRUPTED)


class Watching:
    """Shows a run as it goes: live on a terminal, plain lines in a log, nothing when quiet."""

    def __init__(self, config: RunConfig, quiet: bool, folder: Path, verbose: bool = False) -> None:
        self.config, self.quiet, self.folder, self.verbose = config, quiet, folder, verbose
        self.bytes, self.pace = 0, Pace()
        self.live = Live(console=err, transient=True) if err.is_terminal and not quiet else None

    def __enter__(self) -> Callable[[Progress], None]:
        if self.live:
            self.live.start()
            self.live.update(one_line(err, f"{self._title}  preparing"))
        return self.watch

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def watch(self, progress: Progress) -> None:
        self.bytes += sum(e.bytes for e in progress.events if isinstance(e, Message))
        self.pace.add(progress)
        if self.quiet:
            return
        if self.pace.rounds == 1 and (warning := few_rows(Run(self.folder).facts)):
            aside(f"warning: {warning}")
        left = self.pace.left
        pieces = [
            self._title,
            f"stage {progress.stage + 1}/{progress.stages}",
            f"round {progress.round + 1}/{progress.rounds}",
            *_progress_numbers(progress),
            f"{size(self.bytes)} moved",
        ]
        if self.live:
            self.live.update(one_line(err, bar(self.pace.share), f" {left}  ", "  ".join(pieces)))
        if self.verbose or not self.live:
            err.print("  ".join([*pieces, left]), soft_wrap=True)

    @property
    def _title(self) -> str:
        return f"{self.config.method['name']} seed {self.config.seed}"


def _progress_numbers(progress: Progress) -> list[str]:
    tests = [e for e in progress.events if isinstance(e, Score)]
    notes = next((e.notes for e in progress.events if isinstance(e, Round)), {})
    numbers = [f"loss {notes['loss']:.4f}"] if "loss" in notes else []
    valid = [value for name, value in notes.items() if name.startswith("valid ")]
    if valid:
        numbers.append(f"valid {max(valid):.4f}")
    if tests:
        mean = sum(score.accuracy for score in tests) / len(tests)
        numbers.append(f"{tests[0].name} {mean:.4f}")
    return numbers


def compute_answer(folders: Sequence[Path], quiet: bool) -> dict[str, Any]:
    """Compute whether joining helps, with a line of progress."""
    live = Live(console=err, transient=True) if err.is_terminal and not quiet else None
    lines: list[str] = []

    def watch(words: str) -> None:
        lines.append(words)
        if live:
            live.update(one_line(err, f"answer  {words}"))
        elif not quiet and len(lines) == 1:
            aside("comparing with the same method at each site alone")

    with live or nullcontext():
        return guarded(
            answer_folder(folders),
            lambda stopping: write_answer(folders, engines.load, watch, stopping),
        )


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print one sentence on all sites and one line per site."""
    for line in in_words(answer):
        out.print(Text(printable(line)), soft_wrap=True)


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def print_choices(run: Run) -> None:
    """Print how the jobs of a run were computed, and why."""
    path = run.folder / "engine.json"
    for choice in json.loads(path.read_text()).values() if path.exists() else ():
        members = f"{choice['members']} client{'s' * (choice['members'] > 1)}"
        aside(printable(f"{choice['work']} of {members}: {choice['mode']}, {choice['reason']}"))


def print_pairs(pairs: list[tuple[str, str]], title: str | None = None) -> None:
    """Print two columns; if these are too wide, print each second part below its first."""
    left = max((cell_len(first) for first, _ in pairs), default=0)
    right = max((cell_len(second) for _, second in pairs), default=0)
    if left + 2 + min(right, NARROWEST) > out.width:
        _print_below(pairs, title)
        return
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for pair in pairs:
        grid.add_row(*map(Text, pair))
    out.print(grid)


def _print_below(pairs: list[tuple[str, str]], title: str | None) -> None:
    """Print pairs in lines of their own, unbroken: the terminal wraps, and a line can be copied."""
    if title:
        out.print(Text(title, style="italic"))
    for first, second in pairs:
        out.print(Text(first, style="bold"), soft_wrap=True)
        if second:
            out.print(Text(f"    {second}"), soft_wrap=True)


def counted(counts: Mapping[str, int]) -> str:
    listed = [f"{name}: {count:,}" if name else f"{count:,}" for name, count in counts.items()]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")


def print_grid(title: str, header: list[str], rows: list[list[str]]) -> None:
    grid = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in header:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    out.print(grid)


def _as_json(run: Run, withheld: Collection[str]) -> dict[str, Any]:
    """The results of one run; means exclude withheld sites."""
    metrics = shown_metrics(run, withheld)
    headline = metrics.get(run.headline, {})
    return {
        "folder": str(run.folder),
        "seed": run.config["seed"],
        "data": run.facts["data"],
        "r2" if run.regression else "accuracy": headline.get("final_accuracy", math.nan),
        "seconds": run.seconds,
        "metrics": metrics,
        **({"memory": run.memory} if run.memory else {}),
        **({"exclusions": run.exclusions} if run.exclusions else {}),
    }


def print_result(
    runs: list[Run], folder: Path, as_json: bool, answer: Mapping[str, Any] | None = None
) -> None:
    """Print the results of runs that differ in their seed alone, as a table or as JSON."""
    withheld = withheld_sites(answer)
    if as_json:
        body = [_as_json(run, withheld) for run in runs]
        answered = {"answer": answer} if answer else {}
        print(json.dumps(plain({"runs": body, **answered}), allow_nan=False))
        return
    header, rows = table(runs, answer)
    method, facts = runs[0].config["method"]["name"], runs[0].facts
    grid = Table(title=f"{method} on {facts['data']['title']}, {len(facts['clients'])} clients")
    for i, name in enumerate(header):
        grid.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*row)
    out.print(grid)
    without = left_out(runs, withheld)
    for sentence in dict.fromkeys(line for run in runs for line in run.exclusions):
        out.print(Text(printable(sentence)), soft_wrap=True)
    if without:
        out.print(without, soft_wrap=True)
    if answer:
        print_answer(answer)
    metrics = [run.metrics[run.headline] for run in runs]
    moved = sum(m["bytes_up"] + m["bytes_down"] for m in metrics)
    line = f"{size(moved)} moved between the sites and the server; the record is in {folder}"
    out.print(line, soft_wrap=True)
