"""Predictions for own tables: converts a file to the columns that a site's model reads."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import build, nearest
from atoll.data.dataset import file_fingerprint
from atoll.data.own.encoding import LARGEST, Block, as_dates, as_numbers, encoded
from atoll.data.own.harmonise import Rules, harmonise
from atoll.data.own.profiles import rename_columns
from atoll.data.own.sheets import Sheet, batches, line_of, opened
from atoll.runs.predict.model import Array, Predictor, refuse_other
from atoll.runs.predict.output import Predicted, Writer, writing

__all__ = ["blocks", "labels", "numbers", "predict", "probabilities", "rules_of"]


def blocks(predictor: Predictor) -> list[Block]:
    """The columns of a file that the site's model reads, in the model's order."""
    recipe = predictor.recipe
    if "parties" in recipe:
        what = "parties hold columns of the same rows here"
        raise UserError(what, str(predictor.folder), "give --data for each party")
    if "blocks" not in recipe:
        what = "this run was not made on your own tables"
        remedy = "predictions of tables need data = { files = [...] } or { parties = [...] }"
        raise UserError(what, str(predictor.folder), remedy)
    places = {*recipe["common"], *predictor.about["own"]}
    every = (Block.of(block) for block in recipe["blocks"])
    return sorted((one for one in every if one.start in places), key=lambda block: block.start)


def predict(predictor: Predictor, file: Path, out: Path, held_out: bool = False) -> Predicted:
    """Write a CSV with a prediction for each row: its number, the class, all probabilities.

    In regression the predicted number replaces class and probabilities.
    """
    read, recipe = blocks(predictor), predictor.recipe
    columns = {block.column for block in read}
    rules = rules_of(predictor)
    opened_file = opened(file, *(recipe.get(key, "") for key in ("delimiter", "encoding")))
    sheet = rename_columns(opened_file, rules)
    first = ["row", rules.id] if rules.id in sheet.columns else ["row"]
    with writing(out, first, recipe, [file], predictor.folder) as writer:
        chosen = set(_held_out(predictor, sheet).tolist()) if held_out else None
        absent = tuple(sorted(columns - {*sheet.columns}))
        if len(absent) == len(columns):
            raise UserError(
                "the file has none of the columns that the model reads", str(file),
                f"it reads {', '.join(sorted(columns)[:8])}",
            )  # fmt: skip
        writer.counts.absent = absent
        _predict(predictor, sheet, rules, writer, chosen)
    return writer.counts


def probabilities(predictor: Predictor, file: Path) -> Array:
    """The class probabilities of each row of a file, in the order of the recipe's classes."""
    recipe, rules = predictor.recipe, rules_of(predictor)
    sheet = rename_columns(opened(file), rules)
    parts = []
    for first, raw in _pieces(sheet, recipe["missing"]):
        batch = harmonise(raw, rules, recipe["label"], sheet.comma)
        x = numbers(blocks(predictor), sheet, batch, first, Predicted(), recipe.get("rare", {}))
        parts.append(predictor.probabilities(x))
    return np.concatenate(parts)


def rules_of(predictor: Predictor) -> Rules:
    """The harmonisation rules of the site's file; older runs have none."""
    by_site = predictor.recipe.get("rules", {})
    usual = by_site.get(predictor.site, next(iter(by_site.values()), {}))
    return build(Rules, predictor.about.get("rules", usual), "recipe.json")


def _predict(
    predictor: Predictor, sheet: Sheet, rules: Rules, writer: Writer, chosen: set[int] | None
) -> None:
    """Write the predictions, one chunk of the file at a time."""
    recipe, label = predictor.recipe, predictor.recipe["label"]
    rare = recipe.get("rare", {})
    for first, raw in _pieces(sheet, recipe["missing"]):
        batch = harmonise(raw, rules, label, sheet.comma)
        places = [i for i in range(len(batch)) if chosen is None or first + i in chosen]
        if not places:
            continue
        x = numbers(blocks(predictor), sheet, batch, first, writer.counts, rare)[places]
        answers = None
        if label in sheet.columns:
            answers = labels(batch.column(label), places, recipe["classes"])
        ids = None
        if rules.id in sheet.columns:
            ids = batch.column(rules.id).take(pa.array(places)).to_pylist()
        rows = [first + place + 1 for place in places]
        writer.add(rows, predictor.probabilities(x), answers, ids)
    if not writer.counts.rows:
        remedy = "give a file with rows"
        raise UserError("no rows to predict", str(sheet.path), remedy, EXIT_DATA_MISSING)


def _held_out(predictor: Predictor, sheet: Sheet) -> Array:
    """The rows of the file that the run reserved for tests."""
    counted = sum(len(batch) for batch in batches(sheet, ()))
    files = _read_files(predictor, sheet)
    if counted not in [rows for _, rows, _ in files]:
        raise UserError(
            f"the file has {counted:,} rows, the run read {files[-1][1]:,}",
            str(sheet.path), "give the file that the run was made with",
        )  # fmt: skip
    fingerprint = file_fingerprint(sheet.path)
    same = [first for first, rows, mark in files if rows == counted and mark in ("", fingerprint)]
    if not same:
        refuse_other(sheet.path)
    tested = np.unique(np.concatenate([np.array(part) for part in predictor.about["held_out"]]))
    return tested[(tested >= same[-1]) & (tested < same[-1] + counted)] - same[-1]


def _read_files(predictor: Predictor, sheet: Sheet) -> list[tuple[int, int, str]]:
    """Where such a file may begin among its site's rows, how many it has, its fingerprint."""
    site, recipe = predictor.site, predictor.recipe
    read = recipe.get("fingerprints", [])  # older runs have none
    prints = [mark for name, _, mark in read if name == site or len(read) == 1]
    pieces = recipe.get("files", {}).get(site)
    if not pieces:
        return [(0, int(predictor.about["rows"]), *(prints or [""]))]
    prints = prints or [""] * len(pieces)
    files = [
        (start - pieces[0][1], rows, mark)
        for (name, start, rows), mark in zip(pieces, prints, strict=True)
        if name == sheet.path.name
    ]
    if not files:
        what = f"the run did not read a file of this name at '{site}'"
        names = [name for name, _, _ in pieces]
        raise UserError(what, str(sheet.path), nearest(sheet.path.name, names))
    return files


def labels(column: pa.Array, places: Sequence[int], classes: Sequence[str]) -> list[str | None]:
    """The labels of some rows as the classes are called; 1 and 1.0 are one unless both are there.

    Tables call a class 1 whose labels are 1.0; the parties of one table keep what is written.
    """
    by_spelling = dict(zip(_whole(pa.array(classes, pa.string())), classes, strict=True))
    by_spelling |= {name: name for name in classes}
    written = column.to_pylist()
    names = [
        by_spelling.get(a, by_spelling.get(b, a))
        for a, b in zip(written, _whole(column), strict=True)
    ]
    return [names[place] for place in places]


def _whole(text: pa.Array) -> list[str | None]:
    """Text in which 1.0 becomes 1."""
    whole: list[str | None] = pc.replace_substring_regex(
        text, r"^(-?[0-9]+)\.0+$", r"\1"
    ).to_pylist()
    return whole


def _pieces(sheet: Sheet, missing: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    first = 0
    for batch in batches(sheet, missing):
        yield first, batch
        first += len(batch)


def numbers(
    blocks: Sequence[Block],
    sheet: Sheet,
    batch: pa.RecordBatch,
    first: int,
    counts: Predicted,
    rare: Mapping[str, Sequence[str]] | None = None,
) -> Array:
    """Some columns of a file as a numeric matrix, for the rows of a chunk.

    `rare` maps columns to levels that the run read but that have no separate column.
    """
    parts = [np.zeros((len(batch), 0), dtype=np.float32)]
    for block in blocks:
        if block.column in sheet.columns:
            text = batch.column(block.column)
            _fits(block, text, sheet, first)
            _unseen(block, text, counts, (rare or {}).get(block.column, ()))
        else:
            text = pa.nulls(len(batch), pa.string())
        parts.append(encoded(block, text, sheet.comma))
    return np.concatenate(parts, 1, dtype=np.float32)


def _fits(block: Block, text: pa.Array, sheet: Sheet, first: int) -> None:
    """Raise an error with the line if a value is not a number, or too large."""
    if block.kind == "text":
        return
    values = as_numbers(text, sheet.comma) if block.kind == "number" else as_dates(text)
    wrong = pc.and_(text.is_valid(), values.is_null()).to_numpy(zero_copy_only=False)
    large = np.abs(pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)) > LARGEST
    if not (wrong | large).any():
        return
    place = int(np.argmax(wrong | large))
    value, where = str(text[place].as_py())[:40], line_of(sheet, first + place)
    if large[place]:
        what = f"'{value}' in the column '{block.column}' is too large a number"
        raise UserError(what, where, "write it in another unit", EXIT_DATA_MISSING)
    what = f"'{value}' in the column '{block.column}' is no {block.kind}"
    raise UserError(what, where, "mend it, or leave it empty", EXIT_DATA_MISSING)


def _unseen(block: Block, text: pa.Array, counts: Predicted, rare: Sequence[str]) -> None:
    if block.kind == "text":
        seen = pc.is_in(text, pa.array([*block.levels, *rare], pa.string()))
        count = int(pc.sum(pc.and_(text.is_valid(), pc.invert(seen))).as_py() or 0)
        if count:
            counts.unseen[block.column] = counts.unseen.get(block.column, 0) + count
