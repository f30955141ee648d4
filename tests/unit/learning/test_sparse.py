"""Sparse coding: the smaller of two codings, exact both ways, damage refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import BadMessageError
from atoll.learning.sparse import coded, decoded, mean_of_sent, trimmed, widened

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


@pytest.mark.parametrize("count", [3, 8, 9, 16])
def test_filters_that_were_sent_come_to_their_places_and_others_are_zero(count: int) -> None:
    layer = torch.arange(1.0, 2 * count + 1).view(count, 2)
    kept = torch.arange(count) % 2 == 0
    sent = trimmed("conv", layer, kept)
    wanted = torch.where(kept[:, None], layer, 0)
    assert torch.equal(widened("conv", sent, torch.zeros(count, 2), "site"), wanted)
    with pytest.raises(BadMessageError, match="without the bits that identify"):
        widened("conv", sent, torch.zeros(8 * len(sent["conv/bits"]) + 1, 2), "site")


def test_the_mean_of_a_filter_is_over_those_who_sent_any_of_it() -> None:
    """A filter is sent where one of its numbers is not zero; one that nobody sent is zero."""
    one = torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 3.0]])
    other = torch.tensor([[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert mean_of_sent([one, other]).tolist() == [[2.0, 1.0], [0.0, 0.0], [3.0, 3.0]]
    alone = mean_of_sent([one])
    assert torch.equal(alone, one)
    assert alone.dtype == one.dtype
