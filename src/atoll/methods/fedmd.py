"""FedMD: clients with different networks move their logits on public images towards the mean.

Li, Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019. With loss = "kl" this
is FedDF for clients that all differ (Lin et al., Ensemble Distillation for Robust Model Fusion in
Federated Learning, 2020); with loss = "rcfl" the mean is weighed class by class (Gudur et al.,
Resource-Constrained Federated Learning with Heterogeneous Labels and Models, 2020); with
loss = "none" clients only train on, and with average = true as well that is FedAvg. All as section
h of the FCCL specification adapts them, on the settings of `fccl`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.options import AtLeastOne, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.learning.collaboration import (
    Align,
    Aligned,
    Join,
    Joined,
    Learner,
    Lessons,
    Plan,
    Roll,
    average,
    collaborate,
    met,
)
from atoll.learning.distill import DISTANCES, taught_loss
from atoll.learning.train import Optimiser, Work
from atoll.learning.weights import copied, mean, prefixed, without
from atoll.methods import Method

LEAST = 1e-3  # reliability that a class has at least


@dataclass(frozen=True)
class Options:
    """The options of `fedmd`; section h of the FCCL specification."""

    loss: Literal["l1", "mse", "kl", "rcfl", "none"] = "l1"  # kl: FedDF; none: only local training
    public_optimiser: Literal["fresh", "persistent"] = (
        "fresh"  # Adam's moments over a round's steps
    )
    public_batch: AtLeastOne = 512  # images in a public step; what is left over is dropped
    public_epochs: AtLeastOne = 1  # passes over the public images in a round
    augment: bool = True  # move, mirror and turn public images, alike at all clients
    rate: Positive = 0.001  # size of a step of Adam, in all phases
    batch: AtLeastOne = 512  # private rows in a local step
    epochs: AtLeastOne = 20  # passes over the private rows in a round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same by client, in their order; empty: epochs
    pretrain_epochs: NotNegativeInt = 50  # passes over the private rows before the first round
    average: bool = False  # homogeneous: the mean of all weights between the two phases
    absent: NotNegativeInt = 0  # clients that may fail in a round and are left out of it
    top: AtLeastOne = 1  # a test row is right if its class is among so many of the likeliest


@dataclass(frozen=True)
class Trained:
    """The mean loss of local training."""

    loss: float


@dataclass(frozen=True)
class Rated:
    """How far a client can be trusted with each class."""

    reliability: Tensor  # (classes,), its accuracy on its own rows of that class


class Client:
    """Keeps its model, that of the last round, and the one before any exchange."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if options.epochs_each and len(options.epochs_each) != len(site.clients):
            what = f"epochs_each has {len(options.epochs_each)} numbers for {len(site.clients)}"
            raise UserError(f"{what} clients", "method.epochs_each", "give one for each")
        self.plan = plan(options)
        self.learner = Learner(site.model(), site.public(), self.plan)
        self.last = self.learner.weights
        self.solo = self.learner.weights

    def join(self, request: Join, moment: Moment) -> Joined:
        """Say which public images and classes this site has; refuse others."""
        public = self.site.public()
        mine = Joined(public.fingerprint, len(public), list(self.site.classes))
        return met(request, mine, self.site.id)

    def prepare(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train alone, before any exchange."""
        lessons = Lessons(
            self.options.batch, self.options.pretrain_epochs, self.site.stream("prepare")
        )
        done = yield self._local(lessons, moment)
        self.learner.weights = self.last = self.solo = done.weights
        return Trained(done.losses["loss"])

    def _local(self, lessons: Lessons, moment: Moment) -> Work:
        loss = partial(taught_loss, network=self.learner.training)
        how = Optimiser("adam", self.options.rate)
        return self.learner.work(lessons, self.site.train(moment.stage), loss, how)

    def rate(self, request: Empty, moment: Moment) -> Rated:
        """The accuracy on the own rows, class by class (RCFL)."""
        rows, classes = self.site.train(moment.stage), len(self.site.classes)
        right = self.learner.says(self.learner.weights, rows.x).argmax(-1) == rows.y
        hit = torch.bincount(rows.y[right], minlength=classes)
        there = torch.bincount(rows.y, minlength=classes).clamp(min=1)
        return Rated((hit / there).clamp(min=LEAST).float())

    def align(self, request: Align, moment: Moment) -> Aligned:
        """Follow the target of the step before; answer for this one."""
        learner, place = self.learner, (moment.stage, moment.round)
        if request.step == 0:  # a client that was left out in its last round begins anew
            learner.weights, learner.moments = self.last, {}
        loss = 0.0
        if request.step:
            if self.options.public_optimiser == "fresh":
                learner.moments = {}
            lost = partial(self._lost, request.target.to(self.site.device), moment)
            how = Optimiser("adam", self.options.rate)
            loss = learner.follow(place, request.key, request.step - 1, lost, how)
        if request.step == self.plan.steps(self.site.public()):
            return Aligned(torch.zeros(0), loss)
        return Aligned(learner.logits(place, request.key, request.step), loss)

    def _lost(self, target: Tensor, moment: Moment, z: Tensor, again: object) -> Tensor:
        if self.options.loss != "rcfl":
            return DISTANCES[self.options.loss](z, target)
        share = min(1.0, len(self.site.train(moment.stage)) / len(self.site.public()))
        return DISTANCES["l1"](z, (target + share * z.detach()) / (1 + share))

    def share(self, request: Empty, moment: Moment) -> Weights:
        """All weights and buffers, where all clients have the same network."""
        return Weights(self.learner.weights)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows."""
        options = self.options
        if request.weights:
            self.learner.weights = {n: w.to(self.site.device) for n, w in request.weights.items()}
        self.site.witness("others", moment, self._checked, "fedmd")
        index = self.site.clients.index(self.site.id)
        epochs = options.epochs_each[index] if options.epochs_each else options.epochs
        done = yield self._local(
            Lessons(options.batch, epochs, self.site.stream("fit", moment)), moment
        )
        if all(bool(torch.isfinite(w).all()) for w in done.weights.values()):
            self.learner.weights = self.last = done.weights
        self.site.witness("own", moment, self._checked, "fedmd")
        return Trained(done.losses["loss"])

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the model, and the one before any exchange, on a domain."""
        return self._checked(request.task)

    def _checked(self, task: int) -> Checked:
        rows = self.site.test(task)
        models = {"fedmd": self.learner.weights, "solo": self.solo}
        found = {n: self.learner.counted(w, rows, self.options.top) for n, w in models.items()}
        correct = {name: count for name, (count, _) in found.items()}
        return Checked(len(rows), correct, {name: f1 for name, (_, f1) in found.items()})

    def state(self) -> Tensors:
        kept = prefixed("last", self.last) | prefixed("solo", self.solo)
        return prefixed("learner", self.learner.state()) | kept

    def restore(self, state: Tensors) -> None:
        self.learner.restore(without("learner", state))
        self.last, self.solo = copied(without("last", state)), copied(without("solo", state))


def plan(options: Options) -> Plan:
    """How public images are gone through."""
    return Plan(options.public_batch, options.public_epochs, options.augment)


def by_class(reliability: Mapping[str, Tensor], answers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean of all logits, each class weighed by how far each client is to be trusted there."""
    ids = sorted(answers)
    trust = torch.stack([reliability[id] for id in ids]).double()[:, None]
    stacked = torch.stack([answers[id] for id in ids])
    target = ((trust * stacked).sum(0) / trust.sum(0)).to(stacked.dtype)
    return dict.fromkeys(answers, target)


class Server:
    """Takes the mean of logits; holds nothing."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Move logits on public images together, then train everywhere."""
        roll, notes = Roll(clients, self.options.absent), dict[str, float]()
        if moment.stage == 0 and moment.first:
            notes |= self._begin(roll)
        if self.options.loss != "none":
            notes["aligned"] = self._collaborate(roll, moment)
        shared: Tensors = {}
        if self.options.average:
            replies = roll.ask(Client.share, dict.fromkeys(roll.ids, Empty()))
            shared = mean([reply.weights for reply in replies.values()])
        fitted = roll.ask(Client.fit, dict.fromkeys(roll.ids, Weights(shared)))
        notes["loss"] = sum(reply.loss for reply in fitted.values()) / len(fitted)
        return notes | roll.notes

    def _begin(self, roll: Roll) -> dict[str, float]:
        public = self.site.public()
        if len(public) < self.options.public_batch:
            what = f"{len(public)} public images do not fill a batch of {self.options.public_batch}"
            raise UserError(what, "method.public_batch", "make it smaller, or raise public.rows")
        roll.agree(Client.join, Join(public.fingerprint, len(public), list(self.site.classes)))
        replies = roll.ask(Client.prepare, dict.fromkeys(roll.ids, Empty()))
        return {"prepared": sum(reply.loss for reply in replies.values()) / len(replies)}

    def _collaborate(self, roll: Roll, moment: Moment) -> float:
        combine = average
        if self.options.loss == "rcfl":
            rated = roll.ask(Client.rate, dict.fromkeys(roll.ids, Empty()))
            combine = partial(by_class, {id: reply.reliability for id, reply in rated.items()})
        steps = plan(self.options).steps(self.site.public())
        shape = (self.options.public_batch, len(self.site.classes))
        key = self.site.stream("public", moment).key
        return collaborate(roll, Client.align, key, steps, shape, combine)

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client on every domain."""
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        return {}  # nothing outlives a round

    def restore(self, state: Tensors) -> None:
        pass


METHOD = Method(Options, Server, Client, split="domains", headline="fedmd")
