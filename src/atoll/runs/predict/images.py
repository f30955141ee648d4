"""Predictions for images with what a run left: a site's network, images prepared as in the run."""

import csv
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.core.errors import UserError
from atoll.core.messages import Tensors
from atoll.core.options import nearest
from atoll.data.dataset import Dataset, array_fingerprint
from atoll.data.own.images import some_images
from atoll.data.scenario import Holding, Scenario
from atoll.learning.weights import without
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts
from atoll.runs.predict.tables import (
    Array,
    Predicted,
    Predictor,
    ended_state,
    growing,
    header,
    recorded_on_cpu,
    refuse_other,
    refuse_taken,
    restored,
)
from atoll.runs.result import Run

__all__ = ["PicturePredictor", "predict_images", "reads_images"]

PIECE = 256  # images that are predicted at a time


def reads_images(folder: Path) -> bool:
    """Whether the sites of this run have models of images."""
    return Predictor(folder, "", "").recipe.get("kind") == "image"


@dataclass(frozen=True)
class PicturePredictor:
    """One site's network out of a run's folder."""

    folder: Path
    called: str  # the site by its id, or by the name of its domain
    variant: str

    @cached_property
    def site(self) -> str:
        """The site's id."""
        sites = self._base.recipe["sites"]
        ids = {one["called"]: id for id, one in sites.items()} | {id: id for id in sites}
        if self.called not in ids:
            what = f"no site '{self.called}' in this run"
            raise UserError(what, "--site", nearest(self.called, ids))
        return str(ids[self.called])

    @cached_property
    def _base(self) -> Predictor:
        return Predictor(self.folder, self.called, self.variant)

    @property
    def run(self) -> Run:
        """The run's record."""
        return self._base.run

    @property
    def chosen(self) -> str:
        """The variant to predict with."""
        return self._base.chosen

    @property
    def recipe(self) -> dict[str, Any]:
        """The classes, the size of an image, the sites."""
        return self._base.recipe

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the network reads."""
        channels, height, width = self.recipe["shape"]
        return int(channels), int(height), int(width)

    @cached_property
    def _state(self) -> tuple[Tensors, Tensors]:
        """What the site's client, and the server, knew in the end."""
        state = ended_state(self.folder)
        return without(f"client/{self.site}", state), without("server", state)

    def _client(self, x: Array) -> Any:
        """The client as the run left it, with these images in place of its own."""
        config = recorded_on_cpu(self.folder)
        client = _with_images(config, self.recipe, x).client(self.site)
        restored(client, self.site, self._state[0], self.folder)
        return client

    @cached_property
    def model(self) -> Tensors:
        """The weights of the network."""
        self._base.method  # noqa: B018 - refuses a method without models
        blank = np.zeros((1, *self.shape), dtype=np.uint8)
        model: Tensors = self._client(blank).final_model(self._state[1], self.chosen)
        return model

    @property
    def reads(self) -> dict[str, Any]:
        """How an image becomes what the network reads, for the card."""
        config, sites = recorded_on_cpu(self.folder), list(self.recipe["sites"])
        own = config.models[sites.index(self.site)] if config.models else ""
        return {
            "classes": self.recipe["classes"],
            "network": own or config.model_options().name,
            "shape": list(self.shape),
            "scale": config.scale,
            "called": self.recipe["sites"][self.site]["called"],
        }

    @torch.no_grad()
    def probabilities(self, x: Array) -> Array:
        """The probability of each class for images: (rows, channels, height, width) uint8."""
        client = self._client(x)
        rows = client.site.train(0)
        pieces = [rows.at(slice(start, start + PIECE)) for start in range(0, len(x), PIECE)]
        logits = torch.cat([client.predict(self.model, piece) for piece in pieces])
        return np.asarray(torch.softmax(logits.double(), -1).numpy())

    def held_out(self, path: Path, x: Array) -> Array:
        """The images of the site's own file that the run kept for its tests."""
        mine = self.recipe["sites"][self.site]
        if "held_out" not in mine:
            raise UserError(
                "this run does not say which of your images it kept for tests", "--held-out",
                "leave it out; it is for runs with data = { images = [...] }",
            )  # fmt: skip
        if mine["rows"] != len(x):
            raise UserError(
                f"{len(x):,} images are here, the run read {mine['rows']:,}", str(path),
                "give the folder or file that the run was made with",
            )  # fmt: skip
        if mine.get("fingerprint", "") not in ("", array_fingerprint(x)):  # older runs have none
            refuse_other(path)
        return np.array(mine["held_out"], dtype=np.int64)


def _with_images(config: RunConfig, recipe: dict[str, Any], x: Array) -> Parts:
    """The parts of a run whose every site has these images, without labels."""
    classes, none = tuple(recipe["classes"]), np.empty(0, dtype=np.int64)
    dataset = Dataset("", "image", x, np.zeros(len(x), dtype=np.int64), (), classes, "")
    ids = tuple(recipe["sites"])
    holdings = dict.fromkeys(ids, (Holding(np.arange(len(x)), none, none),))
    config = replace(config, public={"name": "patterns", "rows": 1})  # they are not asked for
    tests = dict.fromkeys(ids, (none,))
    return Parts(config, dataset, Scenario(ids, holdings, none, tests, ("all",), (0,)))


def predict_images(
    predictor: PicturePredictor, path: Path, out: Path, held_out: bool = False
) -> Predicted:
    """Write a CSV with a prediction for each image: its name, the class, every probability."""
    classes, (image, label) = predictor.recipe["classes"], predictor.recipe["columns"]
    columns = header("image", predictor.recipe)
    refuse_taken(out, [path], predictor.folder, columns)
    x, names, labels = some_images(path, predictor.shape, image, label)
    chosen = predictor.held_out(path, x) if held_out else np.arange(len(x))
    found = predictor.probabilities(x[chosen])
    said = [classes[place] for place in found.argmax(1)]
    with growing(out) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row, name, each in zip(chosen, said, found, strict=True):
            writer.writerow([names[row], name, *(f"{p:.6f}" for p in each)])
    done = Predicted(len(chosen))
    if labels is not None:
        done.judge(said, [labels[row] for row in chosen], classes)
    return done
