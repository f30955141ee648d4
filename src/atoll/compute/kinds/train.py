"""Local training of many clients as one stack."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from atoll.compute import autotune
from atoll.compute.accelerated import Candidate, Kind, StackKind, padding_obstacle
from atoll.compute.autotune import TRIAL, Tuner, faster
from atoll.compute.choice import Choice
from atoll.compute.deterministic import EQUAL
from atoll.compute.perturb import (
    ACTUAL,
    DRAWS,
    Draw,
    flattened,
    of_member,
    perturbed,
    perturbed_rows,
    stream_of,
    tiled,
)
from atoll.compute.probe import Seen
from atoll.compute.proof import SAMPLE, sampled
from atoll.compute.stacking import Stack
from atoll.core.messages import Tensors
from atoll.core.rng import Stream
from atoll.jobs.train import Optimiser, Phase, TrainJob, TrainResult

__all__ = [
    "STACKED",
    "TRAIN",
    "TRAIN_STACKS",
    "damped",
    "exact_member",
    "exact_work",
    "robust",
    "train_start",
    "train_steps",
    "train_values",
]

CACHE = 24 << 20  # bytes of weights, gradients and moments that a CPU's cache may hold
MOST_DRAWN = 1 << 24  # rows of all batches of a member, which a stack draws at once
FEWEST = 4  # members of a stack in a proof: with fewer, some of them come twice
BATCHES = 3  # of the member with most rows
TAKEN = 7  # step count for an optimiser without moments
LEAST = 1e-4  # of a second moment
EPSILON = 1e-3  # of Adam where its moments are zero: rounding errors must not become steps


def _obstacle(job: TrainJob) -> str:
    """Why a job cannot be part of a stack; empty if it can."""
    if job.steps * job.batch > MOST_DRAWN:
        return padding_obstacle(job) or "too many batches to be drawn before the first"
    return padding_obstacle(job)


def _choose(tuner: Tuner, about: Hashable, jobs: Sequence[TrainJob]) -> Choice:
    """Whether and how these jobs are stacked."""
    steps = sum(job.steps for job in jobs)
    return tuner.stack(TRAIN, about, jobs, jobs[0].rows.y.device, steps)


def _timed(jobs: Sequence[TrainJob], choice: Choice) -> Choice:
    """The stack if it is faster than the loop on the first batches."""
    short = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    loop_seconds = autotune.timed(lambda: [job.run() for job in short[:SAMPLE]])
    loop_seconds *= len(short) / len(short[:SAMPLE])
    parts, stack_seconds = _fastest(short, choice.way)
    ratio = loop_seconds / stack_seconds
    chosen = faster(choice, ratio, "equal and faster", "the stack is not faster")
    return chosen if chosen.mode == "loop" else replace(chosen, parts=parts)


def _fastest(jobs: Sequence[TrainJob], way: str) -> tuple[int, float]:
    """The number of stacks that members are dealt to, and the seconds of all of them together.

    On a CPU, stacks that fit into its cache may be faster than one that does not.
    """
    seconds = {}
    for parts in sorted({1, stacks_that_fit(jobs)}):
        some = jobs[: -(-len(jobs) // parts)]
        stack = _stack(some, way)
        stack.run(some)  # the first call makes buffers and captures
        seconds[parts] = autotune.timed(partial(stack.run, some)) * len(jobs) / len(some)
    return min(seconds.items(), key=lambda item: item[1])


def _fixed(jobs: Sequence[TrainJob], choice: Choice) -> Choice:
    """The stack, in parts that fit into a cache."""
    return replace(choice, reason=EQUAL, parts=stacks_that_fit(jobs))


def _sample(jobs: Sequence[TrainJob], draws: Sequence[Draw]) -> Sequence[TrainJob]:
    """At least FEWEST members, so that constants have all pairs of signs."""
    members = sampled(jobs)
    if draws is not DRAWS:
        return members
    return [members[place % len(members)] for place in range(max(FEWEST, len(members)))]


def _candidates(way: str) -> Sequence[Candidate]:
    """Batched, then mapped by torch.func."""
    ways = [way] if way else ["batched", "mapped"]
    return [Candidate(name, partial(_stacked, name)) for name in ways]


def _stack(jobs: Sequence[TrainJob], way: str) -> Stack:
    return Stack(jobs, mapped=way == "mapped")


def _stacked(way: str, jobs: Sequence[TrainJob]) -> list[TrainResult]:
    stack = _stack(jobs, way)
    results = stack.run(jobs)
    return stack.run(jobs) if stack.graph else results  # the second time all is replayed


def stacks_that_fit(jobs: Sequence[TrainJob]) -> int:
    """The number of stacks for which each fits into a CPU's cache; one on a GPU."""
    job = jobs[0]
    if job.rows.y.is_cuda:
        return 1
    copies = max(4 if phase.optimiser.kind == "adam" else 2 for phase in job.phases)
    moved = sum(job.weights[name].nbytes for phase in job.phases for name in phase.moves)
    return max(1, min(len(jobs) // 2, -(-len(jobs) * moved * copies // CACHE)))


def train_values(result: TrainResult) -> dict[str, Tensor]:
    """All numbers of a result by name."""
    losses = {n: torch.tensor(float(x), dtype=torch.float64) for n, x in result.losses.items()}
    return flattened(weights=result.weights, moments=result.moments, losses=losses)


def train_start(job: TrainJob) -> dict[str, Tensor]:
    """The weights that a job trains."""
    names = dict.fromkeys(name for phase in job.phases for name in phase.moves)
    return flattened(weights={name: job.weights[name] for name in names})


def train_steps(job: TrainJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
    """The start of a job, and what the loop has after its first steps."""
    result = replace(job, ours=False).run_steps(steps)
    moved = {name: result.weights[name] for phase in job.phases for name in phase.moves}
    rows, device = max(1, job.epochs * len(job.rows)), job.rows.y.device
    sums = {n: torch.tensor(rows * x, dtype=torch.float64) for n, x in result.losses.items()}
    return job.weights, Seen(moved, {n: t.to(device) for n, t in sums.items()})


# Exact and perturbed versions


def exact_member(job: TrainJob, number: int, draw: Draw) -> TrainJob:
    """A job of a few batches; the last is not full, and one member goes on when others end."""
    batches = 1 + number % 2 if number else BATCHES
    rows = max(1, batches * job.batch - job.batch // 2 - number % 2)
    stream = job.stream if draw in ACTUAL else _padded_by_another(job.stream, rows, job.batch)
    epochs = max(1, min(job.epochs, 2))
    short = replace(job, rows=tiled(job.rows, rows), epochs=epochs, stream=stream)
    return exact_work(short, number, draw)


def _padded_by_another(stream: Stream, rows: int, batch: int) -> Stream:
    """An order whose last, smaller batch lacks the first row: a stack pads batches with that row,
    and if the batch held it, a mean that counts the padding could be the same."""
    for attempt in count():
        other = stream.child("proof", attempt)
        last = other.child("epoch", 0).permutation(rows)[rows - rows % batch :]
        if rows < batch or not bool((last == 0).any()):
            return other
    raise AssertionError("unreachable")


def exact_work(job: TrainJob, number: int, draw: Draw) -> TrainJob:
    """A job with perturbed weights, moments and rows."""
    stream = stream_of(number, draw)
    moved = frozenset(name for phase in job.phases for name in phase.moves)
    weights = perturbed(job.weights, stream.child("weights"), of_member(draw, number), moved)
    exact = replace(
        job,
        weights=weights,
        moments=_moments(job, weights, stream.child("moments"), draw),
        rows=perturbed_rows(job.rows, stream.child("rows"), draw),
        ours=False,
        common=False,
    )
    return robust(exact) if draw in ACTUAL else exact


def damped(optimiser: Optimiser) -> Optimiser:
    """An optimiser whose Adam does not step by rounding errors when its moments are zero."""
    return replace(optimiser, epsilon=max(optimiser.epsilon, EPSILON))


def robust(job: TrainJob) -> TrainJob:
    """A job whose Adam does not step by rounding errors when its moments are zero."""
    phases = [replace(phase, optimiser=damped(phase.optimiser)) for phase in job.phases]
    return replace(job, phases=tuple(phases))


def _moments(job: TrainJob, weights: Tensors, stream: Stream, draw: Draw) -> Tensors:
    """Moments that are not zero, for every weight that Adam moves; or those that there are."""
    moments: dict[str, Any] = dict(job.moments)
    if not draw.scale:
        return perturbed(moments, stream, draw, frozenset())
    for phase in job.phases:
        if phase.optimiser.kind == "adam":
            moments |= _adam(phase, job.moments, weights)
    moved = perturbed(moments, stream, draw, frozenset(moments))
    return {n: t.abs() + LEAST if n.startswith("second/") else t for n, t in moved.items()}


def _adam(phase: Phase, moments: Mapping[str, Tensor], weights: Tensors) -> Tensors:
    name = f"steps/{phase.name}"
    steps = moments[name] if name in moments else torch.tensor(TAKEN)
    filled = {name: torch.where(steps > 0, steps, TAKEN)}
    for kind in ("first", "second"):
        names = {n: f"{kind}/{n}" for n in phase.moves}
        filled |= {m: moments.get(m, torch.zeros_like(weights[n])) for n, m in names.items()}
    return filled


TRAIN = Kind(
    "asked for",
    exact_member,
    _candidates,
    values=train_values,
    start=train_start,
    first_steps=train_steps,
    sample=_sample,
    timed=_timed,
    fixed=_fixed,
)
# losses see all members at once, or are mapped; on a GPU the steps of one client are a graph then
TRAIN_STACKS = StackKind(
    TRAIN,
    _obstacle,
    worth=lambda jobs: len(jobs) > 1 or jobs[0].rows.y.is_cuda,
    choose=_choose,
    build=_stack,
    pool_size=8,
)
STACKED = {TrainJob: TRAIN_STACKS}
