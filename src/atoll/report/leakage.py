"""What attacks on a run's messages recovered, for the summary and the table of attacks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.record import Snapshot
from atoll.report.tables import Cell, Group, Table
from atoll.report.units import percent

__all__ = ["ATTACKS", "Badge", "badge", "table"]

COLUMNS, LABELS = "columns from embeddings", "labels from gradients"
ATTACKS = (COLUMNS, LABELS)  # snapshots about leaks of a run, not about a site's accuracy
AS_SENT = "as set"  # messages as sent under the run's options
METHODS = ("splitnn", "vleto")  # messages known to the leakage audit


@dataclass(frozen=True)
class Badge:
    """The privacy finding of a run, for the top of the page."""

    tone: str  # warn: attacks recovered something; none: nothing was measured
    title: str
    words: str


def _snapshots(group: Group, name: str) -> list[Snapshot]:
    """The snapshots of the last stage that has them, of the first seed."""
    every = [snapshot for snapshot in group.first.snapshots if snapshot.name == name]
    last = max((snapshot.stage for snapshot in every), default=0)
    return [snapshot for snapshot in every if snapshot.stage == last]


def _as_sent(snapshots: Sequence[Snapshot], place: int = 0) -> list[float]:
    values = []
    for snapshot in snapshots:
        for title, row in zip(snapshot.rows, snapshot.values, strict=True):
            if title == AS_SENT and math.isfinite(row[place]):
                values.append(row[place])
    return values


def badge(group: Group) -> Badge:
    """What the attacks recovered from the messages as sent, or that none was run."""
    words = []
    explained = _as_sent(_snapshots(group, COLUMNS))
    if explained:
        low, high = percent(min(explained)), percent(max(explained))
        amount = low if low == high else f"{low.removesuffix(' %')} to {high}"
        words.append(f"the server recovers {amount} of the variance of a site's columns")
    labels = _snapshots(group, LABELS)
    guessed, chance = _as_sent(labels), _as_sent(labels, 1)
    if guessed and chance:
        words.append(
            f"a site guesses {percent(guessed[-1])} of labels from gradients "
            f"(chance {percent(chance[-1])})"
        )
    if words:
        bound = "Simple attacks on this run's own messages: a lower bound."
        return Badge("warn", "Leakage measured", f"{' and '.join(words)}. {bound}")
    remedy = ""
    if group.method in METHODS:
        remedy = ' Set replace = "atoll.audits.leakage:snapshots" to measure it.'
    return Badge("none", "Leakage not measured", f"no attack was run on these messages.{remedy}")


def table(group: Group) -> Table | None:
    """What a curious party could recover after the last stage, and what would make it harder."""
    rows = []
    for snapshot in _snapshots(group, LABELS)[-1:]:
        for title, (guessed, chance) in zip(snapshot.rows, snapshot.values, strict=True):
            what = "a site guesses labels from gradients"
            without = Cell(f"chance {percent(chance)}", chance)
            rows.append((Cell(what), Cell(title), Cell(percent(guessed), guessed), without))
    for snapshot in _snapshots(group, COLUMNS):
        what = f"the server guesses the columns of {snapshot.part} from embeddings"
        for title, (explained,) in zip(snapshot.rows, snapshot.values, strict=True):
            cells = Cell(percent(explained), explained), Cell("mean alone 0 %", 0.0)
            rows.append((Cell(what), Cell(title), *cells))
    if not rows:
        return None
    caption = (
        "Two simple attacks on this run's own messages, measured at home: they are lower bounds. "
        "Labels: three rows of each class are known; the share of the others guessed right. "
        "Columns: two thirds of the rows are known; the share of the others' variance explained by "
        "a linear map. Clip and noise are in parts of the mean gradient: options clip, noise and "
        "digits."
    )
    return Table(caption, ("attack", "messages", "recovered", "without them"), tuple(rows))
