"""Which column names the same rows in several tables, and which rows these are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.core.errors import UserError
from atoll.data.own.alignment import normalised, read_ids, refuse_bad
from atoll.data.own.sheets import opened
from atoll.data.own.spellings import folded

__all__ = ["SharedIds", "match_rows", "other_names_of_ids", "shared_ids"]

Array = np.ndarray[Any, Any]
SHARE: Final = 0.5  # of the rows of the smallest table that all tables have, at least


@dataclass(frozen=True)
class SharedIds:
    """A column by which parties name the same rows."""

    column: str
    aligned: bool  # whether every file has the same ids in the same order


def shared_ids(parties: Sequence[Sequence[str]], label: str, column: str = "") -> SharedIds | None:
    """The column of ids if files are of parties, else None; `column`: the user has named it.

    Parties: one file alone has the label, each has a column of its own, and a column of all
    files names rows, many of them in every file. A party has one file for each stage.
    """
    first = [str(files[0]) for files in parties]
    columns = [opened(Path(file)).columns for file in first]
    labelled = [any(folded(name) == folded(label) for name in names) for names in columns]
    if len(first) < 2 or sum(labelled) != 1:
        return None
    shared = [name for name in columns[0] if all(name in names for names in columns)]
    for names in columns:
        others = {name for other in columns if other is not names for name in other}
        if not {*names} - others - {label}:
            return None
    counts = dict(_common_counts(first, shared))
    named = column if column in shared else max(counts, key=lambda one: counts[one], default="")
    if not named:
        return None
    stages = zip(*parties, strict=False)  # parties with fewer files are refused later
    return SharedIds(named, all(_equal_ids(files, named) for files in stages))


def other_names_of_ids(files: Sequence[str], label: str) -> str:
    """The hint that files are of parties whose columns of ids have other names; else empty."""
    columns = [opened(Path(file)).columns for file in files]
    if len(files) < 2 or sum(label in names for names in columns) != 1:
        return ""
    for name in columns[0]:
        named = [[one for one in names if folded(one) == folded(name)][:1] for names in columns]
        if not all(named) or len({one for names in named for one in names}) == 1:
            continue
        try:
            ids = [
                normalised(read_ids(Path(file), one))
                for file, (one,) in zip(files, named, strict=True)
            ]
            common = len(match_rows(ids)[0])
        except UserError:  # no column of ids
            continue
        if common >= max(1, SHARE * min(map(len, ids))):
            written = " and ".join(dict.fromkeys(one for (one,) in named))
            remedy = "give this column one name in all files, then atoll init again"
            return f"{written} have the same ids, as parties have: {remedy}"
    return ""


def _equal_ids(files: Sequence[str], column: str) -> bool:
    """Whether all files have the same ids in the same order."""
    try:
        ids = [normalised(read_ids(Path(file), column)) for file in files]
    except UserError:
        return False
    return all(one == ids[0] for one in ids)


def _common_counts(files: Sequence[str], columns: Sequence[str]) -> Iterator[tuple[str, int]]:
    """How many values are common to all files, of columns that name rows."""
    for name in columns:
        try:
            ids = [normalised(read_ids(Path(file), name)) for file in files]
            common = len(match_rows(ids)[0])
        except UserError:  # it is empty in some row, or has a value twice: it names no rows
            continue
        if common and common >= SHARE * min(map(len, ids)):
            yield name, common


def match_rows(tables: Sequence[Sequence[str]]) -> list[Array]:
    """For each table the rows whose ids all tables have, in the order of the first."""
    places = []
    for ids in tables:
        refuse_bad(ids, "the column of ids")
        places.append({id: row for row, id in enumerate(ids)})
    common = [id for id in tables[0] if all(id in rows for rows in places)]
    return [np.array([rows[id] for id in common], dtype=np.int64) for rows in places]
