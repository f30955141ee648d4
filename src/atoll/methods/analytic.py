"""Analytic classifier: ridge regression on the features of a frozen network, from sums over sites.

Zhuang et al., ACIL: Analytic Class-Incremental Learning, NeurIPS 2022; He et al., AFL: A
Single-Round Analytic Approach for Federated Learning with Pre-trained Models, CVPR 2025.

A site sends the Gram matrix of its features and their cross matrix with the labels, once for each
stage. The server adds them up and solves. The result is that of all rows in one place, in whatever
order sites and stages come; a site that withdraws is subtracted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.annotations import RowSums, TestedWeights
from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import SERVER, Clients, Moment, counted, scores
from atoll.core.messages import Check, Checked, Empty, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import in_chunks, scored
from atoll.learning import ridge
from atoll.learning.models import draw_linear, shared
from atoll.learning.weights import copied, placed, prefixed, without

UNSEEN = -1e30  # the logit of a class that no row had so far


@dataclass(frozen=True)
class Options:
    """The options of `analytic`."""

    features: Literal["random", "network"] = "random"  # network: of [model], with first weights
    width: AtLeastOne = 500  # number of random features
    projection: NotNegativeInt = 0  # which random features; equal numbers draw equal features
    strength: Positive = 1.0  # of the ridge penalty, in units of one row
    bits: Annotated[int, Field(ge=0, le=39)] = 20  # fraction bits of int64 sums; 0: float64 sums
    floor: AtLeastOne = 10  # rows of a class and stage below which a site does not send the class
    withdraw: tuple[str, ...] = ()  # sites that withdraw after the last stage, by id
    trained_by: tuple[str, ...] = ()  # sites whose rows trained the network; they cannot withdraw


@dataclass(frozen=True)
class Ask:
    """Asks for a site's sums: the stages that the server's sum has of this site already."""

    stages: tuple[int, ...]


@dataclass(frozen=True)
class Sums:
    """A site's sums over some stages, F'F (its triangle) and F'Y; no tensors if there are none."""

    sums: Annotated[Tensors, RowSums(stages="stages", left_out="held_back")]
    stages: tuple[int, ...]
    held_back: int  # rows of classes below the floor, which the sums leave out


@dataclass(frozen=True)
class Classifier:
    """The solution, and which classes it knows."""

    weight: Annotated[Tensor, TestedWeights()]  # (features and constant, classes)
    seen: Annotated[Tensor, TestedWeights()]  # (classes,) truth values


def frozen_weights(options: Options, site: Site) -> Tensors:
    """The weights that compute the features, equal at all sites; nothing trains them."""
    if options.features == "network":
        return copied(site.model().state_dict())
    stream = Stream.of(options.projection, "analytic", "features")
    weight, bias = draw_linear(options.width, math.prod(site.inputs()), stream)
    return {"weight": weight.to(site.device), "bias": bias.to(site.device)}


class Client:
    """Sums over its rows; keeps what the server has of it, and the classifier."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.frozen = frozen_weights(options, site)
        self.sent: Tensors = {}  # the sums that the server has of this site
        self.stages: tuple[int, ...] = ()  # of these sums
        self.classifier: Tensors = {}

    def add(self, request: Ask, moment: Moment) -> Sums:
        """The sums of all stages up to now that the server does not have yet."""
        self._agree(request.stages, moment)
        fresh = tuple(s for s in range(moment.stage + 1) if s not in request.stages)
        if not fresh:
            return Sums({}, (), 0)
        sums, held_back = self._summed(fresh)
        self.sent = {n: self.sent[n] + t for n, t in sums.items()} if self.sent else sums
        self.stages = tuple(sorted((*request.stages, *fresh)))
        return Sums(sums, fresh, held_back)

    def withdraw(self, request: Ask, moment: Moment) -> Sums:
        """The sums that the server has of this site, once more."""
        self._agree(request.stages, moment)
        return Sums(self.sent, request.stages, self._summed(request.stages)[1])

    def _agree(self, stages: tuple[int, ...], moment: Moment) -> None:
        """Where an answer was lost or the server is a restored one, sum up its stages again."""
        if not set(stages) <= set(range(moment.stage + 1)):
            raise BadMessageError(SERVER, "sums of a stage that has not come yet")
        if stages != self.stages:
            self.sent, self.stages = self._summed(stages)[0] if stages else {}, stages

    @torch.no_grad()
    def _summed(self, stages: tuple[int, ...]) -> tuple[Tensors, int]:
        """Sums over stages, each rounded by itself, and the rows held back."""
        total, held_back, classes = dict[str, Tensor](), 0, len(self.site.classes)
        for stage in stages:
            rows = self.site.train(stage)
            counts = torch.bincount(rows.y, minlength=classes)
            usable = rows.at((counts >= self.options.floor)[rows.y])
            held_back += len(rows) - len(usable)
            inputs = in_chunks(lambda part: self._inputs(self.frozen, part), usable)
            exact = ridge.packed_sums(inputs, usable.y, classes, usable.share, self.options.bits)
            fixed = {n: ridge.to_fixed(values, self.options.bits) for n, values in exact.items()}
            total = ridge.added(total, fixed, 1)
        return total, held_back

    def _inputs(self, frozen: Tensors, rows: Rows) -> Tensor:
        """Features and a constant, in double precision; those of texts in that of the run."""
        x, weights, random = rows.x, frozen, self.options.features == "random"
        if rows.sequences and random:
            what, remedy = "texts have no random features", "use features = 'network'"
            raise UserError(what, "method.features", remedy)
        if not rows.sequences:
            x = x.double()
            weights = {n: w.double() if w.is_floating_point() else w for n, w in frozen.items()}
        if random:
            black = 1.0 if x.dim() == 4 else 0.0  # images are -1 where they are black
            return ridge.with_constant(ridge.random_features(weights, x, black))
        network = shared(self.site.outline(training=False))
        return ridge.with_constant(ridge.frozen_features(network, weights, x))

    def receive(self, request: Classifier, moment: Moment) -> Empty:
        """Store the classifier for tests and predictions."""
        self.classifier = placed({"weight": request.weight, "seen": request.seen}, self.site.device)
        return Empty()

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the classifier on a task."""
        rows, model = self.site.test(request.task), self.final_model({}, "", request.task)
        return scored({"": in_chunks(lambda part: self.predict(model, part), rows)}, rows.y)

    def state(self) -> Tensors:
        stages = {"stages": torch.tensor(self.stages, dtype=torch.int64)}
        return prefixed("sent", self.sent) | prefixed("classifier", self.classifier) | stages

    def restore(self, state: Tensors) -> None:
        self.sent, self.classifier = without("sent", state), without("classifier", state)
        self.stages = tuple(state["stages"].tolist())

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The frozen network and the classifier."""
        return prefixed("frozen", self.frozen) | self.classifier

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        logits = self._inputs(without("frozen", model), rows) @ model["weight"]
        return torch.where(model["seen"], logits, UNSEEN)


class Server:
    """Holds the sums, and for each site the stages that they have of it."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        for id in options.withdraw:
            _check_withdrawal(id, options, site)
        self.sums: Tensors = {}
        self.stages: dict[str, tuple[int, ...]] = {}

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Add the sums that sites have not sent yet; in the last round, subtract who withdraws."""
        requests = {id: Ask(self.stages.get(id, ())) for id in clients.ids}
        replies = clients.ask(Client.add, requests, admit=self._admit)
        for id, reply in replies.items():
            if reply.sums:
                self.sums = ridge.added(self.sums, reply.sums, 1)
                self.stages[id] = tuple(sorted((*self.stages.get(id, ()), *reply.stages)))
        if moment.last and moment.stage == self.site.stages - 1:
            self._withdraw(clients)
        rows = ridge.from_fixed(self.sums["gram"][-1], self.options.bits)  # constant times constant
        held_back = sum(reply.held_back for reply in replies.values())
        return {"rows": float(rows), "held back": float(held_back)}

    def _withdraw(self, clients: Clients) -> None:
        """Subtract what the sums have of sites that withdraw; nothing of them is left."""
        requests = {id: Ask(self.stages[id]) for id in self.options.withdraw if id in self.stages}
        if not requests:
            return
        for id, reply in clients.ask(Client.withdraw, requests, admit=self._admit).items():
            self.sums = ridge.added(self.sums, reply.sums, -1)
            del self.stages[id]

    def _admit(self, id: str, reply: Sums) -> None:
        """Refuse sums that no rows can have."""
        counted(reply.held_back, id)
        width = len(self.sums["cross"]) if self.sums else 0
        if reply.sums:
            classes, bits = len(self.site.classes), self.options.bits
            reason = ridge.implausible_sums(reply.sums, classes, width, bits)
            if reason:
                raise BadMessageError(id, reason)

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Send the solution, test it everywhere."""
        clients.ask_all(Client.receive, self._solution())
        return scores(clients, Client.check, {}, moment)

    def _solution(self) -> Classifier:
        """Ridge regression from the sums."""
        entries = {n: ridge.from_fixed(t, self.options.bits) for n, t in self.sums.items()}
        cross = entries["cross"]
        gram = ridge.square(entries["gram"], len(cross))
        return Classifier(ridge.solved(gram, cross, self.options.strength), cross[-1] > 0)

    def state(self) -> Tensors:
        stages = {id: torch.tensor(numbers) for id, numbers in self.stages.items()}
        return prefixed("sums", self.sums) | prefixed("stages", stages)

    def restore(self, state: Tensors) -> None:
        self.sums = copied(without("sums", state))
        self.stages = {id: tuple(t.tolist()) for id, t in without("stages", state).items()}


def _check_withdrawal(id: str, options: Options, site: Site) -> None:
    """Refuse a withdrawal that cannot be exact."""
    if id not in site.clients:
        remedy = f"name some of {', '.join(site.clients[:10])}"
        raise UserError(f"unknown site '{id}'", "method.withdraw", remedy)
    if id in options.trained_by:
        what = f"'{id}' trained the network, so its rows remain in the features"
        raise UserError(what, "method.withdraw", "train the network anew without it")


def summed(options: Options, site: Site) -> list[tuple[int, int]]:
    """The columns of the sums and the rows behind them, by stage."""
    client, stages = Client(options, site), []
    for stage in range(site.stages):
        rows = site.train(stage)
        counts = torch.bincount(rows.y, minlength=len(site.classes))
        usable = int(counts[counts >= options.floor].sum())
        columns = client._inputs(client.frozen, rows.at(slice(1))).shape[1] if usable else 0
        stages.append((columns, usable))
    return stages


METHOD = Method(Options, Server, Client, quorum=True, weighted=True, summed=summed)
