"""The user's own tables: what each site's file holds, what is common, and what is done about it.

Two passes over every file, in pieces. The first looks (`survey`), the second writes numbers
(`load`); so memory holds the numbers that are trained on and little else.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne, build, nearest
from atoll.data.dataset import Dataset, Layout, file_fingerprint
from atoll.data.own.encoding import LARGEST, Block, as_dates, as_numbers, encoded, offset
from atoll.data.own.leaks import gives_label_away
from atoll.data.own.sheets import Sheet, batches, line_of, opened

__all__ = [
    "MISSING",
    "Column",
    "ColumnPlan",
    "Finding",
    "Look",
    "Made",
    "Profile",
    "SiteSurvey",
    "Survey",
    "TableOptions",
    "first_pass",
    "identifies",
    "load",
    "named",
    "natural",
    "needed",
    "offset_of",
    "plain_labels",
    "recipe",
    "scaled",
    "second_pass",
    "survey",
    "widths",
]

Array = np.ndarray[Any, Any]
MISSING = ("NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "?", "#N/A")
CAP = 50_000  # values of a column that are told apart
SAMPLE = 2_000  # rows of a site in which leaks of the label are looked for
ENOUGH = 20  # values below which nothing is suspected
STRAY = 0.9  # share of numbers from which a word among them is a mistake
UNITS = 1_000.0  # times one site's values are another's, from which units are suspected
MOST_CLASSES = 1_000
IDENTIFIER = re.compile(r"(^|[ _-])(id|nr|no|number|index|key|uuid|unnamed.*)$", re.IGNORECASE)
ODD_NUMBERS = (  # what is no number, and what it is called
    (re.compile(r"^[<>=~≤≥]+ *[-+]?[0-9.,]+$"), "a number after a sign as <"),
    (re.compile(r"^[-+]?[0-9]{1,3}([,' ][0-9]{3})+(\.[0-9]*)?$"), "a number in groups of digits"),
    (re.compile(r"^[-+]?[0-9]+,[0-9]+$"), "a decimal comma"),
    (re.compile(r"^[-+]?[0-9.,]+ *[^0-9., ]+$"), "a number with a unit"),
)
CODE = re.compile(r"^0[0-9]+$")
ODD_DATE = re.compile(r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}( .*)?$")


@dataclass(frozen=True)
class TableOptions:
    """What may stand in `data` beside `files`."""

    # one for each site, or one with a site column, CSV or Parquet; or by site a list, one a stage
    files: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    label: str = ""  # the column to be predicted
    site: str = ""  # the column that names a row's site, in one file for all
    stage: str = ""  # the column that names a row's stage, for data that come over time
    ignore: tuple[str, ...] = ()  # columns to leave out
    keep: tuple[str, ...] = ()  # columns to keep though they look like identifiers
    categorical: tuple[str, ...] = ()  # columns to read as text, e.g. codes made of digits
    levels: Literal["shared", "local"] = "shared"  # local: text columns are own, no level crosses
    most_levels: AtLeastOne = 50  # of a text column; rarer ones count as unknown
    dates: Literal["days", "refuse"] = "days"  # days since 1970-01-01, or refused by name
    missing: tuple[str, ...] = MISSING  # words that mean that a value is missing; "" always does
    delimiter: str = ""  # of CSV files; empty: found out
    encoding: str = ""  # of CSV files; empty: found out


@dataclass(frozen=True)
class Finding:
    """Something worth knowing before anything trains, and what is done about it."""

    what: str
    done: str


@dataclass(frozen=True)
class SiteSurvey:
    """What one site has."""

    name: str
    file: str
    rows: int
    classes: dict[str, int]  # rows of each class
    stages: dict[str, int]  # rows of each stage


@dataclass(frozen=True)
class Column:
    """A column, who has it, and what becomes of it."""

    name: str
    kind: str  # number, date, text; or several where sites differ
    where: str  # common, own, left out
    sites: tuple[str, ...]
    missing: dict[str, int]  # rows without a value, by site
    done: str


@dataclass(frozen=True)
class Survey:
    """All that `atoll inspect` shows, and the recipe that `load` follows."""

    options: TableOptions
    sheets: tuple[Sheet, ...]
    sites: tuple[SiteSurvey, ...]
    classes: tuple[str, ...]
    stages: tuple[str, ...]
    columns: tuple[Column, ...]
    findings: tuple[Finding, ...]
    crossing: tuple[str, ...]  # what sites tell each other before training, in sentences
    blocks: tuple[Block, ...]


@dataclass
class Profile:
    """What is known of one column at one site."""

    rows: int = 0
    present: int = 0
    numbers: int = 0
    dates: int = 0
    whole: bool = True
    ordered: bool = True
    last: float = -math.inf
    low: float = math.inf
    high: float = -math.inf
    first: float = math.inf  # of the dates, in days
    final: float = -math.inf
    size: float = 0.0  # sum of absolute values
    counts: Counter[str] = field(default_factory=Counter)
    word: tuple[Sheet, int, str] | None = None  # the first that is no number: file, row, text
    huge: tuple[Sheet, int, str] | None = None
    sample: list[tuple[str, str]] = field(default_factory=list)  # value, label

    def add(self, text: pa.Array, labels: pa.Array, rows: Array, sheet: Sheet) -> None:
        """Take in some values; `rows` are their places in the file."""
        self.rows += len(text)
        there = text.is_valid().to_numpy(zero_copy_only=False)
        self.present += int(there.sum())
        values = as_numbers(text, sheet.comma)
        found = values.is_valid().to_numpy(zero_copy_only=False)
        self._count(text, values, there & ~found)
        self._odd(text, values, there & ~found, (sheet, rows))
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        self.numbers += len(numbers)
        if len(numbers) < int(there.sum()):  # dates are no numbers, and slow to look for
            days = as_dates(text).drop_null().to_numpy(zero_copy_only=False)
            self.dates += len(days)
            self.first = float(days.min(initial=self.first))
            self.final = float(days.max(initial=self.final))
        if len(numbers):
            self._measure(numbers)
        if len(self.sample) < SAMPLE:
            pairs = zip(text[:SAMPLE].to_pylist(), labels[:SAMPLE].to_pylist(), strict=True)
            self.sample += [(v, y) for v, y in pairs if v is not None and y is not None]

    def _odd(
        self, text: pa.Array, values: pa.Array, words: Array, where: tuple[Sheet, Array]
    ) -> None:
        """Remember the first value that is no number, and the first that is too large."""
        sheet, rows = where
        large = np.abs(pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)) > LARGEST
        if self.word is None and words.any():
            place = int(np.argmax(words))
            self.word = (sheet, int(rows[place]), str(text[place].as_py()))
        if self.huge is None and large.any():
            place = int(np.argmax(large))
            self.huge = (sheet, int(rows[place]), str(text[place].as_py()))

    def _count(self, text: pa.Array, values: pa.Array, words: Array) -> None:
        if len(self.counts) < CAP:
            for item in text.drop_null().value_counts().to_pylist():
                self.counts[item["values"]] += item["counts"]

    def _measure(self, numbers: Array) -> None:
        self.whole = self.whole and bool((numbers == np.round(numbers)).all())
        steps = np.diff(np.concatenate([[self.last], numbers])) if self.numbers else numbers
        self.ordered = self.ordered and bool((steps > 0).all())
        self.last = float(numbers[-1])
        self.low, self.high = min(self.low, numbers.min()), max(self.high, numbers.max())
        self.size += float(np.abs(numbers).sum())

    def kind(self, categorical: bool) -> Literal["number", "date", "text", ""]:
        """What the column is here; empty where it has no value."""
        if not self.present:
            return ""
        if categorical:
            return "text"
        if self.numbers == self.present:
            return "number"
        return "date" if self.dates == self.present else "text"

    @property
    def distinct(self) -> int:
        """How many different values there are, up to a cap."""
        return len(self.counts)


Profiles = dict[str, dict[str, Profile]]  # site -> column -> profile


RESERVED = {"server": (Path(), "")}  # the name of the part that is no site


@dataclass
class Look:
    """The first pass: what all files hold."""

    options: TableOptions
    sheets: tuple[Sheet, ...]
    profiles: Profiles = field(default_factory=dict)
    files: dict[str, list[Sheet]] = field(default_factory=dict)
    called: dict[str, tuple[Path, str]] = field(default_factory=lambda: dict(RESERVED))
    classes: dict[str, Counter[str]] = field(default_factory=dict)
    stages: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def special(self) -> tuple[str, ...]:
        """Columns that are no features."""
        return tuple(n for n in (self.options.label, self.options.site, self.options.stage) if n)


def _wrong(what: str, where: str, remedy: str) -> UserError:
    return UserError(what, where, remedy, EXIT_DATA_MISSING)


def survey(**given: Any) -> Survey:
    """Look at the files; every mistake in them is found here."""
    options = build(TableOptions, given, "[data]")
    if not options.files or not options.label:
        lacking = "files" if not options.files else "label"
        remedy = 'write for example data = { files = ["a.csv", "b.csv"], label = "outcome" }'
        raise UserError(f"no {lacking}", "[data]", remedy)
    if options.label == options.site:
        what = f"'{options.label}' is the label and the site"
        raise UserError(what, "[data]", "choose another column for one of the two")
    if options.site and (len(options.files) > 1 or isinstance(options.files, dict)):
        raise UserError("a site column and several files", "[data]", "give one of the two")
    sheets = tuple(_sheets(options))
    _once(sheets)
    named({name for sheet in sheets for name in sheet.columns}, options, "site")
    look = Look(options, sheets)
    for sheet in sheets:
        needed(sheet, options)
        first_pass(look, sheet)
    return _surveyed(look)


def _sheets(options: TableOptions) -> Iterator[Sheet]:
    """The files, each with its site and stage where they were said."""
    if not isinstance(options.files, dict):
        for file in options.files:
            yield opened(Path(file), options.delimiter, options.encoding)
        return
    counts = {name: len(files) for name, files in options.files.items()}
    few, many = min(counts, key=lambda n: counts[n]), max(counts, key=lambda n: counts[n])
    if counts[few] != counts[many] or not counts[few]:
        what = f"site '{few}' has {counts[few]} files and '{many}' has {counts[many]}"
        raise UserError(what, "[data]", "give each site one file for each stage")
    if options.stage and counts[few] > 1:
        raise UserError("a stage column and a file a stage", "[data]", "give one of the two")
    for name, files in options.files.items():
        for number, file in enumerate(files, 1):
            sheet = opened(Path(file), options.delimiter, options.encoding)
            yield replace(sheet, site=name, stage=str(number) if len(files) > 1 else "")


def _once(sheets: Sequence[Sheet]) -> None:
    """Refuse a file that is given twice: the same rows would be learned from and tested on."""
    seen = set()
    for sheet in sheets:
        path = sheet.path.resolve()
        if path in seen:
            what = "the same file is given twice"
            if not sheet.site:
                what = f"two parts would be called '{site_name(sheet.path.stem)}'"
            raise _wrong(what, str(sheet.path), "give each site, and each stage, a file of its own")
        seen.add(path)


def named(known: Collection[str], options: TableOptions, who: str) -> None:
    """Refuse the name of a column that no file has, and a label that is to be left out."""
    for name in (*options.ignore, *options.keep, *options.categorical):
        if name not in known:
            raise UserError(f"no {who} has a column '{name}'", "[data]", nearest(name, known))
    if options.label in options.ignore:
        what = f"ignore names the label '{options.label}'"
        raise UserError(what, "[data]", "take it out of ignore: the label is no input")


def needed(sheet: Sheet, options: TableOptions) -> None:
    """Refuse a file that lacks the label, the site or the stage."""
    for what, name in (("label", options.label), ("site", options.site), ("stage", options.stage)):
        if name and name not in sheet.columns:
            raise _wrong(
                f"no column '{name}' for the {what}",
                str(sheet.path),
                nearest(name, sheet.columns),
            )


def site_name(text: str) -> str:
    """A name that can stand in file names and tables."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "site"


def _parted(look: Look, sheet: Sheet, batch: pa.RecordBatch) -> Iterator[tuple[str, Array]]:
    """The sites of a batch, each with the places of its rows."""
    options = look.options
    if not options.site:
        yield sheet.site or site_name(sheet.path.stem), np.arange(len(batch))
        return
    coded = batch.column(options.site).dictionary_encode()
    places = coded.indices.to_numpy(zero_copy_only=False)
    for number, name in enumerate(coded.dictionary.to_pylist()):
        yield str(name), np.flatnonzero(places == number)


def first_pass(look: Look, sheet: Sheet) -> None:
    total = 0
    for batch in batches(sheet, look.options.missing):
        _filled(sheet, batch, look.special, total)
        for raw, places in _parted(look, sheet, batch):
            name = site_name(raw)
            home = (Path() if sheet.site else sheet.path, raw)
            if look.called.setdefault(name, home) != home:
                remedy = "rename one of the files or sites"
                raise _wrong(f"two parts would be called '{name}'", str(sheet.path), remedy)
            _take(look, sheet, name, batch.take(pa.array(places)), places + total)
        total += len(batch)
    if not total:
        raise _wrong("a header and no rows", str(sheet.path), "give a file with rows")


def _filled(sheet: Sheet, batch: pa.RecordBatch, special: Sequence[str], before: int) -> None:
    """Refuse a row without label, site or stage, by its line."""
    for name in special:
        column = batch.column(name)
        if column.null_count:
            place = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise _wrong(
                f"no value in the column '{name}'",
                line_of(sheet, before + place),
                "give it one, or remove the row",
            )


def _take(look: Look, sheet: Sheet, site: str, batch: pa.RecordBatch, rows: Array) -> None:
    options = look.options
    if sheet not in look.files.setdefault(site, []):
        look.files[site].append(sheet)
    labels = plain_labels(batch.column(options.label))
    look.classes.setdefault(site, Counter()).update(labels.to_pylist())
    stages = [sheet.stage] * len(rows)
    if options.stage:
        stages = plain_labels(batch.column(options.stage)).to_pylist()
    look.stages.setdefault(site, Counter()).update(stages)
    profiles = look.profiles.setdefault(site, {})
    for name in sheet.columns:
        if name not in look.special and name not in options.ignore:
            column = batch.column(name)
            profiles.setdefault(name, Profile()).add(column, labels, rows, sheet)


def plain_labels(text: pa.Array) -> pa.Array:
    """Labels as text; 1.0 is the label 1."""
    return pc.replace_substring_regex(text, r"^(-?[0-9]+)\.0+$", r"\1")


def natural(label: str) -> tuple[int, float, str]:
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def _surveyed(look: Look) -> Survey:
    sites = tuple(sorted(look.profiles))
    classes = sorted(set().union(*look.classes.values()), key=natural)
    stages = sorted(set().union(*look.stages.values()), key=natural)
    _learnable(look, classes)
    planned = ColumnPlan(look, sites)
    planned.make()
    return Survey(
        look.options,
        look.sheets,
        tuple(_site(look, name) for name in sites),
        tuple(classes),
        tuple(stages) if stages != [""] else (),
        tuple(planned.columns),
        tuple(_site_findings(look, sites, classes) + planned.findings),
        tuple(planned.crossing(classes)),
        tuple(planned.blocks),
    )


def _learnable(look: Look, classes: Sequence[str]) -> None:
    label, total = look.options.label, sum(sum(c.values()) for c in look.classes.values())
    if len(classes) < 2:
        what = f"every row has the same label '{classes[0]}'"
        raise _wrong(what, f"column '{label}'", "choose another label, or more rows")
    if len(classes) > min(MOST_CLASSES, max(ENOUGH, total // 2)):
        what = f"the label has {len(classes):,} different values in {total:,} rows"
        raise _wrong(what, f"column '{label}'", "atoll predicts classes: choose or make a column")


def _site(look: Look, name: str) -> SiteSurvey:
    classes, stages = (
        dict(sorted(found[name].items(), key=lambda item: natural(item[0])))
        for found in (look.classes, look.stages)
    )
    files = ", ".join(str(sheet.path) for sheet in look.files[name])
    return SiteSurvey(name, files, sum(classes.values()), classes, stages)


def _site_findings(look: Look, sites: Sequence[str], classes: Sequence[str]) -> list[Finding]:
    found = []
    for sheet in look.sheets:
        if sheet.encoding not in ("", "utf-8") or sheet.delimiter not in ("", ","):
            shown = {"\t": "tab"}.get(sheet.delimiter, sheet.delimiter)
            comma = "; a decimal comma is read as a point" if sheet.comma else ""
            what = f"{sheet.path.name} is {sheet.encoding} with '{shown}' between columns"
            found.append(Finding(what, f"read so{comma}"))
    for name in sites:
        absent = [c for c in classes if c not in look.classes[name]]
        if absent:
            what = f"{name} has no row of class {', '.join(absent[:5])}"
            found.append(Finding(what, "its model can still predict that class"))
    found += _spellings(classes)
    rows = [sum(look.classes[name].values()) for name in sites]
    if max(rows) > 10 * min(rows):
        what = f"sites differ in size: {min(rows):,} to {max(rows):,} rows"
        found.append(Finding(what, "each counts the same unless weighting = 'rows'"))
    return found


def _spellings(classes: Sequence[str]) -> list[Finding]:
    """Classes that differ in capitals or blanks alone."""
    spelt: dict[str, list[str]] = {}
    for name in classes:
        spelt.setdefault(_bare(name), []).append(name)
    return [
        Finding(
            f"the classes {' and '.join(repr(name) for name in same)} differ in capitals or blanks "
            "alone",
            "classes of their own; if they are one, write them alike in the files",
        )
        for same in spelt.values()
        if len(same) > 1
    ]


def _bare(text: str) -> str:
    """A name without capitals and blanks."""
    return "".join(text.casefold().split())


@dataclass
class ColumnPlan:
    """What becomes of every column."""

    look: Look
    sites: tuple[str, ...]
    columns: list[Column] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # common text columns, whose levels cross
    width: int = 0

    def make(self) -> None:
        """Plan every column, in the order of the files."""
        names = dict.fromkeys(n for s in self.look.sheets for n in s.columns)
        for name in names:
            found = {
                site: self.look.profiles[site][name]
                for site in self.sites
                if name in self.look.profiles[site]
            }
            if name in self.look.options.ignore:
                self.columns.append(Column(name, "", "left out", (), {}, "left out, as you said"))
            elif found:
                self._column(name, found)
        if not any(column.where == "common" for column in self.columns):
            raise _wrong(
                "no common column",
                ", ".join(s.path.name for s in self.look.sheets),
                "give the same name and type to columns that mean the same at every site",
            )

    def _column(self, name: str, found: Mapping[str, Profile]) -> None:
        categorical = name in self.look.options.categorical
        kinds = {site: p.kind(categorical) for site, p in found.items() if p.present}
        missing = {site: p.rows - p.present for site, p in found.items() if p.rows > p.present}
        if not kinds:
            self._leave(name, "", found, "no value at any site", missing)
            return
        for site, kind in kinds.items():
            self.check(name, site, found[site], kind)
        held = {site: found[site] for site in kinds}
        if name not in self.look.options.keep and identifies(name, held, kinds):
            site = _mixed(name, held, kinds)
            why, remedy = "looks like an identifier or free text", f"write keep = ['{name}']"
            if site:
                why, remedy = (
                    _among(held[site], site),
                    "mend the file, or add such words to missing",
                )
            self._leave(name, _said(kinds), held, why, missing, remedy)
            return
        one = len(set(kinds.values())) == 1
        local = self.look.options.levels == "local" and "text" in kinds.values()
        common = len(kinds) == len(self.sites) and one and not (local and len(self.sites) > 1)
        self._suspect(name, held, kinds, common, one)
        done = self._common(name, held, kinds) if common else self._own(name, held, kinds)
        where = "common" if common else "own"
        self.columns.append(Column(name, _said(kinds), where, tuple(kinds), missing, done))

    def _leave(
        self,
        name: str,
        kind: str,
        held: Mapping[str, Any],
        why: str,
        missing: dict[str, int],
        remedy: str = "",
    ) -> None:
        done = f"left out: {why}"
        self.columns.append(Column(name, kind, "left out", tuple(held), missing, done))
        if kind:
            self.findings.append(Finding(f"'{name}' {why}", f"left out; to use it, {remedy}"))

    def check(self, name: str, site: str, profile: Profile, kind: str) -> None:
        """Refuse what is surely a mistake: words among numbers, dates of another form."""
        path = str(self.look.files[site][0].path)
        if kind == "number" and profile.huge:
            sheet, row, text = profile.huge
            what = f"'{text}' in the column '{name}' is too large a number"
            raise _wrong(what, line_of(sheet, row), "write it in another unit")
        if kind == "date" and self.look.options.dates == "refuse":
            what = f"the column '{name}' has dates"
            raise _wrong(what, path, "write ignore = [...] or dates = 'days'")
        if kind != "text" or name in self.look.options.categorical:
            return
        if profile.present >= 10 and profile.numbers >= STRAY * profile.present and profile.word:
            sheet, row, text = profile.word
            what = f"the text '{text[:40]}' in the column '{name}', which has numbers otherwise"
            remedy = f"mend it, add it to missing, or write categorical = ['{name}']"
            raise _wrong(what, line_of(sheet, row), remedy)
        odd = sum(n for value, n in profile.counts.items() if ODD_DATE.match(value))
        if odd >= STRAY * profile.present:
            what = f"the column '{name}' has dates such as '{next(iter(profile.counts))}'"
            remedy = f"write them as 2024-03-31, or ignore = ['{name}']"
            raise _wrong(what, path, remedy)

    def _common(self, name: str, held: Mapping[str, Profile], kinds: Mapping[str, Any]) -> str:
        kind = next(iter(kinds.values()))
        gaps = any(p.rows > p.present for p in held.values())
        levels = self.levels(list(held.values())) if kind == "text" else ()
        if kind == "text":
            self.shared.append(name)
        apart = offset_of(kind, list(held.values()))
        self._block(Block(name, kind, levels, gaps, self.width, offset=apart))
        return _done(kind, len(levels), gaps)

    def _own(self, name: str, held: Mapping[str, Profile], kinds: Mapping[str, Any]) -> str:
        """Own columns: a site's levels and gaps are its own business."""
        said = {}
        for site, profile in held.items():
            kind, gaps = kinds[site], profile.rows > profile.present
            levels = self.levels([profile]) if kind == "text" else ()
            apart = offset_of(kind, [profile])
            self._block(Block(name, kind, levels, gaps, self.width, site, apart))
            said[_done(kind, len(levels), gaps)] = site
        return "; ".join(said)

    def _block(self, block: Block) -> None:
        self.blocks.append(block)
        self.width += block.width

    def levels(self, profiles: Sequence[Profile]) -> tuple[str, ...]:
        counts: Counter[str] = sum((p.counts for p in profiles), Counter())
        most = sorted(counts, key=lambda level: (-counts[level], level))
        return tuple(sorted(most[: self.look.options.most_levels], key=natural))

    def _suspect(
        self,
        name: str,
        held: Mapping[str, Profile],
        kinds: Mapping[str, str],
        common: bool,
        one: bool,
    ) -> None:
        """Note conflicts between sites and columns that give the label away."""
        if not one:
            shown = ", ".join(f"{kind} at {site}" for site, kind in kinds.items())
            self.findings.append(Finding(f"'{name}' is {shown}", "an own column at each site"))
        if common and set(kinds.values()) == {"number"}:
            self._units(name, held)
        self._codes(name, held, kinds)
        if common and set(kinds.values()) == {"text"}:
            self._vocabulary(name, held)
        for site, profile in held.items():
            values, labels = zip(*profile.sample, strict=True) if profile.sample else ((), ())
            numeric = kinds[site] == "number"
            if kinds[site] != "date" and gives_label_away(values, labels, numeric):
                what = f"'{name}' at {site} tells the label almost by itself"
                done = "kept; if it is known only after the outcome, add it to ignore"
                self.findings.append(Finding(what, done))
                break

    def _codes(self, name: str, held: Mapping[str, Profile], kinds: Mapping[str, str]) -> None:
        """Note numbers such as 03012, which may be codes."""
        for site, profile in held.items():
            if kinds[site] == "number" and any(CODE.match(value) for value in profile.counts):
                what = f"'{name}' at {site} has numbers that begin with 0: codes?"
                done = f"read as numbers; for codes, write categorical = ['{name}']"
                self.findings.append(Finding(what, done))
                break

    def _units(self, name: str, held: Mapping[str, Profile]) -> None:
        sizes = {s: p.size / p.present for s, p in held.items() if p.size}
        if len(sizes) > 1:
            low, high = min(sizes, key=lambda s: sizes[s]), max(sizes, key=lambda s: sizes[s])
            if sizes[high] >= UNITS * sizes[low]:
                what = (
                    f"'{name}' is about {sizes[high] / sizes[low]:,.0f} times as large at {high} "
                    f"as at {low}: another unit?"
                )
                done = "scale = 'local' evens it out; with any other, mend the file"
                self.findings.append(Finding(what, done))

    def _vocabulary(self, name: str, held: Mapping[str, Profile]) -> None:
        every = set().union(*(p.counts for p in held.values()))
        both = set.intersection(*(set(p.counts) for p in held.values()))
        if every != both:
            alone = sorted(every - both)
            what = f"'{name}' has levels that not all sites know: {', '.join(alone[:6])}"
            spelt = {_bare(level) for level in every}
            same = "; some differ in capitals or blanks alone" if len(spelt) < len(every) else ""
            self.findings.append(Finding(what + same, "all sites have a column for every level"))
        if len(every) > self.look.options.most_levels:
            what = f"'{name}' has {len(every):,} levels"
            done = f"the {self.look.options.most_levels} most common have a column, others none"
            self.findings.append(Finding(what, done))

    def crossing(self, classes: Sequence[str]) -> list[str]:
        """What sites must tell each other before training."""
        common = [c.name for c in self.columns if c.where == "common"]
        found = [
            f"the names and types of the {len(common)} common columns, and which of them have "
            "missing values anywhere",
            f"the names of the {len(classes)} classes",
        ]
        if self.shared:
            found.append(f"the levels of the common text columns: {', '.join(self.shared)}")
        return found


def _said(kinds: Mapping[str, str]) -> str:
    return "/".join(dict.fromkeys(kinds.values()))


def _done(kind: str, levels: int, gaps: bool) -> str:
    words = {
        "number": "a number, scaled",
        "date": "days since 1970-01-01, scaled",
        "text": f"{levels} columns of 0 and 1, one for each level",
    }[kind]
    filled = "; a missing value becomes the mean of the training rows" if kind != "text" else ""
    return f"{words}{filled}, and a column says that it was missing" if gaps else words


def offset_of(kind: str, profiles: Sequence[Profile]) -> float:
    """What is taken from a column's numbers before they are rounded."""
    if kind == "text":
        return 0.0
    ends = [(p.first, p.final) if kind == "date" else (p.low, p.high) for p in profiles]
    return offset(float(min(low for low, _ in ends)), float(max(high for _, high in ends)))


def identifies(name: str, held: Mapping[str, Profile], kinds: Mapping[str, str]) -> bool:
    """Whether a column tells rows apart and little else, at any site."""
    for site, profile in held.items():
        if profile.present < ENOUGH:
            continue
        distinct, present = profile.distinct, profile.present
        if kinds[site] == "text" and (distinct > present / 2 or distinct >= CAP):
            return True
        if kinds[site] == "number" and profile.whole and distinct >= min(present, CAP):
            counts = profile.ordered and profile.high - profile.low == present - 1
            if counts or IDENTIFIER.search(name):
                return True
    return False


def _mixed(name: str, held: Mapping[str, Profile], kinds: Mapping[str, str]) -> str:
    """A site that has words among the numbers of a column which no other site finds odd."""
    numbers = {site: held[site] for site, kind in kinds.items() if kind == "number"}
    if IDENTIFIER.search(name) or (numbers and identifies(name, numbers, kinds)):
        return ""
    for site, profile in held.items():
        if kinds[site] == "text" and (numbers or 2 * profile.numbers >= profile.present):
            return site
    return ""


def _among(profile: Profile, site: str) -> str:
    """Where the first word among numbers stands, and of which kind it is."""
    assert profile.word is not None  # else it would be a column of numbers
    sheet, row, text = profile.word
    sort = next((said for form, said in ODD_NUMBERS if form.match(text)), "a word")
    place = line_of(sheet, row).removeprefix(f"{sheet.path}, ")
    return f"has numbers elsewhere and {sort} at {site} ({sheet.path.name}, {place})"


def load(name: str = "", **given: Any) -> Dataset:
    """The user's own tables as numbers; equal files give equal data."""
    return _filled_in(survey(**given), name)


def widths(found: Survey) -> tuple[int, dict[str, int]]:
    """How many columns of numbers are common, and how many each site has of its own."""
    names = [site.name for site in found.sites]
    held = np.array([[_holds(block, name, found) for block in found.blocks] for name in names])
    size, common = np.array([block.width for block in found.blocks]), held.all(0)
    own = {name: int(size[mine & ~common].sum()) for name, mine in zip(names, held, strict=True)}
    return int(size[common].sum()), own


def _filled_in(found: Survey, name: str) -> Dataset:
    """The second pass: the files as numbers."""
    rows, width = sum(site.rows for site in found.sites), sum(b.width for b in found.blocks)
    made = Made(
        np.zeros((rows, width), dtype=np.float32),
        *(np.zeros(rows, dtype=np.int64) for _ in range(3)),
    )
    names, total = [site.name for site in found.sites], 0
    pieces: dict[str, list[tuple[str, int, int]]] = {}  # site -> file, its first row, its rows
    for sheet in found.sheets:
        before = total
        for batch in batches(sheet, found.options.missing):
            second_pass(found, names, sheet, batch, made.part(total, total + len(batch)))
            total += len(batch)
        if sheet.stage:
            piece = (sheet.path.name, before, total - before)
            pieces.setdefault(site_name(sheet.site), []).append(piece)
    held = np.array([[_holds(b, s, found) for b in found.blocks] for s in names])
    widths = [block.width for block in found.blocks]
    numbers = np.concatenate([scaled(block) for block in found.blocks])
    layout = Layout(
        np.repeat(held, widths, axis=1), numbers, made.stage, found.stages, recipe(found, pieces)
    )
    columns = tuple(name for block in found.blocks for name in block.names)
    source = "own files: " + ", ".join(sheet.path.name for sheet in found.sheets)
    return Dataset(
        name or "own tables", "table", made.x, made.y, columns, found.classes, source,
        group=made.group, groups=tuple(names), layout=layout,
    )  # fmt: skip


@dataclass(frozen=True)
class Made:
    """The arrays that the second pass fills."""

    x: Array
    y: Array
    group: Array
    stage: Array

    def part(self, start: int, stop: int) -> "Made":
        """Some rows of all of them."""
        return Made(*(array[start:stop] for array in (self.x, self.y, self.group, self.stage)))


def second_pass(
    found: Survey, names: Sequence[str], sheet: Sheet, batch: pa.RecordBatch, into: Made
) -> None:
    options = found.options
    into.y[:] = _places(plain_labels(batch.column(options.label)), found.classes)
    if options.stage:
        into.stage[:] = _places(plain_labels(batch.column(options.stage)), found.stages)
    elif sheet.stage:
        into.stage[:] = found.stages.index(sheet.stage)
    if options.site:
        raw = batch.column(options.site).dictionary_encode()
        known = np.array([names.index(site_name(str(s))) for s in raw.dictionary.to_pylist()])
        into.group[:] = known[raw.indices.to_numpy(zero_copy_only=False)]
    else:
        into.group[:] = names.index(site_name(sheet.site or sheet.path.stem))
    for block in found.blocks if into.x.flags.writeable else ():
        if block.column in sheet.columns:
            mine = np.ones(len(batch), dtype=bool)
            if block.site:
                mine = into.group == names.index(block.site)
            if mine.any():
                text = batch.column(block.column).filter(pa.array(mine))
                columns = slice(block.start, block.start + block.width)
                into.x[mine, columns] = encoded(block, text, sheet.comma)


def _places(text: pa.Array, names: Sequence[str]) -> Array:
    return np.asarray(pc.index_in(text, pa.array(names, pa.string())).to_numpy())


def _holds(block: Block, site: str, found: Survey) -> bool:
    if block.site:
        return block.site == site
    return any(c.name == block.column and site in c.sites for c in found.columns)


def scaled(block: Block) -> Array:
    """Which columns of a block are numbers to be scaled; the others are 0 or 1."""
    numbers = np.zeros(block.width, dtype=bool)
    numbers[0] = block.kind != "text"
    return numbers


def recipe(found: Survey, pieces: Mapping[str, list[tuple[str, int, int]]]) -> dict[str, Any]:
    """How a file becomes numbers, as JSON: what a prediction needs."""
    return {
        "label": found.options.label,
        "classes": list(found.classes),
        "missing": list(found.options.missing),
        "delimiter": found.options.delimiter,
        "encoding": found.options.encoding,
        "fingerprints": [
            [site_name(s.site or s.path.stem), s.path.name, file_fingerprint(s.path)]
            for s in found.sheets
        ],
        **(
            {"files": {site: [list(p) for p in own] for site, own in pieces.items()}}
            if pieces
            else {}
        ),
        "blocks": [{**asdict(block), "levels": list(block.levels)} for block in found.blocks],
    }
