"""Metrics, classes and calibration of the joined model and the one trained alone, site by site."""

import math

from matplotlib.figure import Figure

from atoll.report.answer import Answer, answer_of
from atoll.report.figures import COLOURS, INK, SIZE, Picture, legend_entries, quiet, style, svg
from atoll.report.section import Section
from atoll.report.tables import Cell, Group, Table
from atoll.report.units import DASH, SHARE, unit_of

__all__ = ["section"]

WORDS = (
    "On the test rows of each site. Expected calibration error is the mean distance between "
    "predicted probability and observed share of right predictions."
)
ERRORS = "On the test rows of each site, in the unit of the label; R2 has none."
MARKS = {"joined": ("o", COLOURS[0]), "alone": ("s", COLOURS[1])}
MOST = 12  # maximum number of sites in a figure


def section(group: Group, name: str) -> Section | None:
    """Metrics and reliability diagrams; None if the answer has none."""
    answer = answer_of(group)
    if answer is None or not any(site.quality for site in answer.sites):
        return None
    picture = _reliability(answer, group.label, name)
    tables = [_table(answer)]
    if answer.regression:
        return Section("Errors", ERRORS, [], tables)
    if any(quality.classes for site in answer.sites for quality in site.quality):
        tables += [_classes(answer), *_confusions(answer)]
    return Section("Calibration and other metrics", WORDS, [picture] if picture else [], tables)


def _table(answer: Answer) -> Table:
    """One row per site and model."""
    every = [quality.metrics for site in answer.sites for quality in site.quality]
    metrics_of_all = list(dict.fromkeys(name for metrics in every for name in metrics))
    names = [n for n in metrics_of_all if any(math.isfinite(m.get(n, math.nan)) for m in every)]
    rows = []
    for site in answer.sites:
        for quality in site.quality:
            values = [quality.metrics.get(name, math.nan) for name in names]
            cells = [Cell(unit_of(n).bare(v), v) for n, v in zip(names, values, strict=True)]
            rows.append((Cell(site.site), Cell(quality.model), *cells))
    for withheld in sorted(answer.withheld):
        rows.append((Cell(withheld), Cell(DASH), *[Cell(DASH, math.nan)] * len(names)))
    heads = [f"{name}{_comma(unit_of(name).value_name)}" for name in names]
    caption = "A dash means that the value is undefined"
    caption += " or withheld." if answer.withheld else "."
    return Table(caption, ("site", "model", *heads), tuple(rows))


def _names(answer: Answer, count: int) -> list[str]:
    """The names of classes, or their numbers if the answer has none."""
    return list(answer.classes) or [f"class {number}" for number in range(count)]


def _classes(answer: Answer) -> Table:
    """One row per site, model and class that has test rows or is predicted."""
    rows = []
    for site in answer.sites:
        for quality in site.quality:
            names = _names(answer, len(quality.classes))
            for name, (recall, precision, support) in zip(names, quality.classes, strict=True):
                if support or math.isfinite(precision):
                    cells = [Cell(SHARE.bare(value), value) for value in (recall, precision)]
                    counted = Cell(f"{support:,}", support)
                    rows.append((Cell(site.site), Cell(quality.model), Cell(name), counted, *cells))
    header = ("site", "model", "class", "test rows", "recall, %", "precision, %")
    return Table(
        "Recall and precision by class. A dash means that the value is undefined.",
        header,
        tuple(rows),
    )


def _confusions(answer: Answer) -> list[Table]:
    """For each site the joined model's rows by true and predicted class; few classes only."""
    tables = []
    for site in answer.sites[:MOST]:
        for quality in site.quality:
            if quality.model == "joined" and 0 < len(quality.confusion) <= MOST:
                names = _names(answer, len(quality.confusion))
                pairs = zip(names, quality.confusion, strict=True)
                rows = [(Cell(name), *(Cell(f"{n:,}", n) for n in row)) for name, row in pairs]
                caption = f"Confusion matrix of the joined model at {site.site}, in test rows."
                header = ("true class", *(f"predicted {name}" for name in names))
                tables.append(Table(caption, header, tuple(rows)))
    return tables


def _comma(unit: str) -> str:
    return f", {unit.strip()}" if unit.strip() else ""


def _reliability(answer: Answer, label: str, name: str) -> Picture | None:
    """Observed frequency by predicted probability, one panel per site."""
    sites = [site for site in answer.sites if any(q.reliability for q in site.quality)][:MOST]
    if not sites:
        return None
    across = min(4, len(sites))
    down = math.ceil(len(sites) / across)
    with style(name):
        figure = Figure(figsize=(2.2 * across, 2.3 * down))
        for place, site in enumerate(sites, 1):
            axes = figure.add_subplot(down, across, place)
            quiet(axes)
            axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linestyle=":")
            for quality in site.quality:
                mark, colour = MARKS.get(quality.model, ("^", COLOURS[2]))
                points = [(100 * x, 100 * y) for x, y, rows in quality.reliability if rows]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=mark, markersize=4, color=colour,
                              label=quality.model)  # fmt: skip
            axes.set_xlim(0, 100)
            axes.set_ylim(0, 100)
            axes.set_title(site.site, loc="left")
        figure.axes[0].set_ylabel("observed, %")
        figure.axes[0].set_xlabel("predicted, %")
        figure.legend(*legend_entries(figure), ncols=2, loc="lower left", fontsize=SIZE - 1,
                      bbox_to_anchor=(0.1, 0.97))  # fmt: skip
        figure.subplots_adjust(wspace=0.35, hspace=0.5)
        words = "On the dotted line predicted probabilities are right on average."
        if len(sites) == MOST:
            words += f" The {MOST} sites with the largest gain."
        return Picture(name, f"Reliability: {label}", words, svg(figure, name))
