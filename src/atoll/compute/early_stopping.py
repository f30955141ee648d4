"""Early-stopped training of many clients as one computation, without the host.

Orders and keys of every epoch are drawn in advance. Rates and stop flags live on the device, and
the host only replays graphs. It reads the flags of the epoch before last, so a stack whose members
have all stopped ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.compute.buffers import Bundle
from atoll.compute.deferred import HostCopy
from atoll.compute.graphs import common_lane
from atoll.compute.probe import Probe
from atoll.compute.stacking import Stack
from atoll.core.rows import Rows, room
from atoll.jobs.early_stopping import (
    KEY,
    RATE,
    STOPPED,
    EarlyStoppedJob,
    EarlyStoppedResult,
    stepped,
)

__all__ = ["EarlyStoppedStack"]


class EarlyStoppedStack:
    """Jobs of one key, all epochs of a round without the host; built once for a task."""

    def __init__(
        self, jobs: Sequence[EarlyStoppedJob], graph: bool = True, fixed: bool = False
    ) -> None:
        epochs = len(jobs[0].streams)
        self.stack = Stack([job.first for job in jobs], graph, epochs=epochs, fixed=fixed)
        self.graph, self.fixed = self.stack.graph, self.stack.fixed
        self.last = [jobs[i] for i in self.stack.order]  # the last job of each member
        self.rule, self.function, self.reads = jobs[0].rule, jobs[0].function, jobs[0].reads
        (self.optimiser,) = self.stack.optimisers
        self.optimiser.free = True
        device = self.stack.data.y.device
        self.course = torch.zeros((len(jobs), 4), dtype=torch.float64, device=device)
        self.keys = torch.zeros((len(jobs[0].keys) + 1, len(jobs)), dtype=torch.int64)
        self.keys = self.keys.to(device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.all_stopped = torch.zeros((), dtype=torch.bool, device=device)
        self.valid, self.real = self._validation()
        sizes = torch.tensor([len(job.valid) for job in self.last], dtype=torch.float64)
        rows = torch.tensor([len(job.work.rows) for job in self.last], dtype=torch.float64)
        self.sizes, self.rows = sizes.to(device), rows.to(device)
        self.judgement: torch.cuda.CUDAGraph | None = None

    def _validation(self) -> tuple[Rows, Tensor]:
        """The rows by which members are judged, and the mask of those that are not padding."""
        rows = [job.valid if len(job.valid) else job.work.rows.at(slice(0, 1)) for job in self.last]
        data, longest = Bundle.of(rows), max(map(len, rows))
        device = data.y.device
        place = torch.arange(longest, device=device).expand(len(rows), -1)
        real = place < torch.tensor([len(job.valid) for job in self.last], device=device)[:, None]
        first = torch.tensor(data.first, device=device)[:, None]
        batch = data.at(torch.where(real, place, 0) + first, real)
        if data.sequences and self.fixed:
            batch = replace(batch, bounds=room(batch.x))
        return batch, real

    def fits(self, jobs: Sequence[EarlyStoppedJob]) -> bool:
        """Whether these are members of this stack, and most of it."""
        return 2 * len(jobs) > len(self.last) and self._seats(jobs) is not None

    def _seats(self, jobs: Sequence[EarlyStoppedJob]) -> list[int] | None:
        """The place of each of these among the members: by their rows."""
        free, seats = list(range(len(self.last))), []
        for job in jobs:
            seat = next((i for i in free if _same(self.last[i], job)), None)
            if seat is None:
                return None
            free.remove(seat)
            seats.append(seat)
        return seats

    def run(
        self, jobs: Sequence[EarlyStoppedJob], probe: Probe | None = None
    ) -> list[EarlyStoppedResult]:
        """Train for a round; members without a job stay as they are."""
        seats = self._seats(jobs)
        assert seats is not None  # the caller has asked
        members = [replace(job, course=_ended(job.course)) for job in self.last]
        for seat, job in zip(seats, jobs, strict=True):
            members[seat] = job
        self.last = members
        self._begin(members)
        waiting: list[Callable[[], bool]] = []
        for epoch in range(len(jobs[0].streams)):
            first = probe if epoch == 0 else None
            self.stack.go(first, seats[first.member] if first else 0)
            self._judge()
            waiting.append(self._read_stopped())
            if len(waiting) > 1 and waiting[-2]():
                break
        return self._ended(members, seats)

    def _begin(self, members: Sequence[EarlyStoppedJob]) -> None:
        """Load weights, moments and courses, and draw the orders of all epochs."""
        works = [job.first for job in members]
        self.stack.take([work.rows for work in works])
        self.stack.load(works)
        streams = [[stream.child("epoch", 0) for stream in job.streams] for job in members]
        self.stack.schedule(streams, together=True)
        self.course.copy_(torch.stack([job.course for job in members]))
        keys = torch.tensor([(*job.keys, 0) for job in members])
        self.keys.copy_(keys.T)
        self.epoch.zero_()
        self._set()

    def _set(self) -> None:
        """The rate and the key of the next epoch."""
        rate, stopped = self.course[:, RATE], self.course[:, STOPPED] > 0
        self.optimiser.rate.copy_(torch.where(stopped, -1, rate))
        self.stack.weights[KEY].copy_(self.keys.index_select(0, self.epoch.view(1))[0])
        self.all_stopped.copy_(stopped.all())

    @torch.no_grad()
    def _loss(self) -> Tensor:
        """The loss by which each member is judged."""
        read = {name: self.stack.weights[name] for name in self.reads}
        losses = self.function(read, self.valid)
        total = torch.where(self.real, losses, 0).sum(-1).double()
        seen = total / self.sizes.clamp(min=1)
        return torch.where(self.sizes > 0, seen, self.stack.losses[0] / self.rows)

    @torch.no_grad()
    def _decide(self) -> None:
        """Step the courses; all of it on the device."""
        course = stepped(self.course, self._loss(), self.rule)
        if self.rule.fresh:
            unchanged = (course[:, RATE] == self.course[:, RATE]).double()
            self.optimiser.steps.mul_(unchanged)
            for buffer in self.optimiser.buffers.values():
                shape = (-1, *[1] * (buffer.whole.dim() - 1))
                buffer.whole.mul_(unchanged.to(buffer.whole.dtype).view(shape))
        self.course.copy_(course)
        self.epoch += 1
        self.stack.losses.zero_()
        self._set()

    def _judge(self) -> None:
        """The end of an epoch: the first is done as it is, later ones are replayed."""
        if not self.graph:
            self._decide()
        elif self.judgement is None:
            self._decide()
            self._loss()  # makes this thread's cuBLAS ready
            self.judgement = common_lane().captured(self._decide)
        else:
            self.judgement.replay()

    def _read_stopped(self) -> Callable[[], bool]:
        """Ask whether all have stopped; the returned function waits for the end of this epoch."""
        answer = HostCopy(self.all_stopped)
        return lambda: bool(answer.numbers)

    def _ended(
        self, members: Sequence[EarlyStoppedJob], seats: Sequence[int]
    ) -> list[EarlyStoppedResult]:
        """The present values of the members; those without a job in the next round keep them."""
        courses = self.course.cpu()
        trained = self.stack.unload([job.first for job in members])
        for place, (job, result) in enumerate(zip(members, trained, strict=True)):
            work = replace(job.work, weights=result.weights, moments=result.moments)
            self.last[place] = replace(job, work=work)
        results = []
        for seat in seats:
            result, course = trained[seat], courses[seat].clone()
            forgot = self.rule.fresh and not result.moments[f"steps/{self.optimiser.phase.name}"]
            results.append(
                EarlyStoppedResult(result.weights, {} if forgot else result.moments, course)
            )
        return results


def _same(first: EarlyStoppedJob, second: EarlyStoppedJob) -> bool:
    """Whether both are of the same rows."""
    return first.work.rows is second.work.rows and first.valid is second.valid


def _ended(course: Tensor) -> Tensor:
    ended = course.clone()
    ended[STOPPED] = 1
    return ended
