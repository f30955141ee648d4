"""The data of a run at a site: its own table, and the settings in its own file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.core.record import disk_errors
from atoll.data.dataset import file_fingerprint
from atoll.data.own.agreement import OwnTable, Plan, only_here
from atoll.data.own.tables import TableOptions
from atoll.data.splits import split
from atoll.engines.network.contract import RefusedError
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts, refuse_labels

__all__ = ["data_key", "own_parts", "own_table", "sparing"]


def sparing(data: dict[str, Any]) -> dict[str, Any]:
    """Apply the site's limits on what is disclosed of a column; a run may only request less."""
    usual = TableOptions.most_levels
    most = data.get("most_levels", usual)
    return {"keep": (), "most_levels": min(most, usual) if isinstance(most, int) else usual}


def data_key(config: RunConfig) -> str:
    """The key of a run's data: a hash of own files, else the data set's name."""
    files = config.data.get("files", ())
    with disk_errors(Path(str(next(iter(files), "")))):
        hashes = [file_fingerprint(Path(str(file))) for file in files]
    return "-".join(hashes) or str(config.data.get("name", ""))


def own_table(client: str, config: RunConfig) -> OwnTable:
    """The table that a site's own file names."""
    options = {key: value for key, value in config.data.items() if key != "name"}
    return OwnTable(client, **options)


def own_parts(
    config: RunConfig, table: OwnTable, client: str, clients: Sequence[str], plan: Plan
) -> Parts:
    """The parts of a run on own tables: this site's rows, and only the names of the others."""
    if config.scale == "global":
        raise RefusedError("scale = 'global' would need all sites' rows; use 'local'")
    dataset = table.dataset(plan)
    refuse_labels(dataset, config)
    dealt_parts = split(dataset, config.scenario_options(), config.seed, config.split)
    scenario = only_here(dealt_parts, plan, client, clients, dataset.x.shape[1])
    return Parts(config, dataset, scenario)
