"""Ridge regression from sums, worked out by hand."""

from typing import Any

import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.learning import ridge
from atoll.learning.models import MLP, skeleton

INPUTS = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 0])


def test_sums_of_three_rows() -> None:
    sums = ridge.packed_sums(INPUTS, LABELS, classes=3)
    assert sums["gram"].tolist() == [10.0, 2.0, 5.0]  # 1+9, 2, 4+1
    assert sums["cross"].tolist() == [[1.0, 0.0, 3.0], [3.0, 0.0, 0.0]]


def test_a_triangle_is_the_half_of_its_square() -> None:
    matrix = torch.tensor([[1, 2, 4], [2, 3, 5], [4, 5, 6]])
    assert ridge.triangle(matrix).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(ridge.square(torch.tensor([1, 2, 3, 4, 5, 6]), 3), matrix)


def test_the_solution_of_a_small_system() -> None:
    gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    cross = torch.tensor([[8.0], [4.0]], dtype=torch.float64)
    # [[3, 1], [1, 3]] w = [8, 4]: w = [(24 - 4) / 8, (12 - 8) / 8]
    torch.testing.assert_close(ridge.solved(gram, cross, 1.0).flatten().tolist(), [2.5, 0.5])


def test_random_features_are_relu_of_a_linear_layer() -> None:
    weights = {"weight": torch.tensor([[1.0, -1.0], [2.0, 0.0]]), "bias": torch.tensor([0.5, -1.0])}
    x = torch.tensor([[[[1.0, 2.0]]], [[[0.0, -3.0]]]])
    assert ridge.random_features(weights, x, 0.0).tolist() == [[0.0, 1.0], [3.5, 0.0]]
    assert ridge.random_features(weights, x, 1.0).tolist() == [[0.0, 3.0], [3.5, 1.0]]


def test_features_of_a_network_are_its_last_hidden_layer_or_its_inputs() -> None:
    for widths, expected in (((2,), [[0.0, 4.0, 1.0]]), ((), [[1.0, 3.0, 1.0]])):
        model = MLP((2,), widths, 3, Stream.of("test"))
        weights = model.state_dict()
        if widths:
            weights["weight0"] = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
            weights["bias0"] = torch.zeros(2)
        hidden = ridge.frozen_features(skeleton(model, False), weights, torch.tensor([[1.0, 3.0]]))
        assert ridge.with_constant(hidden).tolist() == expected


def test_a_network_without_linear_layers_has_no_features() -> None:
    model = torch.nn.ReLU()
    with pytest.raises(UserError, match="has no features"):
        ridge.frozen_features(skeleton(model, False), {"none": torch.zeros(1)}, torch.zeros(1, 2))


def test_fixed_point_numbers_count_steps() -> None:
    values = torch.tensor([0.75, -0.3, 2.0], dtype=torch.float64)
    fixed = ridge.to_fixed(values, bits=2)
    assert fixed.tolist() == [3, -1, 8]
    assert fixed.dtype == torch.int64
    assert ridge.from_fixed(fixed, bits=2).tolist() == [0.75, -0.25, 2.0]
    assert ridge.to_fixed(values, bits=0) is values
    assert ridge.from_fixed(values, bits=0) is values


def test_numbers_without_room_are_refused() -> None:
    most = torch.tensor([float(1 << 19)], dtype=torch.float64)
    assert ridge.to_fixed(most, bits=20).tolist() == [1 << 39]
    with pytest.raises(UserError, match="20 fraction bits"):
        ridge.to_fixed(most + 1, bits=20)
    full = {"gram": torch.tensor([1 << 39])}
    assert ridge.added(full, {"gram": torch.tensor([1])}, -1)["gram"].tolist() == [(1 << 39) - 1]
    with pytest.raises(UserError, match="no room"):
        ridge.added(full, {"gram": torch.tensor([1])}, 1)


GOOD = {"gram": torch.tensor([4, 1, 3]), "cross": torch.tensor([[1, 2], [2, 1]])}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"gram": torch.tensor([4.0, 1.0, 3.0])}, "other sums than"),
        ({"more": torch.tensor([1])}, "other sums than"),
        ({"gram": torch.tensor([4, 1])}, "another form"),
        ({"cross": torch.tensor(3)}, "another form"),
        ({"cross": torch.tensor([[1, 2, 0], [2, 1, 0]])}, "another form"),
        ({"gram": torch.tensor([-4, 1, 3])}, "no rows have"),
        ({"gram": torch.tensor([4, 1, 2])}, "no rows have"),  # 2 rows, with 3 labels
    ],
)
def test_sums_that_cannot_be_are_known(change: dict[str, Any], reason: str) -> None:
    found = ridge.implausible_sums({**GOOD, **change}, classes=2, width=0, bits=4)
    assert reason in found
    assert bool(found) == bool(reason)


def test_sums_of_another_width_are_known() -> None:
    assert ridge.implausible_sums(GOOD, classes=2, width=2, bits=4) == ""
    assert "another form" in ridge.implausible_sums(GOOD, classes=2, width=3, bits=4)
