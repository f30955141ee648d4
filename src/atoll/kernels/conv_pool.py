"""Convolution, and pooling 2x2, with weights of each member, in few passes over memory.

Shapes are (members, rows, height, width, channels). A convolution is a product of each pixel's
neighbourhood with the kernel; its gradient goes back to the pixels of the neighbourhoods. On a GPU
unfolding, its gradient and pooling are Triton kernels: as slices and sums they would take many
passes, and torch's pooling stores the index of every maximum in eight bytes. Sizes are constants of
a compiled kernel, so that indices need no divisions.
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
FEW = 4  # channels that need not lie side by side
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
    result: Tensor = _Convolution.apply(x, kernel, offset, how)
    return result


def pooled(x: Tensor, step: int = 1) -> Tensor:
    """The largest of each 2x2 neighbours, a step apart."""
    if _ours(x):
        result: Tensor = _Pool.apply(x, step)
        return result
    flat = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 2, step)
    return flat.permute(0, 2, 3, 1).reshape(*x.shape[:2], *flat.shape[2:], -1)


def _ours(x: Tensor) -> bool:
    """Whether our own kernels are used."""
    return triton is not None and x.is_cuda


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
        near = _neighbourhoods(x, how)
        ctx.save_for_backward(near, kernel)
        ctx.how, ctx.shape, ctx.moved = how, x.shape, offset is not None
        flat = kernel.permute(0, 3, 4, 2, 1).flatten(1, 3)
        result = near @ flat if offset is None else torch.baddbmm(offset[:, None], near, flat)
        return result.view(*x.shape[:2], *how.above(*x.shape[2:4]), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        near, kernel = ctx.saved_tensors
        how, flat = ctx.how, gradient.flatten(1, 3).to(near.dtype)  # autocast rounds the output
        by_kernel = torch.bmm(flat.mT, near).unflatten(2, (*how.sides, -1)).movedim(-1, 2)
        by_x = None
        if ctx.needs_input_grad[0]:
            turned = kernel.permute(0, 1, 3, 4, 2).flatten(2)
            by_x = _returned(torch.bmm(flat, turned), ctx.shape, how)
        return by_x, by_kernel, flat.sum(1) if ctx.moved else None, None


def _neighbourhoods(x: Tensor, how: _How) -> Tensor:
    """The unfolded input: (members, places, sides x channels)."""
    if not _ours(x):
        return torch.cat(how.places(x), -1).flatten(1, 3)
    members, rows, *sizes, channels = x.shape
    images, (high, wide) = x.flatten(0, 1), how.above(*sizes)
    if channels > FEW:
        images = images.contiguous()  # so that neighbouring threads read neighbours
    result = x.new_empty((members, rows * high * wide, how.sides[0] * how.sides[1] * channels))
    padded = triton.next_power_of_2(channels)
    count, block = members * rows * high * wide, max(1, BLOCK // padded)
    if result.numel():
        _collected[triton.cdiv(count, block),](
            images, result, count, *images.stride(), high, wide, channels, padded,
            *how.sides, *how.stride, *how.dilation, block=block, long=_long(x, result),
        )  # fmt: skip
    return result


def _long(*tensors: Tensor) -> bool:
    """Whether places in them need more than 32 bits."""
    return any(tensor.numel() >= 2**31 - BLOCK for tensor in tensors)


def _returned(near: Tensor, shape: torch.Size, how: _How) -> Tensor:
    """The gradient of pixels, from that of their neighbourhoods."""
    result = near.new_empty(shape)
    near = near.view(*shape[:2], *how.above(*shape[2:4]), -1, shape[4])
    if _ours(near) and how.stride == how.dilation == (1, 1):
        _gathered[triton.cdiv(result.numel(), BLOCK),](
            near, result, result.numel(), *shape[2:4], shape[4], *how.sides, block=BLOCK,
            long=_long(near),
        )  # fmt: skip
        return result
    for number, pixels in enumerate(how.places(result.zero_())):
        pixels.add_(near[..., number, :])
    return result


class _Pool(torch.autograd.Function):
    """Pooling that saves only its input; of equal values the first gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.step = step
        members, rows, height, width, channels = x.shape
        high, wide = ((side - 2) // step + 1 for side in (height, width))
        result = x.new_empty((members, rows, high, wide, channels))
        _largest[triton.cdiv(result.numel(), BLOCK),](
            x, result, result.numel(), height, width, channels, step, block=BLOCK, long=_long(x)
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        result, (height, width, channels) = torch.empty_like(x), x.shape[2:]
        _routed[triton.cdiv(x.numel(), BLOCK),](
            x, gradient.contiguous(), result, x.numel(), height, width, channels, ctx.step,
            block=BLOCK, long=_long(x),
        )  # fmt: skip
        return result, None


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _numbers(block: tl.constexpr, long: tl.constexpr):  # type: ignore[no-untyped-def]
        """The numbers of this program's threads among all."""
        program = tl.program_id(0)
        if long:
            program = program.to(tl.int64)
        return program * block + tl.arange(0, block)

    @triton.jit  # type: ignore[untyped-decorator]
    def _collected(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        x, near, count, by_image, by_row, by_column, by_channel,
        high: tl.constexpr, wide: tl.constexpr, channels: tl.constexpr, padded: tl.constexpr,
        tall: tl.constexpr, broad: tl.constexpr, down: tl.constexpr, right: tl.constexpr,
        apart: tl.constexpr, aside: tl.constexpr, block: tl.constexpr, long: tl.constexpr,
    ):  # fmt: skip
        """Some places a program: what each number of the kernel meets there, in all channels."""
        place = _numbers(block, long)
        channel = tl.arange(0, padded)
        inside = (place < count)[:, None] & (channel < channels)[None, :]
        column, line = place % wide, place // wide
        row, image = line % high, line // high
        start = image * by_image + row * down * by_row + column * right * by_column
        read = x + start[:, None] + (channel * by_channel)[None, :]
        write = near + (place * (tall * broad * channels))[:, None] + channel[None, :]
        for a in tl.static_range(tall):
            for b in tl.static_range(broad):
                met = tl.load(read + (a * apart * by_row + b * aside * by_column), mask=inside)
                tl.store(write + (a * broad + b) * channels, met, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gathered(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        near, result, size, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
        high: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, long: tl.constexpr,
    ):  # fmt: skip
        """One number of a pixel a thread: the sum over the neighbourhoods that it was in."""
        place = _numbers(block, long)
        inside = place < size
        channel, pixel = place % channels, place // channels
        column, line = pixel % width, pixel // width
        row, image = line % height, line // height
        above: tl.constexpr = height - high + 1
        along: tl.constexpr = width - wide + 1
        total = tl.load(near + place, mask=place < 0, other=0.0)  # zeros of its type
        for a in tl.static_range(high):
            for b in tl.static_range(wide):
                top, left = row - a, column - b
                valid = inside & (top >= 0) & (left >= 0) & (top < above) & (left < along)
                there = ((image * above + top) * along + left) * (high * wide) + a * wide + b
                total += tl.load(near + there * channels + channel, mask=valid, other=0.0)
        tl.store(result + place, total, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _largest(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        x, result, size, height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
        step: tl.constexpr, block: tl.constexpr, long: tl.constexpr,
    ):  # fmt: skip
        """One number of the result a thread."""
        place = _numbers(block, long)
        inside = place < size
        high: tl.constexpr = (height - 2) // step + 1
        wide: tl.constexpr = (width - 2) // step + 1
        channel, pixel = place % channels, place // channels
        column, line = pixel % wide, pixel // wide
        row, image = line % high, line // high
        start = ((image * height + row * step) * width + column * step) * channels + channel
        a = tl.load(x + start, mask=inside)
        b = tl.load(x + start + channels, mask=inside)
        c = tl.load(x + start + width * channels, mask=inside)
        d = tl.load(x + start + (width + 1) * channels, mask=inside)
        tl.store(result + place, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _routed(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        x, gradient, result, size, height: tl.constexpr, width: tl.constexpr,
        channels: tl.constexpr, step: tl.constexpr, block: tl.constexpr, long: tl.constexpr,
    ):  # fmt: skip
        """The gradient of one number of x: of those windows of four in which it is the first
        largest."""
        place = _numbers(block, long)
        inside = place < size
        high: tl.constexpr = (height - 2) // step + 1
        wide: tl.constexpr = (width - 2) // step + 1
        channel, pixel = place % channels, place // channels
        column, line = pixel % width, pixel // width
        row, image = line % height, line // height
        own = tl.load(x + place, mask=inside)
        total = tl.zeros_like(own)
        for a in tl.static_range(2):  # the window begins a rows above and b columns left
            for b in tl.static_range(2):
                top, left = row - a, column - b
                down, right = top // step, left // step  # its number
                valid = inside & (top >= 0) & (left >= 0) & (down < high) & (right < wide)
                first = valid & (down * step == top) & (right * step == left)
                for c in tl.static_range(2):
                    for d in tl.static_range(2):
                        if c != a or d != b:
                            there = ((image * height + top + c) * width + left + d) * channels
                            other = tl.load(x + there + channel, mask=first)
                            if c * 2 + d < a * 2 + b:  # it comes before
                                first = first & (own > other)
                            else:
                                first = first & (own >= other)
                window = ((image * high + down) * wide + right) * channels + channel
                total += tl.load(gradient + window, mask=first, other=0.0)
        tl.store(result + place, total, mask=inside)
