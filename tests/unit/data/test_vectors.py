"""Word vectors: files of all kinds, what unknown words get, and what is said when none is here."""

from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.data import vectors

WORDS = ("", "<unknown>", "ship", "the", "zzz")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data" / "text").mkdir(parents=True)
    return tmp_path / "data" / "text"


def npz(path: Path, words: list[str], rows: list[list[float]]) -> None:
    np.savez(path, words=np.array(words), vectors=np.array(rows, dtype=np.float16))


def test_known_words_get_their_vectors_at_the_length_asked_for(folder: Path) -> None:
    npz(folder / "vectors-a.npz", ["the", "other", "ship"], [[3, 4], [9, 9], [0, 15]])
    found = vectors.load(WORDS, "a", norm=5.0)
    assert found.known.tolist() == [False, False, True, True, False]
    assert found.factor == pytest.approx(0.5)  # the mean length of the two was 10
    np.testing.assert_allclose(found.table[2:4], [[0, 7.5], [1.5, 2]])
    assert found.facts == {
        "name": "a", "dimension": 2, "known": pytest.approx(2 / 3, abs=1e-4), "factor": 0.5
    }  # fmt: skip
    np.testing.assert_allclose(vectors.load(WORDS, "a", norm=0.0).table[3], [3, 4])


def test_unknown_words_are_small_and_the_same_in_every_run_and_padding_is_zero(
    folder: Path,
) -> None:
    npz(folder / "vectors-a.npz", ["the"], [[3, 4]])
    one, two = vectors.load(WORDS, "a").table, vectors.load(WORDS, "a").table
    assert np.array_equal(one, two)
    assert not one[0].any()
    for row in (1, 2, 4):
        assert 0 < np.abs(one[row]).max() <= 0.5 / len(WORDS)


def test_the_best_that_is_here_is_taken_and_named(folder: Path) -> None:
    for name in ("word2vec-x", "spacy-md", "glove-6b"):
        npz(folder / f"vectors-{name}.npz", ["the"], [[3, 4]])
    assert list(vectors.present()) == ["glove-6b", "spacy-md", "word2vec-x"]
    assert vectors.load(WORDS).name == "glove-6b"
    (folder / "glove.840B.300d.txt").write_text("the 1 2\n")
    assert vectors.load(WORDS).name == "glove.840B.300d"


@pytest.mark.parametrize("head", ["", "3 2\n"], ids=["GloVe", "word2vec and fastText"])
def test_a_text_file_is_read_once_and_then_from_its_float16_copy(head: str, folder: Path) -> None:
    path = folder / "vectors-b.txt"
    path.write_text(f"{head}the 0.1 4\n. . 1 1\nship 0 15 \n")
    first = vectors.load(WORDS, "b", norm=0.0)
    np.testing.assert_allclose(first.table[3], [0.1, 4], rtol=1e-3)
    kept = list((folder.parents[1] / "cache" / "atoll" / "vectors").iterdir())
    assert len(kept) == 1
    again = vectors.load(WORDS, "b", norm=0.0)
    assert np.array_equal(first.table, again.table)
    np.savez(kept[0], words=np.array(["the"]), vectors=np.array([[7, 7]], dtype=np.float16))
    np.testing.assert_allclose(vectors.load(WORDS, "b", norm=0.0).table[3], [7, 7])


@pytest.mark.parametrize(
    ("name", "body", "what"),
    [
        ("b.txt", "the 1 2\nship 1\n", "line 2 has 1 numbers, not 2"),
        ("b.txt", "the 1 x\n", "cannot be read"),
        ("b.vec", "2 3\nthe 1 2\n", "line 2 has 2 numbers, not 3"),
        ("b.npz", "no zip", "cannot be read"),
    ],
)
def test_vectors_of_the_wrong_width_are_refused(
    name: str, body: str, what: str, folder: Path
) -> None:
    (folder / f"vectors-{name}").write_text(body)
    with pytest.raises(UserError, match=what):
        vectors.load(WORDS, "b")


def test_an_npz_whose_words_and_vectors_differ_is_refused(folder: Path) -> None:
    npz(folder / "vectors-a.npz", ["the", "ship"], [[3, 4]])
    with pytest.raises(UserError, match="2 words and vectors of shape"):
        vectors.load(WORDS, "a")
    npz(folder / "vectors-a.npz", ["the"], [[np.nan, 4]])
    with pytest.raises(UserError, match="not finite"):
        vectors.load(WORDS, "a")


def test_a_missing_file_is_answered_with_what_to_do(folder: Path) -> None:
    with pytest.raises(UserError, match="no word vectors are here") as refusal:
        vectors.load(WORDS)
    assert refusal.value.exit_code == EXIT_DATA_MISSING
    assert "random-50" in str(refusal.value.remedy)
    npz(folder / "vectors-spacy-md.npz", ["the"], [[3, 4]])
    with pytest.raises(UserError, match="'spacy-mb'") as refusal:
        vectors.load(WORDS, "spacy-mb")
    assert "spacy-md" in str(refusal.value.remedy)


def test_made_up_vectors_are_had_by_name_and_a_word_has_its_own(folder: Path) -> None:
    found = vectors.load(WORDS, "random-8")
    assert found.table.shape == (5, 8)
    assert np.array_equal(vectors.load((*WORDS[:2], "the"), "random-8").table[2], found.table[3])
    assert not found.table[0].any()
    assert float(np.linalg.norm(found.table[2:], axis=1).mean()) == pytest.approx(5, rel=0.5)
    with pytest.raises(UserError):
        vectors.load(WORDS, "random-0")
