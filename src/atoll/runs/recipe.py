"""The recipe of a run on own tables and images: how files become what models read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.record import write_whole
from atoll.data.dataset import array_fingerprint, file_fingerprint
from atoll.runs.parts import Parts

__all__ = ["write_recipe"]


def write_recipe(parts: Parts, folder: Path) -> None:
    """For own tables and images, write how files become what models read: for predictions."""
    layout, scenario, dataset = parts.dataset.layout, parts.scenario, parts.dataset
    if dataset.kind == "image" and not scenario.labels_at_server:
        body = _picture_recipe(parts)
        write_whole(folder / "recipe.json", json.dumps(body, indent=1).encode() + b"\n")
    if layout is None:
        return
    if dataset.group is None:
        _write_recipe_of_parties(parts, layout.recipe, folder)
        return
    alone = not parts.config.data.get("site")  # each site has a file of its own
    sites = {}
    for number, id in enumerate(dataset.groups):  # at a site of a network, that site alone
        common, own = parts.site(id).scaling()
        rows = np.flatnonzero(dataset.group == number)
        first = int(rows[0]) if alone else 0
        sites[id] = {
            "own": scenario.holdings[id][-1].own.tolist(),
            "scaling": {"common": common.tolist(), "own": own.tolist()},
            "rows": len(rows) if alone else len(dataset),
            "held_out": [(tested - first).tolist() for tested in scenario.tests[id]],
        }
    body = {**layout.recipe, "common": scenario.common.tolist(), "sites": sites}
    write_whole(folder / "recipe.json", json.dumps(body, indent=1).encode() + b"\n")


def _write_recipe_of_parties(parts: Parts, recipe: Mapping[str, Any], folder: Path) -> None:
    """The same where sites hold columns of the same rows; the rows told are the active party's."""
    scenario = parts.scenario
    tested = np.unique(np.concatenate(scenario.tests[scenario.clients[0]]))
    sites, files, first = {}, [], 0
    for id in scenario.clients:
        held = [len(holding.own) > 0 for holding in scenario.holdings[id]]
        own, scaling = scenario.holdings[id][-1].own, parts.site(id).party_scaling()
        since = held.index(True)
        sites[id] = {"own": own.tolist(), "since": since, "scaling": scaling.tolist()}
    for name, count, rows in recipe["files"]:
        here = tested[(tested >= first) & (tested < first + len(rows))] - first
        files.append([name, count, np.array(rows)[here].tolist()])
        first += len(rows)
    given = [[p] if isinstance(p, str) else p for p in parts.config.data["parties"]]
    prints = {
        name: [file_fingerprint(Path(path)) for path in own]
        for name, own in zip(recipe["parties"], given, strict=True)
    }
    told = {"files": files, "fingerprints": prints, "stages": scenario.stages, "sites": sites}
    body = {**recipe, **told}
    write_whole(folder / "recipe.json", json.dumps(body, indent=1).encode() + b"\n")


def _picture_recipe(parts: Parts) -> dict[str, Any]:
    """The classes, the size of an image, the sites; of own images the rows kept for tests."""
    scenario, dataset, config = parts.scenario, parts.dataset, parts.config
    sites: dict[str, dict[str, Any]] = {id: {"called": id} for id in scenario.clients}
    if config.scenario_options().split == "domains" and dataset.group is not None:
        for number, (id, name) in enumerate(zip(scenario.clients, dataset.groups, strict=True)):
            sites[id] = {"called": name}
            if config.data.get("images"):
                rows = np.flatnonzero(dataset.group == number)
                tested = scenario.tests[id][number] - rows[0]
                own = array_fingerprint(dataset.x[rows])
                sites[id] |= {"rows": len(rows), "held_out": tested.tolist(), "fingerprint": own}
    return {
        "kind": "image",
        "classes": list(dataset.classes),
        "shape": list(dataset.x.shape[1:]),
        "columns": [config.data.get(key, key) for key in ("image", "label")],
        "sites": sites,
    }
