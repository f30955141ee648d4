"""Methods: one module each, found by name; `names` lists them without importing any."""

import importlib
import pkgutil
import sys

from atoll.core.errors import UserError
from atoll.core.method import Method
from atoll.core.options import nearest

__all__ = ["load", "names"]


def names() -> list[str]:
    """The names of all methods."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Method:
    """The method with this name."""
    known = f"{__name__}.{name}" in sys.modules  # listing the folder for each client takes time
    if not known and name not in names():
        raise UserError(f"unknown method '{name}'", "method", nearest(name, names()))
    method = importlib.import_module(f"{__name__}.{name}").METHOD
    assert isinstance(method, Method)
    return method
