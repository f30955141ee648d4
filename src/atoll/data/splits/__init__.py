"""Splits: one module each, found by name; `split` deals a data set to clients and stages.

A split's module has a frozen class `Options`, a function that deals index arrays, and `SPLIT`,
which names both. `names` lists the splits without importing any.
"""

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.options import build
from atoll.core.plugins import is_foreign, load_foreign
from atoll.data.dataset import OWN_IMAGES, Dataset
from atoll.data.scenario import Scenario, Split

__all__ = ["exists", "load", "names", "option_names", "options_of", "split"]


def names() -> list[str]:
    """The names of all splits."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def exists(name: str) -> bool:
    """Whether a name is that of a split or spelled like a plug-in; imports nothing."""
    return name in names() or is_foreign(name, "atoll.splits")


def load(name: str) -> Split:
    """The split with this name."""
    loaded = f"{__name__}.{name}" in sys.modules  # listing the folder takes time
    if not loaded and name not in names():
        return load_foreign(name, "atoll.splits", Split, "scenario.split", names())
    kind = importlib.import_module(f"{__name__}.{name}").SPLIT
    assert isinstance(kind, Split)
    return kind


def option_names(*chosen: str) -> set[str]:
    """The names of the options of some splits; without arguments, of all."""
    kinds = [load(name).options for name in chosen or names()]
    return {"split"} | {field.name for kind in kinds for field in dataclasses.fields(kind)}


def options_of(values: Mapping[str, Any], where: str) -> Any:
    """The options of the split that `split` names, built from the other values."""
    name = str(values["split"])
    own = option_names(name)
    for key in (key for key in values if key not in own):
        others = [other for other in names() if key in option_names(other)]
        if others:
            what = f"split '{name}' has no option '{key}'"
            listed = ", ".join(sorted(own - {"split"}))
            remedy = f"remove it; '{name}' has {listed}; '{key}' belongs to {', '.join(others)}"
            raise UserError(what, where, remedy)
    return build(load(name).options, {k: v for k, v in values.items() if k != "split"}, where)


def split(dataset: Dataset, options: Any, seed: int, name: str = "") -> Scenario:
    """Deal a data set as these options say; equal seeds give equal scenarios.

    `name` is that of the split; without it, that of the module that defines the options.

    >>> from atoll import data
    >>> from atoll.data.splits import rows, split
    >>> split(data.load("wine"), rows.Options(clients=2), seed=0).clients
    ('site-0', 'site-1')
    """
    name = name or type(options).__module__.rpartition(".")[2]
    own = "files" if dataset.group is not None else "parties"  # different rows, or columns
    if dataset.layout is not None and name != own:
        what = f"'{dataset.name}' cannot be dealt out by split = '{name}'"
        raise UserError(what, "scenario", f"use split = '{own}', or leave it out")
    scenario: Scenario = load(name).deal(dataset, options, seed)
    if dataset.name == OWN_IMAGES:
        _refuse_mixed_sites(dataset, scenario, name)
    return scenario


def _refuse_mixed_sites(dataset: Dataset, scenario: Scenario, split: str) -> None:
    """Refuse a client with training images of several sites: images do not leave their site."""
    group = dataset.group
    assert group is not None
    for id, periods in scenario.holdings.items():
        rows = np.concatenate([np.append(period.train, period.valid) for period in periods])
        if len(np.unique(group[rows])) > 1:
            what = f"with split = '{split}' client {id} has images of several sites"
            raise UserError(what, "scenario", "use split = 'sites' or 'domains', or leave it out")
