"""FCCL: clients with different networks and domains align their logits on public images.

Huang, Ye, Du, Learn from Others and Be Yourself in Heterogeneous Federated Learning, CVPR 2022.

A round has two phases. In the collaborative one every client moves the cross-correlation of its
logits with the mean logits towards 1 on the diagonal and below 0 elsewhere. In the local one it
trains on its own rows and stays near two frozen teachers: itself before the round (which knows what
the others said) and itself before any exchange. Only logits on public images cross. Letters follow
sections b and d of the specification: Z are logits, M is their cross-correlation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
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
from atoll.learning.distill import correlation, correlation_loss, taught_loss
from atoll.learning.train import Optimiser
from atoll.learning.weights import copied, mean, prefixed, without
from atoll.methods import Method

Unit = Annotated[float, Field(ge=0, le=1)]
Ten = Annotated[float, Field(ge=0, le=10)]


@dataclass(frozen=True)
class Options:
    """The options of `fccl`; sections f and j of the specification."""

    lambda_col: Unit = 0.0051  # weight of the off-diagonal part of the correlation loss
    lambda_loc: Ten = 1.0  # weight of the teachers in local training; 0: without the continual part
    off_diagonal: Literal[-1, 0] = -1  # what correlations of different classes are pushed to
    teachers: Literal["both", "inter", "intra"] = "both"  # inter: last round's, intra: before all
    temperature: Positive = 1.0  # of both teachers
    collaborate: bool = True  # false: without the collaborative part
    own_target: Literal["plain", "progressive"] = "plain"  # progressive: own share by last round's
    exchange: Literal["batch", "round"] = "batch"  # round: all logits once, then steps at home
    public_optimiser: Literal["fresh", "persistent"] = (
        "fresh"  # Adam's moments over a round's steps
    )
    public_batch: AtLeastOne = 512  # images in a public step; what is left over is dropped
    public_epochs: AtLeastOne = 1  # passes over the public images in a round
    augment: bool = True  # move, mirror and turn public images, alike at all clients
    rate: Positive = 0.001  # size of a step of Adam, in all phases
    rate_decay: Literal["none", "linear"] = "none"  # linear: times 1 - 0.9 t/T in round t of T
    weight_decay: NotNegative = 0.0  # of the local phase
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


class Client:
    """Keeps its model, that of the last round, and the one before any exchange."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if options.epochs_each and len(options.epochs_each) != len(site.clients):
            what = f"epochs_each has {len(options.epochs_each)} numbers for {len(site.clients)}"
            raise UserError(f"{what} clients", "method.epochs_each", "give one for each")
        self.plan = plan(options)
        self.learner = Learner(site.model(), site.public(), self.plan)
        self.last = self.learner.weights  # theta^(t-1), the inter teacher
        self.solo = self.learner.weights  # theta*, the intra teacher

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
        loss = partial(taught_loss, network=self.learner.training)
        rows = self.site.train(moment.stage)
        done = yield self.learner.work(lessons, rows, loss, Optimiser("adam", self.options.rate))
        self.learner.weights = self.last = self.solo = done.weights
        return Trained(done.losses["loss"])

    def align(self, request: Align, moment: Moment) -> Aligned:
        """Follow the target of the step before; answer for this one."""
        public, learner = self.site.public(), self.learner
        if request.step == 0:  # a client that was left out in its last round begins anew
            learner.weights, learner.moments = self.last, {}
        if self.options.exchange == "round":
            return self._align_once(request, moment)
        loss, place = 0.0, (moment.stage, moment.round)
        if request.step:
            loss = self._follow(request, request.step - 1, request.target, moment)
        if request.step == self.plan.steps(public):
            return Aligned(torch.zeros(0), loss)
        return Aligned(learner.logits(place, request.key, request.step), loss)

    def _align_once(self, request: Align, moment: Moment) -> Aligned:
        """All logits at once, or all steps of the round by what came back."""
        public = self.site.public()
        if request.step == 0:
            x = (public.x - public.mean) / public.deviation
            return Aligned(self.learner.says(self.learner.weights, x), 0.0)
        steps, total = self.plan.steps(public), 0.0
        for step in range(steps):
            rows = self.plan.rows(public, request.key, step).to(request.target.device)
            total += self._follow(request, step, request.target[rows], moment)
        return Aligned(torch.zeros(0), total / max(1, steps))

    def _follow(self, request: Align, step: int, target: Tensor, moment: Moment) -> float:
        options, learner = self.options, self.learner
        target = target.to(self.site.device)
        if options.public_optimiser == "fresh":
            learner.moments = {}
        earlier = None
        if options.own_target == "progressive":
            x = self.plan.images(self.site.public(), request.key, step)
            earlier = learner.says(self.last, x)

        def loss(z: Tensor, again: object) -> Tensor:
            mixed = target if earlier is None else target + (earlier - z.detach()) / request.count
            m = correlation(z, mixed)
            return correlation_loss(m, options.lambda_col, float(options.off_diagonal))

        place, how = (moment.stage, moment.round), Optimiser("adam", rate(options, moment))
        return learner.follow(place, request.key, step, loss, how)

    def share(self, request: Empty, moment: Moment) -> Weights:
        """All weights and buffers, where all clients have the same network."""
        return Weights(self.learner.weights)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows, near both teachers."""
        options, learner = self.options, self.learner
        if request.weights:
            learner.weights = {n: w.to(self.site.device) for n, w in request.weights.items()}
        self.site.witness("others", moment, self._checked, "fccl")
        which = options.teachers
        strengths = tuple(options.lambda_loc * (which in ("both", t)) for t in ("inter", "intra"))
        rows = self._taught(self.site.train(moment.stage)) if any(strengths) else None
        loss = partial(
            taught_loss,
            network=learner.training,
            strengths=strengths,
            temperature=options.temperature,
        )
        index = self.site.clients.index(self.site.id)
        epochs = options.epochs_each[index] if options.epochs_each else options.epochs
        lessons = Lessons(options.batch, epochs, self.site.stream("fit", moment))
        how = Optimiser("adam", rate(options, moment), options.weight_decay)
        done = yield learner.work(lessons, rows or self.site.train(moment.stage), loss, how)
        if all(bool(torch.isfinite(w).all()) for w in done.weights.values()):
            learner.weights = self.last = done.weights
        self.site.witness("own", moment, self._checked, "fccl")
        return Trained(done.losses["loss"])

    def _taught(self, rows: Rows) -> Rows:
        """The rows with what both teachers, frozen and in testing, say of them."""
        logits = [self.learner.says(weights, rows.x) for weights in (self.last, self.solo)]
        return replace(rows, own=torch.cat(logits, -1))

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the model, and the one before any exchange, on a domain."""
        return self._checked(request.task)

    def _checked(self, task: int) -> Checked:
        rows = self.site.test(task)
        models = {"fccl": self.learner.weights, "solo": self.solo}
        found = {n: self.learner.counted(w, rows, self.options.top) for n, w in models.items()}
        correct = {name: count for name, (count, _) in found.items()}
        return Checked(len(rows), correct, {name: f1 for name, (_, f1) in found.items()})

    def state(self) -> Tensors:
        teachers = prefixed("last", self.last) | prefixed("solo", self.solo)
        return prefixed("learner", self.learner.state()) | teachers

    def restore(self, state: Tensors) -> None:
        self.learner.restore(without("learner", state))
        self.last, self.solo = copied(without("last", state)), copied(without("solo", state))


def plan(options: Options) -> Plan:
    """How public images are gone through; those of one exchange a round are not varied."""
    varied = options.augment and options.exchange == "batch"
    return Plan(options.public_batch, options.public_epochs, varied)


def rate(options: Options, moment: Moment) -> float:
    """The size of a step in this round."""
    linear = options.rate_decay == "linear"
    return options.rate * (1 - 0.9 * moment.round / moment.rounds if linear else 1)


class Server:
    """Takes the mean of logits; holds nothing."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Collaborate on public images, then train everywhere."""
        roll, notes = Roll(clients, self.options.absent), dict[str, float]()
        if moment.stage == 0 and moment.first:
            notes |= self._begin(roll)
        if self.options.collaborate:
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
        public, options = self.site.public(), self.options
        key, classes = self.site.stream("public", moment).key, len(self.site.classes)
        once = options.exchange == "round"
        steps = 1 if once else plan(options).steps(public)
        shape = (len(public) if once else options.public_batch, classes)
        return collaborate(roll, Client.align, key, steps, shape, average)

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client on every domain."""
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        return {}  # nothing outlives a round

    def restore(self, state: Tensors) -> None:
        pass


METHOD = Method(Options, Server, Client, split="domains", headline="fccl")
