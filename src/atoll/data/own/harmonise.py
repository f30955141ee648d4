"""Harmonising: rules that map the files of several sites to the same names, words and units.

Rules apply to every file when it is read, before anything is counted. A run stores them in its
recipe, so that predictions apply the same rules.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from atoll.core.errors import UserError
from atoll.data.own.encoding import as_dates, as_numbers

__all__ = [
    "DAY_FIRST", "FORMATS", "MONTH_FIRST", "DateRule", "Rules", "Unit", "fitting_forms",
    "harmonise", "merge", "parse_dates", "plain_labels", "refuse_bad_rules",
]  # fmt: skip

DAY_FIRST: Final = "day first"
MONTH_FIRST: Final = "month first"
FORMATS: Final = {  # what the two words stand for
    DAY_FIRST: ("%d.%m.%Y", "%d/%m/%Y", "%d-%m-%Y", "%d.%m.%y", "%d/%m/%y", "%d-%m-%y"),
    MONTH_FIRST: ("%m/%d/%Y", "%m-%d-%Y", "%m.%d.%Y", "%m/%d/%y", "%m-%d-%y", "%m.%d.%y"),
}
TIMES: Final = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")  # after a date
DATE_FORMS: Final = (
    DAY_FIRST, MONTH_FIRST, "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d", "%Y-%m-%dT%H:%M:%S%z",
    "%Y-%m-%d %H:%M:%S%z", "%d-%b-%Y", "%d-%b-%y", "%d%b%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y",
    "%B %d, %Y",
)  # fmt: skip
A_FEW: Final = 100  # minimum number of dates that must fit a format to read all with it
MARK: Final = b"atoll.harmonised"  # metadata of rows after applying rules: units apply only once


@dataclass(frozen=True)
class Unit:
    """A column in another unit: value * factor + offset."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic

    factor: float = 1.0  # multiplies a value
    offset: float = 0.0  # added after that
    suffix: str = ""  # removed from the text first, e.g. "%"


@dataclass(frozen=True)
class DateRule:
    """How the dates of a column are written, and from when days are counted."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic

    format: str = ""  # "day first", "month first" or as of strptime; empty: as 2024-03-31
    since: str = ""  # a date as 2024-03-31, or a column of dates; empty: 1970-01-01


@dataclass(frozen=True)
class Rules:
    """The rules of one site; those of all sites are the defaults."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic

    rename: dict[str, str] = field(default_factory=dict)  # a column's name here -> everywhere
    labels: dict[str, str] = field(default_factory=dict)  # a label as written -> its class
    # column -> a value as written -> what it means
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)  # column -> factor, offset, suffix
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)  # column -> codes
    dates: dict[str, DateRule] = field(default_factory=dict)  # column -> format, since
    id: str = ""  # the column that names a row; carried to predictions, no input
    group: str = ""  # the column whose rows belong together, e.g. the patient; no input
    weights: str = ""  # the column that says how much a row counts in training; no input

    @property
    def empty(self) -> bool:
        """Whether no value changes."""
        return not (self.labels or self.values or self.units or self.missing or self.dates)


def merge(general: Rules, own: Rules | None) -> Rules:
    """The rules of a site: its own entries override those for all sites; columns by new name."""
    if own is None:
        own = Rules()
    rename = {**general.rename, **own.rename}
    tables = dict[str, Any]()
    for name in ("values", "units", "missing", "dates"):
        tables[name] = {}
        for entries in (getattr(general, name), getattr(own, name)):  # a site's own rules come last
            tables[name] |= {rename.get(column, column): entry for column, entry in entries.items()}
    labels = {**general.labels, **own.labels}
    for name in ("id", "group", "weights"):
        column = getattr(own, name) or getattr(general, name)
        tables[name] = rename.get(column, column)
    return Rules(rename=rename, labels=labels, **tables)


def refuse_bad_rules(rules: Rules) -> None:
    """Refuse contradictory entries, and a reference that is not a date."""
    for option, entries in (("rename", rules.rename), ("labels", rules.labels)):
        for name, target in entries.items():
            if entries.get(target, target) != target:
                what = f"{option} turns '{name}' into '{target}', and '{target}' into another"
                raise UserError(what, "[data]", f"write '{name}' = '{entries[target]}'")
    for name, rule in rules.dates.items():
        if rule.format and rule.format not in FORMATS and "%" not in rule.format:
            what = f"dates of '{name}': '{rule.format}' is no format"
            raise UserError(what, "[data]", 'write "day first", "month first", or as "%d.%m.%Y"')
        if rule.since[:1].isdigit() and not as_dates(pa.array([rule.since]))[0].is_valid:
            what = f"dates of '{name}': '{rule.since}' is no date"
            raise UserError(what, "[data]", "write it as 2024-03-31, or name a column of dates")


def harmonise(
    batch: pa.RecordBatch, rules: Rules, label: str, comma: bool = False
) -> pa.RecordBatch:
    """Apply a site's rules to its rows; applying them again changes nothing."""
    mark = json.dumps(asdict(rules), sort_keys=True).encode()
    metadata = batch.schema.metadata or {}
    if rules.empty or metadata.get(MARK) == mark:
        return batch
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name in rules.missing.keys() & columns.keys():
        columns[name] = _without(columns[name], rules.missing[name], comma)
    for name in rules.values.keys() & columns.keys():
        columns[name] = _mapped(plain_labels(columns[name]), rules.values[name])
    for name in rules.units.keys() & columns.keys():
        columns[name] = _converted(columns[name], rules.units[name], comma)
    written = dict(columns)  # a date may count from a column that is itself converted
    for name in rules.dates.keys() & columns.keys():
        columns[name] = _dated(written[name], rules.dates[name], rules.dates, written)
    if label in columns:
        columns[label] = _mapped(plain_labels(columns[label]), rules.labels)
    schema = batch.schema.with_metadata({**metadata, MARK: mark})
    return pa.RecordBatch.from_arrays([*columns.values()], schema=schema)


def plain_labels(text: pa.Array) -> pa.Array:
    """Labels as text; 1.0 is the label 1."""
    return pc.replace_substring_regex(text, r"^(-?[0-9]+)\.0+$", r"\1")


def _mapped(text: pa.Array, names: Mapping[str, str]) -> pa.Array:
    """Replace values by their meaning."""
    if not names:
        return text
    places = pc.index_in(text, pa.array([*names], pa.string()))
    return pc.coalesce(pa.array([*names.values()], pa.string()).take(places), text)


def _without(text: pa.Array, codes: Iterable[str], comma: bool) -> pa.Array:
    """Text without the codes of missing values; 999 also matches 999.0."""
    words = pa.array(list(codes), pa.string())
    numbers = as_numbers(words, comma).drop_null()
    values = as_numbers(text, comma)
    is_code = pc.or_(pc.is_in(text, words), pc.and_(values.is_valid(), pc.is_in(values, numbers)))
    return pc.if_else(is_code, pa.scalar(None, pa.string()), text)


def _converted(text: pa.Array, unit: Unit, comma: bool) -> pa.Array:
    """Numbers in another unit; other text stays, and is reported by its line."""
    bare = text
    if unit.suffix:
        ends = pc.ends_with(text, unit.suffix)
        cut = pc.utf8_slice_codeunits(text, 0, -len(unit.suffix))
        bare = pc.if_else(ends, pc.utf8_trim_whitespace(cut), text)
    values = as_numbers(bare, comma)
    converted = pc.add(pc.multiply(values, unit.factor), unit.offset)
    return pc.coalesce(converted.cast(pa.string()), text)


def parse_dates(text: pa.Array, format: str) -> pa.Array:
    """Parse dates as 2024-03-31 or 2024-03-31T12:30:00; null for text in another format."""
    coded = text.dictionary_encode()
    values = coded.dictionary.to_pylist()
    parsed: list[str | None] = [None] * len(values)
    rest = list(range(len(values)))
    for form in FORMATS.get(format, (format,)):
        clocks = ("",) if re.search("%[HIcX]", form) else TIMES
        for clock in clocks:  # one format after another: strptime caches few formats
            for place in rest:
                parsed[place] = _parsed(values[place], form + clock)
            rest = [place for place in rest if parsed[place] is None]
    return pa.array(parsed, pa.string()).take(coded.indices)


def fitting_forms(dates: Sequence[str]) -> list[str]:
    """The common formats that all dates fit."""
    return [form for form in DATE_FORMS if _fits(dates[:A_FEW], form) and _fits(dates, form)]


def _fits(dates: Sequence[str], form: str) -> bool:
    return not parse_dates(pa.array(dates, pa.string()), form).null_count


def _parsed(value: str, form: str) -> str | None:
    try:
        moment = datetime.strptime(value, form)
    except ValueError:
        return None
    local = moment.replace(tzinfo=None)  # the local time there
    return local.isoformat() if re.search("%[HIcX]", form) else local.date().isoformat()


def _dated(
    text: pa.Array,
    rule: DateRule,
    rules: Mapping[str, DateRule],
    columns: Mapping[str, pa.Array],
) -> pa.Array:
    """Dates in the standard format, or days since a reference; other text stays."""
    dates = _usual(text, rule.format)
    if not rule.since:
        return dates
    if rule.since in columns:
        other = rules.get(rule.since, DateRule())
        start = as_dates(_usual(columns[rule.since], other.format))
    else:
        start = pa.array([as_dates(pa.array([rule.since]))[0].as_py()] * len(text), pa.float64())
    days = pc.subtract(as_dates(dates), start)
    unknown = pc.and_(as_dates(dates).is_valid(), start.is_null())  # no reference: no number
    values = pc.if_else(unknown, pa.scalar(None, pa.string()), text)
    return pc.coalesce(days.cast(pa.string()), values)


def _usual(text: pa.Array, format: str) -> pa.Array:
    return pc.coalesce(parse_dates(text, format), text) if format else text
