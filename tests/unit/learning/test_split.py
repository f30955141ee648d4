"""Split networks: their sizes, how halves are joined, what is masked and what is written back."""

import pytest
import torch

from atoll.core.errors import BadMessageError, UserError
from atoll.core.rng import Stream, uniforms
from atoll.learning import replay, split
from atoll.learning.split_nets import NetName, bottom, chosen, top, widened

pytestmark = pytest.mark.numerics

STREAM = Stream.of(0, "test")
KEY = torch.tensor(17)


def size(model: torch.nn.Module) -> int:
    return sum(w.numel() for w in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("lenet3", (1, 28, 7), 103_666),
        ("lenet3", (3, 32, 8), 200_178),
        ("lenet2", (1, 28, 7), 247_218),
        ("lenet2", (3, 32, 8), 375_730),
        ("mlp", (1, 28, 7), 196 * 50 + 50),
    ],
)
def test_bottoms_have_the_sizes_of_the_specification(
    name: NetName, shape: tuple[int, ...], count: int
) -> None:
    made = bottom(name, shape, 50, STREAM)
    assert size(made) == count
    assert made(torch.zeros(2, *shape)).shape == (2, 50)


def test_tops_have_the_sizes_of_the_specification() -> None:
    assert size(top("lenet3", 50, 10, STREAM)) == 11_722
    assert size(top("mlp", 50, 10, STREAM)) == 510


def test_the_network_follows_the_shape_and_one_that_does_not_fit_is_refused() -> None:
    assert chosen("auto", (1, 28, 7)) == "lenet3"
    assert chosen("auto", (1, 28, 6)) == "dense"
    assert chosen("auto", (9,)) == "dense"
    with pytest.raises(UserError, match="larger than 6 pixels"):
        chosen("lenet3", (1, 28, 6))
    with pytest.raises(UserError, match="'lenet2' needs"):
        chosen("lenet2", (12,))


def test_a_wider_head_says_the_same_of_the_old_classes() -> None:
    made = top("dense", 4, 3, STREAM)
    wide = widened(dict(made.state_dict()), 5, STREAM.child("more"))
    x = torch.linspace(-1, 1, 8).view(2, 4)
    logits = made.logits(wide, x)
    assert logits.shape == (2, 5)
    torch.testing.assert_close(logits[:, :3], made(x))


@pytest.mark.parametrize("how", ["sum", "mean", "concat"])
def test_gradients_of_joined_parts_are_those_of_autograd(how: split.Agg) -> None:
    parts = [torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    joint = split.joined(parts, how)
    weight = torch.linspace(0, 1, joint.numel(), dtype=torch.float64).view(joint.shape)
    expected = torch.autograd.grad((joint * weight).sum(), parts)
    for found, right in zip(split.parts_of(weight, 4, how), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_every_row_is_in_one_batch_of_a_pass_and_passes_differ() -> None:
    batches, cpu = split.Batches(10, 4, 77), torch.device("cpu")
    assert len(batches) == 3
    first, second = (
        torch.cat([batches.at(step, cpu) for step in range(start, start + 3)]) for start in (0, 3)
    )
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_frozen_entries_are_written_back_bit_by_bit() -> None:
    weights = {"w": torch.tensor([0.1, 0.2, 0.3])}
    held = {"w": torch.tensor([True, False, True])}
    found = split.stepped(weights, {"w": torch.full((3,), 1e-3)}, 0.1, held)["w"]
    assert torch.equal(found[[0, 2]], weights["w"][[0, 2]])
    assert found[1] != weights["w"][1]


def test_dropout_keeps_the_mean_and_is_drawn_from_its_key() -> None:
    like = torch.zeros(1)
    mask = split.dropout(0.25, (400, 50), KEY, like)
    assert mask is not None
    assert mask.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(mask.mean()) == pytest.approx(1, abs=0.02)
    again = split.dropout(0.25, (400, 50), KEY, like)
    assert again is not None
    assert torch.equal(mask, again)
    assert split.dropout(0.0, (4, 5), KEY, like) is None


def test_a_draw_at_the_share_is_kept() -> None:
    draw = uniforms(KEY, (5,))
    mask = split.dropout(float(draw[2]), (5,), KEY, torch.zeros(1, dtype=torch.float64))
    assert mask is not None
    assert ((mask > 0) == (draw >= draw[2])).all()


def test_each_channel_of_pixels_has_a_mean_and_a_deviation_of_its_own() -> None:
    x = torch.zeros(1, 2, 1, 1)  # 0.5 on the scale of the means
    found = split.pixels(x, (0.5, 0.1), (1.0, 0.2)).flatten().tolist()
    assert found == pytest.approx([0.0, 2.0])


def test_pixels_get_the_mean_and_deviation_that_are_asked_for() -> None:
    x = torch.tensor([-1.0, 1.0]).view(1, 1, 1, 2)
    found = split.pixels(x, (0.1307,), (0.3081,)).flatten().tolist()
    assert found == pytest.approx([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081])
    assert split.pixels(x, (), ()) is x


def test_a_reply_with_other_rows_is_refused_and_its_sender_named() -> None:
    with pytest.raises(BadMessageError, match=r"site-2.*\(4, 3\), not \(5, 3\).*aligned"):
        split.fitting(torch.zeros(4, 3), 5, 3, "site-2")


def test_a_union_counts_a_shared_row_once() -> None:
    first = (torch.eye(3)[[0, 1]], torch.tensor([0, 1]))
    second = (torch.eye(3)[[1, 2]], torch.tensor([1, 2]))
    fresh = {0: torch.tensor([True, True]), 1: torch.tensor([False, True])}
    logits, y = split.union({0: first, 1: second}, fresh.__getitem__)
    assert y.tolist() == [0, 1, 2]
    assert torch.equal(logits, torch.eye(3))


def test_gradients_are_clipped_and_noised_where_asked() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert torch.equal(split.guarded(g, 0, 0, KEY), g)
    clipped = split.guarded(g, 1.0, 0, KEY)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    assert float((split.guarded(torch.zeros(4000, 1), 0, 0.5, KEY)).std()) == pytest.approx(
        0.5, abs=0.02
    )
    assert split.rounded(torch.tensor([0.1234]), 2).tolist() == pytest.approx([0.12])


def test_the_radius_of_pass_is_the_deviation_of_a_coordinate_within_classes() -> None:
    rows = torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0], [5.0, 9.0]])
    y = torch.tensor([0, 0, 1, 1])
    means = torch.tensor([[1.0, 1.0], [5.0, 7.0]])
    # traces of the covariances are 1 and 4; their mean over two coordinates is 1.25
    assert replay.radius(rows, y, means) == pytest.approx(1.25**0.5)


def test_contrast_by_hand_and_without_a_pair() -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    y = torch.tensor([0, 0, 1])
    log = 1 - torch.log(torch.tensor(1.0).exp() + 1)  # its pair is at cosine 1, the other at 0
    assert float(replay.contrast(rows, y, 2)) == pytest.approx(-float(log))
    assert float(replay.contrast(rows, torch.tensor([0, 1, 2]), 3)) == 0


def test_a_row_without_a_direction_gets_no_contrast_and_no_gradient() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 3.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(replay.contrast(rows, torch.tensor([0, 0, 1]), 3), rows)
    assert gradient[1].tolist() == [0.0, 0.0]
    assert float(gradient.abs().max()) < 1


def test_translated_rows_lie_around_the_other_prototype() -> None:
    rows = torch.tensor([[1.0, 2.0]], requires_grad=True)
    found = replay.translated(rows, torch.tensor([[1.0, 1.0]]), torch.tensor([[5.0, 5.0]]))
    assert found.tolist() == [[5.0, 6.0]]
    assert not found.requires_grad


def test_a_part_turned_twice_is_as_it_was() -> None:
    x = torch.arange(12.0).view(1, 1, 3, 4)
    assert torch.equal(replay.turned(replay.turned(x)), x)
    assert replay.turned(x)[0, 0, 0, 0] == 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_one_rounding_error_apart_are_not_pulled(dtype: torch.dtype) -> None:
    before = torch.rand((3, 5, 4), dtype=dtype, generator=torch.Generator().manual_seed(0))
    now = torch.nextafter(before, torch.full_like(before, 2))
    assert (now != before).all()
    assert not split.distance_gradient(now, before).any()
    assert not split.distance_gradient(before, before).any()
    dark = torch.zeros_like(before)  # a network whose units are all off says 0
    assert not split.distance_gradient(dark, dark).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_apart_by_a_step_of_training_are_pulled_with_length_one(
    dtype: torch.dtype,
) -> None:
    before = torch.rand((3, 5, 4), dtype=dtype, generator=torch.Generator().manual_seed(0))
    now = before.clone()
    now[0] += 1e-4  # a small step; the second member does not move
    now[2, 1, 3] += 0.5
    gradient = split.distance_gradient(now, before)
    assert gradient.flatten(1).norm(dim=1).tolist() == pytest.approx([1, 0, 1], rel=1e-3)
    assert float(gradient[2, 1, 3]) == pytest.approx(1)
    one = split.distance_gradient(now[0], before[0])
    torch.testing.assert_close(one, gradient[0])  # one client, or many: the same
    wanted = now.double().requires_grad_()
    (wanted - before.double())[2].norm().backward()
    assert wanted.grad is not None
    torch.testing.assert_close(gradient[2].double(), wanted.grad[2], rtol=1e-5, atol=1e-6)


def test_what_is_concatenated_is_cut_along_the_last_axis_however_many_there_are() -> None:
    one, other = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    parts = split.parts_of(split.joined([one, other], "concat"), 2, "concat")
    assert torch.equal(parts[0], one)
    assert torch.equal(parts[1], other)
