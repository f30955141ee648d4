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

from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, Positive
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
    matrix_look,
    met,
    prepared,
    shared,
)
from atoll.jobs.train import Optimiser
from atoll.learning.distill import correlation, correlation_loss

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


class Client:
    """Keeps its model, that of the last round, and the one before any exchange."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site, self.plan = options, site, plan(options)
        self.epochs = epochs_at(options.epochs_each, options.epochs, site.clients, site.id)
        self.learner = Learner(site.model(), site.public(), self.plan)
        self.m = torch.zeros((len(site.classes),) * 2, device=site.device)  # M of the last step

    def join(self, request: Join, moment: Moment) -> Joined:
        """Say which public images and classes this site has; refuse others."""
        return met(request, self.site.public(), self.site.classes, self.site.id)

    def prepare(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train alone, before any exchange."""
        options, stream = self.options, self.site.stream("prepare")
        lessons = Lessons(options.batch, options.pretrain_epochs, stream)
        work = self.learner.alone(lessons, self.site.before(moment.stage), options.rate)
        return self.learner.begun((yield work))

    def align(self, request: Align, moment: Moment) -> Working[Aligned]:
        """Follow the target of the step before; answer for this one."""
        if request.step == 0:
            self.learner.rewind()
        if self.options.exchange == "round":
            return (yield from self._align_once(request, moment))
        return (yield from self._step(request, moment))

    def _align_once(self, request: Align, moment: Moment) -> Working[Aligned]:
        """All logits at once, or all steps of the round by what came back."""
        public, learner = self.site.public(), self.learner
        if request.step == 0:
            x = (public.x - public.mean) / public.deviation
            return Aligned(learner.says(learner.weights, x), 0.0)
        steps, total = self.plan.steps(public), 0.0
        for step in range(steps):
            rows = self.plan.rows(public, request.key, step).to(request.target.device)
            one = replace(request, step=step + 1, target=request.target[rows])
            total += (yield from self._step(one, moment)).loss
        return Aligned(torch.zeros(0), total / max(1, steps))

    def _step(self, request: Align, moment: Moment) -> Working[Aligned]:
        options, learner = self.options, self.learner
        given = {"target": request.target.to(self.site.device)}
        if request.step and options.own_target == "progressive":
            x = self.plan.images(self.site.public(), request.key, request.step - 1)
            given["earlier"] = learner.says(learner.last, x)
            given["count"] = torch.tensor(request.count).to(given["earlier"])
        strength, target = options.lambda_col, float(options.off_diagonal)
        loss = partial(aligned_loss, strength=strength, off_diagonal=target)
        how, fresh = Optimiser("adam", rate(options, moment)), options.public_optimiser == "fresh"
        done = yield learner.step(moment, request, loss, given, how, fresh=fresh)
        if done.followed is not None:
            self.m = correlation(done.followed, wanted(done.followed, given)).float()
        return learner.stepped(done)

    def share(self, request: Empty, moment: Moment) -> Weights:
        """All weights and buffers, where all clients have the same network."""
        return Weights(self.learner.weights)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows, near both teachers."""
        options, learner = self.options, self.learner
        learner.receive(request.weights)
        self.site.witness("others", moment, self._checked, "fccl")
        which, rows = options.teachers, self.site.train(moment.stage)
        strengths = tuple(options.lambda_loc * (which in ("both", t)) for t in ("inter", "intra"))
        if any(strengths):
            rows = self._taught(rows)
        loss = learner.loss(strengths=strengths, temperature=options.temperature)
        lessons = Lessons(options.batch, self.epochs, self.site.stream("fit", moment))
        how = Optimiser("adam", rate(options, moment), options.weight_decay)
        trained = learner.ended((yield learner.work(lessons, rows, loss, how)))
        self.site.witness("own", moment, self._checked, "fccl")
        return trained

    def _taught(self, rows: Rows) -> Rows:
        """The rows with what both teachers, frozen and in testing, say of them."""
        learner = self.learner
        both = [learner.says(learner.last, rows.x), learner.solo_says(rows.x)]
        return replace(rows, own=torch.cat(both, -1))

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the model, and the one before any exchange, on a domain."""
        return self._checked(request.task)

    def _checked(self, task: int) -> Checked:
        return self.learner.checked("fccl", task, self.site.test(task), self.options.top)

    def look(self, moment: Moment) -> list[Look]:
        """What this site sees of its own network; it stays here."""
        tests = {name: self.site.test(task) for task, name in enumerate(self.site.tasks)}
        own = self.site.tasks[self.site.clients.index(self.site.id) % len(tests)]
        found = self.learner.look(self.site.id, moment.stage, tests, own)
        m = matrix_look(self.site.id, moment.stage, "correlation, public images", self.m)
        return [*found, m] if self.options.collaborate else found

    def state(self) -> Tensors:
        return self.learner.state() | {"seen/m": self.m}

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)
        self.m = state["seen/m"].clone()

    def final_model(self, shared: Tensors, variant: str) -> Tensors:
        """The model of now, or the one before any exchange."""
        return self.learner.kept(variant)

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        return self.learner.says(model, rows.x)


def wanted(z: Tensor, given: Tensors) -> Tensor:
    """What logits are correlated with: the target, or that with the own share of last round's."""
    if "earlier" not in given:
        return given["target"]
    return given["target"] + (given["earlier"] - z.detach()) / given["count"]


def aligned_loss(
    z: Tensor, again: Again, given: Tensors, *, strength: float, off_diagonal: float
) -> Tensor:
    """L_col of a public batch."""
    return correlation_loss(correlation(z, wanted(z, given)), strength, off_diagonal)


def plan(options: Options) -> Plan:
    """How public images are gone through; those of one exchange a round are not varied."""
    varied = options.augment and options.exchange == "batch"
    return Plan(options.public_batch, options.public_epochs, varied)


def rate(options: Options, moment: Moment) -> float:
    """The size of a step in this round."""
    linear = options.rate_decay == "linear"
    return options.rate * (1 - 0.9 * moment.round / moment.rounds if linear else 1)


def _seen(said: dict[str, Tensor]) -> dict[str, float]:
    """How clients' logits go together with their mean, class by class, for the record."""
    target = average(said)
    m = torch.stack([correlation(z, target[id]) for id, z in said.items()]).mean(0)
    diagonal, classes = float(m.diagonal().mean()), len(m)
    rest = (float(m.sum()) - classes * diagonal) / max(1, classes * (classes - 1))
    return {"diagonal": diagonal, "off diagonal": rest}


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
            notes |= self._collaborate(roll, moment)
        common = shared(roll, Client.share) if self.options.average else Weights({})
        fitted = roll.ask(Client.fit, dict.fromkeys(roll.ids, common))
        notes["loss"] = sum(reply.loss for reply in fitted.values()) / len(fitted)
        return notes | roll.notes

    def _begin(self, roll: Roll) -> dict[str, float]:
        public = self.site.public()
        filled(public, self.options.public_batch)
        roll.agree(Client.join, Join(public.fingerprint, len(public), list(self.site.classes)))
        return prepared(roll, Client.prepare)

    def _collaborate(self, roll: Roll, moment: Moment) -> dict[str, float]:
        """The mean loss, and the mean of M on and off its diagonal at the round's last exchange."""
        public, options, said = self.site.public(), self.options, dict[str, Tensor]()
        key, classes = self.site.stream("public", moment).key, len(self.site.classes)
        once = options.exchange == "round"
        steps = 1 if once else plan(options).steps(public)
        shape = (len(public) if once else options.public_batch, classes)

        def combine(answers: dict[str, Tensor]) -> dict[str, Tensor]:
            said.clear()
            said.update(answers)
            return average(answers)

        aligned = collaborate(roll, Client.align, key, steps, shape, combine)
        return {"aligned": aligned, **_seen(said)}

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
    headline="fccl",
    quorum=True,
)
