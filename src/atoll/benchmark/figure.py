"""The figure of a benchmark: accuracy over stages, and forgetting over bytes."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from atoll.benchmark.compare import Line, lines
from atoll.benchmark.measure import Ledger
from atoll.benchmark.protocol import BOUNDS
from atoll.report.palette import COLOURS
from atoll.reproduce.figures import svg

__all__ = ["figure"]

STYLES = ("-", "--", ":")


def figure(ledgers: Sequence[Ledger]) -> bytes:
    """One row per data set, at own cost."""
    plot = Figure(figsize=(10, 3.8 * len(ledgers)))
    axes = plot.subplots(len(ledgers), 2, squeeze=False)
    for (left, right), ledger in zip(axes, ledgers, strict=True):
        for number, line in enumerate(lines(ledger, None).values()):
            _draw(left, right, line, number)
        left.set_title(ledger.data)
        left.set_xlabel("stages learned")
        left.set_ylabel("accuracy on their classes")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.set_xlabel("MB that cross in training")
        right.set_ylabel("forgetting")
        right.set_xscale("log")
        left.legend(fontsize=7, ncols=2)
    plot.tight_layout()
    return svg(plot)


def _draw(left: Axes, right: Axes, line: Line, number: int) -> None:
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS)]
    stages = range(1, len(line.by_stage) + 1)
    if line.name == "pooled":
        left.axhline(line.mean, color=colour, linestyle="-.", linewidth=1, label=line.name)
        return
    left.plot(stages, line.by_stage, color=colour, linestyle=style, marker="o", label=line.name)
    if line.name in BOUNDS or math.isnan(line.forgetting):
        return
    right.plot(line.bytes / 1e6, line.forgetting, "o", color=colour)
    right.annotate(line.name, (line.bytes / 1e6, line.forgetting), fontsize=7,
                   xytext=(4, 3), textcoords="offset points")  # fmt: skip
