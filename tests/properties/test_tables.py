"""Any table: a result, or one clear error; never a traceback."""

import csv
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.cli.data import drafted
from atoll.core.errors import UserError
from atoll.data.own import tables
from atoll.data.own.sheets import opened
from atoll.engines.local import local_engine
from atoll.report import page
from atoll.runs.config import resolve
from atoll.runs.draft import Wish
from atoll.runs.execute import execute
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.tables import predict

ANY = st.characters(exclude_categories=["Cs"])  # all of Unicode but halves of pairs
NAMES = st.text(ANY, max_size=8)
WORDS = st.text(ANY, max_size=6)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "whole": st.integers(-1000, 1000),
    "number": st.floats(width=32),
    "word": WORDS,
    "level": st.sampled_from(["ja", "nein", "Ja", ""]),
    "date": st.dates(),
    "moment": st.datetimes(),
    "truth": st.booleans(),
    "gap": st.sampled_from(["", "NA", "?"]),
    "mixed": st.one_of(st.integers(), WORDS, st.just("")),
}
LABELS = st.sampled_from([["a", "b"], ["0", "1.0", "2"], ["x", ""], ["only"], ["是", "否"]])


@st.composite
def sites(draw: st.DrawFn) -> list[list[list[str]]]:
    """One to three files, each a header and rows; a column `shared` of one kind is in all."""
    labels, found = draw(LABELS), []
    shared = draw(st.sampled_from(sorted(CELLS)))
    for _ in range(draw(st.integers(1, 3))):
        others = draw(st.lists(st.tuples(NAMES, st.sampled_from(sorted(CELLS))), max_size=3))
        plan = [("shared", shared), *others]
        count = draw(st.sampled_from([0, 1, 5, 8, 25]))
        rows = [
            [*(str(draw(CELLS[kind])) for _, kind in plan), draw(st.sampled_from(labels))]
            for _ in range(count)
        ]
        found.append([[*(name for name, _ in plan), "label"], *rows])
    return found


def write(folder: Path, tables_: list[list[list[str]]], delimiter: str, encoding: str) -> list[str]:
    names = []
    for number, rows in enumerate(tables_):
        path = folder / f"site {number}.csv"
        with path.open("w", encoding=encoding, errors="replace", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        names.append(str(path))
    return names


SANE = ("whole", "level", "truth", "date", "gap")  # kinds of which nothing can be refused
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=8)


@st.composite
def sane_sites(draw: st.DrawFn) -> list[list[list[str]]]:
    """Files in which nothing is wrong, whatever their columns are called."""
    labels = draw(st.sampled_from([["a", "b"], ["0", "1.0", "2"], ["是", "否"]]))
    found, shared = [], draw(st.sampled_from(["whole", "level", "truth"]))
    for _ in range(draw(st.integers(1, 3))):
        others = draw(st.lists(st.tuples(PLAIN, st.sampled_from(SANE)), max_size=3))
        plan = [("shared", shared), *((f"{n}{i}", kind) for i, (n, kind) in enumerate(others))]
        rows = [
            [*(str(draw(CELLS[kind])) for _, kind in plan), labels[number % len(labels)]]
            for number in range(draw(st.sampled_from([5, 9, 25])))
        ]
        rows[0][0] = {"whole": "3", "level": "ja", "truth": "True"}[shared]  # one value at least
        found.append([[*(name for name, _ in plan), "label"], *rows])
    return found


anywhere = given(
    made=st.one_of(sites(), sane_sites()),
    delimiter=st.sampled_from([",", ";", "\t"]),
    encoding=st.sampled_from(["utf-8", "latin-1", "utf-16"]),
    method=st.sampled_from(["alone", "fedavg", "chfl"]),
    scale=st.sampled_from(["local", "global"]),
)
often = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def from_files_to_predictions(folder: Path, files: list[str], method: str, scale: str) -> None:
    """Inspect, run, predict."""
    data = {"files": files, "label": "label"}
    found = tables.survey(**data)
    values = {
        "name": "any", "rounds": 2, "scale": scale, "data": data,
        "model": {"widths": [4]}, "engine": {"mode": "loop"},
        "method": {"name": method, "epochs": 1},
    }  # fmt: skip
    execute(resolve(values, "any"), folder / "run", local_engine)
    for site in found.sites:
        predictor = Predictor(folder / "run", site.name, "")
        done = predict(predictor, Path(site.file), folder / "p.csv")
        assert done.rows == site.rows


@settings(often, max_examples=40)
@anywhere
def test_any_table_gives_a_result_or_one_clear_error(
    made: list[list[list[str]]], delimiter: str, encoding: str, method: str, scale: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = write(Path(name), made, delimiter, encoding)
        try:
            from_files_to_predictions(Path(name), files, method, scale)
        except UserError as refused:
            told = (refused.what, refused.where, refused.remedy)
            assert all(told)


@often
@given(made=sane_sites(), method=st.sampled_from(["alone", "fedavg", "chfl"]))
def test_tables_in_which_nothing_is_wrong_are_not_refused(
    made: list[list[list[str]]], method: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = write(Path(name), made, ",", "utf-8")
        from_files_to_predictions(Path(name), files, method, "local")
        page.write([Path(name) / "run"], Path(name) / "page.html")


@settings(often, max_examples=60)
@given(
    made=st.one_of(sites(), sane_sites()),
    delimiter=st.sampled_from([",", ";", "\t"]),
    encoding=st.sampled_from(["utf-8", "latin-1", "utf-16"]),
)
def test_init_writes_a_config_that_inspect_accepts_or_annotates(
    made: list[list[list[str]]], delimiter: str, encoding: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = write(Path(name), made, delimiter, encoding)
        try:
            for file in files:
                opened(Path(file))
        except UserError:
            return  # a file that is no table at all
        config, problem = drafted(Wish(tuple(files), "label", "chfl"))
        values = tomllib.loads(config)["data"]
        if problem:
            assert "# Fix this first: " in config
            return
        assert tables.survey(**values).sites
        active = re.sub(r"(?m)^# (?=.*; uncomment if correct$)", "", config)
        tomllib.loads(active)  # uncommented lines are a config too
