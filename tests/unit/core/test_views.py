"""Rows of one tensor are recognised, and nothing else is."""

import pytest
import torch
from torch import Tensor

from atoll.core.views import stacked_view
from atoll.learning.weights import mean


def whole() -> Tensor:
    return torch.arange(24.0).reshape(3, 2, 4).clone()


def test_all_rows_in_order_are_their_tensor() -> None:
    tensor = whole()
    assert stacked_view(tensor.unbind(0)) is tensor


def test_rows_of_a_part_of_a_tensor_are_not_taken_for_all_of_it() -> None:
    tensor = whole()
    assert stacked_view(tensor[:2].unbind(0)) is None


def others() -> dict[str, list[Tensor]]:
    """Tensors of the right number that are not the rows of one tensor in order."""
    tensor = whole()
    first, second, third = tensor.unbind(0)
    square = torch.arange(27.0).reshape(3, 3, 3).clone()
    return {
        "another order": [second, first, third],
        "one row twice": [first, first, third],
        "a row of another tensor": [first, second, whole()[2]],
        "a copy": [first, second, third.clone()],
        "rows missing": [first, second],
        "transposed": [row.T for row in square.unbind(0)],
        "parts of rows": [row[:1] for row in tensor.unbind(0)],
        "columns": list(torch.arange(9.0).reshape(3, 3).clone().unbind(1)),
        "no views": [torch.ones(2), torch.ones(2)],
        "other numbers in the same memory": [row.view(torch.int32) for row in tensor.unbind(0)],
    }


@pytest.mark.parametrize("name", others())
def test_other_tensors_are_not_taken_for_rows(name: str) -> None:
    assert stacked_view(others()[name]) is None


def test_a_mean_of_rows_has_the_bits_of_a_mean_of_copies() -> None:
    tensor = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0))
    rows = [{"w": row} for row in tensor.unbind(0)]
    copies = [{"w": row.clone()} for row in tensor.unbind(0)]
    for weights in (None, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]):
        assert torch.equal(mean(rows, weights)["w"], mean(copies, weights)["w"])
