"""The final model of one part of a run, restored from its folder without the run's data."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.federation import SERVER
from atoll.core.messages import Tensors
from atoll.core.options import nearest
from atoll.core.record import read_checkpoint
from atoll.core.rows import Rows
from atoll.data.dataset import Dataset
from atoll.data.own.encoding import Block
from atoll.data.scaling import Target, colours
from atoll.data.scenario import Holding, Scenario
from atoll.data.site import filled
from atoll.data.vertical_site import block
from atoll.jobs.train import in_chunks
from atoll.learning.foreign import frozen_values
from atoll.learning.weights import without
from atoll.runs.config import RunConfig
from atoll.runs.folders import recorded
from atoll.runs.parts import Parts, with_first_values
from atoll.runs.result import Run, absent_run, runs_in

__all__ = ["Array", "Predictor", "ended_state", "held_out_rows", "predictor_of", "refuse_other"]

Array = np.ndarray[Any, Any]
TYPES = {"table": np.float32, "image": np.uint8, "text": np.int32}  # of a row's inputs


@dataclass(frozen=True)
class Predictor:
    """One site's final model in a run's folder, or the server's if the network is split."""

    folder: Path
    called: str  # the site's id, or the name of its domain or file
    variant: str = ""  # empty: the headline variant of the method
    task: str = ""  # empty: the last task
    others: tuple["Predictor", ...] = ()  # the same site in runs with other seeds, to average

    @cached_property
    def run(self) -> Run:
        """The run's record."""
        return Run(self.folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The description of the inputs of the run's models."""
        if not (self.folder / "config.toml").exists():
            raise absent_run(self.folder)
        if not self.run.recipe:
            remedy = "run it again in another folder"
            raise UserError("this run does not say what its models read", str(self.folder), remedy)
        return self.run.recipe

    @property
    def kind(self) -> str:
        """The kind of data: table, image or text."""
        return str(self.recipe.get("kind", "table"))  # older runs on tables have no kind

    @property
    def vertical(self) -> bool:
        """Whether sites have different columns of the same rows."""
        return bool(self.recipe.get("labels_at_server", "parties" in self.recipe))

    @cached_property
    def site(self) -> str:
        """The site's id."""
        sites = self.recipe["sites"]
        ids = {one.get("called", id): id for id, one in sites.items()} | {id: id for id in sites}
        if self.vertical:
            ids |= {SERVER: SERVER}
        if self.called not in ids:
            what = f"no site '{self.called}' in this run"
            raise UserError(what, "--site", nearest(self.called, ids))
        return str(ids[self.called])

    @property
    def about(self) -> dict[str, Any]:
        """The recipe's entry of this site."""
        return dict(self.recipe["sites"][self.site])

    @property
    def chosen(self) -> str:
        """The variant that predicts: the requested one, else the method's headline."""
        if self.variant and self.variant not in self.run.variants:
            raise UserError(
                f"this run has no model '{self.variant}'", "--model",
                nearest(self.variant, self.run.variants),
            )  # fmt: skip
        if not self.run.variants:
            remedy = "restore it from a copy, or run it again in another folder"
            raise UserError("no scores in the record", str(self.folder / "events.jsonl"), remedy)
        return self.variant or self.run.headline

    @property
    def task_number(self) -> int:
        """The number of the task to predict: the requested one, else the last."""
        tasks = [str(name) for name in self.run.facts["tasks"]]
        if self.task and self.task not in tasks:
            raise UserError(f"no task '{self.task}'", "--task", nearest(self.task, tasks))
        return tasks.index(self.task) if self.task else len(tasks) - 1

    @cached_property
    def config(self) -> RunConfig:
        """The run's config, adapted to the CPU of this machine."""
        config = recorded(self.folder)
        return dataclasses.replace(config, engine={**config.engine, "device": "cpu"})

    @cached_property
    def _state(self) -> Tensors:
        return ended_state(self.folder)

    @cached_property
    def _parts(self) -> Parts:
        return _bare(self.config, self.recipe)

    @cached_property
    def frozen(self) -> Tensors:
        """The values of frozen layers, which are not part of the weights."""
        if not self.config.model_options().frozen:
            return {}
        return frozen_values(self._parts.site(self.site).model())

    @cached_property
    def _part(self) -> Any:
        """The client or the server in its final state."""
        state, bare = self._state, self._parts
        if self.kind == "text" and bare.vectors.facts != self.run.facts["vectors"]:
            what = f"the word vectors '{bare.vectors.name}' are not those that the run read"
            raise UserError(what, "model.vectors", "bring back the file of that time")
        if self.site == SERVER:
            part, own = bare.server(), without("server", state)
        else:
            part, own = bare.client(self.site), without(f"client/{self.site}", state)
        if not hasattr(part, "predict"):
            what = f"'{self.config.method['name']}' has no model to predict with"
            remedy = "its client needs final_model and predict: see docs/method.md"
            raise UserError(what, str(self.folder), remedy)
        if own:
            part.restore(own)
        elif part.state():
            raise UserError(
                f"the model of '{self.site}' is not in this folder", str(self.folder),
                "it stayed at its site: predict with the folder that is there",
            )  # fmt: skip
        return part

    @cached_property
    def model(self) -> Tensors:
        """The weights."""
        shared, variant = without("server", self._state), self.chosen
        model: Tensors = self._part.final_model(shared, variant, self.task_number)
        return model

    def outputs(self, rows: Any) -> Tensor:
        """The logits of rows; at a site with columns, the embeddings that the server reads."""
        outputs: Tensor = self._part.predict(self.model, rows)
        return outputs

    def final(self, outputs: Tensor) -> Tensor:
        """Convert network outputs to class probabilities, in regression to the label's unit."""
        if self.recipe.get("task") != "regression":
            return torch.softmax(outputs.double(), -1)
        place = self.recipe if self.site == SERVER else self.about
        return Target(*place.get("target", (0.0, 1.0))).restore(outputs)

    @torch.no_grad()
    def probabilities(self, x: Array) -> Array:
        """The class probabilities, or predicted numbers, of rows as `rows` expects them.

        With runs of other seeds, the mean over all of them.
        """
        logits = in_chunks(self.outputs, self.rows(torch.from_numpy(x)))
        own = np.asarray(self.final(logits).numpy())
        every = [own, *(other.probabilities(x) for other in self.others)]
        return np.mean(every, axis=0) if self.others else own

    def rows(self, x: Tensor) -> Rows:
        """Convert rows to model inputs: impute gaps, scale columns and pixels.

        `x` has the columns of the site in ascending order, the bytes of images, or tokens.
        """
        dtype = getattr(torch, self.config.dtype)
        count = x.shape[0]  # not len(x): it is symbolic while tracing a graph
        none = torch.zeros((count, 0), dtype=dtype)
        y = torch.zeros(count, dtype=torch.int64)
        if self.kind == "text":
            return Rows(x, none, y)
        x = x.to(dtype)
        if self.kind == "image":
            return Rows(self._pixels(x), none, y)
        if self.vertical:
            return Rows(_scaled(x, self.about.get("scaling")), none, y)
        common, own = self.recipe["common"], self.about["own"]
        read, scaling = sorted([*common, *own]), self.about.get("scaling", {})
        parts = [
            _scaled(x[:, [read.index(place) for place in places]], scaling.get(name))
            for name, places in (("common", common), ("own", own))
        ]
        return Rows(parts[0], parts[1], y)

    def _pixels(self, x: Tensor) -> Tensor:
        """Scale the bytes of images; parts of an image are flattened."""
        shape = tuple(self.recipe["shape"])
        mean, deviation = (
            torch.tensor(value, dtype=x.dtype).expand(shape)
            for value in colours(self.config.scale, shape[0])
        )
        if not self.vertical:
            return (x / 255 - mean) / deviation
        own = self.about["own"]
        scaled = (x / 255 - mean.flatten()[own]) / deviation.flatten()[own]
        return scaled.reshape(-1, *block(np.array(own), shape))

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of one row for `rows`."""
        if self.kind == "table" or self.vertical:
            return (len(self.about["own"]) + len(self.recipe.get("common", ())),)
        return tuple(self.recipe["shape"])


def predictor_of(
    folder: Path, site: str, variant: str = "", task: str = "", seed: int | None = None
) -> Predictor:
    """The model of a site in a run, or the mean over the seeds in a folder of runs.

    With `seed`, only the run with that seed.
    """
    first, *others = [Predictor(run, site, variant, task) for run in runs_in(folder)] or [
        Predictor(folder, site, variant, task)
    ]
    for other in others:
        if other.recipe["classes"] != first.recipe["classes"] or _but_seed(other) != _but_seed(
            first
        ):
            raise absent_run(folder)  # different data, methods or options: no mean
    if seed is None:
        return dataclasses.replace(first, others=tuple(others))
    by_seed = {one.config.seed: one for one in (first, *others)}
    if seed not in by_seed:
        seeds = ", ".join(str(number) for number in sorted(by_seed))
        raise UserError(f"no run of seed {seed} in this folder", "--seed", f"possible: {seeds}")
    return by_seed[seed]


def _but_seed(predictor: Predictor) -> RunConfig:
    """The config of a run, without the values that differ between seeds."""
    return dataclasses.replace(predictor.config, seed=0, name="")


def _scaled(x: Tensor, scaling: Any) -> Tensor:
    """Impute and scale columns by a recipe; None: they are already scaled."""
    return x if scaling is None else filled(x, torch.tensor(scaling, dtype=torch.float64))


def _bare(config: RunConfig, recipe: Mapping[str, Any]) -> Parts:
    """The parts of a run without its data, only with shapes."""
    kind, sites = recipe.get("kind", "table"), recipe["sites"]
    if "blocks" in recipe:
        shape = [sum(Block.of(block).width for block in recipe["blocks"])]
    else:  # older runs of parties have no shape
        shape = recipe.get("shape") or [sum(len(one["own"]) for one in sites.values())]
    row, none = np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)
    y = row.astype(float) if recipe.get("task") == "regression" else row
    dataset = Dataset(
        "", kind, np.zeros((1, *shape), dtype=TYPES[kind]), y, (), tuple(recipe["classes"]), "",
        words=tuple(recipe.get("words", ())), vectors=recipe.get("vectors", "best"),
    )  # fmt: skip
    holdings = {}
    for id, site in sites.items():
        own, since = site.get("own", []), site.get("since", 0)
        stages = [own if stage >= since else [] for stage in range(recipe.get("stages", 1))]
        holdings[id] = tuple(Holding(row, none, np.array(columns, dtype=int)) for columns in stages)
    if kind == "image":
        config = dataclasses.replace(
            config, public={"name": "patterns", "rows": 1}
        )  # not requested
    vertical = recipe.get("labels_at_server", "parties" in recipe)
    common, tests = np.array(recipe.get("common", []), dtype=int), dict.fromkeys(sites, (none,))
    scenario = Scenario(tuple(sites), holdings, common, tests, ("all",), (0,), vertical)
    return with_first_values(Parts(config, dataset, scenario))


def ended_state(folder: Path) -> Tensors:
    """The final states of the parts of a run."""
    if not (folder / "result.json").exists():
        remedy = f"continue it as it was started, for example atoll run --resume --out {folder}"
        raise UserError("the run has not ended", str(folder), remedy)
    tensors, head = read_checkpoint(folder)
    files, saved = Run(folder).integrity.as_json(), head.get("files", {})
    if any(saved[name] != files[name] for name in files.keys() & saved.keys()):
        remedy = "restore the folder from one copy, or run it again in another folder"
        raise UserError("the checkpoint is not of this run's end", str(folder), remedy)
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def held_out_rows(predictor: Predictor, path: Path, count: int, mark: str) -> Array:
    """The rows of a site's own file that the run reserved for tests, or only those of one task."""
    about = predictor.about
    if "held_out" not in about:
        raise UserError(
            "this run does not say which of your rows it kept for tests", "--held-out",
            "leave it out; it is for runs on your own files",
        )  # fmt: skip
    if about["rows"] != count:
        what = f"the file has {count:,} rows, the run read {about['rows']:,}"
        raise UserError(what, str(path), "give the file that the run was made with")
    if about.get("fingerprint", "") not in ("", mark):  # older runs have none
        refuse_other(path)
    tests = about["held_out"]
    if predictor.kind == "text":  # each task has a separate model
        tests = [tests[predictor.task_number]]
    return np.concatenate([np.ravel(rows) for rows in tests]).astype(np.int64)


def refuse_other(path: Path) -> NoReturn:
    """Refuse a file with as many rows as the run's file but other content."""
    what = "the file is not the one that the run read, or has changed since"
    raise UserError(what, str(path), "give the file that the run was made with")
