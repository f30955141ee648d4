"""Prototypes, drift, Fisher diagonals and what they hold back: numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from atoll.core.rng import Stream
from atoll.learning import knowledge
from atoll.learning.knowledge import class_means, delta, evolved, fisher, frozen, share, threshold
from atoll.learning.split_nets import bottom

pytestmark = pytest.mark.numerics


def drawn(*shape: int, name: str = "x") -> Tensor:
    return torch.from_numpy(Stream.of(0, name).numpy().standard_normal(shape))


def test_class_means_by_hand_in_any_order_and_in_batches() -> None:
    rows = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 6.0]])
    y = torch.tensor([1, 1, 2])
    means, counts = class_means(rows, y, 4)
    assert means.tolist() == [[0, 0], [2, 2], [5, 6], [0, 0]]
    assert counts.tolist() == [0, 2, 1, 0]
    many, kinds = drawn(101, 5), torch.arange(101) % 3
    whole, _ = class_means(many, kinds, 3)
    order = torch.randperm(101, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(class_means(many[order], kinds[order], 3)[0], whole)
    parts = [class_means(many[s], kinds[s], 3) for s in (slice(0, 40), slice(40, 101))]
    (one, few), (other, more) = parts
    total = (one * few[:, None] + other * more[:, None]) / (few + more)[:, None]
    torch.testing.assert_close(total, whole)


def test_the_mean_of_a_sum_is_the_sum_of_the_means() -> None:
    one, other, y = drawn(30, 4), drawn(30, 4, name="other"), torch.arange(30) % 3
    apart = class_means(one, y, 3)[0] + class_means(other, y, 3)[0]
    torch.testing.assert_close(class_means(one + other, y, 3)[0], apart)


@pytest.mark.parametrize(("beta", "known"), [(1.0, [8.0]), (0.0, [2.0]), (0.25, [3.5])])
def test_a_known_prototype_is_mixed_a_new_one_inserted_an_absent_one_left(
    beta: float, known: list[float]
) -> None:
    old, new = torch.tensor([[2.0], [0.0], [7.0]]), torch.tensor([[8.0], [5.0], [0.0]])
    found = evolved(old, torch.tensor([True, False, True]), new, torch.tensor([4, 1, 0]), beta)
    assert found.tolist() == [known, [5.0], [7.0]]


def test_drift_of_what_did_not_move_is_one_and_no_movement() -> None:
    means, here = drawn(3, 6), torch.tensor([True, False, True])
    assert float(knowledge.drift_scalar(means, means, here)) == pytest.approx(1, abs=1e-6)
    assert knowledge.drift_vector(means, means, here).abs().max() == 0
    away = means + torch.arange(6.0)
    away[1] = 1000  # a class that is not there counts nothing
    torch.testing.assert_close(
        knowledge.drift_vector(means, away, here), torch.arange(6.0).double()
    )


def test_fisher_is_the_mean_of_each_samples_squared_gradient() -> None:
    made = bottom("lenet2", (1, 6, 5), 3, Stream.of(0, "net")).double()
    weights = {name: w.detach() for name, w in made.named_parameters()}
    x, g = drawn(70, 1, 6, 5), drawn(70, 3, name="g")  # more than one chunk
    found = fisher(made, weights, x, g)
    one_by_one = {name: torch.zeros_like(w) for name, w in weights.items()}
    for row, by_embedding in zip(x, g, strict=True):
        agreement = (made(row[None])[0] * by_embedding).sum()
        gradients = torch.autograd.grad(agreement, list(made.parameters()))
        for name, part in zip(weights, gradients, strict=True):
            one_by_one[name] += part**2 / len(x)
    for name, expected in one_by_one.items():
        torch.testing.assert_close(found[name], expected)
        assert (found[name] >= 0).all()


def test_the_sum_of_samples_has_one_order_for_every_entry() -> None:
    column = torch.from_numpy(Stream.of(1, "sum").numpy().standard_normal(70)).float() ** 2
    for shape in ((1,), (64, 1, 5, 5), (50, 1000), (3,)):
        values = column.view(-1, *[1] * len(shape)).expand(70, *shape).contiguous()
        total = knowledge.pairwise_sum(values)
        assert total.shape == shape
        assert len(total.unique()) == 1, "equal columns have equal sums"
        torch.testing.assert_close(total.flatten()[0], column.double().sum().float())
        turned = values.movedim(0, -1).contiguous().movedim(-1, 0)  # another layout
        assert torch.equal(knowledge.pairwise_sum(turned), total)
    assert knowledge.pairwise_sum(torch.zeros((0, 2))).tolist() == [0, 0]
    assert knowledge.pairwise_sum(torch.tensor([[1.0], [2.0], [4.0]])).tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [5, 64, 100])
def test_the_weights_of_a_constant_pixel_tie_with_the_bias(dtype: torch.dtype, rows: int) -> None:
    made = bottom("dense", (1, 12, 12), 6, Stream.of(0, "net")).to(dtype)
    weights = {name: w.detach() for name, w in made.named_parameters()}
    x = drawn(rows, 1, 12, 12).to(dtype)
    x[:, 0, 0, 0] = 1
    entries = fisher(made, weights, x, drawn(rows, 6, name="g").to(dtype))
    assert torch.equal(entries["weight"][:, 0], entries["bias"])


def test_a_scaled_loss_scales_fisher_by_the_square_and_freezes_the_same() -> None:
    made = bottom("dense", (4,), 3, Stream.of(0, "net")).double()
    weights = {name: w.detach() for name, w in made.named_parameters()}
    x, g = drawn(20, 4), drawn(20, 3, name="g")
    one, three = (fisher(made, weights, x, scale * g) for scale in (1.0, 3.0))
    for name in one:
        torch.testing.assert_close(three[name], 9 * one[name])
    rules: tuple[knowledge.LmoRule, ...] = ("paper", "code", "quantile")
    for rule in rules:
        for deviations in (0.0, 0.3, 15.0):
            masks = [frozen(f, rule, deviations, 0.4) for f in (one, three)]
            assert all(torch.equal(masks[0][name], masks[1][name]) for name in one)


def test_the_threshold_by_hand() -> None:
    f = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([[4.0], [6.0]])}
    assert delta(2, 15, 3) == pytest.approx(15 + 3 * math.log(3))
    assert threshold(f, 0.5) == pytest.approx(3 - 0.5 * math.sqrt(5))
    assert frozen(f, "paper", 0.5, 0)["a"].tolist() == [False, True]
    assert frozen(f, "paper", 10, 0)["a"].tolist() == [True, True]  # kappa is below 0
    assert frozen(f, "code", 10, 0)["a"].tolist() == [False, True]  # 0 is not above 0
    assert frozen(f, "quantile", 0, 0.5)["b"].tolist() == [[True], [True]]
    assert share(frozen(f, "quantile", 0, 0.75)) == 0.75


def test_more_deviations_never_freeze_less() -> None:
    f = {"w": drawn(200) ** 2}
    shares = [share(frozen(f, "paper", d / 10, 0)) for d in range(-30, 60)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_a_quantile_of_all_is_all_and_of_none_is_off() -> None:
    f = {"w": drawn(7) ** 2, "b": torch.zeros(3)}
    assert share(frozen(f, "quantile", 0, 1.0)) == 1
    none = frozen(f, "quantile", 0, 0.0)
    off = frozen(f, "off", 0, 0.5)
    assert all(torch.equal(none[name], off[name]) for name in f)
    assert share(off) == 0


def test_importances_are_added_and_an_empty_one_counts_as_zero() -> None:
    one, other = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([10.0, 30.0])}
    assert knowledge.added(one, other)["w"].tolist() == [11.0, 32.0]
    assert knowledge.added({}, other)["w"].tolist() == [10.0, 30.0]


def test_an_entry_at_the_threshold_is_frozen_by_the_paper_and_not_by_the_code() -> None:
    f = {"w": torch.tensor([1.0, 2.0, 3.0])}  # without deviations the threshold is the mean, 2
    assert frozen(f, "paper", 0, 0)["w"].tolist() == [False, True, True]
    assert frozen(f, "code", 0, 0)["w"].tolist() == [False, False, True]


def test_of_equal_entries_a_quantile_freezes_the_first_by_name_and_place() -> None:
    f = {"b": torch.ones(300), "a": torch.ones(700)}
    mask = frozen(f, "quantile", 0, 0.8)
    assert mask["a"].all()
    assert mask["b"].tolist() == [True] * 100 + [False] * 200
    assert list(mask) == ["b", "a"]


def test_the_share_of_a_single_entry_and_of_none() -> None:
    assert share({"w": torch.tensor([True])}) == 1
    assert share({}) == 0


def test_the_means_of_a_batch_are_zero_for_classes_without_rows() -> None:
    rows = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 6.0]])
    means, counts = knowledge.batch_means(rows, torch.tensor([1, 1, 2]), 4)
    assert means.tolist() == [[0, 0], [2, 2], [5, 6], [0, 0]]
    assert counts.tolist() == [0, 2, 1, 0]
