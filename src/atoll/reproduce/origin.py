"""Where a measurement comes from: commit, source, machine, precision and wall time."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from atoll.core.source import PACKAGE, source

__all__ = ["commit", "describe", "machine", "precision", "provenance"]


def provenance(device: str, seconds: float, together: Sequence[str]) -> dict[str, Any]:
    """What is stored with a new measurement; `together` names the settings of its sweep."""
    return {
        "commit": commit(),
        "source": source(),
        "machine": machine(device),
        "wall_seconds": round(seconds, 1),
        "together": list(together),
    }


@cache
def commit() -> str:
    """The commit of the source tree, with + where files of the package differ; else empty."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # not a repository around an install
        changed = _git("status", "--porcelain", "--", ".")
        return _git("rev-parse", "HEAD")[:12] + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    command = ["git", "-C", str(PACKAGE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine(device: str) -> str:
    """The model of the GPU, or the kind of CPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {platform.machine()}"


def precision(measurement: Mapping[str, Any]) -> str:
    """The precision of a measurement: that of its model, and of its products."""
    run = measurement["runs"][0] if measurement.get("runs") else {}
    model = {**measurement.get("model", {}), **run.get("model", {})}
    engine = {**measurement.get("engine", {}), **run.get("engine", {})}
    if model.get("precision", "float32") != "float32":
        return str(model["precision"])
    return "TF32" if engine.get("tf32") else "float32"


def describe(measurement: Mapping[str, Any]) -> str:
    """Commit, machine and precision in words; older files have no commit."""
    stored = measurement.get("provenance") or {}
    if not stored:
        runs = measurement.get("runs") or [{}]
        stored = next((run["provenance"] for run in runs if "provenance" in run), {})
    facts = measurement.get("facts") or measurement["runs"][0].get("facts", {})
    where = stored.get("machine") or f"{facts.get('device', 'machine')}, model not recorded"
    code = stored.get("commit") or (f"source {stored['source']}" if stored else "")
    return f"{code or 'commit not recorded'}; {where}; {precision(measurement)}"
