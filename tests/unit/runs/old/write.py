"""Writes the run folders beside this file; run it with the source of an older release.

PYTHONPATH=OLD/src python tests/unit/runs/old/write.py format-2, where OLD is a checkout of commit
b21b804 for format-1 and of e17ca5b for format-2. Checkpoints are stored as base64, so that every
file is text.
"""

import base64
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.core.errors import InterruptedRunError
from atoll.engines.local import execute  # type: ignore[attr-defined]  # where it was then
from atoll.runs.config import resolve

ENGINE = {"mode": "loop", "device": "cpu", "threads": 1}
TABLES: dict[str, Any] = {
    "name": "old",
    "rounds": 2,
    "data": {"files": ["a.csv", "b.csv"], "label": "outcome"},
    "method": {"name": "fedavg"},
    "model": {"widths": [2]},
    "engine": ENGINE,
    "checkpoint_seconds": 0,
}
FAULTS: dict[str, Any] = {
    "name": "old",
    "rounds": 1,
    "data": {"name": "synthetic-text"},
    "scenario": {"clients": 2, "stages": 1},
    "method": {"name": "fedseit", "epochs": 1, "faults": ["head"]},
    "model": {"widths": [2]},
    "engine": ENGINE,
    "checkpoints": False,
}


def main(folder: Path) -> None:
    """A run that has ended, one that was stopped after a round, and on texts one with a fault."""
    platform.platform = lambda *words: "Linux"
    execute(resolve(TABLES, "old"), folder / "ended")
    with suppress(InterruptedRunError):
        execute(resolve(TABLES, "old"), folder / "cut", stopping=lambda: True)
    if folder.name == "format-2":
        execute(resolve(FAULTS, "old"), folder / "faults")
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            path.with_suffix(".base64").write_bytes(base64.encodebytes(path.read_bytes()))
            path.unlink()
        elif path.name == ".lock":
            path.unlink()


os.chdir(Path(__file__).parent)
main(Path(sys.argv[1]))
