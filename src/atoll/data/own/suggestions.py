"""Suggestions for the options of own tables, from evidence in the files."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.core.errors import UserError
from atoll.core.options import build
from atoll.data.own import evidence
from atoll.data.own.columns import STRAY, identifies, leaks_of
from atoll.data.own.labels import task_of, task_statement
from atoll.data.own.profiles import (
    Contents,
    Profile,
    TableOptions,
    in_order,
    open_sheet,
    site_name,
)
from atoll.data.own.sheets import Sheet
from atoll.data.own.spellings import folded, same_classes
from atoll.data.own.survey import read_contents

__all__ = [
    "Suggestion", "examine", "in_toml", "key_in_toml", "near_names", "repeated_rows", "suggest",
    "suggest_for_parties", "suggest_for_texts",
]  # fmt: skip

SCALE: Final = (
    8.0  # ratio of medians from which units are suspected: 10, less the noise of few rows
)
SIMILAR: Final = 0.85  # similarity of two names from which they may be one
MOST_SPELLED: Final = 20  # values of a column at a site that are compared as spellings
MANY: Final = 100  # distinct values from which whole numbers are not called codes
FEW: Final = 50  # rows of all sites below which whole numbers are not called codes
REPEATED: Final = "a key that repeats: rows with the same key stay in one split"
Profiles = Mapping[str, Mapping[str, Profile]]  # by column and site


@dataclass(frozen=True)
class Suggestion:
    """An entry for an option of [data], and why."""

    option: str
    entry: Any  # of a table its new entries, of a list its new names, else the value
    why: str
    safe: bool  # whether `atoll init` writes it active: it changes no meaning
    site: str = ""  # where it holds for one site

    @property
    def text(self) -> str:
        """The entry as it stands in a config."""
        where = f" in [data.sites.{self.site}]" if self.site else ""
        return f"{self.option} = {in_toml(self.entry)}{where}"


def in_toml(value: Any) -> str:
    """A value as TOML writes it, in one line."""
    if isinstance(value, Mapping):
        entries = [f"{key_in_toml(key)} = {in_toml(item)}" for key, item in value.items()]
        return "{ " + ", ".join(entries) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(in_toml(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _pairs(names: Mapping[str, str]) -> str:
    """Two names of one thing each, as a reader sees them."""
    return ", ".join(f"{old} and {new}" for old, new in names.items())


def key_in_toml(name: str) -> str:
    """A key as TOML writes it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else in_toml(name)


def examine(**values: Any) -> list[Suggestion]:
    """All suggestions for files that nobody has looked at yet; an unreadable file is an error.

    A row without a label, or another mistake in the files, ends the search: what was found stays.
    """
    options = build(TableOptions, values, "[data]")
    aliases = _label_aliases(options)
    rules = {alias.site: {"rename": alias.entry} for alias in aliases}
    try:
        contents = read_contents(build(TableOptions, {**values, "sites": rules}, "[data]"))
    except UserError as error:
        exists = any(column == options.label for one in _sheets(options) for column in one.columns)
        if not exists or error.where == "[data]":
            raise
        return aliases
    suggestions = suggest(contents)
    return [*aliases, *_task(contents), *suggestions, *_leaks(contents, suggestions)]


def _leaks(contents: Contents, suggestions: Sequence[Suggestion]) -> Iterator[Suggestion]:
    """Columns that predict the label almost alone, of those that the suggestions leave as inputs.

    `atoll inspect` finds the same, and prints it as findings.
    """
    no_input = set[str]()
    by_option = {"ignore": no_input, "dates": set[str](), "categorical": set[str]()}
    for suggestion in suggestions:
        if suggestion.option in ("id", "group"):
            no_input.add(suggestion.entry)
        elif suggestion.option in by_option:
            by_option[suggestion.option] |= {*suggestion.entry}
    leaks = list[str]()
    for name, profiles in _by_column(contents).items():
        kinds = {site: p.kind(name in by_option["categorical"]) for site, p in profiles.items()}
        if name in by_option["dates"]:
            kinds = dict.fromkeys(kinds, "date")
        if name not in no_input and not identifies(name, profiles, kinds):
            leaks += [name] if leaks_of(name, profiles, kinds) else []
    if leaks:
        each = "each " if len(leaks) > 1 else ""
        why = f"{each}predicts the label almost alone: is it known before the outcome?"
        yield Suggestion("ignore", leaks, why, False)


def _task(contents: Contents) -> Iterator[Suggestion]:
    """Regression, where a label of a few numbers is read as classes."""
    task = task_of(contents)
    statement = task_statement(contents, task) if task == "classification" else None
    if statement:
        what = statement[0].removesuffix(f": {task}")
        why = f"{what}, read as classes; set this if they are quantities"
        yield Suggestion("task", "regression", why, False)


def _sheets(options: TableOptions) -> list[Sheet]:
    """The files, each with the name of its site."""
    sheets = []
    listed = options.files
    sites = listed if isinstance(listed, dict) else {site_name(Path(f).stem): (f,) for f in listed}
    for site, files in sites.items():
        sheets += [replace(open_sheet(file, options), site=site_name(site)) for file in files]
    return sheets


def _label_aliases(options: TableOptions) -> list[Suggestion]:
    """The label under another spelling, at sites that lack its column."""
    aliases = []
    for sheet in _sheets(options) if not options.site else ():
        if options.label in sheet.columns:
            continue
        for name in sheet.columns:
            if folded(name) == folded(options.label):
                why = f"this file calls the label {name}"
                aliases.append(Suggestion("rename", {name: options.label}, why, True, sheet.site))
                break
    return aliases


def suggest(contents: Contents) -> list[Suggestion]:
    """All suggestions for some files; what the options already say is not suggested again."""
    profiles = _by_column(contents)
    renames = near_names(contents, profiles)
    for old, new in renames.items():  # the others are looked for under the new names
        profiles.setdefault(new, {}).update(profiles.pop(old))
    suggestions = []
    if renames:
        why = f"names that may mean the same column: {_pairs(renames)}"
        suggestions.append(Suggestion("rename", renames, why, False))
    suggestions += _labels(contents)
    suggestions += _stages(contents)
    keys = _keys(contents, profiles)
    suggestions += keys
    handled = set[str]()
    for one in keys:
        handled |= {*one.entry} if one.option == "ignore" else {one.entry}
    rest = {name: own for name, own in profiles.items() if name not in handled}
    for finder in (_dates, _codes_of_missing, _values, _codes, _units, _unusable):
        suggestions += finder(contents, rest)
    return [_with_old_names(one, renames, contents) for one in _general(suggestions)]


def suggest_for_parties(contents: Contents) -> list[Suggestion]:
    """Suggestions where parties hold columns of the same rows: no column is compared with another.

    `contents.classes` has the party with the labels alone.
    """
    profiles = _by_column(contents)
    suggestions = [*_labels(contents), *_stages(contents)]
    for party in contents.classes if not contents.options.group else ():
        for name, profile in contents.profiles[party].items():
            if evidence.is_person(profile, name):
                suggestions.append(Suggestion("group", name, REPEATED, True))
                profiles.pop(name)
                break
    for finder in (_dates, _codes_of_missing, _codes, _suffixes, _unusable):
        suggestions += finder(contents, profiles)
    return _general(suggestions)


def suggest_for_texts(contents: Contents) -> list[Suggestion]:
    """Suggestions for labels, the order of stages, and columns that name texts or people."""
    suggestions = [*_labels(contents), *_stages(contents)]
    for one in _keys(contents, _by_column(contents)):
        having = [site for site, own in contents.profiles.items() if one.entry in own]
        if one.option == "ignore":
            continue
        if one.site or len(having) == len(contents.profiles):
            suggestions.append(one)
        else:  # a text without the column is an error
            suggestions += [replace(one, site=site) for site in having]
    return suggestions


def _with_old_names(
    suggestion: Suggestion, renames: Mapping[str, str], contents: Contents
) -> Suggestion:
    """A suggestion that also holds while columns have their old names.

    `units` and `values` are commented out as `rename` is, so that the new names are enough.
    """
    entry = suggestion.entry
    for old, new in renames.items():
        applies = not suggestion.site or old in contents.profiles[suggestion.site]
        if suggestion.option in ("ignore", "categorical") and new in entry:
            entry = [*entry, old]
        elif suggestion.option in ("missing", "dates") and new in entry and applies:
            entry = {**entry, old: entry[new]}
    return replace(suggestion, entry=entry)


def _general(suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    """The same, with one for all sites where every site with the column has the same entry."""
    entries: dict[tuple[str, str], list[Suggestion]] = {}
    for one in suggestions:
        name = next(iter(one.entry)) if one.option in ("missing", "dates") else str(id(one))
        entries.setdefault((one.option, name), []).append(one)
    result = []
    for (option, _), same in entries.items():
        equal = option in ("missing", "dates") and all(s.entry == same[0].entry for s in same)
        safe = all(one.safe for one in same)
        result += [replace(same[0], site="", safe=safe)] if equal else same
    return result


def _by_column(contents: Contents) -> dict[str, dict[str, Profile]]:
    profiles: dict[str, dict[str, Profile]] = {}
    for site in sorted(contents.profiles):
        for name, profile in contents.profiles[site].items():
            if profile.present:
                profiles.setdefault(name, {})[site] = profile
    return profiles


def _comma(contents: Contents, site: str) -> bool:
    return contents.files[site][0].comma


def near_names(contents: Contents, profiles: Profiles) -> dict[str, str]:
    """Columns whose names differ a little and that no site has both of: old -> new name."""
    renames: dict[str, str] = {}
    signs = {name: len(name) - len(folded(name)) for name in profiles}
    order = sorted(
        profiles,
        key=lambda name: (-len(profiles[name]), name != name.lower(), signs[name], name),
    )
    for name in order:
        for target in order[: order.index(name)]:
            if target in renames or profiles[name].keys() & profiles[target].keys():
                continue
            renamed = [old for old, new in renames.items() if new == target]
            if any(profiles[old].keys() & profiles[name].keys() for old in renamed):
                continue
            same = folded(name) == folded(target)
            near = _close(name, target) or _shortened(name, target)
            if same or (near and _alike(contents, profiles, name, target)):
                renames[name] = target
                break
    return renames


def _close(one: str, other: str) -> bool:
    """Whether two names differ by a letter or two, and in no digit."""
    if re.findall(r"\d+", one) != re.findall(r"\d+", other) or min(len(one), len(other)) < 4:
        return False
    return difflib.SequenceMatcher(None, folded(one), folded(other)).ratio() >= SIMILAR


def _shortened(one: str, other: str) -> bool:
    """Whether a name is the other with shorter words: adm_date and admission_date."""
    words, others = (re.split(r"[\W_]+", name.casefold()) for name in (one, other))
    if len(words) != len(others):
        return False
    pairs = [sorted(pair, key=len) for pair in zip(words, others, strict=True)]
    return all(len(short) >= 3 and long.startswith(short) for short, long in pairs)


def _alike(contents: Contents, profiles: Profiles, one: str, other: str) -> bool:
    """Whether two columns have similar values: common levels, or numbers in the same range."""
    (site, first), (other_site, second) = (
        next(iter(profiles[name].items())) for name in (one, other)
    )
    if all(profile.dates or evidence.date_formats(profile) for profile in (first, second)):
        return True
    if first.numbers < first.present or second.numbers < second.present:
        both = first.counts.keys() & second.counts.keys()
        return 2 * len(both) >= min(len(first.counts), len(second.counts))
    middles = []
    for place, profile in ((site, first), (other_site, second)):
        middles.append(evidence.median(*evidence.numbers(profile, _comma(contents, place))))
    return first.low <= middles[1] <= first.high and second.low <= middles[0] <= second.high


def _labels(contents: Contents) -> Iterator[Suggestion]:
    if contents.options.labels != "as-is" and task_of(contents) == "classification":
        yield from _spellings(contents.classes)


def _spellings(classes: Mapping[str, Mapping[str, int]]) -> Iterator[Suggestion]:
    same = same_classes(classes)
    if same:
        why = (
            f"labels that may mean the same class: {_pairs(same)}; atoll run stops until you decide"
        )
        yield Suggestion("labels", same, why, False)


def _stages(contents: Contents) -> Iterator[Suggestion]:
    if not contents.options.order:
        yield from _order(set[str]().union(*contents.stages.values()))


def _order(stages: Collection[str]) -> Iterator[Suggestion]:
    current = in_order(stages)
    order = evidence.stage_order(stages, current) if {*stages} - {""} else []
    if order:
        yield Suggestion("order", order, f"without it the order is {', '.join(current)}", True)


def _keys(contents: Contents, profiles: Profiles) -> list[Suggestion]:
    """The columns that name rows and people, by site; further ones are left out."""
    ids, groups = dict[str, list[str]](), dict[str, list[str]]()
    for name, by_site in profiles.items():
        if name in contents.options.keep:
            continue
        for site, profile in by_site.items():
            if evidence.is_identifier(profile, name):
                ids.setdefault(site, []).append(name)
            elif evidence.is_person(profile, name):
                groups.setdefault(site, []).append(name)
    suggestions, used = list[Suggestion](), set[str]()
    for option, columns, why in (
        ("id", ids, "every row has a different value: a row identifier"),
        ("group", groups, REPEATED),
    ):
        rules = {site: getattr(contents.options.rules(site), option) for site in contents.profiles}
        chosen = {site: names[0] for site, names in columns.items() if not rules[site]}
        used |= {*chosen.values()}
        suggestions += _by_site(option, chosen, why, len(contents.profiles))
    others = [name for names in (*ids.values(), *groups.values()) for name in names]
    if spare := sorted({*others} - used):
        suggestions.append(
            Suggestion("ignore", spare, "row identifiers, no information about the label", True)
        )
    return suggestions


def _by_site(option: str, chosen: Mapping[str, str], why: str, sites: int) -> list[Suggestion]:
    """One suggestion for all sites where they agree, else one for each."""
    names = {*chosen.values()}
    if len(names) == 1:
        return [Suggestion(option, names.pop(), why, True)]
    return [Suggestion(option, name, why, True, site) for site, name in chosen.items()]


def _dates(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Dates that are not written as 2024-03-31."""
    for name, by_site in profiles.items():
        for site, profile in by_site.items():
            formats = None
            if profile.dates < profile.present and name not in contents.options.categorical:
                formats = evidence.date_formats(profile)
            if formats is None:
                continue
            example = next(iter(profile.counts))
            if len(formats) == 1:
                entry = {name: {"format": formats[0]}}
                why = f"'{name}' has dates such as {example}"
                yield Suggestion("dates", entry, why, True, site)
                continue
            which, remedy = "and other forms or text", "write all as 2024-03-31"
            if formats:
                rule = in_toml({name: {"format": formats[0]}})
                which, remedy = " or ".join(formats), f"write dates = {rule}"
            why = f"'{name}' at {site} has dates such as {example}, {which}; to use it, {remedy}"
            yield Suggestion("ignore", [name], why, True)


def _codes_of_missing(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Numbers that stand for a missing value."""
    for name, by_site in profiles.items():
        if name in contents.options.categorical:
            continue
        for site, profile in by_site.items():
            comma = _comma(contents, site)
            words = evidence.stray_words(profile, comma)
            codes = evidence.missing_codes(*evidence.numbers(profile, comma))
            if words:
                why = f"'{name}' has text among numbers"
                few = profile.numbers >= STRAY * profile.present
                yield Suggestion("missing", {name: [*words, *codes]}, why, few, site)
            elif codes and profile.numbers == profile.present:
                why = f"'{name}' has the value {', '.join(codes)}, far from all others"
                yield Suggestion("missing", {name: codes}, why, True, site)


def _values(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Levels that are spellings of each other, at least one of them a word."""
    for name, by_site in profiles.items():
        few = all(profile.distinct <= MOST_SPELLED for profile in by_site.values())
        words = any(profile.numbers < profile.present for profile in by_site.values())
        if not (few and words) or evidence.unit_suffix(next(iter(by_site.values()))):
            continue
        same = same_classes({site: profile.counts for site, profile in by_site.items()})
        if same:
            why = f"values of '{name}' that may mean the same: {_pairs(same)}"
            yield Suggestion("values", {name: same}, why, False)


def _codes(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Whole numbers that are codes: few of them, or with a 0 in front; and words among numbers."""
    names = list[str]()
    for name, by_site in profiles.items():
        if name in contents.options.categorical or not _holds_codes(contents, by_site):
            continue
        names.append(name)
    if names:
        why = f"few distinct integers, or codes: {', '.join(names)}"
        yield Suggestion("categorical", names, why, True)


def _holds_codes(contents: Contents, by_site: Mapping[str, Profile]) -> bool:
    """Whether a column has codes at some site, and nothing else at any."""
    rows = sum(profile.present for profile in by_site.values())
    every = set[float]()
    for site, profile in by_site.items():
        if profile.dates or evidence.unit_suffix(profile):
            return False
        if profile.numbers < profile.present:
            if evidence.stray_words(profile, _comma(contents, site)):
                continue
            mixed = profile.present >= 10 and profile.numbers >= 0.5 * profile.present
            return mixed and 2 * profile.distinct <= profile.present
        if profile.whole and any(_begins_with_zero(value) for value in profile.counts):
            return 2 * profile.distinct <= profile.present
        if profile.distinct > MANY:
            return False
        values, counts = evidence.numbers(profile, _comma(contents, site))
        codes = {float(code) for code in evidence.missing_codes(values, counts)}
        every |= {*values.tolist()} - codes
    return rows >= FEW and bool(every) and evidence.is_code(np.array(sorted(every)))


def _begins_with_zero(value: str) -> bool:
    return value[:1] == "0" and len(value) > 1 and value.isdecimal()


def _units(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Numbers with a unit behind them, as 45%, and numbers 10 times those of most other sites."""
    for name, by_site in profiles.items():
        suffixes = {site: evidence.unit_suffix(profile) for site, profile in by_site.items()}
        bare = [p.high for site, p in by_site.items() if p.numbers and not suffixes[site]]
        fractions = any(high <= 1.5 for high in bare)  # a share of 1, not of 100
        shares = {site for site, suffix in suffixes.items() if suffix == "%" and fractions}
        middles = _middles(contents, name, by_site, suffixes)
        gaps = _gaps({site: m * 0.01 if site in shares else m for site, m in middles.items()})
        for site, suffix in suffixes.items():
            unit, reasons = dict[str, Any](), list[str]()
            if suffix:
                unit["suffix"] = suffix
                reasons.append(f"'{name}' has numbers with '{suffix}' at {site}")
            if site in shares:
                unit["factor"] = 0.01
            elif site in gaps:
                unit["factor"], why = gaps[site]
                reasons.append(f"'{name}' is about {why}")
            if unit:
                yield Suggestion("units", {name: unit}, "; ".join(reasons), False, site)


def _suffixes(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Numbers with a unit behind them; sites are not compared."""
    for name, by_site in profiles.items():
        for site, profile in by_site.items():
            yield from _units(contents, {name: {site: profile}})


def _middles(
    contents: Contents, name: str, by_site: Mapping[str, Profile], suffixes: Mapping[str, str]
) -> dict[str, float]:
    """The median of a column by site, without suffixes and codes; none for a column of codes."""
    middles, all_codes = dict[str, float](), True
    for site, profile in by_site.items():
        words = profile.numbers < profile.present and not suffixes[site]
        if words or name in contents.options.categorical:
            continue
        values, counts = evidence.numbers(profile, _comma(contents, site), suffixes[site])
        codes = [float(code) for code in evidence.missing_codes(values, counts)]
        ordinary = [value not in codes for value in values.tolist()]
        middle = abs(evidence.median(values[ordinary], counts[ordinary])) if any(ordinary) else 0.0
        if middle > 0:
            middles[site] = middle
            all_codes = all_codes and evidence.is_code(values[ordinary])
    return {} if all_codes else middles


def _gaps(middles: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Sites with another unit: the factor, and why it is suspected."""
    near = {
        site: sum(1 / SCALE < other / middle < SCALE for other in middles.values())
        for site, middle in middles.items()
    }
    usual = max(sorted(near), key=lambda site: near[site], default="")
    gaps = dict[str, tuple[float, str]]()
    for site, middle in middles.items():
        ratio = middles[usual] / middle
        if ratio >= SCALE or ratio <= 1 / SCALE:
            factor, words = evidence.conversion(ratio)
            times = f"{ratio:,.0f} times smaller" if ratio > 1 else f"{1 / ratio:,.0f} times larger"
            why = f"{times} at {site} than at {usual}: a different unit?"
            gaps[site] = factor, why + (f" ({words})" if words else "")
    return gaps


def _unusable(contents: Contents, profiles: Profiles) -> Iterator[Suggestion]:
    """Columns that a survey refuses otherwise: numbers too large, many words among numbers."""
    for name, by_site in profiles.items():
        for site, profile in by_site.items():
            if name in contents.options.categorical:
                continue
            if profile.huge and profile.numbers == profile.present:
                why = f"'{name}' at {site} has a number that is too large: {profile.huge[2][:40]}"
                yield Suggestion("ignore", [name], why, True)
            words = profile.present >= 10 and 0.9 * profile.present <= profile.numbers
            mixed = words and profile.numbers < profile.present < 2 * profile.distinct
            if mixed and not evidence.stray_words(profile, _comma(contents, site)):
                why = f"'{name}' at {site} has text among numbers"
                yield Suggestion("ignore", [name], why, True)


def repeated_rows(contents: Contents) -> list[tuple[str, str]]:
    """Rows that are there twice, within a site and at two, where chance does not explain it."""
    repeats = contents.repeats
    if repeats is None:
        return []
    findings = []
    for site in sorted(repeats.within):
        extra = sum(count - 1 for count in repeats.within[site].values())
        if extra and _telling(contents, [site]):
            action = "kept; remove them from the file, or set group"
            if contents.options.rules(site).group:
                action = "kept in one split; remove them from the file if they are copies"
            rows = "row" if extra == 1 else "rows"
            findings.append((f"{site} has {extra:,} duplicate {rows}", action))
    sites = sorted(repeats.across)
    for number, site in enumerate(sites):
        for other in sites[number + 1 :]:
            both = repeats.across[site].keys() & repeats.across[other].keys()
            if both and _telling(contents, [site, other]):
                what = f"{site} and {other} have {len(both):,} rows in common"
                findings.append((what, "kept; a site may train on test rows of the other"))
    return findings


def _telling(contents: Contents, sites: Sequence[str]) -> bool:
    """Whether columns have so many values that two rows are hardly the same by chance.

    The chance that two rows agree is 2 to the minus collision entropy, summed over columns as if
    they were independent; ten bits are kept in reserve because they are not. It is estimated from
    pairs of different rows: a row that agrees with itself says nothing.
    """
    profiles = [contents.profiles[site] for site in sites]
    bits = 0.0
    for name in set.intersection(*({*own} for own in profiles)):
        counts = sum((own[name].counts for own in profiles), Counter[str]())
        number, rows = np.array([*counts.values()], dtype=float), counts.total()
        if rows > 1:
            bits -= math.log2((1 + (number * (number - 1)).sum()) / (rows * (rows - 1)))
    total = sum(contents.classes[site].total() for site in sites)
    return bits > 2 * math.log2(max(2, total)) + 10
