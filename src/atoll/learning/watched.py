"""Training that is watched: after each epoch the loss on other rows decides on the rate.

One by one or in a stack, a client's epochs are works and counts like any others (`parts`). On a
GPU all epochs of a round are one computation (`Watch`): orders and keys of every epoch are drawn
before, rates and who has stopped live on the device, and the host only replays graphs. It looks at
what came out of the epoch before last, so that a stack whose members have all stopped ends.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.late import Arriving
from atoll.core.messages import Tensors
from atoll.core.rng import Stream
from atoll.core.rows import Bounds, Rows
from atoll.learning.probe import Probe
from atoll.learning.stacked import Bundle, Stack, form, recorded
from atoll.learning.textcnn import different, pieces
from atoll.learning.train import Tally, Work

__all__ = [
    "BEST",
    "KEY",
    "PATIENCE",
    "RATE",
    "STOPPED",
    "Outcome",
    "Rule",
    "Watch",
    "Watched",
    "stepped",
]

RATE, BEST, PATIENCE, STOPPED = range(4)  # places in a course
KEY = "noise"  # the weight that is another one in each epoch


@dataclass(frozen=True)
class Rule:
    """When the rate is cut, and when training ends."""

    patience: int  # epochs without gain before the rate is cut
    cut: float  # what the rate is divided by then
    least: float  # with a smaller rate training ends
    fresh: bool = False  # whether the optimiser forgets at a cut


def stepped(course: Tensor, loss: Tensor | float, rule: Rule) -> Tensor:
    """Rate, best loss, patience, stopped after an epoch with this loss: (..., 4)."""
    rate, best, patience, stopped = course.unbind(-1)
    gain = best > loss
    patience = torch.where(gain, rule.patience, patience - 1)
    cut = patience <= 0
    lower = torch.where(cut, rate / rule.cut, rate)
    ended = torch.where(cut, (lower < rule.least).to(rate), stopped)
    patience = torch.where(cut, rule.patience, patience)
    best = torch.where(gain, loss, best)
    found = torch.stack([lower, best, patience, ended], -1)
    return torch.where(stopped[..., None] > 0, course, found)


@dataclass(frozen=True)
class Outcome:
    """What watched training gives."""

    weights: Tensors
    moments: Tensors
    course: Tensor  # (4,) on the CPU


@dataclass(frozen=True)
class Watched:
    """A client's epochs of a round, until its course says that it stops. Changes nothing."""

    work: Work  # one epoch; its rate and its stream are not used
    streams: tuple[Stream, ...]  # of the order of rows, one for each epoch
    keys: tuple[int, ...]  # of an epoch's noise
    valid: Rows  # without any, the training loss decides
    function: Callable[[Mapping[str, Tensor], Rows], Tensor]  # -> the loss of each of these rows
    reads: tuple[str, ...]  # the weights that it reads
    course: Tensor  # (4,) in double precision, on the CPU
    rule: Rule

    def __call__(self) -> Outcome:
        """Do it."""
        parts = self.parts(alone=True)
        try:
            job = next(parts)
            while True:
                job = parts.send(job())
        except StopIteration as end:
            found: Outcome = end.value
            return found

    def parts(self, alone: bool = False) -> Generator[Work | Tally, Any, Outcome]:
        """Its works and counts, one after the other; alone, each goes on in the same memory."""
        weights, moments, course = self.work.weights, self.work.moments, self.course
        first = weights
        for stream, key in zip(self.streams, self.keys, strict=True):
            if course[STOPPED]:
                break
            noise = torch.tensor(key, device=self.work.rows.y.device)
            one = replace(
                self.epoch(float(course[RATE]), stream), ours=alone and weights is not first
            )
            done = yield replace(one, weights={**weights, KEY: noise}, moments=moments)
            weights, moments = done.weights, done.moments
            loss = done.losses[one.phases[0].name]
            if len(self.valid):
                read = {name: weights[name] for name in self.reads}
                loss = float((yield Tally(read, self.valid, self.function))) / len(self.valid)
            before, course = course, stepped(course, loss, self.rule)
            if self.rule.fresh and course[RATE] != before[RATE]:
                moments = {}
        return Outcome(weights, moments, course)

    def epoch(self, rate: float, stream: Stream) -> Work:
        """The work of an epoch."""
        (phase,) = self.work.phases
        phases = (replace(phase, optimiser=replace(phase.optimiser, rate=rate)),)
        return replace(self.work, phases=phases, stream=stream)

    @property
    def first(self) -> Work:
        """The work of the first epoch, as it would be done alone."""
        key = torch.tensor(self.keys[0], device=self.work.rows.y.device)
        one = self.epoch(float(self.course[RATE]), self.streams[0])
        return replace(one, weights={**self.work.weights, KEY: key})

    def form(self) -> Hashable:
        """Those of equal form can be one stack."""
        told = form(Tally({n: self.work.weights[n] for n in self.reads}, self.valid, self.function))
        own = self.valid.own.shape[1]
        return ("watched", form(self.first), told, own, self.rule, len(self.streams))


class Watch:
    """Watched works of one form, all epochs of a round without the host; made once for a task."""

    def __init__(self, jobs: Sequence[Watched], graph: bool = True, fixed: bool = False) -> None:
        epochs = len(jobs[0].streams)
        self.stack = Stack([job.first for job in jobs], graph, epochs=epochs, fixed=fixed)
        self.graph, self.fixed = self.stack.graph, self.stack.fixed
        self.last = [jobs[i] for i in self.stack.order]  # each member as it came last
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
        """The rows by which members are judged, and which of them are no filling."""
        rows = [job.valid if len(job.valid) else job.work.rows.at(slice(0, 1)) for job in self.last]
        data, longest = Bundle.of(rows), max(map(len, rows))
        device = data.y.device
        place = torch.arange(longest, device=device).expand(len(rows), -1)
        real = place < torch.tensor([len(job.valid) for job in self.last], device=device)[:, None]
        first = torch.tensor(data.first, device=device)[:, None]
        batch = data.at(torch.where(real, place, 0) + first, real)
        if data.texts and self.fixed:
            words = different(batch.x, int(batch.x.amax()) + 1).sum(-1)
            bounds = Bounds(int(pieces(batch.x).sum()), int(words.amax()))
            batch = replace(batch, bounds=bounds)
        return batch, real

    def fits(self, jobs: Sequence[Watched]) -> bool:
        """Whether these are members of this stack, and most of it."""
        return 2 * len(jobs) > len(self.last) and self._seats(jobs) is not None

    def _seats(self, jobs: Sequence[Watched]) -> list[int] | None:
        """The place of each of these among the members: by their rows."""
        free, found = list(range(len(self.last))), []
        for job in jobs:
            seat = next((i for i in free if _same(self.last[i], job)), None)
            if seat is None:
                return None
            free.remove(seat)
            found.append(seat)
        return found

    def __call__(self, jobs: Sequence[Watched], probe: Probe | None = None) -> list[Outcome]:
        """Train through a round; members that did not come stay as they are."""
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
            waiting.append(self._asked())
            if len(waiting) > 1 and waiting[-2]():
                break
        return self._ended(members, seats)

    def _begin(self, members: Sequence[Watched]) -> None:
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
        said = self.function(read, self.valid)
        total = torch.where(self.real, said, 0).sum(-1).double()
        seen = total / self.sizes.clamp(min=1)
        return torch.where(self.sizes > 0, seen, self.stack.losses[0] / self.rows)

    @torch.no_grad()
    def _decide(self) -> None:
        """Step the courses; all of it on the device."""
        found = stepped(self.course, self._loss(), self.rule)
        if self.rule.fresh:
            kept = (found[:, RATE] == self.course[:, RATE]).double()
            self.optimiser.taken.mul_(kept)
            for buffer in self.optimiser.buffers.values():
                shape = (-1, *[1] * (buffer.whole.dim() - 1))
                buffer.whole.mul_(kept.to(buffer.whole.dtype).view(shape))
        self.course.copy_(found)
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
            self.judgement = recorded(self._decide)
        else:
            self.judgement.replay()

    def _asked(self) -> Callable[[], bool]:
        """Ask whether all have stopped by now; called, the answer waits for this epoch's end."""
        answer = Arriving(self.all_stopped)
        return lambda: bool(answer.numbers)

    def _ended(self, members: Sequence[Watched], seats: Sequence[int]) -> list[Outcome]:
        """What members have now; those that do not come next time stay at it."""
        courses = self.course.cpu()
        done = self.stack.unload([job.first for job in members])
        for place, (job, one) in enumerate(zip(members, done, strict=True)):
            work = replace(job.work, weights=one.weights, moments=one.moments)
            self.last[place] = replace(job, work=work)
        found = []
        for seat in seats:
            one, course = done[seat], courses[seat].clone()
            forgot = self.rule.fresh and not one.moments[f"steps/{self.optimiser.phase.name}"]
            found.append(Outcome(one.weights, {} if forgot else one.moments, course))
        return found


def _same(one: Watched, other: Watched) -> bool:
    """Whether both are of the same rows."""
    return one.work.rows is other.work.rows and one.valid is other.valid


def _ended(course: Tensor) -> Tensor:
    found = course.clone()
    found[STOPPED] = 1
    return found
