"""FedSeIT: clients with streams of text tasks share a base, and reuse helpful parts of others'.

Chaudhary, Rai, Schubert, Schütze, Gupta, Federated Continual Learning for Text Classification via
Selective Inter-client Transfer, 2022. With combine = "sum" this is FedWeIT: Yoon, Jeong, Lee, Yang,
Hwang, Federated Continual Learning with Weighted Inter-client Transfer, 2021, also for images.

A layer's weights are B * sigmoid(m) + A. The base B is averaged; mask m and adaptive part A belong
to one task of one client. When a task ends, what is left of A after pruning goes to the server,
which gives it to others: the last task of every client, or with transfer = "sit" the `keep` tasks
most like the one that begins. Letters and the numbers J1 to J24 are those of the specification.
`Rules` holds the steps for which published code differs from the paper.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.annotations import Outputs, RowCount, SharedWeights, Update
from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import SERVER, Clients, Moment, Working, counted, scores, shares
from atoll.core.messages import Check, Checked, Empty, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, Positive
from atoll.core.record import Score, Snapshot
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.early_stopping import BEST, PATIENCE, RATE, STOPPED, EarlyStoppedJob, Rule
from atoll.jobs.train import Optimiser, Phase, TrainJob, hits, in_chunks
from atoll.learning import task_weights, textcnn
from atoll.learning.centres import centres, normalised, product, similarity, unit_mean
from atoll.learning.decomposed import Plan, foreign_features, logits, objective, pruned, row_losses
from atoll.learning.image_nets import LeNet
from atoll.learning.sparse import above_share, coded, mean_of_sent, trimmed, widened
from atoll.learning.task_index import TaskIndex
from atoll.learning.task_weights import Layout, Shape
from atoll.learning.textcnn import KERNELS, TextCNN, Words
from atoll.learning.weights import copied, mean, prefixed, without

__all__ = ["METHOD", "Client", "Options", "Rules", "Server"]

CONVS = tuple(f"conv{size}" for size in KERNELS)
EPSILON = 1e-7  # of Adam, as in Keras
RECTIFIED = 0.7  # cosines below it count nothing where similarity = "rectified"
LEFT_OUT = ("loss on validation rows", "accuracy on test rows")
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Options:
    """The options of `fedseit`; section f of the specification."""

    combine: Literal["banks", "sum", "none"] = "banks"  # FedSeIT, FedWeIT, nothing from others
    transfer: Literal["previous", "sit"] = "previous"  # every client's last task, or the nearest
    keep: AtLeastOne = 3  # sit: number of past tasks that a client receives (K)
    dls: bool = False  # banks: share the projections too
    dense: bool = False  # sum: one more private layer before the head (FedWeIT-Dense)
    average: bool = True  # false: do not average the base; with combine = "none": train alone
    lambda1: NotNegative = 0.001  # L1 penalty on adaptive parts, and threshold of pruning
    lambda2: NotNegative = 1.0  # penalty on changes of the weights of past tasks
    lambda_m: NotNegative = 0.0  # L1 penalty on masks
    decay: NotNegative = 0.0001  # weight decay of adaptive parts, masks, projections, first base
    rate: Positive = 0.0001  # initial learning rate of a task
    batch: AtLeastOne = 64  # batch size of local training
    epochs: AtLeastOne = 5  # maximum local epochs per round; the paper and preset: 50
    dropout: Share = 0.3  # dropout rate in training
    patience: AtLeastOne = 3  # epochs without improvement on validation rows before the rate drops
    rate_cut: Annotated[float, Field(gt=1)] = 3.0  # divisor of the learning rate at each drop
    least_rate: Positive = 1e-10  # a client with a smaller learning rate finishes the task
    weighting: Literal["equal", "rows"] = "equal"  # weight of each client in the mean
    channel_sparse: Share = 0.0  # share of the filters whose base is not sent; FedWeIT's code: 0.3
    vocabulary: Literal["shared", "local"] = "shared"  # local: of the client's own texts so far
    start: NotNegative = 0.2  # initial value of an adaptive part, as a share of the base
    centres: AtLeastOne = 200  # sit: maximum number of vectors that describe a task (Q)
    least_cluster: AtLeastOne = 2  # sit: minimum number of distinct texts per vector
    representation: Literal["centres", "mean_unit"] = "centres"  # sit: or one vector, same ranking
    similarity: Literal["mean", "rectified"] = "mean"  # sit: of all pairs, or of those above 0.7
    test_global: bool = False  # test with the mean base too, which is then sent for every test


@dataclass(frozen=True)
class Described:
    """The description of a task: centres of its texts, none of them a single text."""

    centres: Annotated[Tensor, Outputs()]  # (centres, D)


@dataclass(frozen=True)
class Foreign:
    """Parts of finished tasks for the slots of a client, in order; sparse, as they came."""

    adaptive: Tensors  # SLOT/values, and SLOT/places or SLOT/bits
    scores: Tensor  # (slots,) that sum to 1, empty where the server did not choose


@dataclass(frozen=True)
class Fit:
    """The mean base."""

    base: Annotated[Tensors, SharedWeights()]


@dataclass(frozen=True)
class Fitted:
    """A client's base after training, and where it stands."""

    base: Annotated[Tensors, Update(of="base")]
    rows: Annotated[int, RowCount()]  # training rows where the mean is weighted by them, else 0
    rate: float  # of the next step
    stopped: bool  # done with this task


@dataclass(frozen=True)
class Trimmed:
    """The same, with those filters of the base alone that the client's masks weigh most."""

    channels: Annotated[Tensors, Outputs()]  # LAYER/values (kept, ...), and LAYER/bits: which
    rate: float
    stopped: bool


@dataclass(frozen=True)
class Shared:
    """The adaptive part of a task that ends, pruned, sparse."""

    adaptive: Annotated[Tensors, Outputs()]


def layout_of(options: Options, model: TextCNN | LeNet, clients: int) -> Layout:
    """The layers of a client, and a slot (n) for each foreign part that it is given."""
    slots = options.keep if options.transfer == "sit" else clients
    return task_weights.arranged(model, slots, options.combine != "sum", options.dense, options.dls)


def moved_weights(names: Sequence[str], options: Options, task: int) -> tuple[str, ...]:
    """The weights that training moves, of these names: the table in section d."""
    still = ("now/alpha/",) if task == 0 or options.combine == "none" else ()
    moving = ("base/", "now/", "past/adaptive/")
    return tuple(n for n in sorted(names) if n.startswith(moving) and not n.startswith(still))


@dataclass(frozen=True)
class Rules:
    """Steps of the method as functions and values, so that a variant can swap one of them."""

    layout: Callable[[Options, TextCNN | LeNet, int], Layout] = layout_of  # by count of clients
    moves: Callable[[Sequence[str], Options, int], tuple[str, ...]] = moved_weights
    features: Callable[[Words, Tensor, Sequence[Tensor]], Tensor] = foreign_features
    # of rows and a count of validation rows those that are tested: all; then the streams of first
    # values, one for each tensor of a task, and of the order of rows, one for each epoch
    tested: Callable[[Rows, int, Options], Rows] = lambda rows, valid, options: rows
    stream: Callable[[Site, int, str, Shape], Stream] = lambda s, t, n, _: s.stream("task", t, n)
    order: Callable[[Site, Moment, int], Stream] = lambda s, m, epoch: s.stream("fit", m, epoch)
    valid_loss: Callable[..., Tensor] = row_losses  # of validation rows: decides on the rate
    unread: tuple[str, ...] = ("past/", "lambda2")  # weights that it does not read
    fresh_moments: bool = False  # whether Adam begins anew when the rate is cut
    sparse_private: tuple[str, ...] = ()  # private projections that lambda1 pulls to zero


def checked_options(options: Options) -> None:
    """Refuse options that contradict each other."""
    rectified = options.transfer == "sit" and options.similarity == "rectified"
    unit, weighted = options.representation == "mean_unit", options.weighting == "rows"
    private, plain = options.combine != "banks", options.combine != "sum"
    wrong = (
        (options.dls and private, "dls needs projections to share", "set combine = 'banks'"),
        (options.dense and plain, "dense is a layer of FedWeIT", "set combine = 'sum'"),
        (rectified and unit, "rectified similarity needs all centres",
         "set representation = 'centres'"),
        (options.channel_sparse > 0 and weighted, "channel_sparse has no weighted mean",
         "set weighting = 'equal'"),
    )  # fmt: skip
    for holds, what, remedy in wrong:
        if holds:
            raise UserError(what, "[method]", remedy)


def network_of(options: Options, site: Site) -> TextCNN | LeNet:
    """The network of a site; refuses other data, and for images the options of texts."""
    model = site.model()
    if isinstance(model, TextCNN):
        return model
    if not isinstance(model, LeNet):
        remedy = "see atoll list data; from images with model.name = 'lenet', combine = 'sum'"
        raise UserError("'fedseit' learns from texts", "data", remedy)
    for name, value in (("combine", "sum"), ("transfer", "previous"), ("vocabulary", "shared")):
        if getattr(options, name) != value:
            what = f"{name} = '{getattr(options, name)}' is for texts"
            raise UserError(what, "[method]", f"set {name} = '{value}' for images")
    return model


class Client:
    """Keeps masks, adaptive parts, projections, heads and foreign parts of all its tasks."""

    def __init__(self, options: Options, site: Site, rules: Rules | None = None) -> None:
        checked_options(options)
        model = network_of(options, site)
        self.options, self.site, self.rules = options, site, rules or Rules()
        self.words = model.words if isinstance(model, TextCNN) else None
        self.layout = self.rules.layout(options, model, len(site.clients))
        self.like = torch.zeros((), dtype=site.dtype, device=site.device)
        self.lambda2 = torch.full_like(self.like, options.lambda2)
        self.weights: Tensors = {}
        self.moments: Tensors = {}
        self.read: Tensors = {}  # TASK/labels and TASK/words: what a model of the task reads
        self.task = -1
        self.course = torch.zeros(4, dtype=torch.float64)
        self._cache: dict[tuple[str, int], Rows] = {}  # rows with the responses of foreign filters

    def describe(self, request: Empty, moment: Moment) -> Described:
        """Describe the task that begins."""
        options, vocabulary = self.options, self._vocabulary(moment.stage)
        x = textcnn.restricted(self.site.train(moment.stage).x, vocabulary)
        assert self.words is not None  # images are not described
        vectors = centres(
            textcnn.document_means(self.words, x), options.centres, options.least_cluster
        )
        return Described(unit_mean(vectors) if options.representation == "mean_unit" else vectors)

    def receive(self, request: Foreign, moment: Moment) -> Empty:
        """Take the foreign parts for the task that begins."""
        self._begin(moment.stage)
        count = 1 + max((int(name.split("/")[0]) for name in request.adaptive), default=-1)
        if count > self.layout.slots or len(request.scores) not in (0, count):
            raise BadMessageError(SERVER, f"{count} foreign parts for {self.layout.slots} slots")
        codes = [without(str(slot), request.adaptive) for slot in range(count)]
        try:
            self.weights |= task_weights.foreign_parts(codes, self.layout, self.like)
        except (ValueError, KeyError) as error:
            raise BadMessageError(SERVER, f"a foreign part is damaged: {error}") from error
        if len(request.scores):
            self.weights |= task_weights.attention(request.scores, self.layout, self.like)
        return Empty()

    def fit(self, request: Fit, moment: Moment) -> Working[Fitted]:
        """Train on the rows of the stage, from the mean base."""
        if self.task < 0:
            self.weights = prefixed("base", self._here(request.base))
        self._begin(moment.stage)
        if self.options.average:
            base = self._here(request.base)
            self.weights = task_weights.with_base(self.weights, self.layout.layers, base)
        self.site.probe("others", moment, self._checked, "own")
        self.course[BEST], self.course[PATIENCE] = math.inf, self.options.patience
        rows = self._rows("train", moment.stage)
        if len(rows) and not self.course[STOPPED]:
            job = self._training(rows, moment)
            result = yield job
            self.weights |= {name: result.weights[name] for name in job.work.phases[0].moves}
            self.moments, self.course = result.moments, result.course
        self.site.probe("own", moment, self._checked, "own")
        count = len(rows) if self.options.weighting == "rows" else 0
        rate, stopped = float(self.course[RATE]), bool(self.course[STOPPED])
        return Fitted(without("base", self.weights), count, rate, stopped)

    def fit_channels(self, request: Fit, moment: Moment) -> Working[Trimmed]:
        """The same, but give the base of those filters alone whose masks are large (J7)."""
        fitted = yield from self.fit(request, moment)
        channels: Tensors = {}
        for layer in self.layout.layers:
            mask = above_share(self.weights[f"now/mask/{layer}"].abs(), self.options.channel_sparse)
            channels |= trimmed(layer, fitted.base[layer], mask)
        return Trimmed(channels, fitted.rate, fitted.stopped)

    def share(self, request: Empty, moment: Moment) -> Shared:
        """Return the task's adaptive part after pruning."""
        parts = [self.weights[f"now/adaptive/{layer}"].flatten() for layer in self.layout.layers]
        if not len(self.site.train(moment.stage)):
            parts = [torch.zeros_like(part) for part in parts]  # nothing was learned
        return Shared(coded(pruned(torch.cat(parts), self.options.lambda1)))

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test a task of this client with its own base, with the mean base too where it came."""
        return self._checked(request.task, request.weights)

    def _checked(self, task: int, mean_base: Tensors | None = None) -> Checked:
        valid = len(self.site.valid(self.task))
        rows = self.rules.tested(self._rows("test", task), valid, self.options)
        models = {"own": self._weights_of(task)}
        if mean_base:
            models["global"] = models["own"] | prefixed("base", self._here(mean_base))
        correct, f1 = {}, {}
        for name, model in models.items():
            correct[name], f1[name] = self._hits(model, rows, task)
        return Checked(len(rows), correct, f1)

    def _hits(self, weights: Tensors, rows: Rows, task: int) -> tuple[int, float]:
        scores = in_chunks(partial(logits, weights, plan=self._plan()), rows)
        unseen = torch.full_like(scores[:, :1], -math.inf)  # an untrained class
        beyond = bool((rows.y >= max(1, len(self._labels(task)))).any())
        return hits(torch.cat([scores, unseen], 1) if beyond else scores, rows.y)

    def snapshot(self, moment: Moment) -> list[Snapshot]:
        """How much this client attends to each foreign part, and what it loses without it."""
        if moment.stage != self.task or f"foreign/{self.layout.plain[0]}" not in self.weights:
            return []
        layers, count = self.layout.layers, self.layout.slots
        slots = tuple(str(slot) for slot in range(count))
        attention = [tuple(self.weights[f"now/alpha/{n}"].tolist()) for n in layers]
        values = tuple(zip(*map(self._left_out, (None, *range(count))), strict=True))
        return [
            Snapshot(self.task, self.site.id, "attention", layers, slots, tuple(attention)),
            Snapshot(self.task, self.site.id, "left out", LEFT_OUT, ("nothing", *slots), values),
        ]

    @torch.no_grad()
    def _left_out(self, slot: int | None) -> tuple[float, float]:
        """Loss on validation rows and accuracy on test rows where a slot's filters are zero."""
        weights, loss = self._weights_of(self.task), math.nan
        valid, test = (self._rows(part, self.task) for part in ("valid", "test"))
        if slot is not None:
            weights = task_weights.without_slot(weights, slot)
        if slot is not None and self.layout.banks:
            valid, test = (task_weights.silenced(r, slot, self.layout.slots) for r in (valid, test))
        if len(valid):
            loss = float(row_losses(weights, valid, plan=self._plan()).mean())
        correct, _ = self._hits(weights, test, self.task)
        return loss, correct / len(test) if len(test) else math.nan

    def _here(self, tensors: Tensors) -> Tensors:
        return {n: t.to(self.site.device, self.site.dtype) for n, t in tensors.items()}

    def _begin(self, task: int) -> None:
        """A new task: what was current becomes past, then first weights, moments and rate."""
        if task == self.task:
            return
        if self.task >= 0:
            self.weights = task_weights.retired(self.weights, self.layout.layers, self.task)
        self.task, self.moments = task, {}
        self.course = torch.tensor([self.options.rate, math.inf, 0, 0], dtype=torch.float64)
        stream, start = partial(self.rules.stream, self.site, task), self.options.start
        classes = max(1, len(self._labels(task)))
        self.weights = task_weights.begun(self.weights, self.layout, start, classes, stream)
        read = {f"{task}/labels": self._labels(task), f"{task}/words": self._vocabulary(task)}
        self.read |= {name: tensor for name, tensor in read.items() if tensor is not None}

    def _labels(self, task: int) -> Tensor:
        """The classes of a task at this client, ascending."""
        both = torch.cat([self.site.train(task).y, self.site.valid(task).y])
        return both.unique()  # type: ignore[no-any-return]

    def _rows(self, part: Literal["train", "valid", "test"], task: int) -> Rows:
        """Rows with the task's own labels, a number each, and the responses of foreign filters."""
        if (part, task) not in self._cache:
            rows: Rows = getattr(self.site, part)(task)
            weights = self.weights if task == self.task else without(f"kept/{task}", self.weights)
            x = textcnn.restricted(rows.x, self._vocabulary(task))
            labels = task_weights.renumbered(rows.y, self._labels(task))
            self._cache[part, task] = Rows(x, self._features(x, weights), labels, rows.share)
        return self._cache[part, task]

    def _vocabulary(self, task: int) -> Tensor | None:
        """With a vocabulary of its own, the words of its texts up to a task."""
        if self.options.vocabulary == "shared" or self.words is None:
            return None
        texts = [self.site.train(stage).x for stage in range(task + 1)]
        return textcnn.known_words(texts, len(self.words.table))

    def _features(self, x: Tensor, weights: Tensors) -> Tensor:
        """The number of each row, and the responses of foreign filters."""
        number = torch.arange(x.shape[0], device=x.device).unsqueeze(1).to(self.like)
        if self.options.combine == "sum":
            return number
        banks = [weights[f"foreign/{n}"] for n in CONVS if f"foreign/{n}" in weights]
        features = self.like.new_zeros((x.shape[0], 2 * self.layout.slots * self.layout.width))
        if banks and self.words is not None:
            features = self.rules.features(self.words, x, banks)
        return torch.cat([number, features], 1)

    def _weights_of(self, task: int) -> Tensors:
        layers, threshold = self.layout.layers, self.options.lambda1
        return task_weights.weights_of_task(self.weights, layers, task, self.task, threshold)

    def _plan(self) -> Plan:
        options, layout = self.options, self.layout
        combine: Literal["banks", "sum"] = "sum" if options.combine == "sum" else "banks"
        return Plan(
            *(self.words, layout.layers, layout.private, combine),
            *(options.dropout, options.lambda1, options.lambda_m, options.decay),
            first=self.task == 0,
            sparse_private=self.rules.sparse_private,
        )

    def _moves(self) -> tuple[str, ...]:
        return self.rules.moves(list(self.weights), self.options, self.task)

    def _trained(self) -> Tensors:
        """The weights that the objective reads."""
        unread = () if self.options.combine == "sum" else CONVS  # banks are read into the rows
        return {**task_weights.read(self.weights, unread), "lambda2": self.lambda2}

    def _training(self, rows: Rows, moment: Moment) -> EarlyStoppedJob:
        """The epochs of a round; after each the validation rows decide on the rate."""
        plan, options, rules = self._plan(), self.options, self.rules
        optimiser = Optimiser("adam", options.rate, epsilon=EPSILON)
        phase = Phase("objective", self._moves(), partial(objective, plan=plan), optimiser)
        streams = tuple(rules.order(self.site, moment, epoch) for epoch in range(options.epochs))
        noise = [self.site.stream("noise", moment, epoch).key for epoch in range(options.epochs)]
        weights = self._trained()
        rule = Rule(options.patience, options.rate_cut, options.least_rate, rules.fresh_moments)
        return EarlyStoppedJob(
            work=TrainJob(weights, self.moments, (phase,), rows, options.batch, 1, streams[0]),
            streams=streams,
            keys=tuple(noise),
            valid=self._rows("valid", moment.stage),
            function=partial(rules.valid_loss, plan=plan),
            reads=tuple(name for name in weights if not name.startswith(rules.unread)),
            course=self.course,
            rule=rule,
        )

    def state(self) -> Tensors:
        parts = {"weights": self.weights, "moments": self.moments, "read": self.read}
        tensors = {n: t for name, part in parts.items() for n, t in prefixed(name, part).items()}
        return {**tensors, "task": torch.tensor(self.task), "course": self.course}

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        self.moments = copied(without("moments", state))
        self.read = without("read", state)
        self.task, self.course = int(state["task"]), state["course"].clone().cpu()
        self._cache = {}

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The model of a task, with its labels and the words that it knows."""
        base = without("base", shared if variant == "global" else self.weights)
        own = self._weights_of(task) | without(str(task), self.read)
        return own | prefixed("base", self._here(base))

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of all classes; minus infinity for those that the task does not have."""
        x = textcnn.restricted(rows.x, model.get("words"))
        own = logits(model, Rows(x, self._features(x, model), rows.y), self._plan())
        every = own.new_full((x.shape[0], len(self.site.classes)), -math.inf)
        return every.index_copy(1, model["labels"], own[:, : len(model["labels"])])


class Server:
    """Holds the mean base, and the shared parts of finished tasks."""

    def __init__(self, options: Options, site: Site, rules: Rules | None = None) -> None:
        checked_options(options)
        self.options, model = options, network_of(options, site)
        self.ids = site.clients
        layout = (rules or Rules()).layout(options, model, len(site.clients))
        self.base = task_weights.first_base(layout, model.state_dict(), site.stream)
        self.bases: dict[str, Tensors] = {}  # the last base of each client
        self.rows: dict[str, int] = {}
        self.stopped: set[str] = set()  # clients that are done with the task
        threshold = RECTIFIED if options.similarity == "rectified" else None
        centred = partial(similarity, threshold=threshold)
        compare = product if options.representation == "mean_unit" else centred
        self.index = TaskIndex(options.keep, compare if options.transfer == "sit" else None)

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Give foreign parts at the beginning of a task, average the base, collect at the end."""
        notes: dict[str, float] = {}
        if moment.first:
            self.stopped = set()
            notes |= self._transfer(clients, moment)
        active = [id for id in clients.ids if id not in self.stopped]
        for id, reply in self._fitted(clients, active).items():
            self.bases[id], self.rows[id] = reply.base, counted(reply.rows, id)
            self.stopped |= {id} if reply.stopped else set()
            notes[f"rate {id}"] = reply.rate
        if self.options.average:
            self.base = self._mean(clients.ids)
        finished = len(self.stopped) == len(clients.ids)
        if self.options.combine != "none" and (moment.last or finished):
            for id, shared in clients.ask_all(Client.share, Empty()).items():
                self.index.adaptive[moment.stage, id] = shared.adaptive
                notes[f"nonzero {id}"] = float(len(shared.adaptive["values"]))
        return {**notes, "finished": float(finished)}

    def _fitted(self, clients: Clients, active: Sequence[str]) -> dict[str, Fitted]:
        """Let clients train; of filters that a client did not send its base is zero."""
        requests = dict.fromkeys(active, Fit(self.base))
        if not self.options.channel_sparse:
            return clients.ask(Client.fit, requests)
        replies = {}
        for id, reply in clients.ask(Client.fit_channels, requests).items():
            base = {n: widened(n, reply.channels, like, id) for n, like in self.base.items()}
            replies[id] = Fitted(base, 0, reply.rate, reply.stopped)
        return replies

    def _mean(self, ids: Sequence[str]) -> Tensors:
        """The mean base; of filters that some did not send, over those that did."""
        bases = [self.bases[id] for id in ids]
        if self.options.channel_sparse:
            return {name: mean_of_sent([base[name] for base in bases]) for name in self.base}
        weighted = self.options.weighting == "rows"
        return mean(bases, shares({id: self.rows[id] for id in ids}) if weighted else None)

    def _transfer(self, clients: Clients, moment: Moment) -> dict[str, float]:
        """Choose and send foreign parts; notes the receivers with the scores."""
        if self.options.combine == "none":
            return {}
        if self.options.transfer == "sit":
            for id, reply in clients.ask_all(Client.describe, Empty()).items():
                self.index.described[moment.stage, id] = reply.centres
        if moment.stage == 0:
            return {}
        requests, notes = {}, {}
        for id in clients.ids:
            chosen, scored = self.index.chosen(clients.ids, id, moment.stage)
            requests[id] = Foreign(self.index.parts(chosen), normalised(scored))
            for (stage, other), score in zip(chosen, scored, strict=False):
                notes[f"{id} takes {other} task {stage}"] = score
        clients.ask(Client.receive, requests)
        return notes

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client's model on the test rows of its tasks so far."""
        return scores(clients, Client.check, self.base if self.options.test_global else {}, moment)

    def snapshot(self, moment: Moment) -> list[Snapshot]:
        """Which task each client received in which slot, and the similarity of the two tasks."""
        if moment.stage == 0 or self.options.combine == "none":
            return []
        stage, (names, *tables) = moment.stage, self.index.tables(self.ids, moment.stage)
        pairs = zip(("slot", "similarity"), tables, strict=True)
        return [Snapshot(stage, SERVER, kind, self.ids, names, table) for kind, table in pairs]

    def state(self) -> Tensors:
        state = prefixed("base", self.base)
        for id, base in self.bases.items():
            state |= prefixed(f"bases/{id}", base)
            state[f"rows/{id}"] = torch.tensor(self.rows[id])
            state[f"stopped/{id}"] = torch.tensor(id in self.stopped)
        return state | self.index.state()

    def restore(self, state: Tensors) -> None:
        state = copied(state)
        self.base = without("base", state)
        self.rows = {id: int(count) for id, count in without("rows", state).items()}
        self.bases = {id: without(f"bases/{id}", state) for id in self.rows}
        self.stopped = {id for id, flag in without("stopped", state).items() if flag}
        self.index.restore(state)


METHOD = Method(
    Options, Server, Client, "tasks", "own", first=lambda s: {"shared": s.base}, weighted=True
)
