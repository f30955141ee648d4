"""A training step on public images: learn the target of one batch, then return logits of the next.

Between its answer and the target a client keeps the autograd graph of its forward pass.
`compute/public_steps.py` captures both halves as CUDA graphs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.jobs.identity import identities, shapes
from atoll.jobs.train import Optimiser, descend
from atoll.learning.models import Architecture

__all__ = ["Again", "Place", "PublicJob", "PublicResult", "StepLoss", "gradients", "zeros"]

Again = Callable[[Tensor], Tensor]  # other images -> their logits under the same weights
# logits of the batch, other images' logits, what came with the request by name -> one number
StepLoss = Callable[[Tensor, Again, Tensors], Tensor]
Place = tuple[int, ...]  # which batch of which round, and the key of its draws


@dataclass(frozen=True)
class Forward:
    """A forward pass that waits for its target; only a cache, so losing it changes no result."""

    place: Place
    weights: Tensors  # those that will move as leaves, buffers as the pass left them
    z: Tensor


@dataclass(frozen=True)
class PublicResult:
    """The result of a step."""

    weights: Tensors
    moments: Tensors
    followed: Tensor | None  # the logits of the batch whose target had come
    loss: Tensor | None  # of that batch
    logits: Tensor | None  # of the batch that was asked for
    waiting: Any  # the forward pass of that batch, to be handed to the next step


@dataclass(frozen=True)
class PublicJob:
    """A client's work in one exchange on public images. Changes nothing."""

    network: Architecture
    moves: tuple[str, ...]
    weights: Tensors
    moments: Tensors  # Adam's, where they are kept from step to step
    images: Callable[[int], Tensor]  # number of a step -> its images
    place: Place  # of the round
    follow: int | None  # the step whose target has come
    answer: int | None  # the step that is asked for
    constants: Tensors  # what the loss reads beside the logits
    loss: StepLoss
    optimiser: Optimiser
    fresh: bool = True  # reset Adam after every step
    penalty: Callable[[Tensors], Tensor] | None = None  # a penalty on the parameters
    waiting: Any = None  # the forward pass of the step before

    def key(self) -> Hashable | None:
        """The network, the loss and shapes; steps with equal keys differ in values alone."""
        loss = identities(self.functions)
        if loss is None:
            return None
        memory = (self.fresh, self.penalty is None)
        return (
            "public step",
            self.network,
            self.moves,
            loss,
            self.optimiser,
            memory,
            shapes(self.weights),
        )

    @property
    def functions(self) -> tuple[StepLoss, ...]:
        """The loss, as the only one."""
        return (self.loss,)

    def run(self) -> PublicResult:
        """Do the step."""
        weights, moments, followed, loss = self.weights, self.moments, None, None
        if self.follow is not None:
            waiting = self.waiting
            if not isinstance(waiting, Forward) or waiting.place != self.at(self.follow):
                waiting = self._forward(weights, self.follow)
            weights, moments, loss = self._followed(waiting)
            followed = waiting.z.detach()
        if self.answer is None:
            return PublicResult(weights, moments, followed, loss, None, None)
        waiting = self._forward(weights, self.answer)
        return PublicResult(weights, moments, followed, loss, waiting.z.detach(), waiting)

    def at(self, step: int) -> Place:
        """Identifies a batch within a run."""
        return (*self.place, step)

    def _forward(self, weights: Tensors, step: int) -> Forward:
        """The logits of a batch in training; the weights stay as they are until it is followed."""
        leaves = {n: weights[n].detach().requires_grad_() for n in self.moves}
        moved = {n: leaves.get(n, w.clone()) for n, w in weights.items()}
        return Forward(self.at(step), moved, self.network(moved, self.images(step)))

    def _followed(self, waiting: Forward) -> tuple[Tensors, Tensors, Tensor]:
        weights = waiting.weights
        loss = self.loss(waiting.z, lambda x: self.network(weights, x), self.constants)
        if self.penalty is not None:
            loss = loss + self.penalty({n: weights[n] for n in self.moves})
        moved = [weights[n].detach().clone() for n in self.moves]
        slopes = gradients(loss, [weights[n] for n in self.moves])
        before = {} if self.fresh else self.moments
        steps = float(before.get("steps", torch.tensor(0)))
        memory = [
            [before[f"{kind}/{n}"].clone() for n in self.moves] if steps else zeros(moved)
            for kind in ("first", "second")
        ]
        counts = list(torch.full((len(moved),), steps, device=moved[0].device).unbind())
        with torch.no_grad():
            descend(moved, slopes, (memory[0], memory[1], counts), self.optimiser)
        after = {n: w.detach() for n, w in weights.items()} | dict(
            zip(self.moves, moved, strict=True)
        )
        if self.fresh:
            return after, {}, loss.detach()
        moments: Tensors = {"steps": torch.tensor(steps + 1)}
        for kind, tensors in zip(("first", "second"), memory, strict=True):
            moments |= {f"{kind}/{n}": t for n, t in zip(self.moves, tensors, strict=True)}
        return after, moments, loss.detach()


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient by each leaf, zeros where the loss does not depend on it."""
    slopes = torch.autograd.grad(loss, list(leaves), allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, slopes, strict=True)]


def zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of these shapes, one piece of memory for all."""
    flat = like[0].new_zeros(sum(w.numel() for w in like))
    parts = flat.split([w.numel() for w in like])
    return [part.view(w.shape) for part, w in zip(parts, like, strict=True)]
