"""Networks cut in two: a bottom at each client that gives an embedding, a top that gives logits.

Nothing in them remembers a batch (no batch norm), so that weights which do not move mean outputs
that do not move. Dropout is no layer: it is a mask on the embedding, drawn from a named stream.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.kernels.conv_pool import convolved, pooled
from atoll.learning.models import MLP, draw_linear

__all__ = ["Bottom", "NetName", "bottom", "chosen", "top", "widened"]

NetName = Literal["auto", "lenet3", "lenet2", "mlp", "dense"]
BLOCKS = {"lenet3": 3, "lenet2": 2, "mlp": 0, "dense": 0}
CHANNELS = 64
HIDDEN = 192  # of the top; `mlp` has a top of one layer


class Bottom(nn.Module):
    """Blocks of convolution 2x2, ReLU and pooling 2x2 with stride 1; a linear layer; ReLU."""

    def __init__(self, shape: tuple[int, ...], width: int, blocks: int, stream: Stream) -> None:
        """Draw the first weights as torch does, each layer from a stream of its own."""
        super().__init__()
        self.blocks, self.width = blocks, width
        for i in range(blocks):
            below = shape[0] if i == 0 else CHANNELS
            weight, bias = draw_linear(CHANNELS, below * 4, stream.child("block", i))
            self.register_parameter(f"kernel{i}", nn.Parameter(weight.view(CHANNELS, below, 2, 2)))
            self.register_parameter(f"offset{i}", nn.Parameter(bias))
        flat = math.prod(shape)
        if blocks:
            flat = CHANNELS * (shape[1] - 2 * blocks) * (shape[2] - 2 * blocks)
        weight, bias = draw_linear(width, flat, stream.child("layer"))
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def extra_repr(self) -> str:
        """What distinguishes two networks."""
        return f"blocks={self.blocks}"

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings: (rows, width), none below 0."""
        for i in range(self.blocks):
            x = F.conv2d(x, getattr(self, f"kernel{i}"), getattr(self, f"offset{i}"))
            x = F.max_pool2d(torch.relu(x), 2, 1)
        return torch.relu(F.linear(x.flatten(1), self.weight, self.bias))

    def unfolded(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The same for members (one more axis in front of weights and x), by products alone.

        A convolution is a product of each pixel's neighbourhood, with channels last.
        """
        if self.blocks:
            x = x.movedim(2, -1)  # (members, rows, height, width, channels)
        for i in range(self.blocks):
            x = convolved(x, weights[f"kernel{i}"], weights[f"offset{i}"])
            x = torch.relu(pooled(x))  # the largest first: the same numbers, fewer of them
        if self.blocks:
            x = x.movedim(-1, 2)
        x = x.flatten(2)
        return torch.relu(
            torch.baddbmm(weights["bias"][:, None], x, weights["weight"].transpose(1, 2))
        )


def chosen(name: NetName, shape: tuple[int, ...]) -> str:
    """The network for rows of this shape; auto: `lenet3` where three blocks fit, else `dense`."""
    sides = shape[1:] if len(shape) == 3 else (0, 0)
    if name == "auto":
        return "lenet3" if min(sides) > 2 * BLOCKS["lenet3"] else "dense"
    if BLOCKS[name] and min(sides) <= 2 * BLOCKS[name]:
        raise UserError(
            f"the network '{name}' needs a part of an image larger than {2 * BLOCKS[name]} pixels"
            f" a side, not {shape}",
            "method.network",
            "use network = 'dense' or 'mlp', or cut images into larger strips",
        )
    return name


def bottom(name: NetName, shape: tuple[int, ...], width: int, stream: Stream) -> Bottom:
    """A client's half: from its columns to an embedding of this width."""
    return Bottom(shape, width, BLOCKS[chosen(name, shape)], stream)


def top(name: NetName, width: int, classes: int, stream: Stream) -> MLP:
    """The server's half: from the joined embedding to logits."""
    return MLP((width,), () if name == "mlp" else (HIDDEN,), classes, stream)


def widened(weights: dict[str, Tensor], classes: int, stream: Stream) -> dict[str, Tensor]:
    """The weights of a top with more classes; the logits of the old ones do not change."""
    last = len(weights) // 2 - 1
    weight, bias = weights[f"weight{last}"], weights[f"bias{last}"]
    more = draw_linear(classes - len(bias), weight.shape[1], stream)
    grown = {
        f"weight{last}": torch.cat([weight, more[0].to(weight)]),
        f"bias{last}": torch.cat([bias, more[1].to(bias)]),
    }
    return {**weights, **grown}
