"""Word vectors: a file of them becomes the table of a vocabulary; they never leave a site.

Files are looked for in the folder `text` below the data folder. They are npz (arrays `words` and
`vectors`) or the text files of GloVe, word2vec and fastText. What a large text file holds of a
vocabulary is kept as float16 in the user's cache folder.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import nearest
from atoll.core.rng import Stream
from atoll.data.sources.fetch import folder, reading, refused

__all__ = ["KINDS", "Vectors", "load", "present"]

Array = np.ndarray[Any, Any]

SEED: Final = 42  # of what unknown words get: the same in every run
MOST_NUMBERS: Final = 10_000  # of a drawn vector
KINDS: Final = (".npz", ".txt", ".vec")
# Where no name is given, the first of these that is here; GloVe 840B is what the paper used.
ORDER: Final = ("glove.840b", "glove-840b", "glove", "fasttext", "wiki-news", "crawl", "spacy")


@dataclass(frozen=True)
class Vectors:
    """The vectors of a vocabulary: row i is that of word i, row 0 is padding and zero."""

    name: str
    table: Array  # (words, dimension) float32
    known: Array  # (words,) bool: whether the file has the word
    factor: float  # what the file's vectors were multiplied with

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of them."""
        words = max(1, len(self.known) - 2)  # without padding and the unknown word
        return {
            "name": self.name,
            "dimension": self.table.shape[1],
            "known": round(float(self.known.sum()) / words, 4),
            "factor": self.factor,
        }


def present() -> dict[str, Path]:
    """The files of word vectors that are here by name, the best first."""
    home = folder() / "text"
    paths = sorted(home.iterdir()) if home.is_dir() else []
    files = {_name(path): path for path in paths if _is_vectors(path)}
    return dict(sorted(files.items(), key=lambda item: (_rank(item[0]), item[0])))


def _is_vectors(path: Path) -> bool:
    has_prefix = path.name.startswith(("vectors-", "glove", "wiki-news", "crawl"))
    return path.suffix in KINDS and has_prefix and path.is_file()


def _name(path: Path) -> str:
    return path.stem.removeprefix("vectors-")


def _rank(name: str) -> int:
    return next((i for i, start in enumerate(ORDER) if name.lower().startswith(start)), len(ORDER))


def load(words: Sequence[str], name: str = "best", norm: float = 5.0) -> Vectors:
    """The vectors of these words; `norm` is the mean length of the known ones, 0 leaves it.

    `best` is the best file that is here; `random-50` draws vectors of 50 numbers.
    """
    if match := re.fullmatch(r"random-(\d+)", name):
        return _random(words, name, int(match[1]), norm)
    path = _path(name)
    vectors, places = _read(path, words)
    table = _unknown(len(words), vectors.shape[1])
    mask = np.zeros(len(words), dtype=bool)
    mask[places] = True
    length = float(np.linalg.norm(vectors.astype(np.float64), axis=1).mean()) if len(vectors) else 0
    factor = norm / length if norm and length else 1.0
    table[places] = vectors.astype(np.float32) * np.float32(factor)
    table[0], mask[:2] = 0.0, False
    return Vectors(_name(path), table, mask, factor)


def _random(words: Sequence[str], name: str, dimension: int, norm: float) -> Vectors:
    """Drawn vectors; a word's own depends on the word alone, not on the rest of the vocabulary."""
    if not 1 <= dimension <= MOST_NUMBERS:
        remedy = f"write for example random-50; {MOST_NUMBERS:,} numbers at most"
        raise UserError(f"no vectors '{name}'", "model.vectors", remedy)
    streams = (Stream.of(SEED, "vectors", word) for word in words)
    table = np.stack([stream.numpy().standard_normal(dimension) for stream in streams])
    factor = (norm or 1.0) / np.sqrt(dimension)
    mask = np.ones(len(words), dtype=bool)
    mask[:2] = False
    table = (table * factor).astype(np.float32)
    table[:2] = _unknown(len(words), dimension)[:2]
    table[0] = 0.0
    return Vectors(name, table, mask, float(factor))


def _unknown(count: int, dimension: int) -> Array:
    """What unknown words get: uniform within 0.5 / count of zero."""
    bound = 0.5 / count
    draw = Stream.of(SEED, "vectors", "unknown").numpy().uniform(-bound, bound, (count, dimension))
    return np.asarray(draw, dtype=np.float32)


def _path(name: str) -> Path:
    """The file of word vectors with this name."""
    files = present()
    if name == "best" and files:
        return next(iter(files.values()))
    if name in files:
        return files[name]
    if Path(name).suffix in KINDS and Path(name).is_file():
        return Path(name)
    remedy = (
        nearest(name, files)
        if files and name != "best"
        else "put vectors-NAME.npz (words, vectors) or a GloVe, word2vec or fastText text file into"
        " the folder text there, point ATOLL_DATA at a folder that has one, or ask for random"
        " ones by name: --set vectors=random-50"
    )
    what = "no word vectors are here" if name == "best" else f"no word vectors '{name}' are here"
    raise UserError(what, f"looked in {folder() / 'text'}", remedy, EXIT_DATA_MISSING)


def _read(path: Path, words: Sequence[str]) -> tuple[Array, Array]:
    """The vectors of those words that the file has, and the places of these words."""
    if path.suffix == ".npz":
        return _read_npz(path, words)
    cached = _cache(path, words)
    if not cached.is_file():
        vectors, places = _read_text(path, words)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            part = cached.with_name(f"{cached.stem}.{os.getpid()}.npz")
            np.savez(part, words=np.array([words[i] for i in places]), vectors=vectors)
            part.replace(cached)
        except OSError:  # a cache that cannot be written is no cache
            return vectors, places
    return _read_npz(cached, words)


def _cache(path: Path, words: Sequence[str]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with reading(path):
        about = path.stat()
    key = "\x1f".join((str(path.resolve()), str(about.st_size), str(about.st_mtime_ns), *words))
    digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    return cache / "atoll" / "vectors" / f"{digest}.npz"


def _read_npz(path: Path, words: Sequence[str]) -> tuple[Array, Array]:
    with reading(path), np.load(path, allow_pickle=False) as file:
        names, vectors = file["words"], file["vectors"]
    if vectors.ndim != 2 or len(vectors) != len(names):
        raise refused(path, f"has {len(names)} words and vectors of shape {vectors.shape}")
    rows = {str(word): row for row, word in reversed(list(enumerate(names)))}
    places = np.array([i for i, word in enumerate(words) if i > 1 and word in rows], dtype=np.int64)
    chosen = vectors[[rows[words[i]] for i in places]] if len(places) else vectors[:0]
    if not np.isfinite(chosen.astype(np.float32)).all():
        raise refused(path, "has numbers that are not finite")
    return chosen, places


def _read_text(path: Path, words: Sequence[str]) -> tuple[Array, Array]:
    """The lines of a text file that are wanted; a header of two numbers is passed over."""
    place_of = {word: place for place, word in enumerate(words) if place > 1}
    vectors: dict[int, Array] = {}
    width = 0
    with reading(path), path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip("\n ").split(" ")
            if number == 1 and len(fields) == 2:
                width = int(fields[1])
                continue
            width = width or len(fields) - 1
            word = " ".join(fields[:-width])  # a few words of GloVe 840B have blanks in them
            if not word:
                raise refused(path, f"line {number} has {len(fields) - 1} numbers, not {width}")
            if word in place_of and place_of[word] not in vectors:
                vectors[place_of[word]] = np.array(fields[-width:], dtype=np.float32)
    places = np.array(sorted(vectors), dtype=np.int64)
    chosen = np.stack([vectors[i] for i in places]) if len(places) else np.zeros((0, width or 1))
    return chosen.astype(np.float16), places
