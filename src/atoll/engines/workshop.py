"""Does the work that clients yield: one after another, or those of one form together.

On a GPU the steps of a client that is done alone may be captured and replayed. `auto` tries such
ways on the first batches of a round, holds the fast way to the slow one within a stated tolerance,
and takes the faster; what it chose and why is kept with the run, and on this machine for later
runs, so that equal runs choose alike.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.engines import kept
from atoll.learning import captured, models, passes, split_nets, stacked, train
from atoll.learning.captured import Captured, NotCapturableError, likeness
from atoll.learning.passes import WAYS, Passes, Together, Way, passes_signature, trial_key
from atoll.learning.stacked import (
    NotStackableError,
    Stack,
    form,
    largest_difference,
    signature,
    tally,
)
from atoll.learning.train import Optimiser, Tally, Work, Worked

__all__ = ["Choice", "Mode", "Workshop"]

Mode = Literal["auto", "loop", "stacked", "captured"]
# Relative, after the batches of a trial in double precision: in single precision the first steps
# of Adam take the sign of gradients that are rounding errors, and nothing could be told from it.
TOLERANCE = 1e-8
TRIAL = 3  # batches of a trial
NOTHING = 1e-3  # a tensor of smaller weights is compared with this
SMALL = 64  # rows of a batch in the trial of captured steps
SAMPLE = 8  # members that the trial does one by one
STACKS = 8  # stacks that keep their buffers
SPLITS = 3  # of split networks, which hold the rows of a stage too
CODE = (stacked, train, models, captured, passes, split_nets)  # what a choice is about
PASSES = 4  # steps of a trial of split networks
CHECKED = 16  # rows of a batch by which ways are compared
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
    way: Way = "grouped"  # split networks: how halves of one shape do their forward pass


class Workshop:
    """Where works are done; remembers what it chose."""

    def __init__(
        self,
        mode: Mode = "auto",
        folder: Path | None = None,
        tf32: bool = False,
        streams: bool = False,
        keep: Path | None = None,
        tune: bool = False,
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, tune
        self.mode, self.folder, self.streams, self.keep = mode, folder, streams, keep
        self.choices: dict[str, Choice] = choices(folder) if folder else {}
        self._decided: dict[Hashable, Choice] = {}
        self._stacks: dict[Hashable, Stack | Together] = {}
        self._captured: dict[Hashable, Captured] = {}

    def do(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
        """The results of jobs by the id of who asked for them; some may be known from before."""
        names = kept.named(jobs, self.keep, f"{self.mode}, {torch.backends.cudnn.allow_tf32}")
        found = {id: kept.load(path, jobs[id]) for id, path in names.items() if path.exists()}
        done = self._do({id: job for id, job in jobs.items() if id not in found})
        for id in names.keys() - found.keys():
            kept.save_as(names[id], done[id])
        return {id: found[id] if id in found else done[id] for id in jobs}

    def _do(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
        groups: dict[Hashable, list[str]] = {}
        for id, job in jobs.items():
            groups.setdefault(self._form(id, job), []).append(id)
        done: dict[str, Any] = {}
        alone: dict[str, Any] = {}
        refused: set[str] = set()
        for key, ids in groups.items():
            works = [jobs[id] for id in ids]
            worth = len(ids) > 1 or _several(key, works[0])
            if worth and self._choice(key, works).mode == "stacked":
                done |= dict(zip(ids, self._together(key, works), strict=True))
            else:
                alone |= dict(zip(ids, works, strict=True))
                refused |= {*ids} if len(ids) > 1 else set()
        return done | self._alone(alone, refused)

    def _alone(self, jobs: Mapping[str, Any], refused: Collection[str] = ()) -> dict[str, Any]:
        """Works that are no stack: replicas together, others one by one, captured if better.

        Those whose stack was `refused` are not tried together once more.
        """
        groups = self._replicas(jobs, refused)
        keys = {tuple(ids): (tuple(ids), likeness(jobs[ids[0]])) for ids in groups}
        for old in self._captured.keys() - set(keys.values()):  # their memory is wanted
            del self._captured[old]
        for ids, key in keys.items():
            if key not in self._captured:
                # graphs that run one after another may share the memory of their activations
                shared = next(iter(self._captured.values())).pool if self._captured else None
                pool = None if self.streams else shared
                self._captured[key] = Captured([jobs[id] for id in ids], pool)
        made = {ids: self._captured[key] for ids, key in keys.items()}
        works = {ids: [jobs[id] for id in ids] for ids in made}
        if self.streams:
            results = captured.done(list(made.values()), list(works.values()))
        else:
            results = [captured.done([one], [works[ids]])[0] for ids, one in made.items()]
        found = {
            id: one
            for ids, several in zip(made, results, strict=True)
            for id, one in zip(ids, several, strict=True)
        }
        return {id: found[id] if id in found else job() for id, job in jobs.items()}

    def _replicas(self, jobs: Mapping[str, Any], refused: Collection[str]) -> list[list[str]]:
        """Works whose steps are captured: those that are alike in one step, if that is better."""
        alike: dict[Hashable, list[str]] = {}
        for id, job in jobs.items():
            if isinstance(job, Work) and self.mode != "loop" and len(job.rows):
                try:
                    alike.setdefault(likeness(job), []).append(id)
                except NotCapturableError:
                    continue
        found: list[list[str]] = []
        for key, ids in alike.items():
            works = [jobs[id] for id in ids]
            several = len(ids) > 1 and not any(id in refused for id in ids)
            if several and captured.replicas(works) and self._as_replicas(key, works):
                found.append(ids)
            else:
                found += [[id] for id in ids if self._to_capture(jobs[id])]
        return found

    def _as_replicas(self, key: Any, jobs: Sequence[Work]) -> bool:
        """Whether works that are alike take their steps together: as asked for, or as tried."""
        if self.mode != "auto":
            return self.mode == "stacked"
        name = _name(f"replicas {_without_rows(key)!r} x {len(jobs)} on {_machine(jobs[0])}")
        if name not in self.choices:
            self._chose(name, _remembered(name, lambda: _tried_replicas(jobs)))
        return self.choices[name].mode == "stacked"

    def _to_capture(self, job: Any) -> bool:
        """Whether steps of this work are captured: as asked for, or on a GPU as a trial says."""
        if not isinstance(job, Work) or self.mode in ("loop", "stacked") or not len(job.rows):
            return False
        try:
            key = ("captured", *_without_rows(likeness(job)))
        except NotCapturableError:
            return False
        if self.mode == "captured":
            return True
        if job.rows.x.device.type != "cuda":
            return False
        if key not in self._decided:
            name = _name(f"{key!r} on {_machine(job)}")
            if name not in self.choices:
                self._chose(name, _remembered(name, lambda: _tried_captured(job)))
            self._decided[key] = self.choices[name]
        return self._decided[key].mode == "captured"

    def _form(self, id: str, job: Any) -> Hashable:
        if self.mode in ("loop", "captured"):
            return id
        try:
            return form(job)
        except NotStackableError as reason:
            choice = Choice(type(job).__name__, 1, "loop", str(reason))
            self._chose(_name(str(reason)), choice)
            return id

    def _choice(self, key: Hashable, jobs: Sequence[Any]) -> Choice:
        """How works of this form are done; tried once, whatever their number is later."""
        if key not in self._decided:
            size = len(jobs).bit_length()  # a choice for 60 members will do for 50
            about = trial_key(jobs[0]) if isinstance(jobs[0], Passes) else key
            name = _name(f"{about!r} x 2^{size} on {_machine(jobs[0])}")
            if self.mode == "stacked":
                self._chose(name, Choice(_what(key), len(jobs), "stacked", "asked for"))
            elif name not in self.choices:
                self._chose(name, _remembered(name, lambda: _tried(key, jobs)))
            self._decided[key] = self.choices[name]
        return self._decided[key]

    def _together(self, key: Hashable, jobs: Sequence[Any]) -> list[Any]:
        if isinstance(jobs[0], Tally):
            return list(tally(jobs))
        passes = isinstance(jobs[0], Passes)
        whole = (key, passes_signature(jobs) if passes else signature(jobs))
        if whole not in self._stacks:
            while len(self._stacks) >= (SPLITS if passes else STACKS):
                self._stacks.pop(next(iter(self._stacks)))
            way = self._decided[key].way
            self._stacks[whole] = Together(jobs, way) if passes else Stack(jobs)
        return list(self._stacks[whole](jobs))

    def _chose(self, name: str, choice: Choice) -> None:
        """Remember a choice, with the run too, so that it resumes the same way."""
        if name in self.choices:
            return
        self.choices[name] = choice
        if self.folder:
            body = {key: asdict(value) for key, value in self.choices.items()}
            write_whole(self.folder / "engine.json", json.dumps(body, indent=1).encode() + b"\n")


def choices(folder: Path) -> dict[str, Choice]:
    """The choices that were kept with a run."""
    path = folder / "engine.json"
    if not path.exists():
        return {}
    try:
        return {name: Choice(**body) for name, body in json.loads(path.read_text()).items()}
    except (ValueError, TypeError) as error:
        raise UserError("not an engine's choices", str(path), "delete the file") from error


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _what(key: Any) -> str:
    return str(key[0]) if isinstance(key, tuple) else "work"


def _several(key: Hashable, job: Any) -> bool:
    """Whether one piece of work may be a stack: split networks have several clients in it, and on
    a GPU the steps of one client are a graph then."""
    return isinstance(job, Passes) or (not isinstance(key, str) and job.rows.y.is_cuda)


def _machine(job: Any) -> str:
    """What a choice depends on beside the form of the work: the device, torch, and our own code."""
    device = job.y.device if isinstance(job, Passes) else job.rows.y.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in CODE)
    code = hashlib.blake2b(code, digest_size=8).hexdigest().encode()
    return f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, {code!r}"


def _tried(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """Both ways on the first batches: the stack is taken if it gives the same and is faster."""
    if isinstance(jobs[0], Tally):
        return Choice(_what(key), len(jobs), "stacked", "a count without gradient")
    if isinstance(jobs[0], Passes):
        return _fastest_way(key, jobs)
    short = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    difference = _difference(short[:SAMPLE])
    tolerance, stack = TOLERANCE, Stack(short)
    loop_seconds, _ = _timed(lambda: [job() for job in short[:SAMPLE]])
    loop_seconds *= len(short) / len(short[:SAMPLE])
    stack(short)  # the first call makes buffers and captures
    stack_seconds, _ = _timed(lambda: stack(short))
    ratio = loop_seconds / stack_seconds
    if difference > tolerance:
        reason = f"the stack differs by {difference:.1e}, more than {tolerance:.0e}"
        return Choice(_what(key), len(jobs), "loop", reason, difference, tolerance, ratio)
    if 1 / ratio > GAIN:
        return Choice(
            _what(key), len(jobs), "loop", "the stack is not faster", difference, tolerance, ratio
        )
    return Choice(
        _what(key), len(jobs), "stacked", "equal and faster", difference, tolerance, ratio
    )


def _fastest_way(key: Hashable, jobs: Sequence[Passes]) -> Choice:
    """Split networks: the fastest way for halves of one shape that gives what each gives alone."""
    if all(lent.still for job in jobs for lent in job.lent):
        return Choice(_what(key), len(jobs), "stacked", "nothing moves at the clients")
    double = [_doubled(_shortened(job, CHECKED)) for job in jobs]
    short = [_shortened(job, job.batches.size) for job in jobs]
    plain, seconds, apart = Together(double, "each")(double), dict[Way, float](), dict[Way, float]()
    for way in WAYS:
        apart[way] = max(map(_halves_apart, plain, Together(double, way, graph=False)(double)))
        if apart[way] > TOLERANCE:
            continue
        together = Together(short, way)
        together(short)  # the first call makes buffers and captures
        seconds[way] = _timed(partial(together, short))[0]
    best = min(seconds, key=lambda way: seconds[way])
    ratio = seconds["each"] / seconds[best]
    reason = "the fastest of " + ", ".join(f"{w} {1000 * s:.1f} ms" for w, s in seconds.items())
    return Choice(_what(key), len(jobs), "stacked", reason, apart[best], TOLERANCE, ratio, best)


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


def _difference(jobs: Sequence[Work]) -> float:
    """The largest difference between both ways, both in double precision and at the same rates."""
    double = [_in_double(job) for job in jobs]
    return max(map(largest_difference, [job() for job in double], Stack(double)(double)))


def _in_double(job: Work) -> Work:
    return replace(
        job,
        phases=tuple(replace(p, optimiser=_single(p.optimiser)) for p in job.phases),
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


def _without_rows(key: Any) -> tuple[Hashable, ...]:
    """A likeness without the sizes of tensors: how steps are best done does not hang on them."""
    phases, _, *rest = key
    return phases, *rest


def _tried_replicas(jobs: Sequence[Work]) -> Choice:
    """Steps together or one by one, on some batches of the full size."""
    few = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    exact = [_by_gradient(_in_double(job)) for job in few]
    together = captured.done([Captured(exact)], [exact])[0]
    difference = max(map(_apart, [job() for job in exact], together))
    seconds = []
    for groups in ([few], [[job] for job in few]):
        made = [Captured(group) for group in groups]
        captured.done(made, groups)  # makes buffers and captures
        seconds.append(_timed(partial(captured.done, made, groups))[0])
    ratio, equal = seconds[1] / seconds[0], difference <= TOLERANCE
    mode: Literal["loop", "stacked"] = "stacked" if equal and 1 / ratio <= GAIN else "loop"
    told = "replicas in one step are faster" if mode == "stacked" else "not faster"
    reason = told if equal else f"replicas differ by {difference:.1e}"
    return Choice("replicas", len(jobs), mode, reason, difference, TOLERANCE, ratio)


def _tried_captured(job: Work) -> Choice:
    """Both ways on some small batches; captured steps are taken if they are equal and faster."""
    small = min(job.batch, SMALL)
    few = replace(job, rows=job.rows.at(slice(0, TRIAL * small)), batch=small, epochs=2)
    exact = _by_gradient(_in_double(few))
    (found,) = captured.done([Captured([exact])], [[exact]])[0]
    difference, one = _apart(exact(), found), Captured([few])
    captured.done([one], [[few]])  # makes buffers and captures
    loop_seconds, _ = _timed(few)
    seconds, _ = _timed(lambda: captured.done([one], [[few]]))
    ratio = loop_seconds / seconds
    equal, faster = difference <= TOLERANCE, 1 / ratio <= GAIN
    mode: Literal["loop", "captured"] = "captured" if equal and faster else "loop"
    told = "equal and faster" if mode == "captured" else "not faster"
    reason = told if equal else f"captured steps differ by {difference:.1e}"
    return Choice("work", 1, mode, reason, difference, TOLERANCE, ratio)


def _single(how: Optimiser) -> Optimiser:
    """The same with a rate that single precision knows: on a GPU a stack has no other."""
    return replace(how, rate=float(torch.tensor(how.rate, dtype=torch.float32)))


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    began = time.perf_counter()
    result = call()
    _wait()
    return time.perf_counter() - began, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _remembered(name: str, find: Callable[[], Choice]) -> Choice:
    """What an earlier run on this machine chose for the same form; else what a trial finds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll" / "choices"
    path = cache / f"{name}.json"
    try:
        return Choice(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        found = find()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(found)).encode())
    except (OSError, UserError):  # a cache that cannot be written is no cache
        pass
    return found
