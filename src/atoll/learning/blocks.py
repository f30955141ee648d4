"""Convolution, and pooling 2x2, with weights of each member, in few passes over memory.

Shapes are (members, rows, height, width, channels). A convolution is a product of each pixel's
neighbourhood with the kernel; its gradient goes back to the pixels of the neighbourhoods. On a GPU
that, and pooling, are kernels of our own in Triton: as slices and sums the first would be many
passes, and torch's pooling keeps the place of every maximum in eight bytes.
"""

from dataclasses import dataclass
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
Pair = tuple[int, int]


def convolved(
    x: Tensor,
    kernel: Tensor,
    offset: Tensor | None,
    stride: Pair = (1, 1),
    dilation: Pair = (1, 1),
) -> Tensor:
    """A convolution: kernel (members, out, channels, height, width), offset (members, out)."""
    how = _How((kernel.shape[3], kernel.shape[4]), stride, dilation)
    found: Tensor = _Convolution.apply(x, kernel, offset, how)
    return found


def pooled(x: Tensor) -> Tensor:
    """The largest of each 2x2 neighbours, a pixel apart."""
    if triton is not None and x.is_cuda:
        found: Tensor = _Pool.apply(x)
        return found
    flat = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 2, 1)
    return flat.permute(0, 2, 3, 1).reshape(*x.shape[:2], *(side - 1 for side in x.shape[2:4]), -1)


@dataclass(frozen=True)
class _How:
    """The sides of a kernel, and how far apart its places and the pixels that it reads are."""

    sides: Pair
    stride: Pair
    dilation: Pair

    def above(self, height: int, width: int) -> Pair:
        """The size of what comes out."""
        high, wide = (
            (size - gap * (side - 1) - 1) // step + 1
            for size, side, step, gap in zip(
                (height, width), self.sides, self.stride, self.dilation, strict=True
            )
        )
        return high, wide

    def places(self, x: Tensor) -> list[Tensor]:
        """For each number of a kernel the pixels that it meets, as views."""
        (high, wide), (down, right) = self.above(*x.shape[2:4]), self.stride
        starts = [(a * self.dilation[0], b * self.dilation[1]) for a, b in self._numbers()]
        return [
            x[:, :, a : a + down * (high - 1) + 1 : down, b : b + right * (wide - 1) + 1 : right]
            for a, b in starts
        ]

    def _numbers(self) -> list[Pair]:
        return [(a, b) for a in range(self.sides[0]) for b in range(self.sides[1])]


class _Convolution(torch.autograd.Function):
    """Neighbourhoods times kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, offset: Tensor | None, how: _How) -> Tensor:
        near = torch.cat(how.places(x), -1).flatten(1, 3)  # (members, places, sides x channels)
        ctx.save_for_backward(near, kernel)
        ctx.how, ctx.shape, ctx.moved = how, x.shape, offset is not None
        flat = kernel.permute(0, 3, 4, 2, 1).flatten(1, 3)
        found = near @ flat if offset is None else torch.baddbmm(offset[:, None], near, flat)
        return found.view(*x.shape[:2], *how.above(*x.shape[2:4]), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        near, kernel = ctx.saved_tensors
        how, flat = ctx.how, gradient.flatten(1, 3)
        by_kernel = torch.bmm(flat.mT, near).unflatten(2, (*how.sides, -1)).movedim(-1, 2)
        by_x = None
        if ctx.needs_input_grad[0]:
            turned = kernel.permute(0, 1, 3, 4, 2).flatten(2)
            by_x = _returned(torch.bmm(flat, turned), ctx.shape, how)
        return by_x, by_kernel, flat.sum(1) if ctx.moved else None, None


def _returned(near: Tensor, shape: torch.Size, how: _How) -> Tensor:
    """The gradient of pixels, from that of their neighbourhoods."""
    found = near.new_empty(shape)
    near = near.view(*shape[:2], *how.above(*shape[2:4]), -1, shape[4])
    if triton is not None and near.is_cuda and how.stride == how.dilation == (1, 1):
        grid = (triton.cdiv(found.numel(), BLOCK),)
        _gathered[grid](near, found, found.numel(), *shape[2:4], shape[4], *how.sides, block=BLOCK)
        return found
    for number, pixels in enumerate(how.places(found.zero_())):
        pixels.add_(near[..., number, :])
    return found


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
    def _gathered(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        near, found, size, height, width, channels: tl.constexpr,
        high: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """One number of a pixel a thread: the sum over the neighbourhoods that it was in."""
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = place < size
        channel, pixel = place % channels, place // channels
        column, line = pixel % width, pixel // width
        row, image = line % height, line // height
        above, along = height - high + 1, width - wide + 1
        total = tl.load(near + place, mask=place < 0, other=0.0)  # zeros of its type
        for a in tl.static_range(high):
            for b in tl.static_range(wide):
                top, left = row - a, column - b
                valid = inside & (top >= 0) & (left >= 0) & (top < above) & (left < along)
                there = ((image * above + top) * along + left) * (high * wide) + a * wide + b
                total += tl.load(near + there * channels + channel, mask=valid, other=0.0)
        tl.store(found + place, total, mask=inside)

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
