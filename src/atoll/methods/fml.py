"""FML: each client trains a network of its own and a shared one that teach each other.

Shen et al., Federated Mutual Learning, 2020, as section h of the FCCL specification adapts it: no
public data; the shared network (the "meme") travels, the own one stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor

from atoll.core.annotations import SharedWeights, Update
from atoll.core.federation import Clients, Moment, Working
from atoll.core.messages import Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.families import distillation
from atoll.families.distillation import Exchange, Learner
from atoll.jobs.train import Optimiser, Phase, TrainJob
from atoll.learning.distill import disagreement
from atoll.learning.losses import label_loss
from atoll.learning.models import Architecture, skeleton
from atoll.learning.weights import copied, mean, placed, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `fml`; section h of the FCCL specification."""

    alpha: Fraction = 0.5  # weight of the labels for the own network; the rest: divergence
    beta: Fraction = 0.5  # weight of the labels for the shared network
    rate: Positive = 0.001  # learning rate of Adam for both networks, reset every round
    batch: AtLeastOne = 512  # batch size of local training
    epochs: AtLeastOne = 20  # local epochs per round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same, one number per client in order
    pretrain_epochs: NotNegativeInt = 50  # epochs of the own network before the first round
    average: bool = False  # for equal networks: average all own networks before local training
    absent: NotNegativeInt = 0  # clients that may fail in a round; the record names them
    top: AtLeastOne = 1  # top-k accuracy: the class must be among the k likeliest


@dataclass(frozen=True)
class Fit:
    """The shared network, and with `average` the mean of the own ones."""

    weights: Annotated[Tensors, SharedWeights("meme")]
    own: Annotated[Tensors, SharedWeights()]  # empty without `average`


@dataclass(frozen=True)
class Fitted:
    """The shared network as a client trained it, and the mean loss of both."""

    weights: Annotated[Tensors, Update(of="weights")]
    loss: float


def mutual_loss(
    weights: Mapping[str, Tensor],
    batch: Rows,
    *,
    own: Architecture,
    shared: Architecture,
    truths: tuple[float, float],
) -> Tensor:
    """The losses of both networks: truth * CE(q, y) + (1 - truth) * KL(partner || q).

    In regression both terms are squared differences. The partner's output is a constant, so no
    gradient runs from one network into the other.
    """
    z, z_shared = own(without("own", weights), batch.x), shared(without("shared", weights), batch.x)
    losses = []
    for truth, student, partner in zip(truths, (z, z_shared), (z_shared, z), strict=True):
        taught = disagreement(partner.detach(), student, batch)
        losses.append(truth * label_loss(student, batch) + (1 - truth) * taught)
    return losses[0] + losses[1]


class Client:
    """Keeps its own network; the shared one comes and goes."""

    prepare, share = distillation.prepare, distillation.share
    check, snapshot = distillation.check, distillation.snapshot
    state, restore = distillation.state, distillation.restore
    final_model, predict = distillation.final_model, distillation.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.learner = Learner("fml", options, site)
        model = site.shared_model()
        self.shared = skeleton(model, True)
        self.shared_moves = tuple(name for name, _ in model.named_parameters())

    def fit(self, request: Fit, moment: Moment) -> Working[Fitted]:
        """Train both networks on the own rows; each learns from the other."""
        options, site, learner = self.options, self.site, self.learner
        learner.rewind()
        learner.receive(request.own)
        received = placed(request.weights, site.device)
        weights = prefixed("own", learner.weights) | prefixed("shared", received)
        moves = [f"own/{n}" for n in learner.moves] + [f"shared/{n}" for n in self.shared_moves]
        truths = (options.alpha, options.beta)
        loss = partial(mutual_loss, own=learner.training, shared=self.shared, truths=truths)
        phase = Phase("loss", tuple(moves), loss, Optimiser("adam", options.rate))
        rows, stream = site.train(moment.stage), site.stream("fit", moment)
        job = TrainJob(weights, {}, (phase,), rows, options.batch, learner.epochs, stream)
        result = yield job
        learner.finish(without("own", result.weights))
        return Fitted(without("shared", result.weights), result.losses["loss"])


class Server:
    """Keeps the shared network."""

    evaluate = distillation.evaluate

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.weights: Tensors = copied(site.shared_model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the shared network out, take the mean of what comes back."""
        exchange = Exchange(self.options, self.site, clients, Client)
        notes = exchange.begin()
        request = Fit(self.weights, exchange.mean_weights().weights)
        fitted = exchange.ask_all(Client.fit, request)
        self.weights = mean([reply.weights for reply in fitted.values()])
        notes["loss"] = distillation.mean_loss(fitted)
        return notes | exchange.notes

    def state(self) -> Tensors:
        return self.weights

    def restore(self, state: Tensors) -> None:
        self.weights = copied(state)


METHOD = Method(
    Options,
    Server,
    Client,
    split="domains",
    headline="fml",
    regression=True,
    first=lambda server: {"meme": server.weights},
    sends=lambda options: ("shared", *distillation.sends(options)),
    quorum=True,
    weighted=True,
)
