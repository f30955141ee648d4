"""How inputs and the labels of regression are scaled, and the constants by which images are."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Scale", "Target", "colours"]

Scale = Literal["global", "local", "none", "imagenet"]


@dataclass(frozen=True)
class Target:
    """How the label of regression is scaled for training: mean 0 and deviation 1."""

    mean: float
    deviation: float  # in the unit of the label; 1 where all labels are equal

    @staticmethod
    def of(labels: Tensor) -> "Target":
        """The scaling that these labels have; (0, 1) without labels."""
        if not len(labels):
            return Target(0.0, 1.0)
        deviation, mean = torch.std_mean(labels.double(), correction=0)
        return Target(float(mean), float(deviation) or 1.0)

    def standardise(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Labels as training reads them."""
        return ((labels.double() - self.mean) / self.deviation).to(dtype)

    def restore(self, outputs: Tensor) -> Tensor:
        """Outputs of a network in the unit of the label."""
        return outputs.double() * self.deviation + self.mean


def colours(scale: Scale, channels: int, name: str = "") -> tuple[list[Any], list[Any]]:
    """Mean and deviation of each channel, for values from 0 to 1: (channels, 1, 1) as lists."""
    if scale != "imagenet" or channels != 3:
        return [[[0.5]]] * channels, [[[0.5]]] * channels
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if name == "cifar100":
        mean, deviation = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return [[[m]] for m in mean], [[[d]] for d in deviation]
