"""How large a run's network is, from its config alone: known before anything is built."""

import math
from itertools import pairwise
from typing import Any

from atoll.runs.config import RunConfig

__all__ = ["parameters"]


def parameters(config: RunConfig, inputs: int = 1, classes: int = 1) -> int:
    """Parameters of the largest network that a config's widths ask for, at least.

    Without the number of inputs and classes, which only the data tell, this is a lower bound.
    Networks with a name (`resnet18`, ...) have a size of their own that no option changes.
    """
    options: Any = config.options()
    embedding = int(getattr(options, "width", 0))  # of methods whose parties have halves
    if embedding:
        return _dense([inputs, embedding])
    model = config.model_options()
    return _dense([inputs, *map(int, model.widths), classes]) if model.name == "mlp" else 0


def _dense(sizes: list[int]) -> int:
    """Weights and biases of linear layers between these sizes."""
    return sum(math.prod(pair) + pair[1] for pair in pairwise(sizes))
