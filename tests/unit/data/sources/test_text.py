"""Texts: tokens, vocabulary, the embedded docstrings, a synthetic set."""

import ast
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from atoll import data
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.data.sources import text
from atoll.data.sources.fetch import File
from atoll.data.tokens import numbered, tokenised


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    (tmp_path / "text").mkdir()
    return tmp_path / "text"


def write(path: Path, rows: list[tuple[str, str, str]]) -> None:
    columns = zip(*rows, strict=True)
    table = {
        name: list(column) for name, column in zip(("split", "label", "text"), columns, strict=True)
    }
    pyarrow.parquet.write_table(pa.table(table), path)


def test_words_are_parted_as_keras_does() -> None:
    assert tokenised("What's THE e-mail\tof U.S. (he asked) ?") == (
        ["what's", "the", "e", "mail", "of", "u", "s", "he", "asked"]
    )
    assert tokenised(" ... ") == []


def test_tokens_are_numbered_by_frequency_cut_and_padded() -> None:
    x, words = numbered([["b", "a", "b"], ["c"], []], length=2, fewest=1)
    assert words == ("", "<unknown>", "b", "a", "c")
    assert x.tolist() == [[2, 3], [4, 0], [0, 0]]
    assert x.dtype == np.int32
    rare, kept = numbered([["b", "a", "b"], ["c"]], length=3, fewest=2)
    assert kept == ("", "<unknown>", "b")
    assert rare.tolist() == [[2, 1, 2], [1, 0, 0]]


def test_a_parquet_file_becomes_a_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("train", "ship", "the Ship"), ("train", "acq", "the, deal"), ("test", "acq", "deal")]
    write(folder / "x.parquet", rows)
    monkeypatch.setitem(text.FILES, "x", ((File("text/x.parquet"),),))
    made = text._build("x", (3, 2), 3, "made for a test")
    assert made.classes == ("acq", "ship")
    assert made.y.tolist() == [1, 0, 0]
    assert made.test is not None
    assert made.test.tolist() == [False, False, True]
    assert made.words[2:] == ("deal", "the", "ship")
    assert made.x.tolist() == [[3, 4, 0], [3, 2, 0], [2, 0, 0]]
    with pytest.raises(UserError, match="holds 3 texts in 2 classes, expected 4 in 2"):
        text._build("x", (4, 2), 3, "made for a test")


def test_a_changed_text_file_is_refused(folder: Path) -> None:
    write(folder / "r8.parquet", [("train", "acq", "a"), ("test", "acq", "b")])
    with pytest.raises(UserError, match="expected c08529713050c39c") as caught:
        data.load("reuters8")
    assert caught.value.exit_code == EXIT_DATA_MISSING


def test_a_parquet_file_without_the_columns_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow.parquet.write_table(pa.table({"words": ["a"]}), folder / "x.parquet")
    monkeypatch.setitem(text.FILES, "x", ((File("text/x.parquet"),),))
    with pytest.raises(UserError, match=r"x\.parquet cannot be read"):
        text._build("x", (1, 1), 3, "made for a test")


def test_docstrings_are_always_the_same_and_import_nothing() -> None:
    before = set(sys.modules)
    first, again = data.load("docstrings"), data.load("docstrings")
    assert first.fingerprint == again.fingerprint
    assert set(sys.modules) == before
    assert first.classes == text.PACKAGES
    assert first.x.shape[1] == 64
    assert 1_500 < len(first) < 3_000
    assert np.bincount(first.y).min() > 100
    assert first.x.max() == len(first.words) - 1
    assert (first.x[:, : text.FEWEST_TOKENS] > 0).all()
    assert first.words[:2] == ("", "<unknown>")


def test_docstrings_are_those_of_the_source(tmp_path: Path) -> None:
    package = tmp_path / "xml"
    (package / "test").mkdir(parents=True)
    (package / "b.py").write_text('"""Second."""\nclass A:\n    """Third."""\n')
    (package / "a.py").write_text('async def f() -> None:\n    """First."""\n\ndef g(): pass\n')
    (package / "test" / "c.py").write_text('"""Never."""\n')
    assert list(text._documented(tmp_path, "xml")) == ["First.", "Second.", "Third."]
    assert ast.get_docstring(ast.parse((package / "b.py").read_text())) == "Second."


def test_a_python_without_its_source_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="not here") as caught:
        data.load("docstrings")
    assert caught.value.exit_code == EXIT_DATA_MISSING


def test_synthetic_text_is_always_the_same_and_its_topics_differ() -> None:
    first, again = data.load("synthetic-text"), data.load("synthetic-text")
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != data.load("synthetic-text", seed=1).fingerprint
    assert first.x.shape == (1_000, 24)
    assert first.x.dtype == np.int32
    assert first.x.max() < len(first.words) == 202
    assert (first.x[:, :12] >= 2).all()
    shares = np.stack(
        [np.bincount(first.x[first.y == topic].ravel(), minlength=202) for topic in range(4)]
    )
    assert len(set(shares[:, 2:].argmax(axis=1).tolist())) > 1


def test_words_are_part_of_the_fingerprint() -> None:
    made = data.load("synthetic-text", rows=5)
    other = data.Dataset("x", "text", made.x, made.y, (), made.classes, "")
    assert made.fingerprint != other.fingerprint


@pytest.mark.parametrize("name", sorted(text.FILES))
def test_real_texts_that_are_here_load(name: str) -> None:
    if "ATOLL_DATA" not in os.environ or data.about(name).presence != "found":
        pytest.skip(f"ATOLL_DATA does not name a folder that holds {name}")
    found = data.load(name)
    assert found.test is not None
    assert 0 < found.test.sum() < len(found)
    assert found.x.max() == len(found.words) - 1
    assert (found.x != 1).all()
