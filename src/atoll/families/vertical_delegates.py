"""What clients and servers of vertical methods leave to their halves, written once.

A class binds these functions as its methods: `embed = vertical_delegates.embed`.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.core.federation import Clients, Moment
from atoll.core.messages import Tensors
from atoll.core.rows import Rows
from atoll.data.vertical_site import VerticalSite
from atoll.families.vertical import Embed, Embedded, Head, Learner
from atoll.learning import knowledge, split

__all__ = [
    "HasHead",
    "HasLearner",
    "bottom_model",
    "embed",
    "predict",
    "restore_server",
    "row_fisher",
    "sampled_gradients",
    "server_state",
    "take",
    "top_model",
]


class HasLearner(Protocol):
    """A client of a vertical method."""

    learner: Learner


def embed(self: HasLearner, request: Embed, moment: Moment) -> Embedded:
    """The embeddings of rows in the requested order."""
    return self.learner.embed(request)


def take(self: HasLearner, weights: Tensors, moment: Moment, steps: int) -> None:
    """Store the weights that a round in one computation ends with."""
    self.learner.take(weights, moment, steps)


def bottom_model(self: HasLearner, shared: Tensors, variant: str, task: int) -> Tensors:
    """The weights of the bottom network."""
    return self.learner.half.weights


def predict(self: HasLearner, model: Tensors, rows: Rows) -> Tensor:
    """The embeddings of rows, from which the server predicts."""
    return self.learner.predict(model, rows)


def row_fisher(learner: Learner, x: Tensor, seed: int, gradient: Tensor) -> Tensors:
    """The Fisher diagonal of the bottom, from each row's own gradient by its embedding.

    The rows are the first of `x` in the order of the seed.
    """
    order = split.Batches(len(x), len(x), seed).at(0, x.device)
    rows, half = learner.scaled(x[order[: len(gradient)]]), learner.half
    return knowledge.fisher(half.network, half.weights, rows, gradient.to(x.device))


class HasHead(Protocol):
    """A server of a vertical method."""

    head: Head
    site: VerticalSite
    options: Any

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of its attributes that belong to its state, beside its half."""


def top_model(self: HasHead, shared: Tensors, variant: str, task: int) -> Tensors:
    """The weights of the top network."""
    return self.head.final_model()


def sampled_gradients(
    self: HasHead, clients: Clients, moment: Moment, name: str, most: int
) -> tuple[int, Tensor]:
    """Each row's own gradient of the cross-entropy, for a sample of training rows, and its seed."""
    site, settings, head = self.site, self.options, self.head
    y, seed = site.train(moment.stage).y, site.stream(name, moment).key
    count, ids = min(most, len(y)), head.learners(moment)
    parts = head.embedded(clients, ids, "train", moment.stage, (seed, count))
    labels = y[split.Batches(len(y), len(y), seed).at(0, y.device)[:count]]
    gradient = head.row_gradients(head.joined(parts), labels)
    # it gives labels away like those of the steps, which are divided by the batch size
    key = torch.tensor(head.draws(f"{name} noise", moment).key, device=y.device)
    clip, noise = settings.batch * settings.clip, settings.batch * settings.noise
    return seed, split.guarded(gradient, clip, noise, key)


def server_state(self: HasHead) -> Tensors:
    """The server's half, and the attributes that it names."""
    return self.head.state() | {name: getattr(self, name) for name in self.stored}


def restore_server(self: HasHead, state: Tensors) -> None:
    """Continue from a state."""
    rest = self.head.restore(state)
    for name in self.stored:
        setattr(self, name, rest[name])
