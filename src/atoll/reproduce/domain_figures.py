"""Figures of reproductions with several domains, as SVG."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from atoll.reproduce.figures import svg

__all__ = ["bars", "matrices", "over_rounds"]

ACROSS = 4  # matrices beside each other
KINDS = {"intra": "own domain", "inter": "other domains"}
Lines = Mapping[str, Sequence[Mapping[int, Mapping[str, float]]]]  # method -> seeds -> round
Cells = Mapping[str, Sequence[Sequence[Sequence[float]]]]  # method -> seeds -> client -> domain


def over_rounds(lines: Lines) -> bytes:
    """Accuracy over rounds on the own and on other domains, the mean over seeds (Figure 6)."""
    figure = Figure(figsize=(9, 3.6))
    for axes, (kind, words) in zip(figure.subplots(1, 2), KINDS.items(), strict=True):
        for method, seeds in lines.items():
            rounds = sorted(set.intersection(*(set(seed) for seed in seeds)))
            values = [[seed[r][kind] for r in rounds] for seed in seeds]
            axes.plot(rounds, np.mean(values, 0), marker="o", markersize=3, label=method)
        axes.set_xlabel("round")
        axes.set_ylabel(f"test accuracy, {words}")
        axes.grid(alpha=0.3)
    return _with_legend(figure)


def _with_legend(figure: Figure) -> bytes:
    """One legend for all panels, below them, where it hides nothing."""
    figure.tight_layout()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=max(1, len(labels)),
        fontsize=8, frameon=False,
    )  # fmt: skip
    return svg(figure)


def matrices(accuracies: Cells, domains: Sequence[str]) -> bytes:
    """Accuracy of every client (rows) on every domain (columns), the mean over seeds."""
    rows = -(-len(accuracies) // ACROSS)
    columns = min(len(accuracies), ACROSS)
    figure = Figure(figsize=(2.2 * columns, 2.6 * rows))
    panels = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
    for axes in panels[len(accuracies) :]:
        axes.set_axis_off()
    for axes, (method, seeds) in zip(panels, accuracies.items(), strict=False):
        cells = np.mean(seeds, 0)
        axes.imshow(cells, vmin=0, vmax=1, cmap="cividis")
        for (row, column), value in np.ndenumerate(cells):
            ink = "white" if value < 0.55 else "black"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=ink)
        axes.set_title(method, fontsize=10)
        names = list(domains)[: len(cells)]
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("tested on", fontsize=8)
    for first in panels[::columns]:
        first.set_ylabel("model of", fontsize=8)
    figure.tight_layout()
    return svg(figure)


def bars(groups: Mapping[str, Mapping[tuple[str, str], Sequence[float]]]) -> bytes:
    """Means and deviations by public set and variant (Figures 7 and 8)."""
    figure = Figure(figsize=(9, 3.4))
    for axes, (kind, accuracies) in zip(
        figure.subplots(1, len(groups)), groups.items(), strict=True
    ):
        places = list(dict.fromkeys(public for public, _ in accuracies))
        variants = list(dict.fromkeys(variant for _, variant in accuracies))
        width = 0.8 / len(variants)
        for number, variant in enumerate(variants):
            present = [p for p in places if (p, variant) in accuracies]
            x = [places.index(p) + number * width for p in present]
            values = [accuracies[p, variant] for p in present]
            spread = [float(np.std(v)) for v in values]
            axes.bar(x, [float(np.mean(v)) for v in values], width, yerr=spread, label=variant)
        axes.set_xticks([i + width * (len(variants) - 1) / 2 for i in range(len(places))], places)
        axes.set_ylabel(f"test accuracy, {KINDS[kind]}")
        axes.grid(alpha=0.3, axis="y")
    return _with_legend(figure)
