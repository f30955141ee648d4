"""A client's training step, captured once as a CUDA graph and replayed; clients side by side.

A network whose rows see each other in training (batch norm) cannot be filled up and stacked, so
each client has buffers of its own: weights, moments, rows, the numbers of a batch. A step reads and
writes nothing else, so it can be captured: one graph for full batches, one for the last, smaller
one. Running statistics and the counts of dropout are among the weights, so a graph moves them as
the plain loop does. Graphs that run one after another share the memory of their activations;
those that run side by side, a CUDA stream each, cannot. Without a GPU the same steps run as they
are; so the loop can be held to them anywhere.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from atoll.core.rng import permutations
from atoll.core.rows import Rows
from atoll.learning.train import Memory, Work, Worked
from atoll.learning.weights import copied

__all__ = ["Captured", "NotCapturableError", "done", "likeness"]

END = object()
EAGER = 3  # steps of one size before it is captured: libraries choose their kernels there


class NotCapturableError(Exception):
    """A piece of work whose steps cannot be told from others', and why."""


def likeness(job: Work) -> Hashable:
    """Works that are alike in this differ in values alone, so one's buffers fit the other."""
    phases = tuple((p.name, p.moves, _told(p.loss), p.optimiser) for p in job.phases)
    tensors = {**job.weights, "/x": job.rows.x, "/own": job.rows.own, "/y": job.rows.y}
    shapes = tuple((n, str(t.dtype), tuple(t.shape)) for n, t in sorted(tensors.items()))
    return phases, shapes, job.batch, str(job.rows.y.device), job.rows.share is None


def _told(loss: Callable[..., Any]) -> Hashable:
    """What tells two losses apart: the function and what is bound to it."""
    if isinstance(loss, partial):
        key = (loss.args, tuple(sorted(loss.keywords.items())))
        try:
            hash(key)
        except TypeError as error:
            raise NotCapturableError("a loss binds what has no hash") from error
        return _told(loss.func), key
    if "<" in loss.__qualname__ or getattr(loss, "__self__", None) is not None:
        raise NotCapturableError(f"{loss.__qualname__} is not a function of a module")
    return loss.__module__, loss.__qualname__


class Captured:
    """Buffers and graphs for works that are alike; made once, loaded and run each round."""

    def __init__(self, job: Work, pool: Any = None) -> None:
        """Make the buffers; graphs with the same pool must not run at the same time."""
        self.phases, self.batch, self.device = job.phases, job.batch, job.rows.y.device
        self.cuda = self.device.type == "cuda"
        self.weights = copied(job.weights)
        self.rows = Rows(job.rows.x.clone(), job.rows.own.clone(), job.rows.y.clone())
        self.moved = [[self.weights[n].requires_grad_() for n in p.moves] for p in self.phases]
        self.memory = [
            Memory(p, moved, {}) for p, moved in zip(self.phases, self.moved, strict=True)
        ]
        self.losses = torch.zeros(len(self.phases), dtype=torch.float64, device=self.device)
        sizes = {min(self.batch, len(self.rows)), len(self.rows) % self.batch} - {0}
        self.index = {n: torch.zeros(n, dtype=torch.int64, device=self.device) for n in sizes}
        self.graphs: dict[int, Any] = {}
        self.taken = dict.fromkeys(sizes, 0)  # eager steps of each size
        self.stream: Any = torch.cuda.Stream(self.device) if self.cuda else None
        self.pool = pool or (torch.cuda.graph_pool_handle() if self.cuda else None)

    def steps(self, job: Work) -> Iterator[None]:
        """Do the work, and stop after each step so that others may go on."""
        self._load(job)
        yield
        keys = [job.stream.child("epoch", epoch).key for epoch in range(job.epochs)]
        for order in permutations(torch.tensor(keys, device=self.device), len(self.rows)):
            for part in order.split(self.batch):
                self.index[len(part)].copy_(part)
                self._go(len(part))
                yield

    def result(self, job: Work) -> Worked:
        """What the work gave."""
        rows = max(1, job.epochs * len(self.rows))
        means = {p.name: x / rows for p, x in zip(self.phases, self.losses.tolist(), strict=True)}
        moments = copied(job.moments)
        for one in self.memory:
            moments |= copied(one.saved())
        return Worked({n: w.detach().clone() for n, w in self.weights.items()}, moments, means)

    @torch.no_grad()
    def _load(self, job: Work) -> None:
        """Copy the work's values into the buffers."""
        for name, weight in job.weights.items():
            self.weights[name].copy_(weight)
        for mine, given in ((self.rows.x, job.rows.x), (self.rows.own, job.rows.own)):
            mine.copy_(given)
        self.rows.y.copy_(job.rows.y)
        for phase, memory, moved in zip(self.phases, self.memory, self.moved, strict=True):
            fresh = Memory(phase, moved, job.moments)
            for kind in ("first", "second", "steps"):
                for mine, given in zip(getattr(memory, kind), getattr(fresh, kind), strict=True):
                    mine.copy_(given)
        self.losses.zero_()

    def _go(self, size: int) -> None:
        """One step, by its graph where there is one."""
        if not self.cuda or self.taken[size] < EAGER:
            self.taken[size] += 1
            self._step(size)
            return
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        self.graphs[size].replay()

    def _capture(self, size: int) -> Any:
        """The step as a graph; capturing runs nothing."""
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self._step(size)
        return graph

    def _step(self, size: int) -> None:
        batch = self.rows.at(self.index[size])
        for number, phase in enumerate(self.phases):
            loss = phase.loss(self.weights, batch).sum()
            gradients = list(torch.autograd.grad(loss, self.moved[number]))
            self.memory[number].descend(self.moved[number], gradients, phase.optimiser)
            self.losses[number] += loss.detach() * size


def done(captured: Sequence[Captured], jobs: Sequence[Work]) -> list[Worked]:
    """Do works side by side, each on its own stream, a step of each in turn."""
    for one in captured:
        if one.cuda:
            one.stream.wait_stream(torch.cuda.current_stream(one.device))
    running = {i: one.steps(job) for i, (one, job) in enumerate(zip(captured, jobs, strict=True))}
    while running:
        for i in list(running):
            stream = captured[i].stream
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if next(running[i], END) is END:
                    del running[i]
    for one in captured:
        if one.cuda:
            torch.cuda.current_stream(one.device).wait_stream(one.stream)
    return [one.result(job) for one, job in zip(captured, jobs, strict=True)]
