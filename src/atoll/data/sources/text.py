"""Texts: one function for each data set; registry.toml lists their files and sources.

A text is lower-cased, stripped of punctuation and split at blanks, as the Keras tokenizer does.
Tokens are numbered by how often a word occurs, in train and test together; 0 is padding and 1 an
unknown word.
"""

import ast
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import AtLeastOne
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset
from atoll.data.sources.fetch import obtain, reading, refused, registry
from atoll.data.tokens import PADDING, UNKNOWN, numbered, tokenised

__all__ = ["docstrings", "reuters8", "subj", "synthetic_text", "tmn", "trec6", "trec50"]

Array = np.ndarray[Any, Any]

PACKAGES = (  # in every CPython 3.11 to 3.13, each with more than a hundred docstrings
    *("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml"),
)
FEWEST_TOKENS = 4  # a shorter docstring says nothing


KIND = "text"
FILES = registry(KIND)


def reuters8(length: AtLeastOne = 964) -> Dataset:
    """Reuters news in 8 topics, 5,485 + 2,189 texts."""
    source = "Reuters-21578, R8 (Lewis; Cardoso-Cachopo 2007), research use"
    return _build("reuters8", (7_674, 8), length, source)


def tmn(length: AtLeastOne = 48) -> Dataset:
    """Short news in 7 topics, 24,817 + 7,780 texts, stop words and rare words taken out."""
    source = "TagMyNews (Vitale et al. 2012), licence not stated; stop words and rare words removed"
    return _build("tmn", (32_597, 7), length, source)


def trec6(length: AtLeastOne = 37) -> Dataset:
    """Questions by 6 kinds of answer, 5,452 + 500 texts."""
    source = "TREC question classification (Li, Roth 2002), licence not stated"
    return _build("trec6", (5_952, 6), length, source)


def trec50(length: AtLeastOne = 37) -> Dataset:
    """Questions by 50 kinds of answer, 5,452 + 500 texts; 8 kinds are not tested."""
    source = "TREC question classification (Li, Roth 2002), licence not stated"
    return _build("trec50", (5_952, 50), length, source)


def subj(length: AtLeastOne = 120) -> Dataset:
    """Sentences of film reviews and of plots, 8,000 + 2,000; the split is ours."""
    source = "Subjectivity 1.0 (Pang, Lee 2004), licence not stated; every fifth row is test"
    return _build("subj", (10_000, 2), length, source)


def docstrings(length: AtLeastOne = 64) -> Dataset:
    """Docstrings of the interpreter's own library; the label is the package (embedded).

    The source files are parsed, never imported. What they say differs a little from one release of
    Python to the next, so the fingerprint does too; `source` names the release.
    """
    root = Path(sysconfig.get_path("stdlib"))
    first: dict[str, str] = {}  # text -> package: a text that occurs twice is kept once
    for package in PACKAGES:
        for text in _documented(root, package):
            first.setdefault(text, package)
    pairs = [(tokenised(text), package) for text, package in first.items()]
    texts = [tokens for tokens, _ in pairs if len(tokens) >= FEWEST_TOKENS]
    labels = [label for tokens, label in pairs if len(tokens) >= FEWEST_TOKENS]
    if set(labels) != set(PACKAGES):
        raise UserError(
            "the docstrings of the standard library are not here",
            str(root),
            "use a Python that comes with the source of its library",
            EXIT_DATA_MISSING,
        )
    x, words = numbered(texts, length, fewest=2)
    y = np.array([PACKAGES.index(label) for label in labels], dtype=np.int64)
    source = f"docstrings of CPython {platform.python_version()}, PSF licence"
    return Dataset("docstrings", "text", x, y, (), PACKAGES, source, words=words)


def synthetic_text(
    rows: AtLeastOne = 1_000,
    classes: AtLeastOne = 4,
    vocabulary: AtLeastOne = 200,
    length: AtLeastOne = 24,
    seed: int = 0,
) -> Dataset:
    """Made up: half of a text's words come from its topic, half from all words."""
    stream = Stream.of(seed, "synthetic-text", rows, classes, vocabulary, length)
    y = stream.child("labels").numpy().integers(classes, size=rows)
    topics = stream.child("topics").numpy().dirichlet(np.full(vocabulary, 0.1), size=classes)
    edges = (topics / 2 + 0.5 / vocabulary).cumsum(axis=1)
    draws = stream.child("words").numpy().random(size=(rows, length))
    places = [np.searchsorted(edges[label], draw) for label, draw in zip(y, draws, strict=True)]
    x = 2 + np.minimum(places, vocabulary - 1)
    ends = stream.child("lengths").numpy().integers((length + 1) // 2, length + 1, size=rows)
    x[np.arange(length) >= ends[:, None]] = 0
    return Dataset(
        "synthetic-text",
        "text",
        x.astype(np.int32),
        y.astype(np.int64),
        (),
        tuple(f"topic {number}" for number in range(classes)),
        f"made up, seed {seed}",
        words=(PADDING, UNKNOWN, *(f"word{number}" for number in range(vocabulary))),
        vectors="random-16",  # no file has vectors of made-up words
    )


def _build(name: str, shape: tuple[int, int], length: int, source: str) -> Dataset:
    """The Parquet file of a set as numbered tokens; classes are sorted by name."""
    (path,) = obtain(name, FILES[name])
    with reading(path):
        table = pyarrow.parquet.read_table(path, columns=["split", "label", "text"])
        splits, labels, texts = (column.to_pylist() for column in table.itercolumns())
        classes = sorted(set(labels))
        x, words = numbered([tokenised(text) for text in texts], length, fewest=1)
    if (len(x), len(classes)) != shape:
        content = f"{len(x):,} texts in {len(classes)} classes"
        raise refused(path, f"holds {content}, expected {shape[0]:,} in {shape[1]}")
    places = {label: place for place, label in enumerate(classes)}
    y = np.array([places[label] for label in labels], dtype=np.int64)
    test = np.array([split == "test" for split in splits])
    return Dataset(name, "text", x, y, (), tuple(classes), source, test=test, words=words)


def _documented(root: Path, package: str) -> Iterator[str]:
    """All docstrings of a package in the order of its files and lines, without its own tests."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted((root / package).rglob("*.py")):
        if {"test", "tests"} & set(path.relative_to(root).parts):
            continue
        with reading(path):
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text
