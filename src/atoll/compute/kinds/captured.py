"""Steps in captured buffers: local training of a client or of replicas, and public steps."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from atoll.compute import autotune, captured
from atoll.compute.accelerated import Candidate
from atoll.compute.autotune import TRIAL, Tuner, faster, proved
from atoll.compute.cache import cache_key
from atoll.compute.captured import Captured, step_key
from atoll.compute.choice import Choice, remembered
from atoll.compute.deterministic import EQUAL
from atoll.compute.graphs import Lane, available
from atoll.compute.kinds.protocol import Capture
from atoll.compute.kinds.train import exact_work, train_start, train_steps, train_values
from atoll.compute.perturb import Draw, damped, named, perturbed, stream_of, tiled, typed
from atoll.compute.probe import Probe, Seen
from atoll.compute.public_steps import CapturedStep, capturable, stepped
from atoll.jobs.public_step import PublicJob, PublicResult
from atoll.jobs.train import TrainJob, TrainResult

__all__ = ["LOCAL", "CapturedPublic", "CapturedTraining"]

LOCAL = ""  # the lane of all clients' local steps
BATCHES = 3  # of a proof
SMALL = 32  # rows of a batch of a proof
TIMED = 64  # rows of a batch of a trial
STEPS = 5  # on public images: enough for a graph to be captured and replayed


class CapturedTraining:
    """Training steps of one client, or of replicas that take each step together."""

    reason, prunes = "asked for", True

    def mode(self, jobs: Sequence[TrainJob]) -> Literal["stacked", "captured"]:
        """How the record calls this acceleration."""
        return "stacked" if len(jobs) > 1 else "captured"

    def captures(
        self, tuner: Tuner, jobs: Mapping[str, TrainJob], refused: frozenset[str]
    ) -> list[Capture]:
        """Jobs that differ in values alone in one step if that is better, others one by one."""
        alike: dict[tuple[Hashable, int], list[str]] = {}
        for id, job in jobs.items():
            key = step_key(job) if len(job.rows) else None
            if key is not None:
                alike.setdefault((key, len(job.rows)), []).append(id)
        found: list[Capture] = []
        for layout, ids in alike.items():
            works = [jobs[id] for id in ids]
            together = ("replicas", layout[0], len(ids))
            several = len(ids) > 1 and refused.isdisjoint(ids) and captured.replicas(works)
            if several and self._together(tuner, together, works):
                found.append(Capture(together, tuple(ids), layout))
                continue
            single = ("captured", layout[0])
            alone = [id for id in ids if self._alone(tuner, single, jobs[id])]
            found += [Capture(single, (id,), layout) for id in alone]
        return found

    def _together(self, tuner: Tuner, about: Hashable, jobs: Sequence[TrainJob]) -> bool:
        """Whether replicas take their steps together: as asked for, or as tried."""
        if tuner.mode not in ("auto", "stacked"):
            return False
        device = jobs[0].rows.y.device
        return tuner.tuned(self, about, about, jobs, device, "replicas").mode == "stacked"

    def _alone(self, tuner: Tuner, about: Hashable, job: TrainJob) -> bool:
        """Whether steps of this job are captured: as asked for, or on a GPU as tried."""
        device = job.rows.y.device
        if tuner.mode != "captured" and (tuner.mode == "stacked" or not available(device)):
            return False
        return tuner.tuned(self, about, about, [job], device, "work").mode == "captured"

    def lane(self, capture: Capture, streams: bool) -> str:
        """Graphs that run one after another may share the memory of their activations."""
        return capture.ids[0] if streams else LOCAL

    def build(self, jobs: Sequence[TrainJob], lane: Lane) -> Captured:
        """Buffers of one job or of replicas."""
        return Captured(jobs, lane)

    def run(
        self,
        buffers: Sequence[Captured],
        jobs: Sequence[Sequence[TrainJob]],
        streams: bool,
        probes: Sequence[Probe | None],
    ) -> list[list[TrainResult]]:
        """A step of each in turn, or one after another."""
        return captured.done(buffers, jobs, streams, probes)

    def timed(self, jobs: Sequence[TrainJob], choice: Choice) -> Choice:
        """Captured steps if they are faster than the loop, replicas if than one by one."""
        if len(jobs) == 1:
            return self._timed_alone(jobs[0], choice)
        few = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
        seconds = []
        for groups in ([few], [[job] for job in few]):
            buffers = [Captured(group) for group in groups]
            captured.done(buffers, groups)  # makes buffers and captures
            seconds.append(autotune.timed(partial(captured.done, buffers, groups)))
        ratio = seconds[1] / seconds[0]
        return faster(choice, ratio, "replicas in one step are faster", "not faster")

    def _timed_alone(self, job: TrainJob, choice: Choice) -> Choice:
        small = min(job.batch, TIMED)
        few = replace(job, rows=job.rows.at(slice(0, TRIAL * small)), batch=small, epochs=2)
        again = partial(captured.done, [Captured([few])], [[few]])
        again()  # makes buffers and captures
        ratio = autotune.timed(few.run) / autotune.timed(again)
        return faster(choice, ratio, "equal and faster", "not faster")

    def fixed(self, jobs: Sequence[TrainJob], choice: Choice) -> Choice:
        """The proved choice."""
        return replace(choice, reason=EQUAL)

    def sample(self, jobs: Sequence[TrainJob], draws: Sequence[Draw]) -> Sequence[TrainJob]:
        """All of them."""
        return jobs

    def exact(self, job: TrainJob, number: int, draw: Draw) -> TrainJob:
        """As many rows for all, so that each batch size is captured."""
        size = min(job.batch, SMALL)
        rows = BATCHES * size - (size // 2 if size > 3 else 0)
        short = replace(job, rows=tiled(job.rows, rows), batch=size, epochs=4)
        return exact_work(short, number, draw)

    def reference(self, job: TrainJob) -> TrainResult:
        """The loop."""
        return job.run()

    def candidates(self, way: str) -> Sequence[Candidate]:
        """Steps in buffers; several jobs are replicas."""
        return [Candidate("captured", lambda jobs: captured.done([Captured(jobs)], [jobs])[0])]

    def values(self, result: TrainResult) -> dict[str, Tensor]:
        """Weights, moments and losses."""
        return train_values(result)

    def start(self, job: TrainJob) -> dict[str, Tensor]:
        """The trained weights."""
        return train_start(job)

    def weights(self, job: TrainJob) -> Mapping[str, Tensor]:
        """All weights."""
        return job.weights

    def seen(self, job: TrainJob, result: TrainResult) -> Seen | None:
        """A probe looks."""
        return None

    def first_steps(self, job: TrainJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
        """The first steps of the loop."""
        return train_steps(job, steps)


class CapturedPublic:
    """Steps on public images: captured as asked for, on a GPU also with `auto`."""

    reason, prunes = "equal", False

    def mode(self, jobs: Sequence[PublicJob]) -> Literal["stacked", "captured"]:
        """How the record calls this acceleration."""
        return "captured"

    def captures(
        self, tuner: Tuner, jobs: Mapping[str, PublicJob], refused: frozenset[str]
    ) -> list[Capture]:
        """Each job whose steps are proved; until there is a batch to follow they are not."""
        found = []
        for id, job in jobs.items():
            gpu = available(_device(job))
            wanted = tuner.mode == "captured" or (tuner.mode == "auto" and gpu)
            key = job.key() if wanted and capturable(job) else None
            if key is not None and self._proved(tuner, key, job):
                found.append(Capture(key, (id,), key))
        return found

    def _proved(self, tuner: Tuner, key: Hashable, job: PublicJob) -> bool:
        if key not in tuner:
            if job.follow is None:
                return False
            name = cache_key(key, _device(job))
            find = partial(remembered, name, partial(proved, self, "public step", [job]))
            tuner.decide(key, name, find)
        return tuner[key].mode == "captured"

    def lane(self, capture: Capture, streams: bool) -> str:
        """Each client's own: all answer before any of them follows."""
        return capture.ids[0]

    def build(self, jobs: Sequence[PublicJob], lane: Lane) -> CapturedStep:
        """Buffers of one client."""
        return CapturedStep(jobs[0], lane)

    def run(
        self,
        buffers: Sequence[CapturedStep],
        jobs: Sequence[Sequence[PublicJob]],
        streams: bool,
        probes: Sequence[Probe | None],
    ) -> list[list[PublicResult]]:
        """All side by side, or one after another."""
        works = [job for several in jobs for job in several]
        if streams:
            return [[result] for result in stepped(buffers, works)]
        return [stepped([one], [job]) for one, job in zip(buffers, works, strict=True)]

    def timed(self, jobs: Sequence[PublicJob], choice: Choice) -> Choice:
        """The proved choice."""
        return choice

    def fixed(self, jobs: Sequence[PublicJob], choice: Choice) -> Choice:
        """The proved choice."""
        return choice

    def sample(self, jobs: Sequence[PublicJob], draws: Sequence[Draw]) -> Sequence[PublicJob]:
        """One of them."""
        return jobs[:1]

    def exact(self, job: PublicJob, number: int, draw: Draw) -> PublicJob:
        """The same batch again and again, with the values of this draw."""
        if job.follow is None:
            raise ValueError("nothing to follow yet")
        stream = stream_of(number, draw)
        return replace(
            job,
            weights=perturbed(job.weights, stream.child("weights"), draw, frozenset(job.moves)),
            given=perturbed(job.given, stream.child("given"), draw, frozenset(job.given)),
            images=lambda step: typed(job.images(step), draw),
            how=damped(job.how),
            answer=job.follow,
            waiting=None,
        )

    def reference(self, job: PublicJob) -> PublicResult:
        """Some plain steps."""
        return _in_a_row(job, PublicJob.run)

    def candidates(self, way: str) -> Sequence[Candidate]:
        """Steps in buffers."""
        return [Candidate("captured", self._in_buffers)]

    def _in_buffers(self, jobs: Sequence[PublicJob]) -> list[PublicResult]:
        buffers = CapturedStep(jobs[0])
        return [_in_a_row(jobs[0], lambda job: stepped([buffers], [job])[0])]

    def values(self, result: PublicResult) -> dict[str, Tensor]:
        """Weights, logits and the loss."""
        return named(weights=result.weights, outputs=_outputs(result))

    def start(self, job: PublicJob) -> dict[str, Tensor]:
        """The trained weights."""
        return named(weights={name: job.weights[name] for name in job.moves})

    def weights(self, job: PublicJob) -> Mapping[str, Tensor]:
        """All weights."""
        return job.weights

    def seen(self, job: PublicJob, result: PublicResult) -> Seen | None:
        """The trained weights, logits and the loss."""
        return Seen({n: result.weights[n] for n in job.moves}, _outputs(result))

    def first_steps(self, job: PublicJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
        """The plain step."""
        seen = self.seen(job, replace(job, waiting=None).run())
        assert seen is not None  # it is seen whole
        return job.weights, seen


def _device(job: PublicJob) -> torch.device:
    return next(iter(job.weights.values())).device


def _outputs(result: PublicResult) -> dict[str, Tensor]:
    outputs = {"loss": result.loss, "followed": result.followed, "logits": result.logits}
    return {name: tensor for name, tensor in outputs.items() if tensor is not None}


def _in_a_row(job: PublicJob, do: Callable[[PublicJob], PublicResult]) -> PublicResult:
    """Some steps, each on the batch of the first."""
    result = do(job)
    for _ in range(STEPS - 1):
        job = replace(job, weights=result.weights, waiting=result.waiting)
        result = do(job)
    return result
