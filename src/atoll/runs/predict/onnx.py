"""A site's model as ONNX: from a file's encoded columns to probabilities, scaling included.

Needs the extra `onnx`. The graph has one input, the columns that the site's model reads in the
order of the card's `columns`, NaN where a number is missing, and one output, the probabilities.
"""

import contextlib
import importlib
import io
import logging
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.record import disk_errors
from atoll.runs.predict.tables import Array, Predictor

__all__ = ["columns", "write"]

NEEDED = ("onnx", "onnxscript", "onnxruntime")


class _Said(nn.Module):
    """What the model says of encoded columns, as one graph."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor.spoken(x).float()


def columns(predictor: Predictor) -> list[int]:
    """The numbers of the encoded columns that the site's model reads, ascending."""
    places = (range(block.start, block.start + block.width) for block in predictor.blocks)
    return sorted(place for found in places for place in found)


def write(predictor: Predictor, path: Path) -> Path:
    """Write the model, and refuse one whose answers differ from our own."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            remedy = "pip install 'atoll[onnx]', or leave --onnx out"
            raise UserError(f"'{name}' is not installed", "--onnx", remedy) from error
    read = columns(predictor)
    rows = torch.from_numpy(_made_up(len(read)))
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Said(predictor).eval(), (rows,), str(path), dynamo=True, external_data=False,
                input_names=["x"], output_names=["probabilities"],
                dynamic_shapes={"x": {0: torch.export.Dim("rows")}}, verbose=False,
            )  # fmt: skip
    except OSError:
        with disk_errors(path):
            raise
    except Exception as error:
        what = f"this model cannot be written as ONNX: {type(error).__name__}"
        raise UserError(what, str(path), "leave --onnx out: the weights are there") from error
    _same(predictor, rows.numpy(), path)
    return path


def _made_up(width: int) -> Array:
    """Some rows to draw the graph with and to compare answers for, one with nothing but gaps."""
    rows = np.linspace(-2, 2, 7 * width, dtype=np.float32).reshape(7, width)
    rows[3] = np.nan
    return rows


def _same(predictor: Predictor, rows: Array, path: Path) -> None:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": rows})
    with torch.no_grad():
        ours = predictor.spoken(torch.from_numpy(rows)).numpy()
    if not np.allclose(theirs, ours, atol=1e-5):
        path.unlink()
        what = "the ONNX model answers otherwise than our own"
        raise UserError(what, str(path), "leave --onnx out, and please report it")
