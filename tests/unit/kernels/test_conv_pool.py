"""Convolution and pooling for many members give what torch's own give for each."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from atoll.kernels.conv_pool import convolved, pooled


def rows(*shape: int, kinds: int = 0) -> torch.Tensor:
    """Numbers in double precision; of few `kinds`, so that many neighbours are equal."""
    generator = torch.Generator().manual_seed(sum(shape))
    if kinds:
        return torch.randint(kinds, shape, generator=generator).double()
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("sides", "stride", "dilation"),
    [((2, 2), 1, 1), ((3, 2), 1, 1), ((2, 2), 2, 1), ((2, 3), 1, 2)],
)
@pytest.mark.parametrize(("channels", "last"), [(2, True), (3, False), (6, False)])
def test_a_convolution_and_its_gradients_are_those_of_torch_for_each_member(
    device: str, sides: tuple[int, int], stride: int, dilation: int, channels: int, last: bool
) -> None:
    """Channels may also lie apart in memory."""
    x, kernel, offset = rows(3, 4, 7, 6, channels), rows(3, 7, channels, *sides), rows(3, 7)
    if not last:
        x = x.movedim(-1, 2).contiguous().movedim(2, -1)
    leaves = [tensor.requires_grad_() for tensor in (x, kernel, offset)]
    alone = [
        F.conv2d(x[i].permute(0, 3, 1, 2), kernel[i], offset[i], stride, 0, dilation)
        for i in range(3)
    ]
    expected = torch.stack(alone).permute(0, 1, 3, 4, 2)
    there = [tensor.detach().to(device).requires_grad_() for tensor in leaves]
    said = convolved(there[0], there[1], there[2], (stride, stride), (dilation, dilation))
    torch.testing.assert_close(said.cpu(), expected, rtol=1e-12, atol=1e-12)
    by = rows(*said.shape)
    ours = torch.autograd.grad(said, there, by.to(device))
    for mine, theirs in zip(ours, torch.autograd.grad(expected, leaves, by), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kinds", [0, 2])
@pytest.mark.parametrize("step", [1, 2])
def test_pooling_and_its_gradient_are_those_of_torch_also_among_equals(
    device: str, kinds: int, step: int
) -> None:
    x = rows(2, 3, 7, 4, 5, kinds=kinds).requires_grad_()
    expected = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 2, step)
    there = x.detach().to(device).requires_grad_()
    said = pooled(there, step)
    assert torch.equal(said.cpu().flatten(0, 1), expected.permute(0, 2, 3, 1))
    by = rows(*said.shape)
    (ours,) = torch.autograd.grad(said, there, by.to(device))
    (theirs,) = torch.autograd.grad(expected, x, by.flatten(0, 1).permute(0, 3, 1, 2))
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)
