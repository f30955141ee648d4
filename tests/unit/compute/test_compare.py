"""How far two results are apart, worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from atoll.compute.compare import max_relative_error, norm_errors
from atoll.compute.probe import Seen


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def error(expected: Tensor, actual: Tensor, start: Tensor | None = None) -> float:
    before = None if start is None else {"w": start}
    return max_relative_error({"w": expected}, {"w": actual}, before)


def test_the_largest_difference_counts_relative_to_the_largest_entry() -> None:
    assert error(row(1.0, -4.0), row(1.5, -4.0)) == pytest.approx(0.5 / 4)
    assert error(row(2.0, 1.0), row(2.0, 0.0)) == pytest.approx(1 / 2)
    assert error(row(2.0, 1.0), row(2.0, 1.0)) == 0


def test_of_several_tensors_the_one_that_is_furthest_apart_counts() -> None:
    expected = {"near": row(4.0), "far": row(1.0)}
    actual = {"near": row(4.1), "far": row(1.5)}
    assert max_relative_error(expected, actual) == pytest.approx(0.5)
    assert max_relative_error({}, {}) == 0


def test_other_names_and_other_shapes_are_infinitely_far() -> None:
    assert max_relative_error({"a": row(1.0)}, {"b": row(1.0)}) == math.inf
    assert error(row(1.0, 1.0), row(1.0)) == math.inf
    assert error(row(), row()) == 0


def test_a_tensor_of_small_numbers_counts_as_one_of_a_thousandth() -> None:
    assert error(row(1e-6), row(3e-6)) == pytest.approx(2e-6 / 1e-3)
    assert error(row(2e-3), row(3e-3)) == pytest.approx(0.5)


def test_with_a_start_a_difference_is_relative_to_the_largest_change() -> None:
    assert error(row(1.0, 1.5), row(1.0, 1.6), start=row(1.0, 1.0)) == pytest.approx(0.1 / 0.5)
    # no change at all counts as a ten-thousandth of the largest entry
    assert error(row(1.0, 2.0), row(1.0, 2.1), start=row(1.0, 2.0)) == pytest.approx(0.1 / 2e-4)
    # a start of another shape or of whole numbers says nothing
    assert error(row(1.0, 2.0), row(1.0, 2.1), start=row(1.0)) == pytest.approx(0.1 / 2)
    whole = torch.tensor([1, 2])
    assert error(row(1.0, 2.0), row(1.0, 2.1), start=whole) == pytest.approx(0.1 / 2)


def test_numbers_that_are_not_finite_on_both_sides_are_equal_and_have_no_size() -> None:
    assert error(row(math.nan, 2.0), row(math.nan, 2.0)) == 0
    assert error(row(math.inf, 2.0), row(math.inf, 3.0)) == pytest.approx(1 / 2)
    assert error(row(math.nan, 2.0), row(1.0, 2.0)) == math.inf
    assert error(row(1.0, 2.0), row(math.nan, 2.0)) == math.inf
    assert error(row(math.inf, 2.0), row(-math.inf, 2.0)) == math.inf
    assert error(row(math.inf, 0.5), row(math.inf, 0.6)) == pytest.approx(0.1 / 0.5)
    began, expected = row(math.nan, math.inf, -math.inf, 1.0), row(1.0, 1.0, 1.0, 1.5)
    assert error(expected, expected + 0.1, start=began) == pytest.approx(0.1 / 0.5)


def norms(
    start: list[float], expected: list[float], actual: list[float], loss: float = 2.0
) -> tuple[float, float]:
    one, other = Seen({"w": row(*expected)}, {"a": row(2.0)}), Seen({"w": row(*actual)}, {})
    other = Seen(other.weights, {"a": row(loss)})
    return norm_errors({"w": row(*start)}, one, other)


def test_norms_of_all_weights_are_compared_with_how_far_they_moved() -> None:
    # moved by (3, 4), of norm 5; apart by (0.6, 0.8), of norm 1
    weights, losses = norms([1.0, 1.0], [4.0, 5.0], [4.6, 5.8], loss=2.5)
    assert weights == pytest.approx(1 / 5)
    assert losses == pytest.approx(0.5 / 2)


def test_norms_are_over_all_entries_of_all_tensors_together() -> None:
    start = {"a": row(0.0), "b": row(0.0, 0.0, 0.0, 0.0)}
    one = Seen({"a": row(3.0), "b": row(2.0, 2.0, 2.0, 2.0)}, {})  # the squares are 9 and 16
    other = Seen({"a": row(3.0), "b": row(1.0, 1.0, 1.0, 1.0)}, {})
    assert norm_errors(start, one, other) == pytest.approx((2 / 5, 0.0))


def test_weights_that_did_not_move_count_as_moved_by_a_ten_thousandth() -> None:
    weights, _ = norms([3.0, 4.0], [3.0, 4.0], [3.0, 4.1])
    assert weights == pytest.approx(0.1 / (1e-4 * 5))
    assert norms([0.0], [0.0], [0.0]) == (0.0, 0.0)
    assert norm_errors({}, Seen({}, {}), Seen({}, {})) == (0.0, 0.0)


def test_a_reference_that_is_not_finite_agrees_with_what_is_not_finite_alone() -> None:
    assert norms([0.0, 0.0], [math.nan, 1.0], [math.nan, 7.0]) == (0.0, 0.0)
    assert norms([0.0, 0.0], [math.inf, 1.0], [1.0, 1.0]) == (math.inf, math.inf)
    assert norms([0.0, 0.0], [1.0, 1.0], [math.nan, 1.0])[0] == math.inf
    start, wrong = {"a": row(0.0), "b": row(0.0)}, {"a": row(math.nan), "b": row(1.0)}
    assert norm_errors(start, Seen(wrong, {}), Seen(wrong, {})) == (0.0, 0.0)
