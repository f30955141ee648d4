"""Counts of many clients in one pass; a count is cheap, so it is not timed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from atoll.compute.accelerated import Candidate, Kind, StackKind, padding_obstacle
from atoll.compute.autotune import Tuner
from atoll.compute.choice import Choice
from atoll.compute.perturb import Draw, perturbed, stream_of, tiled, typed_rows
from atoll.compute.probe import Seen
from atoll.compute.proof import SAMPLE, sampled
from atoll.compute.tallies import Tally, tally
from atoll.jobs.train import EvalJob

__all__ = ["COUNTED", "STACKED", "TALLIES", "TALLY"]

COUNTED = 64  # rows of a tally
DRAWN = 4  # draws for each member of a tally: a count hides small changes


def _exact(job: EvalJob, number: int, draw: Draw) -> EvalJob:
    """A count of some rows with the values of this draw."""
    weights = perturbed(job.weights, stream_of(number, draw), draw, frozenset())
    rows = tiled(job.rows, COUNTED - 7 * (number % SAMPLE))
    return replace(job, weights=weights, rows=typed_rows(rows, draw))


def _first_steps(job: EvalJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
    """The count alone."""
    return job.weights, Seen({}, {"count": job.run().double()})


TALLY = Kind(
    "a count without gradient",
    _exact,
    candidates=lambda way: [Candidate("batched", tally)],
    values=lambda counts: {"counts": counts},
    start=lambda job: {},
    first_steps=_first_steps,
    seen=lambda job, counts: Seen({}, {"count": counts.double()}),
    sample=lambda jobs, draws: sampled(jobs) * DRAWN,
)


def _choose(tuner: Tuner, about: Hashable, jobs: Sequence[EvalJob]) -> Choice:
    """Whether these jobs are stacked."""
    return tuner.stack(TALLY, about, jobs, jobs[0].rows.y.device)


TALLIES = StackKind(
    TALLY,
    obstacle=padding_obstacle,
    worth=lambda jobs: len(jobs) > 1 or jobs[0].rows.y.is_cuda,
    choose=_choose,
    build=lambda jobs, way: Tally(),
)
STACKED = {EvalJob: TALLIES}
