"""Tables that stay at their sites: what sites disclose before training to agree on columns.

A site discloses keyed hashes of the names of its columns, and their types; of the common text
columns their levels; and the names of classes and stages. A name that only one site has is not
disclosed. (A holder of the key, such as the coordinator, can test names: a hash does not protect
names that can be guessed.) Own columns, values, row counts and everything else stay at the site.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.options import build
from atoll.data.dataset import Dataset, Layout
from atoll.data.own.columns import ColumnPlan, identifies, offset_of, refuse_mistakes
from atoll.data.own.encoding import Block, Kind
from atoll.data.own.labels import task_of
from atoll.data.own.profiles import (
    Contents,
    TableOptions,
    in_order,
    open_sheet,
    profile_sheet,
    site_name,
)
from atoll.data.own.spellings import refuse_spellings
from atoll.data.own.tables import Survey, grouped, read_arrays, recipe, scaled, weighted
from atoll.data.scenario import Holding, Scenario

__all__ = [
    "LEFT_OUT", "Agree", "Agreed", "Common", "Offer", "Offered", "OwnTable", "Plan",
    "UntoldError", "common", "elsewhere", "narrowing", "only_here", "planned",
]  # fmt: skip

LEFT_OUT = "left out"
NONE = np.empty(0, dtype=np.int64)


class UntoldError(Exception):
    """A request for more of a column than this site discloses, with the remedy for its operator."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what


@dataclass(frozen=True)
class Offer:
    """Requests a description of a site's table."""

    key: str  # key of the hashes


@dataclass(frozen=True)
class Offered:
    """Describes a site's table: hashes of names, and types, in the file's order."""

    columns: dict[str, str]  # hash -> number, date, text or left out
    classes: list[str]  # empty if the label is a number
    stages: list[str]


@dataclass(frozen=True)
class Agree:
    """Names the common columns by their hashes."""

    common: list[str]


@dataclass(frozen=True)
class Agreed:
    """Other properties of the common columns: gaps, and the levels of text."""

    gaps: dict[str, bool]
    levels: dict[str, list[str]]


@dataclass(frozen=True)
class Common:
    """A common column."""

    hash: str
    kind: str
    levels: tuple[str, ...]
    gaps: bool

    @property
    def width(self) -> int:
        """The number of numeric columns it becomes."""
        return (len(self.levels) if self.kind == "text" else 1) + self.gaps


@dataclass(frozen=True)
class Plan:
    """The plan that all sites and the server follow."""

    key: str
    columns: tuple[Common, ...]
    left_out: tuple[str, ...]  # hashes of columns that some site excludes, so that all do
    classes: tuple[str, ...]  # a single name for a numeric label
    stages: tuple[str, ...]

    @property
    def width(self) -> int:
        """The number of common numeric columns."""
        return sum(column.width for column in self.columns)


def _hash(name: str, key: str) -> str:
    content = name.encode()
    return hashlib.blake2b(content, digest_size=16, key=key.encode()[:64]).hexdigest()


class OwnTable:
    """One site's file, read once."""

    def __init__(self, site: str, **values: Any) -> None:
        options = build(TableOptions, values, "[data]")
        files = () if isinstance(options.files, dict) else options.files
        if len(files) != 1 or not options.label or options.site:
            remedy = "name this site's one file in its site.toml, and the label in the run"
            raise UserError("not one file with a label", "data", remedy)
        called = site_name(Path(files[0]).stem)
        own = options.sites.get(site) or options.sites.get(called)
        options = replace(options, sites={called: own} if own else {})
        sheet = open_sheet(files[0], options)
        contents = Contents(options.renamed(), (sheet,))
        profile_sheet(contents, sheet)
        self._quantity = contents.options.task == "regression"  # the site sets it explicitly
        options = replace(contents.options, task=task_of(contents))
        contents = replace(contents, options=options)
        self.site, self.options = site, options
        (self.called,) = contents.profiles
        self.sheet, self.contents, self.profiles = sheet, contents, contents.profiles[self.called]
        self.kinds: dict[str, Kind] = {}
        for name, profile in self.profiles.items():
            kind = profile.kind(name in options.categorical)
            if kind:
                refuse_mistakes(name, profile, kind, options, str(sheet.path))
                self.kinds[name] = kind

    @property
    def regression(self) -> bool:
        """Whether the label is a number here; its values are then never disclosed."""
        return self.options.task == "regression"

    def _whole_labels(self) -> bool:
        """Whether labels are whole numbers and mostly distinct, as ids of people are."""
        counts = self.contents.classes[self.called]
        whole = all(label.lstrip("-").isdigit() for label in counts)
        return whole and 2 * len(counts) > counts.total()

    def _leaves(self, name: str) -> bool:
        profiles, kinds = {self.called: self.profiles[name]}, {self.called: self.kinds[name]}
        return name not in self.options.keep and identifies(name, profiles, kinds)

    def offered(self, request: Offer) -> Offered:
        """Describe this table."""
        classes = sorted(self.contents.classes[self.called])
        if self.regression and (self._quantity or not self._whole_labels()):
            classes = []
        self._countable(self.options.label, classes)
        if self.options.stage:
            self._countable(self.options.stage, self.contents.stages[self.called])
        columns = {
            _hash(name, request.key): LEFT_OUT if self._leaves(name) else kind
            for name, kind in self.kinds.items()
        }
        stages = self.contents.stages[self.called] if self.options.stage else []
        return Offered(columns, classes, sorted(stages))

    def _countable(self, name: str, values: Collection[str]) -> None:
        """Refuse to disclose the values of a column of names, patient numbers or free text."""
        rows = self.contents.classes[self.called].total()
        if len(values) > min(self.options.most_levels, max(2, rows // 2)):
            what = f"the column '{name}' has {len(values):,} values in {rows:,} rows"
            remedy = (
                "choose another label or stage, or write most_levels in this site's [data]; of a "
                "quantity in whole numbers, task = 'regression'"
            )
            raise UntoldError(what, remedy)

    def agreed(self, request: Agree, key: str) -> Agreed:
        """Gaps and levels of the common columns; empty for a column that is excluded here."""
        gaps, levels = dict[str, bool](), dict[str, list[str]]()
        requested = {*request.common}
        for name, kind in self.kinds.items():
            hashed, profile = _hash(name, key), self.profiles[name]
            if hashed in requested:
                gaps[hashed] = profile.gaps
                if kind == "text":
                    if not self._tells(name):
                        what = f"the column '{name}' has {profile.distinct:,} levels"
                        remedy = "ignore it, or write keep or most_levels in this site's [data]"
                        raise UntoldError(what, remedy)
                    levels[hashed] = sorted(profile.counts)
        return Agreed(gaps, levels)

    def _tells(self, name: str) -> bool:
        """Whether the levels of a column may be disclosed; of few rows, too, no list of names."""
        profile, options = self.profiles[name], self.options
        most = options.most_levels
        if name not in options.keep:
            most = min(most, max(2, profile.present // 2))
        return options.levels != "local" and not self._leaves(name) and profile.distinct <= most

    def width(self, plan: Plan) -> int:
        """The number of numeric columns that the table becomes."""
        return sum(block.width for block in self._blocks(plan))

    def dataset(self, plan: Plan) -> Dataset:
        """This site's rows as numbers: the common columns first, in the agreed order."""
        blocks = self._blocks(plan)
        rows = self.contents.classes[self.called].total()
        survey = Survey(
            self.options, (self.sheet,), (), plan.classes, plan.stages, (), (), (), tuple(blocks)
        )
        arrays, _ = read_arrays(survey, [self.called], rows)
        layout = Layout(
            np.ones((1, arrays.x.shape[1]), dtype=bool),
            np.concatenate([scaled(block) for block in blocks]),
            arrays.stage,
            plan.stages,
            recipe(survey, {}, [self.called]),
        )
        names = tuple(name for block in blocks for name in block.names)
        return Dataset(
            "own tables", "table", arrays.x, arrays.y, names, plan.classes, "own file",
            group=arrays.group, groups=(self.site,), layout=layout,
            people=arrays.people if grouped(self.options) else None,
            weights=arrays.weights if weighted(self.options) else None,
        )  # fmt: skip

    def _blocks(self, plan: Plan) -> list[Block]:
        names = {_hash(name, plan.key): name for name in self.kinds}
        blocks, start = list[Block](), 0
        for one in plan.columns:
            name = names[one.hash]
            kind: Any = one.kind
            shift = offset_of(kind, [self.profiles[name]])
            blocks.append(Block(name, kind, one.levels, one.gaps, start, offset=shift))
            start += one.width
        used = {*(column.hash for column in plan.columns), *plan.left_out}
        own = ColumnPlan(self.contents, (self.called,), blocks=blocks)
        for hashed, name in names.items():
            if hashed not in used:
                profiles = {self.called: self.profiles[name]}
                own.add_own(name, profiles, {self.called: self.kinds[name]})
        return own.blocks


def common(offers: Mapping[str, Offered], options: TableOptions) -> list[str]:
    """The hashes of the columns that all sites have, with one type, in the first site's order."""
    shared = _shared([*offers.values()], options)
    if not shared:
        remedy = "give the same name and type to columns that mean the same at every site"
        where = narrowing(offers, options) or "the sites' tables"
        raise UserError("no common column", where, remedy)
    return shared


def _shared(offers: Sequence[Offered], options: TableOptions) -> list[str]:
    first, *others = offers
    return [
        hashed
        for hashed, kind in first.columns.items()
        if kind != LEFT_OUT
        and all(other.columns.get(hashed) == kind for other in others)
        and not (kind == "text" and options.levels == "local" and others)
    ]


def narrowing(offers: Mapping[str, Offered], options: TableOptions) -> str:
    """The site that lacks the most columns that all others have; empty if no site stands out."""
    if len(offers) < 3:
        return ""
    counts = {
        id: len(_shared([one for other, one in offers.items() if other != id], options))
        for id in offers
    }
    most, now = max(counts.values()), len(_shared([*offers.values()], options))
    if most == now:
        return ""
    ids = " or ".join(id for id, count in counts.items() if count == most)
    return f"{now} columns are common, and {most} without {ids}"


def planned(
    key: str, offers: Mapping[str, Offered], agreed: Mapping[str, Agreed], options: TableOptions
) -> Plan:
    """The plan from all descriptions."""
    columns = []
    for hashed in common(offers, options):
        kind = next(iter(offers.values())).columns[hashed]
        every = {level for one in agreed.values() for level in one.levels.get(hashed, [])}
        if len(every) > options.most_levels:
            counts = {site: len({*one.levels.get(hashed, [])}) for site, one in agreed.items()}
            site = max(counts, key=lambda site: counts[site])
            where = f"{counts[site]} of them at {site}"
            raise UserError(
                f"a common text column has {len(every)} levels", where,
                f"raise most_levels = {options.most_levels}, ignore it, or write levels = 'local'",
            )  # fmt: skip
        gaps = any(one.gaps.get(hashed, False) for one in agreed.values())
        columns.append(Common(hashed, kind, in_order(every), gaps))
    left = {h for offer in offers.values() for h, kind in offer.columns.items() if kind == LEFT_OUT}
    if options.labels != "as-is":
        names = {site: dict.fromkeys(one.classes, 1) for site, one in offers.items()}
        refuse_spellings(names, options.label)
    classes = _together(one.classes for one in offers.values())
    stages = _together((one.stages for one in offers.values()), options.order)
    numbers = [site for site, one in offers.items() if not one.classes]
    if numbers and classes:
        other = next(site for site in offers if site not in numbers)
        what = f"the label is a number at {numbers[0]} and has classes at {other}"
        raise UserError(what, "the sites' tables", "set task in [data] of each site's file")
    if numbers:
        return Plan(key, tuple(columns), tuple(sorted(left)), (options.label,), stages)
    if len(classes) < 2:
        raise UserError("every row has the same label", "the sites' tables", "choose another label")
    return Plan(key, tuple(columns), tuple(sorted(left)), classes, stages)


def _together(names: Iterable[Sequence[str]], order: Sequence[str] = ()) -> tuple[str, ...]:
    return in_order({name for some in names for name in some}, order)


def _empty(plan: Plan) -> tuple[tuple[Holding, ...], tuple[Any, ...]]:
    count = max(1, len(plan.stages))
    return (Holding(NONE, NONE, NONE),) * count, (NONE,) * count


def only_here(scenario: Scenario, plan: Plan, id: str, ids: Sequence[str], width: int) -> Scenario:
    """A site's own scenario among all clients, of which it knows only the names."""
    none, untested = _empty(plan)
    own = np.arange(plan.width, width)
    holdings = tuple(Holding(h.train, h.valid, own) for h in scenario.holdings[id])
    return Scenario(
        tuple(ids), {**dict.fromkeys(ids, none), id: holdings}, np.arange(plan.width),
        {**dict.fromkeys(ids, untested), id: scenario.tests[id]}, scenario.tasks, scenario.known_at,
    )  # fmt: skip


def elsewhere(plan: Plan, ids: Sequence[str], files: Sequence[str]) -> tuple[Dataset, Scenario]:
    """What the server knows of remote tables: shapes and names, but no rows."""
    none, untested = _empty(plan)
    names = ", ".join(Path(file).name for file in files)
    labels = NONE.astype(float) if len(plan.classes) == 1 else NONE  # one: a number
    dataset = Dataset(
        "own tables", "table", np.zeros((0, plan.width), dtype=np.float32), labels, (),
        plan.classes, f"own files at their sites: {names}",
    )  # fmt: skip
    tasks = plan.stages or ("all",)
    return dataset, Scenario(
        tuple(ids), dict.fromkeys(ids, none), np.arange(plan.width),
        dict.fromkeys(ids, untested), tasks, tuple(range(len(tasks))),
    )  # fmt: skip
