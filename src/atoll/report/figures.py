"""Figures of records: SVG that inherits its text colour, so that it is readable on dark pages."""

import io
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from atoll.core.record import Round, Score, Stage
from atoll.metrics import scores as metrics
from atoll.report.palette import COLOURS
from atoll.report.tables import Group
from atoll.report.units import DASH

__all__ = [
    "BEGINNING",
    "COLOURS",
    "INK",
    "SIZE",
    "Picture",
    "curves",
    "grid",
    "heat",
    "legend_entries",
    "quiet",
    "rows",
    "style",
    "svg",
]

INK = "#010203"  # stands for the page's own text colour
SIZE = 9.5  # points
BEGINNING = '<svg style="width:'  # start of every figure, which identifies it
SIDES, SCALE = ("width", "height"), 1.4  # screen pixels per point of the drawing
SMALLEST = 0.75  # minimum scale of a figure; below it scrolls, so that text stays readable
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text: searchable, readable aloud and copyable
    "text.parse_math": False,  # a dollar sign in a site's name is literal
    "font.family": ["sans-serif"],
    "font.size": SIZE,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": SIZE + 0.5,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Picture:
    """A figure, its file name, and its description in words."""

    name: str
    title: str
    words: str
    svg: str


@contextmanager
def style(name: str) -> Iterator[None]:
    """The style of all figures; `name` makes the names of elements reproducible."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the page's fonts cover more scripts
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        yield


def svg(figure: Figure, name: str, titles: Mapping[str, str] | None = None) -> str:
    """The figure as an element of a page: flexible size, transparent background, unique names.

    `titles` are hover texts by the id of an element.
    """
    file = io.BytesIO()
    figure.savefig(
        file, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.04,
        metadata={"Date": None, "Creator": None},
    )  # fmt: skip
    text = file.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    for id, words in (titles or {}).items():
        text = text.replace(f'<g id="{id}">', f'<g id="{id}"><title>{escape(words)}</title>', 1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', text)
    width, height = (float(text.split(f'{side}="')[1].split("pt")[0]) for side in SIDES)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    least = SMALLEST * width * SCALE
    style = f"{width * SCALE:.0f}px;min-width:{least:.0f}px;aspect-ratio:{width:g}/{height:g}"
    return text.replace("<svg", f'{BEGINNING}{style}"', 1)


def legend_entries(figure: Figure) -> tuple[list[Any], list[str]]:
    """Every line that a panel of a figure names, without duplicates."""
    by_label: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    return list(by_label.values()), list(by_label)


def quiet(axes: Axes) -> None:
    """Draw a grid and borders in the background."""
    axes.grid(True, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_alpha(0.35)


def _by_client(group: Group, variant: str) -> dict[str, float]:
    accuracies: dict[str, list[float]] = {}
    for (_, name), clients in group.accuracy.items():
        for client, value in clients.items():
            if name == variant and math.isfinite(value):
                accuracies.setdefault(client, []).append(value)
    return {client: sum(values) / len(values) for client, values in accuracies.items()}


def curves(groups: Sequence[Group], number: int) -> list[Picture]:
    """Loss, validation and test accuracy by round: one panel per run, axes shared by the story.

    `number` is that of the first group on the page.
    """
    pictures: list[Picture] = []
    for key, name in PANELS.items():
        lines = [_panel(group, key) for group in groups]
        every = [point for line in lines for point in line]
        if not every:
            continue
        right = max(x for x, _ in every)
        low, high = min(y for _, y in every), max(y for _, y in every)
        room = 0.06 * (high - low) or 0.5
        limits = (1 - 0.03 * right, 1.03 * right), (low - room, high + room)
        title = name.replace("accuracy", groups[0].first.score_name)
        for place, (group, line) in enumerate(zip(groups, lines, strict=True), number):
            if len(line) > 1:
                pictures.append(_curve(group, line, title, limits, f"{key}-{place}"))
    return pictures


PANELS = {"loss": "training loss", "valid": "validation accuracy, %", "test": "test accuracy, %"}
Limits = tuple[tuple[float, float], tuple[float, float]]


def _panel(group: Group, key: str) -> "Line":
    """The points of a panel; accuracy in percent."""
    if key == "loss":
        return _line(group, "loss")
    line = _tests(group) if key == "test" else _line(group, f"valid {group.first.headline}")
    return [(place, 100 * value) for place, value in line]


def _curve(group: Group, line: "Line", title: str, limits: Limits, name: str) -> Picture:
    with style(name):
        figure = Figure(figsize=(3.4, 2.4))
        axes = figure.add_subplot()
        quiet(axes)
        axes.set_xlabel("round")
        axes.set_ylabel(title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.plot(*zip(*line, strict=True), color=COLOURS[0])
        axes.set_xlim(limits[0])
        axes.set_ylim(limits[1])
        borders = _borders(group)
        for border in borders:
            axes.axvline(border, color=INK, alpha=0.3, linestyle=":")
        words = f"The mean over seeds and {group.over_sites}."
        if group.withheld and not name.startswith("test"):
            words = "The mean over seeds and all sites, withheld ones included: the record has no "
            words += "other."
        if borders:
            words += " A dotted line is the end of a stage."
        heading = f"{title.removesuffix(', %').capitalize()}: {group.label}"
        return Picture(name, heading, words, svg(figure, name))


Line = list[tuple[float, float]]  # (round counted over all stages from 1, value)


def _line(group: Group, note: str) -> Line:
    by_round: dict[int, list[float]] = {}
    for run in group.runs:
        rounds = [event for event in run.events if isinstance(event, Round)]
        for place, event in enumerate(rounds, 1):
            if note in event.notes and math.isfinite(event.notes[note]):
                by_round.setdefault(place, []).append(event.notes[note])
    return [(place, sum(v) / len(v)) for place, v in sorted(by_round.items())]


def _tests(group: Group) -> Line:
    by_round: dict[int, list[float]] = {}
    for run in group.runs:
        place = 0
        for event in run.events:
            place += isinstance(event, Round)
            if not isinstance(event, Score) or event.variant != run.headline or not event.rows:
                continue
            if math.isfinite(event.accuracy):
                by_round.setdefault(place, []).append(event.accuracy)
    return [(place, sum(v) / len(v)) for place, v in sorted(by_round.items())]


def _borders(group: Group) -> list[float]:
    ends = [event.rounds for event in group.first.events if isinstance(event, Stage)]
    return [float(end) + 0.5 for end in np.cumsum(ends)[:-1]]


def heat(group: Group, name: str) -> Picture | None:
    """Accuracy by site, task and stage; with one task by site and model."""
    first = group.first
    if not first.variants:
        return None
    variant = _widest(group)
    result = metrics.primary(first.events, variant, first.facts["known_at"])
    if result.accuracy.shape[1:] == (1, 1):
        return _models(group, name)
    if len(result.stages) < 2:
        return None  # the section on domains shows it
    cells = _mean_cells(group, variant)
    by_client = dict(zip(result.clients, cells, strict=True))
    names = [str(first.facts["tasks"][task]) for task in result.tasks]
    with style(name):
        _, tasks, stages = cells.shape
        clients = sorted({*result.clients, *group.withheld})
        across = min(len(clients), 4)
        down = math.ceil(len(clients) / across)
        wide, high = 0.9 + 0.42 * stages, 0.75 + 0.34 * tasks
        figure = Figure(figsize=(max(2.2, wide) * across, max(1.5, high) * down))
        for place, client in enumerate(clients):
            axes = figure.add_subplot(down, across, place + 1)
            unknown = range(tasks) if client in group.withheld else ()
            grid(axes, by_client.get(client, np.full((tasks, stages), math.nan)), unknown)
            axes.set_title(client, loc="left")
            axes.set_xticks(range(stages), [str(stage + 1) for stage in result.stages])
            axes.set_yticks(range(tasks), names if place % across == 0 else [""] * tasks)
            if place >= len(clients) - across:
                axes.set_xlabel("after stage")
        figure.subplots_adjust(wspace=0.18, hspace=0.65)
        words = (
            f"{group.title(variant)}: {first.score_name} in % of each site on each task after "
            "each stage, the mean over seeds. A cell is empty where the task was not tested."
            f"{group.withheld_note}"
        )
        heading = f"{first.score_name[:1].upper()}{first.score_name[1:]} by task and stage"
        return Picture(name, f"{heading}: {group.label}", words, svg(figure, name))


def _widest(group: Group) -> str:
    """The headline, or the first model tested on more tasks after more stages."""
    tested: dict[str, set[tuple[str, int, int]]] = {}
    for event in group.first.events:
        if isinstance(event, Score):
            tested.setdefault(event.variant, set()).add((event.client, event.task, event.stage))
    every = [group.first.headline, *group.first.variants]
    return max(every, key=lambda variant: len(tested.get(variant, ())))


def _mean_cells(
    group: Group, variant: str
) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    matrices = [
        metrics.primary(run.events, variant, run.facts["known_at"]).accuracy for run in group.runs
    ]
    same = [cells for cells in matrices if cells.shape == matrices[0].shape]
    return np.asarray(np.mean(np.stack(same), axis=0))


def _models(group: Group, name: str) -> Picture:
    """Accuracy by client and model."""
    variants = group.first.variants
    by_model = [_by_client(group, variant) for variant in variants]
    clients = sorted({*group.withheld, *(c for accuracies in by_model for c in accuracies)})
    cells = np.array([[accuracies.get(c, math.nan) for accuracies in by_model] for c in clients])
    with style(name):
        figure = Figure(figsize=(1.6 + 0.75 * len(variants), 0.9 + 0.34 * len(clients)))
        axes = figure.add_subplot()
        grid(axes, cells, [clients.index(client) for client in group.withheld])
        axes.set_xticks(range(len(variants)), [v or group.method for v in variants])
        axes.set_yticks(range(len(clients)), clients)
        score = group.first.score_name
        words = f"{group.label}: {score} in % of each model at each site, the mean over seeds."
        words += group.withheld_note
        heading = f"{score[:1].upper()}{score[1:]} by site: {group.label}"
        return Picture(name, heading, words, svg(figure, name))


def grid(
    axes: Axes,
    cells: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    withheld: Collection[int] = (),
) -> None:
    """A heat map with the number in each cell; a dash in rows that are withheld."""
    colours = mpl.colormaps["cividis"]
    for row in withheld:
        for column in range(cells.shape[1]):
            axes.text(column, row, DASH, ha="center", va="center")
    for (row, column), value in np.ndenumerate(cells):
        if math.isfinite(value):
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=colours(value), lw=0))
            ink = "white" if value < 0.55 else "black"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=ink)
    axes.set_xlim(-0.5, cells.shape[1] - 0.5)
    axes.set_ylim(cells.shape[0] - 0.5, -0.5)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def rows(group: Group, name: str) -> Picture | None:
    """The number of training, validation and test rows of each site."""
    holdings = group.first.facts.get("holdings")
    if not holdings:
        return None
    clients = sorted(holdings["sites"])
    with style(name):
        figure = Figure(figsize=(6.4, 0.9 + 0.3 * len(clients)))
        axes = figure.add_subplot()
        quiet(axes)
        left = np.zeros(len(clients))
        for part, colour in zip(("train", "valid", "test"), COLOURS, strict=False):
            counts = np.array([sum(holdings["sites"][client][part]) for client in clients], float)
            if not counts.any():
                continue
            axes.barh(range(len(clients)), counts, left=left, color=colour, label=part, height=0.6)
            left += counts
        axes.set_yticks(range(len(clients)), clients)
        axes.set_ylim(len(clients) - 0.4, -0.6)
        axes.set_xlabel("rows, all stages together")
        axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=SIZE - 1)
        words = "Rows for training, validation and test; sites may share test rows."
        return Picture(name, f"Rows by site: {group.label}", words, svg(figure, name))
