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
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.annotations import Bounded
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegativeInt, Positive
from atoll.core.record import Look, Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.families.distillation import (
    Again,
    Align,
    Aligned,
    Join,
    Joined,
    Learner,
    Lessons,
    Plan,
    Roll,
    Trained,
    average,
    collaborate,
    epochs_at,
    filled,
    met,
    prepared,
    shared,
)
from atoll.jobs.train import Optimiser
from atoll.learning.distill import DISTANCES

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
class Rated:
    """How far a client can be trusted with each class."""

    reliability: Annotated[
        Tensor, Bounded(0.0, 1.0)
    ]  # (classes,), its accuracy on its own rows of that class


class Client:
    """Keeps its model, that of the last round, and the one before any exchange."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.epochs = epochs_at(options.epochs_each, options.epochs, site.clients, site.id)
        self.learner = Learner(site.model(), site.public(), plan(options))

    def join(self, request: Join, moment: Moment) -> Joined:
        """Say which public images and classes this site has; refuse others."""
        return met(request, self.site.public(), self.site.classes, self.site.id)

    def prepare(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train alone, before any exchange."""
        options, stream = self.options, self.site.stream("prepare")
        lessons = Lessons(options.batch, options.pretrain_epochs, stream)
        work = self.learner.alone(lessons, self.site.before(moment.stage), options.rate)
        return self.learner.begun((yield work))

    def rate(self, request: Empty, moment: Moment) -> Rated:
        """The accuracy on the own rows, class by class (RCFL)."""
        rows, classes = self.site.train(moment.stage), len(self.site.classes)
        right = self.learner.says(self.learner.weights, rows.x).argmax(-1) == rows.y
        hit = torch.bincount(rows.y[right], minlength=classes)
        there = torch.bincount(rows.y, minlength=classes).clamp(min=1)
        return Rated((hit / there).clamp(min=LEAST).float())

    def align(self, request: Align, moment: Moment) -> Working[Aligned]:
        """Follow the target of the step before; answer for this one."""
        learner, options, own = self.learner, self.options, 0.0
        if request.step == 0:
            learner.rewind()
        if options.loss == "rcfl":
            own = min(1.0, len(self.site.train(moment.stage)) / len(self.site.public()))
        loss = partial(distance, kind="l1" if options.loss == "rcfl" else options.loss, own=own)
        given, how = (
            {"target": request.target.to(self.site.device)},
            Optimiser("adam", options.rate),
        )
        fresh = options.public_optimiser == "fresh"
        return learner.stepped((yield learner.step(moment, request, loss, given, how, fresh=fresh)))

    def share(self, request: Empty, moment: Moment) -> Weights:
        """All weights and buffers, where all clients have the same network."""
        return Weights(self.learner.weights)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows."""
        options, learner = self.options, self.learner
        learner.receive(request.weights)
        self.site.witness("others", moment, self._checked, "fedmd")
        lessons = Lessons(options.batch, self.epochs, self.site.stream("fit", moment))
        rows, how = self.site.train(moment.stage), Optimiser("adam", options.rate)
        trained = learner.ended((yield learner.work(lessons, rows, learner.loss(), how)))
        self.site.witness("own", moment, self._checked, "fedmd")
        return trained

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the model, and the one before any exchange, on a domain."""
        return self._checked(request.task)

    def _checked(self, task: int) -> Checked:
        return self.learner.checked("fedmd", task, self.site.test(task), self.options.top)

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


def distance(z: Tensor, again: Again, given: Tensors, *, kind: str, own: float) -> Tensor:
    """How far logits are from the target; with RCFL the own ones have a share in it (alpha)."""
    target = given["target"]
    return DISTANCES[kind](z, (target + own * z.detach()) / (1 + own) if own else target)


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
        common = shared(roll, Client.share) if self.options.average else Weights({})
        fitted = roll.ask(Client.fit, dict.fromkeys(roll.ids, common))
        notes["loss"] = sum(reply.loss for reply in fitted.values()) / len(fitted)
        return notes | roll.notes

    def _begin(self, roll: Roll) -> dict[str, float]:
        public = self.site.public()
        filled(public, self.options.public_batch)
        roll.agree(Client.join, Join(public.fingerprint, len(public), list(self.site.classes)))
        return prepared(roll, Client.prepare)

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


METHOD = Method(
    *(Options, Server, Client),
    split="domains",
    headline="fedmd",
    quorum=True,
)
