"""Deferred numbers: reading one waits until the device has computed it.

A host that reads every number at once is idle while the device works, and then the device is idle
while the host prepares the next round. Numbers that only the record wants, such as losses, and the
checks that all numbers of a message are finite can wait until the next round is under way.
"""

import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Deferred", "HostCopy"]


class HostCopy:
    """The numbers that a tensor has now, copied to the host in the background."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers: Any = None
        if not tensor.is_cuda:
            self._here = tensor.clone()
            return
        self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._here.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def numbers(self) -> Any:
        """The numbers as `tolist` returns them; waits for the copy."""
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()
            self._numbers = self._here.tolist()
        return self._numbers


class Deferred:
    """A float that is read when its value is needed; sums and quotients of it are deferred too."""

    def __init__(
        self, read: Callable[[], float], steps: tuple[tuple[Callable[..., Any], Any], ...] = ()
    ) -> None:
        """`steps`: operations that follow, each with its second operand."""
        self._read, self._steps = read, steps

    def __float__(self) -> float:
        value = float(self._read())
        for operation, operand in self._steps:
            value = operation(value, float(operand))
        return value

    def __add__(self, other: Any) -> "Deferred":
        return Deferred(self._read, (*self._steps, (operator.add, other)))

    __radd__ = __add__

    def __truediv__(self, other: Any) -> "Deferred":
        return Deferred(self._read, (*self._steps, (operator.truediv, other)))


def _at_once(name: str) -> Callable[..., Any]:
    """An operation of a float that reads its operands."""

    def operation(self: Deferred, *others: Any) -> Any:
        values = [float(other) if isinstance(other, Deferred) else other for other in others]
        return getattr(float(self), name)(*values)

    return operation


for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__bool__"),
    *("__sub__", "__rsub__", "__mul__", "__rmul__", "__rtruediv__", "__pow__", "__neg__"),
    *("__abs__", "__int__", "__round__", "__repr__", "__format__"),
):
    setattr(Deferred, _name, _at_once(_name))
numbers.Real.register(Deferred)
