"""Texts as numbers: the tokens of the Keras tokenizer, numbered by frequency."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["PADDING", "UNKNOWN", "encoded", "numbered", "tokenised"]

Array = np.ndarray[Any, Any]

PADDING, UNKNOWN = "", "<unknown>"  # the words of tokens 0 and 1
FILTERS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'  # what Keras takes for punctuation: not the '


def tokenised(text: str) -> list[str]:
    """The tokens of a text, as the Keras tokenizer splits it."""
    return text.lower().translate(str.maketrans(FILTERS, " " * len(FILTERS))).split()


def numbered(
    texts: Sequence[Sequence[str]], length: int, fewest: int
) -> tuple[Array, tuple[str, ...]]:
    """Tokens as (texts, length) numbers, cut or padded at the end; rarer words than this are 1."""
    counts = Counter(token for tokens in texts for token in tokens)
    frequent = [word for word, count in counts.items() if count >= fewest]
    words = (PADDING, UNKNOWN, *sorted(frequent, key=lambda word: (-counts[word], word)))
    return encoded(texts, length, words), words


def encoded(texts: Sequence[Sequence[str]], length: int, words: Sequence[str]) -> Array:
    """Tokens as (texts, length) numbers of a vocabulary; a word that it lacks is 1."""
    numbers = {word: number for number, word in enumerate(words) if number > 1}
    x = np.zeros((len(texts), length), dtype=np.int32)
    for row, tokens in zip(x, texts, strict=True):
        token_numbers = [numbers.get(token, 1) for token in tokens[:length]]
        row[: len(token_numbers)] = token_numbers
    return x
