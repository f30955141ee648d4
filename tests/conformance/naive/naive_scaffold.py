"""SCAFFOLD as its paper states it, by a loss for one client: Karimireddy et al. 2020."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import Optimiser, Phase, TrainJob, checked
from atoll.learning.losses import plain
from atoll.learning.models import Architecture, shared
from atoll.learning.weights import copied, mean, prefixed


@dataclass(frozen=True)
class Options:
    """The options of `naive_scaffold`."""

    rate: Positive = 0.1  # size of a local step
    batch: AtLeastOne = 16  # rows in a local step


@dataclass(frozen=True)
class Fit:
    """The shared weights and the server's control variate."""

    weights: Tensors
    control: Tensors


@dataclass(frozen=True)
class Fitted:
    """What a client made of both."""

    weights: Tensors
    control: Tensors  # by how much its own control variate moved


def corrected(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Cross-entropy plus <w, c - c_i>, whose gradient corrects the client's drift."""
    names = [name for name in weights if "/" not in name]
    shift = {n: weights[f"server/{n}"] - weights[f"own/{n}"] for n in names}
    return plain(network, weights, batch) + sum((weights[n] * shift[n]).sum() for n in names)


class Client:
    """Trains the shared model and keeps a control variate."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site, self.model = options, site, site.model()
        self.control = {n: torch.zeros_like(w) for n, w in self.model.state_dict().items()}
        moves, network = tuple(self.control), shared(site.outline())
        how = Optimiser("sgd", options.rate)
        self.phase = Phase("loss", moves, partial(corrected, network), how)

    def fit(self, request: Fit, moment: Moment) -> Working[Fitted]:
        """Train the shared weights once over the rows, then move the control variate."""
        rows, batch = self.site.train(moment.stage), self.options.batch
        start, stream = request.weights, self.site.stream("fit", moment)
        weights = start | prefixed("server", request.control) | prefixed("own", self.control)
        done = yield TrainJob(weights, {}, (self.phase,), rows, batch, 1, stream)
        found = {n: done.weights[n] for n in start}
        steps = self.options.rate * -(-len(rows) // batch)
        moved = {n: (start[n] - found[n]) / steps - request.control[n] for n in start}
        self.control = {n: self.control[n] + moved[n] for n in start}
        return Fitted(found, moved)

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the shared weights on a task."""
        self.model.load_state_dict(request.weights)
        return checked(self.model, self.site.test(request.task))

    def state(self) -> Tensors:
        return self.control

    def restore(self, state: Tensors) -> None:
        self.control = copied(state)


class Server:
    """Holds the shared model and the mean control variate."""

    def __init__(self, options: Options, site: Site) -> None:
        self.weights: Tensors = copied(site.model().state_dict())
        self.control = {n: torch.zeros_like(w) for n, w in self.weights.items()}

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send both out, take the means of what comes back."""
        replies = list(clients.ask_all(Client.fit, Fit(self.weights, self.control)).values())
        moved = mean([reply.control for reply in replies])
        self.weights = mean([reply.weights for reply in replies])
        self.control = {n: self.control[n] + moved[n] for n in moved}
        return {}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """The shared model on every client's test rows."""
        return scores(clients, Client.check, self.weights, moment)

    def state(self) -> Tensors:
        return prefixed("weights", self.weights) | prefixed("control", self.control)

    def restore(self, state: Tensors) -> None:
        raise AssertionError("these runs are not resumed")


METHOD = Method(Options, Server, Client)
