"""Which way of doing works is right and fast: tried on the first batches, and remembered.

A fast way is held to the slow one within a stated tolerance, in double precision. What was chosen
and why is kept with the run, and on this machine for later runs, so that equal runs choose alike.
A stack's losses take all members at once if that gives what the loop gives; else torch.func maps
them over the members; else the works are done one by one.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.learning import (
    blocks,
    captured,
    convolutions,
    direct,
    models,
    passes,
    split_nets,
    stacked,
    train,
)
from atoll.learning.captured import Captured
from atoll.learning.convolutions import Timing
from atoll.learning.passes import WAYS, Passes, Together, Way
from atoll.learning.stacked import Stack, largest_difference
from atoll.learning.train import Tally, Work, Worked

__all__ = [
    "CONVOLUTION",
    "RUNS",
    "Choice",
    "choices",
    "keep_timings",
    "kept_timings",
    "machine",
    "name_of",
    "proved",
    "remembered",
    "timings",
    "too_few",
    "tried",
    "tried_captured",
    "tried_replicas",
    "what",
    "without_rows",
]

# Relative, after the batches of a trial in double precision: in single precision the first steps
# of Adam take the sign of gradients that are rounding errors, and nothing could be told from it.
TOLERANCE = 1e-8
TRIAL = 3  # batches of a trial
NOTHING = 1e-3  # a tensor of smaller weights is compared with this
SMALL = 64  # rows of a batch in the trial of captured steps
SAMPLE = 8  # members that the trial does one by one
# what a choice is about
CODE = (stacked, train, models, captured, passes, split_nets, blocks, direct)
PASSES = 4  # steps of a trial of split networks
RUNS = 3  # of which it is made at most
CHECKED = 16  # rows of a batch by which ways are compared
CACHE = 24 << 20  # bytes of weights, gradients and moments that a CPU's cache may hold
CONVOLUTION = "convolution "
# how a stack's losses may see many members
SEEN: tuple[Literal["batched", "mapped"], ...] = ("batched", "mapped")
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
        for way in convolutions.WAYS
        if way == choice.reason
    }


def kept_timings() -> dict[str, Timing]:
    """The ways that earlier runs on this machine found faster."""
    try:
        body = json.loads((_cache() / "convolutions.json").read_text())
        return {key: Timing(**timing) for key, timing in body.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep_timings() -> None:
    body = {key: asdict(timing) for key, timing in convolutions.CHOSEN.items()}
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        write_whole(_cache() / "convolutions.json", json.dumps(body).encode())
    except (OSError, UserError):  # a cache that cannot be written is no cache
        pass


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "atoll" / "choices"


def name_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def what(key: Any) -> str:
    return str(key[0]) if isinstance(key, tuple) else "work"


def machine(job: Any) -> str:
    """What a choice depends on beside the form of the work: the device, torch, and our own code."""
    device = job.y.device if isinstance(job, Passes) else job.rows.y.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in CODE)
    code = hashlib.blake2b(code, digest_size=8).hexdigest().encode()
    return f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, {code!r}"


def tried(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """Both ways on the first batches: the stack is taken if it gives the same and is faster."""
    if isinstance(jobs[0], Passes):
        return _fastest_way(key, jobs)
    found = proved(key, jobs)
    if isinstance(jobs[0], Tally) or found.mode == "loop":
        return found
    short = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    loop_seconds = _timed(lambda: [job() for job in short[:SAMPLE]])
    loop_seconds *= len(short) / len(short[:SAMPLE])
    parts, stack_seconds = _fastest(short, found.way == "mapped")
    ratio = loop_seconds / stack_seconds
    if 1 / ratio > GAIN:
        return replace(found, mode="loop", reason="the stack is not faster", ratio=ratio, way="")
    return replace(found, reason="equal and faster", ratio=ratio, parts=parts)


def _fastest(jobs: Sequence[Work], mapped: bool) -> tuple[int, float]:
    """To how many stacks members are dealt, and the seconds of all of them together.

    On a CPU, stacks that fit into its cache may be faster than one that does not.
    """
    found = {}
    for parts in sorted({1, _that_fit(jobs)}):
        some = jobs[: -(-len(jobs) // parts)]
        stack = Stack(some, mapped=mapped)
        stack(some)  # the first call makes buffers and captures
        found[parts] = _timed(partial(stack, some)) * len(jobs) / len(some)
    return min(found.items(), key=lambda item: item[1])


def _that_fit(jobs: Sequence[Work]) -> int:
    """How many stacks there must be for each to fit into a CPU's cache; one on a GPU."""
    job = jobs[0]
    if job.rows.y.is_cuda:
        return 1
    copies = max(4 if phase.optimiser.kind == "adam" else 2 for phase in job.phases)
    moved = sum(job.weights[name].nbytes for phase in job.phases for name in phase.moves)
    return max(1, min(len(jobs) // 2, -(-len(jobs) * moved * copies // CACHE)))


def proved(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """The first way to stack that gives what the loop gives, in double precision; else the loop."""
    known = Choice(what(key), len(jobs), "stacked", "asked for", tolerance=TOLERANCE)
    if isinstance(jobs[0], Tally):
        return replace(known, reason="a count without gradient", tolerance=0.0)
    if isinstance(jobs[0], Passes):
        return replace(known, tolerance=0.0, way="grouped")
    exact = [_exact(job, number) for number, job in enumerate(jobs[:SAMPLE])]
    alone, wrong, difference = [job() for job in exact], "", 0.0
    for way in SEEN:
        try:
            done = Stack(exact, mapped=way == "mapped")(exact)
        except Exception as error:  # a loss may fail in any way on what it was not written for
            wrong += f"; {way}: {type(error).__name__}: {error}"[:200]
            continue
        difference = max(map(largest_difference, alone, done))
        if difference <= TOLERANCE:
            return replace(known, difference=difference, way=way)
        wrong += f"; {way}: the stack differs by {difference:.1e}, more than {TOLERANCE:.0e}"
    return replace(known, mode="loop", reason=wrong.removeprefix("; "), difference=difference)


def _exact(job: Work, number: int) -> Work:
    """A few batches of a work in double precision; the last is not full, and others end sooner."""
    rows = job.rows.at(slice(0, max(1, TRIAL * job.batch - job.batch // 2 - number % 2)))
    return replace(
        job,
        weights={n: _double(w) for n, w in job.weights.items()},
        moments={n: _double(m) for n, m in job.moments.items()},
        rows=replace(rows, x=_double(rows.x), own=_double(rows.own)),
        epochs=1,
    )


def _fastest_way(key: Hashable, jobs: Sequence[Passes]) -> Choice:
    """Split networks: the fastest way for halves of one shape that gives what each gives alone."""
    if all(lent.still for job in jobs for lent in job.lent):
        found = Choice(what(key), len(jobs), "stacked", "nothing moves at the clients")
        return replace(found, way="grouped")
    some = jobs[:RUNS]
    double = [_doubled(_shortened(job, CHECKED)) for job in some]
    short = [_shortened(job, job.batches.size) for job in some]
    plain, seconds, apart = Together(double, "each")(double), dict[Way, float](), dict[Way, float]()
    for way in WAYS:
        apart[way] = max(map(_halves_apart, plain, Together(double, way, graph=False)(double)))
        if apart[way] > TOLERANCE:
            continue
        together = Together(short, way)
        together(short)  # the first call makes buffers and captures
        seconds[way] = _timed(partial(together, short))
    best = min(seconds, key=lambda way: seconds[way])
    ratio = seconds["each"] / seconds[best]
    reason = "the fastest of " + ", ".join(f"{w} {1000 * s:.1f} ms" for w, s in seconds.items())
    return Choice(what(key), len(jobs), "stacked", reason, apart[best], TOLERANCE, ratio, best)


def _shortened(job: Passes, size: int) -> Passes:
    """The first rows of passes, in a few batches of at most this size."""
    size = min(size, job.batches.size)
    rows = min(job.batches.rows, PASSES * size)
    batches = replace(job.batches, rows=rows, size=size)
    lent = tuple(replace(one, x=one.x[:rows], keys=one.keys[: len(batches)]) for one in job.lent)
    return replace(job, y=job.y[:rows], batches=batches, steps=len(batches), lent=lent)


def _doubled(job: Passes) -> Passes:
    lent = tuple(
        replace(
            one,
            x=_double(one.x),
            weights={n: _double(w) for n, w in one.weights.items()},
            before={n: _double(w) for n, w in one.before.items()},
        )
        for one in job.lent
    )
    top, given = ({n: _double(t) for n, t in part.items()} for part in (job.weights, job.given))
    return replace(job, weights=top, given=given, lent=lent)


def _halves_apart(one: Any, other: Any) -> float:
    """The largest difference between two results of passes, relative to the largest weight."""
    pairs = [(one.weights, other.weights), *zip(one.halves, other.halves, strict=True)]
    return max(
        float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp(min=1e-12))
        for a, b in pairs
        for n in a
    )


def _in_double(job: Work) -> Work:
    return replace(
        job,
        weights={n: _double(w) for n, w in job.weights.items()},
        moments={n: _double(m) for n, m in job.moments.items()},
        rows=replace(job.rows, x=_double(job.rows.x), own=_double(job.rows.own)),
    )


def _by_gradient(job: Work) -> Work:
    """The same work with plain steps: a weight whose true gradient is 0, as a shift before a batch
    norm has it, gets a rounding error for one, and Adam would take the sign of that.
    """
    plain = [replace(p, optimiser=replace(p.optimiser, kind="sgd")) for p in job.phases]
    return replace(job, phases=tuple(plain), moments={})


def _apart(one: Worked, other: Worked) -> float:
    """The largest difference of two results, relative to weights that are more than nothing."""
    found = 0.0
    for name, tensor in one.weights.items():
        if tensor.is_floating_point() and tensor.numel():
            scale = max(float(tensor.abs().max()), NOTHING)
            found = max(found, float((tensor - other.weights[name]).abs().max()) / scale)
    return found


def without_rows(key: Any) -> tuple[Hashable, ...]:
    """A likeness without the sizes of tensors: how steps are best done does not hang on them."""
    phases, _, *rest = key
    return phases, *rest


def tried_replicas(jobs: Sequence[Work]) -> Choice:
    """Steps together or one by one, on some batches of the full size."""
    few = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    exact = [_by_gradient(_in_double(job)) for job in few]
    together = captured.done([Captured(exact)], [exact])[0]
    difference = max(map(_apart, [job() for job in exact], together))
    seconds = []
    for groups in ([few], [[job] for job in few]):
        made = [Captured(group) for group in groups]
        captured.done(made, groups)  # makes buffers and captures
        seconds.append(_timed(partial(captured.done, made, groups)))
    ratio, equal = seconds[1] / seconds[0], difference <= TOLERANCE
    mode: Literal["loop", "stacked"] = "stacked" if equal and 1 / ratio <= GAIN else "loop"
    told = "replicas in one step are faster" if mode == "stacked" else "not faster"
    reason = told if equal else f"replicas differ by {difference:.1e}"
    return Choice("replicas", len(jobs), mode, reason, difference, TOLERANCE, ratio)


def tried_captured(job: Work) -> Choice:
    """Both ways on some small batches; captured steps are taken if they are equal and faster."""
    small = min(job.batch, SMALL)
    few = replace(job, rows=job.rows.at(slice(0, TRIAL * small)), batch=small, epochs=2)
    exact = _by_gradient(_in_double(few))
    (found,) = captured.done([Captured([exact])], [[exact]])[0]
    difference, one = _apart(exact(), found), Captured([few])
    captured.done([one], [[few]])  # makes buffers and captures
    ratio = _timed(few) / _timed(lambda: captured.done([one], [[few]]))
    equal, faster = difference <= TOLERANCE, 1 / ratio <= GAIN
    mode: Literal["loop", "captured"] = "captured" if equal and faster else "loop"
    told = "equal and faster" if mode == "captured" else "not faster"
    reason = told if equal else f"captured steps differ by {difference:.1e}"
    return Choice("work", 1, mode, reason, difference, TOLERANCE, ratio)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


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
    if not isinstance(jobs[0], Work):
        return False
    steps: int = sum(job.epochs * -(-len(job.rows) // job.batch) for job in jobs)
    # of each in the sample: twice in double precision, once warm, twice timed; and stacks of all
    trial = TRIAL * (5 * min(len(jobs), SAMPLE) + 2 * len(jobs))
    return rounds * steps < 2 * trial


def remembered(name: str, find: Callable[[], Choice]) -> Choice:
    """What an earlier run on this machine chose for the same form; else what a trial finds."""
    path = _cache() / f"{name}.json"
    try:
        return Choice(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        found = find()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(found)).encode())
    except (OSError, UserError):  # a cache that cannot be written is no cache
        pass
    return found
