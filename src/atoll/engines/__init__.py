"""Engines carry messages to the clients.

A config can name a module of this package with a constant ENGINE in `engine.name`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.runs.execute import OpenEngine

__all__ = ["load"]


def load(name: str) -> "OpenEngine":
    """The engine with this name."""
    engine: OpenEngine = importlib.import_module(f"{__name__}.{name}").ENGINE
    return engine
