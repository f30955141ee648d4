"""Numbers that a device is still working out: whoever needs one waits for it, and nobody before.

A host that asks for every number at once stands still while the device works, and then the device
stands still while the host prepares the next round. Numbers that only the record wants can wait.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Arriving", "Late", "Losses", "late", "mean_of", "now"]


class Arriving:
    """Numbers on their way from a device to the host, as they are now."""

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
        """The numbers, as `tolist` gives them."""
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()
            self._numbers = self._here.tolist()
        return self._numbers


class Late:
    """A number in a message or a note that nobody has waited for yet."""

    def __init__(self, find: Callable[[], float]) -> None:
        self._find = find

    def __float__(self) -> float:
        return float(self._find())


class Losses(Mapping[str, float]):
    """The mean loss of each phase of a work; to read one is to wait for it."""

    def __init__(self, sums: Arriving, names: Sequence[str], place: int, rows: int) -> None:
        """`sums`: (phases, members), `place`: the member, `rows`: to divide by."""
        self._sums, self._names, self._place, self._rows = sums, names, place, rows

    def __getitem__(self, name: str) -> float:
        if name not in self._names:
            raise KeyError(name)
        return float(self._sums.numbers[self._names.index(name)][self._place] / self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def now(value: Any) -> Any:
    """A number that was late, waited for; anything else as it is."""
    return float(value) if isinstance(value, Late) else value


def late(losses: Mapping[str, float], name: str) -> float:
    """A loss for the record: on its way if it is not there yet."""
    return cast(float, Late(lambda: losses[name])) if isinstance(losses, Losses) else losses[name]


def mean_of(numbers: Sequence[float]) -> float:
    """The mean, late if one of the numbers is."""
    mean = Late(lambda: sum(map(float, numbers)) / len(numbers))
    return cast(float, mean if any(isinstance(n, Late) for n in numbers) else float(mean))
