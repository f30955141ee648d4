"""Predictions where parties hold columns of the same rows: a file of each, matched by ids.

All files are read here, in one place, and so are all halves of the network: whoever asks sees the
columns of every party. Nothing of it is private.
"""

import csv
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

from atoll import methods
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import nearest
from atoll.data.dataset import Dataset, file_fingerprint
from atoll.data.own.alignment import normalised, refuse_bad
from atoll.data.own.encoding import Block, encoded
from atoll.data.own.sheets import Sheet, batches, opened
from atoll.data.scenario import Holding, Scenario
from atoll.data.site import filled
from atoll.learning.weights import without
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts
from atoll.runs.predict.tables import (
    Array,
    Predicted,
    Predictor,
    ended_state,
    growing,
    header,
    labels,
    numbers,
    recorded_on_cpu,
    refuse_other,
    refuse_taken,
    restored,
)

__all__ = ["Lacking", "predict_parties"]

Lacking = Literal["drop", "fill"]  # what becomes of an id that some party has no row of
PIECE = 4096  # rows that are predicted at once


def _wrong(what: str, where: str | Path, remedy: str) -> UserError:
    return UserError(what, str(where), remedy, EXIT_DATA_MISSING)


@dataclass(frozen=True)
class _Halves:
    """What a run left of a network that is cut, in one place."""

    folder: Path
    recipe: Mapping[str, Any]

    @cached_property
    def config(self) -> RunConfig:
        return recorded_on_cpu(self.folder)

    @cached_property
    def parts(self) -> tuple[Any, dict[str, Any]]:
        """The server and the clients as the run left them."""
        made = _bare(self.config, self.recipe)
        state = ended_state(self.folder)
        server, clients = made.server(), {id: made.client(id) for id in made.scenario.clients}
        server.restore(without("server", state))
        for id, client in clients.items():
            restored(client, id, without(f"client/{id}", state), self.folder)
        return server, clients

    def probabilities(self, columns: Mapping[str, Array]) -> Array:
        """The probability of each class for rows of which each party has its encoded columns."""
        answered = methods.load(self.config.method["name"]).answered
        assert answered is not None  # methods whose clients hold columns have it
        rows = {}
        for id, x in columns.items():
            scaling = torch.tensor(self.recipe["sites"][id]["scaling"], dtype=torch.float64)
            inputs = torch.from_numpy(x).to(getattr(torch, self.config.dtype))
            rows[id] = filled(inputs, scaling)
        with torch.no_grad():
            logits = answered(*self.parts, rows)
            return np.asarray(torch.softmax(logits.double(), -1).numpy())


def _bare(config: RunConfig, recipe: Mapping[str, Any]) -> Parts:
    """The parts of a run without its data: shapes alone."""
    sites, none = recipe["sites"], np.empty(0, dtype=np.int64)
    width = sum(len(one["own"]) for one in sites.values())
    one_row = np.zeros(1, dtype=np.int64)
    dataset = Dataset(
        "", "table", np.zeros((1, width), dtype=np.float32), one_row, (),
        tuple(recipe["classes"]), "",
    )  # fmt: skip
    stages = recipe["stages"]
    holdings = {
        id: tuple(
            Holding(one_row, none, np.array(one["own"] if s >= one["since"] else [], dtype=int))
            for s in range(stages)
        )
        for id, one in sites.items()
    }
    ids = tuple(sites)
    made = Scenario(ids, holdings, none, dict.fromkeys(ids, (none,)), ("all",), (0,), True)
    return Parts(config, dataset, made)


@dataclass(frozen=True)
class _File:
    """A party's file of new rows."""

    party: str
    sheet: Sheet
    ids: dict[str, int]  # as they are compared -> row
    written: list[str]  # as the file has them
    x: Array  # (rows, the party's columns of numbers)
    labels: list[str | None]  # none where the file has no label


def predict_parties(
    predictor: Predictor,
    given: Sequence[str],
    out: Path,
    lacking: Lacking = "drop",
    held_out: bool = False,
) -> Predicted:
    """Write a CSV with a prediction for each id: the class, every probability."""
    recipe = predictor.recipe
    done = Predicted()
    assigned = _assigned(recipe, given, lacking == "fill")
    inputs = [path for _, path in assigned]
    refuse_taken(out, inputs, predictor.folder, header(recipe["id"], recipe))
    files = [_read(recipe, party, path, done) for party, path in assigned]
    there = {file.party for file in files}
    for party in [id for id in recipe["sites"] if id not in there]:
        done.absent += tuple(f"{party}: {block.column}" for block in _blocks(recipe, party))
    ids = _matched(files, lacking, done)
    if held_out:
        kept = _held_out(recipe, files)
        ids = {id: text for id, text in ids.items() if id in kept}
    if not ids:
        raise _wrong("no rows to predict", files[0].sheet.path, "give files that share ids")
    _write(_Halves(predictor.folder, recipe), files, ids, out, done)
    return done


def _assigned(
    recipe: Mapping[str, Any], given: Sequence[str], some: bool
) -> list[tuple[str, Path]]:
    """Whose each file is: said as PARTY=FILE, or else in the order of the run's parties."""
    every, clients = list(recipe["parties"]), list(recipe["sites"])
    found = dict[str, Path]()
    named = [text.partition("=") for text in given if "=" in text and not Path(text).exists()]
    for party, _, path in named:
        who = [name for name in every if party in (name, name.partition("-")[2])]
        if len(who) != 1:
            what = f"several parties are called '{party}'" if who else f"no party '{party}'"
            raise UserError(what, "--data", nearest(party, every))
        if who[0] in found:
            raise UserError(f"two files of '{who[0]}'", "--data", "give each party one")
        found[who[0]] = Path(path)
    if len(named) == len(given):
        absent = [name for name in clients if name not in found]
        if absent and not (some and found):
            remedy = f"give --data {absent[0]}=FILE, or --lacking fill to do without"
            raise UserError(f"no file of '{absent[0]}'", "--data", remedy)
        return [(name, found[name]) for name in every if name in found]
    order = next((known for known in (every, clients) if len(known) == len(given)), None)
    if named or order is None:
        remedy = f"give one for each in this order: {', '.join(every)}; or PARTY=FILE"
        raise UserError(f"{len(given)} files for {len(every)} parties", "--data", remedy)
    return [(name, Path(path)) for name, path in zip(order, given, strict=True)]


def _read(recipe: Mapping[str, Any], party: str, path: Path, done: Predicted) -> _File:
    """A party's rows as numbers, its columns checked by their names."""
    sheet, key, label = opened(path), recipe["id"], recipe["label"]
    blocks = _blocks(recipe, party)
    columns = [block.column for block in blocks]
    if key not in sheet.columns:
        raise _wrong(f"no column '{key}' for the ids", path, nearest(key, sheet.columns))
    absent = [name for name in columns if name not in sheet.columns]
    if columns and len(absent) == len(columns):
        what = f"the file has none of the columns of '{party}'"
        raise _wrong(what, path, f"these are {', '.join(columns[:8])}; is the order right?")
    done.absent += tuple(f"{party}: {name}" for name in absent)
    mine, first, width = Predicted(), 0, sum(block.width for block in blocks)
    written, told, pieces = list[str](), list[str | None](), list[Array]()
    for batch in batches(sheet, recipe["missing"]):
        pieces.append(numbers(blocks, width, sheet, batch, first, mine))
        written += [value or "" for value in batch.column(key).to_pylist()]
        if label in sheet.columns:
            told += labels(batch.column(label), range(len(batch)), recipe["classes"])
        first += len(batch)
    if not first:
        raise _wrong("a header and no rows", path, "give a file with rows")
    done.unseen |= {f"{party}: {name}": count for name, count in mine.unseen.items()}
    ids = normalised(written)
    refuse_bad(ids, str(path))
    rows = {id: row for row, id in enumerate(ids)}
    return _File(party, sheet, rows, written, np.concatenate(pieces), told)


def _blocks(recipe: Mapping[str, Any], party: str) -> list[Block]:
    """The columns of a party, counted from its own first one."""
    found = [Block.of(block) for block in recipe["parties"][party]]
    return [dataclasses.replace(block, start=block.start - found[0].start) for block in found]


def _matched(files: Sequence[_File], lacking: Lacking, done: Predicted) -> dict[str, str]:
    """The ids to answer, as they are written, in the order in which they come."""
    every: dict[str, str] = {}
    for file in files:
        for id, row in file.ids.items():
            every.setdefault(id, file.written[row])
    for file in files:
        if away := [text for id, text in every.items() if id not in file.ids]:
            done.lacking[file.sheet.path.name] = away
    if lacking == "fill":
        return every
    return {id: text for id, text in every.items() if all(id in file.ids for file in files)}


def _held_out(recipe: Mapping[str, Any], files: Sequence[_File]) -> set[str]:
    """The ids of the rows that the run kept for its tests, by the active party's file."""
    active = [file for file in files if file.party == recipe["active"]]
    if not active:
        what = f"held-out rows are told by the file of '{recipe['active']}'"
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
        known = recipe.get("fingerprints", {}).get(file.party)  # older runs have none
        if known and file_fingerprint(file.sheet.path) not in known:
            refuse_other(file.sheet.path)
    return {ids[row] for row in tested}


def _write(
    halves: _Halves, files: Sequence[_File], ids: Mapping[str, str], out: Path, done: Predicted
) -> None:
    """Predict a piece of the rows at a time."""
    classes, known = halves.recipe["classes"], dict[str, str | None]()
    for file in files:
        known |= dict(zip(file.ids, file.labels, strict=False))  # some have no label at all
    done.rows = len(ids)
    with growing(out) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header(halves.recipe["id"], halves.recipe))
        for start in range(0, len(ids), PIECE):
            piece = list(islice(ids, start, start + PIECE))
            found = halves.probabilities(_columns(halves.recipe, files, piece))
            said = [classes[place] for place in found.argmax(1)]
            for id, name, row in zip(piece, said, found, strict=True):
                writer.writerow([ids[id], name, *(f"{p:.6f}" for p in row)])
            if known:
                done.judge(said, [known.get(id) for id in piece], classes)


def _columns(
    recipe: Mapping[str, Any], files: Sequence[_File], ids: Sequence[str]
) -> dict[str, Array]:
    """Each party's columns for some ids; all of them are missing where it has no row."""
    by_party = {file.party: file for file in files}
    found = {}
    for party in recipe["sites"]:
        nothing = [encoded(b, pa.nulls(1, pa.string()), False) for b in _blocks(recipe, party)]
        x = np.repeat(np.concatenate(nothing, 1), len(ids), 0)
        if party in by_party:
            file = by_party[party]
            there = [number for number, id in enumerate(ids) if id in file.ids]
            x[there] = file.x[[file.ids[ids[number]] for number in there]]
        found[party] = x
    return found
