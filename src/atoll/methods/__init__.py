"""Methods: one module each, found by name; `names` lists them without importing any."""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import UserError
from atoll.core.options import nearest

__all__ = ["Method", "load", "names"]


@dataclass(frozen=True)
class Method:
    """What a method's module offers."""

    options: type
    server: Callable[[Any, Any], Any]  # (options, site) -> Server
    client: Callable[[Any, Any], Any]  # (options, site) -> Client
    split: str = "rows"  # the kind of scenario it is made for
    headline: str = ""  # the variant that stands for the method where one number is wanted
    kept: Callable[[Any, Any, str], Any] | None = None  # (client, server's state, variant) -> model
    said: Callable[[Any, Any, Any], Any] | None = None  # (client, model, rows) -> logits
    # vertical: (server, clients, columns of each) -> logits of rows that nobody has a label of
    answered: Callable[[Any, Any, Any], Any] | None = None
    quorum: bool = False  # whether a round can do without some of the clients
    # (options, clients) -> how many of them a round asks at most; None: all
    asked: Callable[[Any, int], int] | None = None
    # new server -> its shared weights before the first round, by the name of their mark: a site
    # derives them too
    first: Callable[[Any], Any] | None = None


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
