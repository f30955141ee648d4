"""Tables that stay at their sites: what sites tell before training, so that their columns agree.

A site tells its columns by a keyed hash of their names and by their types; of the common text
columns then the levels; and the names of classes and stages. A name that only one site has is not
told. (Who knows the key, as the coordinator does, can try out names: a hash hides no name that can
be guessed.) Own columns, values, numbers of rows and everything else stay.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.options import build
from atoll.data.dataset import Dataset, Layout
from atoll.data.own import tables
from atoll.data.own.encoding import Block
from atoll.data.own.sheets import batches, opened
from atoll.data.scenario import Holding, Scenario

__all__ = [
    "Agree", "Agreed", "Common", "Offer", "Offered", "OwnTable", "Plan",
    "UntoldError", "common", "elsewhere", "only_here", "planned",
]  # fmt: skip

LEFT_OUT = "left out"
NONE = np.empty(0, dtype=np.int64)


class UntoldError(Exception):
    """More of a column than this site tells, and what its operator could do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what


@dataclass(frozen=True)
class Offer:
    """Asks what is in a site's table."""

    key: str  # of the hashes


@dataclass(frozen=True)
class Offered:
    """What is in a site's table: hashes of names and types, in the file's order."""

    columns: dict[str, str]  # hash -> number, date, text or left out
    classes: list[str]
    stages: list[str]


@dataclass(frozen=True)
class Agree:
    """Names the common columns by their hashes."""

    common: list[str]


@dataclass(frozen=True)
class Agreed:
    """What else must be known of the common columns: gaps, and the levels of text."""

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
        """How many columns of numbers it makes."""
        return (len(self.levels) if self.kind == "text" else 1) + self.gaps


@dataclass(frozen=True)
class Plan:
    """What all sites and the server go by."""

    key: str
    columns: tuple[Common, ...]
    left_out: tuple[str, ...]  # hashes of what some site leaves out, and so all do
    classes: tuple[str, ...]
    stages: tuple[str, ...]

    @property
    def width(self) -> int:
        """The columns of numbers that are common."""
        return sum(column.width for column in self.columns)


def _hash(name: str, key: str) -> str:
    content = name.encode()
    return hashlib.blake2b(content, digest_size=16, key=key.encode()[:64]).hexdigest()


class OwnTable:
    """One site's file, looked at once."""

    def __init__(self, site: str, **given: Any) -> None:
        options = build(tables.TableOptions, given, "[data]")
        files = () if isinstance(options.files, dict) else options.files
        if len(files) != 1 or not options.label or options.site:
            remedy = "name this site's one file in its site.toml, and the label in the run"
            raise UserError("not one file with a label", "data", remedy)
        self.site, self.options = site, options
        sheet = opened(Path(files[0]), options.delimiter, options.encoding)
        look = tables.Look(options, (sheet,))
        tables.needed(sheet, options)
        tables.first_pass(look, sheet)
        (self.called,) = look.profiles
        self.sheet, self.look, self.profiles = sheet, look, look.profiles[self.called]
        self.kinds = {
            name: kind
            for name, profile in self.profiles.items()
            if (kind := profile.kind(name in options.categorical))
        }
        check = tables.ColumnPlan(look, (self.called,))
        for name, kind in self.kinds.items():
            check.check(name, self.called, self.profiles[name], kind)

    def _leaves(self, name: str) -> bool:
        held, kinds = {self.called: self.profiles[name]}, {self.called: self.kinds[name]}
        return name not in self.options.keep and tables.identifies(name, held, kinds)

    def offered(self, request: Offer) -> Offered:
        """What this table has."""
        self._countable(self.options.label, self.look.classes[self.called])
        if self.options.stage:
            self._countable(self.options.stage, self.look.stages[self.called])
        columns = {
            _hash(name, request.key): LEFT_OUT if self._leaves(name) else kind
            for name, kind in self.kinds.items()
        }
        stages = self.look.stages[self.called] if self.options.stage else []
        return Offered(columns, sorted(self.look.classes[self.called]), sorted(stages))

    def _countable(self, name: str, values: Collection[str]) -> None:
        """Refuse to tell the values of a column of names, numbers of patients or free text."""
        rows = sum(self.look.classes[self.called].values())
        if len(values) > min(self.options.most_levels, max(2, rows // 2)):
            what = f"the column '{name}' has {len(values):,} values in {rows:,} rows"
            remedy = "choose another label or stage, or write most_levels in this site's [data]"
            raise UntoldError(what, remedy)

    def agreed(self, request: Agree, key: str) -> Agreed:
        """Gaps and levels of the common columns; of one that is left out here, nothing."""
        gaps, levels = dict[str, bool](), dict[str, list[str]]()
        for name, kind in self.kinds.items():
            hashed, profile = _hash(name, key), self.profiles[name]
            if hashed in request.common:
                gaps[hashed] = profile.rows > profile.present
                if kind == "text":
                    if self._leaves(name) or profile.distinct > self.options.most_levels:
                        what = f"the column '{name}' has {profile.distinct:,} levels"
                        remedy = "ignore it, or write keep or most_levels in this site's [data]"
                        raise UntoldError(what, remedy)
                    levels[hashed] = sorted(profile.counts)
        return Agreed(gaps, levels)

    def dataset(self, plan: Plan) -> Dataset:
        """This site's rows as numbers: the common columns first, in the agreed order."""
        blocks = self._blocks(plan)
        rows, width = sum(self.look.classes[self.called].values()), sum(b.width for b in blocks)
        made = tables.Made(
            np.zeros((rows, width), dtype=np.float32),
            *(np.zeros(rows, dtype=np.int64) for _ in range(3)),
        )
        found = tables.Survey(
            self.options, (self.sheet,), (), plan.classes, plan.stages, (), (), (), tuple(blocks)
        )
        total = 0
        for batch in batches(self.sheet, self.options.missing):
            part = made.part(total, total + len(batch))
            tables.second_pass(found, [self.called], self.sheet, batch, part)
            total += len(batch)
        layout = Layout(
            np.ones((1, width), dtype=bool),
            np.concatenate([tables.scaled(block) for block in blocks]),
            *(made.stage, plan.stages, tables.recipe(found, {})),
        )
        names = tuple(name for block in blocks for name in block.names)
        return Dataset(
            "own tables", "table", made.x, made.y, names, plan.classes, "own file",
            group=made.group, groups=(self.site,), layout=layout,
        )  # fmt: skip

    def _blocks(self, plan: Plan) -> list[Block]:
        known = {_hash(name, plan.key): name for name in self.kinds}
        blocks, start = list[Block](), 0
        for one in plan.columns:
            name = known[one.hash]
            kind: Any = one.kind
            apart = tables.offset_of(kind, [self.profiles[name]])
            blocks.append(Block(name, kind, one.levels, one.gaps, start, offset=apart))
            start += one.width
        used = {*(one.hash for one in plan.columns), *plan.left_out}
        own = tables.ColumnPlan(self.look, (self.called,), blocks=blocks, width=start)
        for hashed, name in known.items():
            if hashed not in used:
                one_site = {self.called: self.profiles[name]}
                own._own(name, one_site, {self.called: self.kinds[name]})
        return own.blocks


def common(offers: Mapping[str, Offered], options: tables.TableOptions) -> list[str]:
    """The hashes of the columns that all sites have, with one type, in the first site's order."""
    first, *others = offers.values()
    found = [
        hashed
        for hashed, kind in first.columns.items()
        if kind != LEFT_OUT
        and all(one.columns.get(hashed) == kind for one in others)
        and not (kind == "text" and options.levels == "local" and others)
    ]
    if not found:
        remedy = "give the same name and type to columns that mean the same at every site"
        raise UserError("no common column", "the sites' tables", remedy)
    return found


def planned(
    key: str,
    offers: Mapping[str, Offered],
    agreed: Mapping[str, Agreed],
    options: tables.TableOptions,
) -> Plan:
    """What all go by."""
    columns = []
    for hashed in common(offers, options):
        kind = next(iter(offers.values())).columns[hashed]
        every = {level for one in agreed.values() for level in one.levels.get(hashed, [])}
        if len(every) > options.most_levels:
            raise UserError(
                f"a common text column has {len(every)} levels", "the sites' tables",
                f"raise most_levels = {options.most_levels}, ignore it, or write levels = 'local'",
            )  # fmt: skip
        gaps = any(one.gaps.get(hashed, False) for one in agreed.values())
        columns.append(Common(hashed, kind, tuple(sorted(every, key=tables.natural)), gaps))
    left = {h for one in offers.values() for h, kind in one.columns.items() if kind == LEFT_OUT}
    classes = _together(one.classes for one in offers.values())
    stages = _together(one.stages for one in offers.values())
    if len(classes) < 2:
        raise UserError("every row has the same label", "the sites' tables", "choose another label")
    return Plan(key, tuple(columns), tuple(sorted(left)), classes, stages)


def _together(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for some in names for name in some}, key=tables.natural))


def _empty(plan: Plan) -> tuple[tuple[Holding, ...], tuple[Any, ...]]:
    count = max(1, len(plan.stages))
    return (Holding(NONE, NONE, NONE),) * count, (NONE,) * count


def only_here(made: Scenario, plan: Plan, id: str, ids: Sequence[str], width: int) -> Scenario:
    """A site's own scenario among all clients, of whom it knows the names alone."""
    none, untested = _empty(plan)
    own = np.arange(plan.width, width)
    mine = tuple(Holding(h.train, h.valid, own) for h in made.holdings[id])
    return Scenario(
        tuple(ids), {**dict.fromkeys(ids, none), id: mine}, np.arange(plan.width),
        {**dict.fromkeys(ids, untested), id: made.tests[id]}, made.tasks, made.known_at,
    )  # fmt: skip


def elsewhere(plan: Plan, ids: Sequence[str], files: Sequence[str]) -> tuple[Dataset, Scenario]:
    """What the server has of tables that are elsewhere: shapes and names, and no row."""
    none, untested = _empty(plan)
    names = ", ".join(Path(file).name for file in files)
    dataset = Dataset(
        "own tables", "table", np.zeros((0, plan.width), dtype=np.float32), NONE, (),
        plan.classes, f"own files at their sites: {names}",
    )  # fmt: skip
    tasks = plan.stages or ("all",)
    return dataset, Scenario(
        tuple(ids), dict.fromkeys(ids, none), np.arange(plan.width),
        dict.fromkeys(ids, untested), tasks, tuple(range(len(tasks))),
    )  # fmt: skip
