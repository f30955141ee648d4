"""Training of many clients in one computation: one more axis in front of every weight and row.

Members of a stack have jobs of one key: the same losses, the same shapes (own columns may be fewer:
they are padded with zeros, which move nothing), the same batch size. Members are sorted by their
number of steps, so the active ones are always the first; a batch that is not full is padded and
masked. On a GPU the step is captured once as a CUDA graph and replayed; the stack keeps its
buffers, so later rounds use the same graph. A graph has fixed shapes, so for sequences the stack
computes how much room any batch of a round needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from atoll.compute.buffers import Buffer, Bundle, by_member, load, place_of
from atoll.compute.deferred import Deferred, HostCopy
from atoll.compute.graphs import available, common_lane
from atoll.compute.probe import Probe
from atoll.compute.stacked_optimiser import StackedOptimiser
from atoll.compute.vmapped import each, size
from atoll.core.messages import Tensors
from atoll.core.rng import Stream, permutations
from atoll.core.rows import Bounds, Rows, distinct, pieces
from atoll.jobs.train import Phase, TrainJob, TrainResult
from atoll.learning.weights import sent

__all__ = ["Stack"]

EAGER = 2  # steps before a CUDA graph is captured


@dataclass(frozen=True)
class _Lot:
    """Members with as many rows."""

    rows: int  # of each member
    steps: int  # of an epoch
    members: list[int]
    where: slice | Tensor  # the same, as an index


class Stack:
    """Jobs of one key, run together; built once, loaded and run each round.

    With `mapped`, losses see one member at a time and torch.func makes one computation of them.
    """

    def __init__(
        self,
        jobs: Sequence[TrainJob],
        graph: bool = True,
        mapped: bool = False,
        epochs: int = 0,  # that all members begin together, where there are any
        fixed: bool = False,  # shapes are fixed without a graph too
    ) -> None:
        self.sizes = [_size(job) for job in jobs]
        self.order = _order(jobs)
        jobs = [jobs[i] for i in self.order]
        self.steps = [job.steps for job in jobs]
        self.rows = [len(job.rows) for job in jobs]
        self.members_rows = [job.rows for job in jobs]  # keeps their memory allocated
        self.places = [place_of(rows) for rows in self.members_rows]
        self.data = Bundle.of(self.members_rows)
        self.phases, self.batch = jobs[0].phases, jobs[0].batch
        self.buffers = {n: Buffer([j.weights[n] for j in jobs]) for n in jobs[0].weights}
        self.weights: Tensors = {name: buffer.whole for name, buffer in self.buffers.items()}
        self.outputs: list[Tensors] = []  # the members' weights as last returned
        device = self.data.y.device
        self.mapped, self.steps_taken = mapped, 0
        uneven = mapped and any(count % self.batch for count in self.rows)
        self.graph = graph and available(device) and not uneven
        places = range(len(self.phases))
        self.optimisers = [StackedOptimiser(n, self.buffers, jobs) for n in places]
        self.bounds: dict[int, Bounds] = {}  # of sequences, by the number of active members
        self.counts = pieces(self.data.x) if self.data.sequences else self.data.y
        self.fixed = self.graph or fixed
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}
        self.eager: dict[int, int] = {}  # steps of so many members that were taken without a graph
        self._allocate_schedule(max(1, epochs))

    def _allocate_schedule(self, epochs: int) -> None:
        """Which rows each member takes at each step, the sums of losses, and the step itself."""
        device, members = self.data.y.device, len(self.rows)
        shape = (max(self.steps, default=0) * epochs, members, self.batch)
        dtype = torch.float32 if self.data.sequences else self.data.x.dtype
        self.index = torch.zeros(shape, dtype=torch.int64, device=device)
        self.share = torch.zeros(shape, dtype=dtype, device=device)
        self.now = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros((len(self.phases), members), dtype=torch.float64, device=device)
        self.lots = self._lots()
        self.shared: dict[int, tuple[int, int]] = {}  # by rows: how shares of a batch are laid out

    def fits(self, jobs: Sequence[TrainJob]) -> bool:
        """Whether these have as many rows as its members; weights and rates may differ."""
        return [_size(job) for job in jobs] == self.sizes

    def run(self, jobs: Sequence[TrainJob], probe: Probe | None = None) -> list[TrainResult]:
        """Run the jobs of a round; a probe copies what its member has after the first steps."""
        jobs = [jobs[i] for i in self.order]
        self.take([job.rows for job in jobs])
        self.load(jobs)
        self.schedule([[job.stream.child("epoch", e) for e in range(job.epochs)] for job in jobs])
        self.go(probe, self.order.index(probe.member) if probe else 0)
        results = dict(zip(self.order, self.unload(jobs), strict=True))
        return [results[place] for place in range(len(jobs))]

    def go(self, probe: Probe | None = None, place: int = 0) -> None:
        """All steps of an epoch or a round; a probe reads the member at this place."""
        shown = min(probe.steps, self.steps[place]) if probe else 0
        completed = 0
        for active, count in self.blocks():
            first = shown - completed if completed < shown <= completed + count else 0
            if first and probe:
                self.advance(active, first)
                self._show(probe, place)
            self.advance(active, count - first)
            completed += count

    def _show(self, probe: Probe, place: int) -> None:
        """Pass the present values of a member to a probe."""
        moved = {name: self.buffers[name] for phase in self.phases for name in phase.moves}
        weights = {name: buffer.places[place] for name, buffer in moved.items()}
        names = [phase.name for phase in self.phases]
        probe.take(weights, dict(zip(names, self.losses[:, place].unbind(), strict=True)))

    def take(self, rows: list[Rows]) -> None:
        """Load other rows into the same buffers."""
        places = [place_of(part) for part in rows]
        if places == self.places:
            return
        fresh = Bundle.of(rows, into=self.data)
        if fresh is not self.data:
            self.data = fresh
            self.captured.clear()
        if self.data.sequences:
            self.counts = pieces(self.data.x)
        self.members_rows, self.places = rows, places

    def load(self, jobs: Sequence[TrainJob]) -> None:
        """Copy weights and moments into the stack's own buffers."""
        load(self.buffers, [job.weights for job in jobs], self.outputs)
        if any([optimiser.load(jobs) for optimiser in self.optimisers]):  # noqa: C419 - load all
            self.captured.clear()

    def _lots(self) -> list[_Lot]:
        """Members with as many rows."""
        device, lots = self.index.device, []
        for rows in sorted(set(self.rows)):
            members = [i for i, count in enumerate(self.rows) if count == rows]
            every = len(members) == len(self.rows)
            where = slice(None) if every else torch.tensor(members, device=device)
            lots.append(_Lot(rows, -(-rows // self.batch), members, where))
        return lots

    def schedule(self, streams: Sequence[Sequence[Stream]], together: bool = False) -> None:
        """Which rows each member takes at each step of its epochs, drawn on the device.

        Where members begin every epoch `together`, those with fewer steps wait for the others.
        """
        device, longest = self.index.device, max(self.steps, default=0)
        for lot in self.lots:
            epochs, full = len(streams[lot.members[0]]), lot.steps * self.batch
            keys = [stream.key for i in lot.members for stream in streams[i]]
            first = [self.data.first[i] for i in lot.members for _ in range(epochs)]
            table = sent([keys, first], device)
            order = torch.nn.functional.pad(permutations(table[0], lot.rows), (0, full - lot.rows))
            order = (order + table[1, :, None]).view(-1, epochs, lot.steps, self.batch)
            stride = longest if together else lot.steps
            index, share = (
                whole[: epochs * stride].view(epochs, stride, len(self.rows), self.batch)
                for whole in (self.index, self.share)
            )
            index[:, : lot.steps, lot.where] = order.permute(1, 2, 0, 3)
            if self.shared.get(lot.rows) != (epochs, stride):  # else unchanged
                self.shared[lot.rows] = (epochs, stride)
                real = torch.arange(full, device=device).view(lot.steps, -1) < lot.rows
                share[:, : lot.steps, lot.where] = real.to(share.dtype)[:, None]
        self.now.zero_()
        self.losses.zero_()
        self.steps_taken = 0
        if self.fixed and self.data.sequences:
            self._make_room(len(streams[0]) if together else 1)

    def _make_room(self, epochs: int) -> None:
        """How much room the sequences of a step need; steps that had less are captured anew."""
        index = self.index.view(epochs, -1, len(self.rows), self.batch)
        vocabulary = int(self.data.x.amax()) + 1
        lengths = self.counts[index].sum(-1).cumsum(-1)
        tokens = torch.stack([distinct(self.data.x[rows], vocabulary).sum(-1) for rows in index])
        begin, sizes = 0, []
        for active, count in self.blocks():
            steps = slice(begin, begin + count)
            sizes += [lengths[:, steps, active - 1].amax(), tokens[:, steps, :active].amax()]
            begin += count
        most = torch.stack(sizes).tolist() if sizes else []
        for number, (active, _) in enumerate(self.blocks()):
            needed, had = most[2 * number : 2 * number + 2], self.bounds.get(active, Bounds(0, 0))
            if needed[0] > had.pieces or needed[1] > had.tokens:
                self.bounds[active] = Bounds(*(-(-17 * n // 16) for n in needed))  # and for later
                self.captured.pop(active, None)

    def blocks(self) -> list[tuple[int, int]]:
        """(active members, steps that they share), in order."""
        blocks, covered = [], 0
        for count in sorted(set(self.steps)):
            active = sum(steps >= count for steps in self.steps)
            if count > covered:
                blocks.append((active, count - covered))
            covered = count
        return blocks

    def advance(self, active: int, count: int) -> None:
        """Take this many steps of the first members."""
        if active not in self.captured:
            step = self._step_of(active)
            while count and (not self.graph or self.eager.get(active, 0) < EAGER):
                step(True)
                self.eager[active] = self.eager.get(active, 0) + 1
                count -= 1
            if not count:
                return
            self._capture(active, step)
        for _ in range(count):
            self.captured[active].replay()

    def _capture(self, active: int, step: Callable[[bool], None]) -> None:
        """Record a step; just before, one that moves nothing makes this thread's cuBLAS ready."""
        step(False)
        self.captured[active] = common_lane().captured(partial(step, True))

    def _step_of(self, active: int) -> Callable[[bool], None]:
        """One step of the first members, all of it on the device; or the same without moving."""
        weights = {name: tensor[:active] for name, tensor in self.weights.items()}
        moved = [[weights[name].detach().requires_grad_() for name in p.moves] for p in self.phases]
        for phase, leaves in zip(self.phases, moved, strict=True):
            weights |= dict(zip(phase.moves, leaves, strict=True))

        def step(moving: bool) -> None:
            index = self.index.index_select(0, self.now.view(1))[0, :active]
            share = self.share.index_select(0, self.now.view(1))[0, :active]
            batch = self.data.at(index, share, self.bounds.get(active))
            count = share.sum(-1)
            for number, phase in enumerate(self.phases):
                loss = self._loss(phase, weights, batch, active)
                gradients = list(torch.autograd.grad(loss.sum(), moved[number]))
                if not moving:
                    continue
                with torch.no_grad():
                    self.optimisers[number].descend(active, moved[number], gradients)
                    self.losses[number, :active].addcmul_(loss.detach(), count)
            self.now += moving
            self.steps_taken += moving

        return step

    def _loss(self, phase: Phase, weights: Tensors, batch: Rows, active: int) -> Tensor:
        """The loss of each of the first members."""
        if not self.mapped:
            return phase.loss(weights, batch).view(active, -1).sum(-1)
        sizes = [size(count, self.batch, self.steps_taken) for count in self.rows[:active]]
        return each(phase.loss, weights, batch, sizes, weighted=self.data.share is not None)

    def unload(self, jobs: Sequence[TrainJob]) -> list[TrainResult]:
        """The present values of each member; `jobs` in the order of members."""
        moved = dict.fromkeys(name for phase in self.phases for name in phase.moves)
        own = by_member({name: self.buffers[name].copies() for name in moved}, len(jobs))
        self.outputs = [{**job.weights, **weights} for job, weights in zip(jobs, own, strict=True)]
        memory = [{**job.moments} for job in jobs]
        for optimiser in self.optimisers:
            for moments, fresh in zip(memory, optimiser.unload(jobs), strict=True):
                moments.update(fresh)
        losses = self._mean_losses(jobs)
        return [TrainResult(*member) for member in zip(self.outputs, memory, losses, strict=True)]

    def _mean_losses(self, jobs: Sequence[TrainJob]) -> list[dict[str, float]]:
        """The mean loss of each phase, of each member; deferred, so the host goes on at once."""
        sums, means = HostCopy(self.losses), []
        for place, job in enumerate(jobs):
            rows = max(1, job.epochs * self.rows[place])
            losses = {
                phase.name: cast(float, Deferred(partial(_mean_loss, sums, number, place, rows)))
                for number, phase in enumerate(self.phases)
            }
            means.append(losses)
        return means


def _mean_loss(sums: HostCopy, phase: int, place: int, rows: int) -> float:
    return float(sums.numbers[phase][place] / rows)


def _size(job: TrainJob) -> tuple[int, int, int]:
    return len(job.rows), job.rows.own.shape[-1], job.epochs


def _order(jobs: Sequence[TrainJob]) -> list[int]:
    """Members with most steps first, and those of one rate side by side."""
    rates = [tuple(p.optimiser.rate for p in job.phases) for job in jobs]
    return sorted(range(len(jobs)), key=lambda i: (-jobs[i].steps, rates[i]))
