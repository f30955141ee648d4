"""How large a run's network and its answers are; known before anything is trained."""

import dataclasses
import math
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any, get_type_hints

import torch
from torch import Tensor

from atoll import methods
from atoll.core.annotations import Bounded, Outputs, SharedWeights, Update, marked
from atoll.core.federation import actions, kinds
from atoll.core.messages import Tensors
from atoll.data import sources
from atoll.learning.image_nets import NETWORKS
from atoll.learning.textcnn import KERNELS
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts

__all__ = ["answer_bytes", "parameters"]

WORD_NUMBERS = 300  # in the longest word vectors that are installed; random ones name theirs
NUMBER_BYTES = 8  # of the widest numbers that a run sends
HEADROOM = 2  # times what the largest answer of a run should have
OTHER_BYTES = 16 << 20  # of messages without tensors: names, levels of columns, NVFlare's own


def parameters(config: RunConfig, inputs: int = 1, classes: int = 1) -> int:
    """Parameters of the largest network that a config asks for, at least.

    Without the number of inputs and classes, which only the data tell, this is a lower bound.
    Installed networks outside atoll count nothing: the site's owner lists them by name.
    """
    width = int(getattr(config.options(), "width", 0))  # of an embedding, features or a generator
    own = _dense([inputs, width]) if width else 0
    if methods.load(str(config.method["name"])).split == "parties":  # halves, without hidden layers
        return own
    name = config.model_options().name
    return max(
        own, *(_network(config, one or name, inputs, classes) for one in config.models or [name])
    )


def _network(config: RunConfig, name: str, inputs: int, classes: int) -> int:
    """Parameters of the network with a name, under the run's widths."""
    widths = [*map(int, config.model_options().widths)]
    if sources.kind_of(str(config.data.get("name", ""))) == "text":
        drawn = re.fullmatch("random-([0-9]{1,9})", config.model_options().vectors)
        return _dense([sum(KERNELS) * int(drawn[1] if drawn else WORD_NUMBERS), *widths[-1:]])
    if name == "mlp":
        return _dense([inputs, *widths, classes])
    return _named(name, classes) if name in NETWORKS else 0


@lru_cache
def _named(name: str, classes: int) -> int:
    """Parameters of an image network for small images of one channel; takes no memory for them."""
    with torch.device("meta"):
        return sum(p.numel() for p in NETWORKS[name]((1, 8, 8), classes).parameters())


def _dense(sizes: list[int]) -> int:
    """Weights and biases of linear layers between these sizes."""
    return sum(math.prod(pair) + pair[1] for pair in pairwise(sizes))


def answer_bytes(parts: Parts) -> int:
    """Bytes that no honest answer of a run exceeds, by the tensors that its messages have."""
    method = parts.method
    numbers = _Numbers.of(parts)
    answers = [numbers.answer(kinds(one)[1]) for one in actions(method.client).values()]
    return HEADROOM * NUMBER_BYTES * max(answers, default=0) + OTHER_BYTES


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """How many numbers the tensors of an answer may have, by what they are."""

    weights: int  # of a network
    outputs: int  # for each row of the data
    grams: int  # products of the inputs of every layer

    @classmethod
    def of(cls, parts: Parts) -> "_Numbers":
        options: Any = parts.config.options()
        width = int(getattr(options, "width", 0))  # of an embedding, or of random features
        rows = max(len(parts.dataset.x), int(getattr(options, "public_batch", 0)))
        inputs = math.prod(parts.dataset.x.shape[1:])
        tensors = [] if parts.scenario.labels_at_server else _networks(parts)
        widest = max([width, len(parts.dataset.classes), *(len(t) for t in tensors if t.dim())])
        sides = [width, *(t[0].numel() for t in tensors if t.dim() > 1)]
        weights = sum(t.numel() for t in tensors) + (inputs + 1) * width
        return cls(weights, rows * widest, sum((side + 1) ** 2 for side in sides))

    def answer(self, kind: type) -> int:
        """Numbers in all tensors of a message."""
        whole, outputs = (
            {*marked(kind, Update), *marked(kind, SharedWeights)},
            marked(kind, Outputs),
        )
        few, total = marked(kind, Bounded), 0
        for name, hint in get_type_hints(kind).items():
            if hint not in (Tensor, Tensors) or name in few:
                continue
            most = max(self.weights, self.outputs) if name in outputs else self.weights
            total += most if name in whole or name in outputs else sum(vars(self).values())
        return total


def _networks(parts: Parts) -> list[Tensor]:
    """The tensors of the largest network of a run's sites."""
    names, clients = parts.config.models, parts.scenario.clients
    sites = {names[clients.index(id)] if names else "": parts.site(id) for id in clients}
    models = [one for site in sites.values() for one in (site.model(), site.shared_model())]
    states = [list(model.state_dict().values()) for model in models]
    return max(states, key=lambda tensors: sum(t.numel() for t in tensors))
