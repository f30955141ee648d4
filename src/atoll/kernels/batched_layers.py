"""Layers of torch's own networks with weights for each member of a stack.

A network is written for one client; torch.func maps it over the weights of many. Convolutions,
poolings and linear layers define their own vmap rules, because torch has no convolution with
different weights for each image. There are four ways to compute one: one large convolution with
members as groups of channels; unfolding and a matrix product; the same with channels last and
gradients of our own; and, on a GPU, Triton kernels that read pixels in place. Which is fastest
depends on shape and device, so each shape is timed once. A way whose result or gradients differ
from torch's own convolution is not used.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.kernels import conv2d as kernels
from atoll.kernels.conv_pool import convolved, pooled

__all__ = [
    "WAYS",
    "Sizes",
    "Timing",
    "Timings",
    "Way",
    "convolve",
    "direct",
    "fixed_ways",
    "for_members",
    "grouped",
    "near",
    "timed_ways",
    "torch_convolutions",
    "unfolded",
]

TRIALS = 3  # of each way, the fastest counts
HEAD_START = 8_000_000  # GPU clock ticks, about 5 ms: time for the host to launch a step
Pair = tuple[int, int]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Way = Literal["grouped", "unfolded", "near", "direct"]


@dataclass(frozen=True)
class Sizes:
    """The parameters of a convolution besides its weights."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


@dataclass(frozen=True)
class Timing:
    """The fastest way for a shape, and the seconds of each for a forward and backward pass."""

    way: Way
    seconds: dict[Way, float]


@dataclass
class Timings:
    """The fastest ways of convolutions, by shapes, type and device."""

    by_shape: dict[str, Timing] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # the shapes that a run has had


# without timing, by the kind of device: the first that agrees with torch's own convolution
PREFERRED: dict[str, tuple[Way, ...]] = {
    "cuda": ("direct", "near", "unfolded", "grouped"),
    "cpu": ("grouped", "unfolded", "near", "direct"),
}
# ways by shapes, type and device where a fixed rule chooses
_FIXED: ContextVar[dict[str, Way] | None] = ContextVar("fixed convolutions", default=None)
_TIMED: ContextVar[Timings | None] = ContextVar("timed convolutions", default=None)
_TORCH: ContextVar[bool] = ContextVar("convolutions of torch alone", default=False)


def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """Members as groups: x (members, rows, channels, h, w), weight (members, out, in, kh, kw)."""
    members, rows = x.shape[:2]
    wide = x.transpose(0, 1).reshape(rows, -1, *x.shape[3:])
    flat = None if bias is None else bias.flatten()
    groups = members * sizes.groups
    result = F.conv2d(
        wide, weight.flatten(0, 1), flat, sizes.stride, sizes.padding, sizes.dilation, groups
    )
    return result.view(rows, members, -1, *result.shape[2:]).transpose(0, 1)


def unfolded(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """Patches as columns: (out, channels x kernel) times (channels x kernel, places)."""
    members, rows, channels, height, width = x.shape
    kernel, groups = weight.shape[-2:], sizes.groups
    # All images side by side as channels of one: torch unfolds those in a single pass.
    patches = F.unfold(
        x.reshape(1, -1, height, width), kernel, sizes.dilation, sizes.padding, sizes.stride
    )
    inside = channels // groups * kernel[0] * kernel[1]
    columns = patches.view(members, rows, groups, inside, -1)
    matrix = weight.reshape(members, 1, groups, -1, inside)
    result = torch.matmul(matrix, columns).flatten(2, 3)
    if bias is not None:
        result = result + bias[:, None, :, None]
    above = [
        (size + 2 * pad - gap * (side - 1) - 1) // step + 1
        for size, pad, gap, side, step in zip(
            (height, width), sizes.padding, sizes.dilation, kernel, sizes.stride, strict=True
        )
    ]
    return result.view(members, rows, -1, *above)


def near(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """Channels last: (places, kernel x channels) times (kernel x channels, out)."""
    if sizes.groups > 1:
        return unfolded(x, weight, bias, sizes)
    down, right = sizes.padding
    if down or right:
        x = F.pad(x, (right, right, down, down))
    return convolved(x.movedim(2, -1), weight, bias, sizes.stride, sizes.dilation).movedim(-1, 2)


def direct(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """Channels last, without unfolding in memory; falls back to `near`."""
    if sizes.groups > 1:
        return unfolded(x, weight, bias, sizes)
    down, right = sizes.padding
    last = x.movedim(2, -1)
    if down or right:
        last = F.pad(last, (0, 0, right, right, down, down))
    return kernels.direct(last, weight, bias, sizes.stride, sizes.dilation).movedim(-1, 2)


def _differs(x: Tensor, weight: Tensor, sizes: Sizes) -> bool:
    """Whether `direct` differs from `near` for these shapes."""
    last = x.movedim(2, -1)
    return kernels.fits(last, weight, sizes.stride, sizes.dilation, sizes.padding)


WAYS: dict[Way, Callable[[Tensor, Tensor, Tensor | None, Sizes], Tensor]] = {
    "grouped": grouped,
    "unfolded": unfolded,
    "near": near,
    "direct": direct,
}


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """A convolution with weights of each member, in the way that the context chooses."""
    return WAYS[_way(x, weight, bias, sizes)](x, weight, bias, sizes)


@contextmanager
def fixed_ways(ways: dict[str, Way]) -> Iterator[None]:
    """Choose convolutions by a fixed rule instead of by timing; `ways` holds the choices."""
    token = _FIXED.set(ways)
    try:
        yield
    finally:
        _FIXED.reset(token)


@contextmanager
def timed_ways(timings: Timings) -> Iterator[None]:
    """Choose the fastest way; a shape that `timings` does not have is timed and added."""
    token = _TIMED.set(timings)
    try:
        yield
    finally:
        _TIMED.reset(token)


@contextmanager
def torch_convolutions() -> Iterator[None]:
    """Use torch's own convolutions: the shapes of a proof do not recur, so timing is wasted.

    The other ways are compared with torch's own when they are timed for a shape.
    """
    token = _TORCH.set(True)
    try:
        yield
    finally:
        _TORCH.reset(token)


def _way(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Way:
    """By a fixed rule, else the fastest; torch's own where the context chooses none."""
    fixed, timings = _FIXED.get(), _TIMED.get()
    if _TORCH.get() or (fixed is None and timings is None):
        return "grouped"
    key = _key(x, weight, bias, sizes)
    if fixed is not None:
        if key not in fixed and not _capturing(x):
            fixed[key] = _fixed_way(x, weight, bias, sizes)
        return fixed.get(key, "grouped")
    assert timings is not None
    timing = timings.by_shape.get(key)
    if timing is None or timing.way not in WAYS:
        if _capturing(x):
            return "grouped"  # no clock runs while a graph is captured
        timing = timings.by_shape[key] = _timing(x, weight, bias, sizes)
    timings.used.add(key)
    return timing.way


def _timing(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Timing:
    """Time the ways that agree with torch's own."""
    ways = _agreeing(_offered(x, weight, sizes), x, weight, bias, sizes)
    seconds = {name: _seconds(WAYS[name], x, weight, bias, sizes) for name in ways}
    return Timing(min(ways, key=lambda name: seconds[name]), seconds)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _fixed_way(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Way:
    """The preferred way that agrees with torch's own; a convolution in groups is torch's own."""
    order = PREFERRED.get(x.device.type, PREFERRED["cpu"])
    if sizes.groups > 1 or order[0] == "grouped":
        return "grouped"
    agreeing = _agreeing(_offered(x, weight, sizes), x, weight, bias, sizes)
    return min(agreeing, key=order.index)


def _agreeing(
    ways: list[Way], x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes
) -> list[Way]:
    """The ways whose results and gradients agree with those of torch's own convolution."""
    if "grouped" not in ways:
        return ways
    theirs = _results(grouped, x, weight, bias, sizes)
    most = _tolerance(x)
    return [
        name
        for name in ways
        if name == "grouped"
        or all(map(partial(_near_to, most), _results(WAYS[name], x, weight, bias, sizes), theirs))
    ]


def _results(
    way: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes
) -> list[Tensor]:
    """The result, and the required gradients of the sum of its squares."""
    x, weight = (t.detach().requires_grad_(t.requires_grad) for t in (x, weight))
    moved = [t for t in (x, weight) if t.requires_grad]
    result = way(x, weight, None if bias is None else bias.detach(), sizes)
    result = result if result.dtype == torch.float64 else result.float()
    return [
        result.detach(),
        *(torch.autograd.grad((result * result).sum(), moved) if moved else ()),
    ]


def _near_to(most: float, ours: Tensor, theirs: Tensor) -> bool:
    scale = float(theirs.abs().max()) or 1.0
    return float((ours - theirs).abs().max()) <= most * scale


def _tolerance(x: Tensor) -> float:
    """The tolerance between ways: above rounding errors, below any mistake."""
    if x.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(x.device.type):
        return 0.1
    if x.dtype == torch.float64:
        return 1e-9
    return 0.01 if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 0.001


def _offered(x: Tensor, weight: Tensor, sizes: Sizes) -> list[Way]:
    """The ways to choose from, without equal ones; a single way in `WAYS` always stays."""
    ways = [name for name in WAYS if name != "direct" or _differs(x, weight, sizes)]
    return ways or list(WAYS)


def _key(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> str:
    where = torch.cuda.get_device_name(x.device) if x.is_cuda else "cpu"
    exact = "" if not x.is_cuda else f" tf32 {torch.backends.cuda.matmul.allow_tf32}"
    moves = x.requires_grad, weight.requires_grad
    return (
        f"{len(WAYS)} ways, torch {torch.__version__}, {tuple(x.shape)}"
        f" by {tuple(weight.shape)}, {sizes}, {bias is not None}, {x.dtype},"
        f" gradients {moves}, {where}{exact}, {torch.get_num_threads()} threads"
    )


def _seconds(
    way: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes
) -> float:
    """The time of a forward pass and, if required, of its backward pass."""
    x, weight = (t.detach().requires_grad_(t.requires_grad) for t in (x, weight))
    moved = [t for t in (x, weight) if t.requires_grad]

    def step() -> None:
        result = way(x, weight, None if bias is None else bias.detach(), sizes)
        if moved:  # a product, since grad_outputs would make torch import sympy: seconds
            torch.autograd.grad((result * 1.0).sum(), moved)

    # the first warms up
    seconds = [_timed(step, x.device) for _ in range(1 + TRIALS)]
    return min(seconds[1:])


def _timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of a step; on a GPU those of the device alone, since graphs replay steps there."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        begin.record()
        step()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _in_front(tensor: Tensor, axis: int | None, members: int) -> Tensor:
    """Move the axis of the members to the front; expand tensors that all members share."""
    return tensor.expand(members, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


class _Convolution(torch.autograd.Function):
    """A convolution with a vmap rule."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
        return F.conv2d(x, weight, bias, sizes.stride, sizes.padding, sizes.dilation, sizes.groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.sizes = inputs
        ctx.biased = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sizes, needed = ctx.sizes, [*ctx.needs_input_grad[:2], ctx.biased is not None]
        gradients = torch.ops.aten.convolution_backward(
            gradient, x, weight, ctx.biased, sizes.stride, sizes.padding, sizes.dilation, False,
            (0, 0), sizes.groups, needed,
        )  # fmt: skip
        return (*gradients, None)

    @staticmethod
    def vmap(
        info: Any, axes: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None,
        sizes: Sizes,
    ) -> tuple[Tensor, int]:  # fmt: skip
        count = info.batch_size
        x, weight = _in_front(x, axes[0], count), _in_front(weight, axes[1], count)
        bias = None if bias is None else _in_front(bias, axes[2], count)
        return convolve(x, weight, bias, sizes), 0


class _Pooling(torch.autograd.Function):
    """Max pooling 2x2 with stride 2 and a vmap rule."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        largest, places = F.max_pool2d(x, 2, return_indices=True)
        return largest, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        x, places = ctx.saved_tensors
        by_input: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places
        )
        return by_input

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], x: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        x = _in_front(x, axes[0], info.batch_size)
        if x.dim() == 5 and x.is_cuda and x.movedim(2, -1).is_contiguous():
            largest = pooled(x.movedim(2, -1), 2).movedim(-1, 2)
        else:
            largest = F.max_pool2d(x.flatten(0, -4), 2).unflatten(0, x.shape[:-3])
        return (largest, x.new_empty(0)), (0, None)  # the places are not used


class _Pool(nn.Module):
    """Pooling 2x2."""

    def forward(self, x: Tensor) -> Tensor:
        """The pooled images."""
        largest: Tensor = _Pooling.apply(x)[0]
        return largest


class _Linear(torch.autograd.Function):
    """A linear layer with a vmap rule."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, many: Linear) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, _ = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        by_bias = flat.sum(0) if ctx.biased else None
        return gradient @ weight, flat.mT @ rows, by_bias, None

    @staticmethod
    def vmap(
        info: Any, axes: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None,
        many: Linear,
    ) -> tuple[Tensor, int]:  # fmt: skip
        count = info.batch_size
        x, weight = _in_front(x, axes[0], count), _in_front(weight, axes[1], count)
        if bias is None or x.dim() != 3:
            result = torch.matmul(x, weight.mT.unflatten(0, (count, *[1] * (x.dim() - 3))))
            front = None if bias is None else _in_front(bias, axes[2], count)
            return result if front is None else result + front.view(
                count, *[1] * (x.dim() - 2), -1
            ), 0
        return many(x, weight, _in_front(bias, axes[2], count)), 0


class _Layer(nn.Module):
    """A layer with the weights of another one, under the same names, and another function."""

    def __init__(self, like: nn.Module, function: Callable[..., Tensor], how: Any) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.function, self.how = function, how

    def forward(self, x: Tensor) -> Tensor:
        """The output of the other layer."""
        return self.function(x, self.weight, self.bias, self.how)


def for_members(model: nn.Module, linear: Linear) -> nn.Module:
    """The network, changed in place, with layers that can be mapped over many members' weights.

    Layers of the user's own and those that are not plain are left to torch.func's own rules.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _Layer(child, _Linear.apply, linear))
            elif type(child) is nn.Conv2d and _plain(child):
                sizes = Sizes(
                    _pair(child.stride), _pair(child.padding), _pair(child.dilation), child.groups
                )
                setattr(parent, name, _Layer(child, _Convolution.apply, sizes))
            elif type(child) is nn.MaxPool2d and child.extra_repr() == nn.MaxPool2d(2).extra_repr():
                setattr(parent, name, _Pool())
    return model


def _plain(layer: nn.Conv2d) -> bool:
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _pair(value: Any) -> Pair:
    first, second = value
    return int(first), int(second)
