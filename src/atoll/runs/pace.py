"""Progress of runs and an upper bound of the remaining time, for progress bars."""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from atoll.runs.loop import Progress

__all__ = ["Pace", "bar", "duration", "one_line"]

BAR = 20  # characters of a progress bar


@dataclass
class Pace:
    """Counts the rounds of successive runs of one config."""

    runs: int = 1
    run: int = 0  # number of the current run
    rounds: int = 0  # completed rounds
    seconds: float = 0.0
    share: float = 0.0  # completed fraction of all rounds; skipped rounds count as completed
    rest: int = 0  # remaining rounds, at most

    def add(self, progress: Progress) -> None:
        """Count a round."""
        self.rounds += 1
        self.seconds += progress.seconds
        every = progress.stages * progress.rounds
        past = self.run * every + progress.stage * progress.rounds + progress.round + 1
        self.share = past / (self.runs * every)
        self.rest = self.runs * every - past

    @property
    def left(self) -> str:
        """An upper bound of the remaining time, in words."""
        return f"{duration(self.seconds / self.rounds * self.rest)} left at most"


def bar(share: float) -> Text:
    """A progress bar of fixed length, filled to a share."""
    full = round(share * BAR)
    return Text.assemble(("━" * full, "green"), ("━" * (BAR - full), "dim"))


def one_line(console: Console, *parts: str | Text) -> Text:
    """Text truncated at the terminal's width, so that it never wraps."""
    line = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
    line.truncate(max(1, console.width - 1), overflow="ellipsis")
    return line


def duration(seconds: float) -> str:
    """Format seconds in a suitable unit.

    >>> duration(7.2), duration(90), duration(7300)
    ('7 s', '1 min 30 s', '2 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
