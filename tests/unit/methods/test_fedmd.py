"""FedMD: distances of logits from their target."""

import pytest
import torch

from atoll.learning.distill import divergence
from atoll.methods.fedmd import DISTANCES


def test_distances_by_hand_and_zero_for_equal_logits() -> None:
    z, target = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert float(DISTANCES["l1"](z, target)) == 1.5
    assert float(DISTANCES["mse"](z, target)) == 2.5
    assert float(DISTANCES["kl"](z, target)) == pytest.approx(float(divergence(target, z)))
    assert [float(distance(z, z)) for distance in DISTANCES.values()] == [0.0, 0.0, 0.0]
