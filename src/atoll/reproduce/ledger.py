"""A ledger of reproduced cells and claims: ours, theirs, a verdict, and what it took."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from atoll.metrics.replication import Replication, interval, replicate, runs_needed
from atoll.metrics.verdicts import MARGIN
from atoll.reproduce.claims import Claim, Judged, judge
from atoll.reproduce.margins import RULES, Rule

__all__ = [
    "VERDICTS", "Cell", "CellVerdict", "Ledger", "as_json", "counted", "means_and_spreads",
    "needed",
]  # fmt: skip

VERDICTS = ("reproduced", "refuted", "undecided", "undecidable here")
CellVerdict = Literal["reproduced", "refuted", "undecided", "undecidable here", "not printed"]


@dataclass(frozen=True)
class Cell:
    """One cell of a paper's table."""

    table: str
    row: str
    column: str
    theirs: float | None  # the paper's mean, None where it prints none
    their_spread: float | None
    ours: tuple[float, ...] = ()  # one for each run, empty where it was not measured
    splits: tuple[float, ...] = ()  # the means of the feature splits
    command: str = ""
    config: str = ""  # hash of what was asked for
    data: str = ""  # hash of the data
    note: str = ""  # precision, rate, or why there is no number
    obstacle: str = ""  # why no run here can decide it: a stand-in, partial data, no data
    invalid: str = ""  # why the values do not count
    setting: str = ""  # the setting that measures it
    base_margin: float = MARGIN
    seconds: float | None = None  # estimated GPU time of its setting, where it was not measured

    @property
    def mean(self) -> float:
        """The mean over runs."""
        return float(np.mean(self.ours))

    @property
    def spread(self) -> float:
        """The deviation over runs (ddof = 0), as the specification reads the paper's."""
        return float(np.std(self.ours))

    @property
    def units(self) -> tuple[float, ...]:
        """The independent values: of feature splits where there are some, else of seeds."""
        return self.splits or self.ours

    @property
    def margin(self) -> float:
        """The largest difference that does not matter; it includes the printed deviation."""
        return self.base_margin + (self.their_spread or 0.0)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if not self.ours or self.theirs is None:
            return None
        return float(np.mean(self.units)) - self.theirs

    def difference_interval(self, level: float) -> tuple[float, float]:
        """The interval of ours minus the paper's."""
        low, high = interval(self.units, level)
        return low - (self.theirs or 0.0), high - (self.theirs or 0.0)

    @property
    def _judgeable(self) -> bool:
        return bool(self.ours) and self.theirs is not None

    @property
    def here(self) -> Replication:
        """What the rule says of the data that are here."""
        if not self._judgeable or self.invalid:
            return "undecided"
        return replicate(self.units, self.theirs or 0.0, self.margin)

    @property
    def verdict(self) -> CellVerdict:
        """The verdict; never reproduced or refuted on a stand-in or a part of the data."""
        if self.theirs is None:
            return "not printed"
        return "undecidable here" if self.obstacle else self.here

    @property
    def runs(self) -> int | None:
        """For an undecided cell, the units that would decide it; None: unknown or over 1,000."""
        if self.verdict != "undecided" or self.invalid or not self._judgeable:
            return None
        return runs_needed(self.units, self.theirs or 0.0, self.margin)

    @property
    def reason(self) -> str:
        """Why a cell is not decided."""
        if self.verdict == "undecidable here":
            return self.obstacle
        if self.verdict != "undecided":
            return ""
        if self.invalid:
            return self.invalid
        if not self.ours:
            return f"not measured; budget: {_minutes(self.seconds)}"
        if len(self.units) < 2:
            return "one run: its deviation is not known"
        return needed(self.runs)


def needed(count: int | None, unit: str = "unit") -> str:
    """How many units of replication would decide a cell or a claim; None: over 1,000."""
    if count is None:
        return f"not decidable with 1,000 {unit}s at this mean and deviation"
    return f"needs {count} {unit}s"


def _minutes(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds / 60:.1f} GPU minutes"


@dataclass(frozen=True)
class Ledger:
    """All results of a reproduction."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()
    rule: Rule = RULES["chfl"]
    origins: dict[str, str] = field(default_factory=dict)  # setting -> what measured it
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)  # setting -> runs, GPU seconds

    def judged(self) -> list[Judged]:
        """The claims with their verdicts."""
        return judge(self.claims)


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


def as_json(ledger: Ledger) -> dict[str, Any]:
    """The ledger as plain values."""
    return {
        "title": ledger.title,
        "rule": asdict(ledger.rule),
        "facts": ledger.facts,
        "origins": ledger.origins,
        "costs": ledger.costs,
        "cells": [_cell_as_json(cell) for cell in ledger.cells],
        "claims": [_claim_as_json(judged) for judged in ledger.judged()],
    }


def _cell_as_json(cell: Cell) -> dict[str, Any]:
    derived: dict[str, Any] = {"verdict": cell.verdict, "reason": cell.reason}
    if cell.ours:
        derived |= {"mean": cell.mean, "spread": cell.spread, "units": len(cell.units)}
    if cell.difference is not None:
        derived |= {"difference": cell.difference, "margin": cell.margin, "here": cell.here}
        if len(cell.units) > 1:
            derived["interval_90"] = list(cell.difference_interval(0.90))
            derived["interval_95"] = list(cell.difference_interval(0.95))
    if cell.runs:
        derived["further_runs"] = cell.runs - len(cell.units)
    return {**asdict(cell), **derived}


def _claim_as_json(judged: Judged) -> dict[str, Any]:
    claim = judged.claim
    return {
        "text": claim.text,
        "source": claim.source,
        "verdict": judged.verdict,
        "here": judged.here,
        "obstacle": claim.obstacle,
        "missing": claim.missing,
        "p": judged.p,
        "p_holm": judged.adjusted,
        "runs_needed": judged.runs,
        "evidence": judged.evidence,
        "parts": [asdict(part) for part in claim.parts],
    }


def counted(verdicts: Sequence[str]) -> dict[str, int]:
    """How many there are of each of the four verdicts."""
    return {verdict: sum(one == verdict for one in verdicts) for verdict in VERDICTS}
