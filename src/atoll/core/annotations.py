"""What a field of a message means, declared on the field; only `Optional` changes the wire.

A message declares `weights: Annotated[Tensors, SharedWeights()]`. Site policies and robust
aggregation read these marks and never guess from a field's name. No rule bounds a field without a
mark: a site accepts any values in it.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

__all__ = [
    "Bounded", "Optional", "Outputs", "RowCount", "RowGradient", "RowSums", "SharedWeights", "Task",
    "TestedWeights", "Update", "marked",
]  # fmt: skip

A = TypeVar("A")


@dataclass(frozen=True)
class SharedWeights:
    """In a request: weights that all sites share. In an answer: whole weights without a base."""

    name: str = "shared"  # which weights, where a method shares more than one network


@dataclass(frozen=True)
class Task:
    """In a request: the number of a task to test on, among those that can be tested by now."""

    part: str = ""  # a field of the request: where it is "train", the number is that of a stage


@dataclass(frozen=True)
class TestedWeights:
    """In a request: weights that later tests of the site use; a round has one set of them."""


@dataclass(frozen=True)
class Update:
    """In an answer: the new value of the request's field `of`; the difference is the update."""

    of: str


@dataclass(frozen=True)
class RowGradient:
    """In a request: the gradient of a loss by the embedding of each row, one row for each."""


@dataclass(frozen=True)
class Outputs:
    """In an answer: what a site's network computes for rows that all sites see, or for its own."""

    tails: bool = False  # single rows may be far larger than the others, as those of a table
    common: bool = False  # every site answers for the same rows, in the same order
    aligned: bool = False  # the same rows too, but every site has coordinates of its own


@dataclass(frozen=True)
class RowSums:
    """In an answer: matrices that are sums over training rows, a line for each column summed.

    With fewer rows than columns, sums of products determine the rows.
    """

    stages: str = ""  # the field with the stages that are summed up; empty: the stage of the moment
    left_out: str = ""  # the field with the number of rows that the sums leave out


@dataclass(frozen=True)
class RowCount:
    """In an answer: the number of training rows of a site, which may weigh it in a mean."""


@dataclass(frozen=True)
class Bounded:
    """In an answer: numbers between two limits."""

    low: float
    high: float


@dataclass(frozen=True)
class Optional:
    """A plain field with a default that is not written where it is empty."""


def marked(kind: type, mark: type[A]) -> dict[str, A]:
    """The fields of a message that carry a mark of this kind, each with its mark."""
    marks = _marks(cast(Hashable, kind))
    return {n: v for n, several in marks.items() for v in several if isinstance(v, mark)}


@cache
def _marks(kind: Any) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
