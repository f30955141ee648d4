"""Numbers that are waited for only where somebody needs them."""

import pytest
import torch

from atoll.core.late import Arriving, Late, Losses, late, mean_of, now


def test_what_is_on_its_way_is_not_changed_by_what_comes_later() -> None:
    numbers = torch.tensor([[1.0, 2.0]])
    coming = Arriving(numbers)
    numbers.zero_()
    assert coming.numbers == [[1.0, 2.0]]


def test_losses_are_read_as_means_over_rows() -> None:
    losses = Losses(Arriving(torch.tensor([[6.0, 8.0], [1.0, 3.0]])), ["a", "b"], 1, 4)
    assert dict(losses) == {"a": 2.0, "b": 0.75}
    with pytest.raises(KeyError):
        losses["c"]


def test_a_late_loss_is_waited_for_when_it_is_wanted() -> None:
    sums = torch.tensor([[6.0, 8.0]])
    found = late(Losses(Arriving(sums), ["a"], 0, 2), "a")
    assert isinstance(found, Late)
    assert now(found) == 3.0
    assert late({"a": 3.0}, "a") == 3.0


def test_a_mean_is_late_if_one_of_its_numbers_is() -> None:
    asked: list[float] = []

    def find() -> float:
        asked.append(1.0)
        return 4.0

    waiting = mean_of([2.0, Late(find)])  # type: ignore[list-item]
    assert isinstance(waiting, Late)
    assert not asked
    assert now(waiting) == 3.0
    assert mean_of([2.0, 4.0]) == 3.0
    assert not isinstance(mean_of([2.0, 4.0]), Late)
