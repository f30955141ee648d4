"""How inputs are scaled, and the constants by which images are."""

from typing import Any, Literal

__all__ = ["Scale", "colours"]

Scale = Literal["global", "local", "none", "imagenet"]


def colours(scale: Scale, channels: int, name: str = "") -> tuple[list[Any], list[Any]]:
    """Mean and deviation of each channel, for values from 0 to 1: (channels, 1, 1) as lists."""
    if scale != "imagenet" or channels != 3:
        return [[[0.5]]] * channels, [[[0.5]]] * channels
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if name == "cifar100":
        mean, deviation = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return [[[m]] for m in mean], [[[d]] for d in deviation]
