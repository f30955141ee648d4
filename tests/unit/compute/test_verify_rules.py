"""When the first steps of a member agree with the loop's, in numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.compute.probe import Seen
from atoll.compute.proof import Verdict
from atoll.compute.verify import disagreement

PROVED, REFUTED = Verdict("batched", 0.0, ""), Verdict("", 1.0, "it differs")


def told(
    apart: float,
    losses: tuple[float, float] = (1.0, 1.0),
    dtype: torch.dtype = torch.float32,
    rounding: float = 0.0,
    confirmed: Verdict = REFUTED,
) -> str:
    """What is said of a weight that moved from 0 to 1, and of losses by the loop and as seen."""
    one, seen = (torch.tensor([v], dtype=torch.float64) for v in (1.0, 1.0 - apart))
    by_loop, actual = (torch.tensor([v], dtype=torch.float64) for v in losses)
    start = {"w": torch.zeros(1, dtype=torch.float64)}
    kind: Any = SimpleNamespace(
        first_steps=lambda job, steps: (start, Seen({"w": one}, {"loss": by_loop})),
        weights=lambda job: {"w": torch.zeros(1, dtype=dtype)},
    )
    return disagreement(
        kind, None, Seen({"w": seen}, {"loss": actual}), rounding, lambda: confirmed
    )


@pytest.mark.parametrize(
    ("apart", "dtype", "agrees"),
    [
        (0.0, torch.float32, True),
        (0.0009, torch.float32, True),
        (0.002, torch.float32, False),
        (1e-6, torch.float64, False),
        (0.009, torch.float16, True),
        (0.5, torch.float16, False),
    ],
)
def test_weights_may_be_apart_by_the_tolerance_of_their_type(
    apart: float, dtype: torch.dtype, agrees: bool
) -> None:
    assert (told(apart, dtype=dtype) == "") is agrees


def test_ten_times_the_rounding_of_the_proof_is_allowed_and_not_more() -> None:
    assert told(0.125, rounding=0.0125) == ""
    assert "weights 1.3e-01 (tolerance 1e-01)" in told(0.13, rounding=0.0125)


@pytest.mark.parametrize(
    ("losses", "dtype", "agrees"),
    [
        ((1000.0, 1001.0), torch.float32, True),  # a thousandth exactly
        ((1000.0, 1002.0), torch.float32, False),
        ((100.0, 104.0), torch.float16, False),
    ],
)
def test_losses_have_a_tolerance_of_their_own(
    losses: tuple[float, float], dtype: torch.dtype, agrees: bool
) -> None:
    assert (told(0.0, losses, dtype) == "") is agrees


def test_a_difference_that_double_precision_does_not_confirm_is_rounding() -> None:
    assert told(0.5, confirmed=PROVED) == ""
    assert told(0.5, confirmed=REFUTED)
    assert told(0.0, (100.0, 105.0), confirmed=PROVED) == ""
    assert told(0.0, (100.0, 106.0), confirmed=PROVED)  # too far for roundings
