"""Figures of reproductions, as SVG."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["course_figure", "ratio_figure", "sensitivity_figure", "strength_figure", "svg"]

LINES = {
    "common": "Common",
    "local": "Local",
    "mu=0": "CHFL mu=0",
    "mu>0": "CHFL mu>0",
    "concat": "Concatenation",
}


def svg(figure: Figure) -> bytes:
    """A figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "atoll"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return buffer.getvalue()


def _values(measurement: dict[str, Any], variant: str) -> np.ndarray[Any, Any]:
    return np.array([run["accuracy"][variant] for run in measurement["runs"]])


def ratio_figure(measurements: Sequence[tuple[int, dict[str, Any]]]) -> bytes:
    """Accuracy over the share of common columns (Figure 4), and what mu > 0 adds to mu = 0."""
    figure = Figure(figsize=(9, 3.6))
    left, right = figure.subplots(1, 2)
    ratios = [ratio for ratio, _ in measurements]
    for variant, name in LINES.items():
        means = [float(_values(one, variant).mean()) for _, one in measurements]
        left.plot(ratios, means, marker="o", label=name)
    _labelled(left, "common columns, %", "test accuracy")
    left.legend(fontsize=8)
    for other, name in (
        ("mu=0", "mu>0 over mu=0"),
        ("local", "mu>0 over Local"),
        ("common", "mu>0 over Common"),
    ):
        gaps = [_values(one, "mu>0") - _values(one, other) for _, one in measurements]
        errors = [_error(gap) for gap in gaps]
        right.errorbar(ratios, [gap.mean() for gap in gaps], errors, marker="o", label=name)
    right.axhline(0, color="grey", linewidth=0.8)
    _labelled(right, "common columns, %", "paired gain")
    right.legend(fontsize=8)
    return svg(figure)


def _error(gap: np.ndarray[Any, Any]) -> float:
    """The standard error of a paired difference; unknown with one run."""
    return float(gap.std(ddof=1) / np.sqrt(len(gap))) if len(gap) > 1 else 0.0


def strength_figure(panels: Sequence[tuple[str, Sequence[tuple[str, dict[str, Any]]]]]) -> bytes:
    """The paired gain of each mu over mu = 0, on a log scale; a panel for each way to vary."""
    figure = Figure(figsize=(4.5 * len(panels), 4.4))
    for axes, (title, lines) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True
    ):
        for name, measurement in lines:
            strengths = sorted(
                float(v[3:])
                for v in measurement["runs"][0]["accuracy"]
                if v.startswith("mu=") and v != "mu=0"
            )
            gaps = [
                _values(measurement, f"mu={mu:g}") - _values(measurement, "mu=0")
                for mu in strengths
            ]
            errors = [_error(gap) for gap in gaps]
            axes.errorbar(strengths, [gap.mean() for gap in gaps], errors, marker="o", label=name)
        axes.set_xscale("log")
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        _labelled(axes, "mu", "paired gain over mu = 0")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}
        axes.legend(fontsize=8, frameon=False, **below)  # there it hides nothing
    figure.tight_layout()
    return svg(figure)


def sensitivity_figure(
    panels: Sequence[tuple[str, Sequence[tuple[float, Sequence[float]]]]],
) -> bytes:
    """Accuracy after each stage over an option's values; a panel for each option."""
    figure = Figure(figsize=(4.5 * len(panels), 3.6))
    for axes, (title, rows) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True
    ):
        places = [place for place, _ in rows]
        for stage in range(len(rows[0][1])):
            axes.plot(places, [v[stage] for _, v in rows], marker="o", label=f"after {stage + 1}")
        axes.set_title(title, fontsize=10)
        _labelled(axes, title.split(" ", maxsplit=1)[0], "test accuracy")
        axes.legend(fontsize=8)
    figure.tight_layout()
    return svg(figure)


def course_figure(lines: dict[str, list[list[list[float]]]]) -> bytes:
    """Accuracy by round, a panel for each task: method -> runs -> tasks -> rounds.

    A line is the mean over runs for as many rounds as all of them have.
    """
    tasks = len(next(iter(lines.values()))[0])
    figure = Figure(figsize=(2.3 * tasks, 2.6))
    panels = np.atleast_1d(figure.subplots(1, tasks, sharex=True, sharey=True))
    for task, axes in enumerate(panels):
        for name, runs in lines.items():
            rounds = min(len(run[task]) for run in runs)
            mean = np.mean([run[task][:rounds] for run in runs], axis=0)
            axes.plot(range(1, rounds + 1), mean, marker="o", markersize=3, label=name)
        axes.set_title(f"task {task + 1}", fontsize=10)
        _labelled(axes, "round", "test accuracy" if not task else "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    return svg(figure)


def _labelled(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
