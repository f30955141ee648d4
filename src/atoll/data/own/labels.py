"""The label of own tables: classification or regression, and numeric labels."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from atoll.data.own.encoding import LARGEST, as_numbers
from atoll.data.own.profiles import Contents, natural, unusable

__all__ = [
    "MOST_CLASSES",
    "Spread",
    "Task",
    "label_numbers",
    "spread",
    "task_of",
    "task_statement",
]

Array = np.ndarray[Any, Any]
Task = Literal["", "classification", "regression"]
MOST_NUMBERS: Final = 20  # maximum number of distinct numbers read as classes by default
FEW_NUMBERS: Final = 5  # number of distinct classes from which the reading is worth a remark
MOST_CLASSES: Final = 1_000


@dataclass(frozen=True)
class Spread:
    """Statistics of a numeric label at one site."""

    low: float
    high: float
    mean: float
    deviation: float

    def __str__(self) -> str:
        """Describe the label, as `atoll inspect` shows it."""
        return f"{self.low:g} to {self.high:g}, mean {self.mean:.3g}, sd {self.deviation:.3g}"


def task_of(contents: Contents) -> Task:
    """Classification or regression: as in the options, else by the values of the label.

    Regression requires that all values are numbers and more than 20 of them are distinct.
    """
    values = set[str]().union(*contents.classes.values())
    numbers = _all_numbers(values, _comma(contents))
    if contents.options.task == "regression" and not numbers:
        word = next(v for v in sorted(values, key=natural) if not _all_numbers([v], True))
        what = f"task = 'regression', and the label has the value '{word}'"
        where = f"column '{contents.options.label}'"
        raise unusable(what, where, "fix or remove such rows, or set task = 'classification'")
    if contents.options.task:
        return contents.options.task
    return "regression" if numbers and len(values) > MOST_NUMBERS else "classification"


def task_statement(contents: Contents, task: Task) -> tuple[str, str] | None:
    """How the label is read and how to change that, if it is ambiguous."""
    values = set[str]().union(*contents.classes.values())
    if len(values) < FEW_NUMBERS or not _all_numbers(values, _comma(contents)):
        return None
    other = "classification" if task == "regression" else "regression"
    as_other = "values as classes" if task == "regression" else "them as numbers"
    if contents.options.task:
        return None
    what = f"label '{contents.options.label}' has {len(values):,} distinct numbers: {task}"
    return what, f'set task = "{other}" to treat {as_other}'


def _comma(contents: Contents) -> bool:
    return any(sheet.comma for sheet in contents.sheets)


def _all_numbers(values: Collection[str], comma: bool) -> bool:
    text = pa.array(list(values), pa.string())
    numbers = as_numbers(text, comma)
    if numbers.null_count:
        return False
    return bool((np.abs(numbers.to_numpy(zero_copy_only=False)) <= LARGEST).all())


def label_numbers(text: pa.Array, comma: bool) -> Array:
    """The labels of regression as numbers."""
    return np.asarray(as_numbers(text, comma).to_numpy(zero_copy_only=False), float)


def spread(counts: Mapping[str, int], comma: bool) -> Spread:
    """The statistics of labels with these counts."""
    values = label_numbers(pa.array(list(counts), pa.string()), comma)
    rows = np.array(list(counts.values()))
    mean = float((values * rows).sum() / rows.sum())
    variance = float(((values - mean) ** 2 * rows).sum() / rows.sum())
    return Spread(float(values.min()), float(values.max()), mean, variance**0.5)
