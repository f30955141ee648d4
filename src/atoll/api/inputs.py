"""Arguments in Python as values of a config: tables and arrays in memory become files."""

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.plugins import MEMORY
from atoll.data.own.frames import with_files, with_images
from atoll.data.own.images import image_files
from atoll.data.own.memory import holds_images, is_data, separate_labels
from atoll.data.own.memory import read as read_memory
from atoll.data.own.profiles import TableOptions
from atoll.runs.config import RunConfig, change, read, resolve

__all__ = ["config_of", "named_objects", "seed_numbers", "values_of"]

TABLES = Path("runs/tables")  # where data in memory are kept
LABEL = "label"  # the column of labels that are given as an array
OWN = {"files", "parties", "images"}  # what `data` names where a run reads the user's own files
TABLE_OPTIONS = {field.name for field in dataclasses.fields(TableOptions)} - {"files"}
IMAGE_OPTIONS = {*inspect.signature(image_files).parameters} - {"images"}


def values_of(
    what: str | Path, changes: Mapping[str, Any], tables: Path = TABLES
) -> dict[str, Any]:
    """The values of a config: a preset, a method or a TOML file, with keyword arguments applied.

    Tables in memory become files below `tables`.
    """
    values, keywords = read(str(what)), dict(changes)
    data = _in_memory(keywords, tables)
    if data is not None:
        keywords["data"] = data
        if OWN & data.keys() and "split" not in keywords:
            values.pop("scenario", None)  # a preset's split is for its own data
    return change(values, keywords)


def named_objects(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keyword arguments with a name for a network that is an object; and objects by name.

    A function that can be imported has the name of its module; any other object is one of this
    session, and is to be given again to load the run in another.

    >>> named_objects({"model": len})[0]
    {'model': {'initial': 'own', 'name': 'builtins:len'}}
    """
    model = changes.get("model")
    table = dict(model) if isinstance(model, Mapping) else {"name": model}
    network = table["name"] if callable(table.get("name")) else None
    if network is None:
        return dict(changes), {}
    name = _imported_name(network)
    word = getattr(network, "__name__", type(network).__name__)
    objects = {} if name else {f"{MEMORY}{word}": network}
    table = {"initial": "own", **table, "name": name or next(iter(objects))}
    return {**changes, "model": table}, objects


def _imported_name(network: Any) -> str:
    """Where an object can be imported from; empty where it cannot."""
    module, name = getattr(network, "__module__", ""), getattr(network, "__qualname__", "")
    home = sys.modules.get(module)
    importable = module != "__main__" and getattr(home, "__spec__", None) is not None
    same = importable and name and getattr(home, name, None) is network
    return f"{module}:{name}" if same else ""


def config_of(what: str | Path, changes: Mapping[str, Any]) -> RunConfig:
    """The whole config of a call, every option checked."""
    return resolve(values_of(what, changes), str(what))


def _in_memory(keywords: dict[str, Any], tables: Path) -> dict[str, Any] | None:
    """The table `data` with data in memory as files; takes their options out of `keywords`."""
    data = keywords.get("data")
    if is_data(data):
        files = {"table": data}
    elif isinstance(data, Mapping) and data and not ({"name"} | OWN) & data.keys():
        files = dict(data)
    else:
        return with_files(data, tables) if isinstance(data, Mapping) else None
    label = str(keywords.get("label", LABEL))
    sites = {site: read_memory(value, label) for site, value in files.items()}
    if any(map(holds_images, sites.values())):
        options = {key: keywords.pop(key) for key in IMAGE_OPTIONS & keywords.keys()}
        return with_images(sites, options, tables)
    options = {key: keywords.pop(key) for key in TABLE_OPTIONS & keywords.keys()}
    if any(map(separate_labels, files.values())):
        options.setdefault("label", LABEL)
    return with_files({"files": sites, **options}, tables)


def seed_numbers(seeds: Iterable[int], changes: Mapping[str, Any]) -> list[int]:
    """The seeds of several runs, each once."""
    try:
        numbers = [int(seed) for seed in seeds]
    except (TypeError, ValueError):
        remedy = "give whole numbers: seeds=range(5)"
        raise UserError(f"seeds={seeds!r} has no numbers", "seeds", remedy) from None
    if "seed" in changes:
        raise UserError("both seed and seeds", "seeds", "give one of the two")
    if not numbers or len(set(numbers)) < len(numbers):
        raise UserError("no seed, or one twice", "seeds", "give each once: seeds=range(5)")
    return numbers
