"""Convolution with weights of each member that never writes the neighbourhoods to memory.

Shapes are those of conv_pool.py: (members, rows, height, width, channels). There each neighbourhood
is copied, nine times the image for a kernel of 3x3, and a matrix product reads the copy, forward
and backward. Here Triton kernels read the pixels in place and multiply them tile by tile.
Only the image and the kernel are saved for the backward pass.

No two programs add to the same number, so equal steps give equal bits. The tile sizes are the
fastest of three that were timed on an H200; autotuning them would triple the compile time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.kernels.conv_pool import convolved

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

__all__ = ["direct", "fits"]

Pair = tuple[int, int]
ONE = (1, 1)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST = 16  # a side of a tile that is multiplied; with fewer channels most of it would be padding
WIDEST = 64  # a side of a tile of results along channels
DEEP = 128  # bytes of channels that are multiplied at once
MANY = 65_535  # members at most: a GPU counts no further there
LARGEST = 2**30  # numbers of one member, so that places in them need only 32 bits
PROGRAMS = 8 * 132  # to begin with, for the gradient of weights: some for each multiprocessor
SHORTEST, LONGEST = 256, 2048  # places that one of these programs adds up
BLOCK = 128  # places, pixels or weights of one program
TILES = {"num_warps": 4, "num_stages": 3}


def direct(
    x: Tensor,
    kernel: Tensor,
    offset: Tensor | None,
    stride: Pair = ONE,
    dilation: Pair = ONE,
) -> Tensor:
    """A convolution: kernel (members, out, channels, height, width), offset (members, out)."""
    if not fits(x, kernel, stride, dilation):
        return convolved(x, kernel, offset, stride, dilation)
    result: Tensor = _Direct.apply(x, kernel, offset)
    return result


def fits(
    x: Tensor,
    kernel: Tensor,
    stride: Pair = ONE,
    dilation: Pair = ONE,
    padding: Pair = (0, 0),
) -> bool:
    """Whether these kernels support such a convolution; else conv_pool.py computes it."""
    members, rows, *sides, channels = x.shape
    out = kernel.shape[1]
    height, width = (side + 2 * pad for side, pad in zip(sides, padding, strict=True))
    plain = kernel.shape[2] == channels and stride == dilation == ONE
    wide = channels >= LEAST and out >= LEAST
    some = 0 < members <= MANY and rows > 0
    inside = height >= kernel.shape[3] > 0 and width >= kernel.shape[4] > 0
    small = rows * height * width * max(channels, out) < LARGEST
    return _ours(x) and _known(x, kernel) and plain and wide and some and inside and small


def _ours(x: Tensor) -> bool:
    """Whether our own kernels are used."""
    return triton is not None and x.is_cuda


def _known(x: Tensor, kernel: Tensor) -> bool:
    """Whether the kernels support the type, and autocast asks for no other."""
    rounded = torch.is_autocast_enabled(x.device.type)
    return x.dtype == kernel.dtype and x.dtype in TYPES and not rounded


class _Direct(torch.autograd.Function):
    """Places times kernels, tile by tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, offset: Tensor | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, kernel)
        ctx.moved = offset is not None
        return _forth(x, kernel, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_x = _back(gradient, kernel, x.shape) if ctx.needs_input_grad[0] else None
        by_kernel = _for_kernel(x, gradient, kernel.shape) if ctx.needs_input_grad[1] else None
        return by_x, by_kernel, gradient.flatten(1, 3).sum(1) if ctx.moved else None


def _forth(x: Tensor, kernel: Tensor, offset: Tensor | None) -> Tensor:
    members, rows, height, width, channels = x.shape
    out, _, tall, broad = kernel.shape[1:]
    high, wide = height - tall + 1, width - broad + 1
    result = x.new_empty((members, rows, high, wide, out))
    # the summed axis is contiguous, as tensor cores need it for 32 bits
    weights = kernel.permute(0, 1, 3, 4, 2).contiguous()
    across, tiles = _tiles(out)
    _met[triton.cdiv(rows * high * wide, BLOCK) * tiles, members](
        x, weights, weights if offset is None else offset.contiguous(), result, rows,
        height, width, channels, out, tall, broad, _precision(x),
        moved=offset is not None, deep=_deep(x, channels), across=across, block=BLOCK, **TILES,
    )  # fmt: skip
    return result


def _back(gradient: Tensor, kernel: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of pixels."""
    members, rows, height, width, channels = shape
    out, _, tall, broad = kernel.shape[1:]
    result = gradient.new_empty(shape)
    weights = kernel.permute(0, 3, 4, 2, 1).contiguous()
    across, tiles = _tiles(channels)
    _returned[triton.cdiv(rows * height * width, BLOCK) * tiles, members](
        gradient, weights, result, rows,
        height, width, channels, out, tall, broad, _precision(gradient),
        deep=_deep(gradient, out), across=across, block=BLOCK, **TILES,
    )  # fmt: skip
    return result


def _for_kernel(x: Tensor, gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of weights: sums over parts of the places, and then the sum of these."""
    members, rows, height, width, channels = x.shape
    out, _, tall, broad = shape[1:]
    places, depth = rows * gradient.shape[2] * gradient.shape[3], tall * broad * channels
    across, tiles = _tiles(out)
    block = max(LEAST, DEEP // x.element_size())
    splits, length = _splits(places, members * triton.cdiv(depth, WIDEST) * tiles, block)
    result = x.new_empty((members, splits, out, depth), dtype=torch.float32)
    _summed[triton.cdiv(depth, BLOCK) * tiles, splits, members](
        x, gradient, result, rows, length,
        height, width, channels, out, tall, broad, _precision(x),
        block=block, across=across, down=BLOCK, **TILES,
    )  # fmt: skip
    by_kernel = result.sum(1).to(x.dtype).view(members, out, tall, broad, channels)
    return by_kernel.movedim(-1, 2)


def _splits(places: int, programs: int, block: int) -> Pair:
    """The number of parts that places are divided into, and their length in whole blocks."""
    needed = max(-(-PROGRAMS // programs), -(-places // LONGEST))
    splits = max(1, min(needed, -(-places // SHORTEST)))
    length = -(-places // (splits * block)) * block
    return -(-places // length), length


def _tiles(size: int) -> Pair:
    """How wide a tile of results is, and how many there are side by side."""
    across = min(WIDEST, _power(size))
    return across, -(-size // across)


def _deep(x: Tensor, size: int) -> int:
    """How many channels are multiplied at once."""
    return min(DEEP // x.element_size(), _power(size))


def _power(size: int) -> int:
    """The power of two that is not less."""
    return max(LEAST, 1 << (size - 1).bit_length())


def _precision(x: Tensor) -> str:
    """How numbers of 32 bits are multiplied: rounded to TF32, or in three parts of it, exact."""
    exact = x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return "tf32x3" if exact else "tf32"


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _corner(  # type: ignore[no-untyped-def]
        place, height: tl.constexpr, width: tl.constexpr, high: tl.constexpr, wide: tl.constexpr
    ):
        """The number, in an image of one size, of a pixel of one of another size."""
        column, line = place % wide, place // wide
        row, image = line % high, line // high
        return (image * height + row) * width + column

    @triton.jit  # type: ignore[untyped-decorator]
    def _write(result, total, line, column, lines, columns: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the part of a tile that is inside the matrix."""
        where = result + (line * columns)[:, None] + column[None, :]
        inside = (line < lines)[:, None] & (column < columns)[None, :]
        tl.store(where, total.to(result.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _met(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915, PLR0917 - Triton reads it
        x, weights, offset, result, rows,
        height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, out: tl.constexpr,
        tall: tl.constexpr, broad: tl.constexpr, precision: tl.constexpr, moved: tl.constexpr,
        deep: tl.constexpr, across: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Some places of a member a program, and some of what comes out there."""
        high: tl.constexpr = height - tall + 1
        wide: tl.constexpr = width - broad + 1
        tiles: tl.constexpr = (out + across - 1) // across
        parts: tl.constexpr = (channels + deep - 1) // deep
        depth: tl.constexpr = tall * broad * channels
        tile, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
        places = rows * (high * wide)
        place = (tile // tiles) * block + tl.arange(0, block)
        kind = (tile % tiles) * across + tl.arange(0, across)
        channel = tl.arange(0, deep)
        # beyond the end the last one is read again, and not written
        start = _corner(tl.minimum(place, places - 1), height, width, high, wide) * channels
        read = x + member * (rows * (height * width * channels)) + start[:, None] + channel[None, :]
        by = weights + member * (out * depth) + channel[:, None]
        by += (tl.minimum(kind, out - 1) * depth)[None, :]
        total = tl.zeros((block, across), dtype=tl.float32)
        for step in range(tall * broad * parts):  # not unrolled: so loads run ahead of products
            number, first = step // parts, (step % parts) * deep
            ahead = (number // broad * width + number % broad) * channels + first
            along = number * channels + first
            if channels % deep == 0:
                pixels = tl.load(read + ahead)
                weight = tl.load(by + along)
            else:
                valid = channel + first < channels
                pixels = tl.load(read + ahead, mask=valid[None, :], other=0.0)
                weight = tl.load(by + along, mask=valid[:, None], other=0.0)
            total = tl.dot(pixels, weight, total, input_precision=precision)
        if moved:
            more = tl.load(offset + member * out + kind, mask=kind < out, other=0.0)
            total += more.to(tl.float32)[None, :]
        _write(result + member * (rows * (high * wide * out)), total, place, kind, places, out)

    @triton.jit  # type: ignore[untyped-decorator]
    def _returned(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0915, PLR0917 - Triton reads it
        gradient, weights, result, rows,
        height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, out: tl.constexpr,
        tall: tl.constexpr, broad: tl.constexpr, precision: tl.constexpr,
        deep: tl.constexpr, across: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """Some pixels of a member a program: the sum over the places whose kernel met them."""
        high: tl.constexpr = height - tall + 1
        wide: tl.constexpr = width - broad + 1
        tiles: tl.constexpr = (channels + across - 1) // across
        parts: tl.constexpr = (out + deep - 1) // deep
        tile, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
        count = rows * (height * width)
        pixel = (tile // tiles) * block + tl.arange(0, block)
        channel = (tile % tiles) * across + tl.arange(0, across)
        kind = tl.arange(0, deep)
        known = tl.minimum(pixel, count - 1)  # beyond the end the last one again
        row, column = known // width % height, known % width
        start = _corner(known, high, wide, height, width) * out
        read = gradient + member * (rows * (high * wide * out)) + start[:, None] + kind[None, :]
        by = weights + member * (tall * broad * channels * out) + kind[:, None]
        by += (tl.minimum(channel, channels - 1) * out)[None, :]
        total = tl.zeros((block, across), dtype=tl.float32)
        for step in range(tall * broad * parts):
            number, first = step // parts, (step % parts) * deep
            top, left = row - number // broad, column - number % broad
            valid = ((top >= 0) & (top < high) & (left >= 0) & (left < wide))[:, None]
            behind = first - (number // broad * wide + number % broad) * out
            along = number * (channels * out) + first
            if out % deep == 0:
                slope = tl.load(read + behind, mask=valid, other=0.0)
                weight = tl.load(by + along)
            else:
                here = kind + first < out
                slope = tl.load(read + behind, mask=valid & here[None, :], other=0.0)
                weight = tl.load(by + along, mask=here[:, None], other=0.0)
            total = tl.dot(slope, weight, total, input_precision=precision)
        result += member * (rows * (height * width * channels))
        _write(result, total, pixel, channel, count, channels)

    @triton.jit  # type: ignore[untyped-decorator]
    def _summed(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917 - Triton reads it
        x, gradient, result, rows, length,
        height: tl.constexpr, width: tl.constexpr, channels: tl.constexpr, out: tl.constexpr,
        tall: tl.constexpr, broad: tl.constexpr, precision: tl.constexpr,
        block: tl.constexpr, across: tl.constexpr, down: tl.constexpr,
    ):  # fmt: skip
        """Gradients of some weights of one member, summed over a part of the places.

        Values are cut to the bits of TF32, so that they are loaded in fours, through registers.
        """
        high: tl.constexpr = height - tall + 1
        wide: tl.constexpr = width - broad + 1
        tiles: tl.constexpr = (out + across - 1) // across
        depth: tl.constexpr = tall * broad * channels
        tile, split = tl.program_id(0), tl.program_id(1)
        member = tl.program_id(2).to(tl.int64)
        weight = (tile // tiles) * down + tl.arange(0, down)  # its number and its channel
        kind = (tile % tiles) * across + tl.arange(0, across)
        number, channel = weight // channels, weight % channels
        ahead = (number // broad * width + number % broad) * channels + channel
        x += member * (rows * (height * width * channels))
        gradient += member * (rows * (high * wide * out))
        begin = split * length
        end = tl.minimum(begin + length, rows * (high * wide))
        total = tl.zeros((down, across), dtype=tl.float32)
        for first in range(begin, end, block):
            place = first + tl.arange(0, block)
            valid = place < end
            start = _corner(place, height, width, high, wide) * channels
            met = valid[None, :] & (weight < depth)[:, None]
            pixels = tl.load(x + start[None, :] + ahead[:, None], mask=met, other=0.0)
            here = valid[:, None] & (kind < out)[None, :]
            read = gradient + (place * out)[:, None] + kind[None, :]
            slope = tl.load(read, mask=here, other=0.0)
            if precision == "tf32" and pixels.dtype == tl.float32:
                pixels = (pixels.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
                slope = (slope.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            total = tl.dot(pixels, slope, total, input_precision=precision)
        result += (member * tl.num_programs(1) + split) * (depth * out)
        _write(result, tl.trans(total), kind, weight, out, depth)
