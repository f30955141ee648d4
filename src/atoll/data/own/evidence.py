"""Detects properties of a column from its values: missing codes, ids, people, dates, units."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from atoll.data.own.encoding import as_dates, as_numbers
from atoll.data.own.harmonise import DAY_FIRST, MONTH_FIRST, fitting_forms
from atoll.data.own.profiles import Profile

__all__ = [
    "ODD_DATE", "conversion", "date_formats", "is_code", "is_identifier", "is_person", "median",
    "missing_codes", "numbers", "stage_order", "stray_words", "unit_suffix",
]  # fmt: skip

Array = np.ndarray[Any, Any]
ENOUGH: Final = 20  # minimum number of values for any suspicion
CODES: Final = (
    0.0, -1.0, -7.0, -8.0, -9.0, -77.0, -88.0, -99.0, -777.0, -888.0, -999.0, -9999.0,
    9.0, 77.0, 88.0, 99.0, 777.0, 888.0, 999.0, 7777.0, 8888.0, 9999.0, 99999.0,
)  # fmt: skip
MOSTLY: Final = 0.7  # share of numbers from which words without a digit mark missing values
MOST_MISSING: Final = 0.6  # maximum share of rows of a code for missing values
MONTH: Final = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
ODD_DATE: Final = re.compile(
    rf"^(\d{{1,4}}[./-]\d{{1,2}}[./-]\d{{1,4}}|\d{{1,2}}[ .-]?{MONTH}[ .-]?\d{{2,4}}"
    rf"|{MONTH} \d{{1,2}}, \d{{4}}|(19|20)\d{{2}}[01]\d[0-3]\d)([ T].*)?$",
    re.I,
)
EARLIEST: Final = 19_000_101  # range of dates written as 20240331
LATEST: Final = 20_991_231
NAMED_ID: Final = re.compile(r"(^|[ _.-])(id|nr|nbr|no|number|index|key|uuid|unnamed.*)$", re.I)
NAMED_PERSON: Final = re.compile(
    r"(^|[ _.-])(patients?|persons?|subjects?|clients?|customers?|members?|users?|participants?"
    r"|mrn|case|pid|pat|ssn|nhs)([ _.-]|$)", re.I
)  # fmt: skip
SUFFIX: Final = re.compile(r"^[-+]?[0-9]+(?:[.,][0-9]+)? *([^0-9\s.,][^0-9]*)$")
CONVERSIONS: Final = {  # factors between common units, and the units they convert
    38.67: "cholesterol, mmol/l to mg/dl", 18.016: "glucose, mmol/l to mg/dl",
    88.4: "creatinine, mg/dl to µmol/l", 113.12: "creatinine, g/l to µmol/l",
    10.0: "", 100.0: "", 1000.0: "", 1e6: "",
}  # fmt: skip
CLOSE: Final = 0.15  # relative tolerance of a ratio around a factor
MONTHS: Final = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def numbers(profile: Profile, comma: bool, suffix: str = "") -> tuple[Array, Array]:
    """The sorted distinct numbers of a column without a suffix, with their row counts."""
    text = [*profile.counts]
    if suffix:
        text = [value.removesuffix(suffix).rstrip() for value in text]
    values = as_numbers(pa.array(text, pa.string()), comma)
    floats = values.to_numpy(zero_copy_only=False)
    counts = np.fromiter(profile.counts.values(), np.int64, len(profile.counts))
    valid = ~np.isnan(floats)
    distinct, places = np.unique(floats[valid], return_inverse=True)
    return distinct, np.bincount(places, counts[valid], len(distinct)).astype(np.int64)


def _quantile(values: Array, counts: Array, share: float) -> float:
    """The smallest value that at least this share of the rows does not exceed."""
    total = np.cumsum(counts)
    return float(values[np.searchsorted(total, share * total[-1])])


def median(values: Array, counts: Array) -> float:
    """The median of values with row counts."""
    return _quantile(values, counts, 0.5)


def missing_codes(values: Array, counts: Array) -> list[str]:
    """Codes at either end that are further from all other values than the spread of these."""
    codes, total = list[str](), int(counts.sum())
    if total < ENOUGH:
        return []
    while len(values) > 2:
        for end, rest in ((0, slice(1, None)), (len(values) - 1, slice(0, -1))):
            others, rows = values[rest], counts[rest]
            gap = abs(values[end] - others[0 if end == 0 else -1])
            spread = _quantile(others, rows, 0.75) - _quantile(others, rows, 0.25)
            if len(others) < 5:
                spread = 2 * (others[-1] - others[0])
                spread = np.inf if values[end] == 0 else spread
            often = 2 <= counts[end] <= MOST_MISSING * total
            below_zero = values[end] <= -9 and others[0] >= 0
            if values[end] in CODES and often and (gap > spread or below_zero):
                codes.append(f"{values[end]:g}")
                values, counts = others, rows
                break
        else:
            break
    return codes


def is_code(values: Array) -> bool:
    """Whether whole numbers are so few that they may be codes."""
    whole = bool((values == np.round(values)).all())
    return whole and 3 <= len(values) <= 10 and values[0] >= 0 and values[-1] < 100


def _looks_like_a_key(profile: Profile, name: str) -> bool:
    """Whether values look like keys: words with digits, or numbers of equal length."""
    first = next(iter(profile.counts))
    if profile.numbers == profile.present:
        lengths = {len(value) for value in profile.counts}
        fixed = len(lengths) == 1 and max(lengths) >= 4
        return profile.whole and (fixed or bool(NAMED_ID.search(name) or NAMED_PERSON.search(name)))
    written = len(first) <= 40 and " " not in first and any(sign.isdigit() for sign in first)
    return written and 2 * profile.numbers < profile.present


def is_identifier(profile: Profile, name: str) -> bool:
    """Whether a column identifies rows: unique values that look like keys or count rows."""
    if profile.present < ENOUGH or profile.distinct < profile.present or profile.dates:
        return False
    counting = (
        profile.ordered and profile.whole and profile.high - profile.low == profile.present - 1
    )
    key = _looks_like_a_key(profile, name) and not date_formats(profile)
    return key or (counting and profile.numbers == profile.present)


def is_person(profile: Profile, name: str) -> bool:
    """Whether a column groups rows: keys that repeat, in blocks or by their name."""
    present, distinct = profile.present, profile.distinct
    if not max(10, present / 10) <= distinct < present or present < ENOUGH or profile.dates:
        return False
    blocks = profile.adjacent >= (present - distinct) / 2
    by_name = blocks or bool(NAMED_PERSON.search(name))
    return by_name and _looks_like_a_key(profile, name) and not date_formats(profile)


def date_formats(profile: Profile) -> list[str] | None:
    """The format of all dates of a column, two if day and month are ambiguous; None without dates.

    Digits alone, such as 20240331, are dates only if all values are. Dates as 2024-03-31 may occur
    together with dates in another format.
    """
    digits = profile.numbers == profile.present
    if digits and not (profile.whole and profile.low >= EARLIEST and profile.high <= LATEST):
        return None
    dates = [value for value in profile.counts if ODD_DATE.match(value)]
    if not dates or sum(profile.counts[value] for value in dates) < 0.9 * profile.present:
        return None
    usual = as_dates(pa.array(dates, pa.string())).is_valid().to_pylist()
    odd = [date for date, plain in zip(dates, usual, strict=True) if not plain]
    fits = fitting_forms(odd) if odd else []
    if digits and (not fits or len(dates) < profile.distinct):
        return None
    if fits == [DAY_FIRST, MONTH_FIRST] and not all("." in date for date in odd):
        return fits
    return fits[:1]  # the short and the long name of May are equal


def stray_words(profile: Profile, comma: bool) -> list[str]:
    """Up to three words among numbers that mark missing values; else empty."""
    if not MOSTLY * profile.present <= profile.numbers < profile.present or profile.present < 10:
        return []
    texts = [*profile.counts]
    values = as_numbers(pa.array(texts, pa.string()), comma).to_pylist()
    words = [text for text, value in zip(texts, values, strict=True) if value is None]
    if len(words) > 3 or any(SUFFIX.match(word) for word in words):
        return []
    stray = profile.numbers >= 0.9 * profile.present
    levels = len(texts) - len(words) < 10 or any(re.search("[0-9]", word) for word in words)
    return words if stray or not levels else []


def unit_suffix(profile: Profile) -> str:
    """The single suffix of numbers such as 45% or 12 mg; empty if there is none, or several."""
    if profile.present < ENOUGH or profile.numbers == profile.present:
        return ""
    suffixes = dict[str, int]()
    for value, count in profile.counts.items():
        match = SUFFIX.match(value)
        if match:
            suffixes[match[1]] = suffixes.get(match[1], 0) + count
    enough = sum(suffixes.values()) + profile.numbers >= 0.9 * profile.present
    return next(iter(suffixes)) if len(suffixes) == 1 and enough else ""


def conversion(ratio: float) -> tuple[float, str]:
    """The factor that a ratio of medians probably is, and the units it converts."""
    size = max(ratio, 1 / ratio)
    factor = min(CONVERSIONS, key=lambda candidate: abs(size / candidate - 1))
    words = CONVERSIONS[factor]
    if abs(size / factor - 1) >= CLOSE:
        return float(f"{ratio:.3g}"), ""
    if ratio > 1:
        return factor, words
    return float(f"{1 / factor:.6g}"), " to ".join(reversed(words.split(" to ")))


def stage_order(stages: Collection[str], current: Sequence[str]) -> list[str]:
    """The order of stages by the calendar or by number; empty if it is the current one."""
    lower = {stage.casefold(): stage for stage in stages}
    for names in (MONTHS, DAYS):
        short = {name[:3]: place for place, name in enumerate(names)}
        if all(stage in names or stage in short for stage in lower):
            order = [lower[stage] for stage in sorted(lower, key=lambda stage: short[stage[:3]])]
            return order if order != list(current) else []
    parts = {stage: re.fullmatch(r"(\D+)(\d+)", stage) for stage in stages}
    matches = [match for match in parts.values() if match]
    if len(matches) < len(parts) or len({match[1] for match in matches}) > 1:
        return []
    order = sorted(stages, key=lambda stage: int(re.sub(r"\D", "", stage)))
    return order if order != list(current) else []
