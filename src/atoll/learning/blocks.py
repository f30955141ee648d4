"""Convolution 2x2 and pooling 2x2 with weights of each member, in few passes over memory.

Shapes are (members, rows, height, width, channels). A convolution is a product of each pixel's
neighbourhood with the kernel, and so is its gradient, of the padded gradient. Pooling on a GPU is a
kernel of our own in Triton: torch's keeps the place of every maximum in eight bytes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

__all__ = ["convolved", "pooled"]

BLOCK = 1024


def convolved(x: Tensor, kernel: Tensor, offset: Tensor) -> Tensor:
    """Convolution 2x2: kernel (members, out, channels, 2, 2), offset (members, out)."""
    found: Tensor = _Convolution.apply(x, kernel, offset)
    return found


def pooled(x: Tensor) -> Tensor:
    """The largest of each 2x2 neighbours, a pixel apart."""
    if triton is not None and x.is_cuda:
        found: Tensor = _Pool.apply(x)
        return found
    flat = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 2, 1)
    return flat.permute(0, 2, 3, 1).reshape(*x.shape[:2], *(side - 1 for side in x.shape[2:4]), -1)


def _near(x: Tensor) -> Tensor:
    """Each pixel with those right of and below it: (members, rows x height x width, 4 channels)."""
    height, width = x.shape[2] - 1, x.shape[3] - 1
    parts = [x[:, :, a : a + height, b : b + width] for a in (0, 1) for b in (0, 1)]
    return torch.cat(parts, -1).flatten(1, 3)


class _Convolution(torch.autograd.Function):
    """Neighbourhoods times kernels, and the same for the gradient by x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, offset: Tensor) -> Tensor:
        near = _near(x)
        ctx.save_for_backward(near, kernel)
        flat = kernel.permute(0, 3, 4, 2, 1).flatten(1, 3)  # (members, 4 channels, out)
        found = torch.baddbmm(offset[:, None], near, flat)
        return found.view(*x.shape[:2], x.shape[2] - 1, x.shape[3] - 1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        near, kernel = ctx.saved_tensors
        flat = gradient.flatten(1, 3)
        by_kernel = torch.bmm(flat.mT, near).unflatten(2, (2, 2, -1)).movedim(-1, 2)
        by_x = None
        if ctx.needs_input_grad[0]:
            around = _near(F.pad(gradient, (0, 0, 1, 1, 1, 1)))
            turned = kernel.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)
            rows, height, width = gradient.shape[1:4]
            by_x = torch.bmm(around, turned).view(len(kernel), rows, height + 1, width + 1, -1)
        return by_x, by_kernel, flat.sum(1)


class _Pool(torch.autograd.Function):
    """Pooling that remembers nothing but its input; of equal values the first gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        members, rows, height, width, channels = x.shape
        found = x.new_empty((members, rows, height - 1, width - 1, channels))
        grid = (triton.cdiv(found.numel(), BLOCK),)
        _largest[grid](x, found, found.numel(), height, width, channels, block=BLOCK)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found, (height, width, channels) = torch.empty_like(x), x.shape[2:]
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _routed[grid](
            x, gradient.contiguous(), found, x.numel(), height, width, channels, block=BLOCK
        )
        return found


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _largest(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        x, found, size, height, width, channels: tl.constexpr, block: tl.constexpr
    ):
        """One number of the result a thread."""
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = place < size
        channel, pixel = place % channels, place // channels
        column, line = pixel % (width - 1), pixel // (width - 1)
        row, image = line % (height - 1), line // (height - 1)
        start = ((image * height + row) * width + column) * channels + channel
        a = tl.load(x + start, mask=inside)
        b = tl.load(x + start + channels, mask=inside)
        c = tl.load(x + start + width * channels, mask=inside)
        d = tl.load(x + start + (width + 1) * channels, mask=inside)
        tl.store(found + place, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _routed(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        x, gradient, found, size, height, width, channels: tl.constexpr, block: tl.constexpr
    ):
        """The gradient of one number of x: of those windows of four in which it is the first
        largest."""
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = place < size
        channel, pixel = place % channels, place // channels
        column, line = pixel % width, pixel // width
        row, image = line % height, line // height
        own = tl.load(x + place, mask=inside)
        total = tl.zeros_like(own)
        for a in tl.static_range(2):  # the window begins a rows above and b columns left
            for b in tl.static_range(2):
                top, left = row - a, column - b
                valid = inside & (top >= 0) & (left >= 0) & (top < height - 1) & (left < width - 1)
                first = valid
                for c in tl.static_range(2):
                    for d in tl.static_range(2):
                        if c != a or d != b:
                            there = ((image * height + top + c) * width + left + d) * channels
                            other = tl.load(x + there + channel, mask=valid)
                            if c * 2 + d < a * 2 + b:  # it comes before
                                first = first & (own > other)
                            else:
                                first = first & (own >= other)
                window = ((image * (height - 1) + top) * (width - 1) + left) * channels + channel
                by = tl.load(gradient + window, mask=first, other=0.0)
                total += by
        tl.store(found + place, total, mask=inside)
