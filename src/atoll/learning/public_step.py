"""A step on public images: follow what came back for one batch, then answer for the next.

Between its answer and the target that comes back a client keeps the graph of its forward pass. On a
GPU both halves are captured once, as CUDA graphs that share the memory of the activations, and
replayed; each client needs a memory of its own, since all answer before any of them follows.
Without a GPU the same halves run as they are, so that the plain step can be held to them anywhere.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.learning.captured import EAGER, Lane, NotCapturableError, told
from atoll.learning.models import Architecture
from atoll.learning.train import Optimiser, descend
from atoll.learning.weights import copied, copied_at_once, into

__all__ = ["Again", "CapturedStep", "PublicStep", "StepLoss", "Stepped", "step_form", "stepped"]

Again = Callable[[Tensor], Tensor]  # other images -> their logits under the same weights
# logits of the batch, other images' logits, what came with the request by name -> one number
StepLoss = Callable[[Tensor, Again, Tensors], Tensor]
Place = tuple[int, ...]  # which batch of which round, and the key of its draws


@dataclass(frozen=True)
class Forward:
    """A forward pass that waits for its target; a cache alone, never the only copy of anything."""

    place: Place
    weights: Tensors  # those that will move as leaves, buffers as the pass left them
    z: Tensor


@dataclass(frozen=True)
class Stepped:
    """What a step gives."""

    weights: Tensors
    moments: Tensors
    followed: Tensor | None  # the logits of the batch whose target had come
    loss: Tensor | None  # of that batch
    logits: Tensor | None  # of the batch that was asked for
    waiting: Any  # the forward pass of that batch, to be handed to the next step


@dataclass(frozen=True)
class PublicStep:
    """A client's work in one exchange on public images. Changes nothing."""

    network: Architecture
    moves: tuple[str, ...]
    weights: Tensors
    moments: Tensors  # Adam's, where they are kept from step to step
    images: Callable[[int], Tensor]  # number of a step -> its images
    place: Place  # of the round
    follow: int | None  # the step whose target has come
    answer: int | None  # the step that is asked for
    given: Tensors  # what the loss reads beside the logits
    loss: StepLoss
    how: Optimiser
    fresh: bool = True  # Adam forgets after every step
    penalty: Callable[[Tensors], Tensor] | None = None  # what the parameters themselves cost
    waiting: Any = None  # the forward pass that the step before left

    def __call__(self) -> Stepped:
        """Do the step."""
        weights, moments, followed, loss = self.weights, self.moments, None, None
        if self.follow is not None:
            waiting = self.waiting
            if not isinstance(waiting, Forward) or waiting.place != self.at(self.follow):
                waiting = self._forward(weights, self.follow)
            weights, moments, loss = self._followed(waiting)
            followed = waiting.z.detach()
        if self.answer is None:
            return Stepped(weights, moments, followed, loss, None, None)
        waiting = self._forward(weights, self.answer)
        return Stepped(weights, moments, followed, loss, waiting.z.detach(), waiting)

    def at(self, step: int) -> Place:
        """What tells a batch from all others of a run."""
        return (*self.place, step)

    def _forward(self, weights: Tensors, step: int) -> Forward:
        """The logits of a batch in training; the weights stay as they are until it is followed."""
        leaves = {n: weights[n].detach().requires_grad_() for n in self.moves}
        mine = {n: leaves.get(n, w.clone()) for n, w in weights.items()}
        return Forward(self.at(step), mine, self.network(mine, self.images(step)))

    def _followed(self, waiting: Forward) -> tuple[Tensors, Tensors, Tensor]:
        weights = waiting.weights
        loss = self.loss(waiting.z, lambda x: self.network(weights, x), self.given)
        if self.penalty is not None:
            loss = loss + self.penalty({n: weights[n] for n in self.moves})
        moved = [weights[n].detach().clone() for n in self.moves]
        found = gradients(loss, [weights[n] for n in self.moves])
        before = {} if self.fresh else self.moments
        taken = float(before.get("steps", torch.tensor(0)))
        memory = [
            [before[f"{kind}/{n}"].clone() for n in self.moves] if taken else _zeros(moved)
            for kind in ("first", "second")
        ]
        counts = list(torch.full((len(moved),), taken, device=moved[0].device).unbind())
        with torch.no_grad():
            descend(moved, found, (memory[0], memory[1], counts), self.how)
        after = {n: w.detach() for n, w in weights.items()} | dict(
            zip(self.moves, moved, strict=True)
        )
        if self.fresh:
            return after, {}, loss.detach()
        moments: Tensors = {"steps": torch.tensor(taken + 1)}
        for kind, tensors in zip(("first", "second"), memory, strict=True):
            moments |= {f"{kind}/{n}": t for n, t in zip(self.moves, tensors, strict=True)}
        return after, moments, loss.detach()


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient by each leaf, zeros where the loss does not hang on it."""
    found = torch.autograd.grad(loss, list(leaves), allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, found, strict=True)]


def _zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of these shapes, one piece of memory for all."""
    flat = like[0].new_zeros(sum(w.numel() for w in like))
    parts = flat.split([w.numel() for w in like])
    return [part.view(w.shape) for part, w in zip(parts, like, strict=True)]


def step_form(job: PublicStep) -> Hashable:
    """Steps that are alike in this differ in values alone; one that cannot be captured says why."""
    if not job.fresh or job.penalty is not None:
        raise NotCapturableError("it has moments or a penalty")
    shapes = tuple((n, str(w.dtype), tuple(w.shape)) for n, w in sorted(job.weights.items()))
    return job.network, job.moves, told(job.loss), job.how, shapes


class CapturedStep:
    """Buffers and graphs of one client's public steps; made once, replayed at every exchange."""

    def __init__(self, job: PublicStep, lane: Lane | None = None) -> None:
        """Make the buffers; no other client's public steps may be on the same lane."""
        self.job = job  # for what is the same in all steps
        device = next(iter(job.weights.values())).device
        self.weights = copied_at_once(job.weights)
        self.leaves = [self.weights[n].requires_grad_() for n in job.moves]
        self.first, self.second = _zeros(self.leaves), _zeros(self.leaves)
        self.counts = list(torch.zeros(len(self.leaves), device=device).unbind())
        self.lost = torch.zeros((), dtype=self.leaves[0].dtype, device=device)
        self.x: Tensor | None = None
        self.given: Tensors = {}
        self.z: Tensor | None = None
        self.place: Place | None = None  # of the forward pass that the buffers hold
        self.held: Tensors | None = None  # the weights that were given out then
        self.taken, self.graphs = 0, list[Any]()
        self.lane = lane or Lane(device)

    def fits(self, job: PublicStep) -> bool:
        """Whether what comes with a step has the shapes of the buffers."""
        if not self.given or not job.given:
            return True
        return [(n, t.shape) for n, t in self.given.items()] == [
            (n, t.shape) for n, t in job.given.items()
        ]

    def inputs(self, job: PublicStep) -> tuple[Tensor | None, Tensor | None]:
        """The images that a step reads: of the batch before, if its pass is to be done again, and
        of the next. They are made on the stream that all clients have in common.
        """
        again = job.follow is not None and not self._waits(job)
        return (
            job.images(job.follow) if again and job.follow is not None else None,
            job.images(job.answer) if job.answer is not None else None,
        )

    def _waits(self, job: PublicStep) -> bool:
        """Whether the buffers hold the forward pass whose target this step brings."""
        assert job.follow is not None
        mine = job.waiting is self and self.held is job.weights
        return mine and self.place == job.at(job.follow)

    def __call__(self, job: PublicStep, before: Tensor | None, x: Tensor | None) -> Stepped:
        """Do the step; the images are those of `inputs`."""
        followed, loss, weights = None, None, job.weights
        if before is not None or job.follow is None:
            into(self.weights, job.weights)
        if job.follow is not None:
            if before is not None:
                self._answer(before)
            followed = self._follow(job.given)
            loss, weights = self.lost.clone(), copied_at_once(self.weights)
        if x is None or job.answer is None:
            self.place, self.held = None, None
            return Stepped(weights, {}, followed, loss, None, None)
        self._answer(x)
        assert self.z is not None  # _answer() has just filled it
        self.place, self.held = job.at(job.answer), weights
        return Stepped(weights, {}, followed, loss, self.z.detach().clone(), self)

    def _answer(self, x: Tensor) -> None:
        if self.x is None:
            self.x = x.clone()
        self.x.copy_(x)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._forward()

    def _follow(self, given: Tensors) -> Tensor:
        """One step of the weights; the logits that were followed."""
        assert self.z is not None  # _answer() has filled it
        followed = self.z.detach().clone()  # now: capturing gives outputs that have no values yet
        if not self.given:
            self.given = copied(given)
        into(self.given, given)
        if self.graphs:
            self.graphs[1].replay()
            return followed
        self._backward()
        self.taken += 1
        if self.lane.cuda and self.taken >= EAGER:
            # right after a step in the same thread: libraries have handles for threads
            self.graphs = [self.lane.captured(half) for half in (self._forward, self._backward)]
            torch.cuda.empty_cache()  # what the steps before took beside the graphs' own memory
        return followed

    def _forward(self) -> None:
        assert self.x is not None
        self.z = self.job.network(self.weights, self.x)

    def _backward(self) -> None:
        assert self.z is not None
        again = lambda x: self.job.network(self.weights, x)  # noqa: E731
        loss = self.job.loss(self.z, again, self.given)
        found = gradients(loss, self.leaves)
        with torch.no_grad():
            for memory in (self.first, self.second, self.counts):
                torch._foreach_zero_(memory)
            descend(self.leaves, found, (self.first, self.second, self.counts), self.job.how)
        self.lost.copy_(loss.detach())


def stepped(steps: Sequence[CapturedStep], jobs: Sequence[PublicStep]) -> list[Stepped]:
    """Do steps side by side, each on the lane of its client."""
    inputs = [one.inputs(job) for one, job in zip(steps, jobs, strict=True)]
    for one in steps:
        one.lane.open()
    found = []
    for one, job, images in zip(steps, jobs, inputs, strict=True):
        with one.lane.here():
            found.append(one(job, *images))
    for one in steps:
        one.lane.close()
    return found
