"""What tells two losses apart: the function itself, and what is bound to it."""

import sys
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

__all__ = ["NoIdentityError", "identity"]


class NoIdentityError(Exception):
    """A function that cannot be seen to be another client's too, and why."""


def identity(function: Callable[..., Any]) -> Hashable:
    """Equal for two functions only if they are one and the same, with equal bound arguments.

    A closure or a lambda may differ from client to client in what it closes over, so only functions
    that a module holds under their own name have an identity.
    """
    if isinstance(function, partial):
        bound = (function.args, tuple(sorted(function.keywords.items())))
        try:
            hash(bound)
        except TypeError as error:
            raise NoIdentityError(f"{_name(function.func)} binds what has no hash") from error
        return identity(function.func), *bound
    if not _held_by_module(function):
        raise NoIdentityError(f"{_name(function)} is not a function of a module")
    return function


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _held_by_module(function: Any) -> bool:
    """Whether the function's module, or the one it was compiled in, has it under its name."""
    if not hasattr(function, "__qualname__") or getattr(function, "__self__", None) is not None:
        return False
    module = sys.modules.get(function.__module__)
    spaces = [vars(module) if module else {}, getattr(function, "__globals__", {})]
    return any(_looked_up(space, function.__qualname__) is function for space in spaces)


def _looked_up(space: dict[str, Any], name: str) -> Any:
    first, *rest = name.split(".")
    value = space.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value
