"""Convolution without neighbourhoods in memory gives what torch's own gives for each member.

On a GPU: `pytest -m gpu`. Without one, where Triton is there: the same with TRITON_INTERPRET=1, on
the CPU, which knows nothing of tiles' layouts, of TF32 and of how to multiply in bfloat16.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.kernels import conv2d as kernels
from atoll.kernels.conv2d import direct, fits
from atoll.kernels.conv_pool import convolved

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ERRORS = {"tf32x3": 1e-5, "tf32": 2e-3, "bfloat16": 2e-2, "float16": 2e-3}

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter cannot do it")


@pytest.fixture
def _ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted kernels take tensors of a CPU; TF32 is left as it was."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "_ours", lambda x: True)
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def for_each(x: Tensor, kernel: Tensor, offset: Tensor | None) -> Tensor:
    """torch's own, member by member."""
    moved = [None] * len(x) if offset is None else list(offset)
    alone = [F.conv2d(x[i].permute(0, 3, 1, 2), kernel[i], moved[i]) for i in range(len(x))]
    return torch.stack(alone).permute(0, 1, 3, 4, 2)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape
    return float((ours.detach().double().cpu() - theirs).abs().max() / theirs.abs().max())


def compared(leaves: list[Tensor], kind: torch.dtype, moves: bool, last: bool) -> list[float]:
    """How far apart results and gradients are; the numbers are those that the type can tell."""
    there = [tensor.to(kind).to(DEVICE) for tensor in leaves]
    exact = [tensor.double().cpu().requires_grad_() for tensor in there]
    if not last:
        there[0] = there[0].movedim(-1, 2).contiguous().movedim(2, -1)
    moved = [tensor.requires_grad_() for tensor in (there if moves else there[1:])]
    assert fits(there[0], there[1])
    said = direct(there[0], there[1], there[2] if len(there) > 2 else None)
    expected = for_each(exact[0], exact[1], exact[2] if len(exact) > 2 else None)
    assert said.dtype == kind
    by = rows(*said.shape).to(kind)
    ours = torch.autograd.grad(said, moved, by.to(DEVICE))
    theirs = torch.autograd.grad(expected, exact if moves else exact[1:], by.double())
    assert [one.shape for one in ours] == [one.shape for one in moved]
    return [apart(said, expected.detach()), *map(apart, ours, theirs)]


def test_elsewhere_and_for_other_shapes_it_is_left_to_the_other_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, kernel, offset = rows(2, 3, 5, 6, 16).float(), rows(2, 17, 16, 3, 2).float(), rows(2, 17)
    assert not fits(x, kernel)  # a CPU
    said = direct(x, kernel, offset.float(), (2, 1), (1, 2))
    assert torch.equal(said, convolved(x, kernel, offset.float(), (2, 1), (1, 2)))
    monkeypatch.setattr(kernels, "_ours", lambda x: True)
    assert fits(x, kernel)
    assert fits(x.bfloat16(), kernel.bfloat16())
    assert not fits(x.double(), kernel.double())
    assert not fits(x.bfloat16(), kernel)
    assert not fits(x, kernel, stride=(1, 2))
    assert not fits(x, kernel, dilation=(2, 1))
    assert not fits(x[..., :15], kernel[:, :, :15])
    assert not fits(x, kernel[:, :15])
    assert not fits(x, kernel[:, :, :8])  # groups
    assert not fits(x[:, :0], kernel)
    assert not fits(x[:, :, :2], kernel)
    assert fits(x[:, :, :2], kernel, padding=(1, 0))
    assert not fits(x[:, :1].expand(-1, 2**22, -1, -1, -1), kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(x, kernel)


@pytest.mark.parametrize("members", [1, 4, 50, 3000])
@pytest.mark.parametrize("places", [1, 63, 640, 7840, 1_000_003])
def test_parts_of_places_are_whole_blocks_that_hold_all(members: int, places: int) -> None:
    splits, length = kernels._splits(places, members, 32)
    assert length % 32 == 0
    assert (splits - 1) * length < places <= splits * length
    assert splits == 1 or length >= kernels.SHORTEST // 2


@pytest.mark.gpu
@pytest.mark.usefixtures("_ready")
@pytest.mark.parametrize(
    "way", ["tf32x3", "tf32", pytest.param("bfloat16", marks=not_interpreted), "float16"]
)
@pytest.mark.parametrize(
    ("sides", "channels", "out", "kernel"),
    [
        ((6, 7), 32, 64, (3, 3)),
        ((5, 4), 24, 40, (2, 3)),
        ((5, 5), 17, 16, (1, 1)),
        ((3, 4), 16, 19, (3, 4)),
        ((9, 11), 80, 130, (2, 2)),  # several tiles of channels, there and back
    ],
)
def test_a_convolution_and_its_gradients_are_those_of_torch_for_each_member(
    way: str, sides: tuple[int, int], channels: int, out: int, kernel: tuple[int, int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = way == "tf32"
    kind = torch.float32 if way.startswith("tf32") else getattr(torch, way)
    leaves = [rows(3, 4, *sides, channels), rows(3, out, channels, *kernel), rows(3, out)]
    assert max(compared(leaves, kind, moves=True, last=True)) < ERRORS[way]


@pytest.mark.gpu
@pytest.mark.usefixtures("_ready")
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize(("moves", "last"), [(True, False), (False, True), (False, False)])
def test_offsets_and_gradients_of_x_may_be_missing_and_channels_lie_apart(
    offset: bool, moves: bool, last: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    leaves = [rows(2, 1, 6, 5, 24), rows(2, 16, 24, 3, 2), rows(2, 16)]
    kept = leaves if offset else leaves[:2]
    assert max(compared(kept, torch.float32, moves, last)) < ERRORS["tf32x3"]


@pytest.mark.gpu
@pytest.mark.usefixtures("_ready")
@pytest.mark.parametrize("tf32", [True, False])
def test_many_places_are_summed_in_parts(tf32: bool) -> None:
    """And equal steps give equal bits."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    leaves = [rows(2, 3, 17, 18, 16), rows(2, 16, 16, 2, 2), rows(2, 16)]
    assert kernels._splits(3 * 16 * 17, 2, 32)[0] > 1
    limit = ERRORS["tf32" if tf32 else "tf32x3"]
    found = [compared(leaves, torch.float32, moves=True, last=True) for _ in range(2)]
    assert max(found[0]) < limit
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("_ready")
def test_members_may_share_what_they_read() -> None:
    """One image, repeated without copying."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x = rows(1, 4, 5, 5, 16).float().to(DEVICE).expand(3, -1, -1, -1, -1)
    kernel = rows(3, 16, 16, 3, 3).float().to(DEVICE)
    expected = for_each(x.double().cpu(), kernel.double().cpu(), None)
    assert apart(direct(x, kernel, None), expected) < ERRORS["tf32x3"]


@pytest.mark.gpu
@not_interpreted
@pytest.mark.usefixtures("_ready")
def test_a_captured_step_gives_equal_bits() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    given = [rows(2, 3, 7, 10, 48), rows(2, 32, 48, 2, 2), rows(2, 32)]
    leaves = [tensor.float().to(DEVICE).requires_grad_() for tensor in given]
    by = rows(2, 3, 6, 9, 32).float().to(DEVICE)

    def step() -> list[Tensor]:
        said = direct(leaves[0], leaves[1], leaves[2])
        return [said.detach(), *torch.autograd.grad(said, leaves, by)]

    step()  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, step()))
