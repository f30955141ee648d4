"""Counts of many clients in one pass."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from atoll.compute.accelerated import Candidate
from atoll.compute.autotune import Tuner
from atoll.compute.choice import Choice
from atoll.compute.perturb import Draw, perturbed, stream_of, tiled, typed_rows
from atoll.compute.probe import Seen
from atoll.compute.proof import SAMPLE, sampled
from atoll.compute.tallies import Tally, tally
from atoll.jobs.identity import rowwise
from atoll.jobs.train import EvalJob

__all__ = ["COUNTED", "Tallies"]

COUNTED = 64  # rows of a tally
DRAWN = 4  # draws for each member of a tally: a count hides small changes


class Tallies:
    """Evaluation jobs in one pass; a count is cheap, so nothing is timed."""

    reason, modes, kept, halves = "a count without gradient", ("auto", "stacked"), 1, True

    def mode(self, jobs: Sequence[EvalJob]) -> Literal["stacked", "captured"]:
        """How the record calls this acceleration."""
        return "stacked"

    def obstacle(self, job: EvalJob) -> str:
        """Why a job cannot be part of a stack; empty if it can."""
        return "" if rowwise(job.functions) else "padding would change its batch statistics"

    def worth(self, jobs: Sequence[EvalJob]) -> bool:
        """Several, or one on a GPU."""
        return len(jobs) > 1 or jobs[0].rows.y.is_cuda

    def about(self, key: Hashable, jobs: Sequence[EvalJob]) -> Hashable:
        """What the choice for these jobs is about."""
        return key

    def rests_on(self, job: EvalJob) -> Sequence[Hashable]:
        """Nothing else."""
        return ()

    def choose(self, tuner: Tuner, about: Hashable, jobs: Sequence[EvalJob]) -> Choice:
        """Whether these jobs are stacked."""
        return tuner.stack(self, about, jobs, jobs[0].rows.y.device)

    def build(self, jobs: Sequence[EvalJob], way: str) -> Tally:
        """Nothing is kept from one pass to the next."""
        return Tally()

    def timed(self, jobs: Sequence[EvalJob], choice: Choice) -> Choice:
        """The proved choice."""
        return choice

    def fixed(self, jobs: Sequence[EvalJob], choice: Choice) -> Choice:
        """The proved choice."""
        return choice

    def sample(self, jobs: Sequence[EvalJob], draws: Sequence[Draw]) -> Sequence[EvalJob]:
        """Some members, each with several draws."""
        return sampled(jobs) * DRAWN

    def exact(self, job: EvalJob, number: int, draw: Draw) -> EvalJob:
        """A count of some rows with the values of this draw."""
        weights = perturbed(job.weights, stream_of(number, draw), draw, frozenset())
        rows = tiled(job.rows, COUNTED - 7 * (number % SAMPLE))
        return replace(job, weights=weights, rows=typed_rows(rows, draw))

    def reference(self, job: EvalJob) -> Tensor:
        """The count alone."""
        return job.run()

    def candidates(self, way: str) -> Sequence[Candidate]:
        """One pass."""
        return [Candidate("batched", tally)]

    def values(self, result: Tensor) -> dict[str, Tensor]:
        """The counts."""
        return {"counts": result}

    def start(self, job: EvalJob) -> dict[str, Tensor]:
        """Nothing is trained."""
        return {}

    def weights(self, job: EvalJob) -> Mapping[str, Tensor]:
        """All weights."""
        return job.weights

    def seen(self, job: EvalJob, result: Tensor) -> Seen | None:
        """The count."""
        return Seen({}, {"count": result.double()})

    def first_steps(self, job: EvalJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
        """The count alone."""
        return job.weights, Seen({}, {"count": job.run().double()})
