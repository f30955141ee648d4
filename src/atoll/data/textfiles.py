"""The user's own texts: one JSONL, CSV or Parquet file a client, a column that says which task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne, nearest
from atoll.data.dataset import Dataset
from atoll.data.fetch import reading
from atoll.data.tokens import numbered, tokenised

__all__ = ["text_files"]

READERS: Final[dict[str, Any]] = {
    ".jsonl": pyarrow.json.read_json,
    ".csv": pyarrow.csv.read_csv,
    ".parquet": pyarrow.parquet.read_table,
}


def text_files(
    files: tuple[str, ...] = (),
    text: str = "text",
    label: str = "label",
    stage: str = "",
    length: AtLeastOne = 128,
) -> Dataset:
    """Texts of your own: one file a client; `stage` names the column of tasks, empty for one."""
    if not files:
        raise UserError("no files", "data", "write files = ['a.jsonl', 'b.jsonl'], one a client")
    tables = [_columns(Path(path), [text, label, *([stage] if stage else [])]) for path in files]
    texts = [tokenised(word or "") for table in tables for word in table[0]]
    labels = [str(name) for table in tables for name in table[1]]
    when = [value for table in tables for value in table[2]] if stage else [0] * len(texts)
    classes, stages = sorted(set(labels)), _ordered(when)
    x, words = numbered(texts, length, fewest=1)
    sizes = [len(table[0]) for table in tables]
    return Dataset(
        "own texts",
        "text",
        x,
        np.array([classes.index(name) for name in labels], dtype=np.int64),
        (),
        tuple(classes),
        f"files of the user: {', '.join(Path(path).name for path in files)}",
        group=np.repeat(np.arange(len(files)), sizes),
        groups=tuple(str(path) for path in files),
        words=words,
        stage=np.array([stages.index(value) for value in when], dtype=np.int64),
        stages=tuple(str(value) for value in stages),
    )


def _ordered(values: Sequence[Any]) -> list[Any]:
    """The different values in their order; numbers as numbers, all else as text."""
    kinds = {type(value) for value in values}
    return sorted(set(values), key=None if len(kinds) == 1 else str)


def _table(path: Path) -> pyarrow.Table:
    if path.suffix not in READERS:
        known = ", ".join(READERS)
        raise UserError(f"'{path}' is of no known kind", "data.files", f"give one of {known}")
    if not path.is_file():
        remedy = "mend the path; it is taken from the folder that the command runs in"
        raise UserError(f"no file '{path}'", "data.files", remedy, EXIT_DATA_MISSING)
    with reading(path):
        return READERS[path.suffix](path)


def _columns(path: Path, names: Sequence[str]) -> list[list[Any]]:
    """These columns of a file; labels and stages must not be missing, an empty text may be."""
    table = _table(path)
    for name in names:
        if name not in table.column_names:
            raise UserError(f"no column '{name}'", str(path), nearest(name, table.column_names))
    columns = [table.column(name).to_pylist() for name in names]
    for name, column in zip(names[1:], columns[1:], strict=True):
        if None in column:
            row = column.index(None) + 1
            raise UserError(f"row {row} has no '{name}'", str(path), "fill it or leave the row out")
    if not columns[0]:
        raise UserError("a file without rows", str(path), "leave it out, or fill it")
    if not all(isinstance(value, str) or value is None for value in columns[0]):
        raise UserError(f"column '{names[0]}' is no text", str(path), "name the column of texts")
    return columns
