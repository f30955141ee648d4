"""Methods: one module each, found by name; `names` lists them without importing any.

Other packages offer methods as plug-ins: see `atoll.core.plugins`.
"""

import importlib
import pkgutil
import sys

from atoll.core.method import Method
from atoll.core.plugins import is_foreign, load_foreign

__all__ = ["exists", "load", "names"]


def names() -> list[str]:
    """The names of all methods."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def exists(name: str) -> bool:
    """Whether a name is that of a method or spelled like a plug-in; imports nothing."""
    return name in names() or is_foreign(name, "atoll.methods")


def load(name: str) -> Method:
    """The method with this name."""
    loaded = f"{__name__}.{name}" in sys.modules  # listing the folder for each client takes time
    if not loaded and name not in names():
        return load_foreign(name, "atoll.methods", Method, "method", names())
    method = importlib.import_module(f"{__name__}.{name}").METHOD
    assert isinstance(method, Method)
    return method
