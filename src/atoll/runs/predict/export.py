"""Exports a final model: weights as safetensors, and a card that describes its inputs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from atoll.core.federation import SERVER
from atoll.core.outputs import may_write
from atoll.core.record import disk_errors, write_whole
from atoll.metrics.scores import client_accuracy, primary
from atoll.runs.predict import parties, tables
from atoll.runs.predict.model import Predictor
from atoll.runs.result import plain

__all__ = ["export", "has_means"]


def reads(predictor: Predictor) -> dict[str, Any]:
    """How to convert files to model inputs, for the card."""
    recipe = predictor.recipe
    card: dict[str, Any] = {"classes": recipe["classes"]}
    if recipe.get("task") == "regression":
        card["task"] = "regression"
    if predictor.site == SERVER:
        return card | {"embeddings": list(recipe["sites"]), **_target(recipe)}
    about, config = predictor.about, predictor.config
    card |= {"called": about.get("called", predictor.site), **_target(about)}
    if predictor.kind == "image":
        number = list(recipe["sites"]).index(predictor.site)
        network = config.models[number] if config.models else config.model_options().name
        card |= {"network": network, "shape": recipe["shape"], "scale": config.scale}
    if predictor.kind == "text":
        task = predictor.run.facts["tasks"][predictor.task_number]
        card |= {"task": task, "words": recipe["words"], "vectors": predictor.run.facts["vectors"]}
    if predictor.kind == "table" or predictor.vertical:
        card |= {"common": recipe.get("common", []), "own": about["own"]}
        card["scaling"] = about.get("scaling")  # None: columns scaled as in the run
    if "blocks" in recipe or "parties" in recipe:
        of_party = "parties" in recipe
        own = parties.blocks(recipe, predictor.site) if of_party else tables.blocks(predictor)
        card["reads"] = [dataclasses.asdict(block) for block in own]
        card["columns"] = [name for block in own for name in block.names]
        if predictor.site in recipe.get("rules", {}):
            card["harmonised"] = recipe["rules"][predictor.site]
    return card


def has_means(predictor: Predictor) -> bool:
    """Whether the card contains means of training rows; own tables use them to impute and scale."""
    if predictor.site == SERVER or predictor.about.get("scaling") is None:
        return False
    return not predictor.vertical or predictor.config.scale != "none"


def _target(place: Mapping[str, Any]) -> dict[str, Any]:
    """In regression with scaled labels: multiply an output by the deviation and add the mean."""
    return {"target": place["target"]} if "target" in place else {}


def export(predictor: Predictor, out: Path, crossed: str) -> Path:
    """Write a model and its card; `crossed` describes what left the site in the run."""
    tensors = {**predictor.model, **predictor.frozen}
    weights = {n: np.asarray(t.cpu().numpy(), order="C") for n, t in tensors.items()}
    run, variant = predictor.run, predictor.chosen
    result = primary(run.events, variant, run.facts["known_at"])
    card = {
        "method": run.config["method"],
        "variant": variant,
        "model": run.config["model"],
        "site": predictor.site,
        **reads(predictor),
        "data": run.facts["data"],
        "r2" if run.regression else "accuracy": client_accuracy(result).get(predictor.site),
        "metrics_of_all_sites": run.metrics[variant],
        "what_left_the_site": crossed,
        "atoll": run.facts["atoll"],
    }
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    may_write(out / "card.json", [], [run.folder], lambda head: b'"what_left_the_site"' in head)
    for name in ("model.safetensors", "model.onnx", "predict.py"):
        may_write(out / name, [], [run.folder], lambda _: (out / "card.json").exists())
    write_whole(out / "model.safetensors", save(weights))
    write_whole(out / "card.json", json.dumps(plain(card), indent=1).encode() + b"\n")
    return out
