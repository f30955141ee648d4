"""Attributes forgetting to a site's own training, or to what it received from others.

A run with `attribution = true` tests a site's model after each change, on every task known
by then. Each change in accuracy on a task after the stage at which it was learned is attributed
to the last action; the changes add up to backward transfer, the negative of forgetting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atoll.core.record import Score
from atoll.report.figures import COLOURS, INK, Picture, quiet, style, svg
from atoll.report.tables import Cell, Group, Table, number
from atoll.report.units import points
from atoll.runs.result import Run

__all__ = ["Share", "picture", "sentence", "shares", "table"]

DOINGS = {"after own": "own", "after others": "others"}


@dataclass(frozen=True)
class Share:
    """Changes in accuracy on earlier tasks; negative values are forgetting."""

    own: float
    others: float
    choice: float  # from the choice of the round whose model is used in the end

    @property
    def total(self) -> float:
        """The sum of all changes: backward transfer."""
        return self.own + self.others + self.choice


@dataclass(frozen=True)
class Step:
    """A site's accuracy on a task after an action."""

    stage: int
    round: int
    doing: str  # own, others, choice
    accuracy: float


def steps(run: Run) -> dict[tuple[str, int], list[Step]]:
    """By client and task, all tests in chronological order."""
    walks: dict[tuple[str, int], list[Step]] = {}
    for snapshot in run.snapshots:
        if snapshot.name in DOINGS:
            for task, (at, accuracy) in zip(snapshot.rows, snapshot.values, strict=True):
                step = Step(snapshot.stage, int(at), DOINGS[snapshot.name], accuracy)
                walks.setdefault((snapshot.part, int(task)), []).append(step)
    tested = [event for event in run.events if isinstance(event, Score) and event.rows]
    for event in tested:
        if (event.client, event.task) in walks and event.variant == run.headline:
            step = Step(event.stage, event.round, "choice", event.accuracy)
            walks[event.client, event.task].append(step)
    for walked in walks.values():
        walked.sort(key=lambda step: (step.stage, step.round, step.doing == "choice"))
    return walks


def shares(run: Run) -> dict[str, Share]:
    """For each client, the mean over the tasks known before the last stage."""
    starts, last = run.facts["known_at"], int(run.facts["stages"]) - 1
    by_client: dict[str, list[Share]] = {}
    for (client, task), walked in steps(run).items():
        later = [step for step in walked if step.stage > starts[task]]
        if starts[task] < last and later and len(later) < len(walked):
            before = [step for step in walked if step.stage <= starts[task]][-1]
            by_client.setdefault(client, []).append(_share([before, *later]))
    return {
        client: Share(*(_mean([getattr(s, part) for s in parts]) for part in PARTS))
        for client, parts in sorted(by_client.items())
    }


PARTS = ("own", "others", "choice")


def _share(walked: Sequence[Step]) -> Share:
    moved = dict.fromkeys(PARTS, 0.0)
    for before, step in pairwise(walked):
        moved[step.doing] += step.accuracy - before.accuracy
    return Share(**moved)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def table(group: Group) -> Table | None:
    """One row per site and one for all: the effects of own training and of received models."""
    by_run = [shares(run) for run in group.runs]
    clients = sorted({client for one in by_run for client in one})
    if not clients:
        return None
    clients = sorted({*clients, *group.withheld})
    chosen = any(abs(share.choice) > 1e-12 for one in by_run for share in one.values())
    columns = ("own", "others", *(("choice",) if chosen else ()), "total")
    rows = []
    for client in (*clients, ""):
        cells = [Cell(client or f"all {group.over_sites}")]
        for column in columns:
            seeds = [_values(one, client, column) for one in by_run]
            cells.append(number(seeds, signed=True))
        rows.append(tuple(cells))
    titles = {"own": "own training", "others": "from other sites", "total": "together"}
    titles["choice"] = "choice of the best round"
    caption = (
        f"{group.title(group.first.headline)}: changes in accuracy on tasks of earlier stages, "
        "after the stage at which each was learned; the mean over those tasks, and over seeds. "
        "Below zero something was forgotten. Together they are the backward transfer above."
        f"{group.withheld_note}"
    )
    return Table(caption, ("site", *(f"{titles[name]}, points" for name in columns)), tuple(rows))


def _values(shares_of: dict[str, Share], client: str, column: str) -> float:
    """The values of one client, or the mean over all clients."""
    return _mean([getattr(s, column) for id, s in shares_of.items() if client in (id, "")])


def sentence(group: Group) -> str:
    """A sentence for all sites together; empty if the record has no attribution."""
    by_run = [shares(run) for run in group.runs]
    own, others = (_mean([_values(one, "", part) for one in by_run if one]) for part in PARTS[:2])
    if not math.isfinite(own):
        return ""
    return (
        f"Accuracy on earlier tasks changed by {points(own)} through own training and by "
        f"{points(others)} through what came from other sites."
    )


def picture(group: Group, name: str) -> Picture | None:
    """Bars per site, and the accuracy on the first task step by step."""
    by_run = [shares(run) for run in group.runs]
    clients = sorted({client for one in by_run for client in one})
    if not clients:
        return None
    with style(name):
        figure = Figure(figsize=(8.6, max(2.6, 1.0 + 0.42 * len(clients))))
        bars, course = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _bars(bars, clients, by_run)
        _course(course, group)
        figure.subplots_adjust(wspace=0.3)
        words = (
            "Left: change of the accuracy on earlier tasks, in points, through own training and "
            "through what came from other sites. Right: accuracy on the first task, the mean over "
            f"seeds and {group.over_sites}; the colour of a piece shows what changed it. A dotted "
            "line is the end of a stage."
        )
        title = f"What causes forgetting: {group.label}"
        return Picture(name, title, words, svg(figure, name))


def _bars(axes: Axes, clients: Sequence[str], by_run: Sequence[dict[str, Share]]) -> None:
    quiet(axes)
    for part, colour, shift in (("own", COLOURS[1], -0.18), ("others", COLOURS[0], 0.18)):
        values = [100 * _mean([getattr(o[c], part) for o in by_run if c in o]) for c in clients]
        places = np.arange(len(clients)) + shift
        label = "own training" if part == "own" else "from other sites"
        axes.barh(places, values, height=0.34, color=colour, label=label)
    axes.axvline(0, color=INK, alpha=0.5, linewidth=1)
    axes.set_yticks(range(len(clients)), clients)
    axes.set_ylim(len(clients) - 0.4, -0.6)
    axes.set_xlabel("points; below 0: forgotten")
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8.5)


def _within(keys: Sequence[tuple[int, int, str]], place: int) -> float:
    """The position of a test in its round: before own training, after it, or at the end."""
    trained = [key for key in keys[: place + 1] if key[:2] == keys[place][:2] and key[2] == "own"]
    return 0.5 if keys[place][2] == "own" else float(bool(trained) or keys[place][2] == "choice")


def _course(axes: Axes, group: Group) -> None:
    """The accuracy on the first task: each line segment has the colour of its cause."""
    quiet(axes)
    walks = [walked for run in group.runs for (_, task), walked in steps(run).items() if task == 0]
    keys = [(step.stage, step.round, step.doing) for step in walks[0]]
    equal = [w for w in walks if [(s.stage, s.round, s.doing) for s in w] == keys]
    mean = [100 * _mean([walked[place].accuracy for walked in equal]) for place in range(len(keys))]
    colours = {"own": COLOURS[1], "others": COLOURS[0], "choice": COLOURS[6]}
    rounds = sorted({(stage, at) for stage, at, _ in keys})
    x = [rounds.index(key[:2]) + _within(keys, place) for place, key in enumerate(keys)]
    for place in range(1, len(keys)):
        pair = slice(place - 1, place + 1)
        axes.plot(x[pair], mean[pair], color=colours[keys[place][2]])
    for border in (p for p, (_, at) in enumerate(rounds) if at == 0 and p):
        axes.axvline(border, color=INK, alpha=0.3, linestyle=":")
    axes.set_title("accuracy on the first task, %", loc="left")
    axes.set_xlabel("rounds, all stages")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
