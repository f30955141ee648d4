"""The one local training loop, and the counts of a test.

A client describes its local work as a job and yields it to the engine. Losses are pure functions of
weights and batch, so an engine may run the jobs of many clients as one computation
(`compute/stacking.py`) and compare it with the reference here, which runs one client.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from atoll.core.messages import Checked, Tensors
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.identity import batch_statistics, identities, shapes
from atoll.learning.models import Architecture, Loss
from atoll.learning.weights import copied, placed

__all__ = [
    "EvalJob",
    "Memory",
    "Optimiser",
    "Phase",
    "TrainJob",
    "TrainResult",
    "checked",
    "descend",
    "errors",
    "hits",
    "in_chunks",
    "scored",
    "step_key",
]

CHUNK = 4096  # rows of one pass without gradient


@dataclass(frozen=True)
class Optimiser:
    """How weights follow their gradient."""

    kind: Literal["adam", "sgd"]
    rate: float
    decay: float = 0.0  # pull towards zero, as a penalty decay/2 times the squared weights
    epsilon: float = 1e-8  # of Adam

    @property
    def key(self) -> tuple[str, float, float]:
        """All but the rate."""
        return self.kind, self.decay, self.epsilon


@dataclass(frozen=True)
class Phase:
    """One loss and the weights it moves; a step goes through the phases in their order."""

    name: str
    moves: tuple[str, ...]  # names of weights
    loss: Callable[[Mapping[str, Tensor], Rows], Tensor]  # all weights, a batch -> mean loss
    optimiser: Optimiser


@dataclass(frozen=True)
class TrainResult:
    """The result of local training."""

    weights: Tensors
    moments: Tensors
    losses: Mapping[str, float]  # the mean of each phase


@dataclass(frozen=True)
class TrainJob:
    """A client's local training: what moves, by which losses, on which rows. Changes nothing."""

    weights: Tensors  # those that move, and constants that the losses read
    moments: Tensors  # the optimisers' memory: first/NAME, second/NAME, steps/PHASE
    phases: tuple[Phase, ...]
    rows: Rows
    batch: int
    epochs: int
    stream: Stream
    own: frozenset[str] = frozenset()  # weights whose last axis ends with the own columns
    common: bool = False  # other runs have the same job, so its result may be stored for them
    ours: bool = False  # weights and moments are not shared and need not be copied

    @staticmethod
    def sgd(  # noqa: PLR0913 - what plain training needs, by keyword
        network: Architecture,
        loss: Loss,
        weights: Mapping[str, Tensor],
        rows: Rows,
        *,
        rate: float,
        batch: int,
        stream: Stream,
        epochs: int = 1,
    ) -> "TrainJob":
        """Gradient steps on the parameters of a network; other weights are constants of the loss.

        The result has the mean of `loss(network, weights, batch)` under the name "loss".
        """
        moves = tuple(name for name, _ in network.model.named_parameters())
        phase = Phase("loss", moves, partial(loss, network), Optimiser("sgd", rate))
        placed_weights = placed(weights, rows.y.device)
        return TrainJob(placed_weights, {}, (phase,), rows, batch, epochs, stream)

    def key(self) -> Hashable | None:
        """Losses, shapes and sizes; rates, values, own columns and numbers of rows may differ."""
        losses = identities(self.functions)
        if losses is None:
            return None
        phases = tuple([(p.name, p.moves, p.optimiser.key) for p in self.phases])
        x = self.rows.x
        inputs = (x.shape[1:], x.dtype, x.device)
        weights = shapes(self.weights, self.own)
        weighted = self.rows.share is not None
        return ("work", losses, phases, weights, inputs, self.batch, self.epochs, weighted)

    @property
    def functions(self) -> tuple[Callable[..., Tensor], ...]:
        """The losses."""
        return tuple(phase.loss for phase in self.phases)

    def run(self) -> TrainResult:
        """Train."""
        return self.run_steps(self.steps)

    @cached_property
    def steps(self) -> int:
        """How many batches there are in all epochs."""
        return self.epochs * len(self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """The rows of each batch of an epoch.

        One row has no spread, so under batch norm a last row alone joins the batch before.
        """
        full, rest = divmod(len(self.rows), self.batch)
        sizes = [self.batch] * full + [rest] * (rest > 0)
        if rest == 1 and full and batch_statistics(self.functions):
            sizes[-2:] = [self.batch + 1]
        return sizes

    def run_steps(self, steps: int) -> TrainResult:
        """The result of the first steps alone; losses are still divided by all rows."""
        weights, moments = (
            dict(tensors) if self.ours else copied(tensors)
            for tensors in (self.weights, self.moments)
        )
        moved = {
            phase.name: [weights[n].requires_grad_() for n in phase.moves] for phase in self.phases
        }
        memory = {phase.name: Memory(phase, moved[phase.name], moments) for phase in self.phases}
        device = self.rows.y.device
        losses = torch.zeros(len(self.phases), dtype=torch.float64, device=device)
        for batch in islice(self._batches(), steps):
            for number, phase in enumerate(self.phases):
                loss = phase.loss(weights, batch).sum()
                gradients = list(torch.autograd.grad(loss, moved[phase.name]))
                memory[phase.name].descend(moved[phase.name], gradients, phase.optimiser)
                losses[number] += loss.detach() * len(batch)
        rows = max(1, self.epochs * len(self.rows))
        means = {p.name: x / rows for p, x in zip(self.phases, losses.tolist(), strict=True)}
        for part in memory.values():
            moments |= part.saved()
        return TrainResult({n: w.detach() for n, w in weights.items()}, moments, means)

    def _batches(self) -> Iterator[Rows]:
        for epoch in range(self.epochs):
            device = self.rows.y.device
            order = self.stream.child("epoch", epoch).permutation(len(self.rows), device)
            for part in order.split(self.batch_sizes):
                yield self.rows.at(part)


def step_key(job: TrainJob) -> Hashable | None:
    """The key of one step of a job: all sizes but the numbers of rows and epochs."""
    key = replace(job, epochs=1).key()
    if key is None:
        return None
    rates = tuple(phase.optimiser.rate for phase in job.phases)
    own, y = job.rows.own, job.rows.y
    rows = (own.shape[1:], own.dtype, y.shape[1:], y.dtype, job.rows.share is None)
    return key, rates, shapes(job.weights), rows


class Memory:
    """The optimiser state of a phase."""

    def __init__(self, phase: Phase, weights: Sequence[Tensor], moments: Tensors) -> None:
        self.phase, adaptive = phase, phase.optimiser.kind == "adam"
        zeros = [torch.zeros_like(w, requires_grad=False) for w in weights] if adaptive else []
        names = phase.moves if adaptive else ()
        self.first = [moments.get(f"first/{n}", z) for n, z in zip(names, zeros, strict=True)]
        self.second = [
            moments.get(f"second/{n}", z.clone()) for n, z in zip(names, zeros, strict=True)
        ]
        steps = float(moments.get(f"steps/{phase.name}", torch.tensor(0)))
        self.steps = [torch.full((), steps, device=w.device) for w in weights] if adaptive else []

    def descend(self, weights: list[Tensor], gradients: list[Tensor], optimiser: Optimiser) -> None:
        """One step, in place."""
        with torch.no_grad():
            descend(weights, gradients, (self.first, self.second, self.steps), optimiser)

    @torch.no_grad()
    def load(self, moments: Tensors) -> None:
        """Load these moments, in place; none: reset."""
        if not self.steps:
            return
        for kind, buffers in (("first", self.first), ("second", self.second)):
            tensors = [moments.get(f"{kind}/{n}") for n in self.phase.moves]
            present = [g for g in tensors if g is not None]
            if len(present) < len(buffers):
                torch._foreach_zero_(buffers)
            if present:
                places = [m for m, g in zip(buffers, tensors, strict=True) if g is not None]
                torch._foreach_copy_(places, present)
        steps = moments.get(f"steps/{self.phase.name}")
        count = 0.0 if steps is None else float(steps.flatten()[0])
        torch._foreach_zero_(self.steps)
        torch._foreach_add_(self.steps, count)

    def saved(self) -> Tensors:
        """The memory under the names it has among the moments; the count of steps on the CPU."""
        if not self.steps:
            return {}
        memory = {f"steps/{self.phase.name}": torch.tensor(int(self.steps[0]))}
        for name, first, second in zip(self.phase.moves, self.first, self.second, strict=True):
            memory |= {f"first/{name}": first, f"second/{name}": second}
        return memory


def descend(
    weights: list[Tensor],
    gradients: list[Tensor],
    memory: tuple[list[Tensor], list[Tensor], list[Tensor]],  # first and second moments, steps
    optimiser: Optimiser,
) -> None:
    """One step of the optimiser, in place."""
    # torch's fused kernels assume that a gradient has the memory layout of its weight
    gradients = [gradient.contiguous() for gradient in gradients]
    if optimiser.kind == "sgd":
        none: list[Tensor | None] = [None] * len(weights)
        sgd(weights, gradients, none, foreach=True, weight_decay=optimiser.decay, momentum=0,
            lr=optimiser.rate, dampening=0, nesterov=False, maximize=False)  # fmt: skip
        return
    first, second, steps = memory
    adam(weights, gradients, first, second, [], steps, fused=True, amsgrad=False, beta1=0.9,
         beta2=0.999, lr=optimiser.rate, weight_decay=optimiser.decay, eps=optimiser.epsilon,
         maximize=False)  # fmt: skip


@dataclass(frozen=True)
class EvalJob:
    """A sum of a function over rows, without gradient."""

    weights: Tensors
    rows: Rows
    function: Callable[[Mapping[str, Tensor], Rows], Tensor]  # -> (..., rows), rows the last axis
    own: frozenset[str] = frozenset()  # weights whose last axis ends with the own columns

    def key(self) -> Hashable | None:
        """The function and shapes; values, own columns and numbers of rows may differ."""
        function = identities(self.functions)
        x = self.rows.x
        weights = shapes(self.weights, self.own)
        key = ("tally", function, weights, tuple(x.shape[1:]), str(x.device))
        return None if function is None else key

    @property
    def functions(self) -> tuple[Callable[..., Tensor], ...]:
        """The function, as the only one."""
        return (self.function,)

    @torch.no_grad()
    def run(self) -> Tensor:
        """The sums, on the CPU."""
        starts = range(0, max(1, len(self.rows)), CHUNK)
        parts = [
            self.function(self.weights, self.rows.at(slice(s, s + CHUNK))).sum(-1) for s in starts
        ]
        return torch.stack(parts).sum(0).cpu()


@torch.no_grad()
def in_chunks(predict: Callable[[Rows], Tensor], rows: Rows) -> Tensor:
    """The predictions for many rows, a bounded number at a time; rows are the last axis but one."""
    starts = range(0, max(1, len(rows)), CHUNK)
    return torch.cat([predict(rows.at(slice(start, start + CHUNK))) for start in starts], dim=-2)


def hits(logits: Tensor, y: Tensor, top: int = 1) -> tuple[int, float]:
    """The number of rows whose class has one of the `top` largest logits, and the macro-F1.

    Macro-F1 is the mean of F1, by the largest logit, over the classes that occur among the rows.
    """
    classes, guess = logits.shape[-1], logits.argmax(-1)
    counts = logits.new_zeros((3, classes), dtype=torch.float64)
    ones = torch.ones_like(y, dtype=torch.float64)
    counts[0].scatter_add_(0, y, (guess == y).double())
    counts[1].scatter_add_(0, y, ones)
    counts[2].scatter_add_(0, guess, ones)
    right, real, guessed = counts.cpu()  # synchronises with the device once
    f1 = (2 * right / (real + guessed).clamp(min=1))[real > 0]
    if top > 1:
        # a stable order: of equal logits the lower class is the likelier, as for argmax
        order = logits.argsort(dim=-1, descending=True, stable=True)
        among = order[..., :top] == y[:, None]
        return int(among.sum()), float(f1.mean()) if len(f1) else 0.0
    return int(right.sum()), float(f1.mean()) if len(f1) else 0.0


def scored(outputs: Mapping[str, Tensor], y: Tensor, unit: float = 1.0) -> Checked:
    """The test result of variants, by their outputs.

    Labels that are numbers are judged by their errors, in the unit of the label: `unit` is what 1
    is in the training scale.
    """
    if y.is_floating_point():
        return Checked(len(y), {}, {}, {v: errors(z, y, unit) for v, z in outputs.items()})
    counted = {variant: hits(logits, y) for variant, logits in outputs.items()}
    correct = {variant: count for variant, (count, _) in counted.items()}
    return Checked(len(y), correct, {variant: f1 for variant, (_, f1) in counted.items()})


def errors(outputs: Tensor, y: Tensor, unit: float = 1.0) -> dict[str, float]:
    """Mean squared and mean absolute error of predicted numbers, and the variance of the labels.

    They have four digits: a server that chooses the weights could read labels from all of them.
    """
    if not len(y):
        return {"mse": 0.0, "mae": 0.0, "variance": 0.0}
    residuals = (outputs[..., 0].double() - y.double()) * unit
    labels = y.double() * unit
    each = (residuals.square().mean(), residuals.abs().mean(), labels.var(correction=0))
    values = torch.stack(each).tolist()  # synchronises with the device once
    names = ("mse", "mae", "variance")
    return {name: float(f"{value:.3e}") for name, value in zip(names, values, strict=True)}


def checked(model: nn.Module, rows: Rows) -> Checked:
    """The test result of a network."""
    training = model.training
    model.eval()
    outputs = in_chunks(lambda part: model(part.x), rows)
    model.train(training)
    return scored({"": outputs}, rows.y)
