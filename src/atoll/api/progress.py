"""A progress bar of a call: one line on a terminal, one display in a notebook, else nothing."""

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from rich.console import Console
from rich.live import Live

from atoll.runs.loop import Progress
from atoll.runs.pace import Pace, bar, one_line

__all__ = ["Bar"]

LEAST = 0.1  # seconds between two updates of a notebook


class Bar:
    """Shows how far a call is while it is a context; `watch` takes the rounds."""

    def __init__(self, shown: bool = True, runs: int = 1) -> None:
        self.shown, self.pace = shown, Pace(runs)
        self._screen: _Terminal | _Notebook | None = None

    def __enter__(self) -> "Bar":
        self._screen = _screen() if self.shown else None
        self.say("preparing")
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen:
            self._screen.clear()

    def watch(self, progress: Progress) -> None:
        """Show a round that has ended."""
        pace = self.pace
        pace.add(progress)
        run = [f"run {pace.run + 1}/{pace.runs}"] if pace.runs > 1 else []
        stage = [f"stage {progress.stage + 1}/{progress.stages}"] if progress.stages > 1 else []
        place = [*run, *stage, f"round {progress.round + 1}/{progress.rounds}"]
        self.say("  ".join([pace.left, *place]))

    def say(self, words: str) -> None:
        """Show what is being done."""
        if self._screen:
            self._screen.show(self.pace.share, words)


class _Terminal:
    """A line on the terminal that is removed at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, transient=True)
        self.live.start()

    def show(self, share: float, words: str) -> None:
        self.live.update(one_line(self.console, bar(share), f"  {words}"))

    def clear(self) -> None:
        self.live.stop()


class _Notebook:
    """A display of a cell that is emptied at the end."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # noqa: PLC0415 - a kernel has it

        self.html: Callable[[str], Any] = HTML
        self.handle: Any = display(HTML(""), display_id=True)
        self.last = 0.0

    def show(self, share: float, words: str) -> None:
        if time.monotonic() - self.last >= LEAST:
            self.last = time.monotonic()
            element = f'<progress value="{share:.4f}"></progress>'
            self.handle.update(self.html(f"{element} {escape(words)}"))

    def clear(self) -> None:
        self.handle.update(self.html(""))


def _screen() -> _Terminal | _Notebook | None:
    """Where a bar is seen; None: nowhere."""
    shell = sys.modules.get("IPython")
    if shell is not None and hasattr(shell.get_ipython(), "kernel"):
        return _Notebook()
    console = Console(stderr=True)
    return _Terminal(console) if console.is_terminal else None
