"""FedMatch: clients agree on public images with the few others whose outputs are nearest.

Jeong, Yoon, Yang, Hwang, Federated Semi-Supervised Learning with Inter-Client Consistency and
Disjoint Learning, ICLR 2021, as section h of the FCCL specification adapts it to other networks:
the helpers' logits travel instead of their models, and there is one set of weights, not two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
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
    collaborate,
    met,
)
from atoll.learning.distill import taught_loss
from atoll.learning.train import Optimiser, Work
from atoll.learning.weights import copied
from atoll.methods import Method


@dataclass(frozen=True)
class Options:
    """The options of `fedmatch`; section h of the FCCL specification."""

    helpers: AtLeastOne = 2  # other clients whose logits a client is sent; at most all of them
    refresh: AtLeastOne = 10  # rounds after which helpers are chosen anew
    confidence: Fraction = 0.75  # a public image counts if the own network is as sure as this
    lambda_s: Positive = 10.0  # weight of the labels in local training
    lambda_iccs: NotNegative = 0.01  # weight of both losses on public images
    public_batch: AtLeastOne = 512  # images in a public step; what is left over is dropped
    public_epochs: AtLeastOne = 1  # passes over the public images in a round
    rate: Positive = 0.001  # size of a step of Adam, in all phases
    batch: AtLeastOne = 512  # private rows in a local step
    epochs: AtLeastOne = 20  # passes over the private rows in a round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same by client, in their order; empty: epochs
    pretrain_epochs: NotNegativeInt = 50  # passes over the private rows before the first round
    top: AtLeastOne = 1  # a test row is right if its class is among so many of the likeliest


@dataclass(frozen=True)
class Trained:
    """The mean loss of local training."""

    loss: float


def consistency(weak: Tensor, strong: Tensor, helpers: Tensor, confidence: float) -> Tensor:
    """(1/H) sum_h KL(p_h || q_weak) + CE(vote, q_strong), the mean over the rows that count.

    The vote is the class that most of the client and its helpers name; the lowest if several are.
    """
    counts = (F.softmax(weak.detach(), -1).amax(-1) >= confidence).to(weak.dtype)
    log_p, log_q = F.log_softmax(helpers, -1), F.log_softmax(weak, -1)
    agree = (log_p.exp() * (log_p - log_q)).sum(-1).mean(0)
    named = torch.cat([weak.detach()[None], helpers]).argmax(-1)
    vote = F.one_hot(named, weak.shape[-1]).sum(0).argmax(-1)
    each = agree + F.cross_entropy(strong, vote, reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1)


class Client:
    """Keeps its model."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if options.epochs_each and len(options.epochs_each) != len(site.clients):
            what = f"epochs_each has {len(options.epochs_each)} numbers for {len(site.clients)}"
            raise UserError(f"{what} clients", "method.epochs_each", "give one for each")
        self.plan = plan(options)
        self.learner = Learner(site.model(), site.public(), self.plan)

    def join(self, request: Join, moment: Moment) -> Joined:
        """Say which public images and classes this site has; refuse others."""
        public = self.site.public()
        mine = Joined(public.fingerprint, len(public), list(self.site.classes))
        return met(request, mine, self.site.id)

    def prepare(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train alone, before any exchange."""
        epochs, stream = self.options.pretrain_epochs, self.site.stream("prepare")
        done = yield self._local(Lessons(self.options.batch, epochs, stream), moment, 1.0)
        self.learner.weights = done.weights
        return Trained(done.losses["loss"])

    def _local(self, lessons: Lessons, moment: Moment, truth: float) -> Work:
        loss = partial(taught_loss, network=self.learner.training, truth=truth)
        how = Optimiser("adam", self.options.rate)
        return self.learner.work(lessons, self.site.train(moment.stage), loss, how)

    def align(self, request: Align, moment: Moment) -> Aligned:
        """Follow the helpers on the step before; answer for this one."""
        learner, place, loss = self.learner, (moment.stage, moment.round), 0.0
        if request.step:
            learner.moments = {}
            step, helpers = request.step - 1, request.target.to(self.site.device)
            images = self.plan.images(self.site.public(), request.key, step, strong=True)
            options, how = self.options, Optimiser("adam", self.options.rate)
            loss = learner.follow(
                place,
                request.key,
                step,
                lambda weak, again: (
                    options.lambda_iccs
                    * consistency(weak, again(images), helpers, options.confidence)
                ),
                how,
            )
        if request.step == self.plan.steps(self.site.public()):
            return Aligned(torch.zeros(0), loss)
        return Aligned(learner.logits(place, request.key, request.step), loss)

    def fit(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train on the own rows."""
        options, index = self.options, self.site.clients.index(self.site.id)
        epochs = options.epochs_each[index] if options.epochs_each else options.epochs
        lessons = Lessons(options.batch, epochs, self.site.stream("fit", moment))
        done = yield self._local(lessons, moment, options.lambda_s)
        self.learner.weights = done.weights
        return Trained(done.losses["loss"])

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the model on a domain."""
        rows = self.site.test(request.task)
        correct, f1 = self.learner.counted(self.learner.weights, rows, self.options.top)
        return Checked(len(rows), {"": correct}, {"": f1})

    def state(self) -> Tensors:
        return self.learner.state()

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)


def plan(options: Options) -> Plan:
    """How public images are gone through: plain ones are answered for."""
    return Plan(options.public_batch, options.public_epochs, False)


def nearest(answers: Mapping[str, Tensor], count: int) -> dict[str, list[str]]:
    """For each client the others whose softmax outputs are nearest, the nearest first."""
    said = {id: F.softmax(z.double(), -1) for id, z in answers.items()}
    return {
        id: sorted(
            (other for other in sorted(said) if other != id),
            key=lambda other, own=said[id]: float(((said[other] - own) ** 2).sum()),  # type: ignore[misc]
        )[:count]
        for id in sorted(said)
    }


class Server:
    """Remembers who helps whom."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.helpers: dict[str, list[str]] = {}

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Agree with helpers on public images, then train everywhere."""
        roll, notes, public = Roll(clients, 0), dict[str, float](), self.site.public()
        if moment.stage == 0 and moment.first:
            wanted = Join(public.fingerprint, len(public), list(self.site.classes))
            roll.agree(Client.join, wanted)
            prepared = clients.ask_all(Client.prepare, Empty())
            notes["prepared"] = sum(reply.loss for reply in prepared.values()) / len(prepared)
        if moment.round % self.options.refresh == 0:
            self.helpers = {}  # chosen by the first answers of this round
        key, shape = self.site.stream("public", moment).key, self._shape
        steps = plan(self.options).steps(public)
        notes["aligned"] = collaborate(roll, Client.align, key, steps, shape, self._help)
        fitted = clients.ask_all(Client.fit, Empty())
        return notes | {"loss": sum(reply.loss for reply in fitted.values()) / len(fitted)}

    @property
    def _shape(self) -> tuple[int, int]:
        return self.options.public_batch, len(self.site.classes)

    def _help(self, answers: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.helpers:
            self.helpers = nearest(answers, min(self.options.helpers, len(answers) - 1))
        return {id: torch.stack([answers[h] for h in self.helpers[id]]) for id in answers}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client on every domain."""
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        ids = list(self.site.clients)
        table = [[ids.index(h) for h in self.helpers[id]] for id in sorted(self.helpers)]
        return {"helpers": torch.tensor(table)} if table else {}

    def restore(self, state: Tensors) -> None:
        ids, table = list(self.site.clients), copied(state).get("helpers", torch.zeros(0))
        self.helpers = {ids[i]: [ids[int(h)] for h in row] for i, row in enumerate(table)}


METHOD = Method(Options, Server, Client, split="domains")
