"""Engines carry messages to where the clients live.

A module of this package with a constant ENGINE can be named by `engine.name` in a config.
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
