"""FedMD: clients with different networks move their logits on public images towards the mean.

Li, Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019. With loss = "kl" this
is FedDF for clients that all differ (Lin et al., Ensemble Distillation for Robust Model Fusion in
Federated Learning, 2020); with loss = "rcfl" the mean is weighed class by class (Gudur et al.,
Resource-Constrained Federated Learning with Heterogeneous Labels and Models, 2020); with
loss = "none" clients only train on, and with average = true as well that is FedAvg. All as section
h of the FCCL specification adapts them, on the settings of `fccl`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.annotations import Bounded
from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment, Working, no_restore, no_state
from atoll.core.messages import Empty, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegativeInt, Positive
from atoll.data.site import Site
from atoll.families import distillation
from atoll.families.distillation import Again, Align, Aligned, Exchange, Learner, Plan, Trained
from atoll.learning.augment import varied
from atoll.learning.distill import distillation_loss, divergence

LEAST = 1e-3  # the smallest reliability of a class
# The distance of a client's logits on a public batch from the target.
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda z, target: (z - target).abs().mean(),
    "mse": lambda z, target: ((z - target) ** 2).mean(),
    "kl": lambda z, target: divergence(target, z),
}


@dataclass(frozen=True)
class Options:
    """The options of `fedmd`; section h of the FCCL specification."""

    loss: Literal["l1", "mse", "kl", "rcfl", "none"] = "l1"  # kl: FedDF; none: only local training
    public_optimiser: Literal["fresh", "persistent"] = (
        "fresh"  # Adam's moments over a round's steps
    )
    public_batch: AtLeastOne = 512  # batch size of a public step; the rest is dropped
    public_epochs: AtLeastOne = 1  # epochs over the public images per round
    augment: bool = True  # random shifts, flips and rotations, identical at all clients
    rate: Positive = 0.001  # learning rate of Adam
    batch: AtLeastOne = 512  # batch size of local training
    epochs: AtLeastOne = 20  # local epochs per round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same, one number per client in order
    pretrain_epochs: NotNegativeInt = 50  # epochs of local pretraining before the first round
    average: bool = False  # for equal networks: average all weights and buffers between the phases
    absent: NotNegativeInt = 0  # clients that may fail in a round; the record names them
    top: AtLeastOne = 1  # top-k accuracy: the class must be among the k likeliest


@dataclass(frozen=True)
class Rated:
    """A client's accuracy on its own rows of each class."""

    reliability: Annotated[Tensor, Bounded(0.0, 1.0)]  # (classes,)


def plan(options: Options) -> Plan:
    """How a round goes through the public images."""
    augment = varied if options.augment else None
    return Plan(options.public_batch, options.public_epochs, augment)


def public_loss(z: Tensor, again: Again, constants: Tensors, *, kind: str, own: float) -> Tensor:
    """The distance of logits from the target; RCFL mixes the own logits into it, `own` to one."""
    target = constants["target"]
    if own:
        target = (target + own * z.detach()) / (1 + own)
    return DISTANCES[kind](z, target)


def by_class(reliability: Mapping[str, Tensor], answers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean of all logits, each class weighted by the clients' reliability there (RCFL)."""
    ids = sorted(answers)
    weights = torch.stack([reliability[id] for id in ids]).double()[:, None]
    logits = torch.stack([answers[id] for id in ids])
    target = ((weights * logits).sum(0) / weights.sum(0)).to(logits.dtype)
    return dict.fromkeys(answers, target)


class Client:
    """Keeps its model, the model of the last round, and the model before any exchange."""

    join, prepare, share = distillation.join, distillation.prepare, distillation.share
    check, snapshot = distillation.check, distillation.snapshot
    state, restore = distillation.state, distillation.restore
    final_model, predict = distillation.final_model, distillation.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if site.regression and options.loss in ("kl", "rcfl"):
            what = f"loss = '{options.loss}' compares classes, and the label is a number"
            raise UserError(what, "method.loss", "use l1, mse or none")
        self.learner = Learner("fedmd", options, site, plan(options))

    def rate(self, request: Empty, moment: Moment) -> Rated:
        """The accuracy on the own rows, class by class (RCFL)."""
        rows, classes = self.site.train(moment.stage), len(self.site.classes)
        correct = self.learner.logits(self.learner.weights, rows.x).argmax(-1) == rows.y
        hits = torch.bincount(rows.y[correct], minlength=classes)
        counts = torch.bincount(rows.y, minlength=classes).clamp(min=1)
        return Rated((hits / counts).clamp(min=LEAST).float())

    def align(self, request: Align, moment: Moment) -> Working[Aligned]:
        """Follow the target of the last step, then return the logits of the next."""
        kind, own = self.options.loss, 0.0
        if request.step == 0:
            self.learner.rewind()
        if kind == "rcfl":
            kind = "l1"
            own = min(1.0, len(self.site.train(moment.stage)) / len(self.site.public()))
        loss = partial(public_loss, kind=kind, own=own)
        fresh = self.options.public_optimiser == "fresh"
        constants = {"target": request.target.to(self.site.device)}
        result = yield from self.learner.step(request, moment, loss, constants, fresh=fresh)
        return distillation.aligned(result)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows."""
        learner, rows = self.learner, self.site.train(moment.stage)
        learner.receive(request.weights)
        learner.probe("others", moment)
        loss = partial(distillation_loss, network=learner.training)
        trained = yield from learner.fit(rows, loss, moment)
        learner.probe("own", moment)
        return trained


class Server:
    """Computes targets from logits; keeps nothing."""

    evaluate = distillation.evaluate
    state, restore = no_state, no_restore  # nothing outlives a round

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Align the logits on public images, then train everywhere."""
        exchange = Exchange(self.options, self.site, clients, Client)
        notes = exchange.begin(plan(self.options))
        if self.options.loss == "rcfl":
            rated = exchange.ask_all(Client.rate, Empty())
            reliability = {id: reply.reliability for id, reply in rated.items()}
            notes["aligned"] = exchange.align(plan(self.options), partial(by_class, reliability))
        elif self.options.loss != "none":
            notes["aligned"] = exchange.align(plan(self.options), distillation.mean_logits)
        notes["loss"] = exchange.fit()
        return notes | exchange.notes


METHOD = Method(
    *(Options, Server, Client),
    *("domains", "fedmd"),  # split, headline
    quorum=True,
    weighted=True,
    regression=True,
    sends=distillation.sends,
)
