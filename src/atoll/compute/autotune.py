"""Which way of doing works is right and fast: tried on the first batches, and remembered.

A fast way is held to the slow one within a stated tolerance, in double precision (proof.py). What
was chosen and why is kept with the run, and on this machine for later runs, under a name that
changes with the source of all that it depends on (cache_key.py). A stack's losses take all members
at once if that gives what the loop gives; else torch.func maps them over the members; else the
works are done one by one.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from atoll.compute import captured
from atoll.compute.cache import Key
from atoll.compute.captured import Captured
from atoll.compute.proof import (
    SAMPLE,
    TOLERANCE,
    Verdict,
    first_steps,
    prove_captured,
    prove_passes,
    prove_public,
    prove_stack,
    prove_tally,
    prove_watch,
)
from atoll.compute.split_rounds import WAYS, SplitStack, Way
from atoll.compute.stacking import Stack
from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.jobs.early_stopping import EarlyStoppedJob
from atoll.jobs.public_step import PublicJob
from atoll.jobs.split_round import SplitJob
from atoll.jobs.train import EvalJob, TrainJob
from atoll.kernels import batched_layers
from atoll.kernels.batched_layers import Timing

__all__ = [
    "CONVOLUTION",
    "RUNS",
    "Choice",
    "choices",
    "keep_timings",
    "kept_timings",
    "name_of",
    "proved",
    "proved_captured",
    "proved_passes",
    "proved_public",
    "proved_watch",
    "remember",
    "remembered",
    "stacks_that_fit",
    "timed_ways",
    "timings",
    "too_few",
    "tried",
    "tried_captured",
    "tried_replicas",
    "what",
]

TRIAL = 3  # batches of a trial
SMALL = 64  # rows of a batch in the trial of captured steps
RUNS = 3  # runs of split networks that a trial is made of at most
CACHE = 24 << 20  # bytes of weights, gradients and moments that a CPU's cache may hold
CONVOLUTION = "convolution "
FAR = 1e300  # stands for a difference that is not finite, which JSON has no number for
GAIN = 0.95  # a stack must need less than this share of the loop's time


@dataclass(frozen=True)
class Choice:
    """How works of one form are done, and why."""

    work: str  # what it is, in short
    members: int
    mode: Literal["loop", "stacked", "captured"]
    reason: str
    difference: float = 0.0  # between the two ways, relative, largest over all weights
    tolerance: float = 0.0
    ratio: float = 0.0  # time of the loop over time of the other way, in the trial
    way: Literal["", "batched", "mapped"] | Way = ""  # how many members go through one computation
    parts: int = 1  # stacks that members are dealt to: as memory allows, as a cache is large
    rounding: float = 0.0  # between the two ways in the run's own type, which checks allow for
    refuted: str = ""  # where a check during a run found another result than the loop's


def choices(folder: Path) -> dict[str, Choice]:
    """The choices that were kept with a run."""
    path = folder / "engine.json"
    if not path.exists():
        return {}
    try:
        return {name: Choice(**body) for name, body in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError("not an engine's choices", str(path), "delete the file") from error


def timings(chosen: Iterable[Choice]) -> dict[str, Timing]:
    """The ways of convolutions among a run's choices."""
    return {
        choice.work.removeprefix(CONVOLUTION): Timing(way, {way: 1.0})
        for choice in chosen
        if choice.work.startswith(CONVOLUTION)
        for way in batched_layers.WAYS
        if way == choice.reason
    }


def kept_timings() -> dict[str, Timing]:
    """The ways that earlier runs on this machine found faster."""
    try:
        body = json.loads((_cache() / "batched_layers.json").read_text())
        return {key: Timing(**timing) for key, timing in body.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep_timings() -> None:
    body = {key: asdict(timing) for key, timing in batched_layers.CHOSEN.items()}
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        write_whole(_cache() / "batched_layers.json", json.dumps(body).encode())
    except (OSError, UserError):  # a cache that cannot be written is no cache
        pass


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "atoll" / "choices"


def name_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def what(key: Any) -> str:
    return str(key[0]) if isinstance(key, tuple) else "work"


def tried(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """Both ways on the first batches: the stack is taken if it gives the same and is faster."""
    found = proved(key, jobs)
    if isinstance(jobs[0], EvalJob) or found.mode == "loop":
        return found
    short = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    loop_seconds = _timed(lambda: [job.run() for job in short[:SAMPLE]])
    loop_seconds *= len(short) / len(short[:SAMPLE])
    parts, stack_seconds = _fastest(short, found.way == "mapped")
    ratio = loop_seconds / stack_seconds
    if 1 / ratio > GAIN:
        return replace(found, mode="loop", reason="the stack is not faster", ratio=ratio, way="")
    return replace(found, reason="equal and faster", ratio=ratio, parts=parts)


def _fastest(jobs: Sequence[TrainJob], mapped: bool) -> tuple[int, float]:
    """To how many stacks members are dealt, and the seconds of all of them together.

    On a CPU, stacks that fit into its cache may be faster than one that does not.
    """
    found = {}
    for parts in sorted({1, stacks_that_fit(jobs)}):
        some = jobs[: -(-len(jobs) // parts)]
        stack = Stack(some, mapped=mapped)
        stack(some)  # the first call makes buffers and captures
        found[parts] = _timed(partial(stack, some)) * len(jobs) / len(some)
    return min(found.items(), key=lambda item: item[1])


def stacks_that_fit(jobs: Sequence[TrainJob]) -> int:
    """How many stacks there must be for each to fit into a CPU's cache; one on a GPU."""
    job = jobs[0]
    if job.rows.y.is_cuda:
        return 1
    copies = max(4 if phase.optimiser.kind == "adam" else 2 for phase in job.phases)
    moved = sum(job.weights[name].nbytes for phase in job.phases for name in phase.moves)
    return max(1, min(len(jobs) // 2, -(-len(jobs) * moved * copies // CACHE)))


def proved(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """The first way to stack that gives what the loop gives, in double precision; else the loop."""
    verdict = prove_tally(jobs) if isinstance(jobs[0], EvalJob) else prove_stack(jobs)
    reason = "a count without gradient" if isinstance(jobs[0], EvalJob) else "asked for"
    return _judged(what(key), len(jobs), verdict, "stacked", reason)


def _judged(
    work: str, members: int, verdict: Verdict, mode: Literal["stacked", "captured"], reason: str
) -> Choice:
    """The choice of a mode if it is proved, else of the loop."""
    apart = min(verdict.difference, FAR)
    if not verdict.way:
        return Choice(work, members, "loop", verdict.reason, apart, TOLERANCE)
    way = verdict.way if mode == "stacked" and verdict.way != "replicas" else ""
    found = Choice(work, members, mode, reason, apart, TOLERANCE, way=cast("Any", way))
    return replace(found, rounding=verdict.rounding)


def timed_ways(key: Hashable, jobs: Sequence[SplitJob]) -> Choice:
    """Split networks: which way for halves of one shape is fastest; nothing is proved here."""
    if all(lent.still for job in jobs for lent in job.lent):
        found = Choice(what(key), len(jobs), "stacked", "nothing moves at the clients")
        return replace(found, way="grouped")
    short = [first_steps(job, job.batches.size) for job in jobs[:RUNS]]
    seconds = dict[Way, float]()
    for way in WAYS:
        together = SplitStack(short, way)
        together(short)  # the first call makes buffers and captures
        seconds[way] = _timed(partial(together, short))
    best = min(seconds, key=lambda way: seconds[way])
    ratio = seconds["each"] / seconds[best]
    reason = "the fastest of " + ", ".join(f"{w} {1000 * s:.1f} ms" for w, s in seconds.items())
    return Choice(what(key), len(jobs), "stacked", reason, ratio=ratio, way=best)


def proved_passes(key: Hashable, jobs: Sequence[SplitJob], timing: Choice) -> Choice:
    """The fastest way for split networks if it gives what each run gives alone, else another."""
    order = sorted(WAYS, key=lambda way: way != timing.way)
    verdict = prove_passes(jobs[:RUNS], order)
    found = _judged(what(key), len(jobs), verdict, "stacked", timing.reason)
    return replace(found, ratio=timing.ratio if found.way == timing.way else 0.0)


def proved_watch(jobs: Sequence[EarlyStoppedJob]) -> Choice:
    """All epochs of a round in one computation, if that gives what each member gives alone."""
    return _judged("watched", len(jobs), prove_watch(jobs), "stacked", "equal")


def proved_public(job: PublicJob) -> Choice:
    """Steps on public images in captured buffers, if they give what plain steps give."""
    return _judged("public step", 1, prove_public(job), "captured", "equal")


def proved_captured(jobs: Sequence[TrainJob]) -> Choice:
    """Steps in captured buffers, of one work or of replicas together, if they give the same."""
    if len(jobs) > 1:
        return _judged("replicas", len(jobs), prove_captured(jobs), "stacked", "asked for")
    return _judged("work", 1, prove_captured(jobs), "captured", "asked for")


def tried_replicas(jobs: Sequence[TrainJob]) -> Choice:
    """Steps together or one by one, on some batches of the full size."""
    found = proved_captured(jobs)
    if found.mode == "loop":
        return found
    few = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    seconds = []
    for groups in ([few], [[job] for job in few]):
        made = [Captured(group) for group in groups]
        captured.done(made, groups)  # makes buffers and captures
        seconds.append(_timed(partial(captured.done, made, groups)))
    ratio = seconds[1] / seconds[0]
    if 1 / ratio > GAIN:
        return replace(found, mode="loop", reason="not faster", ratio=ratio)
    return replace(found, reason="replicas in one step are faster", ratio=ratio)


def tried_captured(job: TrainJob) -> Choice:
    """Both ways on some small batches; captured steps are taken if they are equal and faster."""
    found = proved_captured([job])
    if found.mode == "loop":
        return found
    small = min(job.batch, SMALL)
    few = replace(job, rows=job.rows.at(slice(0, TRIAL * small)), batch=small, epochs=2)
    one = Captured([few])
    captured.done([one], [[few]])  # makes buffers and captures
    ratio = _timed(few.run) / _timed(lambda: captured.done([one], [[few]]))
    if 1 / ratio > GAIN:
        return replace(found, mode="loop", reason="not faster", ratio=ratio)
    return replace(found, reason="equal and faster", ratio=ratio)


def _timed(call: Callable[[], Any]) -> float:
    """Seconds, the better of two tries."""
    found = []
    for _ in range(2):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        found.append(time.perf_counter() - began)
    return min(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def too_few(jobs: Sequence[Any], rounds: int) -> bool:
    """Whether all steps of these works are fewer than two trials take: so much none could gain."""
    if not isinstance(jobs[0], TrainJob):
        return False
    steps: int = sum(job.epochs * -(-len(job.rows) // job.batch) for job in jobs)
    # of each in the sample: twice in double precision, twice in its own, twice timed, and some
    # that warm up; and stacks of all
    trial = TRIAL * (8 * min(len(jobs), SAMPLE) + 2 * len(jobs))
    return rounds * steps < 2 * trial


def remembered(key: Key, find: Callable[[], Choice]) -> Choice:
    """What an earlier run on this machine chose for the same work; else what a trial finds."""
    if not key.lasting:
        return find()
    try:
        return Choice(**json.loads((_cache() / f"{key.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        found = find()
    remember(key.name, found)
    return found


def remember(name: str, choice: Choice) -> None:
    """Keep a choice for later runs on this machine."""
    path = _cache() / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(choice)).encode())
    except (OSError, UserError):  # a cache that cannot be written is no cache
        pass
