"""Public data sets and made-up ones.

A module with a constant KIND holds data sets: the functions in its `__all__`.
"""

import importlib
import pkgutil
from types import ModuleType

__all__ = ["kind_of", "modules"]


def modules() -> list[ModuleType]:
    """The modules that hold data sets."""
    every = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    return [module for module in every if hasattr(module, "KIND")]


def kind_of(name: str) -> str:
    """The kind of a built-in data set: table, image or text; empty for other names."""
    function = name.replace("-", "_")
    kinds = [str(module.KIND) for module in modules() if function in module.__all__]
    return kinds[0] if kinds else ""
