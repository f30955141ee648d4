"""`atoll init` always writes a config; `atoll inspect` accepts it, or it says what is wrong."""

import csv
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from atoll.cli.data import drafted, inspect_command
from atoll.core.errors import UserError
from atoll.runs.draft import Wish

NAMES = (
    "age", "Age", "chol", "Chol", "patient_nbr", "mrn", "cp", "icd", "seen", "ef", "note",
    "trest_bps", "trestbps", "smoker", "x y", "ä,b", 'q"t', "1", "site", "weights",
)  # fmt: skip
COLUMNS = {  # how the cells of a column are drawn
    "number": st.floats(-1e4, 1e4).map(lambda value: f"{value:.2f}"),
    "whole": st.integers(-5, 200).map(str),
    "code": st.integers(0, 4).map(str),
    "sentinel": st.one_of(st.integers(30, 80).map(str), st.sampled_from(["999", "-9", "0"])),
    "unit": st.integers(0, 100).map(lambda value: f"{value}%"),
    "date": st.dates().map(str),
    "day": st.dates().map(lambda day: day.strftime("%d.%m.%Y")),
    "month": st.dates().map(lambda day: day.strftime("%m/%d/%y")),
    "icd": st.sampled_from(["250.83", "V27", "414", "428.0", "E909"]),
    "word": st.sampled_from(["m", "f", "M", " f ", "män"]),
    "text": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    "mixed": st.one_of(st.integers(0, 99).map(str), st.sampled_from(["<5", "n.d.", "1e40", "?"])),
    "huge": st.sampled_from(["1e31", "3", "4"]),
}
KEYS = ("row", "person")  # columns that name rows and people
LABELS = (
    ("0", "1"),
    ("yes", "no"),
    ("Yes", "No"),
    ("1.0", "0.0"),
    ("a", "b", "c"),
    ("x",),
    ("ill", "well"),
)


@st.composite
def table(draw: st.DrawFn) -> list[list[str]]:
    """The names of columns, then rows; the label is the last column."""
    rows = draw(st.sampled_from([3, 12, 40, 40]))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    columns = []
    for name in names:
        kind = draw(st.sampled_from([*COLUMNS, *KEYS]))
        if kind in KEYS:
            step = 3 if kind == "person" else 1
            columns.append([f"{name[0]}{1000 + row // step}" for row in range(rows)])
        else:
            some = draw(st.lists(COLUMNS[kind], min_size=1, max_size=9))
            columns.append([some[row % len(some)] for row in range(rows)])
    words = draw(st.sampled_from(LABELS))
    gaps = draw(st.sampled_from([0, 0, 0, 7]))  # every seventh row has no label
    labels = [words[row % len(words)] for row in range(rows)]
    columns.append(["" if gaps and row % gaps == 5 else label for row, label in enumerate(labels)])
    label = draw(st.sampled_from(["outcome", "outcome", "Outcome"]))
    return [[*names, label], *map(list, zip(*columns, strict=True))]


def written(tables: list[list[list[str]]], signs: list[str]) -> tuple[str, ...]:
    files = []
    for number, (rows, sign) in enumerate(zip(tables, signs, strict=True)):
        files.append(f"site{number}.csv")
        with Path(files[-1]).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=sign).writerows(rows)
    return tuple(files)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_inspect_accepts_or_the_config_says_what_is_wrong(data: st.DataObject) -> None:
    tables = data.draw(st.lists(table(), min_size=1, max_size=3))
    signs = [data.draw(st.sampled_from([",", ";", "\t"])) for _ in tables]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            check(written(tables, signs))
        finally:
            os.chdir(before)


def check(files: tuple[str, ...]) -> None:
    try:
        config, problem = drafted(Wish(files, "outcome", "chfl"))
    except UserError:  # a file that no config could make readable
        event("unreadable")
        return
    values: dict[str, Any] = tomllib.loads(config)
    assert values["data"]["files"] == [*files]
    assert ("# Fix this first: " in config) == bool(problem)
    Path("run.toml").write_text(config, encoding="utf-8")
    complaint = ""
    try:
        inspect_command("run.toml")
    except UserError as error:
        complaint = str(error)
    assert complaint == problem
    event("annotated" if problem else "accepted")
