"""A data set: arrays with names."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

__all__ = ["OWN_IMAGES", "Dataset", "Layout", "array_fingerprint", "file_fingerprint"]

Array = np.ndarray[Any, Any]


OWN_IMAGES = "own images"  # the name of a data set of the user's own images
BY_ROW = ("x", "y", "test", "group", "stage", "people", "weights")  # arrays with one entry per row


@dataclass(frozen=True)
class Layout:
    """Properties of tables of several sites: which site has which column, and when."""

    held: Array  # (groups, columns) bool
    numbers: Array  # (columns,) bool: to be scaled, NaN if missing; the others are 0 or 1
    stage: Array  # (rows,) int64, an index into stages
    stages: tuple[str, ...]  # empty for a single stage
    recipe: dict[str, Any]  # how to convert a file to these columns, as JSON
    findings: tuple[tuple[str, str], ...] = ()  # findings, and how atoll handles them

    def only(self, rows: Array) -> "Layout":
        """The same layout with only these rows."""
        return replace(self, stage=self.stage[rows])


@dataclass(frozen=True)
class Dataset:
    """Inputs, labels, and the names of columns and classes; independent of clients and stages."""

    name: str
    kind: Literal["table", "image", "text"]
    # table (rows, columns) float32; image (rows, channels, height, width) uint8;
    # text (rows, tokens) int32
    x: Array
    y: Array  # (rows,) int64, an index into classes; in regression float64, in the label's unit
    columns: tuple[str, ...]  # names of a table's columns, empty for images and text
    classes: tuple[str, ...]  # in regression only the name of the label: one output
    source: str  # source and licence
    partial: str = ""  # description of what is missing; empty for a complete set
    test: Array | None = None  # (rows,) bool, the official test rows if the set has any
    group: Array | None = None  # (rows,) int64, an index into groups: a row's site, domain or task
    groups: tuple[str, ...] = ()
    layout: Layout | None = None  # of the user's own tables
    words: tuple[str, ...] = ()  # text: the word of each token; 0 is padding, 1 is unknown
    stage: Array | None = None  # (rows,) int64, an index into stages: when a row arrives
    stages: tuple[str, ...] = ()
    people: Array | None = None  # (rows,) int64: rows with equal numbers stay in the same part
    weights: Array | None = None  # (rows,) float32: weight of a row in training
    vectors: str = "best"  # text: the default word vectors

    def __post_init__(self) -> None:
        """Refuse arrays with inconsistent shapes."""
        assert len(self.x) == len(self.y)
        assert not self.columns or len(self.columns) == self.x.shape[1]
        assert self.test is None or len(self.test) == len(self.y)
        assert self.group is None or len(self.group) == len(self.y)
        assert self.stage is None or len(self.stage) == len(self.y)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.y)

    @property
    def regression(self) -> bool:
        """Whether the label is a number."""
        return bool(np.issubdtype(self.y.dtype, np.floating))

    @property
    def strata(self) -> Array:
        """The strata of splits: the class of each row; in regression a single stratum."""
        return np.zeros(len(self.y), dtype=np.int64) if self.regression else self.y

    @property
    def title(self) -> str:
        """The display name; marks a partial set."""
        return f"{self.name} (partial: {self.partial})" if self.partial else self.name

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all content; equal data have equal fingerprints."""
        digest = hashlib.sha256()
        layout: tuple[Array | None, ...] = ()
        if self.layout is not None:
            layout = (self.layout.held, self.layout.stage)
        arrays = (self.x, self.y, self.test, self.group, self.stage, *layout)
        for array in (*arrays, self.people, self.weights):
            if array is not None:
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)  # not copied: it may be large
        for names in (self.columns, self.classes, self.groups, self.words):
            digest.update("\x1f".join(names).encode() + b"\x1e")
        return digest.hexdigest()

    def only(self, rows: Array) -> "Dataset":
        """The same set with only these rows."""
        arrays = {name: getattr(self, name) for name in BY_ROW}
        some: dict[str, Any] = {}
        for name, array in arrays.items():
            some[name] = None if array is None else array[rows]
        return replace(self, layout=self.layout and self.layout.only(rows), **some)


def file_fingerprint(path: Path) -> str:
    """A hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def array_fingerprint(x: Array) -> str:
    """A hash of an array's shape, type and values."""
    digest = hashlib.sha256(f"{x.dtype}{x.shape}".encode())
    digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()
