"""Federations with one site: the same method and budget with one site's rows, or all rows."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import torch

from atoll import methods
from atoll.core.messages import Tensors
from atoll.core.record import Record, read_checkpoint
from atoll.data.dataset import Dataset
from atoll.data.scenario import Holding, Scenario
from atoll.learning.split_nets import NetName, chosen
from atoll.metrics.answer import POOLED
from atoll.runs.config import RunConfig, to_toml
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import Parts

if TYPE_CHECKING:
    from atoll.runs.execute import OpenEngine

__all__ = ["alone_parts", "pooled_parts", "train_parts"]

Array = np.ndarray[Any, Any]
_NONE = np.empty(0, dtype=np.int64)
READS_OWN = "columns"  # the split for methods that read the columns of one site alone
EACH = "_each"  # suffix of options with one value per client


def alone_parts(parts: Parts, id: str) -> Parts:
    """The parts of a federation of one site, with the classes and tasks of the whole federation.

    Method, options, seed and rounds stay. Random streams are named after the site, so without an
    exchange it computes what it computes in the federation, bit for bit.
    """
    config = _of_one(parts.config, parts.scenario.clients.index(id), len(parts.scenario.clients))
    reads_own = methods.load(str(parts.config.method["name"])).split == READS_OWN
    return Parts(config, parts.dataset, _scenario_of_one(parts.scenario, id, reads_own))


def _of_one(config: RunConfig, place: int, count: int) -> RunConfig:
    """The config of a federation of one site; per-client lists keep only this site's value."""
    method = dict(config.method)
    for name, value in config.method.items():
        if name.endswith(EACH) and isinstance(value, list | tuple) and len(value) == count:
            method[name] = [value[place]]
    models = config.models[place : place + 1]
    return dataclasses.replace(
        config,
        method=method,
        models=models,
        score_every=0,
        attribution=False,
        looks=False,
        checkpoints=True,
        checkpoint_seconds=1e9,  # test only at the end
    )


def _scenario_of_one(scenario: Scenario, id: str, reads_own: bool) -> Scenario:
    """The scenario of one site, without the stages before it joins.

    Its columns are all common, as no site lacks one: a method for common columns reads all that the
    site has. A method that also reads own columns does so in any case, and keeps the division.
    """
    holdings, common = scenario.holdings[id], scenario.common
    stages = [number for number, holding in enumerate(holdings) if len(holding.train)]
    chosen = [holdings[number] for number in stages]
    if not (reads_own or scenario.labels_at_server):
        common = np.concatenate([common, holdings[-1].own])
        chosen = [dataclasses.replace(holding, own=holding.own[:0]) for holding in chosen]
    known_at = [sum(stage < since for stage in stages) for since in scenario.known_at]
    return dataclasses.replace(
        scenario,
        clients=(id,),
        holdings={id: tuple(chosen)},
        common=common,
        tests={id: scenario.tests[id]},
        known_at=tuple(min(since, len(stages) - 1) for since in known_at),
    )


def pooled_parts(parts: Parts) -> Parts:
    """The parts of a federation of one site that has the rows and columns of all sites.

    It trains for as many rounds and epochs as the run. If parties have different columns, one
    network as wide as that of one party reads all of them, so the parties together have more units.
    """
    config = _of_one(parts.config, 0, len(parts.scenario.clients))
    config = dataclasses.replace(config, method=config.method | _network_of_parties(parts))
    reads_own = methods.load(str(parts.config.method["name"])).split == READS_OWN
    return Parts(config, parts.dataset, _pooled(parts.scenario, parts.dataset, reads_own))


def _network_of_parties(parts: Parts) -> dict[str, str]:
    """The network that all parties share, if the method derives it from the shape of their columns.

    A whole image has another shape than its parts, so the method would choose another network.
    """
    method = methods.load(str(parts.config.method["name"]))
    follows = get_type_hints(method.options).get("network") == NetName
    if not parts.scenario.labels_at_server or not follows:
        return {}
    name: NetName = parts.config.options().network
    kinds = {chosen(name, parts.site(id).inputs()) for id in parts.scenario.clients}
    return {"network": kinds.pop()} if len(kinds) == 1 else {}


def _pooled(scenario: Scenario, dataset: Dataset, reads_own: bool) -> Scenario:
    """The scenario of one site; columns that only some have are its own, or common."""
    common, holdings = scenario.common, []
    own = _all(stages[-1].own for stages in scenario.holdings.values())
    if not scenario.labels_at_server and dataset.kind == "table":
        own = _known(dataset, np.setdiff1d(own, common))
    for stage in range(scenario.stages):
        here = [stages[stage] for stages in scenario.holdings.values()]
        train, valid = (
            _all(getattr(holding, part) for holding in here) for part in ("train", "valid")
        )
        columns = _all(holding.own for holding in here) if scenario.labels_at_server else own
        holdings.append(Holding(train, valid, columns))
    if not (reads_own or scenario.labels_at_server):
        common = np.concatenate([common, own])
        holdings = [dataclasses.replace(holding, own=_NONE) for holding in holdings]
    first = scenario.clients[0]
    return dataclasses.replace(
        scenario,
        clients=(POOLED,),
        holdings={POOLED: tuple(holdings)},
        common=common,
        tests={POOLED: scenario.tests[first]},
    )


def _all(several: Iterable[Array]) -> Array:
    """The sorted unique numbers of several parts."""
    return np.unique(np.concatenate([_NONE, *several]))


def _known(dataset: Dataset, columns: Array) -> Array:
    """The columns that have a value in every row; own tables impute missing values."""
    if dataset.layout is not None:
        return columns
    return columns[~np.isnan(dataset.x[:, columns]).any(0)]


def train_parts(
    parts: Parts, folder: Path, open_engine: "OpenEngine", stopping: Callable[[], bool]
) -> Tensors:
    """Run some parts in a separate folder; return the final states of clients and server."""
    with (
        Record.create(folder, to_toml(parts.config), facts(parts)) as record,
        open_engine(parts, lambda: dataclasses.replace(parts), folder) as engine,
    ):
        go(parts, engine, record, lambda progress: None, stopping)
    tensors, _ = read_checkpoint(folder)
    return {name: torch.from_numpy(array) for name, array in tensors.items()}
