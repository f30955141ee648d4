"""The user's own texts: a JSONL, CSV, TSV or Parquet file a client, a column names the task."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne, nearest
from atoll.data.dataset import Dataset
from atoll.data.own.harmonise import plain_labels
from atoll.data.own.profiles import MISSING, natural
from atoll.data.own.sheets import BLOCK, PARQUET, codec, uneven, written
from atoll.data.sources.fetch import own
from atoll.data.tokens import numbered, tokenised

__all__ = ["some_texts", "text_files"]

CSV: Final = (".csv", ".tsv")
KINDS: Final = (".jsonl", *CSV, *PARQUET)


def text_files(  # noqa: PLR0913, PLR0917 - they are the options of [data]
    files: tuple[str, ...] = (),
    text: str = "text",
    label: str = "label",
    stage: str = "",
    length: AtLeastOne = 128,
    delimiter: str = "",
    encoding: str = "",
) -> Dataset:
    """Texts of your own: one file a client; `stage` names the column of tasks, empty for one."""
    if not files:
        raise UserError("no files", "data", "write files = ['a.jsonl', 'b.jsonl'], one a client")
    places = [Path(path).resolve() for path in files]
    for path, place in zip(files, places, strict=True):
        if places.count(place) > 1:
            remedy = "give each client a file of its own"
            raise UserError(f"two clients have the file '{path}'", "data.files", remedy)
    names, how = [text, label, *([stage] if stage else [])], (delimiter, encoding)
    tables = [_columns(Path(path), names, how) for path in files]
    texts = [tokenised(word or "") for table in tables for word in table[0]]
    labels = [name for table in tables for name in table[1]]
    when = [name for table in tables for name in table[2]] if stage else ["0"] * len(texts)
    classes, stages = (sorted(set(names), key=natural) for names in (labels, when))
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
        stage=np.array([stages.index(name) for name in when], dtype=np.int64),
        stages=tuple(stages),
    )


def some_texts(
    path: Path, text: str, label: str, how: tuple[str, str]
) -> tuple[list[str], list[str | None] | None]:
    """Texts of a file to predict, and their labels where it has a column of them.

    `how`: the delimiter and the encoding of a CSV file, empty to detect them.
    """
    try:
        columns = _columns(path, [text, label], how)
    except UserError as error:
        if error.what != f"no column '{label}'":
            raise
        columns = _columns(path, [text], how)
    texts = [words or "" for words in columns[0]]
    return texts, columns[1] if len(columns) > 1 else None


def _columns(path: Path, names: Sequence[str], how: tuple[str, str]) -> list[list[Any]]:
    """These columns of a file; labels and stages must not be missing, a text may be.

    `how`: the delimiter and the encoding of CSV files, empty to detect them.
    """
    kind = path.suffix.lower()
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(f"'{path}' is of no known kind", "data.files", f"give one of {known}")
    if not path.is_file():
        remedy = "fix the path; it is relative to the folder in which you start the command"
        raise UserError(f"no file '{path}'", "data.files", remedy, EXIT_DATA_MISSING)
    if kind == ".jsonl":
        texts, *others = _jsonl(path, names)
    else:
        texts, *others = _csv(path, names, *how) if kind in CSV else _parquet(path, names)
    if not texts:
        raise _empty(path)
    words = [value for value in texts if value not in (None, "")]
    if not all(isinstance(word, str) for word in words) or (words and all(map(_number, words))):
        raise UserError(f"column '{names[0]}' is no text", str(path), "name the column of texts")
    return [texts, *(_names(path, *each) for each in zip(names[1:], others, strict=True))]


def _names(path: Path, column: str, values: Sequence[Any]) -> list[str]:
    """Labels or stages as words: 1, 1.0 and "1" are one, and so are true and True."""
    words = []
    for row, value in enumerate(values, 1):
        if isinstance(value, list | tuple | dict | bytes):
            what = f"row {row} has no single value in '{column}'"
            remedy = "write a word or a number, not a list or an object"
            raise UserError(what, str(path), remedy, EXIT_DATA_MISSING)
        void = value is None or (isinstance(value, float) and math.isnan(value))
        word = "" if void else str(value).strip()
        words.append(word.capitalize() if word.lower() in ("true", "false") else word)
    among = [word for word in words if word not in ("", *MISSING)]
    missing = ("", *MISSING) if all(map(_number, among)) else ("",)  # NA is none among numbers
    for row, word in enumerate(words, 1):
        if word in missing:
            remedy = "fill it or leave the row out"
            raise UserError(f"row {row} has no '{column}'", str(path), remedy)
    plain: list[str] = plain_labels(pyarrow.array(words, pyarrow.string())).to_pylist()
    return plain


def _number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _empty(path: Path) -> UserError:
    return UserError("a file without rows", str(path), "leave it out, or fill it")


def _named(path: Path, known: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a file that has not each of these columns once."""
    for name in names:
        if name not in known:
            raise UserError(f"no column '{name}'", str(path), nearest(name, known))
        if [*known].count(name) > 1:
            what = f"the column '{name}' is there twice"
            raise UserError(what, str(path), "rename or remove one", EXIT_DATA_MISSING)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a JSONL file."""
    with own(path, "a JSONL file"), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what, remedy = f"line {number} is not UTF-8", "save the file as UTF-8"
                raise UserError(what, str(path), remedy, EXIT_DATA_MISSING) from error


def _jsonl(path: Path, names: Sequence[str]) -> list[list[Any]]:
    known, rows = dict[str, None](), list[list[Any]]()
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            remedy = f'fix the line; write one object per line, as {{"{names[0]}": "...", ...}}'
            what = f"line {number} is no JSON object"
            raise UserError(what, str(path), remedy, EXIT_DATA_MISSING)
        known.update(dict.fromkeys(row))
        rows.append([row.get(name) for name in names])
    if not rows:
        raise _empty(path)
    _named(path, [*known], names)
    return [list(column) for column in zip(*rows, strict=True)]


def _csv(path: Path, names: Sequence[str], delimiter: str, encoding: str) -> list[list[Any]]:
    tab = "\t" if path.suffix.lower() == ".tsv" else ""
    with own(path, "a CSV file"):
        delimiter, encoding, header = written(path, delimiter or tab, encoding)
        if not header:
            raise _empty(path)
        try:
            table = pyarrow.csv.read_csv(
                path,
                pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=BLOCK, encoding=codec(encoding)
                ),
                pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string())),
            )
        except (pyarrow.ArrowInvalid, UnicodeError) as error:
            raise _csv_error(path, encoding, error) from error
        _named(path, table.column_names, names)
        return [table.column(name).to_pylist() for name in names]


def _csv_error(path: Path, encoding: str, error: Exception) -> Exception:
    """What is wrong with a CSV file and in which row, without quoting its content."""
    if isinstance(error, UnicodeError) or "UTF8" in str(error):
        remedy = "name another encoding, or leave it out: atoll detects it"
        return UserError(f"the file is not {encoding}", str(path), remedy, EXIT_DATA_MISSING)
    return uneven(path, error) or error


def _parquet(path: Path, names: Sequence[str]) -> list[list[Any]]:
    with own(path, "a Parquet file"), pyarrow.parquet.ParquetFile(path) as file:
        _named(path, file.schema_arrow.names, names)
        table = file.read(columns=[*dict.fromkeys(names)])
        return [table.column(name).to_pylist() for name in names]
