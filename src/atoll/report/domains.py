"""Runs on several domains: accuracy by site and domain, and views of the sites' networks."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atoll.core.record import Score, Snapshot
from atoll.metrics import scores as metrics
from atoll.report.figures import (
    COLOURS,
    INK,
    SIZE,
    Picture,
    grid,
    legend_entries,
    quiet,
    style,
    svg,
)
from atoll.report.section import Section
from atoll.report.tables import Cell, Group, Table, over_sites
from atoll.report.units import SHARE
from atoll.runs.result import Run

__all__ = ["has_domains", "overall", "section"]

Array = np.ndarray[Any, Any]
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
LEFT_OUT = ("name", "seed", "engine", "public")  # in which runs on several public sets may differ
PLACES = ("own test rows", "public images")  # what correlations are seen on


def section(group: Group, number: int) -> Section | None:
    """Accuracy by site and domain, over rounds, correlations of classes, and features."""
    if not has_domains(group):
        return None
    pictures = [_matrices(group, f"domains-{number}"), _over_rounds(group, f"rounds-{number}")]
    pictures += [
        _correlations(group, place, f"correlation-{number}-{i}") for i, place in enumerate(PLACES)
    ]
    pictures.append(_features(group, f"features-{number}"))
    words = (
        "A site learns from one domain (own) and is tested on all. Accuracy on others is the plain "
        "mean over the other domains, whatever the number of their test rows."
        f"{group.withheld_note}"
    )
    return Section("Domains", words, [p for p in pictures if p], [_table(group)])


def has_domains(group: Group) -> bool:
    """Whether these runs cover several domains and have been tested."""
    first = group.first
    split = first.config.get("scenario", {}).get("split")
    return split == "domains" and bool(first.variants) and len(first.facts["tasks"]) > 1


def _matrix(group: Group, variant: str, number: int | None = None) -> Array:
    """Accuracy by site and domain after a round (default: the last), averaged over seeds."""
    return np.asarray(np.mean([_cells(run, variant, number) for run in group.runs], axis=0))


def _cells(run: Run, variant: str, number: int | None = None) -> Array:
    """Accuracy of one run by site and domain."""
    clients, tasks = run.facts["clients"], run.facts["tasks"]
    scores = [s for s in run.scores if s.variant == variant and s.part == "test" and s.rows]
    last = max((s.round for s in scores), default=0) if number is None else number
    cells = np.full((len(clients), len(tasks)), math.nan)
    for score in scores:
        if score.round == last:
            cells[clients.index(score.client), score.task] = score.accuracy
    return cells


def _split(cells: Array) -> tuple[Array, Array]:
    """For each site the accuracy on its own domain, and the mean over the others."""
    own = cells.diagonal()
    return own, (cells.sum(1) - own) / max(1, cells.shape[1] - 1)


def _tested(group: Group) -> list[int]:
    """The indices of sites whose results are shown."""
    clients = enumerate(group.first.facts["clients"])
    return [place for place, client in clients if client not in group.withheld]


def _table(group: Group) -> Table:
    """Own and other domains by site and model."""
    facts, rows = group.first.facts, []
    for variant in group.first.variants:
        own, others = _split(_matrix(group, variant))
        names = [f"{c} ({t})" for c, t in zip(facts["clients"], facts["tasks"], strict=False)]
        means = own[_tested(group)].mean(), others[_tested(group)].mean()
        for name, own_value, other in zip([*names, "mean"], [*own, means[0]], [*others, means[1]],
                                     strict=True):  # fmt: skip
            values = [Cell(SHARE.bare(value), float(value)) for value in (own_value, other)]
            rows.append((Cell(variant or group.method), Cell(name), *values))
    caption = (
        "Test accuracy on the own domain and on the others, the mean over seeds."
        f"{group.withheld_note}"
    )
    return Table(
        caption, ("model", "site (its domain)", "own domain, %", "other domains, %"), tuple(rows)
    )


def _matrices(group: Group, name: str) -> Picture:
    """A heat map of site by domain for each model."""
    facts, variants = group.first.facts, group.first.variants
    clients, tasks = list(facts["clients"]), list(facts["tasks"])
    withheld = [clients.index(client) for client in group.withheld]
    with style(name):
        figure = Figure(
            figsize=((1.0 + 0.55 * len(tasks)) * len(variants) + 0.8, 1 + 0.34 * len(clients))
        )
        for place, variant in enumerate(variants, 1):
            axes = figure.add_subplot(1, len(variants), place)
            grid(axes, _matrix(group, variant), withheld)
            axes.set_title(variant or group.method, loc="left")
            axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
            axes.set_yticks(range(len(clients)), clients if place == 1 else [""] * len(clients))
        figure.subplots_adjust(wspace=0.25)
        words = "Rows are sites, columns the domains they are tested on; the diagonal is their own."
        return Picture(name, f"Who knows which domain: {group.label}", words, svg(figure, name))


def _over_rounds(group: Group, name: str) -> Picture | None:
    """Accuracy on own and other domains by round (Figure 6 of the FCCL paper)."""
    scores: list[Score] = group.first.scores
    rounds = sorted({score.round for score in scores})
    if len(rounds) < 2:
        return None
    tested = _tested(group)
    with style(name):
        figure = Figure(figsize=(6.8, 2.7))
        panels = [figure.add_subplot(1, 2, place) for place in (1, 2)]
        for colour, variant in zip(COLOURS, group.first.variants, strict=False):
            parts = [_split(_matrix(group, variant, number)) for number in rounds]
            for axes, lines in zip(panels, zip(*parts, strict=True), strict=True):
                means = [100 * float(np.mean(line[tested])) for line in lines]
                axes.plot([r + 1 for r in rounds], means, marker="o", ms=3, color=colour,
                          label=variant or group.method)  # fmt: skip
        for axes, title in zip(panels, ("own domain", "other domains"), strict=True):
            quiet(axes)
            axes.set_title(title, loc="left")
            axes.set_xlabel("round")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("test accuracy, %")
        panels[0].legend(fontsize=SIZE - 1)
        words = f"The mean over seeds and {group.over_sites} at every test."
        return Picture(name, f"Domains over rounds: {group.label}", words, svg(figure, name))


def overall(groups: Sequence[Group]) -> list[Picture]:
    """Bars over public sets and over the parts of FCCL, if runs of several are given."""
    ours = [group for group in groups if has_domains(group) and group.first.config.get("public")]
    alike: dict[str, list[Group]] = {}
    for group in ours:
        config = {k: v for k, v in group.first.config.items() if k not in LEFT_OUT}
        alike.setdefault(json.dumps(config, sort_keys=True), []).append(group)
    pictures = [
        _by_public(several, f"public-sets-{number}")
        for number, several in enumerate((a for a in alike.values() if len(a) > 1), 1)
    ]
    parts = [group for group in ours if group.method == "fccl"]
    if len({_part(group) for group in parts}) > 1:
        pictures.append(_ablation(parts, "ablation"))
    return pictures


def _public(group: Group) -> str:
    """The public images of a group by name."""
    public = group.first.config["public"]
    return Path(str(public.get("images") or public.get("name", "patterns"))).name


def _part(group: Group) -> str:
    """The part that an FCCL run leaves out."""
    options, lacking = group.first.config["method"], []
    if not options.get("collaborate", True):
        lacking.append("without the collaborative part")
    if options.get("lambda_loc", 1.0) == 0:
        lacking.append("without the continual part")
    elif (only := options.get("teachers", "both")) != "both":
        lacking.append({"inter": "last round's teacher only", "intra": "first teacher only"}[only])
    if options.get("off_diagonal", -1) == 0:
        lacking.append("off-diagonal 0")
    return ", ".join(lacking) or "FCCL"


def _by_public(groups: Sequence[Group], name: str) -> Picture:
    """A method's accuracy by site for each public set (Figure 7 of the FCCL paper)."""
    first, bars = groups[0], _Bars({}, {})
    clients, tasks = (list(first.first.facts[key]) for key in ("clients", "tasks"))
    places = [f"{c} ({t})" for c, t in zip(clients, tasks, strict=False)]
    for group in groups:
        for run in group.runs:
            both = _split(_cells(run, run.headline))
            for panel, values in zip((bars.own, bars.others), both, strict=True):
                mean = values[_tested(group)].mean()
                for place, value in zip([*places, "mean"], [*values, mean], strict=True):
                    panel.setdefault((place, _public(group)), []).append(float(value))
    words = f"Each bar is the mean over seeds. {_spread(groups)} All else is the same."
    return Picture(name, f"Public sets: {first.method}", words, _drawn(bars, name, turned=True))


def _ablation(groups: Sequence[Group], name: str) -> Picture:
    """FCCL with and without its parts, by public set (Figure 8)."""
    mean = f"the mean over seeds and {over_sites(groups)}"
    words = f"FCCL and runs without some of it: {mean}. {_spread(groups)}"
    return Picture(name, "What the parts of FCCL add", words, _drawn(_ablated(groups), name))


def _ablated(groups: Sequence[Group]) -> "_Bars":
    bars = _Bars({}, {})
    for group in groups:
        for run in group.runs:
            both = _split(_cells(run, run.headline))
            for panel, values in zip((bars.own, bars.others), both, strict=True):
                mean = float(values[_tested(group)].mean())
                panel.setdefault((_public(group), _part(group)), []).append(mean)
    return bars


def _spread(groups: Sequence[Group]) -> str:
    several = any(len(group.runs) > 1 for group in groups)
    return "Lines are one deviation over seeds." if several else "One seed: no spread is known."


@dataclass(frozen=True)
class _Bars:
    """By position on the axis and kind of bar, the accuracy of each seed."""

    own: dict[tuple[str, str], list[float]]
    others: dict[tuple[str, str], list[float]]


def _drawn(bars: _Bars, name: str, turned: bool = False) -> str:
    """Two panels of bars: the own domain, and other domains."""
    places, kinds = (list(dict.fromkeys(key[i] for key in bars.own)) for i in (0, 1))
    width = 0.8 / len(kinds)
    with style(name):
        figure = Figure(figsize=(7.6, 2.7))
        panels = {"own domain": bars.own, "other domains": bars.others}
        for number, (title, values) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, 2, number)
            quiet(axes)
            for i, kind in enumerate(kinds):
                present = [place for place in places if (place, kind) in values]
                x = [places.index(p) + (i - (len(kinds) - 1) / 2) * width for p in present]
                spreads = [
                    metrics.spread([100 * value for value in values[p, kind]]) for p in present
                ]
                error = [d if len(values[p, kind]) > 1 else 0.0
                         for p, (_, d) in zip(present, spreads, strict=True)]  # fmt: skip
                axes.bar(x, [mean for mean, _ in spreads], 0.9 * width, label=kind,
                         color=COLOURS[i % len(COLOURS)])  # fmt: skip
                if any(error):
                    axes.errorbar(x, [mean for mean, _ in spreads], error, fmt="none", ecolor=INK,
                                  elinewidth=1, capsize=2)  # fmt: skip
            angle, side = (30, "right") if turned else (0, "center")
            axes.set_xticks(range(len(places)), places, rotation=angle, ha=side)
            axes.set_title(title, loc="left")
        figure.subplots_adjust(wspace=0.28)
        figure.axes[0].set_ylabel("test accuracy, %")
        figure.axes[1].legend(fontsize=SIZE - 1, loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, name)


def _snapshots(group: Group, name: str) -> list[Snapshot]:
    """The last snapshots with this name from the first seed, one per site."""
    last = {snapshot.part: snapshot for snapshot in group.first.snapshots if snapshot.name == name}
    return [last[part] for part in sorted(last)]


def _correlations(group: Group, place: str, name: str) -> Picture | None:
    """The correlations of outputs for different classes, site by site (Figure 5)."""
    snapshots = _snapshots(group, f"correlation, {place}")
    if not snapshots:
        return None
    with style(name):
        figure = Figure(figsize=(1.9 * len(snapshots) + 0.6, 2.2))
        for number, snapshot in enumerate(snapshots, 1):
            axes = figure.add_subplot(1, len(snapshots), number)
            axes.imshow(np.array(snapshot.values), vmin=-1, vmax=1, cmap="RdBu_r")
            axes.set_title(snapshot.part, loc="left")
            axes.tick_params(length=0)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        shades = mpl.cm.ScalarMappable(mpl.colors.Normalize(-1, 1), "RdBu_r")
        figure.colorbar(shades, ax=figure.axes, shrink=0.8, pad=0.02)
        what = "the mean of all sites" if place == "public images" else "themselves"
        words = (
            f"Correlation over {place} of a site's outputs (rows: classes) with {what} (columns). "
            f"{_sentence(snapshots)} First seed, end of the run; seen by each site, sent to nobody."
        )
        title = f"Cross-correlation, {place}: {group.label}"
        return Picture(name, title, words, svg(figure, name))


def _sentence(snapshots: Sequence[Snapshot]) -> str:
    matrices = [np.array(snapshot.values) for snapshot in snapshots]
    diagonal = float(np.mean([m.diagonal().mean() for m in matrices]))
    rest = float(np.mean([m[~np.eye(len(m), dtype=bool)].mean() for m in matrices]))
    return f"On the diagonal {diagonal:.2f} on average, elsewhere {rest:.2f}."


def _features(group: Group, name: str) -> Picture | None:
    """Features of test rows of all domains in two dimensions, site by site (Figure 4)."""
    snapshots = [snapshot for snapshot in _snapshots(group, "features") if len(snapshot.rows) > 8]
    if not snapshots:
        return None
    with style(name):
        figure = Figure(figsize=(2.4 * len(snapshots) + 0.4, 2.7))
        for place, snapshot in enumerate(snapshots, 1):
            axes = figure.add_subplot(1, len(snapshots), place)
            points = _flat(np.array(snapshot.values))
            domains, labels = zip(*(row.rsplit("|", 1) for row in snapshot.rows), strict=True)
            names = list(dict.fromkeys(domains))
            for mark, domain in zip(MARKS * len(names), names, strict=False):
                index = [i for i, d in enumerate(domains) if d == domain]
                colours = [mpl.colormaps["tab20"](int(labels[i]) % 20) for i in index]
                axes.scatter(points[index, 0], points[index, 1], c=colours, marker=mark, s=9, lw=0)
                axes.scatter([], [], c="grey", marker=mark, s=14, label=domain)
            axes.set_title(snapshot.part, loc="left")
            axes.set_xticks([])
            axes.set_yticks([])
        figure.axes[0].legend(*legend_entries(figure), fontsize=SIZE - 2, ncols=4, loc="upper left",
                              bbox_to_anchor=(0, -0.02))  # fmt: skip
        words = (
            "t-SNE of what the last layer of each site's network reads, for up to 40 test rows of "
            "each domain: colour is the class, the mark is the domain. Distances far apart mean "
            "little. First seed; seen by each site, sent to nobody."
        )
        return Picture(name, f"Features: {group.label}", words, svg(figure, name))


def _flat(values: Array) -> Array:
    from sklearn.manifold import TSNE  # noqa: PLC0415 - takes a second

    perplexity = min(20, (len(values) - 1) / 3)
    points = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(values)
    return np.asarray(points)
