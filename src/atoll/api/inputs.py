"""Arguments in Python as values of a config: tables and arrays in memory become files."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from atoll.core.errors import UserError
from atoll.data.own.frames import with_files
from atoll.data.own.profiles import TableOptions
from atoll.runs.config import RunConfig, change, read, resolve

__all__ = ["as_table", "config_of", "seed_numbers", "values_of"]

TABLES = Path("runs/tables")  # where tables in memory are kept
LABEL = "label"  # the column of labels that are given as an array
OWN = {"files", "parties", "images"}  # what `data` names where a run reads the user's own files
TABLE_OPTIONS = {field.name for field in dataclasses.fields(TableOptions)} - {"files"}


def values_of(what: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config: a preset, a method or a TOML file, with keyword arguments applied."""
    values, keywords = read(what), dict(changes)
    data = _in_memory(keywords)
    if data is not None:
        keywords["data"] = with_files(data, TABLES)
        if OWN & data.keys() and "split" not in keywords:
            values.pop("scenario", None)  # a preset's split is for its own data
    return change(values, keywords)


def config_of(what: str, changes: Mapping[str, Any]) -> RunConfig:
    """The whole config of a call, every option checked."""
    return resolve(values_of(what, changes), what)


def _in_memory(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """The table `data`, with tables in memory as `files`; takes their options out of `keywords`."""
    data = keywords.get("data")
    if _is_table(data):
        files = {"table": data}
    elif isinstance(data, Mapping) and data and not ({"name"} | OWN) & data.keys():
        files = dict(data)
    else:
        return dict(data) if isinstance(data, Mapping) else None
    options = {key: keywords.pop(key) for key in TABLE_OPTIONS & keywords.keys()}
    if any(isinstance(table, tuple) for table in files.values()):
        options.setdefault("label", LABEL)
    label = str(options.get("label", ""))
    tables = {site: as_table(table, label) for site, table in files.items()}
    return {"files": tables, **options}


def _is_table(value: Any) -> bool:
    """Whether a value is a table in memory: an Arrow stream, or arrays (x, y)."""
    if isinstance(value, tuple):
        return len(value) == 2 and all(isinstance(one, np.ndarray) for one in value)
    return hasattr(value, "__arrow_c_stream__")


def as_table(value: Any, label: str = "") -> Any:
    """A table that exports an Arrow stream; of an array the columns are x0, x1, ..., then y.

    >>> as_table((np.zeros((2, 1)), np.array([0, 1])), "sick").column_names
    ['x0', 'sick']
    """
    x, y = value if isinstance(value, tuple) else (value, None)
    if not isinstance(x, np.ndarray):
        return value
    if x.ndim != 2 or (y is not None and y.shape != (len(x),)):
        what = f"arrays of the shapes {x.shape} and {None if y is None else y.shape}"
        raise UserError(what, "data", "give x with rows and columns, and y with a label a row")
    columns = {f"x{number}": x[:, number] for number in range(x.shape[1])}
    return pa.table(columns if y is None else {**columns, label: y})


def seed_numbers(seeds: Iterable[int], changes: Mapping[str, Any]) -> list[int]:
    """The seeds of several runs, each once."""
    numbers = [int(seed) for seed in seeds]
    if "seed" in changes:
        raise UserError("both seed and seeds", "seeds", "give one of the two")
    if not numbers or len(set(numbers)) < len(numbers):
        raise UserError("no seed, or one twice", "seeds", "give each once: seeds=range(5)")
    return numbers
