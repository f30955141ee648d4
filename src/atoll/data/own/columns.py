"""Decides for each column of own tables whether it is common, own or excluded, and why."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from atoll.data.own.encoding import Block, Kind, offset
from atoll.data.own.harmonise import fitting_forms
from atoll.data.own.leaks import gives_label_away
from atoll.data.own.profiles import (
    MOST_DISTINCT,
    Contents,
    Profile,
    TableOptions,
    natural,
    unusable,
)
from atoll.data.own.sheets import line_of

__all__ = [
    "ENOUGH", "STRAY", "Column", "ColumnPlan", "Finding", "identifies", "leaks_of", "make_block",
    "offset_of", "refuse_mistakes", "shifted_codes", "without_case",
]  # fmt: skip

ENOUGH = 20  # minimum number of values for any suspicion
MOST_CODES = 100  # distinct whole numbers compared as codes
STRAY = 0.9  # share of numbers above which a word among them is a mistake
IDENTIFIER = re.compile(r"(^|[ _-])(id|nr|no|number|index|key|uuid|unnamed.*)$", re.IGNORECASE)
ODD_NUMBERS = (  # values that are not numbers, and their names
    (re.compile(r"^[<>=~≤≥]+ *[-+]?[0-9.,]+$"), "a number after a sign such as <"),
    (re.compile(r"^[-+]?[0-9]{1,3}([,' ][0-9]{3})+(\.[0-9]*)?$"), "a number with grouped digits"),
    (re.compile(r"^[-+]?[0-9]+,[0-9]+$"), "a decimal comma"),
    (re.compile(r"^[-+]?[0-9.,]+ *[^0-9., ]+$"), "a number with a unit"),
)
WHOLE = re.compile(r"-?[0-9]{1,9}")
ODD_DATE = re.compile(r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}( .*)?$")


class Finding(NamedTuple):
    """A remark before training, with what atoll does about it."""

    what: str
    action: str


@dataclass(frozen=True)
class Column:
    """A column, the sites that have it, and its role."""

    name: str
    kind: str  # number, date, text; or several if sites differ
    where: str  # common, own or excluded
    sites: tuple[str, ...]
    missing: dict[str, int]  # number of rows without a value, by site
    treatment: str


@dataclass
class ColumnPlan:
    """The roles of all columns."""

    contents: Contents
    sites: tuple[str, ...]
    leaks: bool = True  # whether to search for columns that leak the label
    columns: list[Column] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    rare: dict[str, list[str]] = field(default_factory=dict)  # levels without a separate column

    @property
    def options(self) -> TableOptions:
        """The options of the tables."""
        return self.contents.options

    def make(self) -> None:
        """Plan every column, in the order of the files."""
        names = dict.fromkeys(n for sheet in self.contents.sheets for n in sheet.columns)
        by_site = {site: self.contents.profiles[site] for site in self.sites}
        for name in names:
            profiles = {site: own[name] for site, own in by_site.items() if name in own}
            if name in self.options.ignore:
                self.columns.append(Column(name, "", "left out", (), {}, "left out by ignore"))
            elif profiles:
                self._column(name, profiles)
            elif treatment := self._named(name):
                self.columns.append(Column(name, "", "left out", (), {}, treatment))
        if not any(column.where == "common" for column in self.columns):
            where = ", ".join(sheet.path.name for sheet in self.contents.sheets)
            remedy = "give the same name and type to columns that mean the same at every site"
            raise unusable("no common column", where, remedy)

    def _named(self, name: str) -> str:
        """The role of columns with ids or people; empty for all others."""
        rules = [self.options.rules(site) for site in self.sites]
        if any(name == rule.group for rule in rules):
            return "group: rows stay in one split; no input"
        if any(name == one.weights for one in rules):
            return "weight of a row in training; no input"
        return "id: copied to predictions; no input" if any(name == one.id for one in rules) else ""

    def _column(self, name: str, profiles: Mapping[str, Profile]) -> None:
        kinds: dict[str, Kind] = {}
        for site, profile in profiles.items():
            kind = profile.kind(name in self.options.categorical)
            if kind:
                kinds[site] = kind
                path = str(self.contents.files[site][0].path)
                refuse_mistakes(name, profile, kind, self.options, path)
        missing = {site: p.rows - p.present for site, p in profiles.items() if p.gaps}
        if not kinds:
            self._leave(name, kinds, tuple(profiles), "no value at any site", missing)
            return
        filled = {site: profiles[site] for site in kinds}
        if name not in self.options.keep and identifies(name, filled, kinds):
            site = _mixed(name, filled, kinds)
            why, remedy = "looks like an identifier or free text", f"write keep = ['{name}']"
            if site:
                why, remedy = (
                    _odd_value(filled[site], site),
                    "fix the file, map such text with values, or add it to missing",
                )
            self._leave(name, kinds, tuple(filled), why, missing, remedy)
            return
        one_kind = len(set(kinds.values())) == 1
        local = self.options.levels == "local" and "text" in kinds.values()
        common = len(kinds) == len(self.sites) and one_kind and not (local and len(self.sites) > 1)
        self._suspect(name, filled, kinds, common)
        if common:
            treatment = self._add_block(name, kinds[self.sites[0]], [*filled.values()])
        else:
            treatment = self.add_own(name, filled, kinds)
        where = "common" if common else "own"
        self.columns.append(Column(name, _listed(kinds), where, tuple(kinds), missing, treatment))

    def _leave(
        self,
        name: str,
        kinds: Mapping[str, Kind],
        sites: tuple[str, ...],
        why: str,
        missing: dict[str, int],
        remedy: str = "",
    ) -> None:
        column = Column(name, _listed(kinds), "left out", sites, missing, f"left out: {why}")
        self.columns.append(column)
        if kinds:
            self._note(f"'{name}' {why}", f"left out; to use it, {remedy}")

    def add_own(self, name: str, profiles: Mapping[str, Profile], kinds: Mapping[str, Kind]) -> str:
        """Add a column as own at each site: its levels and gaps stay there."""
        treatments = dict[str, list[str]]()
        for site, profile in profiles.items():
            treatments.setdefault(self._add_block(name, kinds[site], [profile], site), []).append(
                site
            )
        if len(treatments) == 1:
            return next(iter(treatments))
        return "; ".join(f"at {', '.join(sites)} {words}" for words, sites in treatments.items())

    def _add_block(self, name: str, kind: Kind, profiles: Sequence[Profile], site: str = "") -> str:
        start = self.blocks[-1].start + self.blocks[-1].width if self.blocks else 0
        block = make_block(name, kind, profiles, self.options.most_levels, start, site)
        self.blocks.append(block)
        if kind == "text":
            levels = set[str]().union(*(profile.counts for profile in profiles))
            if rare := sorted(levels - {*block.levels}):
                self.rare.setdefault(name, []).extend(rare)
        words = {
            "number": "scaled",
            "date": "days since 1970-01-01, scaled",
            "text": f"one-hot, {len(block.levels)} levels",
        }[kind]
        if not block.missing:
            return words
        if kind == "text":
            return f"{words}, an extra column marks missing values"
        return f"{words}, missing values imputed with the training mean and marked in a column"

    def _note(self, what: str, action: str) -> None:
        self.findings.append(Finding(what, action))

    def _suspect(
        self, name: str, profiles: Mapping[str, Profile], kinds: Mapping[str, Kind], common: bool
    ) -> None:
        """Note conflicts between sites, and columns that leak the label."""
        several = {*kinds.values()}
        if len(several) > 1:
            listed = ", ".join(f"{kind} at {site}" for site, kind in kinds.items())
            action = "an own column at each site; if they mean the same, map them with values"
            self._note(f"'{name}' is {listed}", action)
        if common and several == {"text"}:
            self._compare_levels(name, profiles)
        if self.leaks:
            self.findings += leaks_of(name, profiles, kinds)

    def _compare_levels(self, name: str, profiles: Mapping[str, Profile]) -> None:
        levels = [{*profile.counts} for profile in profiles.values()]
        every, shared = set[str]().union(*levels), set.intersection(*levels)
        if every != shared:
            alone = ", ".join(sorted(every - shared)[:6])
            alike = len({without_case(level) for level in every}) < len(every)
            same = "; some differ only in case or spaces" if alike else ""
            what = f"'{name}' has levels that some sites lack: {alone}{same}"
            self._note(what, "all sites have a column for every level")
        if shift := shifted_codes({site: [*own.counts] for site, own in profiles.items()}):
            action = "one site may count from 1: check, and if so map its codes with values"
            self._note(f"'{name}' has codes that differ by one: {shift}", action)
        most = self.options.most_levels
        if len(every) > most:
            action = f"the {most} most frequent get a column each; others count as unknown"
            self._note(f"'{name}' has {len(every):,} levels", action)

    def crossing(self, classes: Sequence[str]) -> list[str]:
        """What sites must disclose to each other before training."""
        common = [column for column in self.columns if column.where == "common"]
        texts = [column.name for column in common if column.kind == "text"]
        sentences = [
            f"the names and types of the {len(common)} common columns, and which of them have "
            "missing values anywhere",
            "that the label is a number"
            if self.options.task == "regression"
            else f"the names of the {len(classes)} classes",
        ]
        if texts:
            sentences.append(f"the levels of the common text columns: {', '.join(texts)}")
        return sentences


def leaks_of(
    name: str, profiles: Mapping[str, Profile], kinds: Mapping[str, Kind | Literal[""]]
) -> list[Finding]:
    """Findings that a column, or whether it is missing, predicts the label almost alone."""
    by_value, by_gaps = list[str](), list[str]()
    for site, profile in profiles.items():
        present = [(value, label) for value, label in profile.sample if value is not None]
        values, labels = zip(*present, strict=True) if present else ((), ())
        dates = kinds[site] in ("", "date")
        if not dates and gives_label_away(values, labels, kinds[site] == "number"):
            by_value.append(site)
        elif len(present) < len(profile.sample):
            gaps = ["" if value is None else "value" for value, _ in profile.sample]
            if gives_label_away(gaps, [label for _, label in profile.sample], False):
                by_gaps.append(site)
    action = f"kept; if it is known only after the outcome, write ignore = ['{name}']"
    question = "predicts the label almost alone: is it known before the outcome?"
    findings = list[Finding]()
    if by_value:
        findings.append(Finding(f"'{name}' at {', '.join(by_value)} {question}", action))
    if by_gaps:
        what = f"whether '{name}' has a value at {', '.join(by_gaps)} {question}"
        findings.append(Finding(what, action))
    return findings


def shifted_codes(levels: Mapping[str, Collection[str]]) -> str:
    """Two sites whose whole numbers differ by a shift of one; empty if there are none."""
    codes = dict[str, list[int]]()
    for site, own in levels.items():
        if 1 < len(own) <= MOST_CODES and all(WHOLE.fullmatch(level) for level in own):
            codes[site] = sorted(map(int, own))
    for site, high in codes.items():
        for other, low in codes.items():
            if high == [code + 1 for code in low]:
                return f"{_in_words(high)} at {site}, {_in_words(low)} at {other}"
    return ""


def _in_words(codes: Sequence[int]) -> str:
    """The codes as a range if it has no gap."""
    if len(codes) > 2 and codes[-1] - codes[0] == len(codes) - 1:
        return f"{codes[0]} to {codes[-1]}"
    return ", ".join(map(str, codes[:6])) + (", ..." if len(codes) > 6 else "")


def refuse_mistakes(
    name: str, profile: Profile, kind: Kind, options: TableOptions, path: str
) -> None:
    """Refuse certain mistakes: words among numbers, dates in another format."""
    if kind == "number" and profile.huge:
        sheet, row, text = profile.huge
        what = f"'{text}' in the column '{name}' is too large a number"
        raise unusable(what, line_of(sheet, row), "write it in another unit")
    if kind == "date" and options.dates == "refuse":
        what = f"the column '{name}' has dates"
        raise unusable(what, path, "write ignore = [...] or dates = 'days'")
    if kind != "text" or name in options.categorical:
        return
    if profile.present >= 10 and profile.numbers >= STRAY * profile.present and profile.word:
        sheet, row, text = profile.word
        what = f"the text '{text[:40]}' in the column '{name}', which has numbers otherwise"
        remedy = f"fix it, add it to missing, or write categorical = ['{name}']"
        raise unusable(what, line_of(sheet, row), remedy)
    odd = sum(n for value, n in profile.counts.items() if ODD_DATE.match(value))
    if odd >= STRAY * profile.present:
        what = f"the column '{name}' has dates such as '{next(iter(profile.counts))}'"
        dates = [value for value in profile.counts if ODD_DATE.match(value)]
        form = (fitting_forms(dates) or ["%d.%m.%Y"])[0]
        remedy = f"write dates = {{ {name} = {{ format = '{form}' }} }}, or ignore = ['{name}']"
        raise unusable(what, path, remedy)


def make_block(
    name: str,
    kind: Kind,
    profiles: Sequence[Profile],
    most_levels: int,
    start: int = 0,
    site: str = "",
) -> Block:
    """How a column becomes numeric, from all that is known of it."""
    levels: tuple[str, ...] = ()
    if kind == "text":
        counts: Counter[str] = sum((p.counts for p in profiles), Counter())
        by_count = sorted(counts, key=lambda level: (-counts[level], level))
        levels = tuple(sorted(by_count[:most_levels], key=natural))
    gaps = any(profile.gaps for profile in profiles)
    return Block(name, kind, levels, gaps, start, site, offset_of(kind, profiles))


def offset_of(kind: Kind, profiles: Sequence[Profile]) -> float:
    """The offset to subtract from a column's numbers before rounding to float32."""
    if kind == "text":
        return 0.0
    ends = [(p.first, p.final) if kind == "date" else (p.low, p.high) for p in profiles]
    return offset(float(min(low for low, _ in ends)), float(max(high for _, high in ends)))


def identifies(name: str, profiles: Mapping[str, Profile], kinds: Mapping[str, Any]) -> bool:
    """Whether a column identifies rows and has little other information, at any site."""
    for site, profile in profiles.items():
        if profile.present < ENOUGH:
            continue
        distinct, present = profile.distinct, profile.present
        if kinds[site] == "text" and (distinct > present / 2 or distinct >= MOST_DISTINCT):
            return True
        if kinds[site] == "number" and profile.whole and distinct >= min(present, MOST_DISTINCT):
            counts = profile.ordered and profile.high - profile.low == present - 1
            if counts or IDENTIFIER.search(name):
                return True
    return False


def _mixed(name: str, profiles: Mapping[str, Profile], kinds: Mapping[str, Kind]) -> str:
    """A site with words among the numbers of a column, if no other site finds these unusual."""
    numbers = {site: profiles[site] for site, kind in kinds.items() if kind == "number"}
    if IDENTIFIER.search(name) or (numbers and identifies(name, numbers, kinds)):
        return ""
    for site, profile in profiles.items():
        mostly_numbers = numbers or 2 * profile.numbers >= profile.present
        if kinds[site] == "text" and profile.word and mostly_numbers:
            return site
    return ""


def _odd_value(profile: Profile, site: str) -> str:
    """The position and kind of the first word among numbers."""
    assert profile.word is not None  # otherwise the column would be numeric
    sheet, row, text = profile.word
    description = next((words for form, words in ODD_NUMBERS if form.match(text)), "a word")
    place = line_of(sheet, row).removeprefix(f"{sheet.path}, ")
    return f"has numbers elsewhere and {description} at {site} ({sheet.path.name}, {place})"


def _listed(kinds: Mapping[str, Kind]) -> str:
    return "/".join(dict.fromkeys(kinds.values()))


def without_case(text: str) -> str:
    """A name in lower case without blanks."""
    return "".join(text.casefold().split())
