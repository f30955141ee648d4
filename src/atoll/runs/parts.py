"""Builds the parts of a run from its config: data set, scenario, sites, server, clients."""

import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from atoll import data, methods
from atoll.core.errors import UserError
from atoll.core.federation import SERVER
from atoll.core.method import Method
from atoll.core.plugins import is_foreign
from atoll.core.rng import Stream
from atoll.core.rows import Public
from atoll.data.dataset import Dataset
from atoll.data.public import public
from atoll.data.scenario import Scenario
from atoll.data.site import AttributionProbe, Shelf, Site, View
from atoll.data.splits import load, split
from atoll.data.vectors import Vectors
from atoll.data.vectors import load as load_vectors
from atoll.data.vertical_site import VerticalSite
from atoll.learning.foreign import first_values, frozen_layers, has_own_values
from atoll.learning.models import ModelOptions, network
from atoll.learning.textcnn import TextCNN, Words
from atoll.metrics.answer import ERRORS, OF_TWO, Metric, metric_of
from atoll.runs.config import RunConfig
from atoll.runs.replacement import replaced

__all__ = ["Parts", "device", "parts", "refuse_labels", "with_first_values"]


def device(name: str) -> torch.device:
    """The device of an option; `auto` is the accelerator if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"unknown device '{name}'", "engine.device", "use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device here", "engine.device", "use --device cpu, or see atoll doctor"
        )
    return torch.device(name)


@dataclass(frozen=True)
class Parts:
    """All parts of a run."""

    config: RunConfig
    dataset: Dataset
    scenario: Scenario

    @cached_property
    def _shelf(self) -> Shelf:
        rows = [h.train for holdings in self.scenario.holdings.values() for h in holdings]
        train = np.unique(np.concatenate(rows))
        where = device(self.config.engine_options().device)
        return Shelf(
            self.dataset, self.config.scale, train, where, getattr(torch, self.config.dtype)
        )

    def site(self, id: str) -> Any:
        """What the participant with this id may see: a Site, or a VerticalSite, by the split."""
        balanced = self.config.class_weight == "balanced"
        view = View(id, self._shelf, self.dataset, self.scenario, self.config.seed, balanced)
        if self.scenario.labels_at_server:
            return VerticalSite(view)
        models, clients = self.config.models, self.scenario.clients
        model = models[clients.index(id)] if models and id in clients else ""
        own = self._kinds.setdefault(model, partial(self._network, name=model))
        return Site(
            view,
            self._network,
            special=own,
            public=lambda: self.public,
            probe=self.probe,
            metric=self.metric,
        )

    @cached_property
    def _kinds(self) -> dict[str, partial[torch.nn.Module]]:
        """Network factories by name, shared so that sites can detect equal networks."""
        return {}

    @cached_property
    def metric(self) -> Metric:
        """The metric that compares models: that of the config, else in regression mae."""
        return metric_of(self.config.report_options().metric, self.dataset.regression)

    @cached_property
    def method(self) -> Method:
        """The method, with the run's replacement applied."""
        return replaced(str(self.config.method["name"]), self.config.replace)

    @cached_property
    def _options(self) -> Any:
        return self.config.options()

    @cached_property
    def probe(self) -> AttributionProbe:
        """Collects what sites of this process report about their models in each round."""
        return AttributionProbe(self.config.attribution)

    @cached_property
    def public(self) -> Public:
        """The unlabelled images that all parts share, on the device."""
        config = self.config
        options, scale, seed = config.public_options(), config.scale, config.seed
        images = public(options, self.dataset, scale, seed, data.load)
        where, dtype = self._shelf.x.device, self._shelf.dtype
        x, mean, deviation = (t.to(where, dtype) for t in (images.x, images.mean, images.deviation))
        return Public(x, mean, deviation, images.fingerprint)

    @cached_property
    def vectors(self) -> Vectors:
        """The word vectors that read the texts."""
        options = self.config.model_options()
        name = self.dataset.vectors if options.vectors == "best" else options.vectors
        return load_vectors(self.dataset.words, name, options.norm)

    @cached_property
    def _words(self) -> Words:
        """The word vectors on the device, shared by all sites of this process."""
        table, shelf = torch.from_numpy(self.vectors.table), self._shelf
        mask = torch.from_numpy(self.vectors.known).to(shelf.x.device)
        return Words(self.vectors.name, table.to(shelf.x.device, shelf.dtype), mask)

    def _network(
        self, shape: tuple[int, ...], classes: int, stream: Stream, name: str = ""
    ) -> torch.nn.Module:
        options = self.config.model_options()
        if name:
            options = replace(options, name=name)
        if self.dataset.kind == "text":
            if not options.widths:
                raise UserError("a text CNN without filters", "model.widths", "give one number")
            return TextCNN(self._words, options.widths[-1], classes, stream)
        return network(shape, classes, options, stream)

    def client(self, id: str) -> Any:
        """Create a client."""
        return self.method.client(self._options, self.site(id))

    @property
    def concurrency(self) -> int:
        """The maximum number of clients in a round."""
        limit = methods.load(self.config.method["name"]).concurrency
        every = len(self.scenario.clients)
        return every if limit is None else limit(self._options, every)

    def server(self) -> Any:
        """Create the server."""
        return self.method.server(self.config.options(), self.site(SERVER))


def refuse_labels(dataset: Dataset, config: RunConfig) -> None:
    """Refuse labels and weights that the method or the metric does not support."""
    name = str(config.method["name"])
    if dataset.regression and not methods.load(name).regression:
        what = f"'{name}' predicts classes, and the label '{dataset.classes[0]}' is a number"
        able = ", ".join(other for other in methods.names() if methods.load(other).regression)
        remedy = f'use one of {able}; or set task = "classification" in [data]'
        raise UserError(what, "method.name", remedy)
    _check_metric(config.report_options().metric, dataset)
    _refuse_weights(dataset, config)


def _check_metric(metric: str, dataset: Dataset) -> None:
    """Refuse a metric that does not fit the label; `accuracy` is the default."""
    if dataset.regression != (metric in ERRORS) and metric != "accuracy":
        kind, others = ("a number", "mae or mse") if dataset.regression else ("a class", "accuracy")
        what = f"{metric} does not judge predictions of {kind}"
        raise UserError(what, "report.metric", f"use {others}")
    if metric in OF_TWO and len(dataset.classes) != 2:
        what = f"{metric} is for two classes and '{dataset.name}' has {len(dataset.classes)}"
        raise UserError(what, "report.metric", "use accuracy or balanced accuracy")


def _refuse_weights(dataset: Dataset, config: RunConfig) -> None:
    """Refuse weights of rows or classes that the method would ignore."""
    name = str(config.method["name"])
    method = methods.load(name)
    if config.class_weight != "none" and dataset.regression:
        what = "the label is a number, and class_weight is for classes"
        raise UserError(what, "class_weight", "leave class_weight out")
    if config.class_weight != "none" and not (method.weighted or method.weighs_classes):
        what = f"'{name}' does not use the weights of classes"
        raise UserError(what, "class_weight", "leave class_weight out")
    if dataset.weights is not None and not method.weighted:
        able = [other for other in methods.names() if methods.load(other).weighted]
        remedy = f"use {', '.join(able)}, or leave data.weights out"
        raise UserError(f"'{name}' does not use the weights of rows", "data.weights", remedy)


def parts(config: RunConfig, loaded: dict[str, Dataset] | None = None) -> Parts:
    """Load and split the data; raises every error in the config.

    `loaded` caches the loaded data, so that the runs of a sweep load them once.
    """
    key, shelf = json.dumps(config.data, sort_keys=True), {} if loaded is None else loaded
    if key not in shelf:
        options = {name: value for name, value in config.data.items() if name != "name"}
        shelf[key] = data.load(str(config.data.get("name", "")), **options)
    dataset = shelf[key]
    name = str(config.method["name"])
    needed = methods.load(name).split
    vertical = load(needed).vertical
    if "parties" in config.data and not vertical:
        what = f"'{name}' needs whole rows, and parties hold columns of the same rows"
        both = [other for other in methods.names() if load(methods.load(other).split).vertical]
        remedy = (
            f"use {' or '.join(both)}; for one party alone, give its table as data.files, or read "
            "the answer of these methods, which trains each party alone"
        )
        raise UserError(what, "method.name", remedy)
    if vertical != load(config.split).vertical:
        what = f"'{name}' cannot run where the split is '{config.split}'"
        raise UserError(what, "scenario.split", f"use split = '{needed}'")
    if vertical and config.model_options().widths != ModelOptions().widths:
        what = f"the networks of '{name}' have no widths that could be set"
        raise UserError(what, "model.widths", "leave it out; method.width is their output")
    refuse_labels(dataset, config)
    dealt = split(dataset, config.scenario_options(), config.seed, config.split)
    if config.models and len(config.models) != len(dealt.clients):
        what = f"{len(config.models)} models for {len(dealt.clients)} clients"
        raise UserError(what, "models", "name one for each, or none and set model.name")
    return with_first_values(Parts(config, dataset, dealt))


def with_first_values(run_parts: Parts) -> Parts:
    """Write the hash of a plug-in's own initial values into the config, or compare it."""
    config, options = run_parts.config, run_parts.config.model_options()
    names = [name or options.name for name in config.models or ("",)]
    own = [n for n in dict.fromkeys(names) if _has_own_values(n, options.initial)]
    if not own or run_parts.scenario.labels_at_server or run_parts.dataset.kind == "text":
        return run_parts
    shape = run_parts.site(run_parts.scenario.clients[0]).inputs()
    stream, classes = Stream.of("first values"), len(run_parts.dataset.classes)
    models = [network(shape, classes, replace(options, name=name), stream) for name in own]
    values = "-".join(first_values(model) for model in models)
    if options.weights not in ("", values):
        what = "the network begins with other values than those that the config names"
        raise UserError(what, "model.weights", "restore them, or start a new run without the hash")
    frozen = sorted({name for model in models for name in frozen_layers(model)})
    chosen = {**config.model, "weights": values, "frozen": frozen}
    return replace(run_parts, config=replace(config, model=chosen))


def _has_own_values(name: str, initial: str) -> bool:
    return is_foreign(name, "atoll.models") and has_own_values(name, initial)
