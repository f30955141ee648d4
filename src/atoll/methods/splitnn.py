"""Split learning: clients hold columns, the server labels; embeddings go up, gradients come down.

Ceballos et al., SplitNN-driven Vertical Partitioning, 2020; Romanini et al., PyVertical, 2021.

Each client has a bottom network on its own columns, the server a top network on the joined
embeddings. Over stages the same networks go on learning, which forgets: the method is the baseline
of V-LETO. `replay` adds the rehearsal of another continual method (PASS, FedSpace, FedProK);
`fresh` starts new networks at each stage (Standalone).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment
from atoll.core.messages import Empty, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Fraction, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.data.vertical_site import VerticalSite
from atoll.families import vertical, vertical_delegates
from atoll.jobs.split_round import Lent, SplitJob, Step, draws
from atoll.learning.knowledge import class_means
from atoll.learning.models import Architecture
from atoll.learning.replay import contrast, noisy, picked, radius, translated, turned, updated
from atoll.learning.split import Agg
from atoll.learning.split_nets import NetName

TAU = 0.1  # temperature of PASS and FedSpace
W_PA, W_KD = 10.0, 10.0  # PASS: weights of prototypes and of distillation
W_SPACE = 0.01  # FedSpace: weight of prototypes, and of contrast


@dataclass(frozen=True)
class Options:
    """The options of `splitnn`."""

    rate: Positive = 0.01  # learning rate of all networks
    batch: AtLeastOne = 128  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 1  # epochs per round
    network: NetName = "auto"  # lenet3, lenet2, mlp, dense; auto: lenet3 where it fits, else dense
    width: AtLeastOne = 50  # width of an embedding (d)
    dropout: Fraction = 0.5  # dropout of the embedding in training, with network = "mlp" only
    agg: Agg = "sum"  # aggregation of embeddings: sum, mean or concat
    fresh: bool = False  # new networks at each stage, tested on that stage's task: Standalone
    replay: Literal["none", "pass", "fedspace", "fedprok"] = "none"  # replay of old classes
    rotate: bool = True  # replay = "pass", on images: add each row rotated by 180 degrees
    protocol: Literal["P1", "P2"] = "P1"  # columns by stage: train the new client, or all so far
    fil_eval: Literal["sum", "current"] = "sum"  # columns by stage: sum at the test, or newest
    seen_mask: bool = False  # mask classes that no stage has had yet
    declared: NotNegativeInt = 0  # number of classes known from the start; 0: all of the data set
    undeclared: Literal["refuse", "widen"] = "refuse"  # what to do with a class beyond those
    pixel_mean: tuple[float, ...] = ()  # channel means, from 0 to 1; empty: pixels from -1 to 1
    pixel_std: tuple[float, ...] = ()  # standard deviation of each channel, with pixel_mean
    clip: NotNegative = 0.0  # maximum norm of a row's gradient that is sent; 0: no clipping
    noise: NotNegative = 0.0  # standard deviation of the noise added to gradients that are sent
    secret: bool = False  # draw the noise from the operating system, not from the run's seed
    digits: NotNegativeInt = 0  # decimal places of embeddings that are sent; 0: all


class LossConfig(NamedTuple):
    """The constants of the loss of a stage."""

    network: Architecture
    replay: str
    outputs: int  # of a class, one for each view
    masked: bool  # leave out classes that no stage has had
    tau: float  # temperature


def losses(
    config: LossConfig, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor], step: Step
) -> dict[str, Tensor]:
    """Cross-entropy or squared error, plus the term of the rehearsal (specification, h)."""

    def entropy(rows: Tensor, labels: Tensor) -> Tensor:
        network, seen = config.network, constants["seen"]
        logits = vertical.masked_logits(network, weights, rows, seen, config.masked)
        return vertical.label_loss(logits / config.tau, labels, constants.get("class_weight"))

    joint, y, means = step.joint, step.y, constants["means"]
    loss = entropy(joint, y)
    if config.replay == "none":
        return {"loss": loss}
    classes = picked(constants["old"], len(y), draws(step.key, 1))
    if config.replay == "fedprok":
        moved = translated(joint, constants["current"][y], means[classes])
        return {"loss": loss + entropy(moved, classes)}
    rows = noisy(means[classes], constants["radius"], draws(step.key, 2))
    rehearsed = entropy(rows, classes * config.outputs)
    if config.replay == "pass":
        return {"loss": loss + W_PA * rehearsed}
    both, labels = torch.cat([joint, rows]), torch.cat([y, classes])
    return {"loss": loss + W_SPACE * (rehearsed + contrast(both, labels, len(y)))}


class Client:
    """Holds columns and the bottom network that reads them."""

    def __init__(self, options: Options, site: VerticalSite) -> None:
        self.options, self.site = options, site
        distils = options.replay == "pass"
        turns = distils and options.rotate and len(site.inputs()) == 3
        self.learner = vertical.Learner(options, site, (turned,) if turns else ())
        self._penalty = W_KD if distils else 0.0  # weight of the distance to old embeddings

    def learn(self, request: vertical.Learn, moment: Moment) -> vertical.Embedded:
        """Apply the gradient of the last step, then return the embeddings of the next."""
        if request.step == 0:
            self._begin(moment)
        return vertical.Embedded(self.learner.learn(request, moment, penalty=self._penalty))

    def _begin(self, moment: Moment) -> None:
        if self.options.fresh and moment.first:
            self.learner.start(moment.stage)

    def settle(self, request: Empty, moment: Moment) -> Empty:
        """Keep the weights with which the stage ends, for distillation."""
        self.learner.settle()
        return Empty()

    def lend(self, moment: Moment, job: SplitJob) -> Lent:
        """Lend the client's half for a round in one computation."""
        self._begin(moment)
        return self.learner.lend(moment, job, penalty=self._penalty)

    def state(self) -> Tensors:
        return self.learner.state()

    def restore(self, state: Tensors) -> None:
        self.learner.restore(state)

    embed, take = vertical_delegates.embed, vertical_delegates.take
    final_model, predict = vertical_delegates.bottom_model, vertical_delegates.predict


class Server:
    """Holds labels and the top network, and prototypes where it rehearses."""

    stored = ("means", "counts", "radius")  # its state beside its half

    def __init__(self, options: Options, site: VerticalSite) -> None:
        self.options, self.site = options, site
        if site.regression and options.replay != "none":
            what = f"replay = '{options.replay}' replays classes, and the label is a number"
            raise UserError(what, "method.replay", "leave replay out")
        images = all(len(site.shape_of(id)) == 3 for id in site.clients)
        views = (turned,) if options.replay == "pass" and options.rotate and images else ()
        self.head = vertical.Head(options, site, (Client.embed, Client.learn), views)
        like, classes = next(iter(self.head.weights.values())), len(site.classes)
        self.means = like.new_zeros((classes, self.head.width))  # mu_g
        self.counts = torch.zeros(classes, dtype=torch.int64, device=site.device)
        self.radius = torch.tensor(0.0)
        self.current = torch.zeros_like(self.means)  # mu_t of the stage, for FedProK

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Some passes over the rows; at the end of a stage, prototypes."""
        if moment.first:
            self.head.begin(moment)
            if self.options.fresh and moment.stage:
                self.head.start(moment.stage)
        if self.options.replay == "fedprok" and moment.stage:
            rows = self.head.training_rows(clients, moment)
            self.current, _ = class_means(*rows, len(self.counts))
        job = self.head.job(moment, self._loss(moment), self._constants(moment))
        total = self.head.train(clients, job).totals["loss"]
        if moment.last and self.options.replay != "none":
            self._keep(clients, moment)
            clients.ask(Client.settle, dict.fromkeys(self.head.learners(moment), Empty()))
        return {"loss": total / max(1, self.options.epochs * len(job.y) * self.head.outputs)}

    def _loss(self, moment: Moment) -> partial[dict[str, Tensor]]:
        """The loss of a stage, as a pure function."""
        options = self.options
        replay = options.replay if moment.stage and len(self._old(moment)) else "none"
        masked = options.seen_mask or options.replay == "fedspace"
        tau = TAU if options.replay in ("pass", "fedspace") else 1.0
        return partial(
            losses, LossConfig(self.head.network, replay, self.head.outputs, masked, tau)
        )

    def _constants(self, moment: Moment) -> Tensors:
        """The constants of a round that the loss reads."""
        present = (self.head.class_counts(moment) > 0)[:, None]
        return {"seen": self.head.seen_outputs, "means": self.means, "old": self._old(moment),
                "current": torch.where(present, self.current, self.means),
                "radius": self.radius.to(self.means)}  # fmt: skip

    def _old(self, moment: Moment) -> Tensor:
        """Classes with a prototype but without rows at the stage; if none, all with a prototype."""
        learned = (self.counts > 0) & bool(moment.stage)
        absent = learned & (self.head.class_counts(moment) == 0)
        return torch.nonzero(absent if absent.any() else learned).flatten()

    def _keep(self, clients: Clients, moment: Moment) -> None:
        """Update the prototypes at the end of a stage, by the rule of the rehearsal."""
        rows, y = self.head.training_rows(clients, moment)
        means, counts = class_means(rows, y, len(self.counts))
        if moment.stage == 0:
            self.radius = torch.tensor(radius(rows, y, means))
        self.means = updated(self.options.replay, (self.means, self.counts), (means, counts))
        self.counts = self.counts + counts

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every task so far, and all their classes together (variant `union`)."""
        fresh, ids, predictions = self.options.fresh, self._answering(moment.stage), {}
        for task in [moment.stage] if fresh and self.head.by_classes else clients.tasks:
            joint = self.head.joined(self.head.embedded(clients, ids, "test", task))
            predictions[task] = (self.head.logits(joint).detach(), self.site.test(task).y)
        union, unit = self.head.by_classes and not fresh, self.site.target.deviation
        rows = self.site.fresh if union else None
        return vertical.scores(moment, predictions, rows, unit=unit)

    def _answering(self, stage: int) -> list[str]:
        """The clients whose columns a prediction reads after a stage."""
        ids = self.site.parties(stage)
        newest = self.options.fresh or self.options.fil_eval == "current"
        return ids[-1:] if self.site.by_columns and newest else ids

    def predict(self, model: Tensors, parts: Tensors) -> Tensor:
        """The logits of rows, from their embeddings at each client."""
        ids = self._answering(self.site.stages - 1)
        return self.head.logits(self.head.joined({id: parts[id] for id in ids}), model)

    final_model = vertical_delegates.top_model
    state, restore = vertical_delegates.server_state, vertical_delegates.restore_server


METHOD = Method(Options, Server, Client, "parties", "union", weighs_classes=True, regression=True)
