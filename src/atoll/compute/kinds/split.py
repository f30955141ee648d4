"""Rounds of split networks, with halves of one shape and several runs in one computation."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from atoll.compute import autotune
from atoll.compute.accelerated import Candidate, Kind, StackKind, padding_obstacle
from atoll.compute.autotune import Tuner, proved, summary
from atoll.compute.cache import cache_key
from atoll.compute.choice import Choice
from atoll.compute.choice_files import remembered
from atoll.compute.deterministic import EQUAL, FIXED
from atoll.compute.perturb import Draw, flattened, perturbed, stream_of, typed
from atoll.compute.probe import Probe, Seen
from atoll.compute.split_rounds import WAYS, SplitStack, Way, trial_key
from atoll.core.rng import Stream
from atoll.jobs.split_round import Lent, SplitJob, SplitResult

__all__ = ["SPLIT", "SPLIT_STACKS", "STACKED", "first_rows"]

RUNS = 3  # runs of split networks that a trial is made of at most
CHECKED = 16  # rows of a batch of a split network
PASSES = 4  # steps of a split network


def _choose(tuner: Tuner, about: Hashable, jobs: Sequence[SplitJob]) -> Choice:
    """Which way is fastest depends on the halves alone; whether it is right, on all the rest.

    So a later stage, with another loss, is proved again and not timed again.
    """
    if about in tuner:
        return tuner[about]
    runs, fixed = min(len(jobs), RUNS), tuner.rules is FIXED
    timing = Choice(summary(about), runs, "stacked", EQUAL if fixed else "asked for", way="grouped")
    device = jobs[0].y.device
    if tuner.mode != "stacked" and not fixed:
        halves = (trial_key(jobs[0]), runs)
        clocked = cache_key(halves, device)
        find = lambda: remembered(clocked, lambda: timed_ways(summary(about), jobs))  # noqa: E731
        timing = tuner.decide(halves, clocked, find)
    exact = cache_key((first_rows(jobs[0]).key(), runs), device)
    return tuner.decide(about, exact, lambda: _proved(summary(about), jobs, timing))


def _proved(work: str, jobs: Sequence[SplitJob], timing: Choice) -> Choice:
    """The fastest way if it agrees with each run alone, else another."""
    kind = replace(SPLIT, reason=timing.reason, candidates=partial(_candidates, first=timing.way))
    choice = proved(kind, work, jobs)
    return replace(choice, ratio=timing.ratio if choice.way == timing.way else 0.0)


def _exact(job: SplitJob, number: int, draw: Draw) -> SplitJob:
    """The first steps on few rows; labels that the loss reads stay as they are."""
    short, stream = first_rows(job), stream_of(number, draw)
    halves = [_half(half, stream.child("half", n), draw) for n, half in enumerate(short.lent)]
    return replace(
        short,
        weights=perturbed(job.weights, stream.child("top"), draw, frozenset(job.weights)),
        constants=perturbed(job.constants, stream.child("given"), draw, frozenset()),
        lent=tuple(halves),
    )


def _candidates(way: str, first: str = "each") -> Sequence[Candidate]:
    """Each way for halves of one shape; `first`: which of all ways is proved first."""
    ways = [way] if way else sorted(WAYS, key=lambda name: name != first)
    return [Candidate(name, partial(_stacked, name)) for name in ways]


def _stacked(way: str, jobs: Sequence[SplitJob]) -> list[SplitResult]:
    return SplitStack(jobs, cast("Way", way)).run(jobs)


def _values(result: SplitResult) -> dict[str, Tensor]:
    """The weights of all halves, losses and sums."""
    totals = {n: torch.tensor(x, dtype=torch.float64) for n, x in result.totals.items()}
    halves = {f"{i}/{n}": t for i, half in enumerate(result.halves) for n, t in half.items()}
    return flattened(weights=result.weights, halves=halves, totals=totals, sums={"": result.sums})


def _start(job: SplitJob) -> dict[str, Tensor]:
    """The weights of all halves."""
    halves = {f"{i}/{n}": t for i, half in enumerate(job.lent) for n, t in half.weights.items()}
    return flattened(weights=job.weights, halves=halves)


def _first_steps(job: SplitJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
    """The first steps of one run, client by client."""
    alone, before, after = SplitStack([job], "each", graph=False), Probe(0, 0), Probe(0, steps)
    alone.begin([job], before)
    alone.begin([job], after)
    assert before.seen is not None and after.seen is not None  # noqa: PT018 - begin() fills both
    return before.seen.weights, after.seen


def first_rows(job: SplitJob, size: int = CHECKED) -> SplitJob:
    """The first rows of a round, in a few batches of at most this size."""
    size = min(size, job.batches.size)
    rows = min(job.batches.rows, PASSES * size)
    batches = replace(job.batches, rows=rows, size=size)
    lent = tuple(replace(h, x=h.x[:rows], keys=h.keys[: len(batches)]) for h in job.lent)
    return replace(job, y=job.y[:rows], batches=batches, steps=len(batches), lent=lent)


def _half(lent: Lent, stream: Stream, draw: Draw) -> Lent:
    names = frozenset(lent.weights)
    return replace(
        lent,
        x=typed(lent.x, draw),
        weights=perturbed(lent.weights, stream.child("weights"), draw, names),
        before=perturbed(lent.before, stream.child("before"), draw, names),
    )


def timed_ways(work: str, jobs: Sequence[SplitJob]) -> Choice:
    """The fastest way for halves of one shape; nothing is proved here."""
    if all(lent.still for job in jobs for lent in job.lent):
        choice = Choice(work, len(jobs), "stacked", "nothing moves at the clients")
        return replace(choice, way="grouped")
    short = [first_rows(job, job.batches.size) for job in jobs[:RUNS]]
    seconds = dict[Way, float]()
    for way in WAYS:
        together = SplitStack(short, way)
        together.run(short)  # the first call makes buffers and captures
        seconds[way] = autotune.timed(partial(together.run, short))
    best = min(seconds, key=lambda way: seconds[way])
    ratio = seconds["each"] / seconds[best]
    reason = "the fastest of " + ", ".join(f"{w} {1000 * s:.1f} ms" for w, s in seconds.items())
    return Choice(work, len(jobs), "stacked", reason, ratio=ratio, way=best)


# the reference runs one round without stacks and graphs; ways are timed before the proof
SPLIT = Kind(
    "asked for",
    _exact,
    _candidates,
    values=_values,
    start=_start,
    first_steps=_first_steps,
    sample=lambda jobs, draws: jobs[:RUNS],
    reference=lambda job: SplitStack([job], "each", graph=False).run([job])[0],
)
SPLIT_STACKS = StackKind(
    SPLIT,
    padding_obstacle,
    worth=lambda jobs: True,  # each has several clients in it
    choose=_choose,
    build=lambda jobs, way: SplitStack(jobs, cast("Way", way)),
    modes=("auto", "stacked", "captured"),
    pool_size=3,  # they hold the rows of a stage too
)
STACKED = {SplitJob: SPLIT_STACKS}
