"""What clients look at beside a run: the pictures of features."""

import pytest
import torch

from atoll.learning.collaboration import principal

pytestmark = pytest.mark.numerics


def test_the_first_of_equally_large_values_is_the_positive_one() -> None:
    """The second row is longer by one rounding, which must not turn the picture."""
    rows = torch.tensor([[-3.0], [3.0 + 4.5e-16], [0.0]], dtype=torch.float64)
    assert torch.equal(principal(rows).sign()[:2], torch.tensor([[1.0], [-1.0]]).double())
    assert float(principal(torch.tensor([[1.0], [0.0], [-2.0]]))[2, 0]) > 0
