"""Networks for small images: features, global mean, one linear layer; they return raw logits.

Sizes are those of section c of the FCCL specification. A network is built without weights; then
every tensor is drawn from a named stream, so that nothing touches the global random state.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.options import nearest
from atoll.core.rng import Stream

__all__ = ["NETWORKS", "LeNet", "StreamDropout", "build", "draw_weights"]

Shape = tuple[int, ...]  # channels, height, width
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


class StreamDropout(nn.Module):
    """Dropout whose masks are a hash of a key and of how often it was used in training.

    The count is a buffer, so a network's state has it and a rebuilt client continues with it.
    """

    count: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.key = rate, 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """The input, some of it set to zero and the rest raised, in training; else unchanged."""
        if not self.training:
            return x
        self.count.add_(1)
        place = torch.arange(x.numel(), device=x.device) + self.count * x.numel()
        bits = (place + self.key) * 0x1E3779B97F4A7C15
        for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
        bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
        uniform = ((bits >> 11) & ((1 << 53) - 1)).double() / (1 << 53)
        mask = (uniform >= self.rate).view(x.shape).to(x.dtype)
        return x * mask / (1 - self.rate)

    def extra_repr(self) -> str:
        """What distinguishes two of them: the key is not a weight, and a graph contains it."""
        return f"{self.rate}, key={self.key}"


def _conv(below: int, above: int, kernel: int, stride: int = 1, **more: Any) -> nn.Sequential:
    """A convolution that keeps the size (but for its stride), and its batch norm."""
    bias = bool(more.pop("bias", False))
    layer = nn.Conv2d(below, above, kernel, stride, kernel // 2, bias=bias, **more)
    return nn.Sequential(layer, nn.BatchNorm2d(above))


class Net(nn.Module):
    """Features, their mean over the picture, and a linear layer."""

    def __init__(self, features: nn.Module, width: int, classes: int, dropout: float = 0) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, classes)
        self.dropout = StreamDropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.dropout(self.features(x).mean((-2, -1))))  # type: ignore[no-any-return]


class Basic(nn.Module):
    """The basic block of ResNet."""

    def __init__(self, below: int, above: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(below, above, 3, stride), _conv(above, above, 3)
        same = stride == 1 and below == above
        self.shortcut = nn.Identity() if same else _conv(below, above, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions beside a shortcut."""
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet(shape: Shape, classes: int, blocks: Sequence[int]) -> nn.Module:
    """ResNet without the large first layer and without pooling after it."""
    layers: list[nn.Module] = [_conv(shape[0], 64, 3), nn.ReLU()]
    below = 64
    for stage, count in enumerate(blocks):
        above = 64 << stage
        for number in range(count):
            layers.append(Basic(below, above, 2 if stage and not number else 1))
            below = above
    return Net(nn.Sequential(*layers), below, classes)


class MobileBlock(nn.Module):
    """Widen, filter each channel, narrow; MobileNetV2's, or with `squeeze` EfficientNet's."""

    def __init__(
        self, below: int, above: int, widen: int, stride: int, kernel: int = 3, squeeze: int = 0
    ) -> None:
        super().__init__()
        inside, act = below * widen, nn.SiLU if squeeze else nn.ReLU
        same = below == above
        layers: list[nn.Module] = []
        if widen > 1 or not squeeze:
            layers += [_conv(below, inside, 1), act()]
        layers += [_conv(inside, inside, kernel, stride, groups=inside), act()]
        if squeeze:
            layers.append(Squeeze(inside, squeeze))
        self.layers = nn.Sequential(*layers, _conv(inside, above, 1))
        self.shortcut: nn.Module | None = None
        if stride == 1 and same:
            self.shortcut = nn.Identity()
        elif stride == 1 and not squeeze:
            self.shortcut = _conv(below, above, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The layers, beside a shortcut where there is one."""
        out: Tensor = self.layers(x)
        return out if self.shortcut is None else out + self.shortcut(x)


class Squeeze(nn.Module):
    """Squeeze and excitation: each channel times a factor that all channels' means decide."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inside, 1), nn.Conv2d(inside, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The channels, weighed."""
        means = x.mean((-2, -1), keepdim=True)
        return x * torch.sigmoid(self.up(F.silu(self.down(means))))


def efficientnet(shape: Shape, classes: int) -> nn.Module:
    """EfficientNet-B0 for 32 x 32: no unused convolution, no drop-connect, dropout 0.2."""
    layers: list[nn.Module] = [_conv(shape[0], 32, 3), nn.SiLU()]
    below = 32
    for widen, above, count, kernel, stride in (
        (1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2),
        (6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1),
    ):  # fmt: skip
        for number in range(count):
            step = 1 if number else stride
            layers.append(MobileBlock(below, above, widen, step, kernel, below // 4))
            below = above
    return Net(nn.Sequential(*layers), below, classes, dropout=0.2)


def mobilenet(shape: Shape, classes: int) -> nn.Module:
    """MobileNetV2 for 32 x 32."""
    layers: list[nn.Module] = [_conv(shape[0], 32, 3), nn.ReLU()]
    below = 32
    for widen, above, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2),
        (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            layers.append(MobileBlock(below, above, widen, 1 if number else stride))
            below = above
    return Net(nn.Sequential(*layers, _conv(below, 1280, 1), nn.ReLU()), 1280, classes)


class Inception(nn.Module):
    """Four ways side by side: 1x1, 3x3, two 3x3 (for 5x5), and pooling."""

    def __init__(self, below: int, *widths: int) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pool = widths
        self.one = _chain((below, one, 1))
        self.three = _chain((below, three_in, 1), (three_in, three, 3))
        self.five = _chain((below, five_in, 1), (five_in, five, 3), (five, five, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), *_chain((below, pool, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """All four, joined."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _chain(*sizes: tuple[int, int, int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for below, above, kernel in sizes:
        layers += [_conv(below, above, kernel, bias=True), nn.ReLU()]
    return nn.Sequential(*layers)


def googlenet(shape: Shape, classes: int) -> nn.Module:
    """GoogLeNet for 32 x 32."""
    features = nn.Sequential(
        *_chain((shape[0], 192, 3)),
        Inception(192, 64, 96, 128, 16, 32, 32),
        Inception(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, 1),
        Inception(480, 192, 96, 208, 16, 48, 64),
        Inception(512, 160, 112, 224, 24, 64, 64),
        Inception(512, 128, 128, 256, 24, 64, 64),
        Inception(512, 112, 144, 288, 32, 64, 64),
        Inception(528, 256, 160, 320, 32, 128, 128),
        nn.MaxPool2d(3, 2, 1),
        Inception(832, 256, 160, 320, 32, 128, 128),
        Inception(832, 384, 192, 384, 48, 128, 128),
    )
    return Net(features, 1024, classes)


def cnn(shape: Shape, classes: int, widths: Sequence[int] = (16, 32), norm: bool = True) -> Net:
    """A few convolutions, each but the first halving the picture."""
    layers: list[nn.Module] = []
    below = shape[0]
    for number, above in enumerate(widths):
        stride = 2 if number else 1
        layer = _conv(below, above, 3, stride) if norm else nn.Conv2d(below, above, 3, stride, 1)
        layers += [layer, nn.ReLU()]
        below = above
    return Net(nn.Sequential(*layers), below, classes)


class LeNet(nn.Module):
    """LeNet as FedWeIT has it: two convolutions, each halved afterwards, and two wide layers."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        places = 50 * (shape[1] // 4) * (shape[2] // 4)
        self.conv1, self.conv2 = (
            nn.Conv2d(shape[0], 20, 5, padding=2),
            nn.Conv2d(20, 50, 5, padding=2),
        )
        self.full1, self.full2 = nn.Linear(places, 800), nn.Linear(800, 500)
        self.head = nn.Linear(500, classes)

    @property
    def layers(self) -> dict[str, Shape]:
        """The shape of every layer below the head."""
        names = ("conv1", "conv2", "full1", "full2")
        return {name: tuple(getattr(self, name).weight.shape) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        for conv in (self.conv1, self.conv2):
            x = F.max_pool2d(torch.relu(conv(x)), 2)
        x = torch.relu(self.full2(torch.relu(self.full1(x.flatten(1)))))
        return self.head(x)  # type: ignore[no-any-return]


def small_resnet(shape: Shape, classes: int) -> nn.Module:
    """Three basic blocks of 12 to 32 channels."""
    layers = [_conv(shape[0], 12, 3), nn.ReLU(), Basic(12, 12, 1), Basic(12, 24, 2)]
    return Net(nn.Sequential(*layers, Basic(24, 32, 2)), 32, classes)


def small_mobilenet(shape: Shape, classes: int) -> nn.Module:
    """Three blocks of MobileNetV2 of 16 to 32 channels."""
    layers = [_conv(shape[0], 16, 3), nn.ReLU(), MobileBlock(16, 16, 2, 1)]
    layers += [MobileBlock(16, 24, 2, 2), MobileBlock(24, 32, 2, 2)]
    return Net(nn.Sequential(*layers), 32, classes)


def _resnet(*blocks: int) -> Callable[[Shape, int], nn.Module]:
    return lambda shape, classes: resnet(shape, classes, blocks)


# ResNet-20 is not in the specification's table; it goes on as ResNet-12 and ResNet-18 do.
NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "resnet10": _resnet(1, 1, 1, 1),
    "resnet12": _resnet(2, 1, 1, 1),
    "resnet18": _resnet(2, 2, 2, 2),
    "resnet20": _resnet(3, 2, 2, 2),
    "resnet34": _resnet(3, 4, 6, 3),
    "efficientnet": efficientnet,
    "mobilenet": mobilenet,
    "googlenet": googlenet,
    "cnn": cnn,
    "cnn-wide": lambda shape, classes: cnn(shape, classes, (24, 48)),
    "cnn-deep": lambda shape, classes: cnn(shape, classes, (12, 24, 32)),
    "cnn-plain": lambda shape, classes: cnn(shape, classes, (16, 32), norm=False),
    "small-resnet": small_resnet,
    "small-mobilenet": small_mobilenet,
    "lenet": LeNet,
}


def build(name: str, shape: Shape, classes: int, stream: Stream) -> nn.Module:
    """The network of this name."""
    if name not in NETWORKS:
        remedy = nearest(name, {"mlp", *NETWORKS}) + " (or give package.module:function)"
        raise UserError(f"unknown network '{name}'", "model.name", remedy)
    if len(shape) != 3:
        raise UserError(f"the network '{name}' reads images", "model.name", "use 'mlp' for tables")
    with torch.device("meta"):
        model = NETWORKS[name](shape, classes)
    return draw_weights(model, stream)


def draw_weights(model: nn.Module, stream: Stream) -> nn.Module:
    """The network with first weights as torch's own layers have them, but from the stream."""
    # not to_empty(), which for tensors on "meta" imports what knows symbolic shapes: seconds
    model = model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    for name, layer in model.named_modules():
        with torch.no_grad():
            for own, tensor in _tensors(layer):
                tensor.copy_(_first(layer, own, tensor, stream.child(name, own)))
        if isinstance(layer, StreamDropout):
            layer.key = stream.child(name, "dropout").key
    return model


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


def _first(layer: nn.Module, own: str, tensor: Tensor, stream: Stream) -> Tensor:
    if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        return _uniform(tensor, 1 / math.sqrt(layer.weight[0].numel()), stream)
    if isinstance(layer, NORMS):
        return torch.ones_like(tensor) if own in ("weight", "running_var") else tensor.zero_()
    if isinstance(layer, nn.Embedding):
        return torch.from_numpy(stream.numpy().standard_normal(tuple(tensor.shape)))
    if isinstance(layer, StreamDropout):
        return tensor.zero_()
    if isinstance(layer, nn.RNNBase):
        return _uniform(tensor, 1 / math.sqrt(layer.hidden_size), stream)
    if isinstance(layer, nn.MultiheadAttention):
        bound = math.sqrt(6 / sum(tensor.shape)) if tensor.dim() == 2 else 0.0
        return _uniform(tensor, bound, stream)
    what = f"no rule for the first values of '{own}' in {type(layer).__name__}"
    remedy = "build it of layers of torch.nn, or write model.initial = 'own'"
    raise UserError(what, "model.name", remedy)


def _uniform(tensor: Tensor, bound: float, stream: Stream) -> Tensor:
    values = stream.numpy().random(tuple(tensor.shape), dtype="float32")
    return torch.from_numpy(values) * (2 * bound) - bound
