"""Losses worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning.losses import cross_entropy, label_loss, plain, proximal
from atoll.learning.models import MLP, Architecture

LINEAR = Architecture(MLP((1,), [], 2, Stream.of(0)))
X = torch.tensor([[1.0], [2.0]])
BATCH = Rows(X, X[:, :0], torch.tensor([0, 1]))
WEIGHTS = {"weight0": torch.tensor([[0.0], [1.0]]), "bias0": torch.zeros(2)}  # logits (0, x)
BY_HAND = (math.log(1 + math.e) + math.log(1 + math.exp(-2))) / 2


def test_plain_is_the_mean_cross_entropy_on_common_inputs() -> None:
    assert float(plain(LINEAR, WEIGHTS, BATCH)) == pytest.approx(BY_HAND)


def test_weights_of_classes_are_those_of_torch() -> None:
    weights = torch.tensor([3.0, 0.5])
    logits = torch.tensor([[0.2, 0.4], [1.0, -1.0], [0.0, 2.0]])
    y = torch.tensor([0, 1, 1])
    none = torch.zeros(3, 0)
    loss = cross_entropy(logits, Rows(none, none, y, weights[y]))
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y, weights)))


def test_proximal_adds_half_the_strength_times_the_squared_distance() -> None:
    """The weights are (0, 1) and (0, 0), the anchor (2, 1) and (0, -1): the distance is 4 + 1."""
    anchor = {
        "anchor/weight0": torch.tensor([[2.0], [1.0]]),
        "anchor/bias0": torch.tensor([0.0, -1.0]),
    }
    given = {**WEIGHTS, **anchor, "strength": torch.tensor(0.6)}
    assert float(proximal(LINEAR, given, BATCH)) == pytest.approx(BY_HAND + 0.3 * 5)


def test_proximal_pulls_the_weights_towards_the_anchor_and_leaves_the_anchor() -> None:
    weights = {name: weight.clone().requires_grad_() for name, weight in WEIGHTS.items()}
    anchor = {f"anchor/{name}": weight + 3 for name, weight in WEIGHTS.items()}
    loss = proximal(LINEAR, {**weights, **anchor, "strength": torch.tensor(2.0)}, BATCH)
    (pulled,) = torch.autograd.grad(loss, [weights["bias0"]], retain_graph=True)
    (unpulled,) = torch.autograd.grad(plain(LINEAR, weights, BATCH), [weights["bias0"]])
    torch.testing.assert_close(pulled - unpulled, torch.full((2,), -6.0))  # 2 * (w - anchor)


def test_every_member_of_a_bank_has_a_loss_of_its_own() -> None:
    logits = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0))
    found = cross_entropy(logits, BATCH)
    expected = torch.stack([F.cross_entropy(member, BATCH.y) for member in logits])
    torch.testing.assert_close(found, expected)


def test_rows_that_stand_in_for_none_do_not_count() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 2.0], [50.0, -50.0]])
    x = torch.zeros(3, 1)
    padded = Rows(x, x[:, :0], torch.tensor([0, 1, 1]), share=torch.tensor([1.0, 1.0, 0.0]))
    assert float(cross_entropy(logits, padded)) == pytest.approx(BY_HAND)
    assert float(cross_entropy(logits, replace(padded, share=None))) > BY_HAND + 10


def test_numbers_are_learned_by_their_squared_error() -> None:
    y = torch.tensor([0.0, 1.0])
    batch = Rows(torch.zeros(2, 1), torch.zeros(2, 0), y)
    outputs = torch.tensor([[1.0], [3.0]])  # off by 1 and 2
    assert float(label_loss(outputs, batch)) == 2.5
    assert float(label_loss(outputs, replace(batch, share=torch.tensor([3.0, 1.0])))) == 1.75
    bank = torch.stack([outputs, torch.zeros(2, 1)])  # two members on the same rows
    assert label_loss(bank, batch).tolist() == [2.5, 0.5]


def test_classes_are_learned_by_cross_entropy() -> None:
    batch = Rows(torch.zeros(2, 1), torch.zeros(2, 0), torch.tensor([0, 1]))
    logits = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert torch.equal(label_loss(logits, batch), cross_entropy(logits, batch))
