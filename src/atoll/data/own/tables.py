"""Encodes own tables as numbers: the second pass over the files, guided by their survey."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.core.options import build
from atoll.data.dataset import Dataset, Layout, file_fingerprint
from atoll.data.own.encoding import Block, as_numbers, encoded
from atoll.data.own.harmonise import Rules, plain_labels
from atoll.data.own.labels import label_numbers
from atoll.data.own.profiles import TableOptions, harmonised, site_name
from atoll.data.own.sheets import Sheet
from atoll.data.own.spellings import refuse_spellings
from atoll.data.own.survey import Survey, holds, read_contents, survey, survey_of, widths

__all__ = [
    "Arrays", "Survey", "TableOptions", "dataset", "grouped", "load", "read_arrays", "recipe",
    "scaled", "survey", "weighted", "widths",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Piece = tuple[str, int, int]  # a file, its first row, its rows


@dataclass(frozen=True)
class Arrays:
    """The arrays filled by the second pass."""

    x: Array
    y: Array
    group: Array  # site of each row
    stage: Array
    people: Array  # rows with equal numbers belong together
    weights: Array  # weight of each row in training

    def part(self, start: int, stop: int) -> "Arrays":
        """The same arrays for some rows."""
        return Arrays(*(array[start:stop] for array in vars(self).values()))


def load(name: str = "", **values: Any) -> Dataset:
    """The user's own tables as numbers; equal files give equal data."""
    plan = survey_of(read_contents(build(TableOptions, values, "[data]")), leaks=False)
    if plan.options.labels != "as-is" and plan.options.task != "regression":
        refuse_spellings({site.name: site.classes for site in plan.sites}, plan.options.label)
    return dataset(plan, name)


def dataset(plan: Survey, name: str = "") -> Dataset:
    """The tables of a survey as numbers: the second pass over the files."""
    sites = [site.name for site in plan.sites]
    arrays, pieces = read_arrays(plan, sites, sum(site.rows for site in plan.sites))
    layout = Layout(
        np.repeat(holds(plan), [block.width for block in plan.blocks], axis=1),
        np.concatenate([scaled(block) for block in plan.blocks]),
        arrays.stage,
        plan.stages,
        recipe(plan, pieces, sites),
    )
    columns = tuple(name for block in plan.blocks for name in block.names)
    source = "own files: " + ", ".join(sheet.path.name for sheet in plan.sheets)
    return Dataset(
        name or "own tables", "table", arrays.x, arrays.y, columns, plan.classes, source,
        group=arrays.group, groups=tuple(sites), layout=layout,
        people=arrays.people if grouped(plan.options) else None,
        weights=arrays.weights if weighted(plan.options) else None,
    )  # fmt: skip


def read_arrays(
    plan: Survey, sites: Sequence[str], rows: int
) -> tuple[Arrays, dict[str, list[Piece]]]:
    """Read the files as numbers; by site the chunks of its rows, one per stage."""
    width = sum(block.width for block in plan.blocks)
    y = np.zeros(rows, np.float64 if plan.options.task == "regression" else np.int64)
    group, stage, people = (np.zeros(rows, dtype=np.int64) for _ in range(3))
    weights = np.ones(rows, dtype=np.float32)
    x = np.zeros((rows, width), dtype=np.float32)
    arrays = Arrays(x, y, group, stage, people, weights)
    pieces: dict[str, list[Piece]] = {}
    numbers: dict[tuple[int, str], int] = {}
    total = 0
    for sheet in plan.sheets:
        before = total
        for batch in harmonised(sheet, plan.options):
            part = arrays.part(total, total + len(batch))
            _encode(plan, sites, sheet, batch, part)
            if grouped(plan.options):
                _number_people(plan, sites, batch, part, numbers)
            _weigh(plan, sites, sheet, batch, part)
            total += len(batch)
        if sheet.stage:
            piece = (sheet.path.name, before, total - before)
            pieces.setdefault(site_name(sheet.site), []).append(piece)
    return arrays, pieces


def _encode(
    plan: Survey, sites: Sequence[str], sheet: Sheet, batch: pa.RecordBatch, into: Arrays
) -> None:
    options = plan.options
    into.y[:] = _labels(plan, batch.column(options.label), sheet.comma)
    if options.stage:
        into.stage[:] = _places(plain_labels(batch.column(options.stage)), plan.stages)
    elif sheet.stage:
        into.stage[:] = plan.stages.index(sheet.stage)
    if options.site:
        raw = batch.column(options.site).dictionary_encode()
        numbers = np.array([sites.index(site_name(str(s))) for s in raw.dictionary.to_pylist()])
        into.group[:] = numbers[raw.indices.to_numpy(zero_copy_only=False)]
    else:
        into.group[:] = sites.index(site_name(sheet.site or sheet.path.stem))
    for block in plan.blocks:
        if block.column in sheet.columns:
            members = np.ones(len(batch), dtype=bool)
            if block.site:
                members = into.group == sites.index(block.site)
            if members.any():
                text = batch.column(block.column).filter(pa.array(members))
                columns = slice(block.start, block.start + block.width)
                into.x[members, columns] = encoded(block, text, sheet.comma)


def _labels(plan: Survey, text: pa.Array, comma: bool) -> Array:
    """Labels as indices into the classes, or as numbers."""
    if plan.options.task == "regression":
        return label_numbers(text, comma)
    return _places(plain_labels(text), plan.classes)


def _number_people(
    plan: Survey,
    sites: Sequence[str],
    batch: pa.RecordBatch,
    into: Arrays,
    people: dict[tuple[int, str], int],
) -> None:
    """Number the people of each site; a row without one counts as a separate person.

    In one file with a site column, equal values at several sites are one person.
    """
    for number, site in enumerate(sites):
        column = plan.options.rules(site).group
        members = np.flatnonzero(into.group == number)
        ids = [None] * len(batch)
        if column in batch.schema.names:
            ids = batch.column(column).to_pylist()
        for row in members:
            place = -1 if plan.options.site else number
            key = (place, f"={ids[row]}" if ids[row] is not None else f"row {len(people)}")
            into.people[row] = people.setdefault(key, len(people))


def _weigh(
    plan: Survey, sites: Sequence[str], sheet: Sheet, batch: pa.RecordBatch, into: Arrays
) -> None:
    """Read the weights of rows; 1 at sites without a weight column."""
    for number, site in enumerate(sites):
        column = plan.options.rules(site).weights
        if column in batch.schema.names:
            members = into.group == number
            values = as_numbers(batch.column(column).filter(pa.array(members)), sheet.comma)
            into.weights[members] = values.to_numpy(zero_copy_only=False)


def _places(text: pa.Array, names: Sequence[str]) -> Array:
    return np.asarray(pc.index_in(text, pa.array(names, pa.string())).to_numpy())


def grouped(options: TableOptions) -> bool:
    """Whether any site groups its rows."""
    return bool(options.group or any(rules.group for rules in options.sites.values()))


def weighted(options: TableOptions) -> bool:
    """Whether any site weights its rows."""
    return bool(options.weights or any(rules.weights for rules in options.sites.values()))


def scaled(block: Block) -> Array:
    """Which columns of a block are scaled; the others are 0 or 1."""
    numbers = np.zeros(block.width, dtype=bool)
    numbers[0] = block.kind != "text"
    return numbers


def recipe(plan: Survey, pieces: Mapping[str, list[Piece]], sites: Sequence[str]) -> dict[str, Any]:
    """How to convert a file to numbers, as JSON for predictions."""
    files = {site: [list(piece) for piece in own] for site, own in pieces.items()}
    rules = {name: asdict(plan.options.rules(name)) for name in sites}
    if all(rule == asdict(Rules()) for rule in rules.values()):
        rules = {}
    return {
        "label": plan.options.label,
        "classes": list(plan.classes),
        **({"task": "regression"} if plan.options.task == "regression" else {}),
        "missing": list(plan.options.words),
        "delimiter": plan.options.delimiter,
        "encoding": plan.options.encoding,
        "fingerprints": [
            [site_name(s.site or s.path.stem), s.path.name, file_fingerprint(s.path)]
            for s in plan.sheets
        ],
        **({"files": files} if files else {}),
        **({"rules": rules} if rules else {}),
        **(
            {"rare": {name: list(levels) for name, levels in plan.rare.items()}}
            if plan.rare
            else {}
        ),
        "blocks": [{**asdict(block), "levels": list(block.levels)} for block in plan.blocks],
    }
