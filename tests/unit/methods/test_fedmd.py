"""FedMD: distances of logits from their target."""

import pytest
import torch

from atoll.learning.distill import divergence
from atoll.methods.fedmd import DISTANCES, public_loss


def test_distances_by_hand_and_zero_for_equal_logits() -> None:
    z, target = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert float(DISTANCES["l1"](z, target)) == 1.5
    assert float(DISTANCES["mse"](z, target)) == 2.5
    assert float(DISTANCES["kl"](z, target)) == pytest.approx(float(divergence(target, z)))
    assert [float(distance(z, z)) for distance in DISTANCES.values()] == [0.0, 0.0, 0.0]


def test_rcfl_mixes_the_own_logits_into_the_target_and_they_get_no_gradient() -> None:
    """The target is ([0, 4] + 0.5 [1, 2]) / 1.5 = [1/3, 10/3]: distances 2/3 and 4/3, mean 1."""
    z = torch.tensor([[1.0, 2.0]], requires_grad=True)
    given = {"target": torch.tensor([[0.0, 4.0]])}
    loss = public_loss(z, lambda x: x, given, kind="l1", own=0.5)
    assert float(loss.detach()) == pytest.approx(1.0)
    (gradient,) = torch.autograd.grad(loss, [z])
    assert gradient.tolist() == [[0.5, -0.5]]
    plain = public_loss(z.detach(), lambda x: x, given, kind="l1", own=0.0)
    assert float(plain) == 1.5
