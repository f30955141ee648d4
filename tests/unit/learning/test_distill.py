"""Cross-correlation of logits and divergences: invariants 1 to 6 of the FCCL specification."""

import math

import pytest
import torch
from torch import Tensor

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning.distill import (
    correlation,
    correlation_loss,
    distillation_loss,
    divergence,
)
from atoll.learning.losses import cross_entropy
from atoll.learning.models import MLP, Architecture

pytestmark = pytest.mark.numerics

C, LAMBDA = 10, 0.0051


def logits(name: str, rows: int = 64, columns: int = C) -> Tensor:
    return torch.from_numpy(Stream.of(name).numpy().normal(size=(rows, columns)))


def loss(z: Tensor, target: Tensor) -> float:
    return float(correlation_loss(correlation(z, target), LAMBDA))


def test_the_correlation_of_two_columns_by_hand() -> None:
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 3.0]])
    target = torch.tensor([[1.0], [3.0], [2.0]])
    # centred: (-1, 0, 1) and (-1, -1, 2) with (-1, 1, 0)
    expected = torch.tensor([[1 / 2], [0.0]])
    torch.testing.assert_close(correlation(z, target), expected)


def test_the_loss_by_hand() -> None:
    m = torch.tensor([[0.5, 0.2], [-0.4, 1.0]])
    away = (1 + 0.2) ** 2 + (1 - 0.4) ** 2
    assert float(correlation_loss(m, 0.1)) == pytest.approx(0.25 + 0.1 * away)
    assert float(correlation_loss(m, 0.1, 0.0)) == pytest.approx(0.25 + 0.1 * (0.04 + 0.16))


def test_equal_logits_have_a_diagonal_of_one_and_a_symmetric_matrix_without_negative_roots() -> (
    None
):
    m = correlation(logits("a"), logits("a"))
    torch.testing.assert_close(m.diagonal(), torch.ones(C).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(m, m.mT)
    assert torch.linalg.eigvalsh(m).min() > -1e-9


@pytest.mark.parametrize("which", ["student", "target"])
def test_shifting_and_scaling_logits_changes_nothing(which: str) -> None:
    z, target = logits("a"), logits("b")
    scale, shift = logits("s", 1).abs() + 0.1, logits("c", 1)
    moved = (z * scale + shift, target) if which == "student" else (z, target * scale + shift)
    torch.testing.assert_close(correlation(*moved), correlation(z, target))
    assert loss(*moved) == pytest.approx(loss(z, target))


def test_a_column_with_its_sign_turned_turns_its_row() -> None:
    z, target = logits("a"), logits("b")
    signs = torch.ones(C).double()
    signs[3] = -1
    expected = correlation(z, target) * signs[:, None]
    torch.testing.assert_close(correlation(z * signs, target), expected)


def test_no_correlation_is_beyond_one() -> None:
    z = logits("a").float() * 1e4 + 1e5
    assert correlation(z, z).abs().max() <= 1 + 1e-5  # single precision far from zero
    assert correlation(logits("a"), logits("b")).abs().max() <= 1 + 1e-6


def test_the_order_of_rows_does_not_matter_and_that_of_classes_only_reorders() -> None:
    z, target, order = logits("a"), logits("b"), Stream.of("o").permutation(64)
    torch.testing.assert_close(correlation(z[order], target[order]), correlation(z, target))
    classes = Stream.of("k").permutation(C)
    m = correlation(z[:, classes], target[:, classes])
    torch.testing.assert_close(m, correlation(z, target)[classes][:, classes])
    assert loss(z[:, classes], target[:, classes]) == pytest.approx(loss(z, target))


def test_independent_logits_lose_as_much_as_the_formula_says() -> None:
    expected = C + LAMBDA * C * (C - 1)
    assert expected == pytest.approx(10.459)
    found = loss(logits("a", 200_000), logits("b", 200_000))
    assert found == pytest.approx(expected, abs=0.05)


def test_the_loss_has_a_floor() -> None:
    """A diagonal of 1 with all else at -1/(C-1): 0.3627; a little lower is possible, 0.359."""
    m = torch.full((C, C), -1 / (C - 1)).fill_diagonal_(1)
    assert float(correlation_loss(m, LAMBDA)) == pytest.approx(0.3627, abs=1e-4)
    z, target = logits("a").requires_grad_(), logits("b")
    optimiser = torch.optim.Adam([z], 0.05)
    for _ in range(400):
        optimiser.zero_grad()
        lost = correlation_loss(correlation(z, target), LAMBDA)
        lost.backward()
        optimiser.step()
    assert float(lost.detach()) >= 0.359 - 1e-3


def test_the_published_form_is_smaller_by_a_known_factor() -> None:
    z, target, rows = logits("a"), logits("b"), 64
    columns = [(v - v.mean(0)) / v.std(0, correction=1) for v in (z, target)]
    published = columns[0].T @ columns[1] / rows
    torch.testing.assert_close(published, correlation(z, target) * (rows - 1) / rows)


def test_a_constant_column_correlates_with_nothing_and_gives_no_nan() -> None:
    for value in (0.0, 3.3, -1e4):
        z = logits("a").float()
        z[:, 2] = value
        z.requires_grad_()
        m = correlation(z, logits("b").float())
        assert m[2].tolist() == [0.0] * C
        (gradient,) = torch.autograd.grad(correlation_loss(m, LAMBDA), z)
        assert torch.isfinite(gradient).all()
        assert correlation(logits("b").float(), z.detach())[:, 2].tolist() == [0.0] * C
    many = torch.full((5000, 4), 1.6102495193481445)  # its mean is off by more than four roundings
    assert correlation(many, many).abs().max() == 0
    nothing = torch.ones(8, C)
    assert float(correlation_loss(correlation(nothing, nothing), LAMBDA)) == pytest.approx(
        C + LAMBDA * C * (C - 1)
    )


def test_divergence_by_hand() -> None:
    teacher, student = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(divergence(teacher, student)) == pytest.approx(expected)
    assert float(divergence(teacher, teacher)) == 0.0
    p = 3**0.5 / (3**0.5 + 1)  # with temperature 2
    soft = p * math.log(p / 0.5) + (1 - p) * math.log((1 - p) / 0.5)
    assert float(divergence(teacher, student, temperature=2.0)) == pytest.approx(soft)


def test_rows_that_count_nothing_do_not_count_in_a_divergence() -> None:
    teacher, student = logits("a", 5), logits("b", 5)
    share = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]).double()
    kept = share > 0
    expected = divergence(teacher[kept], student[kept])
    torch.testing.assert_close(divergence(teacher, student, share), expected)


def batch(own: Tensor) -> Rows:
    return Rows(logits("x", 6, 4), own, torch.tensor([0, 1, 2, 0, 1, 2]))


def test_a_distillation_loss_adds_each_teacher_by_its_strength() -> None:
    model = MLP((4,), (5,), 3, Stream.of(0)).double()
    net, weights = Architecture(model), dict(model.state_dict())
    own = torch.cat([logits("inter", 6, 3), logits("intra", 6, 3)], -1)
    rows = batch(own)
    z = net(weights, rows.x)
    plain, inter, intra = cross_entropy(z, rows), *(divergence(t, z) for t in own.split(3, -1))
    found = distillation_loss(weights, rows, network=net, strengths=(0.5, 2.0))
    torch.testing.assert_close(found, plain + 0.5 * inter + 2 * intra)
    only = distillation_loss(weights, rows, network=net, strengths=(0.0, 2.0))
    torch.testing.assert_close(only, plain + 2 * intra)
    none = distillation_loss(weights, batch(own[:, :0]), network=net, strengths=(0.0, 0.0))
    assert torch.equal(none, plain)
