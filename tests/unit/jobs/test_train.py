"""The local training loop against torch's own optimisers, and counts worked out by hand."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, cast

import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs import train as training
from atoll.jobs.train import (
    EvalJob,
    Optimiser,
    Phase,
    TrainJob,
    checked,
    hits,
    in_chunks,
)
from atoll.learning.losses import plain
from atoll.learning.models import MLP, Architecture, skeleton

STREAM = Stream.of(0, "test")


def rows(count: int = 24, columns: int = 3, classes: int = 2) -> Rows:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, columns, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (count,), generator=draw)
    return Rows(x, x[:, :0], y)


def mlp(columns: int = 3, classes: int = 2) -> MLP:
    return MLP((columns,), [5], classes, STREAM.child("model")).double()


def fit(model: nn.Module, how: Optimiser, data: Rows, batch: int = 5, epochs: int = 10) -> TrainJob:
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    phase = Phase("loss", tuple(weights), partial(plain, Architecture(model)), how)
    return TrainJob(weights, {}, (phase,), data, batch, epochs, STREAM)


@pytest.mark.parametrize(
    ("kind", "make"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)  # fmt: skip
def test_fifty_steps_are_those_of_torchs_own_optimiser(
    kind: Literal["adam", "sgd"], make: Callable[..., torch.optim.Optimizer]
) -> None:
    model, data, losses = mlp(), rows(25), []
    done = fit(model, Optimiser(kind, 0.05), data).run()
    theirs = make(model.parameters(), lr=0.05)
    for epoch in range(10):
        order = STREAM.child("epoch", epoch).permutation(25)
        for start in range(0, 25, 5):
            batch = data.at(order[start : start + 5])
            theirs.zero_grad()
            loss = F.cross_entropy(model(batch.x), batch.y)
            loss.backward()
            theirs.step()
            losses.append(loss.item())
    assert len(losses) == 50
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(done.weights[name], weight, rtol=0, atol=1e-12)
    assert done.losses["loss"] == pytest.approx(sum(losses) / 50, abs=1e-12)


def test_work_in_two_parts_with_the_moments_handed_on_equals_work_in_one() -> None:
    data, how = rows(20), Optimiser("adam", 0.05)
    whole = fit(mlp(), how, data, batch=20, epochs=2)
    first = fit(mlp(), how, data, batch=20, epochs=1).run()
    second = TrainJob(first.weights, first.moments, whole.phases, data, 20, 1, STREAM).run()
    done = whole.run()
    for name, weight in done.weights.items():  # one batch of all rows: their order is all the same
        torch.testing.assert_close(second.weights[name], weight, rtol=0, atol=1e-12)
    assert done.moments.keys() == second.moments.keys()
    assert done.moments.keys() >= {"first/weight0", "second/bias1"}


def test_moments_that_are_lost_are_missed() -> None:
    data, how = rows(20), Optimiser("adam", 0.05)
    first = fit(mlp(), how, data, batch=20, epochs=1).run()
    phases = fit(mlp(), how, data).phases
    kept = TrainJob(first.weights, first.moments, phases, data, 20, 1, STREAM).run()
    lost = TrainJob(first.weights, {}, phases, data, 20, 1, STREAM).run()
    assert not torch.allclose(kept.weights["weight0"], lost.weights["weight0"])


def test_work_changes_nothing_that_it_was_given() -> None:
    job = fit(mlp(), Optimiser("adam", 0.1), rows())
    before = {name: weight.clone() for name, weight in job.weights.items()}
    done = job.run()
    again = job.run()
    assert job.moments == {}
    for name, weight in before.items():
        assert torch.equal(job.weights[name], weight)
        assert not torch.equal(done.weights[name], weight)
        assert torch.equal(done.weights[name], again.weights[name])
        assert not done.weights[name].requires_grad


def squared(name: str, other: str, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """(name - other)^2 with rows that do not matter."""
    return (weights[name] - weights[other].detach()) ** 2 + 0 * batch.x.sum()


def test_phases_come_in_their_order_and_each_moves_only_its_own_weights() -> None:
    """One step of rate 0.25 halves the distance: a from 8 towards b = 0, then b towards a = 4."""
    weights = {"a": torch.tensor(8.0), "b": torch.tensor(0.0), "c": torch.tensor(3.0)}
    how = Optimiser("sgd", 0.25)
    phases = (
        Phase("first", ("a",), partial(squared, "a", "b"), how),
        Phase("second", ("b",), partial(squared, "b", "a"), how),
    )
    done = TrainJob(weights, {}, phases, rows(4), 4, 1, STREAM).run()
    assert {name: float(weight) for name, weight in done.weights.items()} == {
        "a": 4.0, "b": 2.0, "c": 3.0,
    }  # fmt: skip
    assert done.losses == {"first": 64.0, "second": 16.0}


def mean_input(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    return batch.x.mean() + 0 * weights["w"]


def test_the_last_smaller_batch_is_kept_and_the_loss_is_the_mean_over_rows() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [10.0]])
    data = Rows(x, x[:, :0], torch.zeros(5, dtype=torch.int64))
    phase = Phase("loss", ("w",), mean_input, Optimiser("sgd", 1.0))
    done = TrainJob({"w": torch.tensor(0.0)}, {}, (phase,), data, 2, 3, STREAM).run()
    assert done.losses["loss"] == pytest.approx(4.0)


def test_plain_training_moves_the_parameters_of_a_network_and_no_constant() -> None:
    model, data = mlp(), rows(25)
    expected = fit(model, Optimiser("sgd", 0.1), data, epochs=1).run()
    weights = {**model.state_dict(), "constant": torch.tensor(3.0)}
    job = TrainJob.sgd(Architecture(model), plain, weights, data, rate=0.1, batch=5, stream=STREAM)
    result = job.run()
    assert result.losses["loss"] == expected.losses["loss"]
    assert float(result.weights.pop("constant")) == 3.0
    for name, weight in result.weights.items():
        assert torch.equal(weight, expected.weights[name])


def test_hits_and_macro_f1_worked_out_by_hand() -> None:
    """Guesses 0 0 1 1 for classes 0 1 1 1: F1 is 2/3 and 4/5; class 2 does not occur."""
    logits = torch.tensor([[2.0, 1, 0], [3, 1, 0], [0, 5, 1], [0, 1, 0.5]])
    correct, f1 = hits(logits, torch.tensor([0, 1, 1, 1]))
    assert correct == 3
    assert f1 == pytest.approx((2 / 3 + 4 / 5) / 2)


@pytest.mark.numerics
@pytest.mark.parametrize("classes", [5, 40])
def test_of_equal_logits_the_lower_classes_are_the_likelier(classes: int) -> None:
    equal = torch.zeros(1, classes)
    for top in (1, 3):
        right = [hits(equal, torch.tensor([kind]), top)[0] for kind in range(classes)]
        assert right == [1] * top + [0] * (classes - top)


def test_no_rows_give_no_hits() -> None:
    assert hits(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == (0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_is_that_of_scikit_learn(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 6, generator=draw)
    y = torch.randint(5, (40,), generator=draw)  # class 5 is guessed but never occurs
    guess = logits.argmax(1)
    there = sorted(set(y.tolist()))
    expected = f1_score(y, guess, labels=there, average="macro", zero_division=0)
    correct, f1 = hits(logits, y)
    assert correct == int((guess == y).sum())
    assert f1 == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("count", [0, 1, 6, 7, 20])
def test_predictions_in_chunks_equal_those_of_one_pass(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHUNK", 7)
    model, data = mlp(), rows(count)
    sizes = []

    def predict(part: Rows) -> Tensor:
        sizes.append(len(part))
        return model(part.x)  # type: ignore[no-any-return]

    found = in_chunks(predict, data)
    torch.testing.assert_close(found, model(data.x).detach())
    assert max(sizes) <= 7
    assert sum(sizes) == count
    assert not found.requires_grad


def test_a_bank_is_predicted_in_chunks_along_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHUNK", 4)
    data = rows(10)
    found = in_chunks(lambda part: torch.stack([part.x, 2 * part.x]), data)
    assert torch.equal(found, torch.stack([data.x, 2 * data.x]))


def each_column(weights: Mapping[str, Tensor], part: Rows) -> Tensor:
    return (part.x * weights["scale"]).T


def test_a_tally_is_the_sum_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHUNK", 4)
    data, scale = rows(10), torch.tensor(3.0, dtype=torch.float64)
    found = EvalJob({"scale": scale}, data, each_column).run()
    torch.testing.assert_close(found, 3 * data.x.sum(0))


def test_a_network_is_tested_on_all_rows() -> None:
    model, data = mlp(), rows(30)
    found = checked(model, data)
    correct, f1 = hits(model(data.x), data.y)
    assert (found.rows, found.correct, found.macro_f1) == (30, {"": correct}, {"": f1})


class Counting:
    """A stream that notes which of its parts were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | int, ...]] = []

    def child(self, *names: str | int) -> Stream:
        self.asked.append(names)
        return STREAM.child(*names)


def test_the_order_of_an_epoch_is_drawn_when_the_epoch_begins() -> None:
    """A million epochs take no memory before training: two steps of 24 rows, then two more."""
    model, stream = mlp(), Counting()
    job = TrainJob.sgd(
        *(Architecture(model), plain, model.state_dict(), rows()),
        rate=0.1,
        batch=12,
        stream=cast(Stream, stream),
        epochs=1_000_000,
    )
    job.run_steps(2)
    assert stream.asked == [("epoch", 0)]
    job.run_steps(3)
    assert stream.asked == [("epoch", 0), ("epoch", 0), ("epoch", 1)]


def normalised(columns: int = 3) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(columns, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def batch_normed(count: int, batch: int, training: bool = True) -> TrainJob:
    model = normalised()
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    moves = tuple(name for name, _ in model.named_parameters())
    loss = partial(plain, skeleton(model, training))
    phase = Phase("loss", moves, loss, Optimiser("sgd", 0.1))
    return TrainJob(weights, {}, (phase,), rows(count), batch, 2, STREAM)


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [(9, 4, [4, 5]), (5, 4, [5]), (10, 4, [4, 4, 2]), (8, 4, [4, 4]), (1, 4, [1]), (0, 4, [])],
)
def test_under_batch_norm_a_last_row_alone_joins_the_batch_before(
    count: int, batch: int, sizes: list[int]
) -> None:
    job = batch_normed(count, batch)
    assert job.batch_sizes == sizes
    assert job.steps == 2 * len(sizes)


@pytest.mark.parametrize(
    "job",
    [
        fit(mlp(), Optimiser("sgd", 0.1), rows(9), batch=4),
        batch_normed(9, 4, training=False),  # by running statistics: no batch matters
        fit(nn.Sequential(nn.Linear(3, 2), nn.Dropout()), Optimiser("sgd", 0.1), rows(9), batch=4),
    ],
)
def test_without_statistics_of_a_batch_the_last_row_stays_alone(job: TrainJob) -> None:
    assert job.batch_sizes == [4, 4, 1]


def test_the_merged_batch_is_a_step_of_torchs_own_optimiser() -> None:
    """9 rows, batches of 4 and 5, two epochs; running statistics and mean losses too."""
    job, model, losses = batch_normed(9, 4), normalised(), []
    result = job.run()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        order = STREAM.child("epoch", epoch).permutation(9)
        for part in (order[:4], order[4:]):
            batch = job.rows.at(part)
            theirs.zero_grad()
            loss = F.cross_entropy(model(batch.x), batch.y)
            loss.backward()
            theirs.step()
            losses.append(loss.item() * len(part))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-12)
    assert result.losses["loss"] == pytest.approx(sum(losses) / 18, abs=1e-12)


def test_numbers_are_scored_by_their_errors_in_the_unit_of_the_label() -> None:
    y = torch.tensor([-1.0, 0.0, 1.0])
    outputs = torch.tensor([[0.0], [0.0], [-1.0]])  # off by 1, 0, 2; one is three days
    found = training.scored({"own": outputs}, y, 3.0)
    assert (found.rows, found.correct, found.macro_f1) == (3, {}, {})
    assert found.errors["own"] == pytest.approx({"mse": 15.0, "mae": 3.0, "variance": 6.0})
    third = training.errors(torch.tensor([[1 / 3], [0.0]]), torch.zeros(2))
    assert (third["mse"], third["mae"]) == (0.05556, 0.1667)  # four digits
    nothing = training.scored({"": torch.zeros(0, 1)}, torch.zeros(0), 3.0)
    assert nothing.errors == {"": {"mse": 0.0, "mae": 0.0, "variance": 0.0}}
