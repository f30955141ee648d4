"""Convolutions with weights for each member give what each member's own convolution gives."""

import copy
from collections.abc import Iterator
from contextvars import Context
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.compute.compare import max_relative_error
from atoll.compute.stacking import Stack
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob
from atoll.kernels import batched_layers
from atoll.kernels import conv2d as kernels
from atoll.kernels.batched_layers import (
    WAYS,
    Sizes,
    Timing,
    Timings,
    Way,
    for_members,
    timed_ways,
)
from atoll.learning import image_nets
from atoll.learning.losses import plain
from atoll.learning.models import Architecture, linear, skeleton

every_way = pytest.mark.parametrize("way", sorted(WAYS))
PLAIN = Sizes((1, 1), (0, 0), (1, 1), 1)


@pytest.fixture(autouse=True)
def timings() -> Iterator[dict[str, Timing]]:
    """What is timed in a test, by shapes, type and device."""
    timed = Timings()
    with timed_ways(timed):
        yield timed.by_shape


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@every_way
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        PLAIN,
        Sizes((2, 1), (1, 2), (1, 1), 1),
        Sizes((1, 2), (2, 0), (2, 1), 1),
        Sizes((1, 1), (1, 1), (1, 1), 2),
    ],
)
def test_every_member_has_its_own_convolution(way: Way, biased: bool, sizes: Sizes) -> None:
    x = draw(3, 2, 4, 7, 6, seed=1).requires_grad_()
    weight = draw(3, 6, 4 // sizes.groups, 3, 2, seed=2).requires_grad_()
    bias = draw(3, 6, seed=3).requires_grad_() if biased else None
    leaves = [x, weight, *([bias] if bias is not None else [])]
    together = WAYS[way](x, weight, bias, sizes)
    each = [None] * 3 if bias is None else list(bias)
    single = torch.stack(
        [
            F.conv2d(x[i], weight[i], each[i], sizes.stride, sizes.padding, sizes.dilation,
                     sizes.groups)
            for i in range(3)
        ]
    )  # fmt: skip
    torch.testing.assert_close(together, single, rtol=1e-12, atol=1e-12)
    slope = draw(*single.shape, seed=4)
    for one, other in zip(
        torch.autograd.grad(together, leaves, slope),
        torch.autograd.grad(single, leaves, slope),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@every_way
def test_every_way_has_gradients_also_where_products_are_rounded(way: Way) -> None:
    x, weight, bias = (draw(*s).float() for s in ((2, 3, 4, 6, 6), (2, 5, 4, 3, 3), (2, 5)))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    exact = torch.autograd.grad(WAYS[way](x, weight, bias, PLAIN).square().sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        said = WAYS[way](x, weight, bias, PLAIN).float()
    for one, other in zip(torch.autograd.grad(said.square().sum(), leaves), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_the_faster_way_is_taken_and_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, timings: dict[str, Timing]
) -> None:
    calls: list[str] = []
    seconds = {"grouped": 2.0, "unfolded": 1.0, "near": 3.0}

    def clock(way: object, *rest: object) -> float:
        name = next(n for n, w in WAYS.items() if w is way)
        calls.append(name)
        return seconds[name]

    monkeypatch.setattr(batched_layers, "_seconds", clock)
    x, weight = draw(2, 3, 4, 5, 5), draw(2, 6, 4, 3, 3)
    for _ in range(3):
        batched_layers.convolve(x, weight, None, PLAIN)
    (chosen,) = timings.values()
    assert (chosen.way, chosen.seconds) == ("unfolded", seconds)
    assert sorted(calls) == ["grouped", "near", "unfolded"]
    batched_layers.convolve(x, draw(2, 6, 4, 2, 2), None, PLAIN)
    assert len(timings) == 2


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("wrong", ["result", "gradient", ""])
def test_a_way_that_says_something_else_is_not_taken(
    wrong: str, moves: bool, monkeypatch: pytest.MonkeyPatch, timings: dict[str, Timing]
) -> None:
    def other(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
        said = batched_layers.grouped(x, weight, bias, sizes)
        if wrong == "result":
            return said + 1e-2 * (torch.arange(said.numel()) == 7).view(said.shape)
        return said.detach() + 0.9 * (said - said.detach()) if wrong else said

    monkeypatch.setattr(batched_layers, "WAYS", {"grouped": batched_layers.grouped, "near": other})
    monkeypatch.setattr(batched_layers, "_seconds", lambda way, *rest: 1.0 + (way is not other))
    x, weight = (draw(*shape) for shape in ((2, 3, 4, 5, 5), (2, 6, 4, 3, 3)))
    batched_layers.convolve(x.requires_grad_(moves), weight.requires_grad_(moves), None, PLAIN)
    (chosen,) = timings.values()
    taken = not wrong or (wrong == "gradient" and not moves)  # nobody asks for gradients there
    assert (chosen.way, "near" in chosen.seconds) == ("near" if taken else "grouped", taken)


def test_without_a_context_the_convolution_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(way: object, *rest: object) -> float:
        raise AssertionError("a way was timed")

    monkeypatch.setattr(batched_layers, "_seconds", refuse)
    x, weight = draw(2, 3, 4, 5, 5), draw(2, 6, 4, 3, 3)
    plain = Context()  # knows nothing of the fixture's timings
    result = plain.run(batched_layers.convolve, x, weight, None, PLAIN)
    assert torch.equal(result, batched_layers.grouped(x, weight, None, PLAIN))


def test_a_probe_has_a_time_for_all_ways_that_differ_and_leaves_gradients_alone(
    timings: dict[str, Timing],
) -> None:
    x, weight = draw(2, 3, 4, 5, 5).requires_grad_(), draw(2, 6, 4, 3, 3).requires_grad_()
    batched_layers.convolve(x, weight, None, PLAIN)
    (chosen,) = timings.values()
    assert chosen.seconds.keys() == WAYS.keys() - {"direct"}  # on a CPU it is `near`
    assert chosen.seconds[chosen.way] == min(chosen.seconds.values()) > 0
    assert x.grad is None
    assert weight.grad is None


def test_a_way_is_offered_where_it_differs_or_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = draw(2, 3, 16, 5, 5).float(), draw(2, 16, 16, 3, 3).float()
    assert "direct" not in batched_layers._offered(x, weight, PLAIN)
    monkeypatch.setattr(kernels, "_ours", lambda x: True)
    assert batched_layers._offered(x, weight, PLAIN) == list(WAYS)
    assert "direct" in batched_layers._offered(x, weight, replace(PLAIN, padding=(1, 1)))
    for other in (Sizes((2, 1), (0, 0), (1, 1), 1), Sizes((1, 1), (0, 0), (1, 2), 1)):
        assert "direct" not in batched_layers._offered(x, weight, other)
    halved = replace(PLAIN, groups=2)
    assert "direct" not in batched_layers._offered(x, weight[:, :, :8], halved)
    monkeypatch.setattr(batched_layers, "WAYS", {"direct": batched_layers.direct})
    assert batched_layers._offered(x[:, :, :8], weight[:, :, :8], PLAIN) == ["direct"]


def member(name: str, number: int, rows: int) -> TrainJob:
    model = image_nets.build(name, (2, 8, 8), 3, Stream.of(number)).double().eval()
    network = skeleton(model, False)
    moves = tuple(n for n, _ in model.named_parameters())
    weights = {n: w.detach().clone() for n, w in model.state_dict().items()}
    x, y = draw(rows, 2, 8, 8, seed=number), torch.arange(rows) % 3
    phase = Phase("loss", moves, partial(plain, network), Optimiser("adam", 0.01))
    data = Rows(x, torch.zeros(rows, 0, dtype=torch.float64), y)
    return TrainJob(weights, {}, (phase,), data, 4, 2, Stream.of(number))


@every_way
@pytest.mark.parametrize("name", ["cnn-plain", "small-resnet", "small-mobilenet"])
def test_networks_with_convolutions_stack(
    name: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides, groups, no bias, shortcuts; batch norm as in testing, since it sees all rows."""
    monkeypatch.setattr(batched_layers, "_way", lambda *given: way)
    jobs = [member(name, n, rows) for n, rows in enumerate((10, 7, 9))]
    assert len({job.key() for job in jobs}) == 1
    for one, other in zip([job.run() for job in jobs], Stack(jobs).run(jobs), strict=True):
        assert max_relative_error(one.weights, other.weights) < 1e-10
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], abs=1e-12)


def test_a_stack_takes_other_rows_of_the_same_number() -> None:
    """So a new cohort needs no new stack, and no new graph on a GPU."""
    first = [member("cnn-plain", n, rows) for n, rows in enumerate((10, 7))]
    fresh = [member("cnn-plain", n + 5, len(job.rows)).rows for n, job in enumerate(first)]
    others = [
        [replace(job, rows=rows) for job, rows in zip(first, fresh, strict=True)],
        [replace(job, rows=first[0].rows.at(slice(0, len(job.rows)))) for job in first],
        first,
    ]  # fmt: skip
    stack = Stack(first)
    stack.run(first)
    for jobs in others:
        for one, other in zip([job.run() for job in jobs], stack.run(jobs), strict=True):
            assert max_relative_error(one.weights, other.weights) < 1e-10


def test_layers_that_are_not_plain_are_left_to_torch() -> None:
    odd = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
    same = nn.Conv2d(4, 4, 3, padding="same")
    model = nn.Sequential(odd, same, nn.Flatten(), nn.Linear(4 * 25, 3)).double()
    changed = dict(for_members(model, linear).named_children())
    assert (changed["0"], changed["1"]) == (odd, same)
    network, x = Architecture(model), draw(3, 2, 2, 5, 5)
    weights = {n: torch.stack([w.detach() * (i + 1) for i in range(3)])
               for n, w in model.state_dict().items()}  # fmt: skip
    for i, said in enumerate(network(weights, x)):
        own = network({n: w[i] for n, w in weights.items()}, x[i])
        torch.testing.assert_close(said, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@every_way
def test_pooling_maps_over_members(device: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two by two, two apart; an odd row and column at the end are left out."""
    monkeypatch.setattr(batched_layers, "_way", lambda *given: way)
    one_client = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = for_members(copy.deepcopy(one_client).double().to(device), linear)
    assert type(dict(model.named_children())["2"]) is not nn.MaxPool2d
    x = draw(3, 4, 2, 9, 7).to(device)
    weights = {
        n: draw(3, *w.shape, seed=9).to(device).requires_grad_()
        for n, w in model.named_parameters()
    }
    call = torch.func.functional_call
    said = torch.vmap(lambda w, part: call(model, w, (part,)))(weights, x)
    alone = [call(one_client, {n: w[i] for n, w in weights.items()}, (x[i],)) for i in range(3)]
    unmapped = [call(model, {n: w[i] for n, w in weights.items()}, (x[i],)) for i in range(3)]
    leaves, slope = list(weights.values()), draw(*said.shape, seed=3).to(device)
    expected = torch.autograd.grad(torch.stack(alone), leaves, slope)
    for found in (said, torch.stack(unmapped)):
        torch.testing.assert_close(found, torch.stack(alone), rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(found, leaves, slope), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_on_rows_of_any_shape_map_over_members(bias: bool) -> None:
    model = for_members(nn.Sequential(nn.Linear(4, 3, bias=bias).double()), linear)
    call = partial(torch.func.functional_call, model)
    for shape in ((5, 4), (5, 2, 4)):
        x = draw(3, *shape)
        weights = {
            n: draw(3, *w.shape, seed=9).requires_grad_() for n, w in model.named_parameters()
        }
        said = torch.vmap(lambda w, part: call(w, (part,)))(weights, x)
        own = torch.stack(
            [F.linear(x[i], *(weights[n][i] for n in weights)) for i in range(3)]
        )  # fmt: skip
        torch.testing.assert_close(said, own, rtol=1e-12, atol=1e-12)
        leaves, slope = list(weights.values()), draw(*own.shape, seed=3)
        for one, other in zip(
            torch.autograd.grad(said, leaves, slope), torch.autograd.grad(own, leaves, slope),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
