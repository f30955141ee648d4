"""A config becomes its parts: data set, scenario, sites, server, clients."""

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
from atoll.learning.models import ModelOptions, network
from atoll.learning.textcnn import TextCNN, Words
from atoll.runs.config import RunConfig
from atoll.runs.replacement import replaced

__all__ = ["Parts", "device", "parts"]


def device(name: str) -> torch.device:
    """The device that an option names; auto is the accelerator where there is one."""
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
    """All that a run is made of."""

    config: RunConfig
    dataset: Dataset
    scenario: Scenario

    @cached_property
    def _shelf(self) -> Shelf:
        held = [h.train for holdings in self.scenario.holdings.values() for h in holdings]
        train = np.unique(np.concatenate(held))
        where = device(self.config.engine_options().device)
        return Shelf(
            self.dataset, self.config.scale, train, where, getattr(torch, self.config.dtype)
        )

    def site(self, id: str) -> Any:
        """What the participant with this id may see: a Site, or a VerticalSite, by the split."""
        view = View(id, self._shelf, self.dataset, self.scenario, self.config.seed)
        if self.scenario.labels_at_server:
            return VerticalSite(view)
        models, clients = self.config.models, self.scenario.clients
        named = models[clients.index(id)] if models and id in clients else ""
        own = self._kinds.setdefault(named, partial(self._network, name=named))
        return Site(view, self._network, special=own, public=lambda: self.public, probe=self.probe)

    @cached_property
    def _kinds(self) -> dict[str, partial[torch.nn.Module]]:
        """Makers of networks by name, so that sites can see that theirs is the same."""
        return {}

    @cached_property
    def method(self) -> Method:
        """The method, with the run's replacement applied."""
        return replaced(str(self.config.method["name"]), self.config.replace)

    @cached_property
    def _options(self) -> Any:
        return self.config.options()

    @cached_property
    def probe(self) -> AttributionProbe:
        """Where the sites of this process put what they see of their models in each round."""
        return AttributionProbe(self.config.attribution)

    @cached_property
    def public(self) -> Public:
        """The images without labels that all parts have, on the device."""
        config = self.config
        options, scale, seed = config.public_options(), config.scale, config.seed
        images = public(options, self.dataset, scale, seed, data.load)
        where, dtype = self._shelf.x.device, self._shelf.dtype
        x, mean, deviation = (t.to(where, dtype) for t in (images.x, images.mean, images.deviation))
        return Public(x, mean, deviation, images.fingerprint)

    @cached_property
    def vectors(self) -> Vectors:
        """The word vectors that texts are read with."""
        options = self.config.model_options()
        name = self.dataset.vectors if options.vectors == "best" else options.vectors
        return load_vectors(self.dataset.words, name, options.norm)

    @cached_property
    def _words(self) -> Words:
        """The word vectors on the device, once for all sites of this process."""
        table, shelf = torch.from_numpy(self.vectors.table), self._shelf
        known = torch.from_numpy(self.vectors.known).to(shelf.x.device)
        return Words(self.vectors.name, table.to(shelf.x.device, shelf.dtype), known)

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
        """A new client."""
        return self.method.client(self._options, self.site(id))

    @property
    def asked(self) -> int:
        """How many clients a round asks at most."""
        asked = methods.load(self.config.method["name"]).asked
        every = len(self.scenario.clients)
        return every if asked is None else asked(self._options, every)

    def server(self) -> Any:
        """A new server."""
        return self.method.server(self.config.options(), self.site(SERVER))


def parts(config: RunConfig, loaded: dict[str, Dataset] | None = None) -> Parts:
    """Load the data and deal it out; every mistake in the config is found here.

    `loaded` is filled with what was loaded, so that the runs of a sweep load it once.
    """
    key, shelf = json.dumps(config.data, sort_keys=True), {} if loaded is None else loaded
    if key not in shelf:
        options = {name: value for name, value in config.data.items() if name != "name"}
        shelf[key] = data.load(str(config.data.get("name", "")), **options)
    dataset = shelf[key]
    name = str(config.method["name"])
    wanted = methods.load(name).split
    vertical = load(wanted).vertical
    if "parties" in config.data and not vertical:
        what = f"'{name}' needs whole rows, and parties hold columns of the same rows"
        both = [other for other in methods.names() if load(methods.load(other).split).vertical]
        remedy = f"use {' or '.join(both)}; for one party alone, give its table as data.files"
        raise UserError(what, "method.name", remedy)
    if vertical != load(config.split).vertical:
        what = f"'{name}' cannot run where the split is '{config.split}'"
        raise UserError(what, "scenario.split", f"use split = '{wanted}'")
    if vertical and config.model_options().widths != ModelOptions().widths:
        what = f"the networks of '{name}' have no widths that could be set"
        raise UserError(what, "model.widths", "leave it out; method.width is their output")
    if config.report_options().metric == "auroc" and len(dataset.classes) != 2:
        what = f"auroc is for two classes and '{dataset.name}' has {len(dataset.classes)}"
        raise UserError(what, "report.metric", "use accuracy or balanced accuracy")
    dealt = split(dataset, config.scenario_options(), config.seed, config.split)
    if config.models and len(config.models) != len(dealt.clients):
        what = f"{len(config.models)} models for {len(dealt.clients)} clients"
        raise UserError(what, "models", "name one for each, or none and set model.name")
    return Parts(config, dataset, dealt)
