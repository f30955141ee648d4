"""FedMatch: clients agree on public images with the few others whose outputs are nearest.

Jeong, Yoon, Yang, Hwang, Federated Semi-Supervised Learning with Inter-Client Consistency and
Disjoint Learning, ICLR 2021, as section h of the FCCL specification adapts it to other networks:
the helpers' logits travel instead of their models. There is one set of weights theta, or, with
`disjoint`, theta = sigma + psi: labels move sigma, public images move psi.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Empty, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
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
    collaborate,
    epochs_at,
    filled,
    met,
    prepared,
    shared,
)
from atoll.jobs.train import Optimiser
from atoll.learning.weights import copied, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `fedmatch`; section h of the FCCL specification."""

    helpers: AtLeastOne = 2  # other clients whose logits a client is sent; at most all of them
    refresh: AtLeastOne = 10  # rounds after which helpers are chosen anew
    confidence: Fraction = 0.75  # a public image counts if the own network is as sure as this
    lambda_s: Positive = 10.0  # weight of the labels in local training
    lambda_iccs: NotNegative = 0.01  # weight of both losses on public images
    disjoint: bool = False  # weights in two parts: labels move one, public images the other
    lambda_l1: NotNegative = 1e-4  # disjoint: weight of |psi|, so that few of it are not 0
    lambda_l2: NotNegative = 10.0  # disjoint: weight of |sigma - psi| squared
    public_batch: AtLeastOne = 512  # images in a public step; what is left over is dropped
    public_epochs: AtLeastOne = 1  # passes over the public images in a round
    rate: Positive = 0.001  # size of a step of Adam, in all phases
    batch: AtLeastOne = 512  # private rows in a local step
    epochs: AtLeastOne = 20  # passes over the private rows in a round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same by client, in their order; empty: epochs
    pretrain_epochs: NotNegativeInt = 50  # passes over the private rows before the first round
    average: bool = False  # homogeneous: the mean of all weights between the two phases
    absent: NotNegativeInt = 0  # clients that may fail in a round and are left out of it
    top: AtLeastOne = 1  # a test row is right if its class is among so many of the likeliest


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


def agreed(
    weak: Tensor, again: Again, given: Tensors, *, confidence: float, weight: float
) -> Tensor:
    """The loss of a public batch; `again` reads its strongly varied images."""
    strong, helpers = again(given["strong"]), given["helpers"]
    return weight * consistency(weak, strong, helpers, confidence)


class Client:
    """Keeps its model, that of the last round, and the one before any exchange."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site, self.plan = options, site, plan(options)
        self.epochs = epochs_at(options.epochs_each, options.epochs, site.clients, site.id)
        self.learner = Learner(site.model(), site.public(), self.plan)
        moves = self.learner.moves if options.disjoint else ()
        self.psi = {n: torch.zeros_like(self.learner.weights[n]) for n in moves}
        self.last_psi = self.psi

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
        """Follow the helpers on the step before; answer for this one."""
        learner, options = self.learner, self.options
        given: Tensors = {}
        if request.step == 0:
            learner.rewind()
            self.psi = self.last_psi
        else:
            public, step = self.site.public(), request.step - 1
            given["strong"] = self.plan.images(public, request.key, step, strong=True)
            given["helpers"] = request.target.to(self.site.device)
        loss = partial(agreed, confidence=options.confidence, weight=options.lambda_iccs)
        how = Optimiser("adam", options.rate)
        sigma = {n: learner.weights[n] - psi for n, psi in self.psi.items()}
        penalty = partial(self._penalty, sigma) if sigma else None
        done = yield learner.step(moment, request, loss, given, how, penalty=penalty)
        reply = learner.stepped(done)
        if request.step:
            self.psi = {n: learner.weights[n] - part for n, part in sigma.items()}
        return reply

    def _penalty(self, sigma: Tensors, theta: Tensors) -> Tensor:
        """lambda_l1 |psi| + lambda_l2 |sigma - psi|^2 with psi = theta - sigma; sigma rests."""
        parts = [(part, theta[n] - part) for n, part in sigma.items()]
        small = torch.stack([psi.abs().sum() for _, psi in parts]).sum()
        near = torch.stack([((part - psi) ** 2).sum() for part, psi in parts]).sum()
        return self.options.lambda_l1 * small + self.options.lambda_l2 * near

    def share(self, request: Empty, moment: Moment) -> Weights:
        """All weights and buffers, where all clients have the same network."""
        return Weights(self.learner.weights)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows."""
        options, learner = self.options, self.learner
        learner.receive(request.weights)
        lessons = Lessons(options.batch, self.epochs, self.site.stream("fit", moment))
        rows, loss = self.site.train(moment.stage), learner.loss(truth=options.lambda_s)
        work = learner.work(lessons, rows, loss, Optimiser("adam", options.rate))
        self.last_psi = self.psi  # labels move sigma, so psi stays as public images left it
        return learner.ended((yield work))

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the model, and the one before any exchange, on a domain."""
        rows = self.site.test(request.task)
        return self.learner.checked("fedmatch", request.task, rows, self.options.top)

    def look(self, moment: Moment) -> list[Look]:
        """What this site sees of its own network; it stays here."""
        tests = {name: self.site.test(task) for task, name in enumerate(self.site.tasks)}
        own = self.site.tasks[self.site.clients.index(self.site.id) % len(tests)]
        return self.learner.look(self.site.id, moment.stage, tests, own)

    def state(self) -> Tensors:
        halves = prefixed("psi", self.psi) | prefixed("last_psi", self.last_psi)
        return self.learner.state() | halves

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)
        self.psi, self.last_psi = (copied(without(n, state)) for n in ("psi", "last_psi"))

    def final_model(self, shared: Tensors, variant: str) -> Tensors:
        """The model of now, or the one before any exchange."""
        return self.learner.kept(variant)

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        return self.learner.says(model, rows.x)


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
        roll, notes = Roll(clients, self.options.absent), dict[str, float]()
        if moment.stage == 0 and moment.first:
            notes |= self._begin(roll)
        if moment.round % self.options.refresh == 0:
            self.helpers = {}  # chosen by the first answers of this round
        key, steps = (
            self.site.stream("public", moment).key,
            plan(self.options).steps(self.site.public()),
        )
        notes["aligned"] = collaborate(roll, Client.align, key, steps, self._shape, self._help)
        common = shared(roll, Client.share) if self.options.average else Weights({})
        fitted = roll.ask(Client.fit, dict.fromkeys(roll.ids, common))
        notes["loss"] = sum(reply.loss for reply in fitted.values()) / len(fitted)
        return notes | roll.notes

    def _begin(self, roll: Roll) -> dict[str, float]:
        public = self.site.public()
        filled(public, self.options.public_batch)
        roll.agree(Client.join, Join(public.fingerprint, len(public), list(self.site.classes)))
        return prepared(roll, Client.prepare)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.options.public_batch, len(self.site.classes)

    def _help(self, answers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The helpers' logits for each; a helper that failed is replaced by the next nearest."""
        known = {h for helpers in self.helpers.values() for h in helpers}
        if self.helpers.keys() != answers.keys() or not known <= answers.keys():
            self.helpers = nearest(answers, min(self.options.helpers, len(answers) - 1))
        return {id: torch.stack([answers[h] for h in self.helpers[id]]) for id in answers}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client on every domain."""
        return scores(clients, Client.check, {}, moment)

    def state(self) -> Tensors:
        ids = list(self.site.clients)
        table = [[ids.index(id), *map(ids.index, self.helpers[id])] for id in sorted(self.helpers)]
        return {"helpers": torch.tensor(table)} if table else {}

    def restore(self, state: Tensors) -> None:
        ids, table = list(self.site.clients), copied(state).get("helpers", torch.zeros(0))
        named = [[ids[int(number)] for number in row] for row in table]
        self.helpers = {id: helpers for id, *helpers in named}


METHOD = Method(
    *(Options, Server, Client),
    split="domains",
    headline="fedmatch",
    quorum=True,
)
