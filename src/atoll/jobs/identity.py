"""The identity of a loss: the function itself and the arguments that are bound to it."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

__all__ = ["batch_statistics", "identities", "no_identity", "rowwise", "shapes"]

Functions = Sequence[Callable[..., Any]]


class NoIdentityError(Exception):
    """A function that cannot be compared with another client's, and why."""


def identities(functions: Functions) -> tuple[Hashable, ...] | None:
    """The identity of each function; None if one of them has none."""
    try:
        return tuple([_identity(function) for function in functions])
    except NoIdentityError:
        return None


def no_identity(functions: Functions) -> str:
    """Why one of these functions has no identity; empty if all have one."""
    try:
        for function in functions:
            _identity(function)
    except NoIdentityError as error:
        return str(error)
    return ""


def rowwise(functions: Functions) -> bool:
    """Whether no network bound to these functions mixes the rows of a batch (batch norm does)."""
    bound = [_bound(function) for function in functions]
    return all(getattr(value, "rowwise", True) for values in bound for value in values)


def batch_statistics(functions: Functions) -> bool:
    """Whether a network bound to these functions normalises by the statistics of a batch."""
    bound = [_bound(function) for function in functions]
    return any(getattr(value, "batch_statistics", False) for values in bound for value in values)


def shapes(tensors: Mapping[str, Tensor], own: frozenset[str] = frozenset()) -> Hashable:
    """Names, types and shapes; without the last axis of weights that end with own columns."""
    if not own:
        return tuple([(name, t.dtype, t.shape) for name, t in sorted(tensors.items())])
    return tuple(
        (name, t.dtype, t.shape[:-1] if name.split("/", 1)[-1] in own or name in own else t.shape)
        for name, t in sorted(tensors.items())
    )


def _bound(function: Callable[..., Any]) -> tuple[Any, ...]:
    if isinstance(function, partial):
        return (*function.args, *function.keywords.values())
    return ()


def _identity(function: Callable[..., Any]) -> Hashable:
    """Equal for two functions only if they are the same function with equal bound arguments.

    Closures and lambdas may differ from client to client in what they close over, so only functions
    that a module holds under their own name have an identity.
    """
    if isinstance(function, partial):
        bound = (function.args, tuple(sorted(function.keywords.items())))
        try:
            hash(bound)
        except TypeError as error:
            raise NoIdentityError(f"{_name(function.func)} binds what has no hash") from error
        return _identity(function.func), *bound
    if not _is_in_its_module(function):
        raise NoIdentityError(f"{_name(function)} is not a function of a module")
    return function


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is_in_its_module(function: Any) -> bool:
    """Whether the function's module, or the one it was compiled in, has it under its name."""
    name = getattr(function, "__qualname__", "")
    if not name or getattr(function, "__self__", None) is not None:
        return False
    module = sys.modules.get(function.__module__)
    if module is not None and _looked_up(vars(module), name) is function:
        return True
    return _looked_up(getattr(function, "__globals__", {}), name) is function


def _looked_up(space: dict[str, Any], name: str) -> Any:
    if "." not in name:
        return space.get(name)
    first, *rest = name.split(".")
    value = space.get(first)
    for part in rest:
        value = getattr(value, part, None)
    return value
