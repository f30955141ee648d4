"""A client's training step, captured once as a CUDA graph and replayed; replicas in one step.

A network with batch norm cannot be padded and stacked, so each client has buffers of its own:
weights, moments, rows, the indices of a batch. A step reads and writes nothing else, so it can be
captured: one graph for full batches, one for the last, smaller one. Running statistics and the
counters of dropout are among the weights, so a graph updates them as the plain loop does. Without
a GPU the same steps run eagerly, so any machine can compare them with the loop.

Jobs that differ in values alone, such as those of one client under several seeds, can be replicas
in one step: weights and rows have one more axis and batches have the same size. Nothing is padded,
and every replica has batch and running statistics of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.compute.graphs import Lane
from atoll.compute.probe import Probe
from atoll.core.rng import permutations
from atoll.core.rows import Rows
from atoll.jobs.train import Memory, TrainJob, TrainResult
from atoll.learning.weights import copied, copied_at_once, into

__all__ = [
    "EAGER",
    "Captured",
    "replicas",
    "run_captured",
]

END = object()
EAGER = 3  # steps of one size before it is captured: libraries choose their kernels there


class Captured:
    """Buffers and graphs for jobs that differ in values alone; built once, run each round.

    One job, or several replicas that take each step together.
    """

    def __init__(self, jobs: Sequence[TrainJob], lane: Lane | None = None) -> None:
        """Make the buffers; without a lane it gets one of its own."""
        job, self.replicas = jobs[0], len(jobs)
        self.phases, self.device = job.phases, job.rows.y.device
        self.count, self.batch_sizes = len(job.rows), job.batch_sizes
        joined = {n: self._joined([j.weights[n] for j in jobs]) for n in job.weights}
        self.weights = copied_at_once(joined)
        self.rows = self._end_to_end(jobs)
        self.moved = [[self.weights[n].requires_grad_() for n in p.moves] for p in self.phases]
        self.memory = [Memory(p, m, {}) for p, m in zip(self.phases, self.moved, strict=True)]
        shape = (len(self.phases), self.replicas)
        self.losses = torch.zeros(shape, dtype=torch.float64, device=self.device)
        sizes = sorted(set(self.batch_sizes))
        self.index = {
            n: torch.zeros((self.replicas, n), dtype=torch.int64, device=self.device) for n in sizes
        }
        self.graphs: dict[int, Any] = {}
        self.eager_steps = dict.fromkeys(sizes, 0)  # by size
        self.lane = lane or Lane(self.device)

    def fits(self, jobs: Sequence[TrainJob]) -> bool:
        """Whether the jobs have as many replicas, on as many rows, as the buffers."""
        return len(jobs) == self.replicas and len(jobs[0].rows) == self.count

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor as it is, those of replicas with an axis in front."""
        several = [tensor.detach() for tensor in tensors]
        return torch.stack(several) if self.replicas > 1 else several[0]

    @staticmethod
    def _end_to_end(jobs: Sequence[TrainJob]) -> Rows:
        parts = [_tensors(job.rows) for job in jobs]
        return Rows(*(torch.cat(same) for same in zip(*parts, strict=True)))

    def steps(self, jobs: Sequence[TrainJob], probe: Probe | None = None) -> Iterator[None]:
        """Run the jobs, and pause after each step so that others can continue."""
        self._load(jobs)
        yield
        epochs = range(jobs[0].epochs)
        keys = [job.stream.child("epoch", epoch).key for epoch in epochs for job in jobs]
        orders = permutations(torch.tensor(keys, device=self.device), self.count)
        first = torch.arange(self.replicas, device=self.device)[:, None] * self.count
        shown = min(probe.steps, jobs[0].steps) if probe else 0
        for order in orders.view(-1, self.replicas, self.count):
            for part in (order + first).split(self.batch_sizes, 1):
                self.index[part.shape[1]].copy_(part)
                self._go(part.shape[1])
                shown -= 1
                if probe and not shown:
                    self._show(probe)
                yield

    def _show(self, probe: Probe) -> None:
        """Pass the present values of a replica to a probe."""
        several, names = self.replicas > 1, [phase.name for phase in self.phases]
        moved = {name: self.weights[name] for phase in self.phases for name in phase.moves}
        weights = {n: w[probe.member] if several else w for n, w in moved.items()}
        losses = self.losses[:, probe.member].unbind()
        probe.take(weights, dict(zip(names, losses, strict=True)))

    def results(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        """The results of the jobs."""
        rows = max(1, jobs[0].epochs * self.count)
        names, losses = [p.name for p in self.phases], (self.losses / rows).T.tolist()
        memory = {n: t for m in self.memory for n, t in copied_at_once(m.saved()).items()}
        weights = copied_at_once(self.weights)
        several = self.replicas > 1
        results = []
        for place, job in enumerate(jobs):
            own = {n: w[place] if several else w for n, w in weights.items()}
            moments = {n: t[place] if several and t.dim() else t for n, t in memory.items()}
            means = dict(zip(names, losses[place], strict=True))
            results.append(TrainResult(own, {**copied(job.moments), **moments}, means))
        return results

    @torch.no_grad()
    def _load(self, jobs: Sequence[TrainJob]) -> None:
        """Copy the jobs' values into the buffers."""
        into(self.weights, {n: self._joined([j.weights[n] for j in jobs]) for n in self.weights})
        rows = self._end_to_end(jobs)
        for buffer, source in zip(_tensors(self.rows), _tensors(rows), strict=True):
            buffer.copy_(source)
        moments = {n: self._joined([j.moments[n] for j in jobs]) for n in jobs[0].moments}
        for memory in self.memory:
            memory.load(moments)
        self.losses.zero_()

    def _go(self, size: int) -> None:
        """One step, by its graph where there is one."""
        if size in self.graphs:
            self.graphs[size].replay()
            return
        self._step(size)
        self.eager_steps[size] += 1
        if self.lane.captures and self.eager_steps[size] >= EAGER:
            self.graphs[size] = self.lane.captured(partial(self._step, size))
            torch.cuda.empty_cache()  # what the steps before took beside the graphs' own memory

    def _step(self, size: int) -> None:
        batch = self.rows.at(self.index[size].flatten())
        for number, phase in enumerate(self.phases):
            losses = self._losses(phase.loss, batch, size)
            gradients = list(torch.autograd.grad(losses.sum(), self.moved[number]))
            self.memory[number].descend(self.moved[number], gradients, phase.optimiser)
            self.losses[number] += losses.detach() * size

    def _losses(self, loss: Callable[..., Tensor], batch: Rows, size: int) -> Tensor:
        """The loss of each replica on its own batch, by its own weights."""
        if self.replicas == 1:
            return loss(self.weights, batch).sum()[None]
        parts = [t.view(self.replicas, size, *t.shape[1:]) for t in _tensors(batch)]

        def member_loss(weights: dict[str, Tensor], *rows: Tensor) -> Tensor:
            return loss(weights, Rows(*rows)).sum()

        losses: Tensor = torch.vmap(member_loss)(self.weights, *parts)
        return losses


def _tensors(rows: Rows) -> list[Tensor]:
    """The tensors of rows; weights are the last where rows have some."""
    tensors = [rows.x, rows.own, rows.y]
    return tensors if rows.share is None else [*tensors, rows.share]


def replicas(jobs: Sequence[TrainJob]) -> bool:
    """Whether such jobs can take each step together: as many steps, from equal counts."""
    first = jobs[0]
    counts = [{n: int(t) for n, t in j.moments.items() if n.startswith("steps/")} for j in jobs]
    alike = [j.epochs == first.epochs and j.moments.keys() == first.moments.keys() for j in jobs]
    return len(first.rows) > 0 and all(alike) and all(c == counts[0] for c in counts)


def run_captured(
    captured: Sequence[Captured],
    jobs: Sequence[Sequence[TrainJob]],
    streams: bool = True,
    probes: Sequence[Probe | None] = (),
) -> list[list[TrainResult]]:
    """Run jobs (each with its replicas): side by side, a step in turn, or one after another.

    Side by side, each has its own lane. The host waits only once all are enqueued.
    """
    pairs = list(zip(captured, jobs, strict=True))
    looks = list(probes) or [None] * len(pairs)
    places = range(len(pairs))
    for several in [places] if streams else [[place] for place in places]:
        _sent([pairs[i] for i in several], [looks[i] for i in several])
    return [capture.results(works) for capture, works in pairs]


def _sent(
    pairs: Sequence[tuple[Captured, Sequence[TrainJob]]], probes: Sequence[Probe | None]
) -> None:
    for capture, _ in pairs:
        capture.lane.open()
    running = {
        i: capture.steps(works, probe)
        for i, ((capture, works), probe) in enumerate(zip(pairs, probes, strict=True))
    }
    while running:
        for i in list(running):
            with pairs[i][0].lane.on_stream():
                if next(running[i], END) is END:
                    del running[i]
    for capture, _ in pairs:
        capture.lane.close()
