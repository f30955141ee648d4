"""The recipe of a run: the inputs of its models, and how own files are converted to them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.federation import SERVER
from atoll.core.options import build
from atoll.core.record import write_whole
from atoll.data.dataset import array_fingerprint, file_fingerprint
from atoll.data.own.texts import TextOptions

if TYPE_CHECKING:
    from atoll.runs.parts import Parts

__all__ = ["site_names", "write_recipe"]

Recipe = dict[str, Any]  # plain values


def write_recipe(parts: "Parts", folder: Path) -> None:
    """Write what predictions need besides the weights: shapes, classes, columns, scaling."""
    dataset = parts.dataset
    recipe = _shapes(parts)
    if dataset.kind == "text":
        recipe |= {"words": list(dataset.words), "vectors": parts.vectors.name}
    if dataset.layout is not None:
        recipe |= dataset.layout.recipe
        recipe |= _parties(parts) if dataset.group is None else _tables(parts)
    elif dataset.group is not None and not parts.scenario.labels_at_server:
        _add_own_files(parts, recipe["sites"])
    write_whole(folder / "recipe.json", json.dumps(recipe, indent=1).encode() + b"\n")


def _shapes(parts: "Parts") -> Recipe:
    """The shape of a row, the classes, and the columns that each site reads from each stage on."""
    scenario, dataset = parts.scenario, parts.dataset
    sites = {}
    for id in scenario.clients:
        owns = [len(holding.own) > 0 for holding in scenario.holdings[id]]
        since = owns.index(True) if any(owns) else 0
        own = scenario.holdings[id][-1].own
        sites[id] = {"called": id, "own": own.tolist(), "since": since}
        if not scenario.labels_at_server:
            sites[id] |= _target(parts, id)
    return {
        "kind": dataset.kind,
        "classes": list(dataset.classes),
        **({"task": "regression"} if dataset.regression else {}),
        "shape": list(dataset.x.shape[1:]),
        "columns": [parts.config.data.get(key, key) for key in (dataset.kind, "label")],
        "common": scenario.common.tolist(),
        "stages": scenario.stages,
        "labels_at_server": scenario.labels_at_server,
        **(_target(parts, SERVER) if scenario.labels_at_server else {}),
        "sites": sites,
    }


def _tables(parts: "Parts") -> Recipe:
    """Own tables: the scaling of columns, and the rows of each file that are reserved for tests."""
    scenario, dataset = parts.scenario, parts.dataset
    alone = not parts.config.data.get("site")  # each site has a separate file
    sites = {}
    for number, id in enumerate(dataset.groups):  # at a site of a network, only that site
        if id not in scenario.clients:  # a federation of one site
            continue
        common, own = parts.site(id).scaling()
        rows = np.flatnonzero(dataset.group == number)
        first = int(rows[0]) if alone else 0
        sites[id] = {
            "own": scenario.holdings[id][-1].own.tolist(),
            "scaling": {"common": common.tolist(), "own": own.tolist()},
            **_target(parts, id),
            "rows": len(rows) if alone else len(dataset),
            "held_out": [(tested - first).tolist() for tested in scenario.tests[id]],
        }
    return {"sites": sites}


def _target(parts: "Parts", id: str) -> Recipe:
    """In regression, how to convert outputs to the unit of the label."""
    if not parts.dataset.regression:
        return {}
    target = parts.site(id).target
    return {"target": [target.mean, target.deviation]}


def _parties(parts: "Parts") -> Recipe:
    """The same for sites with columns of the same rows; rows are those of the active party."""
    scenario, layout = parts.scenario, parts.dataset.layout
    assert layout is not None  # own tables have one
    tested = np.unique(np.concatenate(scenario.tests[scenario.clients[0]]))
    sites, files, first = _shapes(parts)["sites"], [], 0
    for id in scenario.clients:
        sites[id]["scaling"] = parts.site(id).scaling().tolist()
    for name, count, rows in layout.recipe["files"]:
        places = tested[(tested >= first) & (tested < first + len(rows))] - first
        files.append([name, count, np.array(rows)[places].tolist()])
        first += len(rows)
    prints = {}
    for name, entry in zip(layout.recipe["parties"], parts.config.data["parties"], strict=True):
        paths = [entry] if isinstance(entry, str) else entry
        prints[name] = [file_fingerprint(Path(path)) for path in paths]
    return {"files": files, "fingerprints": prints, "sites": sites}


def site_names(parts: "Parts") -> dict[str, str]:
    """The name of each site: for own images and texts the folder or file, else the id."""
    dataset, clients = parts.dataset, parts.scenario.clients
    names = {id: id for id in clients}
    if dataset.group is None or dataset.layout is not None or len(dataset.groups) != len(clients):
        return names
    if parts.config.split == "domains":
        return dict(zip(clients, dataset.groups, strict=True))
    if parts.config.data.get("files"):
        stems = [Path(name).stem for name in dataset.groups]
        return dict(zip(clients, stems, strict=True))
    return names


def _add_own_files(parts: "Parts", sites: Recipe) -> None:
    """Add the file name of each site with own images or texts, and its rows reserved for tests."""
    scenario, dataset, data = parts.scenario, parts.dataset, parts.config.data
    if len(dataset.groups) != len(scenario.clients):
        return
    domains, called = parts.config.split == "domains", site_names(parts)
    for number, (id, name) in enumerate(zip(scenario.clients, dataset.groups, strict=True)):
        rows = np.flatnonzero(dataset.group == number)
        sites[id]["called"] = called[id]
        if data.get("images") and domains:
            held_out = [scenario.tests[id][number] - rows[0]]
            mark = array_fingerprint(dataset.x[rows])
        elif data.get("files") and dataset.kind == "text":
            rules = build(TextOptions, data, "[data]").rules(Path(name).stem)
            sites[id]["rules"] = asdict(rules)
            held_out = [tested - rows[0] for tested in scenario.tests[id]]
            mark = file_fingerprint(Path(data["files"][number]))
        else:
            continue
        sites[id] |= {"rows": len(rows), "fingerprint": mark}
        sites[id]["held_out"] = [tested.tolist() for tested in held_out]
