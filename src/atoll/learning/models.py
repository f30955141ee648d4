"""Networks as functions of (input shape, classes, options); first weights from a named stream.

A stack of networks has one more axis in front of every weight. All functions here take weights
with such axes and without: a bank of second columns, a stack of clients, a stack of banks.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.core.errors import UserError
from atoll.core.options import AtLeastOne, NotNegative
from atoll.core.plugins import is_foreign
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.kernels.batched_layers import for_members
from atoll.learning import foreign, image_nets

__all__ = [
    "MLP",
    "NORMALISING",
    "Architecture",
    "Loss",
    "ModelOptions",
    "draw_layers",
    "draw_linear",
    "features",
    "linear",
    "network",
    "outputs",
    "shared",
    "skeleton",
]


@dataclass(frozen=True)
class ModelOptions:
    """Which network the clients train."""

    name: str = (
        "mlp"  # mlp; for images also resnet18, cnn, ... or module:function; texts: their own
    )
    widths: tuple[AtLeastOne, ...] = (512, 256, 128)  # hidden layers; texts: the last: filters
    vectors: str = "best"  # texts: name of word vectors, the best available, or random-50
    precision: Literal["float32", "bfloat16"] = (
        "float32"  # image networks: bfloat16 rounds inside layers; weights and losses stay exact
    )
    layout: Literal["plain", "channels-last"] = "plain"  # image networks: memory layout
    norm: NotNegative = 5.0  # texts: mean norm to which word vectors are scaled; 0: no scaling
    initial: Literal["drawn", "own"] = (
        "drawn"  # plug-ins: initial values from the run's seed, or the network's own
    )
    frozen: tuple[str, ...] = ()  # plug-ins: layers that are not trained, sent or saved
    weights: str = ""  # plug-ins with own first values: their hash, which the run writes


def draw_linear(outputs: int, inputs: int, stream: Stream, bias: bool = True) -> list[Tensor]:
    """First weights of a linear layer, as torch's own: uniform within 1/sqrt(inputs)."""
    generator = stream.numpy()
    bound = 1 / math.sqrt(inputs) if inputs else 0.0
    shapes = [(outputs, inputs), (outputs,)] if bias else [(outputs, inputs)]
    return [torch.from_numpy(generator.uniform(-bound, bound, shape)).float() for shape in shapes]


def draw_layers(
    inputs: int, sizes: Sequence[int], stream: Callable[[int], Stream]
) -> dict[str, Tensor]:
    """Initial weights of an MLP: weight0, bias0, weight1, ...; each layer has a separate stream."""
    weights = {}
    for i, (below, above) in enumerate(pairwise([inputs, *sizes])):
        weights[f"weight{i}"], weights[f"bias{i}"] = draw_linear(above, below, stream(i))
    return weights


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None
) -> Tensor:
    """x W' + b (+ plus); axes in front of weights are members; x may lack that of a bank."""
    if weight.dim() == 2:
        plain = F.linear(x, weight, bias)
        return plain if plus is None else plain + plus
    while x.dim() < weight.dim():
        x = x.unsqueeze(-3)
    members = weight.shape[:-2]
    x = x.expand(*members, *x.shape[-2:]).flatten(0, -3)
    base = plus.flatten(0, -3) if plus is not None else None
    if bias is not None:
        row = bias.flatten(0, -2).unsqueeze(1)
        base = row if base is None else base + row
    assert base is not None  # a product without any sum is never needed
    product: Tensor = _SumAndProduct.apply(base, x, weight.flatten(0, -3))
    return product.view(*members, *product.shape[-2:])


class _SumAndProduct(torch.autograd.Function):
    """base + x W' for each member in one kernel, whose gradient by W has the memory layout of W."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.row = base.shape[1] == 1 and x.shape[1] != 1
        return torch.baddbmm(base, x, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_base = gradient.sum(1, keepdim=True) if ctx.row else gradient
        by_x = torch.bmm(gradient, weight) if ctx.needs_input_grad[1] else None
        by_weight = torch.bmm(gradient.mT, x) if ctx.needs_input_grad[2] else None
        return by_base, by_x, by_weight


class MLP(nn.Module):
    """Linear layers with ReLU between them; a row is flattened."""

    def __init__(
        self, shape: tuple[int, ...], widths: Sequence[int], classes: int, stream: Stream
    ) -> None:
        """Draw the first weights, each layer from a stream of its own."""
        super().__init__()
        sizes = [*widths, classes]
        self.depth, self.axes = len(sizes), len(shape)
        layers = draw_layers(math.prod(shape), sizes, partial(stream.child, "layer"))
        for name, weight in layers.items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.logits(dict(self.named_parameters()), x)

    def logits(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The logits with other weights."""
        return outputs(weights, x.flatten(-self.axes), self.depth)[-1]


def outputs(weights: Mapping[str, Tensor], x: Tensor, depth: int) -> list[Tensor]:
    """The outputs of layers weight0, bias0, weight1, ...: after ReLU, but the last as it is."""
    layers = []
    for i in range(depth):
        x = linear(x, weights[f"weight{i}"], weights[f"bias{i}"])
        if i < depth - 1:
            x = torch.relu(x)
        layers.append(x)
    return layers


NORMALISING = nn.modules.batchnorm._BatchNorm  # by the mean and spread of a batch
MIXING = (NORMALISING, nn.Dropout, image_nets.StreamDropout)


def skeleton(model: nn.Module, training: bool) -> "Architecture":
    """A network's function in training or evaluation mode; batch norm and dropout differ."""
    return Architecture(copy.deepcopy(model).to("meta").train(training))


@lru_cache(maxsize=16)
def shared(outline: nn.Module) -> "Architecture":
    """The architecture of an outline, which does not change and which many sites have."""
    return Architecture(outline)


class Architecture:
    """A network without its weights: a pure function of weights and inputs.

    Two of them are equal if the networks they were made from print alike and have weights of the
    same shapes; so an engine can see that two clients compute the same function.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._shapes = {name: tuple(w.shape) for name, w in model.state_dict().items()}
        self._narrow = getattr(model, "precision", "float32") == "bfloat16"
        self._channels_last = getattr(model, "layout", "plain") == "channels-last"
        ways = (model.training, self._narrow, self._channels_last)
        self._key = (repr(model), *ways, tuple(sorted(self._shapes.items())))
        self._hash = hash(self._key)
        # whether a row's logits depend on that row alone, so that rows may be added to a batch
        self.rowwise = not (model.training and any(isinstance(m, MIXING) for m in model.modules()))
        # whether it needs the mean and spread of a batch, which one row does not have
        batch_norms = [layer for layer in model.modules() if isinstance(layer, NORMALISING)]
        self.batch_statistics = model.training and bool(batch_norms)
        self._attends = any(isinstance(m, nn.MultiheadAttention) for m in model.modules())

    def __eq__(self, other: object) -> bool:
        """Whether both compute the same function."""
        return self is other or (isinstance(other, Architecture) and self._key == other._key)

    def __repr__(self) -> str:
        """The network it was made from, which identifies it in a file."""
        return repr(self._key)

    def __hash__(self) -> int:
        """Equal architectures have equal hashes."""
        return self._hash

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The logits; weights with an axis in front are those of several members.

        Names that are not the network's are constants of a loss and do not matter here.
        """
        logits = getattr(self.model, "logits", None)
        if logits is not None:  # a network that supports such weights itself
            return logits(weights, x)  # type: ignore[no-any-return]
        own = {name: weight for name, weight in weights.items() if name in self._shapes}
        name, shape = next(iter(self._shapes.items()))
        if own[name].dim() == len(shape):
            return self._logits(self.model, own, x)
        one = lambda w, part: self._logits(self._many, w, part)  # noqa: E731
        # fused attention has no vmap rule, but its plain form has
        with sdpa_kernel(SDPBackend.MATH) if self._attends else nullcontext():
            return torch.vmap(one)(own, x)

    def _logits(self, model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """The logits of one member, in the precision and layout that its options ask for."""
        if self._channels_last:
            # the memory format of that name, as operations that torch.vmap supports
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        if not self._narrow:
            return functional_call(model, weights, (x,))  # type: ignore[no-any-return]
        # no cache of rounded weights: a graph that is captured must round them anew each time
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return functional_call(model, weights, (x,)).to(x.dtype)  # type: ignore[no-any-return]

    @cached_property
    def _many(self) -> nn.Module:
        """The network with layers that have vmap rules."""
        return for_members(copy.deepcopy(self.model).to("meta"), linear)


Loss = Callable[[Architecture, Mapping[str, Tensor], Rows], Tensor]


def features(network: Architecture, weights: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """The input of the last linear layer for each row; None if a network has no such layer."""
    layers = [layer for layer in network.model.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        return None
    seen: list[Tensor] = []
    handle = layers[-1].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    try:
        with torch.no_grad():
            network(weights, x)
    finally:
        handle.remove()
    return seen[-1].flatten(1).to(x.dtype)


def network(
    shape: tuple[int, ...], classes: int, options: ModelOptions, stream: Stream
) -> nn.Module:
    """The network that the options name."""
    if options.name not in ("mlp", *image_nets.NETWORKS) and is_foreign(
        options.name, "atoll.models"
    ):
        model = foreign.build(options.name, shape, classes, stream, options.initial, options.frozen)
        model.precision, model.layout = options.precision, options.layout  # type: ignore[assignment]
        return model
    if options.initial != "drawn" or options.frozen:
        what = f"'{options.name}' is drawn and trained whole"
        raise UserError(what, "[model]", "leave initial and frozen out: they are for plug-ins")
    if options.name != "mlp":
        model = image_nets.build(options.name, shape, classes, stream)
        model.precision, model.layout = options.precision, options.layout  # type: ignore[assignment]
        return model
    if (options.precision, options.layout) != ("float32", "plain"):
        remedy = "leave model.precision and model.layout as they are"
        raise UserError("an mlp has one precision and one layout", "[model]", remedy)
    return MLP(shape, options.widths, classes, stream)
