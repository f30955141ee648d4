"""Predictions for texts: converts a file of texts to tokens of the run's vocabulary."""

from pathlib import Path

import numpy as np

from atoll.data.dataset import file_fingerprint
from atoll.data.own.texts import some_texts
from atoll.data.tokens import encoded, tokenised
from atoll.runs.predict.model import Predictor, held_out_rows
from atoll.runs.predict.output import Predicted, writing
from atoll.runs.predict.tables import rules_of

__all__ = ["predict"]

PIECE = 1024  # texts per batch


def predict(predictor: Predictor, path: Path, out: Path, held_out: bool = False) -> Predicted:
    """Write a CSV with a prediction for each text: its number, the class, every probability."""
    recipe, (text, label) = predictor.recipe, predictor.recipe["columns"]
    data = predictor.config.data
    dialect = (str(data.get("delimiter", "")), str(data.get("encoding", "")))
    rules = rules_of(predictor)
    texts, labels, ids = some_texts(path, (text, label), rules, dialect)
    first = ["row"] if ids is None else ["row", rules.id]
    with writing(out, first, recipe, [path], predictor.folder) as writer:
        (length,) = recipe["shape"]
        x = encoded([tokenised(words) for words in texts], length, recipe["words"])
        chosen = np.arange(len(x))
        if held_out:
            chosen = held_out_rows(predictor, path, len(x), file_fingerprint(path))
        for start in range(0, len(chosen), PIECE):
            piece = chosen[start : start + PIECE]
            answers = None if labels is None else [labels[row] for row in piece]
            names = None if ids is None else [ids[row] for row in piece]
            writer.add((piece + 1).tolist(), predictor.probabilities(x[piece]), answers, names)
    return writer.counts
