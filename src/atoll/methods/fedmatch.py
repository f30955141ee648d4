"""FedMatch: clients agree on public images with the few others whose outputs are nearest.

Jeong, Yoon, Yang, Hwang, Federated Semi-Supervised Learning with Inter-Client Consistency and
Disjoint Learning, ICLR 2021, for networks that differ: the helpers' logits travel, not models.
The weights are theta, or, with `disjoint`, theta = sigma + psi: labels move sigma, images move psi.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.federation import Clients, Moment, Working
from atoll.core.messages import Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
from atoll.data.site import Site
from atoll.families import distillation
from atoll.families.distillation import Again, Align, Aligned, Exchange, Learner, Plan, Trained
from atoll.learning.augment import strongly
from atoll.learning.distill import distillation_loss, divergences
from atoll.learning.weights import copied, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `fedmatch`; section h of the FCCL specification."""

    helpers: AtLeastOne = 2  # number of helpers; at most all other clients
    refresh: AtLeastOne = 10  # rounds between selections of helpers
    confidence: Fraction = 0.75  # largest probability from which a public image counts
    lambda_s: Positive = 10.0  # weight of the labels in local training
    lambda_iccs: NotNegative = 0.01  # weight of both losses on public images
    disjoint: bool = False  # weights in two parts: labels move one, public images the other
    lambda_l1: NotNegative = 1e-4  # with disjoint: weight of the sum of all absolute values of psi
    lambda_l2: NotNegative = 10.0  # with disjoint: weight of the squared distance of sigma and psi
    public_batch: AtLeastOne = 512  # batch size of a public step; the rest is dropped
    public_epochs: AtLeastOne = 1  # epochs over the public images per round
    rate: Positive = 0.001  # learning rate of Adam
    batch: AtLeastOne = 512  # batch size of local training
    epochs: AtLeastOne = 20  # local epochs per round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same, one number per client in order
    pretrain_epochs: NotNegativeInt = 50  # epochs of local pretraining before the first round
    average: bool = False  # for equal networks: average all weights and buffers between the phases
    absent: NotNegativeInt = 0  # clients that may fail in a round; the record names them
    top: AtLeastOne = 1  # top-k accuracy: the class must be among the k likeliest


def consistency(weak: Tensor, strong: Tensor, helpers: Tensor, confidence: float) -> Tensor:
    """(1/H) sum_h KL(p_h || q_weak) + CE(vote, q_strong), the mean over the confident rows."""
    confident = (F.softmax(weak.detach(), -1).amax(-1) >= confidence).to(weak.dtype)
    predicted = torch.cat([weak.detach()[None], helpers]).argmax(-1)
    vote = F.one_hot(predicted, weak.shape[-1]).sum(0).argmax(-1)  # of all; ties: the lowest
    losses = F.cross_entropy(strong, vote, reduction="none")
    if len(helpers):
        losses = divergences(helpers, weak).mean(0) + losses
    return (losses * confident).sum() / confident.sum().clamp(min=1)


def public_loss(
    weak: Tensor, again: Again, constants: Tensors, *, confidence: float, weight: float
) -> Tensor:
    """lambda_iccs times the consistency; `again` reads the strongly augmented images."""
    return weight * consistency(weak, again(constants["strong"]), constants["helpers"], confidence)


def nearest(answers: Mapping[str, Tensor], count: int) -> dict[str, list[str]]:
    """For each client the others whose softmax outputs are nearest, the nearest first."""
    outputs = {id: F.softmax(z.double(), -1) for id, z in sorted(answers.items())}
    helpers = {}
    for id, own in outputs.items():
        distances = {o: float(((p - own) ** 2).sum()) for o, p in outputs.items() if o != id}
        helpers[id] = sorted(distances, key=distances.__getitem__)[:count]
    return helpers


class Client:
    """Keeps its model, the model of the last round, and the model before any exchange."""

    join, prepare, share = distillation.join, distillation.prepare, distillation.share
    check, snapshot = distillation.check, distillation.snapshot
    final_model, predict = distillation.final_model, distillation.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.plan = Plan(options.public_batch, options.public_epochs)
        self.learner = Learner("fedmatch", options, site, self.plan)
        moves = self.learner.moves if options.disjoint else ()
        self.psi = self.last_psi = {n: torch.zeros_like(self.learner.weights[n]) for n in moves}

    def align(self, request: Align, moment: Moment) -> Working[Aligned]:
        """Follow the helpers on the last batch, then return the logits of the next."""
        learner, options, constants = self.learner, self.options, dict[str, Tensor]()
        if request.step == 0:
            learner.rewind()
            self.psi = self.last_psi
        else:
            strong, public = replace(self.plan, augment=strongly), self.site.public()
            constants["strong"] = strong.images(public, request.key, request.step - 1)
            constants["helpers"] = request.target.to(self.site.device)
        sigma = {n: learner.weights[n] - psi for n, psi in self.psi.items()}
        loss = partial(public_loss, confidence=options.confidence, weight=options.lambda_iccs)
        penalty = partial(self._penalty, sigma) if sigma else None
        result = yield from learner.step(request, moment, loss, constants, penalty=penalty)
        if request.step:
            self.psi = {n: learner.weights[n] - part for n, part in sigma.items()}
        return distillation.aligned(result)

    def _penalty(self, sigma: Tensors, theta: Tensors) -> Tensor:
        """lambda_l1 |psi| + lambda_l2 |sigma - psi|^2 with psi = theta - sigma; sigma is fixed."""
        psi = {n: theta[n] - part for n, part in sigma.items()}
        l1 = torch.stack([part.abs().sum() for part in psi.values()]).sum()
        l2 = torch.stack([((sigma[n] - part) ** 2).sum() for n, part in psi.items()]).sum()
        return self.options.lambda_l1 * l1 + self.options.lambda_l2 * l2

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows; labels move sigma, so psi stays as public images left it."""
        learner, options = self.learner, self.options
        learner.receive(request.weights)
        self.last_psi = self.psi
        loss = partial(distillation_loss, network=learner.training, truth=options.lambda_s)
        return (yield from learner.fit(self.site.train(moment.stage), loss, moment))

    def state(self) -> Tensors:
        parts = prefixed("psi", self.psi) | prefixed("last_psi", self.last_psi)
        return self.learner.state() | parts

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)
        self.psi, self.last_psi = copied(without("psi", state)), copied(without("last_psi", state))


class Server:
    """Keeps each client's helpers."""

    evaluate = distillation.evaluate

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.plan = Plan(options.public_batch, options.public_epochs)
        self.helpers: dict[str, list[str]] = {}

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Agree with helpers on public images, then train everywhere."""
        exchange = Exchange(self.options, self.site, clients, Client)
        notes = exchange.begin(self.plan)
        if moment.round % self.options.refresh == 0:
            self.helpers = {}  # chosen by the first logits of this round
        notes["aligned"] = exchange.align(self.plan, self._help)
        notes["loss"] = exchange.fit()
        return notes | exchange.notes

    def _help(self, answers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The helpers' logits for each client; a helper that failed is replaced."""
        helped = {helper for helpers in self.helpers.values() for helper in helpers}
        if self.helpers.keys() != answers.keys() or not helped <= answers.keys():
            self.helpers = nearest(answers, self.options.helpers)
        chosen = {id: [answers[helper][None] for helper in self.helpers[id]] for id in answers}
        # in a federation of one there are no helpers, and so no rows
        return {id: torch.cat([own[None][:0], *chosen[id]]) for id, own in answers.items()}

    def state(self) -> Tensors:
        ids = list(self.site.clients)
        table = [[ids.index(id), *map(ids.index, self.helpers[id])] for id in sorted(self.helpers)]
        return {"helpers": torch.tensor(table)} if table else {}

    def restore(self, state: Tensors) -> None:
        ids, table = list(self.site.clients), state.get("helpers", torch.zeros(0))
        self.helpers = {ids[int(row[0])]: [ids[int(n)] for n in row[1:]] for row in table}


METHOD = Method(
    Options, Server, Client, "domains", "fedmatch",
    quorum=True, weighted=True, sends=distillation.sends,
)  # fmt: skip
