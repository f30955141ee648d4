"""The files of a job: they name only classes that are installed at both ends."""

import json
from pathlib import Path
from typing import Any

__all__ = ["CLASSES", "site_config", "write_job"]

ENGINE = "atoll.engines.network.nvflare"
# What a site's policy lets a job name.
CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    f"{ENGINE}.Coordinator",
    f"{ENGINE}.Outpost",
)


def site_config() -> dict[str, Any]:
    """The only configuration of a job that a site accepts."""
    executor = {"id": "executor", "path": CLASSES[1], "args": {"client_obj_id": "outpost"}}
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "outpost", "path": CLASSES[3], "args": {}}],
    }


def write_job(folder: Path, control: Path, sites: list[str]) -> None:
    """Write the three files of a job."""
    server = {
        "format_version": 2,
        "workflows": [
            {"id": "controller", "path": CLASSES[0], "args": {"server_obj_id": "coordinator"}}
        ],
        "components": [
            {"id": "coordinator", "path": CLASSES[2], "args": {"control": str(control)}}
        ],
    }
    meta = {
        "name": "atoll", "resource_spec": {}, "min_clients": len(sites),
        "mandatory_clients": sites, "deploy_map": {"server": ["server"], "site": sites},
    }  # fmt: skip
    for name, body in (
        ("meta.json", meta),
        ("server/config/config_fed_server.json", server),
        ("site/config/config_fed_client.json", site_config()),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1))
