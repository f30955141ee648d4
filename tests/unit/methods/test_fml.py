"""FML: the loss of two networks that teach each other."""

import pytest
import torch
from torch import Tensor

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning.distill import divergence
from atoll.learning.losses import cross_entropy
from atoll.learning.models import MLP, Architecture
from atoll.methods.fml import mutual_loss

pytestmark = pytest.mark.numerics


def test_mutual_learners_do_not_move_each_other_through_the_divergence() -> None:
    model = MLP((4,), (5,), 3, Stream.of(0)).double()
    other = MLP((4,), (), 3, Stream.of(1)).double()
    weights = {f"own/{n}": w.clone().requires_grad_() for n, w in model.state_dict().items()}
    weights |= {f"shared/{n}": w.clone().requires_grad_() for n, w in other.state_dict().items()}
    nets, rows = (Architecture(model), Architecture(other)), batch()
    found = mutual_loss(weights, rows, own=nets[0], shared=nets[1], truths=(0.3, 0.6))
    z, phi = nets[0](dict(model.state_dict()), rows.x), nets[1](dict(other.state_dict()), rows.x)
    first = 0.3 * cross_entropy(z, rows) + 0.7 * divergence(phi, z)
    second = 0.6 * cross_entropy(phi, rows) + 0.4 * divergence(z, phi)
    torch.testing.assert_close(found, first + second)
    alone = {n: w.detach().requires_grad_() for n, w in weights.items() if n.startswith("own/")}
    expected = 0.3 * cross_entropy(z_of(nets[0], alone, rows), rows)
    expected = expected + 0.7 * divergence(phi, z_of(nets[0], alone, rows))
    names = sorted(alone)
    got = torch.autograd.grad(found, [weights[n] for n in names])
    want = torch.autograd.grad(expected, [alone[n] for n in names])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def batch() -> Rows:
    x = torch.from_numpy(Stream.of("x").numpy().normal(size=(6, 4)))
    return Rows(x, torch.zeros(6, 0), torch.tensor([0, 1, 2, 0, 1, 2]))


def z_of(net: Architecture, weights: dict[str, Tensor], rows: Rows) -> Tensor:
    return net({n.removeprefix("own/"): w for n, w in weights.items()}, rows.x)
