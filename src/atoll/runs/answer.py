"""Computes the answer of finished runs, writes it to `answer.json` and reads it.

The answer of a single run is in the run's folder; the answer over seeds is in the parent folder.
The file is derived from the record, like `result.json`. It contains its digest and those of the
events it depends on, so that atoll refuses a changed or outdated file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from atoll.compute.deterministic import deterministic_torch
from atoll.core.errors import UserError
from atoll.core.integrity import digest
from atoll.core.record import write_whole
from atoll.data.dataset import Dataset
from atoll.metrics.answer import ERRORS, POOLED, Outcome, answer
from atoll.runs.config import RunConfig
from atoll.runs.execute import OpenEngine
from atoll.runs.facts import same_data
from atoll.runs.folders import recorded
from atoll.runs.outcomes import outcomes, with_pooled, with_variants
from atoll.runs.parts import Parts, parts
from atoll.runs.predict.model import ended_state
from atoll.runs.result import ANSWER, Run, plain, read_answer

__all__ = ["answer_folder", "own_answer", "write_answer", "write_assembled"]

FORMAT = 1
OUTCOMES = "outcomes.safetensors"
FREE = ("name", "seed", "engine", "checkpoints", "checkpoint_seconds", "attribution", "looks")
ONE_NETWORK = (
    "in one place, one network as wide as that of one party reads all columns; the parties "
    "together have more units, so joining can score higher"
)


def answer_folder(runs: Sequence[Path]) -> Path:
    """The folder of the answer: that of a single run, else the parent folder of all runs."""
    if len(runs) == 1:
        return runs[0]
    above = {folder.resolve().parent for folder in runs}
    if len(above) > 1:
        what = "the runs lie in different folders"
        raise UserError(what, str(runs[0]), "give runs of one config that share a folder")
    return runs[0].parent


def write_answer(
    folders: Sequence[Path],
    open_engine: Callable[[str], OpenEngine],
    watch: Callable[[str], None] = lambda words: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Compute and write the answer of finished runs that differ only in their seed.

    `open_engine` returns the engine with a name; `watch` receives a description of each step.
    """
    home = answer_folder(folders)
    runs = [Run(folder) for folder in folders]
    with suppress(UserError):  # recompute a damaged answer
        existing = read_answer(home, runs)
        if existing is not None:
            return existing
    configs = [recorded(folder) for folder in folders]
    _refuse_different(configs, folders)
    if not all(config.checkpoints for config in configs):
        what = "the run has no checkpoint, so there are no models to compare"
        raise UserError(what, str(folders[0]), "run it with checkpoints = true")
    loaded: dict[str, Dataset] = {}
    by_seed = []
    for run, config in zip(runs, configs, strict=True):
        engine = open_engine(config.engine_options().name)
        by_seed.append(_outcomes(run, config, engine, loaded, (watch, stopping)))
    sites = {id: [seed[id] for seed in by_seed] for id in by_seed[0]}
    report = configs[0].report_options()
    body = answer(sites, runs[0].metric, report.margin / 100)
    body["notes"] += _notes(configs[0], runs[0], body)
    body["classes"] = list(next(iter(loaded.values())).classes)
    return _write(home, plain(_head(configs, runs, runs[0].headline) | body))


def write_assembled(folder: Path, body: dict[str, Any]) -> dict[str, Any]:
    """Write the answer of one finished run, assembled from what its sites release."""
    run, config = Run(folder), recorded(folder)
    body["notes"] += _notes(config, run, body)
    return _write(folder, plain(_head([config], [run], run.headline) | body))


def own_answer(
    folder: Path, parts: Parts, variant: str, outcomes: Mapping[str, Outcome], sharing: int
) -> dict[str, bytes]:
    """The answer files that a site keeps private: without withheld or rounded values.

    `sharing` is the number of sites that share the level of the intervals.
    """
    margin = parts.config.report_options().margin / 100
    seeds = {id: [one] for id, one in outcomes.items()}
    body = answer(seeds, parts.metric, margin, sharing)
    head = _head([parts.config], [Run(folder)], variant)
    return {ANSWER: _content(plain(head | body)), OUTCOMES: save(_tensors(outcomes))}


def _head(configs: Sequence[RunConfig], runs: Sequence[Run], variant: str) -> dict[str, Any]:
    """The metadata of an answer."""
    return {
        "format": FORMAT,
        "seeds": [config.seed for config in configs],
        "variant": variant,
        "baseline": f"{configs[0].method['name']} at each site alone",
        "runs": {run.folder.name: _events(run) for run in runs},
    }


def _notes(config: RunConfig, run: Run, body: Mapping[str, Any]) -> list[str]:
    """Further comparisons of the joined model, and which rows are pooled."""
    notes = []
    if (
        config.scale == "global"
        and run.recipe.get("kind") == "table"
        and len(run.facts["clients"]) > 1
    ):
        notes.append("columns of the joined model are scaled by the training rows of all sites")
    if len(run.facts["tasks"]) > 1 and config.split != "domains":
        notes.append("test rows of all tasks are pooled")
    if config.split == "domains":
        notes.append("each site is tested on its own domain")
    if config.split == "parties" and any(POOLED in one["scores"] for one in body["sites"].values()):
        notes.append(ONE_NETWORK)
    return notes


def _events(run: Run) -> str:
    """The digest of a run's events; empty for older formats."""
    extent = run.integrity.files.get("events.jsonl")
    return extent.digest if extent else ""


def _write(home: Path, body: dict[str, Any]) -> dict[str, Any]:
    write_whole(home / ANSWER, _content(body))
    return body


def _content(body: dict[str, Any]) -> bytes:
    """The content of an answer file, with its digest."""
    whole = body | {"digest": digest(json.dumps(body, sort_keys=True).encode())}
    return json.dumps(whole, indent=1, allow_nan=False).encode() + b"\n"


def _refuse_different(configs: Sequence[RunConfig], folders: Sequence[Path]) -> None:
    """Refuse runs that differ in other options than the seed."""
    first = vars(configs[0])
    for config, folder in zip(configs[1:], folders[1:], strict=True):
        keys = [
            key for key, value in vars(config).items() if key not in FREE and value != first[key]
        ]
        if keys:
            what = f"the run has another '{keys[0]}' than {folders[0].name}"
            raise UserError(
                what, str(folder), "answer runs together that differ in their seed alone"
            )
    seeds = [config.seed for config in configs]
    if len(set(seeds)) < len(seeds):
        what = "two of the runs have the same seed"
        raise UserError(what, str(folders[0]), "give each seed once")


def _outcomes(
    run: Run,
    config: RunConfig,
    open_engine: OpenEngine,
    loaded: dict[str, Dataset],
    hooks: tuple[Callable[[str], None], Callable[[], bool]],
) -> Mapping[str, Outcome]:
    """The outcomes of one run, cached in its folder."""
    watch, stopping = hooks
    with deterministic_torch(config.engine_options().deterministic):
        run_parts = parts(config, loaded)
        same_data(run_parts, run.facts, str(run.folder))
        state = ended_state(run.folder)
        count = len(run_parts.scenario.clients)
        numbers = {id: number for number, id in enumerate(run_parts.scenario.clients, start=1)}
        results = outcomes(
            run_parts,
            state,
            run.headline,
            open_engine,
            watch=lambda id: watch(f"training {id} alone, {numbers[id]} of {count}"),
            stopping=stopping,
        )
        if config.report_options().pooled and count > 1:
            watch("training with the data of all sites")
            results = with_pooled(results, run_parts, run.headline, open_engine, stopping)
        if run.metric not in ("accuracy", *ERRORS):  # events have these of all models
            results = with_variants(results, run_parts, state, run.variants)
    write_whole(run.folder / OUTCOMES, save(_tensors(results)))
    return results


def _tensors(results: Mapping[str, Outcome]) -> dict[str, np.ndarray[Any, Any]]:
    """Rows, labels and outputs by site and model."""
    tensors = {}
    for id, one in results.items():
        tensors[f"{id}/rows"], tensors[f"{id}/labels"] = one.rows, one.y
        for model, outputs in one.outputs.items():
            tensors[f"{id}/outputs/{model}"] = np.ascontiguousarray(outputs)
    return tensors
