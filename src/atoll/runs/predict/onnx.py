"""Exports a final model to ONNX: one graph from raw inputs to probabilities, including scaling.

Needs the extra `onnx`. The input `x` has the columns that the site's model reads in the order of
the card's `columns`, NaN for missing numbers; or the bytes of images; or tokens, numbered as in
the card's `words`. If the network is split, the graph of a site ends with embeddings; that of the
server has one input of embeddings per site and ends with probabilities.

The metadata of the file describe the inputs as JSON: `classes`, `columns` and `preprocessing`.
`predict.py` beside it (`standalone.py` here) reads them, and predicts without atoll.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.federation import SERVER
from atoll.core.record import disk_errors, write_whole
from atoll.data.scaling import colours
from atoll.runs.predict import tables
from atoll.runs.predict.model import Predictor

__all__ = ["write"]

NEEDED = ("onnx", "onnxscript", "onnxruntime")
SCRIPT = Path(__file__).with_name("standalone.py")  # the source of predict.py
ROWS = 7  # seed of the inputs for tracing and comparing a graph
FEWER = 3  # number of rows for a second comparison


class _Graph(nn.Module):
    """The outputs of a final model as a function of raw inputs."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor
        predictor.model  # noqa: B018 - restored before the graph is traced
        self.names = [*predictor.recipe["sites"]] if predictor.site == SERVER else ["x"]

    def forward(self, *inputs: Tensor) -> Tensor:
        predictor = self.predictor
        if predictor.site == SERVER:
            outputs = predictor.outputs(dict(zip(self.names, inputs, strict=True)))
        else:
            outputs = predictor.outputs(predictor.rows(inputs[0]))
            if predictor.vertical:
                return outputs.float()
        return predictor.final(outputs).float()


def write(predictor: Predictor, path: Path) -> Path:
    """Write the model; raises an error if its outputs differ from those of the original."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            remedy = "pip install 'atoll[onnx]', or leave --onnx out"
            raise UserError(f"'{name}' is not installed", "--onnx", remedy) from error
    graph = _Graph(predictor).eval()
    inputs = _examples(predictor)
    with torch.no_grad():
        expected = graph(*inputs)  # build before the trace, which cannot build it; sites cache it
    regression = predictor.recipe.get("task") == "regression"
    output = "numbers" if regression else "probabilities"
    if predictor.vertical and predictor.site != SERVER:
        output = "embedding"
    rows = {0: torch.export.Dim("rows")}
    for name in ("onnxscript", "torch.onnx"):  # these warn about unused libraries
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph, inputs, str(path), dynamo=True, external_data=False,
                input_names=graph.names, output_names=[output],
                dynamic_shapes=((rows,) * len(inputs),), verbose=False,
            )  # fmt: skip
    except OSError:
        with disk_errors(path):
            raise
    except Exception as error:
        what = f"this model cannot be written as ONNX: {type(error).__name__}"
        raise UserError(what, str(path), "leave --onnx out: the weights are there") from error
    _compare(graph.names, inputs, expected, path)
    _describe(predictor, path)
    return path


def _describe(predictor: Predictor, path: Path) -> None:
    """Write the description of the inputs to the metadata, and a standalone script."""
    library = importlib.import_module("onnx")
    model = library.load(str(path))
    recipe, steps = predictor.recipe, preprocessing(predictor)
    names = []
    if "blocks" in recipe:
        names = [name for block in tables.blocks(predictor) for name in block.names]
    described = {"classes": recipe["classes"], "columns": names, "preprocessing": steps}
    values = {key: json.dumps(value) for key, value in described.items()}
    library.helper.set_model_props(model, values)
    write_whole(path, model.SerializeToString())
    if not predictor.vertical:  # a single party has no prediction
        write_whole(path.with_name("predict.py"), SCRIPT.read_bytes())


def preprocessing(predictor: Predictor) -> dict[str, Any]:
    """The steps from a file to the graph's input; the graph includes imputation and scaling."""
    recipe, data = predictor.recipe, predictor.config.data
    steps: dict[str, Any] = {
        "kind": predictor.kind,
        "delimiter": str(data.get("delimiter", "")),
        "encoding": str(data.get("encoding", "")),
        **({"task": "regression"} if recipe.get("task") == "regression" else {}),
    }
    if predictor.site == SERVER:
        return steps
    steps["shape"] = list(predictor.width)
    if predictor.kind == "image":
        mean, deviation = colours(predictor.config.scale, recipe["shape"][0])
        steps |= {"mean": np.ravel(mean).tolist(), "deviation": np.ravel(deviation).tolist()}
    if predictor.kind == "text":
        rules = dataclasses.asdict(tables.rules_of(predictor))
        steps |= {"text": recipe["columns"][0], "words": recipe["words"], "rules": rules}
    if "blocks" in recipe:
        blocks = [dataclasses.asdict(block) for block in tables.blocks(predictor)]
        rules = dataclasses.asdict(tables.rules_of(predictor))
        steps |= {"blocks": blocks, "missing": recipe["missing"], "rules": rules}
    return steps


def _examples(predictor: Predictor) -> tuple[Tensor, ...]:
    """Example inputs for tracing the graph and comparing outputs; own tables include gaps."""
    if predictor.site == SERVER:
        width = int(predictor.config.options().width)
        one = torch.linspace(-2, 2, ROWS * width, dtype=getattr(torch, predictor.config.dtype))
        return (one.view(ROWS, width),) * len(predictor.recipe["sites"])
    shape = (ROWS, *predictor.width)
    count = int(np.prod(shape))
    if predictor.kind == "table":
        table = torch.linspace(-2, 2, count).view(shape)
        if predictor.about.get("scaling") is not None:  # own tables: gaps are imputed
            table[3] = torch.nan
        return (table,)
    if predictor.kind == "image":
        return ((torch.arange(count) % 256).to(torch.uint8).view(shape),)
    return ((torch.arange(count) * 7 % len(predictor.recipe["words"])).int().view(shape),)


def _compare(names: list[str], inputs: tuple[Tensor, ...], expected: Tensor, path: Path) -> None:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for rows in (ROWS, FEWER):  # also test another number of rows: the graph must not depend on it
        values = {name: x[:rows].numpy() for name, x in zip(names, inputs, strict=True)}
        try:
            (theirs,) = session.run(None, values)
            equal = np.allclose(theirs, expected[:rows].numpy(), atol=1e-5)
        except runtime.capi.onnxruntime_pybind11_state.InvalidArgument:
            equal = False
        if not equal:
            path.unlink()
            what = f"the ONNX model gives other outputs than our own for {rows} rows"
            raise UserError(what, str(path), "leave --onnx out, and please report it")
