"""Finds the column that identifies the same rows in several tables, and these rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.core.errors import UserError
from atoll.data.own.alignment import normalised, read_ids, refuse_bad
from atoll.data.own.sheets import as_written, opened
from atoll.data.own.spellings import folded

__all__ = ["SharedIds", "match_rows", "shared_ids"]

Array = np.ndarray[Any, Any]
SHARE: Final = 0.5  # minimum share of the smallest table's rows that all tables have


@dataclass(frozen=True)
class SharedIds:
    """The columns by which parties identify the same rows."""

    column: str  # name of the column at the party with the label
    names: tuple[str, ...]  # name of the column at each party
    aligned: bool  # whether every file has the same ids in the same order


def shared_ids(parties: Sequence[Sequence[str]], label: str, column: str = "") -> SharedIds | None:
    """The id columns if the files belong to parties, else None; `column`: named by the user.

    Parties: one file alone has the label, each has a column of its own, and a column of each
    file identifies rows, many of which are in every file. A party has one file per stage.
    """
    first = [str(files[0]) for files in parties]
    columns = [opened(Path(file)).columns for file in first]
    labelled = [any(folded(name) == folded(label) for name in names) for names in columns]
    if len(first) < 2 or sum(labelled) != 1:
        return None
    for names in columns:
        others = {name for other in columns if other is not names for name in other}
        if not {*names} - others - {label}:
            return None
    active = labelled.index(True)
    if column and all(column in names for names in columns):
        chosen = (column,) * len(first)
    else:
        chosen = _best_names([_columns_of_keys(Path(file)) for file in first], active, column)
    if not chosen:
        return None
    ids = chosen[active]
    if any(ids in names and one != ids for names, one in zip(columns, chosen, strict=True)):
        return None  # otherwise one of two columns would get the name of the other
    stages = zip(*parties, strict=False)  # parties with fewer files are refused later
    return SharedIds(ids, chosen, all(_equal_ids(files, chosen) for files in stages))


def _columns_of_keys(path: Path) -> dict[str, list[str]]:
    """The columns of a file with a unique value in every row."""
    sheet = opened(path)
    keys: dict[str, dict[str, None]] = {name: {} for name in sheet.columns}
    for batch in as_written(sheet):
        for name, values in [*keys.items()]:
            ids = normalised([text or "" for text in batch.column(name).to_pylist()])
            count = len(values) + len(ids)
            values.update(dict.fromkeys(ids))
            if len(values) < count or "" in values:
                del keys[name]
    return {name: [*values] for name, values in keys.items()}


def _best_names(
    keys: Sequence[Mapping[str, list[str]]], active: int, column: str
) -> tuple[str, ...]:
    """The id column of each file: with one name in all files if possible, else matched by value.

    `column` is its name in some file; empty if unknown.
    """
    best, most = tuple[str, ...](), (False, 0)
    for name, ids in keys[active].items():
        chosen = tuple(_counterpart(own, name, {*ids}) for own in keys)
        if "" in chosen or (column and column not in chosen):
            continue
        tables = [own[one] for own, one in zip(keys, chosen, strict=True)]
        common = len(match_rows(tables)[0])
        rank = (len({*chosen}) == 1, common)
        if common and common >= SHARE * min(map(len, tables)) and rank > most:
            best, most = chosen, rank
    return best


def _counterpart(own: Mapping[str, list[str]], name: str, ids: Collection[str]) -> str:
    """The column of a file with the most of some ids; the one with the same name if it has any."""
    shares = {one: sum(id in ids for id in values) for one, values in own.items()}
    if shares.get(name):
        return name
    return max((one for one in shares if shares[one]), key=lambda one: shares[one], default="")


def _equal_ids(files: Sequence[str], names: Sequence[str]) -> bool:
    """Whether all files have the same ids in the same order."""
    try:
        pairs = zip(files, names, strict=True)
        ids = [normalised(read_ids(Path(file), name)) for file, name in pairs]
    except UserError:
        return False
    return all(id == ids[0] for id in ids)


def match_rows(tables: Sequence[Sequence[str]]) -> list[Array]:
    """For each table, the rows whose ids are in all tables, in the order of the first."""
    places = []
    for ids in tables:
        refuse_bad(ids, "the column of ids")
        places.append({id: row for row, id in enumerate(ids)})
    common = [id for id in tables[0] if all(id in rows for rows in places)]
    return [np.array([rows[id] for id in common], dtype=np.int64) for rows in places]
