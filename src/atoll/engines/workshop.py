"""Does the work that clients yield: one after another, or those of one form together.

`auto` tries both on the first batches of a round, holds the fast way to the slow one within a
stated tolerance, and takes the faster; what it chose and why is kept with the run, and on this
machine for later runs, so that equal runs choose alike. A stack's losses take all members at once
if that gives what the loop gives; else torch.func maps them over the members; else the works are
done one by one. A stack that finds no memory is done in halves.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.learning import convolutions, models, stacked, train
from atoll.learning.convolutions import Timing
from atoll.learning.stacked import (
    NotStackableError,
    Stack,
    form,
    largest_difference,
    signature,
    tally,
)
from atoll.learning.train import Optimiser, Tally, Work

__all__ = ["Choice", "Mode", "Workshop"]

Mode = Literal["auto", "loop", "stacked"]
# Relative, after the batches of a trial in double precision: in single precision the first steps
# of Adam take the sign of gradients that are rounding errors, and nothing could be told from it.
TOLERANCE = 1e-8
TRIAL = 3  # batches of a trial
SAMPLE = 8  # members that the trial does one by one
STACKS = 8  # stacks that keep their buffers
CACHE = 24 << 20  # bytes of weights, gradients and moments that a CPU's cache may hold
CONVOLUTION = "convolution "
PLANNED = "; in parts: planned"
HALVED = "; in parts: out of memory"
WAYS: tuple[Literal["batched", "mapped"], ...] = ("batched", "mapped")
GAIN = 0.95  # a stack must need less than this share of the loop's time


@dataclass(frozen=True)
class Choice:
    """How works of one form are done, and why."""

    work: str  # what it is, in short
    members: int
    mode: Literal["loop", "stacked"]
    reason: str
    difference: float = 0.0  # between the two ways, relative, largest over all weights
    tolerance: float = 0.0
    ratio: float = 0.0  # time of the loop over time of the stack, in the trial
    way: Literal["", "batched", "mapped"] = ""  # how a stack's losses see many members
    parts: int = 1  # stacks that members are dealt to: as memory allows, as a cache is large


class Workshop:
    """Where works are done; remembers what it chose."""

    def __init__(
        self, mode: Mode = "auto", folder: Path | None = None, tf32: bool = False, parts: int = 1
    ) -> None:
        """`parts`: how many stacks works of one form are dealt to, by a plan of memory."""
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        self.mode, self.folder, self.parts = mode, folder, parts
        self.choices: dict[str, Choice] = choices(folder) if folder else {}
        convolutions.CHOSEN.update(_kept_timings() | _timings(self.choices.values()))
        self._decided: dict[Hashable, str] = {}
        self._stacks: dict[Hashable, Stack] = {}

    def do(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
        """The results of jobs by the id of who asked for them.

        On a GPU one client alone may be a stack too: its steps are then a graph.
        """
        groups: dict[Hashable, list[str]] = {}
        for id, job in jobs.items():
            groups.setdefault(self._form(id, job), []).append(id)
        done: dict[str, Any] = {}
        for key, ids in groups.items():
            works = [jobs[id] for id in ids]
            worth = len(ids) > 1 or (not isinstance(key, str) and works[0].rows.y.is_cuda)
            together = worth and self._choice(key, works).mode == "stacked"
            results = self._in_parts(key, works) if together else [job() for job in works]
            done |= dict(zip(ids, results, strict=True))
        return done

    def _form(self, id: str, job: Any) -> Hashable:
        if self.mode == "loop":
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
            name = _name(f"{key!r} x 2^{size} on {_machine(jobs[0])}")
            if self.mode == "stacked" and name not in self.choices:
                self._chose(name, _proved(key, jobs))
            elif name not in self.choices:
                self._chose(name, _remembered(name, lambda: _tried(key, jobs)))
            self._decided[key] = name
        return self.choices[self._decided[key]]

    def _in_parts(self, key: Hashable, jobs: Sequence[Any]) -> list[Any]:
        """The results of a stack, or of halves of it, and of halves of these, as memory allows.

        Works change nothing, so those that were done before memory ended are done again.
        """
        choice = self.choices[self._decided[key]]
        size = max(1, -(-len(jobs) // choice.parts))
        try:
            found: list[Any] = []
            for start in range(0, len(jobs), size):
                found += self._together(key, jobs[start : start + size], choice)
            self._tell_convolutions()
            return found
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if size == 1 or not _out_of_memory(error):
                raise
        self._stacks.clear()  # out here, the error and all that its trace held is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        told = choice.reason.removesuffix(HALVED).removesuffix(PLANNED)
        self._tell(
            self._decided[key], replace(choice, parts=2 * choice.parts, reason=told + HALVED)
        )
        return self._in_parts(key, jobs)

    def _together(self, key: Hashable, jobs: Sequence[Any], choice: Choice) -> list[Any]:
        if isinstance(jobs[0], Tally):
            return list(tally(jobs))
        whole = (key, signature(jobs))
        if whole not in self._stacks:
            while len(self._stacks) >= max(STACKS, choice.parts):
                self._stacks.pop(next(iter(self._stacks)))
            self._stacks[whole] = Stack(jobs, mapped=choice.way == "mapped")
        return list(self._stacks[whole](jobs))

    def _tell_convolutions(self) -> None:
        """Keep which way convolutions were done, with the run and for later ones."""
        fresh = {k: t for k, t in convolutions.CHOSEN.items() if _name(k) not in self.choices}
        for key, timing in fresh.items():
            slow, fast = max(timing.seconds.values()), timing.seconds[timing.way]
            work = f"{CONVOLUTION}{key}"
            self._tell(_name(key), Choice(work, 1, "stacked", timing.way, ratio=slow / fast))
        if fresh:
            _keep_timings()

    def _chose(self, name: str, choice: Choice) -> None:
        """Remember a choice, with the run too, so that it resumes the same way."""
        if name not in self.choices:
            if self.parts > choice.parts and choice.mode == "stacked":
                choice = replace(choice, parts=self.parts, reason=choice.reason + PLANNED)
            self._tell(name, choice)

    def _tell(self, name: str, choice: Choice) -> None:
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


def _timings(chosen: Iterable[Choice]) -> dict[str, Timing]:
    """The ways of convolutions among a run's choices."""
    return {
        choice.work.removeprefix(CONVOLUTION): Timing(way, {way: 1.0})
        for choice in chosen
        if choice.work.startswith(CONVOLUTION)
        for way in convolutions.WAYS
        if way == choice.reason
    }


def _kept_timings() -> dict[str, Timing]:
    """The ways that earlier runs on this machine found faster."""
    try:
        body = json.loads((_cache() / "convolutions.json").read_text())
        return {key: Timing(**timing) for key, timing in body.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep_timings() -> None:
    body = {key: asdict(timing) for key, timing in convolutions.CHOSEN.items()}
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        write_whole(_cache() / "convolutions.json", json.dumps(body).encode())
    except (OSError, UserError):  # a cache that cannot be written is no cache
        pass


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "atoll" / "choices"


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _what(key: Any) -> str:
    return str(key[0]) if isinstance(key, tuple) else "work"


def _machine(job: Any) -> str:
    """What a choice depends on beside the form of the work: the device, torch, and our own code."""
    device = job.rows.y.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (stacked, train, models))
    code = hashlib.blake2b(code, digest_size=8).hexdigest().encode()
    return f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, {code!r}"


def _tried(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """Both ways on the first batches: the stack is taken if it gives the same and is faster."""
    proved = _proved(key, jobs)
    if isinstance(jobs[0], Tally) or proved.mode == "loop":
        return proved
    short = [replace(j, rows=j.rows.at(slice(0, TRIAL * j.batch)), epochs=1) for j in jobs]
    loop_seconds = _timed(lambda: [job() for job in short[:SAMPLE]])
    loop_seconds *= len(short) / len(short[:SAMPLE])
    parts, stack_seconds = _fastest(short, proved.way == "mapped")
    ratio = loop_seconds / stack_seconds
    if 1 / ratio > GAIN:
        return replace(proved, mode="loop", reason="the stack is not faster", ratio=ratio, way="")
    return replace(proved, reason="equal and faster", ratio=ratio, parts=parts)


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


def _proved(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """The first way to stack that gives what the loop gives, in double precision; else the loop."""
    known = Choice(_what(key), len(jobs), "stacked", "asked for", tolerance=TOLERANCE)
    if isinstance(jobs[0], Tally):
        return replace(known, reason="a count without gradient", tolerance=0.0)
    exact = [_exact(job, number) for number, job in enumerate(jobs[:SAMPLE])]
    alone, wrong, difference = [job() for job in exact], "", 0.0
    for way in WAYS:
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
    """A few batches of a work in double precision; the last is not full, and others end sooner.

    The rates are those that single precision knows.
    """
    rows = job.rows.at(slice(0, max(1, TRIAL * job.batch - job.batch // 2 - number % 2)))
    return replace(
        job,
        phases=tuple(replace(p, optimiser=_single(p.optimiser)) for p in job.phases),
        weights={n: _double(w) for n, w in job.weights.items()},
        moments={n: _double(m) for n, m in job.moments.items()},
        rows=replace(rows, x=_double(rows.x), own=_double(rows.own)),
        epochs=1,
    )


def _out_of_memory(error: BaseException) -> bool:
    """Whether this is a want of memory: torch has a class for it on GPUs, and words on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _single(how: Optimiser) -> Optimiser:
    """The same with a rate that single precision knows: on a GPU a stack has no other."""
    return replace(how, rate=float(torch.tensor(how.rate, dtype=torch.float32)))


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


def _remembered(name: str, find: Callable[[], Choice]) -> Choice:
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
