"""Data sets by name: load one, list all, check whether one is available."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_type_hints

from atoll.core import options
from atoll.core.errors import UserError
from atoll.core.plugins import entry_names, import_named, is_foreign
from atoll.data.dataset import Dataset
from atoll.data.own import parties, tables, texts
from atoll.data.own.images import image_files
from atoll.data.sources import fetch, modules

__all__ = ["About", "Dataset", "about", "load", "names"]


@dataclass(frozen=True)
class About:
    """A one-line description of a data set, and whether it is available."""

    name: str
    kind: str
    line: str
    presence: Literal["embedded", "found", "to be downloaded", "not available"]
    where: str  # the existing file, the address, or the missing file


def names() -> list[str]:
    """The names of all data sets, sorted."""
    return sorted(name.replace("_", "-") for module in modules() for name in module.__all__)


def load(name: str, **values: Any) -> Dataset:
    """Load the data set with this name; its function's signature lists its options.

    `files` are the user's own: texts if a column of `text` is named, else tables; `parties` are
    tables with different columns of the same rows; `images` are the user's own images.
    """
    if "parties" in values:
        return parties.load(name, **values)
    if "files" in values:
        return texts.load(name, **values) if "text" in values else tables.load(name, **values)
    source = image_files if "images" in values else _public_source(name)
    hints = get_type_hints(source, include_extras=True)
    fields = [
        (parameter.name, hints[parameter.name], dataclasses.field(default=parameter.default))
        for parameter in inspect.signature(source).parameters.values()
    ]
    kind = dataclasses.make_dataclass("Given", fields)
    checked: Any = options.build(kind, values, f"data set '{name}'")
    dataset = source(**dataclasses.asdict(checked))
    if not isinstance(dataset, Dataset):
        what = f"'{name}' gives a {type(dataset).__name__}"
        raise UserError(what, "data.name", "return an atoll.data.dataset.Dataset")
    return dataset


def _public_source(name: str) -> Callable[..., Dataset]:
    """The function of a data set: a built-in one, else that of a plug-in."""
    if name.replace("_", "-") in names() or not is_foreign(name, "atoll.datasets"):
        return _source(name)[1]
    function = import_named(name, "atoll.datasets", "data.name")
    if not callable(function):
        remedy = "name a function that returns a Dataset; its parameters are the options"
        raise UserError(f"'{name}' is no data set", "data.name", remedy)
    source: Callable[..., Dataset] = function
    return source


def about(name: str) -> About:
    """Describe a data set and whether it is embedded, found, to be downloaded or not available."""
    name = name.replace("_", "-")
    module, source = _source(name)
    kind, line = module.KIND, (source.__doc__ or "").splitlines()[0]
    groups = getattr(module, "FILES", {}).get(name)
    if groups is None:
        return About(name, kind, line, "embedded", "")
    for place, group in enumerate(groups):
        paths = [fetch.find([file.path]) for file in group]
        if all(paths):
            part = " The file here may be a part of it; a run reports that." if place else ""
            return About(name, kind, line + part, "found", str(paths[0]))
    for group in groups:
        if all(file.url for file in group):
            return About(name, kind, line, "to be downloaded", group[0].url)
    return About(name, kind, line, "not available", str(fetch.folder() / groups[0][0].path))


def _source(name: str) -> tuple[ModuleType, Callable[..., Dataset]]:
    """The function with this name and its module."""
    for module in modules():
        if name.replace("-", "_") in module.__all__:
            return module, getattr(module, name.replace("-", "_"))
    raise UserError(
        f"unknown data set '{name}'",
        "data",
        options.nearest(name, [*names(), *entry_names("atoll.datasets")]),
    )
