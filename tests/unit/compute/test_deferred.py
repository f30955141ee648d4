"""Numbers that are read when somebody needs them."""

import math
import numbers
from typing import Any, cast

import pytest
import torch

from atoll.compute.deferred import Deferred, HostCopy


class Reads:
    """A number that counts how often it is read."""

    def __init__(self, value: float) -> None:
        self.value, self.count = value, 0

    def __call__(self) -> float:
        self.count += 1
        return self.value


def test_a_copy_on_the_host_is_not_changed_by_what_comes_later() -> None:
    numbers = torch.tensor([[1.0, 2.0]])
    copy = HostCopy(numbers)
    numbers.zero_()
    assert copy.numbers == [[1.0, 2.0]]


def test_a_mean_is_read_when_it_is_needed() -> None:
    reads = [Reads(value) for value in (0.1, 0.2, 0.3)]
    losses = cast(list[float], [Deferred(read) for read in reads])
    mean: Any = sum(losses) / len(losses)
    assert isinstance(mean, Deferred)
    assert [read.count for read in reads] == [0, 0, 0]
    assert float(mean) == (0.1 + 0.2 + 0.3) / 3
    assert [read.count for read in reads] == [1, 1, 1]


def test_very_many_numbers_have_a_sum() -> None:
    many = cast(list[float], [Deferred(lambda: 0.5)] * 5000)
    assert float(sum(many)) == 2500.0


def test_all_else_is_done_with_the_value() -> None:
    number: Any = Deferred(lambda: 2.0)
    other: Any = Deferred(lambda: 3.0)
    assert (number - other, other * number, 2 - number, 2 * number) == (-1.0, 6.0, 0.0, 4.0)
    assert (6 / number, number**2, -number, abs(-number)) == (3.0, 4.0, -2.0, 2.0)
    assert number < other <= 3.0
    assert other > number >= 2.0
    assert number == 2.0 != other
    assert bool(number)
    assert math.isfinite(number)
    assert (f"{number:.1f}", repr(number), int(number), round(number)) == ("2.0", "2.0", 2, 2)
    assert {number: 1}[2.0] == 1
    assert isinstance(number, numbers.Real)


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_moment_at_which_it_began() -> None:
    numbers = torch.arange(1000.0, device="cuda")
    copy = HostCopy(numbers)
    numbers.zero_()
    assert copy.numbers == [float(n) for n in range(1000)]
