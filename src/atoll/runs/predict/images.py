"""Predictions for images: converts a folder or file of images to a site's network inputs."""

from pathlib import Path

import numpy as np

from atoll.data.dataset import array_fingerprint
from atoll.data.own.images import some_images
from atoll.runs.predict.model import Predictor, held_out_rows
from atoll.runs.predict.output import Predicted, writing

__all__ = ["predict"]

PIECE = 256  # images per batch


def predict(predictor: Predictor, path: Path, out: Path, held_out: bool = False) -> Predicted:
    """Write a CSV with a prediction for each image: its name, the class, every probability."""
    recipe, (image, label) = predictor.recipe, predictor.recipe["columns"]
    with writing(out, ["image"], recipe, [path], predictor.folder) as writer:
        channels, height, width = recipe["shape"]
        x, names, labels = some_images(path, (channels, height, width), image, label)
        chosen = np.arange(len(x))
        if held_out:
            chosen = held_out_rows(predictor, path, len(x), array_fingerprint(x))
        for start in range(0, len(chosen), PIECE):
            piece = chosen[start : start + PIECE]
            answers = None if labels is None else [labels[row] for row in piece]
            writer.add([names[row] for row in piece], predictor.probabilities(x[piece]), answers)
    return writer.counts
