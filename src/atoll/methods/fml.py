"""FML: each client trains a network of its own and a shared one that teach each other.

Shen et al., Federated Mutual Learning, 2020, as section h of the FCCL specification adapts it: no
public data; the shared network (the "meme") travels, the own one stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.learning.distill import mutual_loss, said, taught_loss
from atoll.learning.models import skeleton
from atoll.learning.train import Optimiser, Phase, Work, hits
from atoll.learning.weights import copied, mean, prefixed, without
from atoll.methods import Method


@dataclass(frozen=True)
class Options:
    """The options of `fml`; section h of the FCCL specification."""

    alpha: Fraction = (
        0.5  # how much labels count for the own network, the rest the shared one's say
    )
    beta: Fraction = 0.5  # how much labels count for the shared network
    rate: Positive = 0.001  # size of a step of Adam, for both networks, fresh in every round
    batch: AtLeastOne = 512  # private rows in a local step
    epochs: AtLeastOne = 20  # passes over the private rows in a round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same by client, in their order; empty: epochs
    pretrain_epochs: NotNegativeInt = 50  # passes of the own network before the first round
    top: AtLeastOne = 1  # a test row is right if its class is among so many of the likeliest


@dataclass(frozen=True)
class Trained:
    """The mean loss of training alone."""

    loss: float


@dataclass(frozen=True)
class Fitted:
    """The shared network as a client trained it, and the mean loss of both."""

    weights: Tensors
    loss: float


class Client:
    """Keeps its own network; the shared one comes and goes."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if options.epochs_each and len(options.epochs_each) != len(site.clients):
            what = f"epochs_each has {len(options.epochs_each)} numbers for {len(site.clients)}"
            raise UserError(f"{what} clients", "method.epochs_each", "give one for each")
        own, shared = site.model(), site.shared_model()
        self.training, self.testing = skeleton(own, True), skeleton(own, False)
        self.shared = skeleton(shared, True)
        self.moves = tuple(name for name, _ in own.named_parameters())
        self.shared_moves = tuple(name for name, _ in shared.named_parameters())
        self.weights = copied(own.state_dict())

    def prepare(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train the own network alone, as the methods do that this one is compared with."""
        options, rows = self.options, self.site.train(moment.stage)
        loss = partial(taught_loss, network=self.training)
        phase = Phase("loss", self.moves, loss, Optimiser("adam", options.rate))
        stream, epochs = self.site.stream("prepare"), options.pretrain_epochs
        done = yield Work(self.weights, {}, (phase,), rows, options.batch, epochs, stream)
        self.weights = done.weights
        return Trained(done.losses["loss"])

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train both networks on the own rows, each also towards what the other says."""
        options, site = self.options, self.site
        received = {n: w.to(site.device) for n, w in request.weights.items()}
        weights = prefixed("own", self.weights) | prefixed("shared", received)
        moves = tuple(f"own/{n}" for n in self.moves)
        moves += tuple(f"shared/{n}" for n in self.shared_moves)
        truths = (options.alpha, options.beta)
        loss = partial(mutual_loss, own=self.training, shared=self.shared, truths=truths)
        phase = Phase("loss", moves, loss, Optimiser("adam", options.rate))
        index = site.clients.index(site.id)
        epochs = options.epochs_each[index] if options.epochs_each else options.epochs
        rows, stream = site.train(moment.stage), site.stream("fit", moment)
        done = yield Work(weights, {}, (phase,), rows, options.batch, epochs, stream)
        self.weights = without("own", done.weights)
        return Fitted(without("shared", done.weights), done.losses["loss"])

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the own network on a domain."""
        rows = self.site.test(request.task)
        correct, f1 = hits(said(self.testing, self.weights, rows.x), rows.y, self.options.top)
        return Checked(len(rows), {"": correct}, {"": f1})

    def state(self) -> Tensors:
        return prefixed("weights", self.weights)

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))


class Server:
    """Holds the shared network."""

    def __init__(self, options: Options, site: Site) -> None:
        self.weights: Tensors = copied(site.shared_model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the shared network out, take the mean of what comes back."""
        notes: dict[str, float] = {}
        if moment.stage == 0 and moment.first:
            prepared = clients.ask_all(Client.prepare, Empty()).values()
            notes["prepared"] = sum(reply.loss for reply in prepared) / len(prepared)
        replies = list(clients.ask_all(Client.fit, Weights(self.weights)).values())
        self.weights = mean([reply.weights for reply in replies])
        return notes | {"loss": sum(reply.loss for reply in replies) / len(replies)}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client's own network on every domain."""
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        return self.weights

    def restore(self, state: Tensors) -> None:
        self.weights = copied(state)


METHOD = Method(Options, Server, Client, split="domains")
