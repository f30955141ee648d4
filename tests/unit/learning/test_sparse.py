"""Sparse coding: the smaller of two codings, exact both ways, damage refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.learning.sparse import coded, decoded

numbers = st.sampled_from([0.0, 0.0, 0.0, 1.5, -2.0, 1e-30])


@given(st.lists(numbers, max_size=70))
def test_a_code_gives_the_tensor_back_exactly(values: list[float]) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(decoded(coded(flat), len(flat)), flat)


@pytest.mark.parametrize(("count", "kind"), [(0, "places"), (25, "places"), (26, "bits")])
def test_the_smaller_coding_is_taken(count: int, kind: str) -> None:
    flat = torch.zeros(800)
    flat[:count] = 1.0
    code = coded(flat)
    assert set(code) == {"values", kind}
    size = sum(tensor.nbytes for tensor in code.values())
    assert size == min(8 * count, 800 // 8 + 4 * count)


@pytest.mark.parametrize(
    "code",
    [
        {"values": torch.ones(2), "places": torch.tensor([0, 10])},
        {"values": torch.ones(2), "places": torch.tensor([-1, 3])},
        {"values": torch.ones(2), "places": torch.tensor([3, 3])},
        {"values": torch.ones(3), "places": torch.tensor([1, 2])},
        {"values": torch.ones(1), "bits": torch.tensor([128], dtype=torch.uint8)},
        {"values": torch.ones(2), "bits": torch.tensor([128, 0], dtype=torch.uint8)},
        {"values": torch.ones(1), "bits": torch.tensor([0, 1], dtype=torch.uint8)},
    ],
)
def test_a_code_that_does_not_fit_is_refused(code: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="places"):
        decoded(code, 10)


@pytest.mark.parametrize("places", [[0, 5, 3], [0, 3, 3]])
def test_places_must_rise_all_the_way(places: list[int]) -> None:
    with pytest.raises(ValueError, match="places"):
        decoded({"values": torch.ones(3), "places": torch.tensor(places)}, 10)
