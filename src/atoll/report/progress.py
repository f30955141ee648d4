"""The progress of a run: its state, completed share, time left, and a sparkline per site."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from atoll.core.errors import UserError
from atoll.core.record import FAILURE, Message, Round, Score
from atoll.core.storage import LOCK, FolderLock
from atoll.report.units import percent, size
from atoll.runs.result import Run

__all__ = ["STATES", "Progress", "Spark", "progress"]

STATES: Mapping[str, str] = {  # state -> symbol
    "running": "▶", "stopped": "■", "failed": "✕", "finished": "✓", "unreadable": "?",
}  # fmt: skip
RECENT = 20  # number of rounds that predict the time left
MOST = 24  # maximum number of sites with a sparkline
POINTS = 60  # maximum points of a sparkline
WIDE, TALL = 100.0, 24.0  # view box of a sparkline


@dataclass(frozen=True)
class Spark:
    """A small line plot and its last value."""

    name: str
    points: str  # points of an SVG polyline
    last: str


@dataclass(frozen=True)
class Progress:
    """The progress of one run on the live page."""

    folder: str
    title: str
    state: str
    words: str  # explanation of the state
    rounds: int  # completed rounds
    percent: float
    left: str  # time left; empty unless the run is running
    bytes: str  # bytes that left the sites so far
    sparks: tuple[Spark, ...]
    more: int  # number of sites without a sparkline, for lack of space

    @property
    def symbol(self) -> str:
        """A symbol for the state, independent of colour."""
        return STATES[self.state]


def progress(folder: Path) -> Progress:
    """The progress of the run in a folder."""
    run = Run(folder)
    try:
        rounds, stages = int(run.config["rounds"]), int(run.facts["stages"])
        finished = [event for event in run.events if isinstance(event, Round)]
        title = f"{run.config['method']['name']} on {run.facts['data']['title']}"
        sparks = _sparks(run)
        seconds = list(run.times)
    except (UserError, KeyError) as error:
        reason = f"The record cannot be read now: {error}"
        return Progress(str(folder), folder.name, "unreadable", reason, 0, 0.0, "", "", (), 0)
    state, words = _state(folder, len(finished))
    stage, number = (finished[-1].stage, finished[-1].round + 1) if finished else (0, 0)
    share = 1.0 if state == "finished" else (stage + number / rounds) / stages
    if state in ("running", "stopped") and finished:
        staged = f"stage {stage + 1} of {stages}, " if stages > 1 else ""
        words = f"{staged}round {number} of {rounds}{words}"
    remaining = rounds * (stages - stage) - number
    sent = sum(e.bytes for e in run.events if isinstance(e, Message) and e.sender != "server")
    return Progress(
        str(folder), title, state, words, len(finished), round(100 * share, 1),
        _left(seconds, remaining) if state == "running" else "", size(sent),
        tuple(sparks[:MOST]), max(0, len(sparks) - MOST),
    )  # fmt: skip


def _state(folder: Path, rounds: int) -> tuple[str, str]:
    """The state of a run, with an explanation and the next step."""
    if (folder / "result.json").exists():
        return "finished", f"{rounds} rounds"
    if FolderLock.has_writer(folder):
        return "running", "" if rounds else "the first round is running"
    if (folder / FAILURE).exists():
        return "failed", f"{_reason(folder)}; fix it, then continue with --resume"
    if (folder / LOCK).exists():
        return "failed", "its process was killed; continue with --resume"
    return "stopped", "; continue with --resume" if rounds else "continue with --resume"


def _reason(folder: Path) -> str:
    try:
        return str(json.loads((folder / FAILURE).read_text())["reason"]).rstrip(".")
    except (OSError, ValueError, KeyError, TypeError):
        return "the reason is not known"


def _left(seconds: Sequence[float], rounds: int) -> str:
    """An upper bound of the time left, at the pace of the last rounds."""
    if len(seconds) < 2:
        return ""
    left = fmean(seconds[-RECENT:]) * rounds
    if left < 60:
        return f"at most {max(1, math.ceil(left))} s left"
    if left < 5400:
        return f"at most {math.ceil(left / 60)} min left"
    return f"at most {left / 3600:.1f} h left"


def _sparks(run: Run) -> list[Spark]:
    """Test accuracy by site if measured at least twice, else the training loss.

    Sites withheld by the answer have none.
    """
    withheld = run.answer.get("withheld", {})
    by_site: dict[str, dict[tuple[int, int], list[float]]] = {}
    losses: list[float] = []
    for event in run.events:
        if isinstance(event, Score) and event.variant == run.headline and event.rows:
            moments = by_site.setdefault(event.client, {})
            moments.setdefault((event.stage, event.round), []).append(event.accuracy)
        elif isinstance(event, Round) and math.isfinite(event.notes.get("loss", math.nan)):
            losses.append(event.notes["loss"])
    sparks = []
    for site, moments in sorted(by_site.items()):
        means = [fmean(values) for _, values in sorted(moments.items())]
        if len(means) > 1 and site not in withheld:
            sparks.append(Spark(site, _polyline(means), percent(means[-1])))
    if not sparks and len(losses) > 1:
        sparks.append(Spark("training loss, all sites", _polyline(losses), f"{losses[-1]:.3f}"))
    return sparks


def _polyline(values: Sequence[float]) -> str:
    """The points of a line from left to right, the lowest value at the bottom."""
    step = max(1, math.ceil(len(values) / POINTS))
    shown = [*values[:-1:step], values[-1]]
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    places = []
    for number, value in enumerate(shown):
        x = WIDE * number / max(1, len(shown) - 1)
        y = TALL - 1 - (TALL - 2) * (value - low) / span
        places.append(f"{x:.1f},{y:.1f}")
    return " ".join(places)
