"""Public steps captured as CUDA graphs and replayed.

Both halves of a step share the memory of the activations. Each client has a memory of its own,
since all clients answer before any of them follows. Without a GPU the same halves run eagerly, so
tests compare them with the plain step on any machine.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.compute.captured import EAGER
from atoll.compute.graphs import Lane
from atoll.core.messages import Tensors
from atoll.jobs.public_step import Place, PublicJob, PublicResult, gradients, zeros
from atoll.jobs.train import descend
from atoll.learning.weights import copied, copied_at_once, into

__all__ = ["CapturedStep", "capturable", "stepped"]


def capturable(job: PublicJob) -> bool:
    """Whether its steps can be captured: the buffers hold no moments and no penalty."""
    return job.fresh and job.penalty is None


class CapturedStep:
    """Buffers and graphs of one client's public steps; built once, replayed at every exchange."""

    def __init__(self, job: PublicJob, lane: Lane | None = None) -> None:
        """Make the buffers; no other client's public steps may be on the same lane."""
        self.job = job  # for what is the same in all steps
        device = next(iter(job.weights.values())).device
        self.weights = copied_at_once(job.weights)
        self.leaves = [self.weights[n].requires_grad_() for n in job.moves]
        self.first, self.second = zeros(self.leaves), zeros(self.leaves)
        self.counts = list(torch.zeros(len(self.leaves), device=device).unbind())
        self.lost = torch.zeros((), dtype=self.leaves[0].dtype, device=device)
        self.x: Tensor | None = None
        self.constants: Tensors = {}
        self.z: Tensor | None = None
        self.place: Place | None = None  # of the forward pass that the buffers hold
        self.last_weights: Tensors | None = None  # the weights returned with it
        self.eager_steps, self.graphs = 0, list[Any]()
        self.lane = lane or Lane(device)

    def fits(self, jobs: Sequence[PublicJob]) -> bool:
        """Whether what comes with a step has the shapes of the buffers."""
        (job,) = jobs
        if not self.constants or not job.constants:
            return True
        return [(n, t.shape) for n, t in self.constants.items()] == [
            (n, t.shape) for n, t in job.constants.items()
        ]

    def inputs(self, job: PublicJob) -> tuple[Tensor | None, Tensor | None]:
        """The images that a step reads: of the batch before, if its pass must be repeated, and
        of the next. They are computed on the common stream of all clients.
        """
        again = job.follow is not None and not self._waits(job)
        return (
            job.images(job.follow) if again and job.follow is not None else None,
            job.images(job.answer) if job.answer is not None else None,
        )

    def _waits(self, job: PublicJob) -> bool:
        """Whether the buffers hold the forward pass whose target this step brings."""
        assert job.follow is not None
        follows = job.waiting is self and self.last_weights is job.weights
        return follows and self.place == job.at(job.follow)

    def step(self, job: PublicJob, before: Tensor | None, x: Tensor | None) -> PublicResult:
        """Do the step; the images are those of `inputs`."""
        followed, loss, weights = None, None, job.weights
        if before is not None or job.follow is None:
            into(self.weights, job.weights)
        if job.follow is not None:
            if before is not None:
                self._answer(before)
            followed = self._follow(job.constants)
            loss, weights = self.lost.clone(), copied_at_once(self.weights)
        if x is None or job.answer is None:
            self.place, self.last_weights = None, None
            return PublicResult(weights, {}, followed, loss, None, None)
        self._answer(x)
        assert self.z is not None  # _answer() has just filled it
        self.place, self.last_weights = job.at(job.answer), weights
        return PublicResult(weights, {}, followed, loss, self.z.detach().clone(), self)

    def _answer(self, x: Tensor) -> None:
        if self.x is None:
            self.x = x.clone()
        self.x.copy_(x)
        if self.graphs:
            self.graphs[0].replay()
        else:
            self._forward()

    def _follow(self, constants: Tensors) -> Tensor:
        """One step of the weights; the logits that were followed."""
        assert self.z is not None  # _answer() has filled it
        followed = self.z.detach().clone()  # now: capturing gives outputs that have no values yet
        if not self.constants:
            self.constants = copied(constants)
        into(self.constants, constants)
        if self.graphs:
            self.graphs[1].replay()
            return followed
        self._backward()
        self.eager_steps += 1
        if self.lane.captures and self.eager_steps >= EAGER:
            self.graphs = [self.lane.captured(half) for half in (self._forward, self._backward)]
            torch.cuda.empty_cache()  # memory of the eager steps
        return followed

    def _forward(self) -> None:
        assert self.x is not None
        self.z = self.job.network(self.weights, self.x)

    def _backward(self) -> None:
        assert self.z is not None
        again = lambda x: self.job.network(self.weights, x)  # noqa: E731
        loss = self.job.loss(self.z, again, self.constants)
        by_leaf = gradients(loss, self.leaves)
        with torch.no_grad():
            for memory in (self.first, self.second, self.counts):
                torch._foreach_zero_(memory)
            descend(
                self.leaves, by_leaf, (self.first, self.second, self.counts), self.job.optimiser
            )
        self.lost.copy_(loss.detach())


def stepped(steps: Sequence[CapturedStep], jobs: Sequence[PublicJob]) -> list[PublicResult]:
    """Do steps side by side, each on the lane of its client."""
    inputs = [step.inputs(job) for step, job in zip(steps, jobs, strict=True)]
    for step in steps:
        step.lane.open()
    results = []
    for step, job, images in zip(steps, jobs, inputs, strict=True):
        with step.lane.on_stream():
            results.append(step.step(job, *images))
    for step in steps:
        step.lane.close()
    return results
