"""Two or more results side by side: their metrics, and the paired differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from atoll.api.result import Result, load
from atoll.core.errors import UserError
from atoll.report.tables import Table, differences, gather, results
from atoll.report.verdict import comparison
from atoll.report.withheld import by_task, without_withheld

__all__ = ["Comparison", "compare"]

WIDTH = 100  # of the lines that explain a table


@dataclass(frozen=True, repr=False)
class Comparison:
    """The tables of the report that compare runs.

    >>> import atoll
    >>> small = {"data": "wine", "clients": 2, "rounds": 1, "widths": [4], "answer": False}
    >>> both = compare(atoll.run("fedavg", **small), atoll.run("alone", **small))
    >>> len(both.results.rows), len(both.tables)
    (2, 1)
    """

    results: Table
    differences: Table | None  # paired by seed and site; None where runs cannot be paired
    gains: Table | None  # of joining, where at least two runs have an answer

    @property
    def tables(self) -> list[Table]:
        """The tables that there are."""
        return [one for one in (self.results, self.differences, self.gains) if one is not None]

    def __repr__(self) -> str:
        return "\n\n".join(map(_text, self.tables))

    def _repr_html_(self) -> str:
        """The tables, for a notebook."""
        return "".join(map(_html, self.tables))


def compare(*several: Result | str | Path) -> Comparison:
    """Compare results, or folders of runs, that differ in more than their seed.

    Sites that an answer withholds are in no mean.

    >>> import atoll
    >>> small = {"data": "wine", "clients": 2, "rounds": 1, "widths": [4], "answer": False}
    >>> first = atoll.run("fedavg", "first", **small)
    >>> second = atoll.run("alone", "second", **small)
    >>> compare(first, "second").results.header[:2]
    ('model', 'accuracy, %')
    """
    folders: list[Path] = []
    for one in several:
        result = one if isinstance(one, Result) else load(one)
        folders += [run.folder for run in result.runs]
    if not folders:
        raise UserError("no runs", "atoll.compare", "give results, or folders of runs")
    groups = gather(list(dict.fromkeys(folders)))
    if len(groups) < 2:
        remedy = "give results of different configs; a result has all seeds of one"
        raise UserError("nothing to compare: one config", "atoll.compare", remedy)
    shown = {g.label: g for task in by_task(groups) for g in without_withheld(task)}
    groups = [shown[group.label] for group in groups]
    return Comparison(results(groups), differences(groups), comparison(groups))


def _lines(table: Table) -> list[list[str]]:
    return [list(table.header), *([cell.text for cell in row] for row in table.rows)]


def _text(table: Table) -> str:
    lines = _lines(table)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [_row(line, widths) for line in lines]
    return "\n".join([*rows, *wrap(table.caption, WIDTH)])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()


def _html(table: Table) -> str:
    header, *rows = _lines(table)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = ""
    for row in rows:
        body += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    caption = f"<caption>{escape(table.caption)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
