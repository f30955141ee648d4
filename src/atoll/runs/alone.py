"""The fair baseline of joining: the same method and budget in a federation of one site."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from atoll import methods
from atoll.core.messages import Tensors
from atoll.core.record import Record, read_checkpoint
from atoll.data.scenario import Holding, Scenario
from atoll.runs.config import RunConfig, to_toml
from atoll.runs.execute import OpenEngine
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import Parts

__all__ = ["alone_parts", "train_parts"]

READS_OWN = "columns"  # the split of methods that read the columns of one site alone
EACH = "_each"  # how options end that have a value for each client


def alone_parts(parts: Parts, id: str) -> Parts:
    """The parts of a federation of one site: its rows and columns, the classes and tasks of all.

    Method, options, seed and rounds stay. Random streams are named after the site, so without an
    exchange it computes what it computes in the federation, bit for bit.
    """
    config = _of_one(parts.config, parts.scenario.clients.index(id), len(parts.scenario.clients))
    reads_own = methods.load(str(parts.config.method["name"])).split == READS_OWN
    return Parts(config, parts.dataset, _scenario_of_one(parts.scenario, id, reads_own))


def _of_one(config: RunConfig, place: int, count: int) -> RunConfig:
    """The config of a federation of one; lists with a value for each client keep this site's."""
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
        checkpoint_seconds=1e9,  # at the end alone
    )


def _scenario_of_one(scenario: Scenario, id: str, reads_own: bool) -> Scenario:
    """The scenario of one site, without stages before it joins.

    Its columns are all common, as nobody lacks one: a method for common columns reads all that the
    site has. A method that also reads own columns does so in any case, and keeps the division.
    """
    holdings, common = scenario.holdings[id], scenario.common
    stages = [number for number, held in enumerate(holdings) if len(held.train)]
    chosen = [holdings[number] for number in stages]
    if not (reads_own or scenario.labels_at_server):
        common = np.concatenate([common, holdings[-1].own])
        chosen = [_without_own(held) for held in chosen]
    known_at = [sum(stage < since for stage in stages) for since in scenario.known_at]
    return dataclasses.replace(
        scenario,
        clients=(id,),
        holdings={id: tuple(chosen)},
        common=common,
        tests={id: scenario.tests[id]},
        known_at=tuple(min(since, len(stages) - 1) for since in known_at),
    )


def _without_own(held: Holding) -> Holding:
    return dataclasses.replace(held, own=held.own[:0])


def train_parts(
    parts: Parts, folder: Path, open_engine: OpenEngine, stopping: Callable[[], bool]
) -> Tensors:
    """Run some parts in a folder of their own; the states of clients and server at the end."""
    with (
        Record.create(folder, to_toml(parts.config), facts(parts)) as record,
        open_engine(parts, lambda: dataclasses.replace(parts), folder) as engine,
    ):
        go(parts, engine, record, lambda progress: None, stopping)
    tensors, _ = read_checkpoint(folder)
    return {name: torch.from_numpy(array) for name, array in tensors.items()}
