"""Elastic weight consolidation at the clients, by a loss for one client: Kirkpatrick et al. 2017.

After every round a client measures how much each weight matters to it (F) and remembers its weights
(w*). In the next round its loss holds them by lambda/2 sum F (w - w*)^2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import Optimiser, Phase, TrainJob, checked
from atoll.learning.losses import plain
from atoll.learning.models import Architecture, shared
from atoll.learning.weights import copied, mean, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `naive_ewc`."""

    rate: Positive = 0.05  # size of a local step
    batch: AtLeastOne = 16  # rows in a local step
    strength: NotNegative = 5.0  # lambda


def consolidated(
    network: Architecture, weights: Mapping[str, Tensor], batch: Rows, *, strength: float
) -> Tensor:
    """Cross-entropy plus lambda/2 sum F (w - w*)^2."""
    names = [name for name in weights if "/" not in name]
    held = sum(
        (weights[f"fisher/{n}"] * (weights[n] - weights[f"anchor/{n}"]) ** 2).sum() for n in names
    )
    return plain(network, weights, batch) + strength / 2 * held


class Client:
    """Trains the shared model and holds on to what mattered in the last round."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site, self.model = options, site, site.model()
        self.network = shared(site.outline())
        first = self.model.state_dict()
        self.moves, self.anchor = tuple(first), copied(first)
        self.fisher = {n: torch.zeros_like(w) for n, w in first.items()}
        loss = partial(consolidated, self.network, strength=options.strength)
        self.phase = Phase("loss", self.moves, loss, Optimiser("adam", options.rate))

    def fit(self, request: Weights, moment: Moment) -> Working[Weights]:
        """Train the shared weights once over the rows."""
        rows, stream = self.site.train(moment.stage), self.site.stream("fit", moment)
        weights = {**request.weights, **prefixed("anchor", self.anchor)}
        weights |= prefixed("fisher", self.fisher)
        done = yield TrainJob(weights, {}, (self.phase,), rows, self.options.batch, 1, stream)
        self.anchor = {n: done.weights[n].detach().clone() for n in self.moves}
        self.fisher = self._importance(rows)
        return Weights(self.anchor)

    def _importance(self, rows: Rows) -> Tensors:
        """The squared gradient of the loss on all rows."""
        leaves = {n: w.clone().requires_grad_() for n, w in self.anchor.items()}
        found = torch.autograd.grad(plain(self.network, leaves, rows), list(leaves.values()))
        return {n: gradient**2 for n, gradient in zip(leaves, found, strict=True)}

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the shared weights on a task."""
        self.model.load_state_dict(request.weights)
        return checked(self.model, self.site.test(request.task))

    def state(self) -> Tensors:
        return prefixed("anchor", self.anchor) | prefixed("fisher", self.fisher)

    def restore(self, state: Tensors) -> None:
        self.anchor, self.fisher = (copied(without(n, state)) for n in ("anchor", "fisher"))


class Server:
    """Holds the shared model."""

    def __init__(self, options: Options, site: Site) -> None:
        self.weights: Tensors = copied(site.model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the model out, take the mean of what comes back."""
        replies = clients.ask_all(Client.fit, Weights(self.weights)).values()
        self.weights = mean([reply.weights for reply in replies])
        return {}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """The shared model on every client's test rows."""
        return scores(clients, Client.check, self.weights, moment)

    def state(self) -> Tensors:
        return self.weights

    def restore(self, state: Tensors) -> None:
        self.weights = copied(state)


METHOD = Method(Options, Server, Client)
