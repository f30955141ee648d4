"""Predictions with an exported model.onnx; needs Python, numpy and onnxruntime, nothing else.

    python predict.py FILE [-o predictions.csv] [--model model.onnx]

FILE is a CSV file of rows, a CSV or JSONL file of texts, or an .npz file with an array `x`: images
as uint8 of the size that the model reads, or numbers in the order of the model's `columns`. What
the model reads is in the metadata of model.onnx.
"""

import argparse
import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Cells = dict[str, list[str | None]]  # values by column; None: missing

NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,2})?", re.ASCII)
COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+", re.ASCII)
DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?Z?)?", re.ASCII
)
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
FORMATS = {
    "day first": ("%d.%m.%Y", "%d/%m/%Y", "%d-%m-%Y", "%d.%m.%y", "%d/%m/%y", "%d-%m-%y"),
    "month first": ("%m/%d/%Y", "%m-%d-%Y", "%m.%d.%Y", "%m/%d/%y", "%m-%d-%y", "%m.%d.%y"),
}
FILTERS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'  # what is no part of a word
LARGEST = 1e30
ROWS = 1024  # that are predicted at a time


def fail(what: str) -> SystemExit:
    """The end of the command."""
    return SystemExit(f"error: {what}")


# How a CSV file is written


def encoding_of(raw: bytes) -> str:
    """UTF-16 by its mark, UTF-8 if all of the file is, else Windows' or ISO's Latin 1."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for name in ("utf-8", "cp1252"):
        try:
            raw.decode(name)
            return name
        except UnicodeDecodeError:
            continue
    return "latin-1"


def delimiter_of(text: str) -> str:
    """The most frequent delimiter of the first line outside of quotes."""
    bare = re.sub(r'"[^"]*"', "", text.lstrip().split("\n", 1)[0])
    signs = (",", ";", "\t", "|")
    return max(signs, key=lambda sign: (bare.count(sign), -signs.index(sign)))


def csv_rows(path: Path, steps: dict[str, Any]) -> tuple[list[list[str]], str]:
    """The rows of a CSV file, the names of columns first, and its delimiter."""
    raw = path.read_bytes()
    text = raw.decode(steps["encoding"] or encoding_of(raw)).lstrip("\ufeff")
    delimiter = steps["delimiter"] or delimiter_of(text)
    delimiter = "\t" if delimiter in ("tab", "\\t") else delimiter
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = [cells for cells in lines if cells]
    for number, cells in enumerate(rows):
        if len(cells) != len(rows[0]):
            raise fail(f"row {number} has {len(cells)} cells, the header has {len(rows[0])}")
    if len(rows) < 2:
        raise fail(f"{path} has no rows")
    return rows, delimiter


# Values


def number_of(text: str | None, comma: bool) -> float | None:
    """A number, or None; true and false are 1 and 0."""
    if text is None:
        return None
    text = {"true": "1", "false": "0"}.get(text.lower(), text)
    if comma and COMMA.fullmatch(text):
        text = text.replace(",", ".")
    return float(text) if NUMBER.fullmatch(text) else None


def days_of(text: str | None) -> float | None:
    """Days since 1970 of a date as 2024-03-31 or 2024-03-31 12:30, or None."""
    if text is None or not DATE.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text.removesuffix("Z")[:26])
    except ValueError:
        return None
    since = moment - datetime(1970, 1, 1)
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return microseconds / (1e6 * 86_400.0)


def usual_date(text: str | None, form: str) -> str | None:
    """A date of some format as 2024-03-31; other text stays."""
    if text is None or not form:
        return text
    for one in FORMATS.get(form, (form,)):
        for clock in ("",) if re.search("%[HIcX]", one) else TIMES:
            try:
                moment = datetime.strptime(text, one + clock).replace(tzinfo=None)
            except ValueError:
                continue
            timed = clock or re.search("%[HIcX]", one)
            return moment.isoformat() if timed else moment.date().isoformat()
    return text


# Harmonising, as the run did it: codes of missing values, units, dates


def without_codes(column: list[str | None], codes: list[str], comma: bool) -> list[str | None]:
    """A column without the codes of missing values."""
    numbers = {number_of(code, comma) for code in codes} - {None}
    return [None if text in codes or number_of(text, comma) in numbers else text for text in column]


def plain(text: str) -> str:
    """A value as text; 1.0 is 1."""
    return re.sub(r"^(-?[0-9]+)\.0+$", r"\1", text)


def converted(column: list[str | None], unit: dict[str, Any], comma: bool) -> list[str | None]:
    """A column in another unit; other text stays."""
    values: list[str | None] = []
    for text in column:
        bare = text
        if text is not None and unit["suffix"] and text.endswith(unit["suffix"]):
            bare = text[: -len(unit["suffix"])].strip()
        value = number_of(bare, comma)
        values.append(text if value is None else repr(value * unit["factor"] + unit["offset"]))
    return values


def dated(cells: Cells, name: str, rules: dict[str, Any]) -> list[str | None]:
    """Dates in the usual form, or days since a date or another column."""
    rule = rules[name]
    dates = [usual_date(text, rule["format"]) for text in cells[name]]
    since = rule["since"]
    if not since:
        return dates
    if since in cells:
        form = rules.get(since, {"format": ""})["format"]
        starts = [days_of(usual_date(text, form)) for text in cells[since]]
    else:
        starts = [days_of(since)] * len(dates)
    values: list[str | None] = []
    for text, date, start in zip(cells[name], dates, starts, strict=True):
        days = days_of(date)
        if days is None:
            values.append(text)
        else:
            values.append(None if start is None else repr(days - start))
    return values


def harmonised(cells: Cells, rules: dict[str, Any], comma: bool) -> Cells:
    """The columns under the rules of the site."""
    cells = dict(cells)
    for name in rules["missing"].keys() & cells.keys():
        cells[name] = without_codes(cells[name], rules["missing"][name], comma)
    values = rules.get("values", {})  # runs before 0.2 have none
    for name in values.keys() & cells.keys():
        column = [None if text is None else plain(text) for text in cells[name]]
        cells[name] = [None if text is None else values[name].get(text, text) for text in column]
    for name in rules["units"].keys() & cells.keys():
        cells[name] = converted(cells[name], rules["units"][name], comma)
    dates = {
        name: dated(cells, name, rules["dates"]) for name in rules["dates"].keys() & cells.keys()
    }
    return {**cells, **dates}


# Files as what the model reads: names of rows, and inputs


def block_columns(block: dict[str, Any], column: list[str | None], comma: bool) -> Array:
    """A column as columns of numbers: itself or its levels, and whether it is missing."""
    levels = {level: place for place, level in enumerate(block["levels"])}
    text_kind = block["kind"] == "text"
    width = (len(levels) if text_kind else 1) + block["missing"]
    x = np.zeros((len(column), width), dtype=np.float32)
    for row, text in enumerate(column):
        if text_kind:
            if text in levels:
                x[row, levels[text]] = 1
            continue
        value = number_of(text, comma) if block["kind"] == "number" else days_of(text)
        if text is not None and (value is None or abs(value) > LARGEST):
            raise fail(f"row {row + 1}: '{text[:40]}' in '{block['column']}' is no {block['kind']}")
        x[row, 0] = np.nan if value is None else value - block["offset"]
    if block["missing"]:
        x[:, -1] = [text is None for text in column]
    return x


def table(path: Path, steps: dict[str, Any]) -> tuple[dict[str, list[str]], Array]:
    """The rows of a CSV file as numbers."""
    rows, delimiter = csv_rows(path, steps)
    rules, comma = steps["rules"], delimiter != ","
    names = [re.sub(r"\s*[\r\n]\s*", " ", name.strip()) for name in rows[0]]
    names = [rules["rename"].get(name, name) for name in names]
    void = {"", *steps["missing"]}
    cells: Cells = {}
    for name, column in zip(names, zip(*rows[1:], strict=True), strict=True):
        stripped = [text.strip() for text in column]
        cells[name] = [None if text in void else text for text in stripped]
    cells = harmonised(cells, rules, comma)
    absent = [block["column"] for block in steps["blocks"] if block["column"] not in cells]
    if len(absent) == len(steps["blocks"]):
        raise fail(f"{path} has none of the columns that the model reads: {', '.join(absent[:8])}")
    for name in absent:
        sys.stderr.write(f"the file has no column '{name}': taken as missing\n")
    nothing: list[str | None] = [None] * (len(rows) - 1)
    parts = [block_columns(b, cells.get(b["column"], nothing), comma) for b in steps["blocks"]]
    first = {"row": [str(number) for number in range(1, len(rows))]}
    if rules["id"] in cells:
        first[rules["id"]] = [text or "" for text in cells[rules["id"]]]
    return first, np.concatenate(parts, 1, dtype=np.float32)


def texts(path: Path, steps: dict[str, Any]) -> tuple[dict[str, list[str]], Array]:
    """The texts of a CSV or JSONL file as numbers of words."""
    rename, id = steps["rules"]["rename"], steps["rules"]["id"]
    name = rename.get(steps["text"], steps["text"])
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    else:
        cells, _ = csv_rows(path, {**steps, "delimiter": "\t"} if path.suffix == ".tsv" else steps)
        rows = [dict(zip(cells[0], one, strict=True)) for one in cells[1:]]
    rows = [{rename.get(key, key): value for key, value in row.items()} for row in rows]
    if not any(name in row for row in rows):
        raise fail(f"{path} has no column '{name}'")
    entries = [row.get(name) or "" for row in rows]
    numbers = {word: number for number, word in enumerate(steps["words"]) if number > 1}
    signs = str.maketrans(FILTERS, " " * len(FILTERS))
    x = np.zeros((len(entries), steps["shape"][0]), dtype=np.int32)
    for row, text in zip(x, entries, strict=True):
        tokens = [numbers.get(token, 1) for token in text.lower().translate(signs).split()]
        row[: len(tokens)] = tokens[: len(row)]
    first = {"row": [str(number) for number in range(1, len(x) + 1)]}
    if id and any(id in row for row in rows):
        first[id] = [str(row[id]).strip() if row.get(id) is not None else "" for row in rows]
    return first, x


def arrays(path: Path, steps: dict[str, Any]) -> tuple[dict[str, list[str]], Array]:
    """The array `x` of an .npz file: images, or rows of numbers."""
    if path.suffix != ".npz":
        raise fail(f"{path} is no .npz file with an array x")
    with np.load(path, allow_pickle=False) as archive:
        x: Array = archive["x"]
    shape = tuple(steps["shape"])
    if steps["kind"] == "image":
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
        if shape[0] == 3 and x.shape[1] == 1:
            x = x.repeat(3, axis=1)
        first = "image"
    else:
        x, first = x.astype(np.float32), "row"
    if x.shape[1:] != shape or (steps["kind"] == "image" and x.dtype != np.uint8):
        raise fail(f"x has {x.dtype} of {x.shape[1:]}, the model reads {steps['kind']} of {shape}")
    return {first: [str(number) for number in range(1, len(x) + 1)]}, np.ascontiguousarray(x)


def outputs(session: Any, x: Array) -> Iterator[Array]:
    """The probability of each class, or the predicted number, row by row."""
    for start in range(0, len(x), ROWS):
        yield from session.run(None, {"x": x[start : start + ROWS]})[0]


def main() -> None:
    """Write a CSV file with a prediction for each row."""
    import onnxruntime  # noqa: PLC0415 - this file is imported without it too

    parser = argparse.ArgumentParser(description="Predict with model.onnx.")
    parser.add_argument("file", type=Path, help="rows, texts or arrays")
    parser.add_argument("-o", "--out", type=Path, default=Path("predictions.csv"))
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name("model.onnx"))
    options = parser.parse_args()
    session = onnxruntime.InferenceSession(options.model, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    classes, steps = (json.loads(metadata[key]) for key in ("classes", "preprocessing"))
    if options.out.resolve() == options.file.resolve():
        raise fail("the predictions would replace the file")
    read = texts if steps["kind"] == "text" else table if steps.get("blocks") else arrays
    first, x = read(options.file, steps)
    with options.out.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        number = steps.get("task") == "regression"
        further = [] if number else [f"p {name}" for name in classes]
        lines.writerow([*first, "prediction", *further])
        for names, row in zip(zip(*first.values(), strict=True), outputs(session, x), strict=True):
            if number:
                lines.writerow([*names, f"{row[0]:.6g}"])
            else:
                lines.writerow([*names, classes[int(row.argmax())], *(f"{p:.6f}" for p in row)])
    sys.stdout.write(f"{len(x):,} predictions in {options.out}\n")


if __name__ == "__main__":
    main()
