"""The first pass over own tables: collects statistics of each column at each site.

Reads files in chunks, so memory contains counts and a sample of rows, never a whole file.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne, nearest
from atoll.data.own.encoding import LARGEST, Kind, as_dates, as_numbers
from atoll.data.own.harmonise import (
    DateRule,
    Rules,
    Unit,
    harmonise,
    merge,
    plain_labels,
    refuse_bad_rules,
)
from atoll.data.own.sheets import Sheet, batches, line_of, opened

__all__ = [
    "MISSING", "MOST_DISTINCT", "Arrival", "Contents", "Profile", "Repeats", "TableOptions",
    "harmonised", "in_order", "known_columns", "natural", "open_sheet", "profile_sheet",
    "refuse_unknown_columns", "rename_columns", "site_name", "unusable",
]  # fmt: skip

Array = np.ndarray[Any, Any]
MISSING = ("NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "?", "#N/A")
MOST_DISTINCT = 50_000  # maximum number of distinct values counted per column
SAMPLE = 2_000  # rows per site that are searched for leaks of the label


@dataclass(frozen=True)
class TableOptions:
    """The options of `data` beside `files`."""

    # one for each site, or one with a site column, CSV or Parquet; or by site a list, one a stage
    files: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    label: str = ""  # the column to be predicted
    task: Literal["", "classification", "regression"] = (
        ""  # empty: by the label; more than 20 distinct numbers are regression
    )
    site: str = ""  # the column that names a row's site, in one file for all
    stage: str = ""  # the column that names a row's stage, for data that come over time
    ignore: tuple[str, ...] = ()  # columns to leave out
    keep: tuple[str, ...] = ()  # columns to keep though they look like identifiers
    categorical: tuple[str, ...] = ()  # columns to read as text, e.g. codes made of digits
    levels: Literal["shared", "local"] = "shared"  # local: text columns are own, no level crosses
    most_levels: AtLeastOne = 50  # of a text column; rarer ones count as unknown
    # days since 1970-01-01, refused by name, or by column format and since
    dates: Literal["days", "refuse"] | dict[str, DateRule] = "days"
    # words that mean that a value is missing ("" always does), or codes by column beside them
    missing: tuple[str, ...] | dict[str, tuple[str, ...]] = MISSING
    delimiter: str = ""  # of CSV files; empty: detected
    encoding: str = ""  # of CSV files; empty: detected
    id: str = ""  # the column that names a row: no input, carried to predictions
    group: str = ""  # the column of people: rows of one are all to train on, or all to test on
    weights: str = ""  # the column that says how much a row counts in training; no input
    order: tuple[str, ...] = ()  # of the stages; empty: numbers by size, then words by letter
    rename: dict[str, str] = field(default_factory=dict)  # names of columns, old = new
    # classes by the way they are written; as-is: sites may have different ones
    labels: Literal["", "as-is"] | dict[str, str] = ""
    # by column, values by the way they are written
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)  # by column factor, offset and suffix
    sites: dict[str, Rules] = field(default_factory=dict)  # by site, where its rules differ

    @property
    def special(self) -> dict[str, str]:
        """The columns in which every row must have a value, by role."""
        columns = {"label": self.label, "site": self.site, "stage": self.stage}
        return {what: name for what, name in columns.items() if name}

    @property
    def words(self) -> tuple[str, ...]:
        """Words that mark missing values in any column."""
        return MISSING if isinstance(self.missing, dict) else self.missing

    @property
    def general(self) -> Rules:
        """The rules of all sites."""
        return Rules(
            self.rename,
            self.labels if isinstance(self.labels, dict) else {},
            self.values,
            self.units,
            self.missing if isinstance(self.missing, dict) else {},
            self.dates if isinstance(self.dates, dict) else {},
            self.id,
            self.group,
            self.weights,
        )

    def rules(self, site: str) -> Rules:
        """The rules of a site."""
        return merge(self.general, self.sites.get(site))

    def renamed(self) -> "TableOptions":
        """The same options with columns by their new names."""
        renames = [self.rename, *(rules.rename for rules in self.sites.values())]
        changed: dict[str, Any] = {}
        for option in ("ignore", "keep", "categorical"):
            names = list(getattr(self, option))  # each site may rename it differently
            names += [new[name] for name in names for new in renames if name in new]
            changed[option] = tuple(dict.fromkeys(names))
        for option in ("label", "site", "stage"):
            name = getattr(self, option)
            changed[option] = self.rename.get(name, name)
        return replace(self, **changed)


def unusable(what: str, where: str | Path, remedy: str) -> UserError:
    """The error for a file that cannot be used."""
    return UserError(what, str(where), remedy, EXIT_DATA_MISSING)


def site_name(text: str) -> str:
    """A name that is valid in file names and tables."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "site"


def known_columns(sheets: Collection[Sheet]) -> set[str]:
    """The names of columns in some files, old and new."""
    return {name for sheet in sheets for name in (*sheet.columns, *sheet.written)}


def rename_columns(sheet: Sheet, rules: Rules) -> Sheet:
    """The sheet with the new names of its columns."""
    columns = tuple(rules.rename.get(name, name) for name in sheet.columns)
    for place, name in enumerate(columns):
        if name in columns[:place]:
            both = [old for old in sheet.columns if rules.rename.get(old, old) == name]
            what = f"rename makes one column of {both[0]} and {both[1]}"
            raise UserError(what, str(sheet.path), "rename or ignore one of the two")
    return replace(sheet, columns=columns, written=sheet.columns)


def open_sheet(file: str, options: TableOptions, site: str = "") -> Sheet:
    """Open a file with renamed columns; its site is the file's stem by default."""
    sheet = opened(Path(file), options.delimiter, options.encoding)
    rules = options.general if options.site else options.rules(site or site_name(sheet.path.stem))
    return rename_columns(sheet, rules)


def harmonised(sheet: Sheet, options: TableOptions, site: str = "") -> Iterator[pa.RecordBatch]:
    """The rows of a file in batches, after applying the rules of their site."""
    rules = options.rules(site or site_name(sheet.site or sheet.path.stem))
    for batch in batches(sheet, options.words):
        if options.site and options.sites:
            yield _by_site(batch, sheet, options)
        else:
            yield harmonise(batch, rules, options.label, sheet.comma)


def _by_site(batch: pa.RecordBatch, sheet: Sheet, options: TableOptions) -> pa.RecordBatch:
    """Rows of several sites, each after applying the rules of its own site."""
    pieces, places = list[pa.RecordBatch](), list[Array]()
    column = pc.fill_null(batch.column(options.site), "")
    for name in column.unique().to_pylist():
        rows = np.flatnonzero(pc.equal(column, name).to_numpy(zero_copy_only=False))
        rules = options.rules(site_name(name))
        piece = harmonise(batch.take(pa.array(rows)), rules, options.label, sheet.comma)
        pieces.append(piece.replace_schema_metadata(None))
        places.append(rows)
    order = pa.array(np.argsort(np.concatenate(places), kind="stable"))
    return (
        pa.Table.from_batches(pieces).combine_chunks().take(order).combine_chunks().to_batches()[0]
    )


def refuse_unknown_columns(columns: Collection[str], options: TableOptions, who: str) -> None:
    """Refuse options that name unknown columns, and an ignored label."""
    rules = [options.general, *options.sites.values()]
    names = [*options.ignore, *options.keep, *options.categorical]
    for one in rules:
        refuse_bad_rules(one)
        since = [rule.since for rule in one.dates.values() if not rule.since[:1].isdigit()]
        single = [name for name in (one.id, one.group, one.weights, *since) if name]
        names += [*one.rename, *one.values, *one.units, *one.missing, *one.dates, *single]
    for name in names:
        if name not in columns:
            raise UserError(f"no {who} has a column '{name}'", "[data]", nearest(name, columns))
    if options.label in options.ignore:
        what = f"ignore names the label '{options.label}'"
        raise UserError(what, "[data]", "take it out of ignore: the label is no input")


def natural(label: str) -> tuple[int, float, str]:
    """The sort key of a label: numbers by size, before words."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def in_order(names: Collection[str], order: Sequence[str] = ()) -> tuple[str, ...]:
    """Sort names as an order lists them; without one, numbers by size, then words."""
    unknown = sorted(set(names) - set(order), key=natural)
    if order and unknown:
        what = f"order does not list the stage '{unknown[0]}'"
        raise UserError(what, "[data]", f"list all: order = {[*order, *unknown]}")
    return tuple(name for name in order if name in names) if order else tuple(unknown)


@dataclass
class Profile:
    """Statistics of one column at one site."""

    rows: int = 0
    present: int = 0
    numbers: int = 0
    dates: int = 0
    whole: bool = True
    ordered: bool = True
    adjacent: int = 0  # values equal to the previous one
    last: float = -math.inf
    low: float = math.inf
    high: float = -math.inf
    first: float = math.inf  # of the dates, in days
    final: float = -math.inf
    counts: Counter[str] = field(default_factory=Counter)
    word: tuple[Sheet, int, str] | None = None  # first value that is not a number: file, row, text
    huge: tuple[Sheet, int, str] | None = None
    codes: bool = False  # the column has type text in the file, and all values are digits
    sample: list[tuple[str | None, str]] = field(default_factory=list)  # value, label

    def add(self, text: pa.Array, labels: pa.Array, rows: Array, sheet: Sheet) -> None:
        """Add some values; `rows` are their indices in the file."""
        self.rows += len(text)
        valid = text.is_valid().to_numpy(zero_copy_only=False)
        self.present += int(valid.sum())
        if len(text) > 1:
            self.adjacent += int(pc.sum(pc.equal(text[1:], text[:-1])).as_py() or 0)
        values = as_numbers(text, sheet.comma)
        words = valid & ~values.is_valid().to_numpy(zero_copy_only=False)
        large = np.abs(pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)) > LARGEST
        self.word = self.word or _first(words, text, rows, sheet)
        self.huge = self.huge or _first(large, text, rows, sheet)
        if len(self.counts) < MOST_DISTINCT:
            for item in text.drop_null().value_counts().to_pylist():
                self.counts[item["values"]] += item["counts"]
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        self.numbers += len(numbers)
        if words.any():  # dates are not numbers, and slow to detect
            days = as_dates(text).drop_null().to_numpy(zero_copy_only=False)
            self.dates += len(days)
            self.first = float(days.min(initial=self.first))
            self.final = float(days.max(initial=self.final))
        if len(numbers):
            self._measure(numbers)
        if len(self.sample) < SAMPLE:
            pairs = zip(text[:SAMPLE].to_pylist(), labels[:SAMPLE].to_pylist(), strict=True)
            self.sample += [(value, label) for value, label in pairs if label is not None]

    def _measure(self, numbers: Array) -> None:
        self.whole = self.whole and bool((numbers == np.round(numbers)).all())
        steps = np.diff(np.concatenate([[self.last], numbers])) if self.numbers else numbers
        self.ordered = self.ordered and bool((steps > 0).all())
        self.last = float(numbers[-1])
        self.low, self.high = min(self.low, numbers.min()), max(self.high, numbers.max())

    def kind(self, categorical: bool) -> Kind | Literal[""]:
        """The type of the column at this site; empty if it has no value."""
        if not self.present:
            return ""
        if categorical or self.codes:
            return "text"
        if self.numbers == self.present:
            return "number"
        return "date" if self.dates == self.present else "text"

    @property
    def gaps(self) -> bool:
        """Whether any value is missing."""
        return self.rows > self.present

    @property
    def distinct(self) -> int:
        """The number of distinct values, up to a limit."""
        return len(self.counts)


def _first(
    marked: Array, text: pa.Array, rows: Array, sheet: Sheet
) -> tuple[Sheet, int, str] | None:
    """File, row and text of the first marked value."""
    if not marked.any():
        return None
    place = int(np.argmax(marked))
    return sheet, int(rows[place]), str(text[place].as_py())


@dataclass
class Contents:
    """The data that the first pass collects from all files."""

    options: TableOptions
    sheets: tuple[Sheet, ...]
    profiles: dict[str, dict[str, Profile]] = field(default_factory=dict)  # by site and column
    files: dict[str, list[Sheet]] = field(default_factory=dict)
    origins: dict[str, tuple[Path, str]] = field(  # "server" is the part that is not a site
        default_factory=lambda: {"server": (Path(), "")}
    )
    classes: dict[str, Counter[str]] = field(default_factory=dict)
    stages: dict[str, Counter[str]] = field(default_factory=dict)
    arrivals: dict[str, "Arrival"] = field(default_factory=dict)  # by stage, if there are several
    repeats: "Repeats | None" = None  # None: not searched


@dataclass
class Arrival:
    """The data that arrive at a stage, at all sites."""

    classes: Counter[str] = field(default_factory=Counter)  # number of rows per class
    columns: set[str] = field(default_factory=set)  # columns with values


@dataclass
class Repeats:
    """Rows by a hash of their values, to find duplicates."""

    within: dict[str, Counter[int]] = field(default_factory=dict)  # by site, over all columns
    across: dict[str, Counter[int]] = field(default_factory=dict)  # by site, of the common ones

    def add(self, site: str, batch: pa.RecordBatch, columns: Sequence[str]) -> None:
        """Add some rows of a site; `columns` are those common to all sites."""
        for counts, names in ((self.within, batch.schema.names), (self.across, columns)):
            if not names:  # sites without a common column, which is refused later
                continue
            texts = [pc.fill_null(batch.column(name), "") for name in sorted(names)]
            rows = pc.binary_join_element_wise(*texts, "\x1f")
            counts.setdefault(site, Counter()).update(hash(row) for row in rows.to_pylist())


def profile_sheet(contents: Contents, sheet: Sheet) -> None:
    """Add the rows of a file to the profiles of their sites."""
    special = contents.options.special
    for what, name in special.items():
        if name not in sheet.columns:
            remedy = nearest(name, sheet.columns)
            raise unusable(f"no column '{name}' for the {what}", sheet.path, remedy)
    total = 0
    for batch in harmonised(sheet, contents.options):
        _refuse_gaps(sheet, batch, [*special.values()], total)
        for raw, places in _rows_by_site(contents.options, sheet, batch):
            name = site_name(raw)
            origin = (Path() if sheet.site else sheet.path, raw)
            if contents.origins.setdefault(name, origin) != origin:
                remedy = "rename one of the files or sites"
                raise unusable(f"two parts would be called '{name}'", sheet.path, remedy)
            rows = batch.take(pa.array(places))
            _refuse_weights(sheet, rows, contents.options.rules(name).weights, places + total)
            _add_rows(contents, sheet, name, rows, places + total)
        total += len(batch)
    if not total:
        raise unusable("a header and no rows", sheet.path, "give a file with rows")


def _rows_by_site(
    options: TableOptions, sheet: Sheet, batch: pa.RecordBatch
) -> Iterator[tuple[str, Array]]:
    """The sites of a batch, each with the indices of its rows."""
    if not options.site:
        yield sheet.site or site_name(sheet.path.stem), np.arange(len(batch))
        return
    coded = batch.column(options.site).dictionary_encode()
    places = coded.indices.to_numpy(zero_copy_only=False)
    for number, name in enumerate(coded.dictionary.to_pylist()):
        yield str(name), np.flatnonzero(places == number)


def _refuse_gaps(sheet: Sheet, batch: pa.RecordBatch, special: Sequence[str], before: int) -> None:
    """Refuse a row without label, site or stage; the error gives its line."""
    for name in special:
        column = batch.column(name)
        if column.null_count:
            place = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            where, remedy = line_of(sheet, before + place), "give it one, or remove the row"
            raise unusable(f"no value in the column '{name}'", where, remedy)


def _refuse_weights(sheet: Sheet, batch: pa.RecordBatch, name: str, rows: Array) -> None:
    """Refuse a weight that is not a number above 0; the error gives its line."""
    if name not in batch.schema.names:
        return
    values = as_numbers(batch.column(name), sheet.comma)
    good = pc.fill_null(pc.and_(pc.greater(values, 0.0), pc.less(values, LARGEST)), False)
    wrong = ~good.to_numpy(zero_copy_only=False)
    if wrong.any():
        place = int(np.argmax(wrong))
        text = batch.column(name)[place].as_py()
        what = f"'{(text or '')[:40]}' in the column '{name}' is no weight"
        remedy = "write a number above 0, or remove the row"
        raise unusable(what, line_of(sheet, int(rows[place])), remedy)


def _add_rows(
    contents: Contents, sheet: Sheet, site: str, batch: pa.RecordBatch, rows: Array
) -> None:
    options = contents.options
    if sheet not in contents.files.setdefault(site, []):
        contents.files[site].append(sheet)
    labels = plain_labels(batch.column(options.label))
    contents.classes.setdefault(site, Counter()).update(labels.to_pylist())
    stages = [sheet.stage] * len(rows)
    if options.stage:
        stages = plain_labels(batch.column(options.stage)).to_pylist()
    contents.stages.setdefault(site, Counter()).update(stages)
    if {*stages} != {""}:
        _add_arrivals(contents, batch, labels, pa.array(stages, pa.string()))
    if contents.repeats is not None:
        left_out = {*options.ignore, options.rules(site).id}
        every = [sheet.columns for sheet in contents.sheets]
        shared = set.intersection(*map(set, every)) - left_out
        names = [name for name in batch.schema.names if name not in left_out]
        contents.repeats.add(site, batch.select(names), sorted(shared))
    profiles = contents.profiles.setdefault(site, {})
    rules = options.rules(site)
    special = {*options.special.values(), rules.id, rules.group, rules.weights}
    left_out = {*special, *options.ignore}
    for name in sheet.columns:
        if name not in left_out:
            column = batch.column(name)
            measured = name in rules.units or name in rules.dates
            typed = name in sheet.text_columns and not measured
            profile = profiles.setdefault(name, Profile(codes=typed))
            digits = pc.all(pc.match_substring_regex(column, "^[0-9]+$"), min_count=0)
            profile.codes = profile.codes and bool(digits.as_py())
            profile.add(column, labels, rows, sheet)


def _add_arrivals(
    contents: Contents, batch: pa.RecordBatch, labels: pa.Array, stages: pa.Array
) -> None:
    """Record which classes and columns arrive at each stage."""
    for stage in stages.unique().to_pylist():
        mask = pc.equal(stages, stage)
        arrival = contents.arrivals.setdefault(stage, Arrival())
        arrival.classes.update(labels.filter(mask).to_pylist())
        rows = batch.filter(mask)
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            if column.null_count < len(column):
                arrival.columns.add(name)
