"""Early-stopped training of many clients without the host."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from atoll.compute.accelerated import Candidate
from atoll.compute.autotune import Tuner, proved
from atoll.compute.cache import cache_key
from atoll.compute.choice import Choice, remembered
from atoll.compute.early_stopping import EarlyStoppedStack
from atoll.compute.kinds.evaluate import COUNTED
from atoll.compute.kinds.train import (
    TrainStacks,
    exact_member,
    robust,
    train_start,
    train_steps,
)
from atoll.compute.perturb import Draw, named, tiled, typed_rows
from atoll.compute.probe import Seen
from atoll.compute.proof import SAMPLE, sampled
from atoll.jobs.early_stopping import KEY, EarlyStoppedJob, EarlyStoppedResult

__all__ = ["EarlyStoppedStacks"]


class EarlyStoppedStacks:
    """All epochs of a round in one computation, if its epochs may be a stack.

    Where memory ends the executor runs epoch by epoch, since these stacks can be halved.
    """

    reason, modes, kept, halves = "equal", ("auto", "stacked"), 4, False
    training = TrainStacks()

    def mode(self, jobs: Sequence[EarlyStoppedJob]) -> Literal["stacked", "captured"]:
        """How the record calls this acceleration."""
        return "stacked"

    def obstacle(self, job: EarlyStoppedJob) -> str:
        """Why a job cannot be part of a stack; empty if it can."""
        return self.training.obstacle(job.work)

    def worth(self, jobs: Sequence[EarlyStoppedJob]) -> bool:
        """On a GPU; a CPU gains nothing from a host that does not wait."""
        return jobs[0].work.rows.y.is_cuda

    def about(self, key: Hashable, jobs: Sequence[EarlyStoppedJob]) -> Hashable:
        """The key alone: members that stop leave the others in their stack."""
        return ("watch", key)

    def rests_on(self, job: EarlyStoppedJob) -> Sequence[Hashable]:
        """The choice for its epochs."""
        return [job.first.key()]

    def choose(self, tuner: Tuner, about: Hashable, jobs: Sequence[EarlyStoppedJob]) -> Choice:
        """One computation if the epochs are batched, and if all of them together are proved."""
        epochs, device = [job.first for job in jobs], jobs[0].work.rows.y.device
        choice = tuner.stack(self.training, epochs[0].key(), epochs, device)
        if choice.mode != "stacked" or choice.way != "batched":
            return replace(choice, mode="loop")
        if about in tuner:
            return tuner[about]
        name = cache_key((about, len(jobs).bit_length()), device)
        find = lambda: remembered(name, lambda: proved(self, "watched", jobs))  # noqa: E731
        return tuner.decide(about, name, find)

    def build(self, jobs: Sequence[EarlyStoppedJob], way: str) -> EarlyStoppedStack:
        """One computation for these jobs."""
        return EarlyStoppedStack(jobs)

    def timed(self, jobs: Sequence[EarlyStoppedJob], choice: Choice) -> Choice:
        """The proved choice: the epochs are timed."""
        return choice

    def fixed(self, jobs: Sequence[EarlyStoppedJob], choice: Choice) -> Choice:
        """The proved choice."""
        return choice

    def sample(
        self, jobs: Sequence[EarlyStoppedJob], draws: Sequence[Draw]
    ) -> Sequence[EarlyStoppedJob]:
        """Some members."""
        return sampled(jobs)

    def exact(self, job: EarlyStoppedJob, number: int, draw: Draw) -> EarlyStoppedJob:
        """Two short epochs with the values of this draw."""
        work = robust(exact_member(job.work, number, draw))
        valid = job.valid
        if len(valid):
            valid = typed_rows(tiled(valid, COUNTED - 7 * (number % SAMPLE)), draw)
        streams, keys = job.streams[:2], job.keys[:2]
        return replace(job, work=work, valid=valid, streams=streams, keys=keys)

    def reference(self, job: EarlyStoppedJob) -> EarlyStoppedResult:
        """Epoch by epoch."""
        return job.run()

    def candidates(self, way: str) -> Sequence[Candidate]:
        """One computation."""
        return [Candidate("batched", lambda jobs: self.build(jobs, "").run(jobs))]

    def values(self, result: EarlyStoppedResult) -> dict[str, Tensor]:
        """Weights, moments and the course; the key of the last epoch's noise is no result."""
        weights = {n: t for n, t in result.weights.items() if n != KEY}
        return named(weights=weights, moments=result.moments, at={"course": result.course})

    def start(self, job: EarlyStoppedJob) -> dict[str, Tensor]:
        """The trained weights."""
        return train_start(job.work)

    def weights(self, job: EarlyStoppedJob) -> Mapping[str, Tensor]:
        """All weights."""
        return job.work.weights

    def seen(self, job: EarlyStoppedJob, result: EarlyStoppedResult) -> Seen | None:
        """A probe looks."""
        return None

    def first_steps(self, job: EarlyStoppedJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
        """The first steps of the first epoch."""
        return train_steps(job.first, steps)
