"""Rounds of split networks, with halves of one shape and several runs in one computation."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from atoll.compute import autotune
from atoll.compute.accelerated import Candidate
from atoll.compute.autotune import Tuner, proved, what
from atoll.compute.cache import cache_key
from atoll.compute.choice import Choice, remembered
from atoll.compute.deterministic import EQUAL, FIXED
from atoll.compute.perturb import Draw, named, perturbed, stream_of, typed
from atoll.compute.probe import Probe, Seen
from atoll.compute.split_rounds import WAYS, SplitStack, Way, trial_key
from atoll.core.rng import Stream
from atoll.jobs.identity import rowwise
from atoll.jobs.split_round import Lent, SplitJob, SplitResult

__all__ = ["SplitRounds", "first_rows"]

RUNS = 3  # runs of split networks that a trial is made of at most
CHECKED = 16  # rows of a batch of a split network
PASSES = 4  # steps of a split network


@dataclass(frozen=True)
class SplitRounds:
    """Split rounds as one computation; the reference runs one of them without stacks and graphs."""

    first: str = "each"  # the way that is proved first
    reason: str = "asked for"
    modes = ("auto", "stacked", "captured")
    kept = 3  # they hold the rows of a stage too
    halves = True

    def mode(self, jobs: Sequence[SplitJob]) -> Literal["stacked", "captured"]:
        """How the record calls this acceleration."""
        return "stacked"

    def obstacle(self, job: SplitJob) -> str:
        """Why a job cannot be part of a stack; empty if it can."""
        return "" if rowwise(job.functions) else "padding would change its batch statistics"

    def worth(self, jobs: Sequence[SplitJob]) -> bool:
        """Always: each has several clients in it."""
        return True

    def about(self, key: Hashable, jobs: Sequence[SplitJob]) -> Hashable:
        """What the choice for these jobs is about."""
        return key

    def rests_on(self, job: SplitJob) -> Sequence[Hashable]:
        """Nothing else."""
        return ()

    def choose(self, tuner: Tuner, about: Hashable, jobs: Sequence[SplitJob]) -> Choice:
        """Which way is fastest depends on the halves alone; whether it is right, on all the rest.

        So a later stage, with another loss, is proved again and not timed again.
        """
        if about in tuner:
            return tuner[about]
        runs, fixed = min(len(jobs), RUNS), tuner.rules is FIXED
        timing = Choice(
            what(about), runs, "stacked", EQUAL if fixed else "asked for", way="grouped"
        )
        device = jobs[0].y.device
        if tuner.mode != "stacked" and not fixed:
            halves = (trial_key(jobs[0]), runs)
            clocked = cache_key(halves, device)
            find = lambda: remembered(clocked, lambda: timed_ways(what(about), jobs))  # noqa: E731
            timing = tuner.decide(halves, clocked, find)
        exact = cache_key((first_rows(jobs[0]).key(), runs), device)
        return tuner.decide(about, exact, lambda: self._proved(what(about), jobs, timing))

    def _proved(self, work: str, jobs: Sequence[SplitJob], timing: Choice) -> Choice:
        """The fastest way if it gives what each run gives alone, else another."""
        choice = proved(SplitRounds(timing.way, timing.reason), work, jobs)
        return replace(choice, ratio=timing.ratio if choice.way == timing.way else 0.0)

    def build(self, jobs: Sequence[SplitJob], way: str) -> SplitStack:
        """One computation for these rounds."""
        return SplitStack(jobs, cast("Way", way))

    def timed(self, jobs: Sequence[SplitJob], choice: Choice) -> Choice:
        """The proved choice: ways are timed before the proof."""
        return choice

    def fixed(self, jobs: Sequence[SplitJob], choice: Choice) -> Choice:
        """The proved choice."""
        return choice

    def sample(self, jobs: Sequence[SplitJob], draws: Sequence[Draw]) -> Sequence[SplitJob]:
        """The first runs."""
        return jobs[:RUNS]

    def exact(self, job: SplitJob, number: int, draw: Draw) -> SplitJob:
        """The first steps on few rows; labels that the loss reads stay as they are."""
        short, stream = first_rows(job), stream_of(number, draw)
        halves = [_half(one, stream.child("half", n), draw) for n, one in enumerate(short.lent)]
        return replace(
            short,
            weights=perturbed(job.weights, stream.child("top"), draw, frozenset(job.weights)),
            given=perturbed(job.given, stream.child("given"), draw, frozenset()),
            lent=tuple(halves),
        )

    def reference(self, job: SplitJob) -> SplitResult:
        """One run, client by client."""
        return SplitStack([job], "each", graph=False).run([job])[0]

    def candidates(self, way: str) -> Sequence[Candidate]:
        """Each way for halves of one shape."""
        ways = [way] if way else sorted(WAYS, key=lambda one: one != self.first)
        return [Candidate(one, partial(self._stacked, one)) for one in ways]

    def _stacked(self, way: str, jobs: Sequence[SplitJob]) -> list[SplitResult]:
        return self.build(jobs, way).run(jobs)

    def values(self, result: SplitResult) -> dict[str, Tensor]:
        """The weights of all halves, losses and sums."""
        totals = {n: torch.tensor(x, dtype=torch.float64) for n, x in result.totals.items()}
        halves = {f"{i}/{n}": t for i, half in enumerate(result.halves) for n, t in half.items()}
        return named(weights=result.weights, halves=halves, totals=totals, sums={"": result.sums})

    def start(self, job: SplitJob) -> dict[str, Tensor]:
        """The weights of all halves."""
        halves = {f"{i}/{n}": t for i, one in enumerate(job.lent) for n, t in one.weights.items()}
        return named(weights=job.weights, halves=halves)

    def weights(self, job: SplitJob) -> Mapping[str, Tensor]:
        """The weights of the server's half."""
        return job.weights

    def seen(self, job: SplitJob, result: SplitResult) -> Seen | None:
        """A probe looks."""
        return None

    def first_steps(self, job: SplitJob, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
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
    lent = tuple(replace(one, x=one.x[:rows], keys=one.keys[: len(batches)]) for one in job.lent)
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
    """Which way for halves of one shape is fastest; nothing is proved here."""
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
