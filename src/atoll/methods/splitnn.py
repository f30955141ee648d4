"""Split learning: clients hold columns, the server labels; embeddings go up, gradients come down.

Ceballos et al., SplitNN-driven Vertical Partitioning, 2020; Romanini et al., PyVertical, 2021.

Each client has a bottom network on its own columns, the server a top network on the joined
embeddings. The message that brings one batch's gradient asks for the next batch's embedding. Over
stages the same networks go on learning, which forgets: it is the yardstick of V-LETO. `replay`
adds what other continual methods would rehearse; `fresh` begins anew at each stage (Standalone).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.federation import Clients, Moment
from atoll.core.messages import Embed, Embedded, Empty, Learn, Tensors
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.split_round import Lent, SplitJob, Step, draws, viewed_labels, would_be
from atoll.jobs.train import hits
from atoll.learning.knowledge import class_means
from atoll.learning.models import Architecture
from atoll.learning.replay import (
    contrast,
    noisy,
    picked,
    radius,
    translated,
    turned,
)
from atoll.learning.split import (
    Agg,
    Batches,
    Half,
    chunks,
    distance_gradient,
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

TAU = 0.1  # temperature of PASS and FedSpace
W_PA, W_KD = 10.0, 10.0  # PASS: weights of prototypes and of distillation
W_SPACE = 0.01  # FedSpace: weight of prototypes, and of contrast
NEW = 0.1  # FedSpace: weight of a new prototype in the running mean


@dataclass(frozen=True)
class Options:
    """The options of `splitnn`."""

    rate: Positive = 0.01  # size of a step, of all networks
    batch: AtLeastOne = 128  # rows in a step; the last, smaller batch is kept
    epochs: AtLeastOne = 1  # passes over the rows in a round
    network: NetName = "auto"  # lenet3, lenet2, mlp, dense; auto: lenet3 where it fits, else dense
    width: AtLeastOne = 50  # of an embedding (d)
    dropout: Fraction = 0.5  # of the embedding in training, with network = "mlp" only
    agg: Agg = "sum"  # how embeddings are joined: sum, mean or concat
    fresh: bool = False  # new networks at each stage, tested on that stage's task: Standalone
    replay: Literal["none", "pass", "fedspace", "fedprok"] = "none"  # a rehearsal of old classes
    rotate: bool = True  # replay = "pass", on images: each row also turned by 180 degrees
    protocol: Literal["P1", "P2"] = "P1"  # columns by stage: the new client alone, or all so far
    fil_eval: Literal["sum", "current"] = "sum"  # columns by stage: joined at the test, or newest
    seen_mask: bool = False  # leave out classes that no stage has had yet
    declared: NotNegativeInt = 0  # classes that are known from the start; 0 for all of the data set
    undeclared: Literal["refuse", "widen"] = "refuse"  # what a class beyond those does
    pixel_mean: tuple[float, ...] = ()  # of each channel, from 0 to 1; empty: pixels from -1 to 1
    pixel_std: tuple[float, ...] = ()  # of each channel, with pixel_mean
    clip: NotNegative = 0.0  # longest gradient of a row that is sent; 0 for any
    noise: NotNegative = 0.0  # deviation of the noise on gradients that are sent
    secret: bool = False  # draw it from the machine, not from the run's seed, which clients know
    digits: NotNegativeInt = 0  # behind the point, of embeddings that are sent; 0 for all


class Client:
    """Holds columns and the bottom network that reads them."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.half = self._first(0)
        self.before: Tensors = {}  # the weights at the end of the last stage, for distillation
        self.done = (-1, -1, -1)  # stage, round and step of the last gradient that was applied
        self._shown: tuple[Rows | None, Tensor] = (
            None,
            torch.empty(0),
        )  # as the network reads them

    def _first(self, stage: int) -> Half:
        """A new network; each client and, with `fresh`, each stage draws its own."""
        names = ("bottom", stage) if stage else ("bottom",)
        options, site = self.options, self.site
        made = bottom(options.network, site.inputs(), options.width, site.stream(*names))
        made = made.to(site.device, site.dtype)
        return Half(made, copied(made.state_dict()))

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

    def learn(self, request: Learn, moment: Moment) -> Embedded:
        """Apply the gradient of the last step, then give the embeddings of the next."""
        if request.step == 0:
            self._begin(moment)
        last = (moment.stage, moment.round, request.step - 1)
        if request.step and last > self.done:  # a message that is repeated is not applied twice
            embedding = self.half.again(last, lambda: self._inputs(request, moment, -1))
            pull = self._distil(embedding.detach(), request, moment)
            gradients = self.half.backward(request.gradient.to(pull) + pull)
            self.half.descend(gradients, self.options.rate)
            self.done = last
        if not request.more:
            return Embedded(request.gradient.new_zeros((0, self.options.width)))
        key = (moment.stage, moment.round, request.step)
        embedding = self.half.forward(key, *self._inputs(request, moment, 0))
        return Embedded(rounded(embedding.detach(), self.options.digits))

    def _begin(self, moment: Moment) -> None:
        if self.options.fresh and moment.first:
            self.half = self._first(moment.stage)

    def lend(self, moment: Moment, work: SplitJob) -> Lent:
        """All that `learn` needs for the steps of a round."""
        self._begin(moment)
        rows = self.site.lesson(moment)
        if self._shown[0] is not rows:
            self._shown = (rows, self._scaled(rows.x))
        keys = [self._key(moment, step) for step in range(work.steps)] if self._dropped else []
        return Lent(
            *(self.half.function, self.half.weights, self._shown[1], self.options.rate),
            before=self.before if self._pulls else {},
            penalty=W_KD if self._pulls else 0.0,
            digits=self.options.digits,
            dropped=self._dropped,
            keys=tuple(keys),
        )

    def take(self, weights: Tensors, moment: Moment, steps: int) -> None:
        """What the steps of a round have made of what was lent."""
        self.half.weights, self.done = weights, (moment.stage, moment.round, steps - 1)

    def settle(self, request: Empty, moment: Moment) -> Empty:
        """Keep the weights with which the stage ended."""
        self.before = copied(self.half.weights)
        return Empty()

    def _inputs(self, request: Learn, moment: Moment, later: int) -> tuple[Tensor, Tensor | None]:
        """The rows of a step and its dropout."""
        options, site, step = self.options, self.site, request.step + later
        rows = site.lesson(moment)
        index = Batches(len(rows), options.batch, request.seed).at(step, site.device)
        x = self._scaled(rows.x[index])
        if options.replay == "pass" and options.rotate and x.dim() == 4:
            x = torch.cat([x, turned(x)])
        key = torch.tensor(self._key(moment, step), device=site.device)
        return x, dropout(self._dropped, (len(x), options.width), key, x)

    @property
    def _dropped(self) -> float:
        return self.options.dropout if self.options.network == "mlp" else 0.0

    @property
    def _pulls(self) -> bool:
        """PASS: whether embeddings are held near those of the old network."""
        return self.options.replay == "pass" and bool(self.before)

    def _key(self, moment: Moment, step: int) -> int:
        return self.site.stream("dropout", moment, step).key

    def _distil(self, embedding: Tensor, request: Learn, moment: Moment) -> Tensor:
        """PASS: the gradient of the distance to the old network, which needs no message."""
        if not self._pulls:
            return torch.zeros_like(embedding)
        x, _ = self._inputs(request, moment, -1)
        return W_KD * distance_gradient(embedding, self.half.embed(x, self.before))

    def _scaled(self, x: Tensor) -> Tensor:
        return pixels(x, self.options.pixel_mean, self.options.pixel_std)

    def state(self) -> Tensors:
        found = prefixed("weights", self.half.weights) | prefixed("before", self.before)
        return found | {"done": torch.tensor(self.done)}

    def restore(self, state: Tensors) -> None:
        self.half = self._first(0)
        self.half.weights = copied(without("weights", state))
        self.before = copied(without("before", state))
        stage, number, step = state["done"].tolist()
        self.done = (stage, number, step)


class Server:
    """Holds labels and the top network, and prototypes where it rehearses."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self._secret = Stream(secrets.randbits(63)) if options.secret else None
        self.classes = options.declared or len(site.classes)
        parties = len(site.clients) if options.agg == "concat" else 1
        self.width = options.width * parties
        self.weights = self._first(0)
        like = next(iter(self.weights.values()))
        self.seen = torch.zeros(len(site.classes), dtype=torch.bool, device=site.device)
        self.means = like.new_zeros((len(site.classes), self.width))  # mu_g
        self.counts = torch.zeros(len(site.classes), dtype=torch.int64, device=site.device)
        self.radius = torch.tensor(0.0)
        self.current = torch.zeros_like(self.means)  # mu_t of the stage, for FedProK

    def _first(self, stage: int) -> Tensors:
        names = ("top", stage) if stage else ("top",)
        outputs = self.classes * self._turns()
        made = top(self.options.network, self.width, outputs, self.site.stream(*names))
        self.network = Architecture(made)
        return copied(made.to(self.site.device, self.site.dtype).state_dict())

    def _turns(self) -> int:
        """Outputs of a class: two where rows are also shown turned."""
        images = all(len(self.site.shape_of(id)) == 3 for id in self.site.clients)
        return 2 if self.options.replay == "pass" and self.options.rotate and images else 1

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Some passes over the rows; at the end of a stage, prototypes."""
        if moment.first:
            self._begin(moment)
        notes = {"loss": self._passes(clients, moment)}
        if moment.last and self.options.replay != "none":
            self._keep(clients, moment)
            clients.ask(Client.settle, dict.fromkeys(self._learners(moment), Empty()))
        return notes

    def _begin(self, moment: Moment) -> None:
        """The head of a stage: new, or with the classes that were not declared."""
        highest = int(self.site.train(moment.stage).y.max()) + 1
        if highest > self.classes:
            self._undeclared(highest, moment)
        if self.options.fresh and moment.stage:
            self.weights = self._first(moment.stage)
        self.seen = self.seen.clone()
        self.seen[self.site.train(moment.stage).y] = True

    def _undeclared(self, highest: int, moment: Moment) -> None:
        if self.options.undeclared == "refuse":
            raise not_declared(self.site.classes[highest - 1], moment.stage, self.classes)
        stream = self.site.stream("widen", moment.stage)
        self.classes = highest
        self.weights = widened(self.weights, highest * self._turns(), stream)

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

    def _passes(self, clients: Clients, moment: Moment) -> float:
        """The steps of a round; the mean loss."""
        if self.options.replay == "fedprok" and moment.stage:
            self._refresh(clients, moment)
        work = self._work(moment)
        done = clients.whole(work)
        if done is None:
            total = self._by_messages(clients, moment, work)
        else:
            total, self.weights = done.totals["loss"], done.weights
            finite(total, moment.stage, moment.round)
            for asked, embedding, count in would_be(work, self.options.width, self.means.dtype):
                clients.note(Client.learn, work.ids, (asked, Embedded(embedding)), count)
        return total / max(1, self.options.epochs * len(work.y) * self._turns())

    def _work(self, moment: Moment) -> SplitJob:
        """The steps of a round, as an engine can do them that holds all clients."""
        options, ids, every = self.options, self._learners(moment), list(self.site.clients)
        y = self.site.train(moment.stage).y
        batches = Batches(len(y), options.batch, self.site.stream("order", moment).key)
        return SplitJob(
            ids=tuple(ids),
            places=tuple(every.index(id) for id in ids),
            parties=len(every),
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
            views=(turned,) if self._turns() == 2 else (),
        )

    def _loss(self, moment: Moment) -> partial[dict[str, Tensor]]:
        """The loss of a stage, as a function of numbers alone."""
        options = self.options
        replay = options.replay if moment.stage and len(self._old(moment)) else "none"
        masked = options.seen_mask or options.replay == "fedspace"
        tau = TAU if options.replay in ("pass", "fedspace") else 1.0
        return partial(losses, How(self.network, replay, self._turns(), masked, tau))

    def _given(self, moment: Moment) -> Tensors:
        """What the loss reads beside weights and rows."""
        here = (self._now(moment) > 0)[:, None]
        return {
            "seen": self.seen[: self.classes].repeat_interleave(self._turns()),
            "means": self.means,
            "current": torch.where(here, self.current, self.means),
            "old": self._old(moment),
            "radius": self.radius.to(self.means),
        }

    def _by_messages(self, clients: Clients, moment: Moment, work: SplitJob) -> float:
        """The steps one by one; the sum of the loss over rows."""
        ids, y, seed = work.ids, work.y, work.batches.key
        total, empty = 0.0, self.means.new_zeros((0, self.options.width))
        replies = clients.ask(Client.learn, dict.fromkeys(ids, Learn(seed, 0, True, empty)))
        for step in range(work.steps):
            labels = y[work.batches.at(step, y.device)]
            labels = viewed_labels(labels, work.views)
            loss, gradients = self._step(
                {id: reply.embedding for id, reply in replies.items()}, labels, moment, step
            )
            total += loss * len(labels)
            more = step + 1 < work.steps
            asked = {id: Learn(seed, step + 1, more, gradients[id]) for id in ids}
            if self.options.agg != "concat":  # one gradient for all is packed once
                asked = dict.fromkeys(ids, asked[ids[0]])
            replies = clients.ask(Client.learn, asked)
        return total

    def _step(
        self, replies: Tensors, y: Tensor, moment: Moment, step: int
    ) -> tuple[float, Tensors]:
        """One step of the top; its loss, and the gradient by each client's embedding."""
        options = self.options
        ids = list(replies)
        replies = {
            id: fitting(reply, len(y), options.width, id).to(y.device)
            for id, reply in replies.items()
        }
        joint = self._joined(replies).requires_grad_()
        moving = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        key = torch.tensor(self._draws("step", moment).child(step).key, device=y.device)
        with torch.enable_grad():
            read = Step(joint, joint.detach()[:0], y, key)
            loss = self._loss(moment)(moving, self._given(moment), read)["loss"]
        said = float(loss.detach())
        finite(said, moment.stage, moment.round)
        by_joint, *found = torch.autograd.grad(loss, [joint, *moving.values()])
        gradients = dict(zip(moving, found, strict=True))
        self.weights = stepped(self.weights, gradients, options.rate, None)
        by_joint = guarded(by_joint, options.clip, options.noise, draws(key, 3))
        return said, self._parts(by_joint, ids)

    def _joined(self, replies: Mapping[str, Tensor]) -> Tensor:
        """The global embedding; in a concatenation a client that is absent counts as 0."""
        if self.options.agg == "concat":
            like = torch.zeros_like(next(iter(replies.values())))
            return joined([replies.get(id, like) for id in self.site.clients], "concat")
        return joined(list(replies.values()), self.options.agg)

    def _parts(self, by_joint: Tensor, ids: list[str]) -> Tensors:
        if self.options.agg == "concat":
            pieces = parts_of(by_joint, len(self.site.clients), "concat")
            every = dict(zip(self.site.clients, pieces, strict=True))
            return {id: every[id] for id in ids}
        return dict(zip(ids, parts_of(by_joint, len(ids), self.options.agg), strict=True))

    def _now(self, moment: Moment) -> Tensor:
        """How many rows of each class a stage has."""
        return torch.bincount(self.site.train(moment.stage).y, minlength=len(self.counts))

    def _old(self, moment: Moment) -> Tensor:
        """Classes with a prototype that the stage has no rows of; where there are none, all."""
        known = (self.counts > 0) & bool(moment.stage)
        gone = known & (self._now(moment) == 0)
        return torch.nonzero(gone if gone.any() else known).flatten()

    def _refresh(self, clients: Clients, moment: Moment) -> None:
        """The class means of the stage as they are now."""
        y = self.site.train(moment.stage).y
        rows = self._joined(self._embedded(clients, self._learners(moment), "train", moment.stage))
        self.current, _ = class_means(rows, y, len(self.counts))

    def _keep(self, clients: Clients, moment: Moment) -> None:
        """Prototypes at the end of a stage, as each rehearsal keeps them."""
        y = self.site.train(moment.stage).y
        rows = self._joined(self._embedded(clients, self._learners(moment), "train", moment.stage))
        means, counts = class_means(rows, y, len(self.counts))
        if moment.stage == 0:
            self.radius = torch.tensor(radius(rows, y, means))
        known, now = (self.counts > 0)[:, None], (counts > 0)[:, None]
        if self.options.replay == "fedprok":
            both = (self.counts + counts).clamp(min=1)[:, None]
            mixed = (self.counts[:, None] * self.means + counts[:, None] * means) / both
        elif self.options.replay == "fedspace":
            mixed = torch.where(now, (1 - NEW) * self.means + NEW * means, self.means)
        else:  # PASS never changes a prototype
            mixed = self.means
        self.means = torch.where(known, mixed, torch.where(now, means, self.means)).to(means)
        self.counts = self.counts + counts

    def _embedded(self, clients: Clients, ids: list[str], part: str, number: int) -> Tensors:
        """The embeddings of all rows of a stage or task, by client."""
        rows = len((self.site.train if part == "train" else self.site.test)(number))
        found: dict[str, list[Tensor]] = {id: [] for id in ids}
        start = 0
        for wanted in chunks([rows]):
            request = Embed("train" if part == "train" else "test", number, 0, start, wanted)
            for id, reply in clients.ask(Client.embed, dict.fromkeys(ids, request)).items():
                part_of = fitting(reply.embedding, wanted, self.options.width, id)
                found[id].append(part_of.to(self.site.device))
            start += wanted
        return {id: torch.cat(parts) for id, parts in found.items()}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every task so far, and all their classes together (variant `union`)."""
        several = self.site.stages > 1 and not self.site.by_columns
        tasks = [moment.stage] if self.options.fresh and several else list(clients.tasks)
        ids = self.answering(moment.stage)
        said = {task: self._predicted(clients, ids, task) for task in tasks}
        found = [self._score(moment, task, "", *said[task]) for task in tasks]
        if several and not self.options.fresh:
            found.append(self._score(moment, moment.stage, "union", *union(said, self.site.fresh)))
        return found

    def answering(self, stage: int) -> list[str]:
        """The clients whose columns a prediction reads after a stage."""
        ids = self.site.parties(stage)
        newest = self.options.fresh or self.options.fil_eval == "current"
        return ids[-1:] if self.site.by_columns and newest else ids

    def _predicted(self, clients: Clients, ids: list[str], task: int) -> tuple[Tensor, Tensor]:
        return self.said(self._embedded(clients, ids, "test", task)), self.site.test(task).y

    def said(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The logits of rows, from their embeddings at each client."""
        with torch.no_grad():
            logits = self.network(self.weights, self._joined(parts))
            if self.options.seen_mask:
                seen = self.seen[: self.classes].repeat_interleave(self._turns())
                logits = logits.masked_fill(~seen, -torch.inf)
        return logits[:, :: self._turns()]

    def _score(self, moment: Moment, task: int, variant: str, logits: Tensor, y: Tensor) -> Score:
        correct, f1 = hits(logits, y)
        where = (moment.stage, moment.round, "server", task, variant, "test")
        return Score(*where, len(y), correct, f1)

    def state(self) -> Tensors:
        return prefixed("weights", self.weights) | {
            "seen": self.seen,
            "means": self.means,
            "counts": self.counts,
            "radius": self.radius,
        }

    def restore(self, state: Tensors) -> None:
        state = {name: tensor.to(self.site.device) for name, tensor in state.items()}
        self.weights = copied(without("weights", state))
        last = self.weights[f"bias{len(self.weights) // 2 - 1}"]
        self.classes = len(last) // self._turns()
        self.seen, self.means = state["seen"].clone(), state["means"].clone()
        self.counts, self.radius = state["counts"].clone(), state["radius"].clone()


class How(NamedTuple):
    """What the loss of a stage is made of."""

    network: Architecture
    replay: str
    turns: int  # outputs of a class
    masked: bool  # classes that no stage has had are left out
    tau: float  # temperature


def losses(
    how: How, weights: Mapping[str, Tensor], given: Mapping[str, Tensor], step: Step
) -> dict[str, Tensor]:
    """Cross-entropy, and what the chosen rehearsal adds (section h of the specification)."""

    def entropy(rows: Tensor, labels: Tensor) -> Tensor:
        logits = how.network(weights, rows)
        if how.masked:
            logits = logits.masked_fill(~given["seen"], -torch.inf)
        return F.cross_entropy(logits / how.tau, labels)

    joint, y, means = step.joint, step.y, given["means"]
    loss = entropy(joint, y)
    if how.replay == "none":
        return {"loss": loss}
    wanted = picked(given["old"], len(y), draws(step.key, 1))
    if how.replay == "fedprok":
        moved = translated(joint, given["current"][y], means[wanted])
        return {"loss": loss + entropy(moved, wanted)}
    rows = noisy(means[wanted], given["radius"], draws(step.key, 2))
    rehearsed = entropy(rows, wanted * how.turns)
    if how.replay == "pass":
        return {"loss": loss + W_PA * rehearsed}
    both, labels = torch.cat([joint, rows]), torch.cat([y, wanted])
    return {"loss": loss + W_SPACE * (rehearsed + contrast(both, labels, len(y)))}


def answered(server: Server, clients: Mapping[str, Client], rows: Tensors) -> Tensor:
    """The logits of new rows, of which each client reads its own columns."""
    ids = server.answering(server.site.stages - 1)
    return server.said({id: clients[id]._sent(rows[id]) for id in ids})


METHOD = Method(Options, Server, Client, split="parties", headline="union", answered=answered)
