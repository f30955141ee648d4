"""Outputs that are random numbers: each step of the test for them, worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from atoll.core.influence import (
    _aligned_noise,
    _association,
    _centred,
    _flatness,
    _noise,
    _standardised,
)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_outputs_are_centred_by_column_and_have_norm_one() -> None:
    """The columns (1, 5) and (0, 6) less their means 3 and 3: the norm is sqrt(8 + 18)."""
    found = _centred(torch.tensor([[1.0, 0.0], [5.0, 6.0]]))
    assert found.dtype == torch.float64
    rows = torch.tensor([[-2.0, -3.0], [2.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(found, rows / math.sqrt(26))
    small = _centred(torch.tensor([[1.0, 0.0], [5.0, 6.0]]) / 1024)
    torch.testing.assert_close(small, rows / math.sqrt(26))
    assert _centred(torch.full((3, 2), 7.0)).tolist() == [[0.0, 0.0]] * 3


def test_outputs_are_standardised_by_row_and_by_column() -> None:
    """Rows (1, 3, 5) and (4, 0, 2) less 3 and 2, then columns less 0, -1 and 1."""
    given = torch.tensor([[1.0, 3.0, 5.0], [4.0, 0.0, 2.0]])
    rows = torch.tensor([[-2.0, 1.0, 1.0], [2.0, -1.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(_standardised(given), rows / math.sqrt(12))
    torch.testing.assert_close(_standardised(given / 1024), rows / math.sqrt(12))
    assert _standardised(torch.ones(2, 3)).tolist() == [[0.0] * 3] * 2


SQUARE = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
SINGLE = torch.tensor([[2.0], [0.0], [-2.0], [0.0]], dtype=torch.float64)


def test_association_is_counted_in_deviations_of_unrelated_rows() -> None:
    """Three degrees of freedom; traces 8 and 8, their squares 32 and 64, and tr(AB) is 16.

    The mean is 8 * 8 / 3, the variance 2 * (96 - 64) * (192 - 64) / (9 * 5 * 2) = 8192 / 90.
    """
    expected = (16 - 64 / 3) / math.sqrt(8192 / 90)
    assert _association(SQUARE, SINGLE) == pytest.approx(expected)
    assert _association(SINGLE, SQUARE) == pytest.approx(expected)


def test_association_does_not_depend_on_the_size_of_either_side() -> None:
    """Traces 72 and 2, squares 2592 and 4, tr(AB) is 36: the same deviations as before."""
    expected = (16 - 64 / 3) / math.sqrt(8192 / 90)
    assert _association(3 * SQUARE, 0.5 * SINGLE) == pytest.approx(expected)


def test_flatness_is_of_the_variance_however_small_it_is() -> None:
    """Equal eigenvalues: the share is 1, times 1 + 2/3 for two columns in four rows."""
    assert _flatness(1e-3 * SQUARE, 2) == pytest.approx(5 / 3)


def senders(count: int, rows: int, width: int) -> dict[str, Tensor]:
    """Some who send the same numbers, and one whose numbers are random."""
    common = drawn(0, rows, width)
    return {**dict.fromkeys("abc"[: count - 1], common), "d": drawn(5, rows, width)}


@pytest.mark.parametrize(
    ("count", "rows", "classes", "excluded"),
    [
        (4, 64, 6, ["d"]),
        (3, 64, 6, ["d"]),
        (2, 64, 6, []),  # two cannot tell who of them is wrong
        (4, 64, 5, []),  # too few classes
        (4, 24, 6, ["d"]),  # four rows of a class are enough
        (4, 23, 6, []),
    ],
)
def test_noise_is_told_from_three_senders_six_classes_and_four_rows_of_each(
    count: int, rows: int, classes: int, excluded: list[str]
) -> None:
    assert list(_noise(senders(count, rows, classes), "logits")) == excluded


@pytest.mark.parametrize(
    ("count", "rows", "width", "excluded"),
    [
        (4, 64, 6, ["d"]),
        (3, 64, 6, ["d"]),
        (2, 64, 6, []),
        (4, 64, 5, []),
        (4, 12, 6, ["d"]),
        (4, 11, 6, []),
    ],
)
def test_noise_in_embeddings_is_told_from_three_senders_six_columns_and_twelve_rows(
    count: int, rows: int, width: int, excluded: list[str]
) -> None:
    assert list(_aligned_noise(senders(count, rows, width), "embedding")) == excluded


@pytest.mark.parametrize("rule", [_noise, _aligned_noise], ids=["common", "aligned"])
@pytest.mark.parametrize(
    "other", [drawn(6, 63, 6), drawn(6, 64, 7)], ids=["other rows", "other columns"]
)
def test_outputs_of_different_shapes_are_not_compared(rule: object, other: Tensor) -> None:
    assert callable(rule)
    assert rule({**senders(4, 64, 6), "e": other}, "logits") == {}


@pytest.mark.parametrize("rule", [_noise, _aligned_noise], ids=["common", "aligned"])
@pytest.mark.parametrize("shape", [(64,), (64, 6, 6)], ids=["numbers", "images"])
def test_outputs_that_are_no_table_are_not_judged(rule: object, shape: tuple[int, ...]) -> None:
    assert callable(rule)
    assert rule({name: drawn(i, *shape) for i, name in enumerate("abcd")}, "logits") == {}
