"""The facts of a run: versions, machine, data, and the rows and columns of each client."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atoll import methods
from atoll.core import VERSION
from atoll.core.errors import UserError

if TYPE_CHECKING:
    from atoll.runs.parts import Parts

__all__ = ["facts", "few_rows", "holdings", "same_data"]

FEW = 5  # below this number of training rows per client and stage the command warns
FEW_OWN = 30  # the same for own files, whose rows often describe real people
MOST_SITES = 3  # maximum number of clients in the warning
MOST_NAMES = 300  # wider tables are described by numbers alone


def facts(parts: "Parts") -> dict[str, Any]:
    """The conditions of a run: versions, machine, data."""
    dataset = parts.dataset
    packages = ("torch", "numpy", "safetensors", "scikit-learn", "pydantic")
    return {
        "atoll": VERSION,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": str(parts.site(parts.scenario.clients[0]).device),
        "data": {
            "name": dataset.name,
            "title": dataset.title,
            "rows": len(dataset),
            "classes": len(dataset.classes),
            **({"task": "regression"} if dataset.regression else {}),
            "source": dataset.source,
            "partial": dataset.partial,
            "fingerprint": dataset.fingerprint,
        },
        **_public(parts),
        **({"vectors": parts.vectors.facts} if dataset.kind == "text" else {}),
        "clients": list(parts.scenario.clients),
        "tasks": list(parts.scenario.tasks),
        "known_at": list(parts.scenario.known_at),
        "stages": parts.scenario.stages,
        "headline": methods.load(parts.config.method["name"]).headline,
        "holdings": holdings(parts),
    }


def _public(parts: "Parts") -> dict[str, Any]:
    """The public images of a run, if its config names some."""
    if not parts.config.public:
        return {}
    public = parts.public
    identity = {"rows": len(public), "fingerprint": public.fingerprint}
    options = parts.config.public_options()
    name = f"own images, {Path(options.images).name}" if options.images else options.name
    return {"public": {"name": name, **identity}}


def holdings(parts: "Parts") -> dict[str, Any]:
    """The data of each client, as numbers and column names: rows by stage, test rows by task."""
    scenario, dataset = parts.scenario, parts.dataset
    labels = dataset.columns if len(dataset.columns) <= MOST_NAMES else ()
    sites = {}
    for id in scenario.clients:
        holdings, columns = scenario.holdings[id], scenario.holdings[id][-1].own
        sites[id] = {
            "train": [len(holding.train) for holding in holdings],
            "valid": [len(holding.valid) for holding in holdings],
            "test": [len(rows) for rows in scenario.tests[id]],
            "classes": [len(np.unique(dataset.strata[holding.train])) for holding in holdings],
            "own": len(columns),
            "own_names": [labels[i] for i in columns] if labels else [],
        }
    names = [labels[i] for i in scenario.common] if labels else []
    return {"common": len(scenario.common), "common_names": names, "sites": sites}


def few_rows(facts: Mapping[str, Any]) -> str:
    """A warning if clients have very few training rows; empty if none has.

    Clients that have not joined yet do not count. The remedy differs: a split can have fewer
    clients, but the sites of own files are fixed.
    """
    sites = facts["holdings"]["sites"]
    own_files = facts["data"]["name"].startswith("own ")
    limit = FEW_OWN if own_files else FEW
    few = [id for id, site in sites.items() if any(0 < rows < limit for rows in site["train"])]
    if not few:
        return ""
    if not own_files:
        what = f"{len(few)} of {len(sites)} clients train on fewer than {limit} rows"
        return f"{what}; ask for fewer clients"
    more = [f"{len(few) - MOST_SITES} more"] if len(few) > MOST_SITES else []
    listed = " and ".join(", ".join(part) for part in (few[:MOST_SITES], more) if part)
    verb = "trains" if len(few) == 1 else "train"
    why = "an update or a model of so few rows can reveal them; see docs/privacy.md"
    return f"{listed} {verb} on fewer than {limit} rows: {why}"


def same_data(parts: "Parts", recorded: Mapping[str, Any], where: str) -> None:
    """Refuse to continue a run with different data."""
    if recorded.get("data", {}).get("fingerprint") != parts.dataset.fingerprint:
        raise UserError(
            f"the data of '{parts.dataset.name}' have changed since the run began",
            where,
            "restore the old data, or start a new run without --resume",
        )
