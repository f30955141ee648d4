"""Report on split networks: tasks by stage, prototypes, frozen weights, leaks."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atoll.core.record import Round, Score, Snapshot
from atoll.report import leakage
from atoll.report.figures import COLOURS, INK, SIZE, Picture, grid, quiet, style, svg
from atoll.report.section import Section
from atoll.report.tables import Cell, Group, Table
from atoll.report.units import SHARE

__all__ = ["overall", "section"]

METHODS = ("vleto", "splitnn")
NEIGHBOURS = 20.0  # perplexity of t-SNE
MOST = 600  # maximum points of a picture
STILL = 5e-4  # relative to its length: below this, a prototype has not moved
CLASSES = (*COLOURS, "#9b5d3b", "#d6b21f", "#4ec3e0")  # ten classes have ten colours
Array = np.ndarray[Any, Any]


def section(group: Group, number: int) -> Section | None:
    """Everything in the record of a split network besides its scores."""
    if group.method not in METHODS:
        return None
    pictures = [_map(group, f"map-{number}"), _lineage(group, f"prototypes-{number}")]
    listed = [_tasks(group), _held(group), _ancestry(group), leakage.table(group)]
    return Section(
        "Stage by stage",
        "Rows are tested without their labels, unless a model is called label_oracle. Prototypes "
        "are the mean embeddings of classes that the server keeps; they and the labels never "
        "leave it.",
        [picture for picture in pictures if picture],
        [table for table in listed if table],
    )


def _percent(value: float) -> Cell:
    return Cell(SHARE.bare(value), value)


def _tasks(group: Group) -> Table | None:
    """The accuracy of each task after each stage, and of all classes so far."""
    cells: dict[tuple[str, str, int], list[float]] = {}
    names = group.first.facts["tasks"]
    for run in group.runs:
        for event in run.events:
            if isinstance(event, Score) and event.rows:
                union = event.variant == "union"
                row = "all classes so far" if union else str(names[event.task])
                model = "" if union else event.variant
                cells.setdefault((row, model, event.stage), []).append(event.accuracy)
    stages = sorted({stage for *_, stage in cells})
    if not cells:
        return None
    rows = []
    last = "all classes so far"  # below the tasks
    for row, model in sorted(dict.fromkeys(key[:2] for key in cells), key=lambda k: k[0] == last):
        values = [float(np.mean(cells.get((row, model, s), [math.nan]))) for s in stages]
        rows.append((Cell(f"{row}: {model}" if model else row), *map(_percent, values)))
    return Table(
        "Test accuracy in % of each task after each stage, the mean over seeds.",
        ("task", *(f"after stage {stage + 1}" for stage in stages)),
        tuple(rows),
    )


def _held(group: Group) -> Table | None:
    """The share of each client's weights that were frozen at each stage."""
    shares: dict[tuple[str, int], float] = {}
    for event in group.first.events:
        if isinstance(event, Round):
            for note, value in event.notes.items():
                if note.startswith("frozen "):
                    shares[note.removeprefix("frozen "), event.stage] = value
    if not shares:
        return None
    stages = sorted({stage for _, stage in shares})
    rows = [
        (Cell(client), *(_percent(shares.get((client, s), math.nan)) for s in stages))
        for client in sorted({client for client, _ in shares})
    ]
    caption = "Weights of each site that were held back while it learned, in %."
    return Table(caption, ("site", *(f"stage {s + 1}" for s in stages)), tuple(rows))


def _snapshots(group: Group, name: str) -> list[Snapshot]:
    return [snapshot for snapshot in group.first.snapshots if snapshot.name == name]


def _paths(group: Group) -> dict[str, dict[int, Array]]:
    """The prototype of each class after each stage."""
    paths: dict[str, dict[int, Array]] = {}
    for snapshot in _snapshots(group, "prototypes"):
        for kind, row in zip(snapshot.rows, snapshot.values, strict=True):
            paths.setdefault(kind, {})[snapshot.stage] = np.array(row)
    return paths


def _steps(path: dict[int, Array]) -> dict[int, float]:
    """How far a prototype moved at each stage after its first, relative to its length then."""
    return {now: _away(path[now], path[last]) for last, now in pairwise(sorted(path))}


def _away(one: Array, other: Array) -> float:
    """The distance relative to the other's length."""
    return float(np.linalg.norm(one - other)) / max(float(np.linalg.norm(other)), 1e-12)


def _ancestry(group: Group) -> Table | None:
    """When each prototype was created, and how each later stage changed it."""
    paths = _paths(group)
    if not paths:
        return None
    stages = sorted({stage for path in paths.values() for stage in path})
    mixed = {snapshot.stage: set(snapshot.rows) for snapshot in _snapshots(group, "mixed")}
    rows = []
    for kind, path in paths.items():
        moved, again = _steps(path), {s for s, kinds in mixed.items() if kind in kinds}
        words = [_fate(s, min(path), moved.get(s, 0.0), s in again) for s in stages]
        rows.append((Cell(kind), *(Cell(word) for word in words)))
    caption = (
        "Where each prototype comes from: made at the stage that first has its class, mixed with "
        "the new mean where a later stage has the class again (in % of its length), else kept."
    )
    return Table(caption, ("class", *(f"stage {s + 1}" for s in stages)), tuple(rows))


def _fate(stage: int, first: int, moved: float, again: bool) -> str:
    if stage < first:
        return ""
    if stage == first:
        return "made"
    return f"mixed, moved {100 * moved:.1f} %" if again else "kept"


def _lineage(group: Group, name: str) -> Picture | None:
    """The distance of each prototype from its start, after each stage."""
    paths = {kind: path for kind, path in _paths(group).items() if len(path) > 1}
    moved = [away for path in paths.values() for away in _steps(path).values()]
    if all(away < STILL for away in moved):
        return None  # the weights were frozen, or no class came again: a flat line says nothing
    with style(name):
        figure = Figure(figsize=(5.2, 3.0))
        axes = figure.add_subplot()
        quiet(axes)
        for number, (kind, path) in enumerate(paths.items()):
            stages = sorted(path)
            far = [100 * _away(path[stage], path[stages[0]]) for stage in stages]
            dash = "-" if number < len(CLASSES) else "--"
            axes.plot([s + 1 for s in stages], far, dash, marker="o", label=kind,
                      color=CLASSES[number % len(CLASSES)])  # fmt: skip
        axes.set_xlabel("after stage")
        axes.set_ylabel("distance from where it began, %")
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=SIZE - 2, ncols=2, title="class", loc="upper left",
                    bbox_to_anchor=(1, 1))  # fmt: skip
        words = (
            "In % of a prototype's first length; a flat line is a class that did not come again."
        )
        return Picture(name, f"Drift of prototypes: {group.label}", words, svg(figure, name))


def _map(group: Group, name: str) -> Picture | None:
    """Test embeddings and prototypes on a plane (t-SNE), a panel for each stage."""
    embedded = [
        snapshot
        for snapshot in _snapshots(group, "embeddings")
        if len(snapshot.rows) > 3 * NEIGHBOURS
    ]
    prototypes = {snapshot.stage: snapshot for snapshot in _snapshots(group, "prototypes")}
    if not embedded:
        return None
    kinds = list(dict.fromkeys(kind for snapshot in embedded for kind in snapshot.rows))
    colours = {kind: CLASSES[i % len(CLASSES)] for i, kind in enumerate(sorted(kinds))}
    with style(name):
        across = min(2, len(embedded))
        down = math.ceil(len(embedded) / across)
        figure = Figure(figsize=(3.2 * across, 3.2 * down))
        for place, snapshot in enumerate(embedded, 1):
            axes = figure.add_subplot(down, across, place)
            means = prototypes.get(snapshot.stage)
            tops = np.array(means.values) if means and means.values else np.zeros((0, 2))
            points, stars = _plane(np.array(snapshot.values)[-MOST:], tops)
            _scatter(
                axes, points, snapshot.rows[-MOST:], stars, means.rows if means else (), colours
            )
            axes.set_title(f"after stage {snapshot.stage + 1}", loc="left")
        words = (
            "Some test rows of each task so far, by t-SNE (scikit-learn, perplexity "
            f"{NEIGHBOURS:.0f}); a colour is a row's true class, a star with its name the class's "
            "prototype. "
            "Distances between far groups mean nothing."
        )
        return Picture(name, f"Global embeddings: {group.label}", words, svg(figure, name))


def _plane(points: Array, tops: Array) -> tuple[Array, Array]:
    from sklearn.manifold import TSNE  # noqa: PLC0415 - takes a second

    both = np.concatenate([points, tops.reshape(len(tops), points.shape[1])])
    projection = TSNE(2, perplexity=NEIGHBOURS, init="pca", random_state=0, max_iter=500)
    places = np.asarray(projection.fit_transform(both.astype(np.float32)))
    return places[: len(points)], places[len(points) :]


def _scatter(
    axes: Any, points: Array, kinds: Sequence[str], stars: Array, names: Sequence[str],
    colours: dict[str, str],
) -> None:  # fmt: skip
    of = np.array(kinds)
    for kind, colour in colours.items():
        members = points[of == kind]
        axes.scatter(members[:, 0], members[:, 1], s=7, color=colour, alpha=0.6, linewidths=0)
    for (x, y), kind in zip(stars, names, strict=True):
        axes.plot([x], [y], marker="*", markersize=11, color=colours.get(kind, INK),
                  markeredgecolor=INK, markeredgewidth=0.8)  # fmt: skip
    starred = dict(zip(names, stars, strict=True))
    for kind in colours:
        members = points[of == kind]
        if kind in starred or len(members):  # beside its star, so that both can be seen
            place = starred[kind] if kind in starred else np.median(members, axis=0)
            axes.annotate(kind, place, (5, 4), textcoords="offset points", fontsize=SIZE + 1,
                          color=INK, weight="bold")  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.08)
    for spine in axes.spines.values():
        spine.set_alpha(0.25)


def overall(groups: Sequence[Group]) -> list[Picture]:
    """Runs side by side: every task after every stage, and accuracy over what they differ in."""
    ours = [group for group in groups if group.method in METHODS]
    pictures = [_side_by_side(ours, "tasks")] if len(ours) > 1 and _alike(ours) else []
    options = [group.first.config["method"] for group in ours]
    names = sorted({name for option in options for name in option})
    varied = [n for n in names if len({str(one.get(n)) for one in options}) > 1]
    numbers = [n for n in varied if all(isinstance(one.get(n), int | float) for one in options)]
    if len(ours) > 2 and numbers and len(numbers) == len(varied):
        pictures.append(_sensitivity(ours, numbers, "sensitivity"))
    return pictures


def _alike(groups: Sequence[Group]) -> bool:
    """Whether groups were tested on the same tasks after the same stages."""
    facts = [(group.first.facts["tasks"], group.first.facts["stages"]) for group in groups]
    return all(fact == facts[0] for fact in facts) and int(facts[0][1]) > 1


def _side_by_side(groups: Sequence[Group], name: str) -> Picture:
    """One line per run, as in printed ablations and sensitivity (Tables 2 to 5)."""
    tables = [_accuracies(group) for group in groups]
    columns = sorted({key for table in tables for key in table})
    cells = np.array([[table.get(key, math.nan) for key in columns] for table in tables])
    with style(name):
        figure = Figure(figsize=(1.6 + 0.42 * len(columns), 0.9 + 0.34 * len(groups)))
        axes = figure.add_subplot()
        grid(axes, cells)
        axes.set_yticks(range(len(groups)), [group.label for group in groups])
        last = len(groups[0].first.facts["tasks"])
        labels = ["all" if task == last else f"t{task + 1}" for _, task in columns]
        axes.set_xticks(range(len(columns)), labels)
        axes.tick_params(axis="x", top=False, labeltop=True, labelbottom=False)
        for stage in sorted({stage for stage, _ in columns}):
            places = [place for place, key in enumerate(columns) if key[0] == stage]
            axes.annotate(f"after {stage + 1}", (sum(places) / len(places), len(groups) - 0.4),
                          ha="center", va="top", annotation_clip=False)  # fmt: skip
            axes.axvline(places[-1] + 0.5, color=INK, linewidth=1.5, alpha=0.5)
        words = (
            "Test accuracy in % of each task (t1, t2, ...), and of all classes so far, after each "
            "stage; the mean over seeds."
        )
        return Picture(name, "Every task after every stage", words, svg(figure, name))


def _accuracies(group: Group) -> dict[tuple[int, int], float]:
    """By stage and task, the mean over seeds; all classes so far come after the last task."""
    cells: dict[tuple[int, int], list[float]] = {}
    last = len(group.first.facts["tasks"])
    for run in group.runs:
        for event in run.events:
            if isinstance(event, Score) and event.rows:
                task = last if event.variant == "union" else event.task
                cells.setdefault((event.stage, task), []).append(event.accuracy)
    return {key: float(np.mean(values)) for key, values in cells.items()}


def _sensitivity(groups: Sequence[Group], options: Sequence[str], name: str) -> Picture:
    """Accuracy after each stage over one option, or over the settings of several."""
    settings = [tuple(float(g.first.config["method"][n]) for n in options) for g in groups]
    order = sorted(set(settings))
    lines: dict[int, list[tuple[float, float]]] = {}
    for group, setting in zip(groups, settings, strict=True):
        by_stage: dict[int, list[float]] = {}
        for run in group.runs:
            for event in run.events:
                if isinstance(event, Score) and event.variant == run.headline:
                    by_stage.setdefault(event.stage, []).append(event.accuracy)
        place = setting[0] if len(options) == 1 else float(order.index(setting))
        for stage, values in by_stage.items():
            lines.setdefault(stage, []).append((place, 100 * float(np.mean(values))))
    title = " / ".join(options)
    with style(name):
        figure = Figure(figsize=(5.2, 3.0))
        axes = figure.add_subplot()
        quiet(axes)
        for number, (stage, line) in enumerate(sorted(lines.items())):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(*zip(*sorted(line), strict=True), marker="o", color=colour,
                      label=f"after stage {stage + 1}")  # fmt: skip
        if len(options) > 1:
            labels = [" / ".join(f"{value:g}" for value in setting) for setting in order]
            axes.set_xticks(range(len(order)), labels)
        axes.set_xlabel(title)
        axes.set_ylabel("test accuracy, %")
        axes.legend(fontsize=SIZE - 1, loc="upper left", bbox_to_anchor=(1, 1))
        words = f"Accuracy over {title}, the mean over seeds; other options are the same."
        return Picture(name, f"Sensitivity to {title}", words, svg(figure, name))
