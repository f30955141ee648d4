"""Rows of a generator, and the loss that distils on them."""

import math

import torch
from torch import nn

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning import synthesis
from atoll.learning.distill import divergences
from atoll.learning.models import MLP, skeleton
from atoll.learning.synthesis import HIDDEN, Synthesis

HOW = Synthesis(4, 16, 150, 64, 0.01, 0.0, 0.0, 0.0)
SEEN = torch.tensor([True, False, True])


def teacher() -> MLP:
    """Class 0 where the first column is above 0, class 2 where it is below; never class 1."""
    model = MLP((2,), (), 3, Stream.of("teacher"))
    weight = torch.tensor([[3.0, 0.0], [0.0, 0.0], [-3.0, 0.0]])
    model.load_state_dict({"weight0": weight, "bias0": torch.tensor([0.0, 9.0, 0.0])})
    return model


def student() -> MLP:
    return MLP((2,), (8,), 3, Stream.of("student"))


def test_the_teacher_knows_the_rows_of_a_trained_generator() -> None:
    stream = Stream.of("generator")
    weights = synthesis.trained_generator(teacher(), student(), SEEN, (2,), HOW, stream)
    rows = synthesis.drawn_rows(weights, SEEN, 200, (2,), Stream.of("draw"))
    first = rows[:, 0]
    assert float(rows.abs().max()) <= 4
    assert float((first.abs() > 1).float().mean()) > 0.95  # the teacher is sure: e^-6 at most
    share = float((first > 0).float().mean())
    assert 0.35 < share < 0.65  # both classes that it has seen


def test_the_student_learns_what_the_teacher_knows() -> None:
    pupil, known = student(), teacher()
    weights = synthesis.trained_generator(known, pupil, SEEN, (2,), HOW, Stream.of("generator"))
    rows = synthesis.drawn_rows(weights, SEEN, 200, (2,), Stream.of("draw"))
    guesses = [synthesis.hidden_logits(model(rows), SEEN).argmax(-1) for model in (known, pupil)]
    assert float((guesses[0] == guesses[1]).float().mean()) > 0.95


def test_an_adversarial_generator_seeks_rows_that_the_student_gets_wrong() -> None:
    """One step from equal weights: the gradients differ by that of w KL alone."""

    def wrong(adversarial: float) -> float:
        how = Synthesis(4, 16, 1, 64, 0.05, adversarial, 0.0, 0.0)
        generator = synthesis.trained_generator(
            teacher(), student(), SEEN, (2,), how, Stream.of("a")
        )
        rows = synthesis.drawn_rows(generator, SEEN, 500, (2,), Stream.of("draw"))
        taught, guessed = (
            synthesis.hidden_logits(model(rows), SEEN) for model in (teacher(), student())
        )
        differs = taught.argmax(-1) != guessed.argmax(-1)
        return float((differs * divergences(taught, guessed)).mean().detach())

    assert wrong(100.0) > wrong(0.0)


def test_batch_norm_statistics_pull_rows_towards_them() -> None:
    torch.manual_seed(0)
    norm, goal = nn.BatchNorm1d(2), torch.tensor([2.0, -1.0])
    norm.running_mean = goal
    known = nn.Sequential(norm, nn.Linear(2, 3))
    distances = []
    for weight in (0.0, 5.0):
        how = Synthesis(4, 16, 150, 64, 0.01, 0.0, weight, 0.0)
        pupil = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
        weights = synthesis.trained_generator(known, pupil, SEEN, (2,), how, Stream.of("bn"))
        rows = synthesis.drawn_rows(weights, SEEN, 500, (2,), Stream.of("draw"))
        distances.append(float((rows.mean(0) - goal).norm()))
    assert distances[1] < 0.3 < distances[0]
    assert not norm._forward_pre_hooks


def test_the_loss_is_cross_entropy_of_real_rows_and_divergence_of_synthetic_ones() -> None:
    """Logits are x itself. Real: (0, 0) of class 0, ln 2. Synthetic: teacher (ln 3, -) at T = 2."""
    model = MLP((2,), (), 2, Stream.of("x"))
    network = skeleton(model, True)
    weights = {
        "weight0": torch.eye(2),
        "bias0": torch.zeros(2),
        "constant/strength": torch.tensor(0.5),
    }
    own = torch.tensor([[HIDDEN, HIDDEN], [2 * math.log(3), 0.0]])
    x = torch.zeros(2, 2)
    batch = Rows(x, own, torch.tensor([0, 0]))
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    expected = math.log(2) + 0.5 * 4 * kl
    torch.testing.assert_close(synthesis.rehearsed(network, weights, batch), torch.tensor(expected))
    padded = Rows(x, own, torch.tensor([0, 0]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(
        synthesis.rehearsed(network, weights, padded), torch.tensor(math.log(2))
    )


def test_anchors_are_directions_and_rows_near_them_cost_nothing() -> None:
    anchors = synthesis.anchor_directions(5, 32)
    torch.testing.assert_close(anchors.norm(dim=-1), torch.ones(5))
    products = anchors @ anchors.T - torch.eye(5)
    assert float(products.max()) < 0.75  # squared distance above the radius
    y = torch.arange(5)
    assert float(synthesis.outlying(7 * anchors, anchors, y).max()) == 0
    apart = synthesis.outlying(anchors[[1]], anchors, y[[0]])
    expected = 2 - 2 * float(anchors[0] @ anchors[1]) - synthesis.RADIUS
    torch.testing.assert_close(apart, torch.tensor([expected]))
