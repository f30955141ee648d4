"""Split learning: the messages and both halves of a round, shared by all vertical methods.

Clients hold columns and a bottom network, the server holds labels and a top network. Embeddings go
up, gradients come down; the message that brings one batch's gradient asks for the next batch's
embeddings, so a step is one exchange. `Learner` is the client's half, `Head` the server's. `Head`
trains message by message or, where one process holds all halves, as one `SplitJob`.

A method passes the loss of the top, and what its paper adds: frozen entries, a penalty on the
distance to reference embeddings, further views of each row, reference embeddings, class sums.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.annotations import Outputs, RowGradient, Task
from atoll.core.federation import Clients, Moment, kinds
from atoll.core.messages import Tensors
from atoll.core.record import Score
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.vertical_site import VerticalSite
from atoll.jobs.split_round import Lent, Loss, SplitJob, SplitResult, Step, View, draws, viewed
from atoll.jobs.train import errors, hits
from atoll.learning import split
from atoll.learning.knowledge import share
from atoll.learning.models import Architecture
from atoll.learning.split_nets import NetName, bottom, top, widened
from atoll.learning.weights import copied, prefixed, without

__all__ = [
    "Embed",
    "Embedded",
    "Head",
    "Learn",
    "Learned",
    "Learner",
    "Predictions",
    "Settings",
    "label_loss",
    "masked_logits",
    "ordered",
    "scores",
]

Predictions = Mapping[int, tuple[Tensor, Tensor]]  # logits and labels of each task
EmbedAction = Callable[[Any, "Embed", Moment], "Embedded"]
LearnAction = Callable[[Any, "Learn", Moment], "Embedded | Learned"]


@dataclass(frozen=True)
class Settings:
    """The options that every vertical method has, under the names they have there."""

    rate: float
    batch: int
    epochs: int
    network: NetName
    width: int
    dropout: float
    agg: split.Agg
    protocol: Literal["P1", "P2"]
    seen_mask: bool
    declared: int
    undeclared: Literal["refuse", "widen"]
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    clip: float
    noise: float
    secret: bool
    digits: int

    @classmethod
    def of(cls, options: object) -> "Settings":
        """The shared options among those of a method."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Embed:
    """A request for the embeddings of rows, without gradient."""

    part: Literal["train", "test"]
    number: Annotated[int, Task(part="part")]  # the stage or task
    seed: int  # of the order of rows; 0: their own order
    start: int
    count: int


@dataclass(frozen=True)
class Embedded:
    """Embeddings, in the order of the requested rows."""

    embedding: Annotated[Tensor, Outputs(tails=True, aligned=True)]  # (rows, width)


@dataclass(frozen=True)
class Learn:
    """The gradient of the last step, and a request for the embeddings of the next."""

    seed: int  # of the order of rows in this round
    step: int  # batches so far in this round
    more: bool  # whether there is a next step
    gradient: Annotated[Tensor, RowGradient()]  # (rows, width), no rows before the first step


@dataclass(frozen=True)
class Learned:
    """Embeddings of a step by the current and by the reference weights."""

    embedding: Annotated[Tensor, Outputs(tails=True, aligned=True)]  # (rows, width)
    before: Annotated[Tensor, Outputs(tails=True)]  # (rows, width), or no rows: no reference


class Learner:
    """The client's half: embeds the rows of its columns and applies gradients."""

    def __init__(self, options: object, site: VerticalSite, views: tuple[View, ...] = ()) -> None:
        """Draw the bottom network; `views` augment the rows of each step."""
        self.settings, self.site, self.views = Settings.of(options), site, views
        self.before: Tensors = {}  # reference weights: those at the end of the last stage
        self.place = (-1, -1, -1)  # stage, round and step of the last applied gradient
        self._scaled: tuple[Rows | None, Tensor] = (None, torch.empty(0))
        self.start(0)

    def start(self, stage: int) -> None:
        """Draw a new network; each client and each stage draws its own."""
        settings, site = self.settings, self.site
        names = ("bottom", stage) if stage else ("bottom",)
        network = bottom(settings.network, site.inputs(), settings.width, site.stream(*names))
        network = network.to(site.device, site.dtype)
        self.half = split.Half(network, copied(network.state_dict()))

    def embed(self, request: Embed) -> Embedded:
        """The embeddings of rows in the requested order."""
        rows = self.site.train if request.part == "train" else self.site.test
        x = rows(request.number).x
        if request.seed:
            x = x[split.Batches(len(x), len(x), request.seed).at(0, x.device)]
        return Embedded(self.embeddings(x[request.start : request.start + request.count]))

    def embeddings(self, x: Tensor) -> Tensor:
        """The embeddings of rows, rounded as they may leave the site."""
        return split.rounded(self.half.embed(self.scaled(x)), self.settings.digits)

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The embeddings of rows by a final model."""
        embedding = self.half.function(model, self.scaled(rows.x))
        return split.rounded(embedding, self.settings.digits)

    def learn(
        self, request: Learn, moment: Moment, frozen: Tensors | None = None, penalty: float = 0.0
    ) -> Tensor:
        """Apply the gradient of the last step, then return the embeddings of the next."""
        last = (moment.stage, moment.round, request.step - 1)
        if request.step and last > self.place:  # a repeated message is applied once
            if not _covers(frozen):
                self._descend(request, moment, frozen, penalty)
            self.place = last
        if not request.more:
            return request.gradient.new_zeros((0, self.settings.width))
        x, mask = self._inputs(request.seed, request.step, moment)
        if _covers(frozen):  # no gradient is needed
            embedding = self.half.embed(x) if mask is None else self.half.embed(x) * mask
        else:
            key = (moment.stage, moment.round, request.step)
            embedding = self.half.forward(key, x, mask).detach()
        return split.rounded(embedding, self.settings.digits)

    def _descend(
        self, request: Learn, moment: Moment, frozen: Tensors | None, penalty: float
    ) -> None:
        step = request.step - 1
        key = (moment.stage, moment.round, step)
        embedding = self.half.again(key, lambda: self._inputs(request.seed, step, moment))
        gradient = request.gradient.to(embedding)
        if penalty and self.before:
            x, _ = self._inputs(request.seed, step, moment)
            past = self.half.embed(x, self.before)
            gradient = gradient + penalty * split.distance_gradient(embedding.detach(), past)
        self.half.descend(self.half.backward(gradient), self.settings.rate, frozen)

    def reference(self, request: Learn, moment: Moment) -> Tensor:
        """The embeddings of the next step by the reference weights, or no rows."""
        if not request.more or not self.before:
            return request.gradient.new_zeros((0, self.settings.width))
        x, _ = self._inputs(request.seed, request.step, moment)
        return split.rounded(self.half.embed(x, self.before), self.settings.digits)

    def lend(
        self, moment: Moment, job: SplitJob, frozen: Tensors | None = None, penalty: float = 0.0
    ) -> Lent:
        """All that `learn` reads in the steps of a round."""
        rows = self.site.lesson(moment)
        if self._scaled[0] is not rows:
            self._scaled = (rows, self.scaled(rows.x))
        keys = [self._key(moment, step) for step in range(job.steps)] if self._dropped else []
        return Lent(
            self.half.function,
            self.half.weights,
            self._scaled[1],
            self.settings.rate,
            frozen,
            still=_covers(frozen),
            before=self.before if penalty or job.sends_before else {},
            penalty=penalty if self.before else 0.0,
            digits=self.settings.digits,
            dropped=self._dropped,
            keys=tuple(keys),
        )

    def take(self, weights: Tensors, moment: Moment, steps: int) -> None:
        """Store the weights that the steps of a round end with."""
        self.half.weights = weights
        self.place = (moment.stage, moment.round, steps - 1)

    def settle(self) -> None:
        """Make the current weights the reference weights of the next stage."""
        self.before = copied(self.half.weights)

    def scaled(self, x: Tensor) -> Tensor:
        """Rows as the network reads them."""
        return split.pixels(x, self.settings.pixel_mean, self.settings.pixel_std)

    def _inputs(self, seed: int, step: int, moment: Moment) -> tuple[Tensor, Tensor | None]:
        """The rows of a step and its dropout mask."""
        settings, device = self.settings, self.site.device
        rows = self.site.lesson(moment)
        index = split.Batches(len(rows), settings.batch, seed).at(step, device)
        x = viewed(self.scaled(rows.x[index]), self.views)
        key = torch.tensor(self._key(moment, step), device=device)
        return x, split.dropout(self._dropped, (len(x), settings.width), key, x)

    @property
    def _dropped(self) -> float:
        return self.settings.dropout if self.settings.network == "mlp" else 0.0

    def _key(self, moment: Moment, step: int) -> int:
        return self.site.stream("dropout", moment, step).key

    def state(self) -> Tensors:
        """The weights, the reference weights, and the last applied step."""
        weights = prefixed("weights", self.half.weights) | prefixed("before", self.before)
        return weights | {"done": torch.tensor(self.place)}

    def restore(self, state: Tensors) -> None:
        """Go on from a state."""
        self.before = ordered("before", state, self.half.weights)
        self.half = split.Half(self.half.network, ordered("weights", state, self.half.weights))
        stage, number, step = state["done"].tolist()[:3]
        self.place = (stage, number, step)


def ordered(part: str, state: Tensors, like: Tensors) -> Tensors:
    """A part of a state in the order of the network's layers; files sort by name."""
    weights = without(part, state)
    return copied({name: weights[name] for name in like if name in weights})


def _covers(frozen: Tensors | None) -> bool:
    """Whether the masks cover every entry."""
    return frozen is not None and share(frozen) == 1


class Head:
    """The server's half: labels, the top network, and the steps of a round."""

    def __init__(
        self,
        options: object,
        site: VerticalSite,
        actions: tuple[EmbedAction, LearnAction],
        views: tuple[View, ...] = (),
    ) -> None:
        """Draw the top network; with `views`, each view of a class has an output of its own."""
        self.settings = settings = Settings.of(options)
        self.site, self.views = site, views
        self._embed, self._learn = actions  # of the method's clients
        parties = len(site.clients) if settings.agg == "concat" else 1
        self.width = settings.width * parties  # of the joined embedding
        self.classes = settings.declared or len(site.classes)
        self.seen = torch.zeros(len(site.classes), dtype=torch.bool, device=site.device)
        self._secret = Stream(secrets.randbits(63)) if settings.secret else None
        self.start(0)

    def start(self, stage: int) -> None:
        """Draw a new top network."""
        site = self.site
        names = ("top", stage) if stage else ("top",)
        outputs = self.classes * self.outputs
        network = top(self.settings.network, self.width, outputs, site.stream(*names))
        self.network = Architecture(network)
        self.weights: Tensors = copied(network.to(site.device, site.dtype).state_dict())

    @property
    def outputs(self) -> int:
        """Outputs of a class: one for each view."""
        return 1 + len(self.views)

    @property
    def by_classes(self) -> bool:
        """Whether new classes come with the stages."""
        return self.site.stages > 1 and not self.site.by_columns

    def begin(self, moment: Moment) -> None:
        """Mark the classes of a stage as seen; undeclared ones raise or widen the top."""
        y = self.site.train(moment.stage).y
        if y.is_floating_point():
            self.seen = torch.ones_like(self.seen)  # one output, for the number
            return
        highest = int(y.max()) + 1
        if highest > self.classes:
            if self.settings.undeclared == "refuse":
                raise split.not_declared(self.site.classes[highest - 1], moment.stage, self.classes)
            stream = self.site.stream("widen", moment.stage)
            self.classes = highest
            self.weights = widened(self.weights, highest * self.outputs, stream)
        self.seen = self.seen.clone()
        self.seen[y] = True

    @property
    def seen_outputs(self) -> Tensor:
        """Which outputs belong to a class that some stage has had."""
        return self.seen[: self.classes].repeat_interleave(self.outputs)

    def _class_weights(self, moment: Moment) -> Tensors:
        """How much rows of each class count in the loss, by output; empty: all the same."""
        weights = self.site.class_weights(moment.stage)
        if weights is None:
            return {}
        return {"class_weight": weights[: self.classes].repeat_interleave(self.outputs)}

    def class_counts(self, moment: Moment) -> Tensor:
        """The number of rows of each class at a stage."""
        y = self.site.train(moment.stage).y
        if y.is_floating_point():
            return torch.full((1,), len(y), dtype=torch.int64, device=y.device)
        return torch.bincount(y, minlength=len(self.seen))

    def draws(self, name: str, moment: Moment) -> Stream:
        """The random stream of a round: from the run's seed, or secret to every client."""
        if self._secret is None:
            return self.site.stream(name, moment)
        return self._secret.child(name, moment.stage, moment.round)

    @property
    def alone(self) -> bool:
        """Whether each client trains by itself, at the stage at which its columns come."""
        return self.site.by_columns and self.settings.protocol == "P1"

    def learners(self, moment: Moment) -> list[str]:
        """The clients that train at a stage."""
        parties = self.site.parties(moment.stage)
        return parties[-1:] if self.alone else parties

    def job(
        self,
        moment: Moment,
        loss: Loss,
        constants: Tensors,
        *,
        sends_before: bool = False,
        class_sums: int = 0,
    ) -> SplitJob:
        """The steps of a round."""
        settings, every = self.settings, list(self.site.clients)
        ids, y = self.learners(moment), self.site.train(moment.stage).y
        batches = split.Batches(len(y), settings.batch, self.site.stream("order", moment).key)
        return SplitJob(
            ids=tuple(ids),
            places=tuple(every.index(id) for id in ids),
            parties=len(every),
            y=y,
            batches=batches,
            steps=len(batches) * settings.epochs,
            weights=self.weights,
            constants=constants | self._class_weights(moment),
            loss=loss,
            stream=self.draws("step", moment),
            rate=settings.rate,
            agg=settings.agg,
            clip=settings.clip,
            noise=settings.noise,
            views=self.views,
            sends_before=sends_before,
            class_sums=class_sums,
        )

    def train(self, clients: Clients, job: SplitJob) -> SplitResult:
        """Run the steps: as one computation where the engine can, else message by message."""
        result: SplitResult | None = clients.whole(job)
        if result is None:
            return self._by_messages(clients, job)
        self.weights = result.weights
        split.finite(result.totals["loss"], clients.moment.stage, clients.moment.round)
        for request, reply, count in self._ledger(job):
            clients.note(self._learn, job.ids, (request, reply), count)
        return result

    def _by_messages(self, clients: Clients, job: SplitJob) -> SplitResult:
        totals: dict[str, float] = {}
        like = next(iter(self.weights.values()))
        sums = like.new_zeros((job.class_sums, self.width), dtype=torch.float64)
        empty = like.new_zeros((0, self.settings.width))
        first = Learn(job.batches.key, 0, True, empty)
        replies = clients.ask(self._learn, dict.fromkeys(job.ids, first))
        for step in range(job.steps):
            y = job.labels(job.y[job.batches.at(step, job.y.device)])
            joint, before = self._received(replies, len(y), job.sends_before)
            if job.class_sums:
                sums.index_add_(0, y, joint.double())
            key = torch.tensor(job.stream.child(step).key, device=y.device)
            losses, gradient = self.step(job, Step(joint, before, y, key))
            split.finite(losses["loss"], clients.moment.stage, clients.moment.round)
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value * len(y)
            replies = clients.ask(self._learn, self._requests(job, step + 1, gradient))
        return SplitResult(self.weights, (), totals, sums)

    def _received(
        self, replies: Mapping[str, Embedded | Learned], rows: int, sends_before: bool
    ) -> tuple[Tensor, Tensor]:
        """The joined embeddings of a step by the current and by the reference weights."""
        now, before = dict[str, Tensor](), dict[str, Tensor]()
        for id, reply in replies.items():
            now[id] = self._fitting(reply.embedding, rows, id)
            past = reply.before if isinstance(reply, Learned) else reply.embedding[:0]
            before[id] = self._fitting(past, rows if sends_before else 0, id)
        return self.joined(now), self.joined(before)

    def _fitting(self, embedding: Tensor, rows: int, id: str) -> Tensor:
        return split.fitting(embedding, rows, self.settings.width, id).to(self.site.device)

    def step(self, job: SplitJob, step: Step) -> tuple[dict[str, float], Tensor]:
        """One step of the top: the terms of its loss, and the gradient of the joined embedding."""
        joint = step.joint.detach().requires_grad_()
        moving = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        with torch.enable_grad():
            terms = job.loss(moving, job.constants, step._replace(joint=joint))
        losses = {name: float(term.detach()) for name, term in terms.items()}
        by_joint, *gradients = torch.autograd.grad(terms["loss"], [joint, *moving.values()])
        by_name = dict(zip(moving, gradients, strict=True))
        self.weights = split.stepped(self.weights, by_name, job.rate, None)
        return losses, split.guarded(by_joint, job.clip, job.noise, draws(step.key, 3))

    def _requests(self, job: SplitJob, step: int, gradient: Tensor) -> dict[str, Learn]:
        """The gradient for each client, and the request for the next batch."""
        parts, more = self.parts(gradient, job.ids), step < job.steps
        if job.agg != "concat":  # one gradient for all is packed once
            return dict.fromkeys(job.ids, Learn(job.batches.key, step, more, parts[job.ids[0]]))
        return {id: Learn(job.batches.key, step, more, parts[id]) for id in job.ids}

    def _ledger(self, job: SplitJob) -> Iterator[tuple[Learn, Embedded | Learned, int]]:
        """Requests and replies of a round without values; those of one size once, with a count."""
        sizes = split.chunks([len(job.y)] * (job.steps // len(job.batches)), job.batches.size)
        sizes = [size * self.outputs for size in sizes]
        shapes = [
            (last, now, len(str(step)), step < job.steps)
            for step, (last, now) in enumerate(zip([0, *sizes], [*sizes, 0], strict=True))
        ]
        dtype, width = next(iter(self.weights.values())).dtype, self.settings.width
        for (last, now, digits, more), count in Counter(shapes).items():
            gradient = torch.empty((last, width), dtype=dtype, device="meta")
            embedding = torch.empty((now, width), dtype=dtype, device="meta")
            reply: Embedded | Learned = Embedded(embedding)
            if kinds(self._learn)[1] is Learned:
                reply = Learned(embedding, embedding if job.sends_before else embedding[:0])
            yield Learn(job.batches.key, 10 ** (digits - 1), more, gradient), reply, count

    def joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The joined embedding; in a concatenation an absent client contributes zeros."""
        if self.settings.agg == "concat":
            absent = torch.zeros_like(next(iter(parts.values())))
            return split.joined([parts.get(id, absent) for id in self.site.clients], "concat")
        return split.joined(list(parts.values()), self.settings.agg)

    def parts(self, gradient: Tensor, ids: Sequence[str]) -> Tensors:
        """The gradient of each client's embedding, from that of the joined one."""
        if self.settings.agg == "concat":
            pieces = split.parts_of(gradient, len(self.site.clients), "concat")
            every = dict(zip(self.site.clients, pieces, strict=True))
            return {id: every[id] for id in ids}
        return dict(zip(ids, split.parts_of(gradient, len(ids), self.settings.agg), strict=True))

    def embedded(
        self,
        clients: Clients,
        ids: Sequence[str],
        part: Literal["train", "test"],
        number: int,
        sample: tuple[int, int] = (0, 0),  # seed and count of a random sample; 0: all rows
    ) -> Tensors:
        """The embeddings of rows of a stage or task, by client."""
        seed, count = sample
        rows = count or len((self.site.train if part == "train" else self.site.test)(number))
        pieces: dict[str, list[Tensor]] = {id: [] for id in ids}
        start = 0
        for size in split.chunks([rows]):
            request = Embed(part, number, seed, start, size)
            for id, reply in clients.ask(self._embed, dict.fromkeys(ids, request)).items():
                pieces[id].append(self._fitting(reply.embedding, size, id))
            start += size
        return {id: torch.cat(parts) for id, parts in pieces.items()}

    def training_rows(self, clients: Clients, moment: Moment) -> tuple[Tensor, Tensor]:
        """The joined embeddings of the stage's training rows, and their labels."""
        parts = self.embedded(clients, self.learners(moment), "train", moment.stage)
        return self.joined(parts), self.site.train(moment.stage).y

    def final_model(self) -> Tensors:
        """The weights of the top, and which of its outputs belong to a class seen so far."""
        return self.weights | {"seen": self.seen_outputs}

    def logits(self, joint: Tensor, model: Tensors | None = None) -> Tensor:
        """The logits of the classes, those of the rows as they are where rows have views."""
        weights = dict(model or self.final_model())
        seen = weights.pop("seen")
        logits = masked_logits(self.network, weights, joint, seen, self.settings.seen_mask)
        return logits[:, :: self.outputs]

    def row_gradients(self, joint: Tensor, y: Tensor, batch: int = 1) -> Tensor:
        """Each row's own gradient of its loss, divided by the size of a batch."""
        joint = joint.detach().requires_grad_()
        with torch.enable_grad():
            loss = label_loss(self.logits(joint), y, reduction="sum") / batch
        (gradient,) = torch.autograd.grad(loss, [joint])
        return gradient

    def state(self) -> Tensors:
        """The weights of the top and the classes seen so far."""
        return prefixed("weights", self.weights) | {"seen": self.seen}

    def restore(self, state: Tensors) -> Tensors:
        """Go on from a state; returns what else it holds, on this device."""
        tensors = copied({name: tensor.to(self.site.device) for name, tensor in state.items()})
        self.weights = without("weights", tensors)
        last = self.weights[f"bias{len(self.weights) // 2 - 1}"]
        self.classes = len(last) // self.outputs
        self.seen = tensors.pop("seen")
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("weights/")}


def masked_logits(
    network: Architecture, weights: Mapping[str, Tensor], rows: Tensor, seen: Tensor, masked: bool
) -> Tensor:
    """The logits; with the mask, those of classes that no stage has had are minus infinity."""
    logits = network(weights, rows)
    return logits.masked_fill(~seen, -torch.inf) if masked else logits


def label_loss(
    logits: Tensor,
    y: Tensor,
    class_weight: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The cross-entropy of classes, or the squared error of numbers."""
    if y.is_floating_point():
        return F.mse_loss(logits[..., 0], y, reduction=reduction)
    return F.cross_entropy(logits, y, class_weight, reduction=reduction)


def scores(
    moment: Moment,
    predictions: Predictions,
    fresh: Callable[[int], Tensor] | None,
    variant: str = "",
    unit: float = 1.0,
) -> list[Score]:
    """The score of each task and, given which rows are `fresh`, of all classes (`union`).

    In regression `unit` is what 1 is in the scale of training, in the unit of the label.
    """
    tables = [(task, variant, *predictions[task]) for task in predictions]
    if fresh is not None:
        tables.append((moment.stage, "union", *split.union(predictions, fresh)))
    where = (moment.stage, moment.round, "server")
    return [
        Score(*where, task, name, "test", len(y), *_hits_or_errors(logits, y, unit))
        for task, name, logits, y in tables
    ]


def _hits_or_errors(
    logits: Tensor, y: Tensor, unit: float
) -> tuple[int, float] | tuple[int, float, dict[str, float]]:
    """Hits and macro-F1; in regression the errors instead."""
    return (0, 0.0, errors(logits, y, unit)) if y.is_floating_point() else hits(logits, y)
