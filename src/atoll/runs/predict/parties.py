"""Predictions if parties have columns of the same rows: one file per party, matched by ids.

This module reads all files and all halves of the network in one process, so the caller sees
the columns of every party. Nothing is private here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.federation import SERVER
from atoll.core.options import build, nearest
from atoll.data.dataset import file_fingerprint
from atoll.data.own.alignment import normalised, refuse_bad
from atoll.data.own.encoding import Block, encoded
from atoll.data.own.harmonise import Rules, harmonise
from atoll.data.own.profiles import rename_columns
from atoll.data.own.sheets import Sheet, batches, opened
from atoll.runs.predict.model import Array, Predictor, refuse_other
from atoll.runs.predict.output import Predicted, Writer, writing
from atoll.runs.predict.tables import labels, numbers

__all__ = ["Halves", "Lacking", "blocks", "predict"]

Lacking = Literal["drop", "fill"]  # how to treat an id without a row at some party
PIECE = 4096  # rows per batch of predictions


def _wrong(what: str, where: str | Path, remedy: str) -> UserError:
    return UserError(what, str(where), remedy, EXIT_DATA_MISSING)


@dataclass(frozen=True)
class Halves:
    """All halves of a split network in one process."""

    folder: Path
    variant: str = ""

    @cached_property
    def server(self) -> Predictor:
        """The server's half."""
        return Predictor(self.folder, SERVER, self.variant)

    @cached_property
    def clients(self) -> dict[str, Predictor]:
        """The half of each client."""
        return {id: Predictor(self.folder, id, self.variant) for id in self.server.recipe["sites"]}

    @torch.no_grad()
    def logits(self, rows: Mapping[str, Any]) -> torch.Tensor:
        """The logits of rows, from the columns of each client as its half reads them."""
        return self.server.outputs({id: self.clients[id].outputs(own) for id, own in rows.items()})

    def probabilities(self, columns: Mapping[str, Array]) -> Array:
        """The class probabilities of rows, from the encoded columns of each party."""
        rows = {id: self.clients[id].rows(torch.from_numpy(x)) for id, x in columns.items()}
        return np.asarray(self.server.final(self.logits(rows)).numpy())


@dataclass(frozen=True)
class _File:
    """A party's file of new rows."""

    party: str
    sheet: Sheet
    ids: dict[str, int]  # normalised id -> row
    written: list[str]  # ids as in the file
    x: Array  # (rows, numeric columns of the party)
    labels: list[str | None]  # empty if the file has no label


def predict(
    predictor: Predictor,
    assignments: Sequence[str],
    out: Path,
    lacking: Lacking = "drop",
    held_out: bool = False,
) -> Predicted:
    """Write a CSV with a prediction for each id: the class and all probabilities."""
    recipe = predictor.recipe
    assigned = _assigned(recipe, assignments, lacking == "fill")
    inputs = [path for _, path in assigned]
    with writing(out, [recipe["id"]], recipe, inputs, predictor.folder) as writer:
        counts = writer.counts
        files = [_read(recipe, party, path, counts) for party, path in assigned]
        present = {file.party for file in files}
        for party in [id for id in recipe["sites"] if id not in present]:
            counts.absent += tuple(f"{party}: {one.column}" for one in blocks(recipe, party))
        ids = _matched(files, lacking, counts)
        if held_out:
            tested = _held_out(recipe, files)
            ids = {id: text for id, text in ids.items() if id in tested}
        if not ids:
            raise _wrong("no rows to predict", files[0].sheet.path, "give files that share ids")
        runs = [predictor, *predictor.others]
        _predict([Halves(run.folder, run.variant) for run in runs], files, ids, writer)
    return counts


def _assigned(
    recipe: Mapping[str, Any], assignments: Sequence[str], some: bool
) -> list[tuple[str, Path]]:
    """The party of each file: from PARTY=FILE, else in the order of the run's parties."""
    every, clients = list(recipe["parties"]), list(recipe["sites"])
    paths = dict[str, Path]()
    pairs = [text.partition("=") for text in assignments if "=" in text and not Path(text).exists()]
    for party, _, path in pairs:
        who = [name for name in every if party in (name, name.partition("-")[2])]
        if len(who) != 1:
            what = f"several parties are called '{party}'" if who else f"no party '{party}'"
            raise UserError(what, "--data", nearest(party, every))
        if who[0] in paths:
            raise UserError(f"two files of '{who[0]}'", "--data", "give each party one")
        paths[who[0]] = Path(path)
    if len(pairs) == len(assignments):
        absent = [name for name in clients if name not in paths]
        if absent and not (some and paths):
            remedy = f"give --data {absent[0]}=FILE, or --lacking fill to do without"
            raise UserError(f"no file of '{absent[0]}'", "--data", remedy)
        return [(name, paths[name]) for name in every if name in paths]
    order = next((ids for ids in (every, clients) if len(ids) == len(assignments)), None)
    if pairs or order is None:
        remedy = f"give one for each in this order: {', '.join(every)}; or PARTY=FILE"
        raise UserError(f"{len(assignments)} files for {len(every)} parties", "--data", remedy)
    return [(name, Path(path)) for name, path in zip(order, assignments, strict=True)]


def _read(recipe: Mapping[str, Any], party: str, path: Path, counts: Predicted) -> _File:
    """Read a party's rows as numbers; check the names of its columns."""
    rules = build(Rules, recipe.get("rules", {}).get(party, {}), "recipe.json")
    sheet, key, label = rename_columns(opened(path), rules), recipe["id"], recipe["label"]
    own = blocks(recipe, party)
    columns = [block.column for block in own]
    if key not in sheet.columns:
        raise _wrong(f"no column '{key}' for the ids", path, nearest(key, sheet.columns))
    absent = [name for name in columns if name not in sheet.columns]
    if columns and len(absent) == len(columns):
        what = f"the file has none of the columns of '{party}'"
        raise _wrong(what, path, f"these are {', '.join(columns[:8])}; is the order right?")
    counts.absent += tuple(f"{party}: {name}" for name in absent)
    result, first, rare = Predicted(), 0, recipe.get("rare", {}).get(party, {})
    written, labels_of, pieces = list[str](), list[str | None](), list[Array]()
    for raw in batches(sheet, recipe["missing"]):
        batch = harmonise(raw, rules, label, sheet.comma)
        pieces.append(numbers(own, sheet, batch, first, result, rare))
        written += [value or "" for value in batch.column(key).to_pylist()]
        if label in sheet.columns and recipe.get("task") == "regression":
            labels_of += batch.column(label).to_pylist()
        elif label in sheet.columns:
            labels_of += labels(batch.column(label), range(len(batch)), recipe["classes"])
        first += len(batch)
    if not first:
        raise _wrong("a header and no rows", path, "give a file with rows")
    counts.unseen |= {f"{party}: {name}": count for name, count in result.unseen.items()}
    ids = normalised(written)
    refuse_bad(ids, str(path))
    rows = {id: row for row, id in enumerate(ids)}
    return _File(party, sheet, rows, written, np.concatenate(pieces), labels_of)


def blocks(recipe: Mapping[str, Any], party: str) -> list[Block]:
    """The columns of a party, with indices relative to its first column."""
    own = [Block.of(block) for block in recipe["parties"][party]]
    return [dataclasses.replace(block, start=block.start - own[0].start) for block in own]


def _matched(files: Sequence[_File], lacking: Lacking, counts: Predicted) -> dict[str, str]:
    """The ids to predict, as written, in order of appearance."""
    every: dict[str, str] = {}
    for file in files:
        for id, row in file.ids.items():
            every.setdefault(id, file.written[row])
    for file in files:
        if away := [text for id, text in every.items() if id not in file.ids]:
            counts.lacking[file.sheet.path.name] = away
    if lacking == "fill":
        return every
    return {id: text for id, text in every.items() if all(id in file.ids for file in files)}


def _held_out(recipe: Mapping[str, Any], files: Sequence[_File]) -> set[str]:
    """The ids of the rows that the run reserved for tests, from the active party's file."""
    active = [file for file in files if file.party == recipe["active"]]
    if not active:
        what = f"held-out rows need the file of '{recipe['active']}'"
        raise UserError(what, "--data", f"give --data {recipe['active']}=FILE too")
    path, ids = active[0].sheet.path, list(active[0].ids)
    by_name = {name: (count, tested) for name, count, tested in recipe["files"]}
    if path.name not in by_name:
        what = f"the run did not read a file of this name at '{recipe['active']}'"
        raise UserError(what, str(path), nearest(path.name, by_name))
    count, tested = by_name[path.name]
    if count != len(ids):
        what = f"the file has {len(ids):,} rows, the run read {count:,}"
        raise UserError(what, str(path), "give the file that the run was made with")
    for file in files:
        fingerprints = recipe.get("fingerprints", {}).get(file.party)  # older runs have none
        if fingerprints and file_fingerprint(file.sheet.path) not in fingerprints:
            refuse_other(file.sheet.path)
    return {ids[row] for row in tested}


def _predict(
    seeds: Sequence[Halves], files: Sequence[_File], ids: Mapping[str, str], writer: Writer
) -> None:
    """Write the predictions in chunks of rows; for several seeds, their mean."""
    by_id = dict[str, str | None]()
    for file in files:
        by_id |= dict(zip(file.ids, file.labels, strict=False))  # some rows may have no label
    for start in range(0, len(ids), PIECE):
        piece = list(islice(ids, start, start + PIECE))
        columns = _columns(seeds[0].server.recipe, files, piece)
        labels = [by_id.get(id) for id in piece] if by_id else None
        every = [halves.probabilities(columns) for halves in seeds]
        mean = every[0] if len(every) == 1 else np.mean(every, axis=0)
        writer.add([ids[id] for id in piece], mean, labels)


def _columns(
    recipe: Mapping[str, Any], files: Sequence[_File], ids: Sequence[str]
) -> dict[str, Array]:
    """Each party's columns for some ids; all values are missing if it has no row."""
    by_party = {file.party: file for file in files}
    columns = {}
    for party in recipe["sites"]:
        nothing = [encoded(b, pa.nulls(1, pa.string()), False) for b in blocks(recipe, party)]
        x = np.repeat(np.concatenate(nothing, 1), len(ids), 0)
        if party in by_party:
            file = by_party[party]
            places = [number for number, id in enumerate(ids) if id in file.ids]
            x[places] = file.x[[file.ids[ids[number]] for number in places]]
        columns[party] = x
    return columns
