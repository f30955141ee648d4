"""A ledger of reproduced cells: ours, theirs, a verdict, and what it took."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

__all__ = ["Cell", "Claim", "Ledger", "as_json", "as_markdown", "means_and_spreads", "paired"]


@dataclass(frozen=True)
class Cell:
    """One cell of a paper's table."""

    table: str
    row: str
    column: str
    theirs: float | None  # the paper's mean, None where it prints none
    their_spread: float | None
    ours: tuple[float, ...] = ()  # one for each run, empty where the data are not here
    splits: tuple[float, ...] = ()  # the means of the feature splits
    command: str = ""
    config: str = ""  # hash of what was asked for
    data: str = ""  # hash of the data
    note: str = ""  # partial data, a stand-in, or why there is no number
    order_holds: bool = True  # whether its row has the paper's order of methods at this cell

    @property
    def mean(self) -> float:
        """The mean over runs."""
        return float(np.mean(self.ours))

    @property
    def spread(self) -> float:
        """The deviation over runs (ddof = 0), as the specification reads the paper's."""
        return float(np.std(self.ours))

    @property
    def verdict(self) -> str:
        """Inside the paper's spread; else whether the order of methods holds at least."""
        if not self.ours:
            return "open"
        if self.theirs is None:
            return "no figure in the paper"
        if self.their_spread is None:  # a single number
            return f"{self.mean - self.theirs:+.4f}"
        if abs(self.mean - self.theirs) <= self.their_spread:
            return "inside the paper's spread"
        return "outside, the order holds" if self.order_holds else "differs"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and what our runs say to it."""

    text: str
    holds: bool | None  # None: the difference is within two standard errors
    evidence: str
    open: bool = False  # what it needs was not run, or one run alone, of which no error is known


@dataclass(frozen=True)
class Ledger:
    """All results of a reproduction."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()


def means_and_spreads(text: str) -> dict[str, tuple[tuple[float, float] | None, ...]]:
    """A printed table by row: `name | mean±deviation ...`, with - for an empty cell."""
    table = {}
    for line in text.strip().splitlines():
        name, _, cells = line.partition("|")
        pairs = [cell.split("±") for cell in cells.split()]
        table[name.strip()] = tuple(
            (float(pair[0]), float(pair[1])) if len(pair) > 1 else None for pair in pairs
        )
    return table


def paired(
    text: str, one: Sequence[float], other: Sequence[float], splits: Sequence[int] = ()
) -> Claim:
    """The claim that one is above the other, on paired runs, beyond two standard errors.

    Runs of one split of the data are not independent of each other. So where runs share splits, the
    difference must also exceed two standard errors of the means of splits.
    """
    difference = np.asarray(one) - np.asarray(other)
    mean, above = float(difference.mean()), int((difference > 0).sum())
    if len(difference) == 1:
        return Claim(text, None, f"{mean:+.4f} in the one run that there is", open=True)
    error = _error(difference)
    evidence = f"{mean:+.4f} ± {error:.4f}, above in {above} of {len(difference)} runs"
    if len({*splits}) > 1:
        names = sorted({*splits})
        means = np.asarray([difference[np.asarray(splits) == split].mean() for split in names])
        error = max(error, _error(means))
        listed = ", ".join(f"{value:+.4f}" for value in means)
        evidence += f"; splits {listed} (± {_error(means):.4f})"
    return Claim(text, mean > 0 if abs(mean) > 2 * error else None, evidence)


def _error(values: np.ndarray) -> float:
    """The standard error of their mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def as_json(ledger: Ledger) -> dict[str, Any]:
    """The ledger as plain values."""
    cells = []
    for cell in ledger.cells:
        derived = {"mean": cell.mean, "spread": cell.spread} if cell.ours else {}
        cells.append({**asdict(cell), **derived, "verdict": cell.verdict})
    claims = [asdict(claim) for claim in ledger.claims]
    for claim in claims:
        if not claim["open"]:
            del claim["open"]
    return {"title": ledger.title, "facts": ledger.facts, "cells": cells, "claims": claims}


def as_markdown(ledger: Ledger) -> str:
    """The ledger as tables."""
    lines = [f"## {ledger.title}", ""]
    for table in dict.fromkeys(cell.table for cell in ledger.cells):
        lines += [f"### {table}", "", *_table([c for c in ledger.cells if c.table == table]), ""]
    if ledger.claims:
        lines += ["### The paper's claims", "", "| claim | holds | evidence |", "|---|---|---|"]
        for claim in ledger.claims:
            answer = {True: "yes", False: "**no**", None: "within noise"}[claim.holds]
            answer = "open" if claim.open else answer
            lines.append(f"| {claim.text} | {answer} | {claim.evidence} |")
        lines.append("")
    return "\n".join(lines)


def _table(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| row | method | paper | ours | over splits | verdict | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        theirs = "-" if cell.theirs is None else f"{cell.theirs:.4f}"
        if cell.their_spread is not None:
            theirs += f" ± {cell.their_spread:.4f}"
        ours = f"{cell.mean:.4f} ± {cell.spread:.4f}" if cell.ours else "-"
        splits = f"± {float(np.std(cell.splits)):.4f}" if cell.splits else "-"
        parts = (cell.row, cell.column, theirs, ours, splits, cell.verdict, cell.note)
        lines.append(f"| {' | '.join(parts)} |")
    return lines
