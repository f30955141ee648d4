"""V-LETO: a split network that learns new classes or new columns and keeps the old by prototypes.

Wang, Gai, Yu, Zhu, Wu, Vertical Federated Continual Learning via Evolving Prototype Knowledge.

Clients hold columns, the server labels. The server keeps one mean embedding of each class, its
prototype. Classes by stage: the top network rehearses the prototypes of classes that are gone, and
each client holds back the weights that mattered before (local model optimisation, LMO). Columns
by stage: old and new prototypes are mixed, and so are embeddings at the test, without any label.
Letters follow the specification: E embeddings, mu prototypes, F Fisher diagonals, kappa threshold.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.annotations import Outputs, RowGradient
from atoll.core.errors import UserError
from atoll.core.federation import SERVER, Clients, Moment
from atoll.core.messages import Embed, Embedded, Empty, Learn, Tensors
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Look, Score
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.split_round import Lent, SplitJob, Step, draws, would_be
from atoll.jobs.train import hits
from atoll.learning.knowledge import (
    LmoRule,
    added,
    class_means,
    delta,
    drift_scalar,
    drift_vector,
    evolved,
    fisher,
    frozen,
    share,
)
from atoll.learning.leakage import labels_from_gradients, reconstruction
from atoll.learning.models import Architecture
from atoll.learning.replay import noisy
from atoll.learning.split import (
    Batches,
    Half,
    chunks,
    dropout,
    finite,
    fitting,
    guarded,
    joined,
    not_declared,
    parts_of,
    pixels,
    rounded,
    stepped,
    union,
)
from atoll.learning.split_nets import NetName, bottom, top, widened
from atoll.learning.weights import copied, prefixed, without
from atoll.methods import Method

AUDITED = 1000  # training rows on which a look measures what leaks
FEWEST = 30  # rows without which it says nothing
SHOWN = 120  # test rows of a task in a picture


@dataclass(frozen=True)
class Options:
    """The options of `vleto`; sections f and j of the specification."""

    rate: Positive = 0.01  # size of a step, of all networks (lr)
    batch: AtLeastOne = 128  # rows in a step; the last, smaller batch is kept
    epochs: AtLeastOne = 1  # passes over the rows in a round
    network: NetName = "auto"  # lenet3, lenet2, mlp, dense; auto: lenet3 where it fits, else dense
    width: AtLeastOne = 50  # of an embedding (d)
    dropout: Fraction = 0.5  # of the embedding in training, with network = "mlp" only
    agg: Literal["sum", "mean"] = "sum"  # how embeddings are joined
    lambda_ce: NotNegative = 0.5  # weight of the cross-entropy after the first stage
    lambda_a: NotNegative = 0.5  # weight of old prototypes: classes by stage
    lambda_f: NotNegative = 0.5  # weight of mixed prototypes: columns by stage
    beta: Fraction = 0.5  # weight of what is new in a mixed prototype or embedding
    gamma: NotNegative = 0.0  # how far old prototypes follow the drift; 0: not at all
    drift: Literal["scalar", "vector"] = "scalar"  # paper: mean cosine; vector: mean movement
    prototype_noise: NotNegative = 0.01  # deviation of the noise on rehearsed prototypes
    k0: NotNegative = 15.0  # deviations below the mean, at which weights are held back
    alpha: NotNegative = 3.0  # further deviations for each unit of ln(task + 1)
    lmo_rule: LmoRule = "paper"  # which weights are held back; paper and code: in effect all
    rho: Fraction = 0.5  # share of weights held back, with lmo_rule = "quantile"
    fisher_rows: AtLeastOne = 1024  # training rows that Fisher diagonals are measured on
    protocol: Literal["P1", "P2"] = "P1"  # columns by stage: the new client alone, or all so far
    fil_eval: Literal["mix", "sum", "current", "label_oracle"] = "mix"  # P1; oracle reads labels!
    stream: bool = False  # columns by stage: prototypes from the last round's training embeddings
    seen_mask: bool = False  # leave out classes that no stage has had yet
    declared: NotNegativeInt = 0  # classes that are known from the start; 0 for all of the data set
    undeclared: Literal["refuse", "widen"] = "refuse"  # what a class beyond those does
    pixel_mean: tuple[float, ...] = ()  # of each channel, from 0 to 1; empty: pixels from -1 to 1
    pixel_std: tuple[float, ...] = ()  # of each channel, with pixel_mean
    clip: NotNegative = 0.0  # longest gradient of a row that is sent; 0 for any
    noise: NotNegative = 0.0  # deviation of the noise on gradients that are sent
    secret: bool = False  # draw it from the machine, not from the run's seed, which clients know
    digits: NotNegativeInt = 0  # behind the point, of embeddings that are sent; 0 for all


@dataclass(frozen=True)
class Learned:
    """Embeddings of a step, now and by the network of the last stage."""

    embedding: Annotated[Tensor, Outputs(tails=True)]  # (rows, width)
    before: Annotated[
        Tensor, Outputs(tails=True)
    ]  # (rows, width), no rows where the drift is not asked for


@dataclass(frozen=True)
class Measure:
    """Each sample's own gradient, for the Fisher diagonal."""

    seed: int  # of the order of rows; the first ones are meant
    gradient: Annotated[Tensor, RowGradient()]  # (rows, width)


@dataclass(frozen=True)
class Settled:
    """The stage has ended."""

    frozen: float  # share of the client's weights that were held back in it


class Client:
    """Holds columns, the bottom network that reads them, and how much each weight matters."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        made = bottom(options.network, site.inputs(), options.width, site.stream("bottom"))
        made = made.to(site.device, site.dtype)
        self.half = Half(made, copied(made.state_dict()))
        self.before: Tensors = {}  # the weights at the end of the last stage, for the drift
        self.fisher: Tensors = {}  # F, summed over stages
        self.done = (-1, -1, -1)  # stage, round and step of the last gradient that was applied
        self.measured = -1  # the last stage whose Fisher diagonal was added
        self._mask: tuple[int, Tensors | None] = (-1, None)  # of a stage; follows from fisher
        self._shown: tuple[Rows | None, Tensor] = (
            None,
            torch.empty(0),
        )  # as the network reads them

    def embed(self, request: Embed, moment: Moment) -> Embedded:
        """The embeddings of rows in the order asked for."""
        rows = self.site.train if request.part == "train" else self.site.test
        x = rows(request.number).x
        if request.seed:
            x = x[Batches(len(x), len(x), request.seed).at(0, x.device)]
        return Embedded(self._sent(x[request.start : request.start + request.count]))

    def _sent(self, x: Tensor) -> Tensor:
        """The embeddings of rows as they may leave."""
        return rounded(self.half.embed(self._scaled(x)), self.options.digits)

    def learn(self, request: Learn, moment: Moment) -> Learned:
        """Apply the gradient of the last step, then give the embeddings of the next."""
        last = (moment.stage, moment.round, request.step - 1)
        if request.step and last > self.done:  # a message that is repeated is not applied twice
            self._descend(request, moment, last)
            self.done = last
        none = request.gradient.new_zeros((0, self.options.width))
        if not request.more:
            return Learned(none, none)
        x, mask = self._inputs(request, moment, 0)
        if self._still(moment):
            embedding = self.half.embed(x) if mask is None else self.half.embed(x) * mask
        else:
            key = (moment.stage, moment.round, request.step)
            embedding = self.half.forward(key, x, mask).detach()
        digits = self.options.digits
        before = rounded(self.half.embed(x, self.before), digits) if self.before else none
        return Learned(rounded(embedding, digits), before)

    def _descend(self, request: Learn, moment: Moment, last: tuple[int, int, int]) -> None:
        if self._still(moment):
            return
        self.half.again(last, lambda: self._inputs(request, moment, -1))
        gradients = self.half.backward(request.gradient.to(self.site.device))
        self.half.descend(gradients, self.options.rate, self._frozen(moment))

    def _still(self, moment: Moment) -> bool:
        """Whether every weight is held back, so that no gradient is needed."""
        mask = self._frozen(moment)
        return mask is not None and share(mask) == 1

    def _inputs(self, request: Learn, moment: Moment, later: int) -> tuple[Tensor, Tensor | None]:
        """The rows of a step and its dropout."""
        options, site, step = self.options, self.site, request.step + later
        rows = site.lesson(moment)
        index = Batches(len(rows), options.batch, request.seed).at(step, site.device)
        x = self._scaled(rows.x[index])
        key = torch.tensor(self._key(moment, step), device=site.device)
        return x, dropout(self._dropped, (len(x), options.width), key, x)

    @property
    def _dropped(self) -> float:
        return self.options.dropout if self.options.network == "mlp" else 0.0

    def _key(self, moment: Moment, step: int) -> int:
        return self.site.stream("dropout", moment, step).key

    def lend(self, moment: Moment, work: SplitJob) -> Lent:
        """All that `learn` needs for the steps of a round."""
        rows = self.site.lesson(moment)
        if self._shown[0] is not rows:
            self._shown = (rows, self._scaled(rows.x))
        mask, options = self._frozen(moment), self.options
        keys = [self._key(moment, step) for step in range(work.steps)] if self._dropped else []
        return Lent(
            *(self.half.function, self.half.weights, self._shown[1], options.rate, mask),
            still=self._still(moment),
            before=self.before,
            digits=options.digits,
            dropped=self._dropped,
            keys=tuple(keys),
        )

    def take(self, weights: Tensors, moment: Moment, steps: int) -> None:
        """What the steps of a round have made of what was lent."""
        self.half.weights, self.done = weights, (moment.stage, moment.round, steps - 1)

    def _scaled(self, x: Tensor) -> Tensor:
        return pixels(x, self.options.pixel_mean, self.options.pixel_std)

    def _frozen(self, moment: Moment) -> Tensors | None:
        """d.5: the weights that are held back at a stage; none before anything was learned."""
        options = self.options
        if not self.fisher or options.lmo_rule == "off":
            return None
        if self._mask[0] != moment.stage:
            # P2 holds a client back whole that has learned before, unless by its quantile
            rule, rho = options.lmo_rule, options.rho
            if self.site.by_columns and rule != "quantile":
                rule, rho = "quantile", 1.0
            deviations = delta(moment.stage + 1, options.k0, options.alpha)
            self._mask = (moment.stage, frozen(self.fisher, rule, deviations, rho))
        return self._mask[1]

    def measure(self, request: Measure, moment: Moment) -> Empty:
        """d.4, eq. 7: add the Fisher diagonal of the stage to those before."""
        if self.measured == moment.stage:
            return Empty()  # a message that is repeated is not counted twice
        x = self.site.train(moment.stage).x
        order = Batches(len(x), len(x), request.seed).at(0, x.device)
        x = self._scaled(x[order[: len(request.gradient)]])
        self._frozen(moment)  # the mask of this stage is that of the stages before
        gradient = request.gradient.to(self.site.device)
        found = fisher(self.half.network, self.half.weights, x, gradient)
        self.fisher, self.measured = added(self.fisher, found), moment.stage
        return Empty()

    def settle(self, request: Empty, moment: Moment) -> Settled:
        """Keep what the next stage needs of this one."""
        held = self._mask[1] if self._mask[0] == moment.stage else None
        if self.options.gamma and not self.site.by_columns:
            self.before = copied(self.half.weights)
        return Settled(share(held) if held else 0.0)

    def look(self, moment: Moment) -> list[Look]:
        """What this site holds back, and how well its columns could be guessed from embeddings."""
        x = self.site.train(moment.stage).x[:AUDITED]
        if len(x) < FEWEST:  # it has not joined yet, or has too few rows to say
            return []
        embedding, known = self.half.embed(self._scaled(x)), len(x) * 2 // 3
        digits = {"as set": self.options.digits, "digits = 1": 1}
        guessed = [reconstruction(rounded(embedding, d), x, known) for d in digits.values()]
        where = (moment.stage, self.site.id)
        found = [Look(*where, "columns from embeddings", tuple(digits), ("explained",),
                      tuple((value,) for value in guessed))]  # fmt: skip
        if held := self._mask[1] if self._mask[0] == moment.stage else None:
            shares = tuple(
                (share({name: mask}), float(mask.numel())) for name, mask in held.items()
            )
            found.append(Look(*where, "held back", tuple(held), ("share", "weights"), shares))
        return found

    def state(self) -> Tensors:
        found = prefixed("weights", self.half.weights) | prefixed("before", self.before)
        found |= prefixed("fisher", self.fisher)
        if self._mask[1] is not None:
            found |= prefixed("mask", self._mask[1])
        return found | {"done": torch.tensor([*self.done, self.measured, self._mask[0]])}

    def restore(self, state: Tensors) -> None:
        self.half.weights = self._ordered("weights", state)
        self.before = self._ordered("before", state)
        self.fisher = self._ordered("fisher", state)
        stage, number, step, self.measured, masked = state["done"].tolist()
        self.done = (stage, number, step)
        self._mask = (masked, self._ordered("mask", state) or None)

    def _ordered(self, part: str, state: Tensors) -> Tensors:
        """A part of a state in the order of the network's layers; files sort by name."""
        named = without(part, state)
        return copied({name: named[name] for name in self.half.weights if name in named})


class Server:
    """Holds labels, the top network and the prototypes."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self._secret = Stream(secrets.randbits(63)) if options.secret else None
        classes = len(site.classes)
        self.classes = options.declared or classes
        made = top(options.network, options.width, self.classes, site.stream("top"))
        self.network = Architecture(made)
        self.weights: Tensors = copied(made.to(site.device, site.dtype).state_dict())
        like = next(iter(self.weights.values()))
        self.seen = torch.zeros(classes, dtype=torch.bool, device=site.device)
        self.known = torch.zeros_like(self.seen)  # which classes have a prototype
        self.means = like.new_zeros((classes, options.width))  # mu_g, the list L_g
        self.mixed = torch.zeros_like(self.means)  # mu_bar of the round: columns by stage
        self.received = torch.zeros_like(self.means)  # mu_t of the last round, with `stream`
        self.arrived = torch.zeros(classes, dtype=torch.int64, device=site.device)
        none = (like.new_zeros((0, options.width)), torch.zeros(0, dtype=torch.int64))
        self._learned, self._tested = none, none  # embeddings and labels, for pictures alone
        self._mixes: dict[str, float] = {}  # how far the stage moved prototypes, for pictures too

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Some passes over the rows; at the end of a stage, prototypes and Fisher diagonals."""
        if moment.first:
            self._begin(moment)
        if self._mixing(moment):
            self.mixed = self._mixed(clients, moment)
        notes = self._passes(clients, moment)
        if moment.last:
            notes |= self._end(clients, moment)
        return notes

    def _begin(self, moment: Moment) -> None:
        """The classes of a stage; the head is widened by those that were not declared."""
        y = self.site.train(moment.stage).y
        highest = int(y.max()) + 1
        if highest > self.classes:
            if self.options.undeclared == "refuse":
                raise not_declared(self.site.classes[highest - 1], moment.stage, self.classes)
            stream = self.site.stream("widen", moment.stage)
            self.weights, self.classes = widened(self.weights, highest, stream), highest
        self.seen = self.seen.clone()
        self.seen[y] = True
        self.arrived = torch.zeros_like(self.arrived)

    def _draws(self, name: str, moment: Moment) -> Stream:
        """What a round draws: by the run's seed, or by a number that no client can know."""
        if self._secret is None:
            return self.site.stream(name, moment)
        return self._secret.child(name, moment.stage, moment.round)

    def _learners(self, moment: Moment) -> list[str]:
        """The clients that take part in a stage's training."""
        here = self.site.parties(moment.stage)
        alone = self.site.by_columns and self.options.protocol == "P1"
        return here[-1:] if alone else here

    def _mixing(self, moment: Moment) -> bool:
        """Whether mixed prototypes have a say: columns by stage, after the first."""
        return self.site.by_columns and moment.stage > 0 and self.options.lambda_f > 0

    def _mixed(self, clients: Clients, moment: Moment) -> Tensor:
        """Eq. 5 with the class means as they are now, or as they came in the last round."""
        if self.options.stream and moment.round > 0:
            means, counts = self.received, self.arrived
        else:
            means, counts = self._means(clients, moment)
        return evolved(self.means, self.known, means, counts, self.options.beta)

    def _means(self, clients: Clients, moment: Moment) -> tuple[Tensor, Tensor]:
        """Eq. 2: the class means of the stage's training rows."""
        rows = self._embedded(clients, self._learners(moment), "train", moment.stage)
        y = self.site.train(moment.stage).y
        joint = joined(list(rows.values()), self.options.agg)
        self._learned = (joint[:AUDITED], y[:AUDITED])
        return class_means(joint, y, len(self.known))

    def _passes(self, clients: Clients, moment: Moment) -> dict[str, float]:
        """The steps of a round; the mean loss and its terms."""
        work = self._work(moment)
        done = clients.whole(work)
        if done is None:
            totals, sums = self._by_messages(clients, moment, work)
        else:
            totals, sums, self.weights = done.totals, done.sums, done.weights
            finite(totals["loss"], moment.stage, moment.round)
            self._note(clients, moment, work)
        if work.class_sums:
            self.arrived = torch.bincount(work.y, minlength=len(self.known))
            passed = (self.arrived * self.options.epochs).clamp(min=1)[:, None]
            self.received = (sums / passed).to(self.means)
        rows = self.options.epochs * len(work.y)
        return {name: value / rows for name, value in totals.items()}

    def _work(self, moment: Moment) -> SplitJob:
        """The steps of a round, as an engine can do them that holds all clients."""
        options, y = self.options, self.site.train(moment.stage).y
        batches = Batches(len(y), options.batch, self.site.stream("order", moment).key)
        ids, streaming = self._learners(moment), self.site.by_columns and options.stream
        return SplitJob(
            ids=tuple(ids),
            places=tuple(range(len(ids))),
            parties=len(ids),
            y=y,
            batches=batches,
            steps=len(batches) * options.epochs,
            weights=self.weights,
            given=self._given(moment),
            loss=self._loss(moment),
            stream=self._draws("step", moment),
            rate=options.rate,
            agg=options.agg,
            clip=options.clip,
            noise=options.noise,
            sends_before=self._shows(moment),
            class_sums=len(self.known) if streaming else 0,
        )

    def _loss(self, moment: Moment) -> partial[dict[str, Tensor]]:
        """The terms of a stage, as a function of numbers alone."""
        options, kept = self.options, ""
        if self._mixing(moment):
            kept = "f"
        elif not self.site.by_columns and options.lambda_a and len(self._old(moment)):
            kept = "a"
        drift = options.drift if options.gamma else ""
        masked, noise = options.seen_mask, options.prototype_noise
        return partial(terms, How(self.network, kept, masked, noise, drift))

    def _given(self, moment: Moment) -> Tensors:
        """What the terms read beside weights and rows."""
        options, like = self.options, self.means
        later = moment.stage > 0
        weights = {"ce": options.lambda_ce if later else 1.0, "a": options.lambda_a,
                   "f": options.lambda_f, "gamma": options.gamma}  # fmt: skip
        found = {f"lambda_{name}": like.new_tensor(value) for name, value in weights.items()}
        old = self._old(moment) if later else self._old(moment)[:0]
        seen = self.seen[: self.classes]
        return found | {"means": like, "mixed": self.mixed, "old": old, "seen": seen}

    def _by_messages(
        self, clients: Clients, moment: Moment, work: SplitJob
    ) -> tuple[dict[str, float], Tensor]:
        """The steps one by one: each term summed over rows, and embeddings over classes."""
        options, ids, y, seed = self.options, work.ids, work.y, work.batches.key
        totals: dict[str, float] = {}
        sums = torch.zeros_like(self.means, dtype=torch.float64)
        empty = self.means.new_zeros((0, options.width))
        replies = clients.ask(Client.learn, dict.fromkeys(ids, Learn(seed, 0, True, empty)))
        for step in range(work.steps):
            labels = y[work.batches.at(step, y.device)]
            parts = {id: self._now_and_before(id, r, len(labels)) for id, r in replies.items()}
            joint, before = (
                joined(list(p), options.agg) for p in zip(*parts.values(), strict=True)
            )
            sums.index_add_(0, labels, joint.double())
            said, by_joint = self._step(joint, before, labels, (moment, step))
            for name, value in said.items():
                totals[name] = totals.get(name, 0.0) + value * len(labels)
            gradient = parts_of(by_joint, len(ids), options.agg)[0]  # the same for all
            request = Learn(seed, step + 1, step + 1 < work.steps, gradient)
            replies = clients.ask(Client.learn, dict.fromkeys(ids, request))
        return totals, sums

    def _note(self, clients: Clients, moment: Moment, work: SplitJob) -> None:
        """Enter in the ledger what the messages of a round would have been."""
        for asked, embedding, count in would_be(work, self.options.width, self.means.dtype):
            before = embedding if self._shows(moment) else embedding[:0]
            clients.note(Client.learn, work.ids, (asked, Learned(embedding, before)), count)

    def _now_and_before(self, id: str, reply: Learned, rows: int) -> tuple[Tensor, Tensor]:
        width, device = self.options.width, self.site.device
        now = fitting(reply.embedding, rows, width, id).to(device)
        return now, fitting(reply.before, len(reply.before) and rows, width, id).to(device)

    def _step(
        self, joint: Tensor, before: Tensor, y: Tensor, where: tuple[Moment, int]
    ) -> tuple[dict[str, float], Tensor]:
        """One step of the top; the terms of its loss, and the gradient by the joined embedding."""
        moment, step = where
        joint = joint.detach().requires_grad_()
        moving = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        key = torch.tensor(self._draws("step", moment).child(step).key, device=y.device)
        with torch.enable_grad():
            read = Step(joint, before, y, key)
            found = self._loss(moment)(moving, self._given(moment), read)
        finite(float(found["loss"].detach()), moment.stage, moment.round)
        by_joint, *gradients = torch.autograd.grad(found["loss"], [joint, *moving.values()])
        by_name = dict(zip(moving, gradients, strict=True))
        self.weights = stepped(self.weights, by_name, self.options.rate, None)
        said = {name: float(term.detach()) for name, term in found.items()}
        return said, guarded(by_joint, self.options.clip, self.options.noise, draws(key, 3))

    def _old(self, moment: Moment) -> Tensor:
        """Classes with a prototype that the stage has no rows of (O)."""
        return torch.nonzero(self.known & ~self._present(moment)).flatten()

    def _shows(self, moment: Moment) -> bool:
        """Whether clients also send what their old networks say."""
        return self.options.gamma > 0 and moment.stage > 0 and not self.site.by_columns

    def _present(self, moment: Moment) -> Tensor:
        y = self.site.train(moment.stage).y
        return torch.bincount(y, minlength=len(self.known)) > 0

    def _end(self, clients: Clients, moment: Moment) -> dict[str, float]:
        """d.4: prototypes by eq. 5, Fisher diagonals, and what was held back at each client."""
        means, counts = self._means(clients, moment)
        evolution = evolved(self.means, self.known, means, counts, self.options.beta)
        moved = (evolution - self.means).norm(dim=-1)
        both = torch.nonzero(self.known & (counts > 0)).flatten().tolist()
        notes = {f"moved class {kind}": float(moved[kind]) for kind in both}
        self._mixes = {str(self.site.classes[kind]): float(moved[kind]) for kind in both}
        self.means, self.known = evolution, self.known | (counts > 0)
        if self.options.lmo_rule != "off":
            self._measure(clients, moment)
        ids = self._learners(moment)
        replies = clients.ask(Client.settle, dict.fromkeys(ids, Empty()))
        return notes | {f"frozen {id}": reply.frozen for id, reply in replies.items()}

    def _measure(self, clients: Clients, moment: Moment) -> None:
        """Send each sample's own gradient of the cross-entropy to the clients."""
        options, y = self.options, self.site.train(moment.stage).y
        seed = self.site.stream("fisher", moment).key
        count, ids = min(options.fisher_rows, len(y)), self._learners(moment)
        parts = self._embedded(clients, ids, "train", moment.stage, (seed, count))
        joint = joined(list(parts.values()), options.agg).requires_grad_()
        labels = y[Batches(len(y), len(y), seed).at(0, y.device)[:count]]
        with torch.enable_grad():  # a sum over samples: each row's gradient is its own
            loss = F.cross_entropy(self._logits(joint), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, [joint])
        # it tells as much of labels as those of the steps, which are smaller by the batch
        key = torch.tensor(self._draws("fisher noise", moment).key, device=y.device)
        by = options.batch
        gradient = guarded(gradient, by * options.clip, by * options.noise, key)
        part = parts_of(gradient, len(ids), options.agg)[0]
        clients.ask(Client.measure, dict.fromkeys(ids, Measure(seed, part)))

    def _embedded(
        self,
        clients: Clients,
        ids: list[str],
        part: Literal["train", "test"],
        number: int,
        sample: tuple[int, int] = (0, 0),  # seed and count of rows drawn; 0 for all
    ) -> Tensors:
        """The embeddings of rows of a stage or task, by client."""
        seed, count = sample
        rows = count or len((self.site.train if part == "train" else self.site.test)(number))
        found: dict[str, list[Tensor]] = {id: [] for id in ids}
        start = 0
        for wanted in chunks([rows]):
            request = Embed(part, number, seed, start, wanted)
            for id, reply in clients.ask(Client.embed, dict.fromkeys(ids, request)).items():
                rows_of = fitting(reply.embedding, wanted, self.options.width, id)
                found[id].append(rows_of.to(self.site.device))
            start += wanted
        return {id: torch.cat(parts) for id, parts in found.items()}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every task so far, and all their classes together (variant `union`)."""
        tasks, self._tested = list(clients.tasks), (self.means[:0], self.arrived[:0])
        said = {task: self._predicted(clients, moment, task) for task in tasks}
        oracle = self.site.by_columns and self.options.fil_eval == "label_oracle"
        variant = "label_oracle" if oracle else ""
        found = [self._score(moment, task, variant, *said[task]) for task in tasks]
        if self.site.stages > 1 and not self.site.by_columns:
            found.append(self._score(moment, moment.stage, "union", *union(said, self.site.fresh)))
        return found

    def _predicted(self, clients: Clients, moment: Moment, task: int) -> tuple[Tensor, Tensor]:
        y = self.site.test(task).y
        rows = self._embedded(clients, self.site.parties(moment.stage), "test", task)
        parts = list(rows.values())
        if self._mixes_clients and self.options.fil_eval == "label_oracle" and moment.stage:
            # J1: what the published code tests. It reads the true label; for diagnosis only.
            joint = 0.5 * parts[-1] + 0.5 * moment.stage * self.means[y]
        else:
            joint = self._joint(parts)
        self._tested = (
            torch.cat([self._tested[0], joint[:SHOWN]]),
            torch.cat([self._tested[1], y[:SHOWN]]),
        )
        with torch.no_grad():
            return self._logits(joint), y

    @property
    def _mixes_clients(self) -> bool:
        """Whether each client was trained by itself."""
        return self.site.by_columns and self.options.protocol == "P1"

    def _joint(self, parts: list[Tensor]) -> Tensor:
        """What the top reads of rows whose labels nobody has."""
        if self._mixes_clients:
            return combined(parts, self.options.fil_eval, self.options.beta)
        return joined(parts, self.options.agg)

    def said(self, parts: list[Tensor]) -> Tensor:
        """The logits of new rows, from their embeddings at each client."""
        if self._mixes_clients and self.options.fil_eval == "label_oracle":
            remedy = "run it again with another fil_eval, e.g. mix"
            raise UserError("label_oracle reads labels, which new rows lack", "method", remedy)
        with torch.no_grad():
            return self._logits(self._joint(parts))

    def _logits(self, joint: Tensor) -> Tensor:
        seen = self.seen[: self.classes]
        return masked_logits(self.network, self.weights, joint, seen, self.options.seen_mask)

    def _score(self, moment: Moment, task: int, variant: str, logits: Tensor, y: Tensor) -> Score:
        correct, f1 = hits(logits, y)
        where = (moment.stage, moment.round, "server", task, variant, "test")
        return Score(*where, len(y), correct, f1)

    def look(self, moment: Moment) -> list[Look]:
        """Prototypes, some test embeddings, and how well labels could be guessed from gradients."""
        names, where = self.site.classes, (moment.stage, SERVER)
        columns = tuple(f"e{number}" for number in range(self.options.width))
        known = [str(names[kind]) for kind in torch.nonzero(self.known).flatten().tolist()]
        tested = tuple(str(names[kind]) for kind in self._tested[1].tolist())
        found = [
            Look(*where, "prototypes", tuple(known), columns, _plain(self.means[self.known])),
            Look(*where, "embeddings", tested, columns, _plain(self._tested[0])),
        ]
        if self._mixes:
            far = tuple((value,) for value in self._mixes.values())
            found.append(Look(*where, "mixed", tuple(self._mixes), ("moved",), far))
        guesses = self._guesses(moment)
        shares = tuple((share, 1 / len(self._learned[1].unique())) for share in guesses.values())
        if guesses:
            columns = ("guessed", "chance")
            found.append(Look(*where, "labels from gradients", tuple(guesses), columns, shares))
        return found

    def _guesses(self, moment: Moment) -> dict[str, float]:
        """The share of labels that a curious client finds, as the options are and with more noise.

        It knows three rows of each class, and gradients as they would be sent for one batch each.
        """
        joint, y = self._learned
        kinds = y.unique()
        known = torch.cat([torch.nonzero(y == kind).flatten()[:3] for kind in kinds] or [y])
        if len(y) < FEWEST or len(known) == len(y):
            return {}
        rows, options = joint.detach().requires_grad_(), self.options
        with torch.enable_grad():
            loss = F.cross_entropy(self._logits(rows), y, reduction="sum") / options.batch
        (plain,) = torch.autograd.grad(loss, [rows])
        key = torch.tensor(self.site.stream("audit", moment).key, device=y.device)
        size = float(plain.norm(dim=1).mean())
        noisier = {"as set": (options.clip, options.noise),
                   "clip and noise 0.3": (size, 0.3 * size),
                   "clip and noise 1": (size, size)}  # fmt: skip
        sent = {how: guarded(plain, *amount, key) for how, amount in noisier.items()}
        return {how: labels_from_gradients(g, y, known) for how, g in sent.items()}

    def state(self) -> Tensors:
        return prefixed("weights", self.weights) | {
            "seen": self.seen,
            "known": self.known,
            "means": self.means,
            "received": self.received,
            "arrived": self.arrived,
        }

    def restore(self, state: Tensors) -> None:
        state = {name: tensor.to(self.site.device) for name, tensor in state.items()}
        self.weights = copied(without("weights", state))
        self.classes = len(self.weights[f"bias{len(self.weights) // 2 - 1}"])
        self.seen, self.known = state["seen"].clone(), state["known"].clone()
        self.means, self.received = state["means"].clone(), state["received"].clone()
        self.arrived = state["arrived"].clone()


def _plain(rows: Tensor) -> tuple[tuple[float, ...], ...]:
    """Rows as short numbers for a file."""
    return tuple(tuple(float(f"{value:.4g}") for value in row) for row in rows.tolist())


class How(NamedTuple):
    """What the terms of a stage are made of."""

    network: Architecture
    kept: str  # "a": prototypes of classes that are gone; "f": mixed ones; "": none
    masked: bool  # classes that no stage has had are left out
    noise: float  # on prototypes that are rehearsed
    drift: str  # "scalar", "vector", or "" where prototypes do not follow it


def terms(
    how: How, weights: Mapping[str, Tensor], given: Mapping[str, Tensor], step: Step
) -> dict[str, Tensor]:
    """The loss of a step and its terms; only L_CE reaches the clients, the others read constants.

    L_CE on the batch, L_A on noisy prototypes of old classes, L_F on mixed prototypes.
    """

    def entropy(rows: Tensor, labels: Tensor) -> Tensor:
        logits = masked_logits(how.network, weights, rows, given["seen"], how.masked)
        return F.cross_entropy(logits, labels)

    y, found = step.y, {"ce": entropy(step.joint, step.y)}
    if how.kept == "f":
        found["f"] = entropy(given["mixed"][y], y)
    elif how.kept == "a":
        labels = given["old"][:, None].expand(-1, len(y)).flatten()  # B copies of each
        rows = moved(given["means"], given["lambda_gamma"], how.drift, step)
        found["a"] = entropy(noisy(rows[labels], how.noise, draws(step.key, 1)), labels)
    total = torch.stack([given[f"lambda_{name}"] * term for name, term in found.items()]).sum()
    return {"loss": total, **{f"loss_{name}": term for name, term in found.items()}}


def masked_logits(
    network: Architecture, weights: Mapping[str, Tensor], rows: Tensor, seen: Tensor, masked: bool
) -> Tensor:
    """The logits; with the mask, classes that no stage has had are as unlikely as can be."""
    logits = network(weights, rows)
    return logits.masked_fill(~seen, -torch.inf) if masked else logits


def moved(means: Tensor, gamma: Tensor, drift: str, step: Step) -> Tensor:
    """mu_hat: prototypes that follow the drift of the batch's classes (eq. 3 and 4)."""
    if not drift or not len(step.before):
        return means
    joint, before = step.joint.detach(), step.before
    kinds = (step.y[:, None] == torch.arange(len(means), device=step.y.device)).to(joint.dtype)
    counts = kinds.sum(0)
    now, past = (kinds.T @ rows / counts.clamp(min=1)[:, None] for rows in (joint, before))
    follow = drift_scalar if drift == "scalar" else drift_vector
    return means + gamma * follow(past, now, counts > 0)


def combined(parts: list[Tensor], how: str, beta: float) -> Tensor:
    """d.3 step 11: what the top reads at a test where each client was trained by itself.

    mix: H_k = beta E_k + (1 - beta) H_(k-1), whose class means are the prototypes of eq. 5.
    """
    if how == "sum":
        return torch.stack(parts).sum(0)
    found = parts[0]
    for part in parts[1:]:
        found = beta * part + (1 - beta) * found
    return parts[-1] if how == "current" else found


def answered(server: Server, clients: Mapping[str, Client], rows: Tensors) -> Tensor:
    """The logits of new rows, of which each client reads its own columns."""
    ids = server.site.parties(server.site.stages - 1)
    return server.said([clients[id]._sent(rows[id]) for id in ids])


METHOD = Method(Options, Server, Client, split="parties", headline="union", answered=answered)
