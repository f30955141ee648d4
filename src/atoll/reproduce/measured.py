"""What was measured, kept as one small file each; shared by all papers."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.core.record import write_whole
from atoll.engines.sweep import Point, points, sweep
from atoll.runs.loop import Progress
from atoll.runs.result import Run

__all__ = ["file_name", "fingerprint", "keep", "kept", "swept", "swept_points"]


def fingerprint(asked: Any) -> str:
    """A hash of what was asked for, not of the resolved config.

    An option that is added later, with a default that changes nothing, does not make an old
    measurement another one.
    """
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def file_name(name: str) -> str:
    """A setting's name as that of a file."""
    return "".join(c if c.isalnum() else "-" for c in name).strip("-").lower()


def keep(folder: Path, name: str, found: Mapping[str, Any]) -> None:
    """Write what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{file_name(name)}.json", json.dumps(found, indent=1).encode())


def kept(folder: Path, name: str, config: str) -> dict[str, Any] | None:
    """What was found before under this name, if the same was asked for."""
    path = folder / f"{file_name(name)}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["config"] == config else None


def swept(
    values: dict[str, Any],
    axes: dict[str, Sequence[Any]],
    folder: Path,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Run]:
    """The runs of a sweep over axes."""
    return swept_points(lambda own: points(values, axes, own), folder, watch)


def swept_points(
    find: Callable[[Path], list[Point]],
    folder: Path,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> list[Run]:
    """The runs of a sweep in a folder of its own below runs; it goes, their numbers stay."""
    own = folder / "runs" / f"{os.getpid()}-{time.time_ns()}"
    try:
        runs = sweep(find(own), own, watch=watch)
        for run in runs:
            run.read()  # before the folder goes
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return runs
