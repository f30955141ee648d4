"""FCCL: clients with different networks and domains align their logits on public images.

Huang, Ye, Du, Learn from Others and Be Yourself in Heterogeneous Federated Learning, CVPR 2022.

A round has two phases. In the collaborative one every client moves the cross-correlation of its
logits with the mean logits towards 1 on the diagonal and below 0 elsewhere. In the local one it
trains on its own rows and stays near two frozen teachers: itself before the round (which knows the
others' logits) and itself before any exchange. Only logits on public images cross. Letters follow
sections b and d of the specification: Z are logits, M is their cross-correlation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.federation import Clients, Moment, Working, no_restore, no_state
from atoll.core.messages import Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Snapshot
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.families import distillation
from atoll.families.distillation import Again, Align, Aligned, Exchange, Learner, Plan, Trained
from atoll.families.distillation_snapshots import matrix_snapshot
from atoll.jobs.train import Optimiser
from atoll.learning.augment import varied
from atoll.learning.distill import correlation, correlation_loss, distillation_loss

Unit = Annotated[float, Field(ge=0, le=1)]
Ten = Annotated[float, Field(ge=0, le=10)]


@dataclass(frozen=True)
class Options:
    """The options of `fccl`; sections f and j of the specification."""

    lambda_col: Unit = 0.0051  # weight of the off-diagonal part of the correlation loss
    lambda_loc: Ten = 1.0  # weight of both teachers; 0: ablation without the continual part
    off_diagonal: Literal[-1, 0] = -1  # target of correlations between different classes
    teachers: Literal["both", "inter", "intra"] = "both"  # inter: last round's, intra: before all
    temperature: Positive = 1.0  # temperature of both teachers
    collaborate: bool = True  # false: ablation without the collaborative part
    own_target: Literal["plain", "progressive"] = "plain"  # progressive: own share by last round's
    exchange: Literal["batch", "round"] = "batch"  # round: all logits once, then local steps
    public_optimiser: Literal["fresh", "persistent"] = (
        "fresh"  # Adam's moments over a round's steps
    )
    public_batch: AtLeastOne = 512  # batch size of a public step; the rest is dropped
    public_epochs: AtLeastOne = 1  # epochs over the public images per round
    augment: bool = True  # random shifts, flips and rotations, identical at all clients
    rate: Positive = 0.001  # learning rate of Adam
    rate_decay: Literal["none", "linear"] = "none"  # "linear": times 1 - 0.9 t/T in round t of T
    weight_decay: NotNegative = 0.0  # weight decay of the local phase
    batch: AtLeastOne = 512  # batch size of local training; the last, smaller batch is kept
    epochs: AtLeastOne = 20  # local epochs per round; Adam is reset every round
    epochs_each: tuple[AtLeastOne, ...] = ()  # the same, one number per client in order
    pretrain_epochs: NotNegativeInt = 50  # epochs of local pretraining before the first round
    average: bool = False  # for equal networks: average all weights and buffers between the phases
    absent: NotNegativeInt = 0  # clients that may fail in a round; the record names them
    top: AtLeastOne = 1  # top-k accuracy: the class must be among the k likeliest


def plan(options: Options) -> Plan:
    """How a round goes through the public images; one exchange a round does not augment them."""
    augment = varied if options.augment and options.exchange == "batch" else None
    return Plan(options.public_batch, options.public_epochs, augment)


def rate(options: Options, moment: Moment) -> float:
    """The learning rate of a round."""
    linear = options.rate_decay == "linear"
    return options.rate * (1 - 0.9 * moment.round / moment.rounds if linear else 1)


def own_target(z: Tensor, constants: Tensors) -> Tensor:
    """The target, or with `progressive` the target with last round's logits as the own share."""
    if "earlier" not in constants:
        return constants["target"]
    return constants["target"] + (constants["earlier"] - z.detach()) / constants["count"]


def public_loss(
    z: Tensor,
    again: Again,
    constants: Tensors,
    *,
    strength: float,
    off_diagonal: float,
) -> Tensor:
    """L_col of a public batch."""
    return correlation_loss(correlation(z, own_target(z, constants)), strength, off_diagonal)


class Client:
    """Keeps its model, the model of the last round, and the model before any exchange."""

    join, prepare, share = distillation.join, distillation.prepare, distillation.share
    check = distillation.check
    final_model, predict = distillation.final_model, distillation.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site, self.plan = options, site, plan(options)
        self.learner = Learner("fccl", options, site, self.plan)
        self.m = torch.zeros((len(site.classes),) * 2, device=site.device)  # M of the last step
        self._intra: tuple[Tensors, Tensor, Tensor] | None = None  # solo, x, and their logits

    def align(self, request: Align, moment: Moment) -> Working[Aligned]:
        """Follow the target of the last step, then return the logits of the next."""
        if request.step == 0:
            self.learner.rewind()
        if self.options.exchange == "round":
            return (yield from self._align_once(request, moment))
        return (yield from self._step(request, moment))

    def _align_once(self, request: Align, moment: Moment) -> Working[Aligned]:
        """The logits of all images, or all steps of the round towards their target."""
        public, learner = self.site.public(), self.learner
        if request.step == 0:
            x = (public.x - public.mean) / public.deviation
            return Aligned(learner.logits(learner.weights, x), 0.0)
        steps, total = self.plan.steps(public), 0.0
        for step in range(steps):
            rows = self.plan.rows(public, request.key, step).to(request.target.device)
            part = replace(request, step=step + 1, target=request.target[rows])
            total += (yield from self._step(part, moment)).loss
        return Aligned(torch.zeros(0), total / steps)

    def _step(self, request: Align, moment: Moment) -> Working[Aligned]:
        options, learner = self.options, self.learner
        constants = {"target": request.target.to(self.site.device)}
        if request.step and options.own_target == "progressive":
            x = self.plan.images(self.site.public(), request.key, request.step - 1)
            constants["earlier"] = learner.logits(learner.last, x)
            constants["count"] = torch.tensor(request.count).to(constants["earlier"])
        strength, target = options.lambda_col, float(options.off_diagonal)
        loss = partial(public_loss, strength=strength, off_diagonal=target)
        adam, fresh = Optimiser("adam", rate(options, moment)), options.public_optimiser == "fresh"
        result = yield from learner.step(
            request, moment, loss, constants, optimiser=adam, fresh=fresh
        )
        if result.followed is not None:
            self.m = correlation(result.followed, own_target(result.followed, constants)).float()
        return distillation.aligned(result)

    def fit(self, request: Weights, moment: Moment) -> Working[Trained]:
        """Train on the own rows, near both teachers."""
        options, learner, rows = self.options, self.learner, self.site.train(moment.stage)
        learner.receive(request.weights)
        learner.probe("others", moment)
        inter, intra = (options.teachers in ("both", teacher) for teacher in ("inter", "intra"))
        strengths = (options.lambda_loc * inter, options.lambda_loc * intra)
        if any(strengths):
            rows = self._taught(rows)
        loss = partial(
            distillation_loss,
            network=learner.training,
            strengths=strengths,
            temperature=options.temperature,
        )
        adam = Optimiser("adam", rate(options, moment), options.weight_decay)
        trained = yield from learner.fit(rows, loss, moment, adam)
        learner.probe("own", moment)
        return trained

    def _taught(self, rows: Rows) -> Rows:
        """The rows beside the logits of both teachers; those of the intra teacher are cached."""
        learner, x = self.learner, rows.x
        if self._intra is None or self._intra[0] is not learner.solo or self._intra[1] is not x:
            self._intra = (learner.solo, x, learner.logits(learner.solo, x))
        return replace(rows, own=torch.cat([learner.logits(learner.last, x), self._intra[2]], -1))

    def snapshot(self, moment: Moment) -> list[Snapshot]:
        """Those of the family, and M of the last public step."""
        snapshots = distillation.snapshot(self, moment)
        if self.options.collaborate:
            name = "correlation, public images"
            snapshots.append(matrix_snapshot(self.site, moment, name, self.m))
        return snapshots

    def state(self) -> Tensors:
        return self.learner.state() | {"seen/m": self.m}

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)
        self.m = state["seen/m"].clone()


class Server:
    """Takes the mean of logits; keeps nothing."""

    evaluate = distillation.evaluate
    state, restore = no_state, no_restore  # nothing outlives a round

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Collaborate on public images, then train everywhere."""
        exchange = Exchange(self.options, self.site, clients, Client)
        notes = exchange.begin(plan(self.options))
        if self.options.collaborate:
            notes |= self._collaborate(exchange)
        notes["loss"] = exchange.fit()
        return notes | exchange.notes

    def _collaborate(self, exchange: Exchange) -> dict[str, float]:
        """The mean loss, and the means of M on and off its diagonal at the last exchange."""
        whole = Plan(len(self.site.public()), epochs=1)  # all images in one exchange
        batches = whole if self.options.exchange == "round" else plan(self.options)
        aligned = exchange.align(batches, distillation.mean_logits)
        answers = exchange.answers
        target = distillation.mean_logits(answers)
        m = torch.stack([correlation(z, target[id]) for id, z in answers.items()]).mean(0)
        diagonal, classes = float(m.diagonal().mean()), len(m)
        rest = (float(m.sum()) - classes * diagonal) / max(1, classes * (classes - 1))
        return {"aligned": aligned, "diagonal": diagonal, "off diagonal": rest}


METHOD = Method(
    *(Options, Server, Client),
    *("domains", "fccl"),  # split, headline
    quorum=True,
    weighted=True,
    sends=distillation.sends,
)
