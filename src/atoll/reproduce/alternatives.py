"""Does a paper's method pay? Compares it with what a site can do without it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.metrics.replication import interval

__all__ = ["Comparison", "comparisons"]

Plain = dict[str, Any]
# Word counts and logistic regression, every task by itself (bench/linear_text.py)
LINEAR = {"R8": 0.888, "TMN": 0.856, "TREC6": 0.755, "TREC50": 0.799, "SUBJ": 0.840}


@dataclass(frozen=True)
class Comparison:
    """A method and its alternatives on one task, a value for each unit of replication."""

    task: str
    method: str
    ours: tuple[float, ...]
    alternatives: Mapping[str, tuple[float, ...]]
    pooled: float | None = None  # with all data in one place, where that was measured
    note: str = ""
    gains: tuple[float, ...] = field(init=False)
    best: str = field(init=False)  # the alternative with the highest mean

    def __post_init__(self) -> None:
        best = max(self.alternatives, key=lambda name: float(np.mean(self.alternatives[name])))
        gains = np.subtract(self.ours, self.alternatives[best]).tolist()
        object.__setattr__(self, "best", best)
        object.__setattr__(self, "gains", tuple(gains))

    @property
    def answer(self) -> str:
        """Whether the method is above the best alternative, by a 95 % interval."""
        low, high = interval(self.gains, 0.95)
        if low > 0:
            return "yes"
        return "no" if high < 0 else "cannot tell"


class _Cells:
    """The measured cells of a ledger."""

    def __init__(self, ledger: Plain) -> None:
        self.cells = {(c["table"], c["row"], c["column"]): c for c in ledger["cells"] if c["ours"]}

    def values(self, *where: str) -> tuple[float, ...]:
        """The values of a cell, by unit; none where it was not measured."""
        cell = self.cells.get((where[0], where[1], where[2]))
        return tuple(cell["splits"] or cell["ours"]) if cell else ()

    def obstacle(self, *where: str) -> str:
        """Why the cell decides nothing about the paper."""
        cell = self.cells.get((where[0], where[1], where[2]))
        return str(cell["obstacle"]) if cell else ""


def comparisons(ledgers: Mapping[str, Plain]) -> list[Comparison]:
    """All tasks on which a method and an alternative were measured with the same units."""
    builders = {"chfl": _chfl, "vleto": _vleto, "fedseit": _fedseit, "fccl": _fccl}
    several = []
    for name, build in builders.items():
        if name in ledgers:
            several += list(build(_Cells(ledgers[name])))
    return several


def _comparison(
    task: str,
    method: tuple[str, tuple[float, ...]],
    alternatives: Mapping[str, Sequence[float]],
    pooled: Sequence[float] = (),
    note: str = "",
) -> Iterator[Comparison]:
    """The comparison on the first units, which all have; seeds and splits are counted from 0."""
    name, ours = method
    there = {key: tuple(values) for key, values in alternatives.items() if values}
    if not ours or not there:
        return
    units = min(len(values) for values in (ours, *there.values()))
    there = {key: values[:units] for key, values in there.items()}
    mean = float(np.mean(pooled)) if pooled else None
    yield Comparison(task, name, ours[:units], there, mean, note)


def _chfl(cells: _Cells) -> Iterator[Comparison]:
    for row in ("covertype K=2 30%", "covertype K=5 30%", "covertype K=10 30%", "jannis K=5 30%"):
        table = "Table III" if row.startswith("covertype") else "Table II"
        others = {"alone": "Local", "FedAvg on common columns": "Common"}
        alternatives = {name: cells.values(table, row, column) for name, column in others.items()}
        ours = "CHFL, mu > 0", cells.values(table, row, "CHFL mu>0")
        yield from _comparison(row, ours, alternatives, note=cells.obstacle(table, row, "Local"))


def _vleto(cells: _Cells) -> Iterator[Comparison]:
    for data in ("MNIST", "FMNIST"):
        table = f"Table 1, CIL, {data}"
        alternatives = {"split learning": cells.values(table, "PyVertical", "AVG")}
        ours = "V-LETO", cells.values(table, "V-LETO", "AVG")
        yield from _comparison(f"{data}, classes by stage, AVG", ours, alternatives)
        table = f"Table 1, FIL, {data}"
        strips = [cells.values(table, "Standalone", f"Task {stage}") for stage in (1, 2, 3, 4)]
        alternatives = {
            "the best strip alone": max(strips, key=lambda v: float(np.mean(v or (0.0,)))),
            "split learning": cells.values(table, "PyVertical", "Task 4"),
        }
        pooled = cells.values(table, "Joint", "all strips")
        task = f"{data}, columns by stage, after task 4"
        for name, row in (("V-LETO", "V-LETO"), ("V-LETO, P2", "P2")):
            ours = name, cells.values(table, row, "Task 4")
            yield from _comparison(task, ours, alternatives, pooled)


def _fedseit(cells: _Cells) -> Iterator[Comparison]:
    for strength in ("1.0", "0.1"):
        for row, linear in LINEAR.items():
            table = f"lambda2 = {strength}"
            ours = "FedSeIT", cells.values(table, row, "FedSeIT")
            alternatives = {
                "linear model, alone": (linear,) * len(ours[1]),
                "FedWeIT": cells.values(table, row, "FedWeIT"),
                "text CNN, alone": cells.values(table, row, "Local"),
            }
            note = cells.obstacle(table, row, "FedSeIT")
            yield from _comparison(f"{row}, lambda2 = {strength}", ours, alternatives, note=note)


def _fccl(cells: _Cells) -> Iterator[Comparison]:
    tables = {
        "Table 1, inter-domain, digits": "digits, other domains",
        "Table 2, intra-domain, digits": "digits, own domain",
        "Table 3, inter-domain, office": "office, one network, other domains",
        "Table 3, intra-domain, office": "office, one network, own domain",
    }
    for table, task in tables.items():
        others = {"alone": "SOLO", "FedAvg": "FedAvg", "FML (no public images)": "FML"}
        alternatives = {name: cells.values(table, row, "AVG") for name, row in others.items()}
        ours = "FCCL", cells.values(table, "FCCL", "AVG")
        note = cells.obstacle(table, "FCCL", "AVG")
        yield from _comparison(task, ours, alternatives, note=note)
