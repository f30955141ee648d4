"""TARGET: FedAvg whose clients distil the last model on rows of a generator, without any memory.

Zhang, Chen, Zhuang, Lyu, TARGET: Federated Class-Continual Learning via Exemplar-Free
Distillation, ICCV 2023. With `anchors` above 0, features are bound to fixed directions of their
classes, after Tran et al., LANDER, CVPR 2024 (learning/synthesis.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import SERVER, Clients, Moment, Working, scores
from atoll.core.messages import Empty, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.families import averaging
from atoll.families.averaging import Fitted, Weighting
from atoll.jobs.train import Optimiser, TrainJob, in_chunks
from atoll.learning import exemplars, synthesis
from atoll.learning.models import MLP
from atoll.learning.synthesis import HIDDEN, Synthesis
from atoll.learning.weights import copied, placed, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `target`."""

    strength: NotNegative = 1.0  # weight of distillation on synthetic rows
    synthetic: AtLeastOne = 1000  # synthetic rows that a site draws for a stage
    share: Annotated[float, Field(ge=0, le=0.9)] = 0.5  # of synthetic rows in an epoch
    latent: AtLeastOne = 64  # noise columns of the generator
    width: AtLeastOne = 256  # hidden layer of the generator
    steps: AtLeastOne = 200  # training steps of the generator, at the end of a stage
    generator_batch: AtLeastOne = 128  # rows of such a step
    generator_rate: Positive = 0.002  # learning rate of generator and student
    adversarial: NotNegative = 1.0  # weight of the disagreement of teacher and student
    statistics: NotNegative = 1.0  # weight of batch norm statistics, where the network has them
    anchors: NotNegative = 0.0  # weight of the bound around anchors (LANDER); for an mlp
    rate: Positive = 0.001  # learning rate of local training
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # fresh in every round
    weighting: Weighting = "equal"  # weight of each client in the mean

    @property
    def synthesis(self) -> Synthesis:
        """How the generator is trained."""
        return Synthesis(
            *(self.latent, self.width, self.steps, self.generator_batch, self.generator_rate),
            *(self.adversarial, self.statistics, self.anchors),
        )


@dataclass(frozen=True)
class Lesson:
    """The generator of the stages before, and the classes that it knows."""

    generator: Tensors
    seen: Tensor  # (classes,) truth values


@dataclass(frozen=True)
class Classes:
    """Which classes the rows of a stage have."""

    present: Tensor  # (classes,) truth values


class Client:
    """Trains the shared model on its rows and on synthetic ones; keeps no rows."""

    check, predict = averaging.check, averaging.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        how = Optimiser(options.optimiser, options.rate)
        self.phase, self.tested = averaging.local_training(site, synthesis.rehearsed, how)
        self.lesson: Tensors = {}  # generator, seen classes, and the teacher from the first fit on
        self.stage = -1  # of the lesson
        self._epoch: tuple[int, Rows] | None = None  # stage, and what its epochs go through

    def receive(self, request: Lesson, moment: Moment) -> Empty:
        """Take the generator of the stages before."""
        classes, how = len(self.site.classes), self.options.synthesis
        same = synthesis.fits(request.generator, math.prod(self.site.inputs()), classes, how)
        if not same or request.seen.shape != (classes,) or not request.seen.any():
            raise BadMessageError(SERVER, "a generator of another form")
        lesson = {**prefixed("generator", request.generator), "seen": request.seen}
        self.lesson, self.stage = placed(lesson, self.site.device), moment.stage
        return Empty()

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train the shared weights on the rows of the stage and on those of the generator."""
        options, weights = self.options, placed(request.weights, self.site.device)
        if self.stage == moment.stage and "seen" in self.lesson and not self._teacher():
            self.lesson = self.lesson | prefixed("teacher", copied(weights))
        stream = self.site.stream("fit", moment)
        result = yield TrainJob(
            weights={**weights, **self._constants()},
            moments={},
            phases=(self.phase,),
            rows=self._rows(moment.stage),
            batch=options.batch,
            epochs=options.epochs,
            stream=stream,
        )
        fitted = {name: result.weights[name] for name in weights}
        return Fitted(fitted, result.losses["loss"], len(self.site.train(moment.stage)))

    def _teacher(self) -> Tensors:
        return without("teacher", self.lesson)

    def _constants(self) -> Tensors:
        """What the loss reads beside the weights."""
        numbers = {"strength": self.options.strength}
        constants = {}
        if self.options.anchors:
            width = _hidden(self.site)
            numbers["bound"] = self.options.anchors
            anchors = synthesis.anchor_directions(len(self.site.classes), width)
            constants["constant/anchors"] = anchors.to(self.site.device, self.site.dtype)
        for name, value in numbers.items():
            constants[f"constant/{name}"] = torch.tensor(
                value, device=self.site.device, dtype=self.site.dtype
            )
        return constants

    def _rows(self, stage: int) -> Rows:
        """The rows of a stage, and synthetic ones with the teacher's logits."""
        if self._epoch is None or self._epoch[0] != stage:
            rows = self.site.train(stage)
            if rows.sequences:
                raise UserError("texts have no generator", "method.name", "use 'fedavg'")
            nothing = rows.x.new_full((len(rows), len(self.site.classes)), HIDDEN)
            rows = replace(rows, own=nothing)
            if self.stage == stage and self._teacher() and self.options.share:
                drawn = self._synthetic(stage)
                drawn = exemplars.repeated(drawn, len(rows), self.options.share)
                rows = exemplars.joined([rows, drawn])
            self._epoch = stage, rows
        return self._epoch[1]

    def _synthetic(self, stage: int) -> Rows:
        """Rows of the generator; their labels are not used."""
        seen, teacher = self.lesson["seen"], self._teacher()
        generator = without("generator", self.lesson)
        stream, count = self.site.stream("synthetic", stage), self.options.synthetic
        x = synthesis.drawn_rows(generator, seen, count, self.site.inputs(), stream)
        y = torch.zeros(count, dtype=torch.int64, device=x.device)
        rows = Rows(x, x.new_zeros((count, 0)), y)
        logits = in_chunks(lambda part: self.tested(teacher, part.x), rows)
        return replace(rows, own=synthesis.hidden_logits(logits, seen))

    def classes(self, request: Empty, moment: Moment) -> Classes:
        """The classes of the stage."""
        y = self.site.train(moment.stage).y
        return Classes(torch.bincount(y, minlength=len(self.site.classes)) > 0)

    def state(self) -> Tensors:
        return {**self.lesson, "stage": torch.tensor(self.stage)}

    def restore(self, state: Tensors) -> None:
        self.lesson = copied({name: tensor for name, tensor in state.items() if name != "stage"})
        self.stage, self._epoch = int(state["stage"]), None

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The shared model."""
        return without("weights", shared)


class Server:
    """Holds the shared model, and the generator of the stages that have ended."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if options.anchors:
            _hidden(site)
        self.weights: Tensors = copied(site.model().state_dict())
        self.generator: Tensors = {}
        self.seen = torch.zeros(len(site.classes), dtype=torch.bool)

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Average; the first round of a stage sends the generator, the last trains the next one."""
        if moment.first and self.generator:
            clients.ask_all(Client.receive, Lesson(self.generator, self.seen))
        replies = clients.ask_all(Client.fit, Weights(self.weights))
        self.weights, loss = averaging.averaged(replies, self.options.weighting)
        if moment.last and moment.stage < self.site.stages - 1:
            self._synthesise(clients, moment)
        return {"loss": loss}

    def _synthesise(self, clients: Clients, moment: Moment) -> None:
        """Train a generator for the shared model, which knows all classes so far."""
        replies = clients.ask_all(Client.classes, Empty(), admit=self._admit)
        for reply in replies.values():
            self.seen = self.seen | reply.present.cpu()
        teacher, student = self.site.model(), self.site.model()
        teacher.load_state_dict(placed(self.weights, self.site.device))
        self.generator = synthesis.trained_generator(
            teacher,
            student,
            self.seen.to(self.site.device),
            self.site.inputs(),
            self.options.synthesis,
            self.site.stream("generator", moment.stage),
        )

    def _admit(self, id: str, reply: Classes) -> None:
        """Refuse other classes."""
        present = reply.present
        if present.dtype != torch.bool or tuple(present.shape) != (len(self.site.classes),):
            raise BadMessageError(id, "classes of another data set")

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Test the shared model on every client's test rows."""
        return scores(clients, Client.check, self.weights, moment)

    def state(self) -> Tensors:
        parts = prefixed("weights", self.weights) | prefixed("generator", self.generator)
        return {**parts, "seen": self.seen}

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        self.generator = copied(without("generator", state))
        self.seen = state["seen"].cpu()


def _hidden(site: Site) -> int:
    """The width of the last hidden layer, which anchors are directions of."""
    model = site.outline(training=False)
    if not isinstance(model, MLP) or model.depth < 2:
        remedy = "use 'mlp' with a hidden layer, or anchors = 0"
        raise UserError("anchors need the last hidden layer of an mlp", "model.name", remedy)
    return int(getattr(model, f"weight{model.depth - 1}").shape[1])


def own_share(options: Options, rows: int, before: int) -> float:
    """The share of own rows in an epoch of a stage; the first one has no synthetic rows."""
    if not before or not options.share:
        return 1.0
    repeated = round(rows * options.share / (1 - options.share))
    return rows / (rows + max(options.synthetic, repeated))


METHOD = Method(
    Options, Server, Client,
    quorum=True, first=lambda server: {"shared": server.weights}, own_share=own_share,
)  # fmt: skip
