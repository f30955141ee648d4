"""The kernel that holds past tasks says what torch's own operations say."""

import pytest
import torch
from torch import Tensor

from atoll.kernels import penalty
from atoll.learning import decomposed

MEMBERS, TASKS, OUTPUTS, INNER = 3, 4, 5, (7, 90)  # more than a block, and not a multiple of one


def parts(dtype: torch.dtype) -> list[Tensor]:
    """Base, masks, adaptive parts (some of them zero), and the weights that they make."""
    torch.manual_seed(0)
    base = torch.randn(MEMBERS, OUTPUTS, *INNER, dtype=dtype, device="cuda")
    mask = torch.randn(MEMBERS, TASKS, OUTPUTS, dtype=dtype, device="cuda")
    past = torch.randn(MEMBERS, TASKS, OUTPUTS, *INNER, dtype=dtype, device="cuda")
    past[past.abs() < 0.5] = 0
    return [base, mask, past, decomposed.restored(base.unsqueeze(1), mask, past)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("one", [0.0, 0.01])
def test_values_and_gradients_are_those_of_the_many_operations(
    dtype: torch.dtype, apart: float, one: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, mask, past, target = parts(dtype)
    target += 0.1 * torch.randn_like(target)
    strength = torch.tensor([1.0, 0.1, 3.0], dtype=dtype, device="cuda")
    given = [base, mask, past, target]
    assert penalty.usable(given)
    said = decomposed._drift(given, strength, one, 1, needed=False)
    monkeypatch.setattr(decomposed, "usable", lambda _: False)
    told = decomposed._drift(given, strength, one, 1, needed=False)
    torch.testing.assert_close(said.squares, told.squares, rtol=apart, atol=0)
    torch.testing.assert_close(said.of_past, told.of_past, rtol=apart, atol=apart)
    torch.testing.assert_close(said.of_base, told.of_base, rtol=apart, atol=apart)
    if one:
        torch.testing.assert_close(said.absolutes, told.absolutes, rtol=apart, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_where_they_are_to_be_are_not_pulled(dtype: torch.dtype) -> None:
    """Not by the least bit: Adam makes a whole step of any gradient, however small."""
    base, mask, past, target = parts(dtype)
    strength = torch.ones(MEMBERS, dtype=dtype, device="cuda")
    far, _, of_base, of_past = penalty.drift(base, mask.sigmoid(), past, target, strength, 0.0)
    assert not far.any()
    assert not of_base.any()
    assert not of_past.any()
