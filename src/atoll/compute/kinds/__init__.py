"""The registry: how each type of job is accelerated.

A module of this package registers types of jobs in tables of these names; no list names the module.
"""

import importlib
import pkgutil
from collections.abc import Callable, Generator, Mapping
from typing import Any

from atoll.compute.accelerated import CaptureKind, StackKind
from atoll.core.federation import Job

__all__ = ["CAPTURED", "COMPOSED", "STACKED"]


def _entries(table: str) -> dict[type, Any]:
    """The entries that the modules of this package have in a table."""
    entries: dict[type, Any] = {}
    for module in pkgutil.iter_modules(__path__):
        entries |= getattr(importlib.import_module(f"{__name__}.{module.name}"), table, {})
    return entries


# jobs of one key in one computation
STACKED: Mapping[type, StackKind] = _entries("STACKED")
# jobs that are not stacked, each in captured buffers
CAPTURED: Mapping[type, CaptureKind] = _entries("CAPTURED")
# jobs that are neither: the jobs of which each consists run side by side with those of the others
COMPOSED: Mapping[type, Callable[[Any], Generator[Job, Any, Any]]] = _entries("COMPOSED")
