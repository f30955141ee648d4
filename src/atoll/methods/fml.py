"""FML: each client trains a network of its own and a shared one that teach each other.

Shen et al., Federated Mutual Learning, 2020, as section h of the FCCL specification adapts it: no
public data; the shared network (the "meme") travels, the own one stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from torch import Tensor

from atoll.core.annotations import SharedWeights, Update
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.core.record import Look, Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.families.distillation import (
    Learner,
    Lessons,
    Roll,
    Trained,
    epochs_at,
    prepared,
    shared,
)
from atoll.jobs.train import Optimiser, Phase, TrainJob
from atoll.learning.distill import mutual_loss
from atoll.learning.models import skeleton
from atoll.learning.weights import copied, mean, prefixed, without


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
    average: bool = False  # homogeneous: the mean of all own networks before local training
    absent: NotNegativeInt = 0  # clients that may fail in a round and are left out of it
    top: AtLeastOne = 1  # a test row is right if its class is among so many of the likeliest


@dataclass(frozen=True)
class Fit:
    """The shared network, and the mean of the own ones where that is taken."""

    weights: Annotated[Tensors, SharedWeights("meme")]
    own: Annotated[Tensors, SharedWeights()]  # empty where no mean is taken


@dataclass(frozen=True)
class Fitted:
    """The shared network as a client trained it, and the mean loss of both."""

    weights: Annotated[Tensors, Update(of="weights")]
    loss: float


class Client:
    """Keeps its own network; the shared one comes and goes."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.epochs = epochs_at(options.epochs_each, options.epochs, site.clients, site.id)
        self.learner, shared = Learner(site.model()), site.shared_model()
        self.shared = skeleton(shared, True)
        self.shared_moves = tuple(name for name, _ in shared.named_parameters())

    def prepare(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train the own network alone, as the methods do that this one is compared with."""
        options, stream = self.options, self.site.stream("prepare")
        lessons = Lessons(options.batch, options.pretrain_epochs, stream)
        work = self.learner.alone(lessons, self.site.before(moment.stage), options.rate)
        return self.learner.begun((yield work))

    def share(self, request: Empty, moment: Moment) -> Weights:
        """All weights and buffers of the own network, where all clients have the same kind."""
        return Weights(self.learner.weights)

    def fit(self, request: Fit, moment: Moment) -> Working[Fitted]:
        """Train both networks on the own rows, each also towards what the other says."""
        options, site, learner = self.options, self.site, self.learner
        learner.rewind()
        learner.receive(request.own)
        received = {n: w.to(site.device) for n, w in request.weights.items()}
        weights = prefixed("own", learner.weights) | prefixed("shared", received)
        moves = tuple(f"own/{n}" for n in learner.moves)
        moves += tuple(f"shared/{n}" for n in self.shared_moves)
        truths = (options.alpha, options.beta)
        loss = partial(mutual_loss, own=learner.training, shared=self.shared, truths=truths)
        phase = Phase("loss", moves, loss, Optimiser("adam", options.rate))
        rows, stream = site.train(moment.stage), site.stream("fit", moment)
        done = yield TrainJob(weights, {}, (phase,), rows, options.batch, self.epochs, stream)
        learner.ended(replace(done, found=without("own", done.weights)))
        return Fitted(without("shared", done.weights), done.losses["loss"])

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the own network, and the one before any exchange, on a domain."""
        rows = self.site.test(request.task)
        return self.learner.checked("fml", request.task, rows, self.options.top)

    def look(self, moment: Moment) -> list[Look]:
        """What this site sees of its own network; it stays here."""
        tests = {name: self.site.test(task) for task, name in enumerate(self.site.tasks)}
        own = self.site.tasks[self.site.clients.index(self.site.id) % len(tests)]
        return self.learner.look(self.site.id, moment.stage, tests, own)

    def state(self) -> Tensors:
        return self.learner.state()

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)

    def final_model(self, shared: Tensors, variant: str) -> Tensors:
        """The model of now, or the one before any exchange."""
        return self.learner.kept(variant)

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        return self.learner.says(model, rows.x)


class Server:
    """Holds the shared network."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options = options
        self.weights: Tensors = copied(site.shared_model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the shared network out, take the mean of what comes back."""
        roll, notes = Roll(clients, self.options.absent), dict[str, float]()
        if moment.stage == 0 and moment.first:
            notes |= prepared(roll, Client.prepare)
        own = shared(roll, Client.share).weights if self.options.average else {}
        fitted = roll.ask(Client.fit, dict.fromkeys(roll.ids, Fit(self.weights, own)))
        replies = list(fitted.values())
        self.weights = mean([reply.weights for reply in replies])
        notes["loss"] = sum(reply.loss for reply in replies) / len(replies)
        return notes | roll.notes

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client's own network on every domain."""
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        return self.weights

    def restore(self, state: Tensors) -> None:
        self.weights = copied(state)


METHOD = Method(
    *(Options, Server, Client),
    split="domains",
    headline="fml",
    first=lambda server: {"meme": server.weights},
    quorum=True,
)
