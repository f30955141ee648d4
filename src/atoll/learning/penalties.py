"""Penalties of local training: stay close to shared weights, or to what earlier stages need.

proximal: Li et al. 2020. ewc: Kirkpatrick et al., Overcoming catastrophic forgetting in neural
networks, 2017. si: Zenke et al., Continual Learning Through Synaptic Intelligence, 2017. lwf: Li
and Hoiem, Learning without Forgetting, 2016.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.messages import Tensors
from atoll.core.rows import Rows
from atoll.learning.distill import logits
from atoll.learning.losses import cross_entropy, label_loss, plain, proximal
from atoll.learning.models import Architecture, Loss
from atoll.learning.weights import copied, prefixed, without

__all__ = ["Past", "Penalty", "distilled", "fisher_diagonal", "gradient", "path_terms", "weighted"]

Penalty = Literal["none", "proximal", "ewc", "si", "lwf"]
DAMPING: Final = 1e-3  # si: added to the squared way of a weight
TEMPERATURE: Final = 2.0  # lwf
HIDDEN: Final = -1e4  # lwf: in place of the teacher's logit of a class that it does not teach
CHUNK: Final = 64  # rows with individual gradients


def _own(weights: Mapping[str, Tensor]) -> Tensors:
    """The weights of the network, without constants of a loss."""
    return {n: w for n, w in weights.items() if "/" not in n and n != "strength"}


def weighted(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Cross-entropy plus strength/2 times the squared distance to the anchor, by importance."""
    anchor, importance = without("anchor", weights), without("importance", weights)
    loss = plain(network, _own(weights), batch)
    parts = [importance[n] * (weights[n] - anchor[n]) ** 2 for n in importance]
    distance = torch.stack([part.flatten(loss.dim()).sum(-1) for part in parts]).sum(0)
    return loss + weights["strength"] / 2 * distance


def distilled(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Cross-entropy plus strength T^2 KL(teacher || student) over the classes that it teaches.

    `batch.own` has the teacher's logits, HIDDEN for all other classes.
    """
    student = network(_own(weights), batch.x)
    taught = batch.own > HIDDEN / 2
    log_q = F.log_softmax(torch.where(taught, student, HIDDEN) / TEMPERATURE, -1)
    log_p = F.log_softmax(batch.own / TEMPERATURE, -1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    share = batch.share
    apart = each.mean(-1) if share is None else (each * share).sum(-1) / share.sum(-1)
    return cross_entropy(student, batch) + weights["strength"] * TEMPERATURE**2 * apart


def fisher_diagonal(
    network: Architecture, weights: Tensors, rows: Rows, moves: Sequence[str]
) -> Tensors:
    """The mean over rows of the squared gradient of a row's loss with its own label."""

    def loss(own: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return label_loss(network({**weights, **own}, x[None]), Rows(x[None], x[None, :0], y[None]))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    parts = {name: weights[name] for name in moves}
    total = {name: torch.zeros_like(weight) for name, weight in parts.items()}
    for x, y in zip(rows.x.split(CHUNK), rows.y.split(CHUNK), strict=True):
        for name, gradients in each(parts, x, y).items():
            total[name] += (gradients**2).sum(0)
    return {name: summed / max(1, len(rows)) for name, summed in total.items()}


def gradient(network: Architecture, weights: Tensors, rows: Rows, moves: Sequence[str]) -> Tensors:
    """The gradient of the mean cross-entropy of rows."""
    parts = {name: weights[name].detach().requires_grad_() for name in moves}
    loss = plain(network, {**weights, **parts}, rows)
    gradients = torch.autograd.grad(loss, list(parts.values()))
    return dict(zip(moves, gradients, strict=True))


def path_terms(before: Tensors, after: Tensors, first: Tensors, last: Tensors) -> Tensors:
    """How much the way of each weight lowers the loss: - (first + last) / 2 times the way.

    `first` and `last` are the gradients at both ends: the trapezoidal rule on the straight way.
    """
    return {n: -(first[n] + last[n]) / 2 * (after[n] - before[n]) for n in first}


class Past:
    """A client's memory of earlier stages, and the loss that uses it."""

    def __init__(self, penalty: Penalty, strength: float, network: Architecture) -> None:
        """`network` is in evaluation mode."""
        self.penalty, self.strength, self.network = penalty, strength, network
        self.moves = tuple(name for name, _ in network.model.named_parameters())
        self.stage = 0
        self.anchor: Tensors = {}  # shared weights at the start of this stage
        self.importance: Tensors = {}  # of each weight for the stages before
        self.path: Tensors = {}  # si: terms of this stage

    @property
    def remembers(self) -> bool:
        """Whether there is state beyond a message."""
        return self.penalty in ("ewc", "si", "lwf")

    def begin(self, weights: Tensors, stage: int) -> None:
        """Store the first shared weights of each stage as the anchor."""
        if not self.remembers or (self.anchor and stage == self.stage):
            return
        if self.path:
            for name, term in self.path.items():
                way = (weights[name] - self.anchor[name]) ** 2
                self._add(name, term.clamp(min=0) / (way + DAMPING))
            self.path = {}
        self.anchor, self.stage = copied(weights), stage

    def terms(self, weights: Tensors, rows: Rows) -> tuple[Loss, Tensors, Rows]:
        """The loss, the weights with the constants that it reads, and the rows."""
        if self.penalty == "proximal":
            anchor = prefixed("anchor", {n: weights[n] for n in self.moves})
            return proximal, {**weights, **anchor, **self._strength(rows)}, rows
        if self.penalty == "lwf" and self.stage:
            return distilled, {**weights, **self._strength(rows)}, self._taught(rows)
        if not self.importance:
            return plain, weights, rows
        anchor = prefixed("anchor", {n: self.anchor[n] for n in self.moves})
        constants = anchor | prefixed("importance", self.importance) | self._strength(rows)
        return weighted, {**weights, **constants}, rows

    def _strength(self, rows: Rows) -> Tensors:
        """The penalty's factor, filled on the device: a copy would block the host."""
        return {"strength": torch.full((), self.strength, device=rows.y.device)}

    def _taught(self, rows: Rows) -> Rows:
        """The rows with the anchor's logits of the classes that none of them has, or of all."""
        teacher = logits(self.network, self.anchor, rows.x)
        taught = torch.bincount(rows.y, minlength=teacher.shape[-1]) == 0
        shown = teacher if not bool(taught.any()) else torch.where(taught, teacher, HIDDEN)
        return replace(rows, own=shown)

    def end(self, before: Tensors, after: Tensors, rows: Rows, last: bool) -> None:
        """Record local training of a round; `last`: the last round of its stage."""
        if self.penalty == "si":
            first, final = (
                gradient(self.network, weights, rows, self.moves) for weights in (before, after)
            )
            for name, term in path_terms(before, after, first, final).items():
                self.path[name] = self.path[name] + term if name in self.path else term
        if self.penalty == "ewc" and last:
            for name, part in fisher_diagonal(self.network, after, rows, self.moves).items():
                self._add(name, part)

    def _add(self, name: str, part: Tensor) -> None:
        before = self.importance.get(name)
        self.importance[name] = part if before is None else before + part

    def state(self) -> Tensors:
        """All persistent state by name."""
        if not self.anchor:
            return {}
        parts = (("anchor", self.anchor), ("importance", self.importance), ("path", self.path))
        state = {"stage": torch.tensor(self.stage)}
        for name, tensors in parts:
            state |= prefixed(name, tensors)
        return state

    def restore(self, state: Tensors) -> None:
        """Restore what `state` returned."""
        self.anchor, self.importance, self.path = (
            copied(without(name, state)) for name in ("anchor", "importance", "path")
        )
        self.stage = int(state.get("stage", torch.tensor(0)))
