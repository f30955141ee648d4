"""V-LETO: a split network that learns new classes or new columns and keeps the old by prototypes.

Wang, Gai, Yu, Zhu, Wu, Vertical Federated Continual Learning via Evolving Prototype Knowledge.

Clients hold columns, the server labels and a mean embedding of each class, its prototype. Classes
by stage: the top network rehearses the prototypes of past classes, and clients freeze important
weights (local model optimisation, LMO). Columns by stage: old and new prototypes are mixed, and so
are test embeddings. Letters are those of the specification: E embeddings, mu prototypes, F Fisher.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from atoll.core.annotations import RowGradient
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Empty, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Score, Snapshot
from atoll.data.vertical_site import VerticalSite
from atoll.families import vertical, vertical_delegates
from atoll.families.vertical_snapshots import embeddings_snapshot, frozen_snapshots, moved_snapshots
from atoll.jobs.split_round import Lent, SplitJob, Step, draws
from atoll.learning import knowledge
from atoll.learning.models import Architecture
from atoll.learning.replay import noisy
from atoll.learning.split_nets import NetName
from atoll.learning.weights import prefixed

__all__ = ["METHOD", "Client", "Options", "Server"]

SHOWN = 120  # test rows of a task in a picture


@dataclass(frozen=True)
class Options:
    """The options of `vleto`; sections f and j of the specification."""

    rate: Positive = 0.01  # learning rate of all networks
    batch: AtLeastOne = 128  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 1  # epochs per round
    network: NetName = "auto"  # lenet3, lenet2, mlp, dense; auto: lenet3 where it fits, else dense
    width: AtLeastOne = 50  # width of an embedding (d)
    dropout: Fraction = 0.5  # dropout of the embedding in training, with network = "mlp" only
    agg: Literal["sum", "mean"] = "sum"  # aggregation of embeddings: sum or mean
    lambda_ce: NotNegative = 0.5  # weight of the cross-entropy after the first stage
    lambda_a: NotNegative = 0.5  # weight of old prototypes: classes by stage
    lambda_f: NotNegative = 0.5  # weight of mixed prototypes: columns by stage
    beta: Fraction = 0.5  # weight of the new part in a mixed prototype or embedding
    gamma: NotNegative = 0.0  # how far old prototypes follow the drift; 0: not at all
    drift: Literal["scalar", "vector"] = "scalar"  # paper: mean cosine; vector: mean movement
    prototype_noise: NotNegative = 0.01  # standard deviation of the noise on replayed prototypes
    k0: NotNegative = 15.0  # threshold for freezing, in standard deviations below the mean
    alpha: NotNegative = 3.0  # further standard deviations per unit of ln(task + 1)
    lmo_rule: knowledge.LmoRule = "paper"  # which weights are frozen; paper, code: in effect all
    rho: Fraction = 0.5  # share of frozen weights, with lmo_rule = "quantile"
    fisher_rows: AtLeastOne = 1024  # training rows for the Fisher diagonal
    protocol: Literal["P1", "P2"] = "P1"  # columns by stage: train the new client, or all so far
    fil_eval: Literal["mix", "sum", "current"] = "mix"  # P1: aggregation of embeddings at the test
    stream: bool = False  # columns by stage: prototypes from the last round's training embeddings
    seen_mask: bool = False  # mask classes that no stage has had yet
    declared: NotNegativeInt = 0  # number of classes known from the start; 0: all of the data set
    undeclared: Literal["refuse", "widen"] = "refuse"  # what to do with a class beyond those
    pixel_mean: tuple[float, ...] = ()  # channel means, from 0 to 1; empty: pixels from -1 to 1
    pixel_std: tuple[float, ...] = ()  # standard deviation of each channel, with pixel_mean
    clip: NotNegative = 0.0  # maximum norm of a row's gradient that is sent; 0: no clipping
    noise: NotNegative = 0.0  # standard deviation of the noise added to gradients that are sent
    secret: bool = False  # draw the noise from the operating system, not from the run's seed
    digits: NotNegativeInt = 0  # decimal places of embeddings that are sent; 0: all


@dataclass(frozen=True)
class Measure:
    """Each sample's own gradient, for the Fisher diagonal."""

    seed: int  # of the order of rows; the first ones are meant
    gradient: Annotated[Tensor, RowGradient()]  # (rows, width)


@dataclass(frozen=True)
class Settled:
    """The stage has ended."""

    frozen: float  # share of the client's entries that were frozen in it


class LossConfig(NamedTuple):
    """The constants of the terms of a stage."""

    network: Architecture
    replay: str  # "a": prototypes of classes that are gone; "f": mixed ones; "": none
    masked: bool  # leave out classes that no stage has had
    noise: float  # on rehearsed prototypes
    drift: str  # "scalar", "vector", or "" where prototypes do not follow it


def terms(
    config: LossConfig, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor], step: Step
) -> dict[str, Tensor]:
    """L_CE on the batch, L_A on noisy old or L_F on mixed prototypes; only L_CE reaches clients."""

    def entropy(rows: Tensor, labels: Tensor) -> Tensor:
        z = vertical.masked_logits(config.network, weights, rows, constants["seen"], config.masked)
        return vertical.label_loss(z, labels, constants.get("class_weight"))

    y, parts = step.y, {"ce": entropy(step.joint, step.y)}
    if config.replay == "f":
        parts["f"] = entropy(constants["mixed"][y], y)
    elif config.replay == "a":
        labels = constants["old"][:, None].expand(-1, len(y)).flatten()  # B copies of each
        rows = moved(constants["means"], constants["lambda_gamma"], config.drift, step)
        parts["a"] = entropy(noisy(rows[labels], config.noise, draws(step.key, 1)), labels)
    total = torch.stack([constants[f"lambda_{name}"] * term for name, term in parts.items()]).sum()
    return {"loss": total, **{f"loss_{name}": term for name, term in parts.items()}}


def moved(means: Tensor, gamma: Tensor, drift: str, step: Step) -> Tensor:
    """mu_hat: prototypes that follow the drift of the batch's classes (eq. 3 and 4)."""
    if not drift or not len(step.before):
        return means
    return means + gamma * knowledge.drift(drift, step.before, step.joint, step.y, len(means))


class Client:
    """Holds columns, the bottom network that reads them, and how much each weight matters."""

    def __init__(self, options: Options, site: VerticalSite) -> None:
        self.options, self.site = options, site
        self.learner = vertical.Learner(options, site)
        self.fisher: Tensors = {}  # F, summed over stages
        self.measured = -1  # the last stage whose Fisher diagonal was added
        self._mask: tuple[int, Tensors | None] = (-1, None)  # of a stage; follows from fisher

    def learn(self, request: vertical.Learn, moment: Moment) -> vertical.Learned:
        """Apply the gradient of the last step, then return the embeddings of the next."""
        embedding = self.learner.learn(request, moment, self._frozen(moment))
        return vertical.Learned(embedding, self.learner.reference(request, moment))

    def lend(self, moment: Moment, job: SplitJob) -> Lent:
        """Lend the client's half for a round in one computation."""
        return self.learner.lend(moment, job, self._frozen(moment))

    def _frozen(self, moment: Moment) -> Tensors | None:
        """d.5: masks of the entries that are frozen at a stage; none at the first."""
        if not self.fisher or self.options.lmo_rule == "off":
            return None
        if self._mask[0] != moment.stage:
            # P2 freezes a client that has learned before whole, unless by its quantile
            rule, rho = self.options.lmo_rule, self.options.rho
            if self.site.by_columns and rule != "quantile":
                rule, rho = "quantile", 1.0
            deviations = knowledge.delta(moment.stage + 1, self.options.k0, self.options.alpha)
            self._mask = (moment.stage, knowledge.frozen(self.fisher, rule, deviations, rho))
        return self._mask[1]

    def measure(self, request: Measure, moment: Moment) -> Empty:
        """d.4, eq. 7: add the Fisher diagonal of the stage to those before."""
        if self.measured == moment.stage:
            return Empty()  # a repeated message counts once
        self._frozen(moment)  # the mask of this stage is that of the stages before
        x = self.site.train(moment.stage).x
        diagonal = vertical_delegates.row_fisher(self.learner, x, request.seed, request.gradient)
        self.fisher, self.measured = knowledge.added(self.fisher, diagonal), moment.stage
        return Empty()

    def settle(self, request: Empty, moment: Moment) -> Settled:
        """Keep what the next stage needs of this one."""
        if self.options.gamma and not self.site.by_columns:
            self.learner.settle()
        return Settled(knowledge.share(self._used_masks(moment) or {}))

    def _used_masks(self, moment: Moment) -> Tensors | None:
        """The masks of a stage, where it has used some."""
        return self._mask[1] if self._mask[0] == moment.stage else None

    def snapshot(self, moment: Moment) -> list[Snapshot]:
        """Which weights are frozen."""
        return frozen_snapshots(self.site, moment, self._used_masks(moment) or {})

    def state(self) -> Tensors:
        learner, mask = self.learner.state(), self._mask[1] or {}
        learner |= prefixed("fisher", self.fisher) | prefixed("mask", mask)
        return learner | {"done": torch.tensor([*self.learner.place, self.measured, self._mask[0]])}

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)
        like = self.learner.half.weights
        self.fisher = vertical.ordered("fisher", state, like)
        self.measured, stage = state["done"].tolist()[3:]
        self._mask = (stage, vertical.ordered("mask", state, like) or None)

    embed, take = vertical_delegates.embed, vertical_delegates.take
    final_model, predict = vertical_delegates.bottom_model, vertical_delegates.predict


class Server:
    """Holds labels, the top network and the prototypes."""

    stored = ("known", "means", "received", "arrived")  # its state beside its half

    def __init__(self, options: Options, site: VerticalSite) -> None:
        self.options, self.site = options, site
        self.head = vertical.Head(options, site, (Client.embed, Client.learn))
        like, classes = next(iter(self.head.weights.values())), len(site.classes)
        self.mixes = site.by_columns and not site.regression and options.lambda_f > 0  # prototypes
        self.known = torch.zeros_like(self.head.seen)  # which classes have a prototype
        self.means = like.new_zeros((classes, options.width))  # mu_g, the list L_g
        self.mixed = torch.zeros_like(self.means)  # mu_bar of the round: columns by stage
        self.received = torch.zeros_like(self.means)  # mu_t of the last round, with `stream`
        self.arrived = torch.zeros(classes, dtype=torch.int64, device=site.device)
        self._tested = [(self.means[:0], self.arrived[:0])]  # embeddings and labels, by task
        self._moved: dict[str, float] = {}  # how far the stage moved each prototype

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Some passes over the rows; at the end of a stage, prototypes and Fisher diagonals."""
        if moment.first:
            self.head.begin(moment)
            self.arrived = torch.zeros_like(self.arrived)
        if self.mixes and moment.stage:
            self.mixed = self._mixed(clients, moment)
        notes = self._train(clients, moment)
        if moment.last:
            notes |= self._end(clients, moment)
        return notes

    def _mixed(self, clients: Clients, moment: Moment) -> Tensor:
        """Eq. 5 with the class means as they are now, or as they came in the last round."""
        last = self.options.stream and moment.round > 0
        means, counts = (self.received, self.arrived) if last else self._means(clients, moment)
        return knowledge.evolved(self.means, self.known, means, counts, self.options.beta)

    def _means(self, clients: Clients, moment: Moment) -> tuple[Tensor, Tensor]:
        """Eq. 2: the class means of the stage's training rows."""
        return knowledge.class_means(*self.head.training_rows(clients, moment), len(self.known))

    def _train(self, clients: Clients, moment: Moment) -> dict[str, float]:
        """The steps of a round; the mean loss and its terms."""
        job = self._job(moment)
        result = self.head.train(clients, job)
        if job.class_sums:
            self.arrived = torch.bincount(job.y, minlength=len(self.known))
            passed = (self.arrived * self.options.epochs).clamp(min=1)[:, None]
            self.received = (result.sums / passed).to(self.means)
        rows = self.options.epochs * len(job.y)
        return {name: value / rows for name, value in result.totals.items()}

    def _job(self, moment: Moment) -> SplitJob:
        """The steps of a round; with a drift, clients also send embeddings by old weights."""
        options, by_columns = self.options, self.site.by_columns
        return self.head.job(
            *(moment, self._loss(moment), self._constants(moment)),
            sends_before=options.gamma > 0 and moment.stage > 0 and not by_columns,
            class_sums=len(self.known) if self.mixes and options.stream else 0,
        )

    def _loss(self, moment: Moment) -> partial[dict[str, Tensor]]:
        """The terms of a stage, as a pure function."""
        options, replay = self.options, ""
        if self.mixes and moment.stage:
            replay = "f"
        elif not self.site.by_columns and options.lambda_a and len(self._old(moment)):
            replay = "a"
        drift = options.drift if options.gamma else ""
        masked, noise = options.seen_mask, options.prototype_noise
        return partial(terms, LossConfig(self.head.network, replay, masked, noise, drift))

    def _constants(self, moment: Moment) -> Tensors:
        """The constants of a round that the terms read."""
        options, means = self.options, self.means
        weights = {"ce": options.lambda_ce if moment.stage else 1.0, "a": options.lambda_a,
                   "f": options.lambda_f, "gamma": options.gamma}  # fmt: skip
        constants = {f"lambda_{name}": means.new_tensor(value) for name, value in weights.items()}
        constants |= {"means": means, "mixed": self.mixed, "seen": self.head.seen_outputs}
        return constants | {"old": self._old(moment)}  # at the first stage no class has a prototype

    def _old(self, moment: Moment) -> Tensor:
        """Classes with a prototype but without rows at the stage (O)."""
        return torch.nonzero(self.known & (self.head.class_counts(moment) == 0)).flatten()

    def _end(self, clients: Clients, moment: Moment) -> dict[str, float]:
        """d.4: prototypes by eq. 5, Fisher diagonals, and the frozen share of each client."""
        notes = {} if self.site.regression else self._evolve(clients, moment)
        if self.options.lmo_rule != "off":
            self._measure(clients, moment)
        replies = clients.ask(Client.settle, dict.fromkeys(self.head.learners(moment), Empty()))
        return notes | {f"frozen {id}": reply.frozen for id, reply in replies.items()}

    def _evolve(self, clients: Clients, moment: Moment) -> dict[str, float]:
        """Eq. 5: prototypes after a stage, and how far it moved them; numbers have none."""
        means, counts = self._means(clients, moment)
        evolution = knowledge.evolved(self.means, self.known, means, counts, self.options.beta)
        moved = (evolution - self.means).norm(dim=-1)
        both = torch.nonzero(self.known & (counts > 0)).flatten().tolist()
        self._moved = {str(self.site.classes[kind]): float(moved[kind]) for kind in both}
        self.means, self.known = evolution, self.known | (counts > 0)
        return {f"moved class {kind}": float(moved[kind]) for kind in both}

    def _measure(self, clients: Clients, moment: Moment) -> None:
        """Send each sample's own gradient of the cross-entropy to the clients."""
        most, ids = self.options.fisher_rows, self.head.learners(moment)
        seed, gradient = vertical_delegates.sampled_gradients(self, clients, moment, "fisher", most)
        request = Measure(seed, self.head.parts(gradient, ids)[ids[0]])
        clients.ask(Client.measure, dict.fromkeys(ids, request))

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every task so far, and all their classes together (variant `union`)."""
        self._tested = self._tested[:1]
        predictions = {task: self._predicted(clients, moment, task) for task in clients.tasks}
        fresh = self.site.fresh if self.head.by_classes else None
        return vertical.scores(moment, predictions, fresh, unit=self.site.target.deviation)

    def _predicted(self, clients: Clients, moment: Moment, task: int) -> tuple[Tensor, Tensor]:
        y = self.site.test(task).y
        parts = self.head.embedded(clients, self.site.parties(moment.stage), "test", task)
        joint = self._joint(parts)
        self._tested.append((joint[:SHOWN], y[:SHOWN]))
        with torch.no_grad():
            return self.head.logits(joint), y

    def _joint(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The input of the top for rows without labels."""
        if not self.head.alone:
            return self.head.joined(parts)
        return knowledge.combined([*parts.values()], self.options.fil_eval, self.options.beta)

    def predict(self, model: Tensors, parts: Tensors) -> Tensor:
        """The logits of rows, from their embeddings at each client."""
        ids = self.site.parties(self.site.stages - 1)
        return self.head.logits(self._joint({id: parts[id] for id in ids}), model)

    def snapshot(self, moment: Moment) -> list[Snapshot]:
        """Prototypes, some test embeddings, and how far the stage moved prototypes."""
        classes = torch.nonzero(self.known).flatten()
        tested = map(torch.cat, zip(*self._tested, strict=True))
        return [
            embeddings_snapshot(self.site, moment, "prototypes", self.means[classes], classes),
            embeddings_snapshot(self.site, moment, "embeddings", *tested),
            *moved_snapshots(moment, self._moved),
        ]

    final_model = vertical_delegates.top_model
    state, restore = vertical_delegates.server_state, vertical_delegates.restore_server


METHOD = Method(Options, Server, Client, "parties", "union", weighs_classes=True, regression=True)
