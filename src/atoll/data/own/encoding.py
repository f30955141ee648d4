"""Encodes columns of text as numbers: parses values, and expands columns to numeric ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["LARGEST", "NUMBER", "Block", "Kind", "as_dates", "as_numbers", "encoded", "offset"]

Array = np.ndarray[Any, Any]
Kind = Literal["number", "date", "text"]
NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,2})?$"
COMMA = r"^[-+]?[0-9]+,[0-9]+$"
DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?Z?)?$"
LARGEST = 1e30  # larger numbers do not fit the arithmetic of the networks
FAR = 1e4  # distance from 0 in units of its spread, beyond which float32 loses precision
DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class Block:
    """How a column of a file becomes numeric: itself or its levels, and whether it is missing."""

    column: str
    kind: Kind
    levels: tuple[str, ...]  # levels of text
    missing: bool  # whether another column marks missing values
    start: int  # index of the first of its columns
    site: str = ""  # the only site with it; empty: any site that has the column
    offset: float = 0.0  # subtracted from numbers before rounding; see `offset`

    @property
    def width(self) -> int:
        """The number of its columns."""
        return (len(self.levels) if self.kind == "text" else 1) + self.missing

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        suffix = f" ({self.site})" if self.site else ""
        columns = [f"{self.column}={level}{suffix}" for level in self.levels]
        columns = columns if self.kind == "text" else [f"{self.column}{suffix}"]
        return [*columns, f"{self.column} missing{suffix}"] if self.missing else columns

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Block":
        """A block from its form in a recipe."""
        return Block(**{**values, "levels": tuple(values["levels"])})


def as_numbers(text: pa.Array, comma: bool) -> pa.Array:
    """Parse numbers; null for other text; true and false are 1 and 0."""
    fits = pc.match_substring_regex(text, NUMBER)
    if pc.all(fits, min_count=0).as_py() and not pc.any(pc.starts_with(text, "+")).as_py():
        return text.cast(pa.float64())  # the common case, and several times faster
    lower = pc.utf8_lower(text)
    text = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", text))
    if comma:
        decimal = pc.match_substring_regex(text, COMMA)
        text = pc.if_else(decimal, pc.replace_substring(text, ",", "."), text)
    fits = pc.match_substring_regex(text, NUMBER)
    bare = pc.replace_substring_regex(text, r"^\+", "")
    return pc.if_else(fits, bare, pa.scalar(None, pa.string())).cast(pa.float64())


def as_dates(text: pa.Array) -> pa.Array:
    """Days since 1970 of dates such as 2024-03-31 or 2024-03-31 12:30; null for other text."""
    fits = pc.match_substring_regex(text, DATE)
    bare = pc.replace_substring_regex(text, "Z$", "")
    dates = pc.if_else(fits, bare, pa.scalar(None, pa.string()))
    try:
        stamps = dates.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:  # an impossible date such as 31 February: parse one by one
        stamps = pa.array([_stamp(value) for value in dates.to_pylist()], pa.timestamp("us"))
    microseconds = stamps.cast(pa.int64()).cast(pa.float64(), safe=False)
    return pc.divide(microseconds, 1e6 * DAY)


def _stamp(value: str | None) -> datetime | None:
    try:
        return None if value is None else datetime.fromisoformat(value)
    except ValueError:
        return None


def offset(low: float, high: float) -> float:
    """The offset that keeps numbers distinct in float32: 0 unless they are far from 0."""
    spread = high - low
    return low if 0 < FAR * spread < max(abs(low), abs(high)) else 0.0


def encoded(block: Block, text: pa.Array, comma: bool) -> Array:
    """The block's columns for some values; a missing number is NaN, an unknown level all 0."""
    columns = np.zeros((len(text), block.width), dtype=np.float32)
    if block.kind == "text":
        places = pc.index_in(text, pa.array(block.levels, pa.string()))
        places = np.asarray(pc.fill_null(places, -1).to_numpy(zero_copy_only=False))
        rows = np.flatnonzero(places >= 0)
        columns[rows, places[rows]] = 1
    else:
        values = as_numbers(text, comma) if block.kind == "number" else as_dates(text)
        columns[:, 0] = values.to_numpy(zero_copy_only=False) - block.offset
    if block.missing:
        columns[:, -1] = text.is_null().to_numpy(zero_copy_only=False)
    return columns
