"""FedProx as its paper states it, by a loss for one client: Li et al. 2020."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

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
from atoll.learning.weights import copied, mean, prefixed


@dataclass(frozen=True)
class Options:
    """The options of `naive_fedprox`."""

    rate: Positive = 0.1  # size of a local step
    batch: AtLeastOne = 16  # rows in a local step
    mu: NotNegative = 0.1  # strength of the penalty


def near(network: Architecture, weights: Mapping[str, Tensor], batch: Rows, *, mu: float) -> Tensor:
    """Cross-entropy plus mu/2 |w - w0|^2."""
    names = [name for name in weights if "/" not in name]
    far = sum(((weights[n] - weights[f"start/{n}"]) ** 2).sum() for n in names)
    return plain(network, weights, batch) + mu / 2 * far


class Client:
    """Trains the shared model; nothing outlives a message."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site, self.model = options, site, site.model()
        moves = tuple(self.model.state_dict())
        loss = partial(near, shared(site.outline()), mu=options.mu)
        self.phase = Phase("loss", moves, loss, Optimiser("sgd", options.rate))

    def fit(self, request: Weights, moment: Moment) -> Working[Weights]:
        """Train the shared weights twice over the rows."""
        rows, stream = self.site.train(moment.stage), self.site.stream("fit", moment)
        weights = {**request.weights, **prefixed("start", request.weights)}
        done = yield TrainJob(weights, {}, (self.phase,), rows, self.options.batch, 2, stream)
        return Weights({n: done.weights[n] for n in request.weights})

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the shared weights on a task."""
        self.model.load_state_dict(request.weights)
        return checked(self.model, self.site.test(request.task))

    def state(self) -> Tensors:
        return {}  # nothing outlives a message

    def restore(self, state: Tensors) -> None:
        pass


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
