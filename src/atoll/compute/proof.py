"""The proof: an accelerated way must give what the plain loop gives, near the actual values.

Both ways do a few steps in double precision, from values that are perturbed for each member
independently: weights, buffers, constants that a loss reads, optimiser moments. A term that is zero
when a run begins (control variates, an anchor equal to the weights, importances) is not zero here,
so it cannot hide a mistake. Every kind of work and every candidate goes through `prove`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from atoll.compute import captured
from atoll.compute.captured import Captured
from atoll.compute.compare import max_relative_error, norm_errors
from atoll.compute.early_stopping import EarlyStoppedStack
from atoll.compute.probe import Seen
from atoll.compute.public_steps import CapturedStep
from atoll.compute.public_steps import stepped as steps_of
from atoll.compute.split_rounds import SplitStack, Way
from atoll.compute.stacking import Stack, tally
from atoll.core.messages import Tensors
from atoll.core.rng import Stream, normals
from atoll.core.rows import Rows
from atoll.jobs.early_stopping import KEY, EarlyStoppedJob, EarlyStoppedResult
from atoll.jobs.public_step import PublicJob, PublicResult
from atoll.jobs.split_round import Lent, SplitJob, SplitResult
from atoll.jobs.train import EvalJob, Optimiser, Phase, TrainJob, TrainResult
from atoll.kernels.batched_layers import torch_convolutions

__all__ = [
    "ACTUAL",
    "SAMPLE",
    "TOLERANCE",
    "Candidate",
    "Verdict",
    "first_steps",
    "prove",
    "prove_captured",
    "prove_passes",
    "prove_public",
    "prove_stack",
    "prove_tally",
    "prove_watch",
    "sampled",
]

TOLERANCE = 1e-8  # relative, in double precision, after the steps of a proof
SAMPLE = 8  # members that a proof takes
GIVEN = 4  # of them that also start from the values that they have
ROUNDED = 2  # of them that show what rounding does in the run's own type
FEWEST = 4  # members of a stack in a proof: with fewer, some of them come twice
BATCHES = 3  # of the member with most rows
SMALL = 32  # rows of a batch of steps in buffers
COUNTED = 64  # rows of a tally
DRAWN = 4  # draws for each member of a tally
CHECKED = 16  # rows of a batch of a split network
PASSES = 4  # steps of a split network
STEPS = 5  # on public images: enough for a graph to be captured and replayed
TAKEN = 7  # steps that an optimiser without moments is said to have taken
EPSILON = 1e-3  # of Adam where its moments are zero: rounding errors must not become steps
LEAST = 1e-4  # of a second moment


@dataclass(frozen=True)
class Draw:
    """How far values are moved, and which signs they may have."""

    scale: float
    signed: bool = False  # constants of a single sign get either sign, by member
    member: int = 0  # whose values they are
    double: bool = True  # in double precision; else in the type that they have


# The first at which the reference is finite is taken: roots, logarithms and ratios among a loss's
# constants may not bear the larger ones.
DRAWS = (Draw(0.1, signed=True), Draw(0.1), Draw(0.01), Draw(0.001))
ACTUAL = (Draw(0.0),)  # the values of a round, as they are
PATTERNS = ((1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1))  # signs of constants by member
AS_RUN = Draw(0.0, double=False)  # in the run's own type too: what rounding alone does


@dataclass(frozen=True)
class Candidate:
    """An accelerated way to do works."""

    way: str
    run: Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Verdict:
    """The first way that gives what the reference gives; without one, why none does."""

    way: str  # empty: none
    difference: float
    reason: str
    rounding: float = 0.0  # how far both ways are apart in the run's own type, unperturbed

    @property
    def holds(self) -> bool:
        """Whether some way is proved."""
        return bool(self.way)


Case = tuple[Sequence[Any], Sequence[Any]]  # works, and what the reference makes of them


def prove(
    jobs: Sequence[Any],
    exact: Callable[[Any, int, Draw], Any],
    reference: Callable[[Any], Any],
    candidates: Sequence[Candidate],
    draws: Sequence[Draw] = DRAWS,
) -> Verdict:
    """Hold candidates to the reference, on `exact` versions of the jobs, until one agrees."""
    if draws is not DRAWS:
        return _prove(jobs, exact, reference, candidates, draws)
    with torch_convolutions():
        verdict = _prove(jobs, exact, reference, candidates, draws)
        for candidate in candidates:
            if candidate.way == verdict.way:
                works = [exact(job, number, AS_RUN) for number, job in enumerate(jobs[:ROUNDED])]
                return replace(verdict, rounding=_rounding(works, reference, candidate))
    return verdict


def _prove(
    jobs: Sequence[Any],
    exact: Callable[[Any, int, Draw], Any],
    reference: Callable[[Any], Any],
    candidates: Sequence[Candidate],
    draws: Sequence[Draw],
) -> Verdict:
    wrong = ""
    for draw in draws:
        try:
            works = [exact(job, number, draw) for number, job in enumerate(jobs)]
            expected = [reference(work) for work in works]
        except Exception as error:  # a loss may fail in any way on values that it does not expect
            wrong = f"{type(error).__name__}: {error}"[:200]
            continue
        if all(map(_finite, works, expected)):
            cases = [(works, expected), *_as_given(jobs, exact, reference, draws)]
            return _first_equal(cases, candidates)
        wrong = "numbers that are not finite"
    return Verdict("", math.inf, f"no proof: perturbed values give {wrong}")


def _as_given(
    jobs: Sequence[Any],
    exact: Callable[[Any, int, Draw], Any],
    reference: Callable[[Any], Any],
    draws: Sequence[Draw],
) -> list[Case]:
    """The jobs from the values that they have: there a maximum may have exact ties."""
    if draws is not DRAWS:
        return []
    works = [exact(job, number, ACTUAL[0]) for number, job in enumerate(jobs[:GIVEN])]
    expected = [reference(work) for work in works]
    return [(works, expected)] if all(map(_finite, works, expected)) else []


def _first_equal(cases: Sequence[Case], candidates: Sequence[Candidate]) -> Verdict:
    wrong, apart = [], math.inf
    for candidate in candidates:
        try:
            apart = max(_apart(candidate, *case) for case in cases)
        except Exception as error:  # a loss may fail in any way on what it was not written for
            wrong.append(f"{candidate.way}: {type(error).__name__}: {error}"[:200])
            continue
        if apart <= TOLERANCE:
            return Verdict(candidate.way, apart, "")
        told = f"differs by {apart:.1e}, more than {TOLERANCE:.0e}"
        wrong.append(f"{candidate.way}: the result {told}")
    return Verdict("", apart, "; ".join(wrong))


def _apart(candidate: Candidate, works: Sequence[Any], expected: Sequence[Any]) -> float:
    """How far a candidate is from the reference, in the worst of the works."""
    return max(
        max_relative_error(values(one), values(other), start(work))
        for work, one, other in zip(works, expected, candidate.run(works), strict=True)
    )


def _rounding(works: Sequence[Any], reference: Callable[[Any], Any], candidate: Candidate) -> float:
    """How far a way that is right goes from the reference by rounding, in the run's own type."""
    apart = 0.0
    for work, other in zip(works, candidate.run(works), strict=True):
        before, one, two = start(work), values(reference(work)), values(other)
        expected, actual = (Seen({n: part[n] for n in before}, {}) for part in (one, two))
        apart = max(apart, norm_errors(before, expected, actual)[0])
    return apart


def sampled(jobs: Sequence[Any], first: int = 0) -> list[Any]:
    """At most SAMPLE jobs, evenly spaced from one of them."""
    count = min(len(jobs), SAMPLE)
    return [jobs[(first + place * len(jobs) // count) % len(jobs)] for place in range(count)]


# The kinds of work


def prove_stack(jobs: Sequence[TrainJob], draws: Sequence[Draw] = DRAWS, way: str = "") -> Verdict:
    """Works of one form in one computation: losses see all members at once, or are mapped."""
    ways = [Candidate("batched", _in_stack), Candidate("mapped", partial(_in_stack, mapped=True))]
    several = [one for one in ways if way in ("", one.way)]
    members = sampled(jobs)
    if draws is DRAWS:
        members = [members[place % len(members)] for place in range(max(FEWEST, len(members)))]
    return prove(members, _member, TrainJob.run, several, draws)


def _in_stack(works: Sequence[TrainJob], mapped: bool = False) -> list[TrainResult]:
    stack = Stack(works, mapped=mapped)
    found = stack(works)
    return stack(works) if stack.graph else found  # the second time all steps are replayed


def prove_captured(jobs: Sequence[TrainJob], draws: Sequence[Draw] = DRAWS) -> Verdict:
    """Steps in buffers of their own, captured where there is a GPU; several jobs are replicas."""
    way = "replicas" if len(jobs) > 1 else "captured"
    run = Candidate(way, lambda works: captured.done([Captured(works)], [works])[0])
    return prove(jobs, _alike, TrainJob.run, [run], draws)


def prove_tally(jobs: Sequence[EvalJob], draws: Sequence[Draw] = DRAWS) -> Verdict:
    """Counts of many members in one pass, each with several draws: a count hides small changes."""
    run = Candidate("batched", tally)
    return prove(sampled(jobs) * DRAWN, _counted, EvalJob.run, [run], draws)


def prove_passes(
    jobs: Sequence[SplitJob], ways: Sequence[Way], draws: Sequence[Draw] = DRAWS
) -> Verdict:
    """Split networks: several runs together, halves of one shape in each of these ways."""

    def alone(job: SplitJob) -> SplitResult:
        return SplitStack([job], "each", graph=False)([job])[0]

    def together(works: Sequence[SplitJob], way: Way) -> list[SplitResult]:
        return SplitStack(works, way)(works)

    several = [Candidate(way, partial(together, way=way)) for way in ways]
    return prove(jobs, _passes, alone, several, draws)


def prove_watch(jobs: Sequence[EarlyStoppedJob], draws: Sequence[Draw] = DRAWS) -> Verdict:
    """Watched epochs of many members as one computation."""
    run = Candidate("batched", lambda works: EarlyStoppedStack(works)(works))
    return prove(sampled(jobs), _watched, EarlyStoppedJob.run, [run], draws)


def prove_public(job: PublicJob, draws: Sequence[Draw] = DRAWS) -> Verdict:
    """Steps on public images in buffers of their own; the job must have a batch to follow."""

    def alone(first: PublicJob) -> PublicResult:
        return _in_a_row(first, PublicJob.run)

    def in_buffers(works: Sequence[PublicJob]) -> list[PublicResult]:
        one = CapturedStep(works[0])
        return [_in_a_row(works[0], lambda step: steps_of([one], [step])[0])]

    return prove([job], _public, alone, [Candidate("captured", in_buffers)], draws)


def _in_a_row(job: PublicJob, do: Callable[[PublicJob], PublicResult]) -> PublicResult:
    """Some steps, each on the batch of the first."""
    done = do(job)
    for _ in range(STEPS - 1):
        job = replace(job, weights=done.weights, waiting=done.waiting)
        done = do(job)
    return done


# Exact and perturbed versions of jobs: short, in double precision


def _member(job: TrainJob, number: int, draw: Draw) -> TrainJob:
    """A work of a few batches; the last is not full, and one member goes on when others end."""
    batches = 1 + number % 2 if number else BATCHES
    rows = max(1, batches * job.batch - job.batch // 2 - number % 2)
    stream = job.stream if draw in ACTUAL else _padded_by_another(job.stream, rows, job.batch)
    epochs = max(1, min(job.epochs, 2))
    short = replace(job, rows=_tiled(job.rows, rows), epochs=epochs, stream=stream)
    return _work(short, number, draw)


def _padded_by_another(stream: Stream, rows: int, batch: int) -> Stream:
    """An order whose last, smaller batch lacks the first row: a stack pads batches with that row,
    and if the batch held it, a mean that counts the padding could be the same."""
    for attempt in count():
        other = stream.child("proof", attempt)
        last = other.child("epoch", 0).permutation(rows)[rows - rows % batch :]
        if rows < batch or not bool((last == 0).any()):
            return other
    raise AssertionError("unreachable")


def _alike(job: TrainJob, number: int, draw: Draw) -> TrainJob:
    """The same for steps in buffers: as many rows for all, and each batch size is captured."""
    size = min(job.batch, SMALL)
    rows = BATCHES * size - (size // 2 if size > 3 else 0)
    return _work(replace(job, rows=_tiled(job.rows, rows), batch=size, epochs=4), number, draw)


def _work(job: TrainJob, number: int, draw: Draw) -> TrainJob:
    stream = _stream(number, draw)
    moved = frozenset(name for phase in job.phases for name in phase.moves)
    weights = _perturbed(job.weights, stream.child("weights"), _of_member(draw, number), moved)
    found = replace(
        job,
        weights=weights,
        moments=_moments(job, weights, stream.child("moments"), draw),
        rows=_perturbed_rows(job.rows, stream.child("rows"), draw),
        ours=False,
        common=False,
    )
    return _robust(found) if draw in ACTUAL else found


def _moments(job: TrainJob, weights: Tensors, stream: Stream, draw: Draw) -> Tensors:
    """Moments that are not zero, for every weight that Adam moves; or those that there are."""
    found = dict(job.moments)
    if not draw.scale:
        return _perturbed(found, stream, draw, frozenset())
    for phase in job.phases:
        if phase.optimiser.kind == "adam":
            found |= _adam(phase, job.moments, weights)
    moved = _perturbed(found, stream, draw, frozenset(found))
    return {n: t.abs() + LEAST if n.startswith("second/") else t for n, t in moved.items()}


def _adam(phase: Phase, moments: Mapping[str, Tensor], weights: Tensors) -> Tensors:
    name = f"steps/{phase.name}"
    taken = moments[name] if name in moments else torch.tensor(TAKEN)
    found = {name: torch.where(taken > 0, taken, TAKEN)}
    for kind in ("first", "second"):
        names = {n: f"{kind}/{n}" for n in phase.moves}
        found |= {m: moments.get(m, torch.zeros_like(weights[n])) for n, m in names.items()}
    return found


def _counted(job: EvalJob, number: int, draw: Draw) -> EvalJob:
    rows = COUNTED - 7 * (number % SAMPLE)
    weights = _perturbed(job.weights, _stream(number, draw), draw, frozenset())
    return replace(job, weights=weights, rows=_typed_rows(_tiled(job.rows, rows), draw))


def _watched(job: EarlyStoppedJob, number: int, draw: Draw) -> EarlyStoppedJob:
    work = _robust(_member(job.work, number, draw))
    valid = job.valid
    if len(valid):
        valid = _typed_rows(_tiled(valid, COUNTED - 7 * (number % SAMPLE)), draw)
    streams, keys = job.streams[:2], job.keys[:2]
    return replace(job, work=work, valid=valid, streams=streams, keys=keys)


def _robust(job: TrainJob) -> TrainJob:
    """A work whose Adam does not step by rounding errors when its moments are forgotten."""
    phases = [replace(phase, optimiser=_damped(phase.optimiser)) for phase in job.phases]
    return replace(job, phases=tuple(phases))


def _damped(how: Optimiser) -> Optimiser:
    return replace(how, epsilon=max(how.epsilon, EPSILON))


def _public(job: PublicJob, number: int, draw: Draw) -> PublicJob:
    stream = _stream(number, draw)

    def images(step: int) -> Tensor:
        return _typed(job.images(step), draw)

    return replace(
        job,
        weights=_perturbed(job.weights, stream.child("weights"), draw, frozenset(job.moves)),
        given=_perturbed(job.given, stream.child("given"), draw, frozenset(job.given)),
        images=images,
        how=_damped(job.how),
        answer=job.follow,
        waiting=None,
    )


def _passes(job: SplitJob, number: int, draw: Draw) -> SplitJob:
    """The first steps on few rows; labels that the loss reads stay as they are."""
    short, stream = first_steps(job), _stream(number, draw)
    lent = [_half(one, stream.child("half", place), draw) for place, one in enumerate(short.lent)]
    return replace(
        short,
        weights=_perturbed(job.weights, stream.child("top"), draw, frozenset(job.weights)),
        given=_perturbed(job.given, stream.child("given"), draw, frozenset()),
        lent=tuple(lent),
    )


def _half(lent: Lent, stream: Stream, draw: Draw) -> Lent:
    names = frozenset(lent.weights)
    return replace(
        lent,
        x=_typed(lent.x, draw),
        weights=_perturbed(lent.weights, stream.child("weights"), draw, names),
        before=_perturbed(lent.before, stream.child("before"), draw, names),
    )


def first_steps(job: SplitJob, size: int = CHECKED, steps: int = PASSES) -> SplitJob:
    """The first rows of passes, in a few batches of at most this size."""
    size = min(size, job.batches.size)
    rows = min(job.batches.rows, steps * size)
    batches = replace(job.batches, rows=rows, size=size)
    lent = tuple(replace(one, x=one.x[:rows], keys=one.keys[: len(batches)]) for one in job.lent)
    return replace(job, y=job.y[:rows], batches=batches, steps=len(batches), lent=lent)


def _stream(number: int, draw: Draw) -> Stream:
    return Stream.of("engine").child("proof", number, str(draw))


def _tiled(rows: Rows, count: int) -> Rows:
    """So many rows, from the first again where there are not as many."""
    if not len(rows):
        return rows
    return rows.at(torch.arange(count, device=rows.y.device) % len(rows))


def _typed(tensor: Tensor, draw: Draw) -> Tensor:
    """The values of a proof in its precision."""
    return tensor.double() if draw.double and tensor.is_floating_point() else tensor


def _typed_rows(rows: Rows, draw: Draw) -> Rows:
    return replace(rows, x=_typed(rows.x, draw), own=_typed(rows.own, draw))


def _perturbed_rows(rows: Rows, stream: Stream, draw: Draw) -> Rows:
    """Rows of which no two are equal, where inputs are numbers."""
    given = {"x": rows.x, "own": rows.own}
    found = _perturbed(given, stream, replace(draw, signed=False), frozenset(given))
    return replace(rows, x=found["x"], own=found["own"])


def _of_member(draw: Draw, number: int) -> Draw:
    return replace(draw, member=number) if draw.signed else draw


def _perturbed(
    tensors: Mapping[str, Tensor], stream: Stream, draw: Draw, trained: frozenset[str]
) -> Tensors:
    """Every floating-point tensor moved at random, in double precision; others as they are.

    Constants are moved by more than trained weights: a loss bears it, a deep network may not.
    """
    if not draw.scale:
        return {name: _typed(t.detach(), draw) for name, t in tensors.items()}
    return {
        name: _moved(t.detach(), stream.child(name), draw, _sign(name, draw, name in trained))
        if t.is_floating_point()
        else t
        for name, t in tensors.items()
    }


def _sign(name: str, draw: Draw, trained: bool) -> int:
    """The sign of a constant in a member: a term behind `strength > 0` is there in some members.

    Two constants have the same pattern over members, or all four pairs of signs in four members.
    0: a weight that is trained, whose sign does not matter.
    """
    if trained or not draw.signed:
        return 0 if trained else 1
    pattern = PATTERNS[Stream.of("signs", name).key % len(PATTERNS)]
    return pattern[draw.member % len(pattern)]


def _moved(tensor: Tensor, stream: Stream, draw: Draw, sign: int) -> Tensor:
    """A tensor of both signs is moved; one of a single sign gets this sign, or stays positive."""
    value, least = tensor.double(), 1.0 if sign else 0.1
    if not value.numel():
        return value
    finite = torch.where(value.isfinite(), value, 0.0)
    spread = draw.scale * (float(finite.square().mean().sqrt()) + least)
    noise = normals(torch.tensor(stream.key, device=value.device), tuple(value.shape))
    moved, low, high = value + spread * noise, float(finite.min()), float(finite.max())
    if sign and draw.signed and not low < 0 < high:
        return moved.abs() * sign
    free = draw.signed and not (low or high)  # a trained weight of zeros
    return moved if free or low < 0 else moved.abs()


# What is compared


def values(result: Any) -> dict[str, Tensor]:
    """All numbers of a result by name."""
    if isinstance(result, Tensor):
        return {"counts": result}
    if isinstance(result, TrainResult):
        losses = {n: torch.tensor(float(x), dtype=torch.float64) for n, x in result.losses.items()}
        return _named(weights=result.weights, moments=result.moments, losses=losses)
    if isinstance(result, EarlyStoppedResult):
        # the key of the last epoch's noise is no result
        weights = {n: t for n, t in result.weights.items() if n != KEY}
        return _named(weights=weights, moments=result.moments, at={"course": result.course})
    if isinstance(result, PublicResult):
        said = {"followed": result.followed, "loss": result.loss, "logits": result.logits}
        known = {n: t for n, t in said.items() if t is not None}
        return _named(weights=result.weights, said=known)
    assert isinstance(result, SplitResult)
    totals = {n: torch.tensor(x, dtype=torch.float64) for n, x in result.totals.items()}
    halves = {f"{i}/{n}": t for i, half in enumerate(result.halves) for n, t in half.items()}
    return _named(weights=result.weights, halves=halves, totals=totals, sums={"": result.sums})


def start(job: Any) -> dict[str, Tensor]:
    """The values that training begins with, by the names of `values`."""
    if isinstance(job, SplitJob):
        halves = {f"{i}/{n}": t for i, one in enumerate(job.lent) for n, t in one.weights.items()}
        return _named(weights=job.weights, halves=halves)
    if isinstance(job, EarlyStoppedJob):
        job = job.work
    moving: Mapping[str, Tensor] = {}
    if isinstance(job, TrainJob | PublicJob):
        names = job.moves if isinstance(job, PublicJob) else _moves(job)
        moving = {n: job.weights[n] for n in names}
    return _named(weights=moving)


def _moves(job: TrainJob) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for phase in job.phases for name in phase.moves))


def _named(**parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}/{name}": t for part, named in parts.items() for name, t in named.items()}


def _finite(job: Any, result: Any) -> bool:
    """Whether all numbers are finite, but for constants that never were and a course's best."""
    weights = job.work.weights if isinstance(job, EarlyStoppedJob) else job.weights
    never = {f"weights/{n}" for n, t in weights.items() if not bool(t.isfinite().all())}
    never.add("at/course")
    return all(n in never or bool(t.isfinite().all()) for n, t in values(result).items())
