"""Early-stopped training of many clients without the host, if its epochs may be a stack.

Where memory ends the executor runs epoch by epoch, since these stacks can be halved.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from atoll.compute.accelerated import Candidate, Kind, StackKind
from atoll.compute.autotune import Subject, Tuner
from atoll.compute.choice import Choice
from atoll.compute.early_stopping import EarlyStoppedStack
from atoll.compute.kinds.evaluate import COUNTED
from atoll.compute.kinds.train import (
    TRAIN,
    TRAIN_STACKS,
    exact_member,
    robust,
    train_start,
    train_steps,
)
from atoll.compute.perturb import Draw, flattened, tiled, typed_rows
from atoll.compute.proof import SAMPLE, sampled
from atoll.jobs.early_stopping import KEY, EarlyStoppedJob, EarlyStoppedResult

__all__ = ["COMPOSED", "EARLY_STOPPED", "EARLY_STOPPED_STACKS", "STACKED"]


def _exact(job: EarlyStoppedJob, number: int, draw: Draw) -> EarlyStoppedJob:
    """Two short epochs with the values of this draw."""
    work = robust(exact_member(job.work, number, draw))
    valid = job.valid
    if len(valid):
        valid = typed_rows(tiled(valid, COUNTED - 7 * (number % SAMPLE)), draw)
    return replace(job, work=work, valid=valid, streams=job.streams[:2], keys=job.keys[:2])


def _values(result: EarlyStoppedResult) -> dict[str, Tensor]:
    """Weights, moments and the course; the key of the last epoch's noise is no result."""
    weights = {n: t for n, t in result.weights.items() if n != KEY}
    return flattened(weights=weights, moments=result.moments, at={"course": result.course})


EARLY_STOPPED = Kind(
    "equal",
    _exact,
    candidates=lambda way: [Candidate("batched", lambda jobs: EarlyStoppedStack(jobs).run(jobs))],
    values=_values,
    start=lambda job: train_start(job.work),
    first_steps=lambda job, steps: train_steps(job.first, steps),
    sample=lambda jobs, draws: sampled(jobs),
    weights=lambda job: job.work.weights,
)


def _choose(tuner: Tuner, about: Hashable, jobs: Sequence[EarlyStoppedJob]) -> Choice:
    """One computation if the epochs are batched, and if all of them together are proved."""
    epochs, device = [job.first for job in jobs], jobs[0].work.rows.y.device
    choice = tuner.stack(TRAIN, epochs[0].key(), epochs, device)
    if choice.mode != "stacked" or choice.way != "batched":
        return replace(choice, mode="loop")
    cached = (about, len(jobs).bit_length())
    return tuner.proved(Subject(EARLY_STOPPED, about, cached, device, "watched"), jobs)


EARLY_STOPPED_STACKS = StackKind(
    EARLY_STOPPED,
    obstacle=lambda job: TRAIN_STACKS.obstacle(job.work),
    worth=lambda jobs: jobs[0].work.rows.y.is_cuda,  # on a CPU the host never waits
    choose=_choose,
    build=lambda jobs, way: EarlyStoppedStack(jobs),
    pool_size=4,
    halves=False,
    about=lambda key: ("watch", key),  # members that stop leave the others in their stack
    rests_on=lambda job: [job.first.key()],  # the choice for its epochs
)
STACKED = {EarlyStoppedJob: EARLY_STOPPED_STACKS}
COMPOSED = {EarlyStoppedJob: EarlyStoppedJob.parts}
