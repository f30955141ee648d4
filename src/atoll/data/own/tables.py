"""The user's own tables as numbers: the second pass over the files, guided by their survey."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.data.dataset import Dataset, Layout, file_fingerprint
from atoll.data.own.encoding import Block, encoded
from atoll.data.own.profiles import TableOptions, plain_labels, site_name
from atoll.data.own.sheets import Sheet, batches
from atoll.data.own.survey import Survey, holds, survey, widths

__all__ = [
    "Arrays", "Survey", "TableOptions", "load", "read_arrays", "recipe", "scaled", "survey",
    "widths",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Piece = tuple[str, int, int]  # a file, its first row, its rows


@dataclass(frozen=True)
class Arrays:
    """The arrays that the second pass fills."""

    x: Array
    y: Array
    group: Array
    stage: Array

    def part(self, start: int, stop: int) -> "Arrays":
        """Some rows of all of them."""
        return Arrays(*(array[start:stop] for array in (self.x, self.y, self.group, self.stage)))


def load(name: str = "", **given: Any) -> Dataset:
    """The user's own tables as numbers; equal files give equal data."""
    plan = survey(**given)
    sites = [site.name for site in plan.sites]
    arrays, pieces = read_arrays(plan, sites, sum(site.rows for site in plan.sites))
    layout = Layout(
        np.repeat(holds(plan), [block.width for block in plan.blocks], axis=1),
        np.concatenate([scaled(block) for block in plan.blocks]),
        arrays.stage,
        plan.stages,
        recipe(plan, pieces),
    )
    columns = tuple(name for block in plan.blocks for name in block.names)
    source = "own files: " + ", ".join(sheet.path.name for sheet in plan.sheets)
    return Dataset(
        name or "own tables", "table", arrays.x, arrays.y, columns, plan.classes, source,
        group=arrays.group, groups=tuple(sites), layout=layout,
    )  # fmt: skip


def read_arrays(
    plan: Survey, sites: Sequence[str], rows: int
) -> tuple[Arrays, dict[str, list[Piece]]]:
    """The files as numbers; by site the pieces of which its rows are made, one for each stage."""
    width = sum(block.width for block in plan.blocks)
    integers = (np.zeros(rows, dtype=np.int64) for _ in range(3))
    arrays = Arrays(np.zeros((rows, width), dtype=np.float32), *integers)
    pieces: dict[str, list[Piece]] = {}
    total = 0
    for sheet in plan.sheets:
        before = total
        for batch in batches(sheet, plan.options.missing):
            _encode(plan, sites, sheet, batch, arrays.part(total, total + len(batch)))
            total += len(batch)
        if sheet.stage:
            piece = (sheet.path.name, before, total - before)
            pieces.setdefault(site_name(sheet.site), []).append(piece)
    return arrays, pieces


def _encode(
    plan: Survey, sites: Sequence[str], sheet: Sheet, batch: pa.RecordBatch, into: Arrays
) -> None:
    options = plan.options
    into.y[:] = _places(plain_labels(batch.column(options.label)), plan.classes)
    if options.stage:
        into.stage[:] = _places(plain_labels(batch.column(options.stage)), plan.stages)
    elif sheet.stage:
        into.stage[:] = plan.stages.index(sheet.stage)
    if options.site:
        raw = batch.column(options.site).dictionary_encode()
        known = np.array([sites.index(site_name(str(s))) for s in raw.dictionary.to_pylist()])
        into.group[:] = known[raw.indices.to_numpy(zero_copy_only=False)]
    else:
        into.group[:] = sites.index(site_name(sheet.site or sheet.path.stem))
    for block in plan.blocks:
        if block.column in sheet.columns:
            mine = np.ones(len(batch), dtype=bool)
            if block.site:
                mine = into.group == sites.index(block.site)
            if mine.any():
                text = batch.column(block.column).filter(pa.array(mine))
                columns = slice(block.start, block.start + block.width)
                into.x[mine, columns] = encoded(block, text, sheet.comma)


def _places(text: pa.Array, names: Sequence[str]) -> Array:
    return np.asarray(pc.index_in(text, pa.array(names, pa.string())).to_numpy())


def scaled(block: Block) -> Array:
    """Which columns of a block are numbers to be scaled; the others are 0 or 1."""
    numbers = np.zeros(block.width, dtype=bool)
    numbers[0] = block.kind != "text"
    return numbers


def recipe(plan: Survey, pieces: Mapping[str, list[Piece]]) -> dict[str, Any]:
    """How a file becomes numbers, as JSON: what a prediction needs."""
    files = {site: [list(piece) for piece in own] for site, own in pieces.items()}
    return {
        "label": plan.options.label,
        "classes": list(plan.classes),
        "missing": list(plan.options.missing),
        "delimiter": plan.options.delimiter,
        "encoding": plan.options.encoding,
        "fingerprints": [
            [site_name(s.site or s.path.stem), s.path.name, file_fingerprint(s.path)]
            for s in plan.sheets
        ],
        **({"files": files} if files else {}),
        "blocks": [{**asdict(block), "levels": list(block.levels)} for block in plan.blocks],
    }
