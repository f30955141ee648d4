"""Writes predictions as CSV: one line per row with the class and all probabilities, or a number."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa

from atoll.core.outputs import may_write
from atoll.core.record import disk_errors
from atoll.core.storage import temporary_name
from atoll.data.own.encoding import as_numbers

__all__ = ["Predicted", "Writer", "writing"]

Array = np.ndarray[Any, Any]


@dataclass
class Predicted:
    """The result of a file: counts of rows and of correct predictions, and remarks."""

    rows: int = 0
    judged: int = 0  # rows whose label is a class of the model
    right: int | None = None  # correct predictions among these; None if there are no such rows
    unlabelled: int = 0  # unlabelled rows of a file with labels
    absolute: float = 0.0  # regression: the sum of absolute errors of rows with a label
    squared: float = 0.0  # regression: the sum of squared errors
    foreign: int = 0  # rows whose label is not a class of the model, or not a number
    unseen: dict[str, int] = field(default_factory=dict)  # column -> values that no row had
    absent: tuple[str, ...] = ()  # columns missing in the file
    lacking: dict[str, list[str]] = field(default_factory=dict)  # party's file -> ids not in it

    def judge(
        self, guesses: Sequence[str], labels: Sequence[str | None], classes: Sequence[str]
    ) -> None:
        """Count correct predictions if the label is one of the classes."""
        for guess, label in zip(guesses, labels, strict=True):
            if label is None:
                self.unlabelled += 1
            elif label not in classes:
                self.foreign += 1
            else:
                self.judged += 1
                self.right = (self.right or 0) + (guess == label)

    def judge_numbers(self, guesses: Array, labels: Sequence[str | None]) -> None:
        """Sum up errors if the label is a number."""
        numbers = as_numbers(pa.array(labels, pa.string()), comma=True).to_pylist()
        for guess, label, number in zip(guesses.tolist(), labels, numbers, strict=True):
            if label is None:
                self.unlabelled += 1
            elif number is None:
                self.foreign += 1
            else:
                self.judged += 1
                self.absolute += abs(guess - number)
                self.squared += (guess - number) ** 2


@dataclass
class Writer:
    """Writes and counts lines of predictions."""

    file: TextIO
    classes: Sequence[str]
    counts: Predicted
    regression: bool = False

    def add(
        self,
        names: Sequence[Any],
        probabilities: Array,
        labels: Sequence[str | None] | None,
        ids: Sequence[str | None] | None = None,
    ) -> None:
        """Write a line for each name; with labels, count correct predictions.

        `ids` are the values of the id column, which follow the names.
        """
        more = [()] * len(names) if ids is None else [(id or "",) for id in ids]
        lines = csv.writer(self.file, lineterminator="\n")
        self.counts.rows += len(names)
        if self.regression:
            for name, id, value in zip(names, more, probabilities[:, 0].tolist(), strict=True):
                lines.writerow([name, *id, f"{value:.6g}"])
            if labels is not None:
                self.counts.judge_numbers(probabilities[:, 0], labels)
            return
        guesses = [self.classes[place] for place in probabilities.argmax(1)]
        for name, id, guess, row in zip(names, more, guesses, probabilities, strict=True):
            lines.writerow([name, *id, guess, *(f"{p:.6f}" for p in row)])
        if labels is not None:
            self.counts.judge(guesses, labels, self.classes)


@contextmanager
def writing(
    out: Path, first: Sequence[str], recipe: Mapping[str, Any], inputs: Sequence[Path], run: Path
) -> Iterator[Writer]:
    """Open a file of predictions and write it atomically; `first` names its first columns.

    Overwrites only predictions of the same columns: never an input or a file of the run.
    """
    line = io.StringIO()
    regression = recipe.get("task") == "regression"
    further = [] if regression else [f"p {name}" for name in recipe["classes"]]
    names = [*first, "prediction", *further]
    csv.writer(line, lineterminator="\n").writerow(names)
    header = line.getvalue()
    may_write(out, inputs, [run], lambda head: head.startswith(header.encode()))
    temporary = temporary_name(out)
    with disk_errors(out):
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(header)
                yield Writer(file, recipe["classes"], Predicted(), regression)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
