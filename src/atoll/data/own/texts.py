"""Own texts: a JSONL, CSV, TSV or Parquet file per client, with a column for the task."""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne, build, nearest
from atoll.data.dataset import Dataset
from atoll.data.own.harmonise import Rules, merge, plain_labels
from atoll.data.own.profiles import (
    MISSING,
    Contents,
    Profile,
    TableOptions,
    in_order,
    natural,
)
from atoll.data.own.sheets import BLOCK, PARQUET, Sheet, codec, uneven, written
from atoll.data.own.spellings import refuse_spellings
from atoll.data.sources.fetch import own
from atoll.data.tokens import numbered, tokenised

__all__ = ["Reading", "TextOptions", "examine", "load", "some_texts"]

Array = np.ndarray[Any, Any]
CSV: Final = (".csv", ".tsv")
KINDS: Final = (".jsonl", *CSV, *PARQUET)


@dataclass(frozen=True)
class TextOptions:
    """The options of `data` where files have texts."""

    files: tuple[str, ...] = ()  # one for each client
    text: str = "text"  # the column of texts
    label: str = "label"  # the column to be predicted
    stage: str = ""  # the column of tasks; empty for one
    length: AtLeastOne = 128  # tokens of a text that are read
    delimiter: str = ""  # of CSV files; empty: detected
    encoding: str = ""  # of CSV files; empty: detected
    id: str = ""  # the column that names a text; carried to predictions
    group: str = ""  # the column of people: texts of one are all to train on, or all to test on
    order: tuple[str, ...] = ()  # of the stages; empty: numbers by size, then words by letter
    rename: dict[str, str] = field(default_factory=dict)  # names of columns, old = new
    # classes by the way they are written; as-is: sites may have different ones
    labels: Literal["", "as-is"] | dict[str, str] = ""
    sites: dict[str, Rules] = field(default_factory=dict)  # by the name of a file, where it differs

    def rules(self, site: str) -> Rules:
        """The rules of a site: rename, labels, id and group."""
        labels = self.labels if isinstance(self.labels, dict) else {}
        general = Rules(self.rename, labels, id=self.id, group=self.group)
        return merge(general, self.sites.get(site))


@dataclass(frozen=True)
class Reading:
    """How to read a file."""

    delimiter: str = ""  # delimiter of a CSV file; empty: detected
    encoding: str = ""  # encoding of a CSV file; empty: detected
    rename: Mapping[str, str] = field(default_factory=dict)  # names of columns, old = new


@dataclass(frozen=True)
class _Texts:
    """The columns of one client's file."""

    texts: list[str]
    labels: list[str]
    stages: list[str]
    people: list[str | None]  # None if no column names them


def load(name: str = "", **values: Any) -> Dataset:
    """The user's own texts as tokens; equal files give equal data."""
    options = build(TextOptions, values, "[data]")
    tables = _read(options)
    if options.labels != "as-is":
        refuse_spellings(counts(tables, "labels"), options.label)
    tokens = [tokenised(words) for table in tables.values() for words in table.texts]
    labels = [label for table in tables.values() for label in table.labels]
    when = [stage for table in tables.values() for stage in table.stages]
    classes, stages = sorted(set(labels), key=natural), in_order({*when}, options.order)
    x, words = numbered(tokens, options.length, fewest=1)
    sizes = [len(table.texts) for table in tables.values()]
    grouped = any(options.rules(site).group for site in tables)
    return Dataset(
        name or "own texts",
        "text",
        x,
        np.array([classes.index(label) for label in labels], dtype=np.int64),
        (),
        tuple(classes),
        f"files of the user: {', '.join(Path(path).name for path in options.files)}",
        group=np.repeat(np.arange(len(sizes)), sizes),
        groups=tuple(str(path) for path in options.files),
        words=words,
        stage=np.array([stages.index(stage) for stage in when], dtype=np.int64),
        stages=stages,
        people=_people(tables) if grouped else None,
    )


def examine(**values: Any) -> Contents:
    """The classes and stages of each site, and columns that may identify texts, for suggestions."""
    options = build(TextOptions, values, "[data]")
    tables = _read(options)
    common = {name: getattr(options, name) for name in ("id", "group", "order", "labels", "sites")}
    contents = Contents(TableOptions(**common), ())
    contents.classes |= counts(tables, "labels")
    contents.stages |= counts(tables, "stages")
    for site, path in zip(tables, options.files, strict=True):
        contents.profiles[site] = _profiles(Path(path), options)
    return contents


def _profiles(path: Path, options: TextOptions) -> dict[str, Profile]:
    """Profiles of the columns that the options do not name."""
    rules = options.rules(path.stem)
    text, label, stage = (
        rules.rename.get(name, name) for name in (options.text, options.label, options.stage)
    )
    columns = _columns(
        path, [text], Reading(options.delimiter, options.encoding, rules.rename), None
    )
    sheet, profiles = Sheet(path, tuple(columns), "", "", (0, 0)), dict[str, Profile]()
    for name in columns:
        if name in (text, label, stage, rules.id, rules.group):
            continue
        try:
            words = _words(path, name, columns[name])
        except UserError:  # lists or objects identify nothing
            continue
        values = pyarrow.array([word or None for word in words], pyarrow.string())
        nothing = pyarrow.nulls(len(values), pyarrow.string())
        profiles[name] = Profile()
        profiles[name].add(values, nothing, np.arange(len(values)), sheet)
    return profiles


def counts(tables: Mapping[str, _Texts], what: str) -> dict[str, Counter[str]]:
    """The rows of each label or stage, by site."""
    return {site: Counter(getattr(table, what)) for site, table in tables.items()}


def _people(tables: Mapping[str, _Texts]) -> Array:
    """A number for each text, equal for texts of one person."""
    keys = []
    for site, table in tables.items():
        for row, name in enumerate(table.people):
            keys.append(f"{site}={name}" if name is not None else f"{site} row {row}")
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def _read(options: TextOptions) -> dict[str, _Texts]:
    """Read the files, by the name of their site."""
    if not options.files:
        raise UserError("no files", "data", "write files = ['a.jsonl', 'b.jsonl'], one a client")
    places = [Path(path).resolve() for path in options.files]
    for path, place in zip(options.files, places, strict=True):
        if places.count(place) > 1:
            remedy = "give each client a file of its own"
            raise UserError(f"two clients have the file '{path}'", "data.files", remedy)
    stems = [Path(path).stem for path in options.files]
    for site, rules in options.sites.items():
        if site not in stems:
            raise UserError(f"no site '{site}'", f"[data.sites.{site}]", nearest(site, stems))
        if rules.values or rules.units or rules.missing or rules.dates or rules.weights:
            remedy = "texts know rename, labels, id and group; leave the others out"
            raise UserError("an option of tables", f"[data.sites.{site}]", remedy)
    tables = {}
    for path, stem in zip(options.files, stems, strict=True):
        called = stem if stems.count(stem) == 1 else path
        tables[called] = _file(Path(path), options, options.rules(stem))
    return tables


def _file(path: Path, options: TextOptions, rules: Rules) -> _Texts:
    """The texts of one client, with labels after applying its rules."""
    reading = Reading(options.delimiter, options.encoding, rules.rename)
    renamed = {one: rules.rename.get(name, name) for one, name in vars(options).items()
             if one in ("text", "label", "stage")}  # fmt: skip
    names = [renamed["text"], renamed["label"], *([renamed["stage"]] if options.stage else [])]
    others = [name for name in (rules.id, rules.group) if name]
    columns = _columns(path, [*names, *others], reading)
    _refuse_numbers(path, names[0], columns[names[0]])
    labels = _words(path, names[1], columns[names[1]], needed=True)
    stages = ["0"] * len(labels)
    if options.stage:
        stages = _words(path, names[2], columns[names[2]], needed=True)
    people: list[str | None] = [None] * len(labels)
    if rules.group:
        people = [word or None for word in _words(path, rules.group, columns[rules.group])]
    texts = [words or "" for words in columns[names[0]]]
    return _Texts(texts, [rules.labels.get(label, label) for label in labels], stages, people)


def some_texts(
    path: Path, names: tuple[str, str], rules: Rules, dialect: tuple[str, str]
) -> tuple[list[str], list[str | None] | None, list[str] | None]:
    """Texts of a file to predict, with labels and ids if it has such columns.

    `names` are the columns of texts and labels; `dialect`: the delimiter and the encoding of a CSV
    file, empty to detect them.
    """
    text, label = (rules.rename.get(name, name) for name in names)
    needed = [label, *([rules.id] if rules.id else [])]
    columns = _columns(path, [text], Reading(*dialect, rules.rename), needed)
    _refuse_numbers(path, text, columns[text])
    labels: list[str | None] | None = None
    if label in columns:
        words = _words(path, label, columns[label])
        labels = [rules.labels.get(word, word) if word else None for word in words]
    ids = None
    if rules.id in columns:
        ids = _words(path, rules.id, columns[rules.id])
    return [words or "" for words in columns[text]], labels, ids


def _refuse_numbers(path: Path, name: str, texts: Sequence[Any]) -> None:
    words = [value for value in texts if value not in (None, "")]
    if not all(isinstance(word, str) for word in words) or (words and all(map(_number, words))):
        raise UserError(f"column '{name}' is no text", str(path), "name the column of texts")


def _columns(
    path: Path, names: Sequence[str], reading: Reading, needed: Sequence[str] | None = ()
) -> dict[str, list[Any]]:
    """Some columns of a file by name, with available `wanted` columns; None: all columns."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise UserError(f"'{path}' is of no known kind", "data.files", f"give one of {kinds}")
    if not path.is_file():
        remedy = "fix the path; it is relative to the folder in which you start the command"
        raise UserError(f"no file '{path}'", "data.files", remedy, EXIT_DATA_MISSING)
    if kind == ".jsonl":
        columns = _jsonl(path, names, needed, reading)
    elif kind in CSV:
        columns = _csv(path, names, needed, reading)
    else:
        columns = _parquet(path, names, needed, reading)
    if not columns[names[0]]:
        raise _empty(path)
    return columns


def _words(path: Path, column: str, values: Sequence[Any], needed: bool = False) -> list[str]:
    """Labels, stages or names as words: 1, 1.0 and "1" are equal, and so are true and True.

    A missing one raises an error if it is required, else becomes empty.
    """
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
        if word in missing and needed:
            remedy = "fill it or leave the row out"
            raise UserError(f"row {row} has no '{column}'", str(path), remedy)
    words = ["" if word in missing else word for word in words]
    plain: list[str] = plain_labels(pyarrow.array(words, pyarrow.string())).to_pylist()
    return plain


def _number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _empty(path: Path) -> UserError:
    return UserError("a file without rows", str(path), "leave it out, or fill it")


def _chosen(
    path: Path, columns: Sequence[str], names: Sequence[str], needed: Sequence[str] | None
) -> list[str]:
    """The columns to read; refuses a file unless it has each of the `names` exactly once."""
    for name in names:
        if name not in columns:
            raise UserError(f"no column '{name}'", str(path), nearest(name, columns))
    if needed is None:
        needed = [name for name, count in Counter(columns).items() if count == 1]
    chosen = [*dict.fromkeys([*names, *(name for name in needed if name in columns)])]
    for name in chosen:
        if [*columns].count(name) > 1:
            what = f"the column '{name}' is there twice"
            raise UserError(what, str(path), "rename or remove one", EXIT_DATA_MISSING)
    return chosen


def _lines(path: Path) -> Iterator[str]:
    """The lines of a JSONL file."""
    with own(path, "a JSONL file"), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                what, remedy = f"line {number} is not UTF-8", "save the file as UTF-8"
                raise UserError(what, str(path), remedy, EXIT_DATA_MISSING) from error


def _jsonl(
    path: Path, names: Sequence[str], needed: Sequence[str] | None, reading: Reading
) -> dict[str, list[Any]]:
    rows = list[dict[str, Any]]()
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
        rows.append({reading.rename.get(name, name): value for name, value in row.items()})
    if not rows:
        raise _empty(path)
    columns = dict.fromkeys(name for row in rows for name in row)
    chosen = _chosen(path, [*columns], names, needed)
    return {name: [row.get(name) for row in rows] for name in chosen}


def _csv(
    path: Path, names: Sequence[str], needed: Sequence[str] | None, reading: Reading
) -> dict[str, list[Any]]:
    tab = "\t" if path.suffix.lower() == ".tsv" else ""
    with own(path, "a CSV file"):
        delimiter, encoding, header = written(path, reading.delimiter or tab, reading.encoding)
        if not header:
            raise _empty(path)
        every = next(csv.reader([header], delimiter=delimiter)) if needed is None else needed
        read = [*names, *every, *reading.rename]
        try:
            table = pyarrow.csv.read_csv(
                path,
                pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=BLOCK, encoding=codec(encoding)
                ),
                pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(read, pyarrow.string())),
            )
        except (pyarrow.ArrowInvalid, UnicodeError) as error:
            raise _csv_error(path, encoding, error) from error
        table = table.rename_columns(
            [reading.rename.get(name, name) for name in table.column_names]
        )
        chosen = _chosen(path, table.column_names, names, needed)
        return {name: table.column(name).to_pylist() for name in chosen}


def _csv_error(path: Path, encoding: str, error: Exception) -> Exception:
    """The error in a CSV file and its row, without quoting its content."""
    if isinstance(error, UnicodeError) or "UTF8" in str(error):
        remedy = "name another encoding, or leave it out: atoll detects it"
        return UserError(f"the file is not {encoding}", str(path), remedy, EXIT_DATA_MISSING)
    return uneven(path, error) or error


def _parquet(
    path: Path, names: Sequence[str], needed: Sequence[str] | None, reading: Reading
) -> dict[str, list[Any]]:
    with own(path, "a Parquet file"), pyarrow.parquet.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        renamed = [reading.rename.get(name, name) for name in columns]
        chosen = _chosen(path, renamed, names, needed)
        places = {name: columns[renamed.index(name)] for name in chosen}
        table = file.read(columns=[*places.values()])
        return {name: table.column(place).to_pylist() for name, place in places.items()}
