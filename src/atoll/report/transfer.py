"""Who took from whom: tasks that were given to other clients, how much they were used, what for.

From the snapshots of FedSeIT's server and clients: which finished tasks a client was given and how
like its own they were found, its attention to each, and how it does where one of them is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from atoll.core.record import Round, Score, Snapshot
from atoll.report.figures import COLOURS, INK, SIZE, Picture, legend_entries, quiet, style, svg
from atoll.report.section import Section
from atoll.report.tables import Cell, Group, Table
from atoll.report.units import DASH

__all__ = ["Link", "links", "section"]

MOST = 120  # links that are drawn; of more the most used
WORDS = (
    "Each client receives finished tasks of other clients and of its own. Attention is the size of "
    "the factor alpha of a task, as a share of all received tasks; the mean over filter sizes. The "
    "gain is the validation loss without the filters of the task, which are set to zero without "
    "training again, minus the loss with them. Above zero the task helps."
)


@dataclass(frozen=True)
class Link:
    """A task that a client was given for a task of its own."""

    client: str
    stage: int
    source: str
    source_stage: int
    similarity: float  # NaN where tasks were not compared
    attention: float  # share of what the client was given
    gain: float  # loss on validation rows without it minus with it
    points: float  # accuracy on test rows with it minus without it

    @property
    def used(self) -> float:
        """The attention, 0 where it is not known."""
        return self.attention if math.isfinite(self.attention) else 0.0


def section(group: Group, number: int) -> Section | None:
    """What clients took from each other; of the first seed."""
    used = links(group.first.snapshots)
    if not used:
        return None
    clients = sorted(group.first.facts["clients"])
    pictures = [_map(used, clients, group.first.facts["tasks"], f"transfer-{number}")]
    tested = [client for client in clients if client not in group.withheld]
    course = _course(group, tested, f"course-{number}")
    pictures += [course] if course else []
    helped = sum(link.gain > 0 for link in used)
    measured = sum(math.isfinite(link.gain) for link in used)
    own = sum(link.source == link.client for link in used)
    words = (
        f"Seed {group.first.config['seed']}: clients received {len(used)} finished tasks, {own} "
        f"of them their own. The gain is known for {measured}, and {helped} of these help. "
    )
    return Section(
        "Transfer between sites",
        words + WORDS + group.withheld_note,
        pictures,
        [_table(used, group.first.facts["tasks"])],
    )


def links(snapshots: Sequence[Snapshot]) -> list[Link]:
    """Every task that was given to a client, from the server's and the clients' snapshots."""
    by_name = {(snapshot.stage, snapshot.part, snapshot.name): snapshot for snapshot in snapshots}
    transfers = []
    for (stage, part, name), slots in by_name.items():
        if name != "slot":
            continue
        similar = by_name[stage, part, "similarity"]
        for row, client in enumerate(slots.rows):
            use = by_name.get((stage, client, "attention"))
            left = by_name.get((stage, client, "left out"))
            for column, task in enumerate(slots.columns):
                slot = slots.values[row][column]
                if math.isfinite(slot) and use and left:
                    source, source_stage = task.rsplit(" task ", 1)
                    numbers = (similar.values[row][column], *_used(use, left, int(slot)))
                    transfers.append(Link(client, stage, source, int(source_stage), *numbers))
    return transfers


def _used(use: Snapshot, left: Snapshot, slot: int) -> tuple[float, float, float]:
    """Attention as a share, gain in loss, and points of accuracy."""
    filters = [values for name, values in zip(use.rows, use.values, strict=True) if "conv" in name]
    sizes = np.abs(np.array(filters)).mean(0)
    share = float(sizes[slot] / sizes.sum()) if sizes.sum() > 0 else math.nan
    loss, accuracy = left.values
    return share, loss[slot + 1] - loss[0], accuracy[0] - accuracy[slot + 1]


def _table(transfers: Sequence[Link], tasks: Sequence[str]) -> Table:
    header = ("given to", "for task", "task of", "its task", "similarity", "attention",
              "gain in loss", "gain in accuracy, points")  # fmt: skip
    rows = tuple(
        (
            Cell(link.client), Cell(str(tasks[link.stage]), link.stage), Cell(link.source),
            Cell(str(tasks[link.source_stage]), link.source_stage),
            _cell(link.similarity, "{:.3f}"), _cell(100 * link.attention, "{:.0f} %"),
            _cell(link.gain, "{:+.4f}"), _cell(100 * link.points, "{:+.1f}"),
        )
        for link in transfers
    )  # fmt: skip
    caption = "Each task that a client was given; a dash where no similarity was computed."
    return Table(caption, header, rows)


def _cell(value: float, form: str) -> Cell:
    return Cell(form.format(value) if math.isfinite(value) else DASH, value)


def _map(
    transfers: Sequence[Link], clients: Sequence[str], tasks: Sequence[str], name: str
) -> Picture:
    """Tasks as points, from left to right; a line from the task that was given to its user."""
    most_used = sorted(transfers, key=lambda link: -link.used)[:MOST]
    stages = 1 + max(link.stage for link in transfers)
    with style(name):
        figure = Figure(figsize=(1.6 + 1.5 * stages, 1.2 + 0.62 * len(clients)))
        axes = figure.add_subplot()
        for link in most_used:
            axes.add_patch(_arrow(link, clients))
        for stage in range(stages):
            axes.plot([stage] * len(clients), range(len(clients)), "o", color=INK, markersize=7)
        axes.set_xticks(range(stages), [str(task) for task in tasks[:stages]])
        axes.set_yticks(range(len(clients)), clients)
        axes.set_xlim(-0.4, stages - 0.6)
        axes.set_ylim(len(clients) - 0.4, -0.6)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.legend(handles=_legend(), ncols=2, loc="lower left", bbox_to_anchor=(0, 1),
                    fontsize=SIZE - 1)  # fmt: skip
        words = "From the finished task to the client and task it was given to; wider: more used."
        if len(most_used) < len(transfers):
            words += f" The {len(most_used)} most used of {len(transfers)}."
        return Picture(name, "Transfer map", words, svg(figure, name))


def _arrow(link: Link, clients: Sequence[str]) -> FancyArrowPatch:
    begin = (link.source_stage, clients.index(link.source))
    end = (link.stage, clients.index(link.client))
    return FancyArrowPatch(
        begin, end, arrowstyle="-|>", mutation_scale=9, shrinkA=5, shrinkB=6,
        connectionstyle=f"arc3,rad={0.12 if begin[1] != end[1] else -0.25}",
        linewidth=0.6 + 4 * link.used, alpha=0.75,
        color=COLOURS[1] if link.gain <= 0 else COLOURS[0],
    )  # fmt: skip


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], color=COLOURS[0], linewidth=2.5, label="helps"),
        Line2D([], [], color=COLOURS[1], linewidth=2.5, label="does not help"),
    ]


def _course(group: Group, clients: Sequence[str], name: str) -> Picture | None:
    """The accuracy of each task at each client after each round in which it was tested."""
    run, tested = group.first, _tests(group)
    places = {place for lines in tested.values() for line in lines.values() for place, _ in line}
    if len(places) < 2:
        return None
    across = min(len(clients), 4)
    down = math.ceil(len(clients) / across)
    with style(name):
        figure = Figure(figsize=(2.9 * across, 2.3 * down))
        for place, client in enumerate(clients):
            axes = figure.add_subplot(down, across, place + 1)
            quiet(axes)
            for task, line in sorted(tested.get(client, {}).items()):
                colour = COLOURS[task % len(COLOURS)]
                axes.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=2.5,
                          label=str(run.facts["tasks"][task]))  # fmt: skip
            axes.set_title(client, loc="left")
            axes.set_ylim(0, 103)
            if place >= len(clients) - across:
                axes.set_xlabel("round, counted over all tasks")
        figure.axes[0].legend(*legend_entries(figure), fontsize=SIZE - 2)
        figure.subplots_adjust(hspace=0.45)
        words = (
            "Accuracy in % of each task on its whole test set, at every round in which it was "
            "tested: with score_every = 1 after each round, else at the end of each task."
        )
        return Picture(name, "Accuracy of each task by round", words, svg(figure, name))


def _tests(group: Group) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """Client -> task -> (round counted over all stages, accuracy in %)."""
    tested: dict[str, dict[int, list[tuple[int, float]]]] = {}
    place = 0
    for event in group.first.events:
        place += isinstance(event, Round)
        if isinstance(event, Score) and event.variant == group.first.headline and event.rows:
            tasks = tested.setdefault(event.client, {})
            tasks.setdefault(event.task, []).append((place, 100 * event.accuracy))
    return tested
