"""Tables: official formats in small, embedded sets, synthetic rules."""

import bz2
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from atoll import data
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.data.sources import fetch, tabular

ADULT_DATA = """\
39, State-gov, 77516, Bachelors, 13, Single, Clerk, Alone, White, Male, 2174, 0, 40, Cuba, <=50K
52, ?, 209642, HS-grad, 9, Married, ?, Husband, White, Male, 0, 0, 45, Cuba, >50K

"""
ADULT_TEST = """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Single, Sales, Own-child, Black, Male, 0, 0, 40, ?, <=50K.

"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    (tmp_path / "tabular").mkdir()
    return tmp_path / "tabular"


def numbers(rows: int, columns: int) -> np.ndarray[Any, Any]:
    return np.arange(rows * columns).reshape(rows, columns) % 7


def openml(path: Path, rows: int, columns: int, labels: pa.Array) -> None:
    """Parquet as OpenML serves it: the label first, as a category."""
    table = {"class": labels}
    for number, column in enumerate(numbers(rows, columns).T, start=1):
        table[f"V{number}"] = pa.array(column.astype(np.float64))
    pyarrow.parquet.write_table(pa.table(table), path)


def test_covtype_gives_the_first_balanced_rows_with_kaggle_names(tmp_path: Path) -> None:
    lines = [",".join(map(str, [*row, 1 + place % 7])) for place, row in enumerate(numbers(9, 54))]
    path = tmp_path / "covtype.data.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    table = tabular._covtype(path)
    assert tuple(table.column_names) == (*tabular.COVERTYPE_COLUMNS, "Cover_Type")
    assert len(table) == 9
    assert np.array_equal(tabular._numbers(table.select(tabular.COVERTYPE_COLUMNS)), numbers(9, 54))
    y, classes = tabular._labels(table["Cover_Type"])
    assert y.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert classes == tuple("1234567")


def test_a_changed_covertype_is_refused(folder: Path) -> None:
    (folder / "covertype.parquet").write_bytes(b"something else")
    with pytest.raises(UserError, match="34590f9dc9177c95") as caught:
        data.load("covertype")
    assert caught.value.exit_code == EXIT_DATA_MISSING


def test_adult_joins_both_files_and_keeps_unknown_as_a_level(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text(ADULT_DATA)
    (tmp_path / "adult.test").write_text(ADULT_TEST)
    table = tabular._adult([tmp_path / "adult.data", tmp_path / "adult.test"])
    assert table["split"].to_pylist() == ["train", "train", "test"]
    assert tabular._labels(table["income"])[0].tolist() == [0, 1, 0]
    assert tabular._labels(table["income"])[1] == ("<=50K", ">50K")
    x, columns = tabular._one_hot(table.drop_columns(["income", "split"]))
    assert x.dtype == np.float32
    assert columns[:4] == ("age", "workclass=?", "workclass=Private", "workclass=State-gov")
    assert x[:, 0].tolist() == [39, 52, 25]
    assert x[:, 1].tolist() == [0, 1, 0]
    assert x[:, columns.index("native-country=?")].tolist() == [0, 0, 1]


def test_a_null_is_the_same_level_as_a_question_mark() -> None:
    x, columns = tabular._one_hot(pa.table({"job": ["a", None, "b"]}))
    assert columns == ("job=?", "job=a", "job=b")
    assert x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_openml_parquet_of_full_size_is_complete(folder: Path) -> None:
    labels = pa.array([str(row % 100) for row in range(65_196)]).dictionary_encode()
    openml(folder / "dataset_41169.pq", 65_196, 27, labels)
    helena = data.load("helena")
    assert helena.x.shape == (65_196, 27)
    assert helena.columns == tuple(f"V{number}" for number in range(1, 28))
    assert helena.classes[9:11] == ("9", "10")
    assert helena.y[:3].tolist() == [0, 1, 2]
    assert helena.partial == ""


def test_rows_that_are_missing_are_counted_in_the_error(folder: Path) -> None:
    openml(folder / "dataset_41168.pq", 40, 54, pa.array(np.arange(40) % 4))
    with pytest.raises(UserError, match="holds 40 rows, 54 columns, 4 classes, expected 83,733"):
        data.load("jannis")


def test_a_truncated_parquet_is_refused(folder: Path) -> None:
    path = folder / "dataset_41168.pq"
    openml(path, 40, 54, pa.array(np.arange(40) % 4))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"dataset_41168\.pq cannot be read") as caught:
        data.load("jannis")
    assert caught.value.exit_code == EXIT_DATA_MISSING


def test_a_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "covtype.data.gz"
    content = "\n".join(",".join(map(str, row)) for row in numbers(500, 55))
    path.write_bytes(gzip.compress(content.encode())[:-40])
    with pytest.raises(UserError, match="cannot be read"), fetch.reading(path):
        tabular._covtype(path)


def test_sensorless_text_is_read_as_uci_has_it(tmp_path: Path) -> None:
    path = tmp_path / "Sensorless_drive_diagnosis.txt"
    path.write_text("".join(f"{'-3.0146e-07 ' * 48}{label}\n" for label in (1, 11, 2)))
    table = tabular._sensorless(path)
    y, classes = tabular._labels(table["class"])
    assert classes == ("1", "2", "11")
    assert y.tolist() == [0, 2, 1]
    x = tabular._numbers(table.drop_columns(["class"]))
    assert np.allclose(x, np.float32(-3.0146e-07))


def test_libsvm_text_fills_what_is_left_out_with_zero(folder: Path) -> None:
    path = folder / "aloi.bz2"
    path.write_bytes(bz2.compress(b"999 1:0.5 128:2\n0 3:1\n10 2:4\n"))
    x, y, classes = tabular._libsvm(path, 128)
    assert x.shape == (3, 128)
    assert x.dtype == np.float32
    assert (x[0, 0], x[0, 127], x[1, 2], x[2, 1], x.sum()) == (0.5, 2, 1, 4, 7.5)
    assert classes == ("0", "10", "999")
    assert y.tolist() == [2, 0, 1]
    with pytest.raises(UserError, match="holds 3 rows, 128 columns, 3 classes, expected 108,000"):
        data.load("aloi")


def test_a_number_that_is_missing_is_refused(tmp_path: Path) -> None:
    x = tabular._numbers(pa.table({"a": [1.0, None], "b": [1.0, 2.0]}))
    with pytest.raises(UserError, match="missing or not finite"):
        tabular._expect(tmp_path, x, np.array([0, 1]), (2, 2, 2))


def test_a_label_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a label is missing"), fetch.reading(tmp_path):
        tabular._labels(pa.chunked_array([["a", None]]))


@pytest.mark.parametrize(
    ("name", "rows", "columns", "classes"),
    [
        ("breast-cancer", 569, 30, 2),
        ("wine", 178, 13, 3),
        ("digits-table", 1_797, 64, 10),
        ("synthetic-table", 2_000, 16, 4),
    ],
)
def test_embedded_tables_are_always_the_same(
    name: str, rows: int, columns: int, classes: int
) -> None:
    first, again = data.load(name), data.load(name)
    assert first.x.shape == (rows, columns)
    assert first.x.dtype == np.float32
    assert first.y.dtype == np.int64
    assert len(first.columns) == columns
    assert sorted(set(first.y.tolist())) == list(range(classes)) == list(range(len(first.classes)))
    assert first.fingerprint == again.fingerprint


def test_the_seed_and_each_size_change_a_synthetic_table() -> None:
    prints = {
        data.load("synthetic-table", **given).fingerprint
        for given in ({}, {"seed": 1}, {"rows": 50}, {"columns": 5}, {"classes": 3}, {"noise": 0.0})
    }
    assert len(prints) == 6


def accuracy_of_codes(rule: str, seen: slice) -> float:
    """How often the most frequent label of a code pair, seen through these columns, is right."""
    table = data.load("synthetic-table", rule=rule, noise=0.0)
    _, code = np.unique(table.x[:, seen], axis=0, return_inverse=True)
    counts = np.zeros((code.max() + 1, 4))
    np.add.at(counts, (code, table.y), 1)
    return float(counts.max(axis=1).sum() / len(table))


@pytest.mark.parametrize(
    ("rule", "common", "unique"),
    [("common", 1.0, 0.3), ("unique", 0.3, 1.0), ("interaction", 0.3, 0.3), ("mixed", 0.7, 0.7)],
)
def test_rules_say_which_half_of_the_columns_tells_the_label(
    rule: str, common: float, unique: float
) -> None:
    assert accuracy_of_codes(rule, slice(0, 16)) == 1.0
    assert accuracy_of_codes(rule, slice(0, 8)) <= common
    assert accuracy_of_codes(rule, slice(8, 16)) <= unique
    assert (accuracy_of_codes(rule, slice(0, 8)) == 1.0) == (rule == "common")
    assert (accuracy_of_codes(rule, slice(8, 9)) == 1.0) == (rule == "unique")


@pytest.mark.parametrize(
    ("name", "shape", "classes", "partial"),
    [
        ("covertype", (15_120, 54), 7, ""),
        ("adult", (48_842, 108), 2, ""),
        ("jannis", (30_145, 54), 4, "30,145 of 83,733 rows"),
        ("sensorless", (2_200, 48), 11, "2,200 of 58,509 rows"),
    ],
)
def test_real_tables_that_are_here_load(
    name: str, shape: tuple[int, int], classes: int, partial: str
) -> None:
    if "ATOLL_DATA" not in os.environ or data.about(name).presence != "found":
        pytest.skip(f"ATOLL_DATA does not name a folder that holds {name}")
    table = data.load(name)
    if len(table) == shape[0]:
        assert table.x.shape == shape
        assert table.partial == partial
    assert len(table.classes) == classes
