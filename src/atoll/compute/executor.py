"""The executor: runs the jobs that clients yield, those of one key together.

It looks up the kind of each job (kinds/), asks the autotuner whether its accelerated way is proved
and faster, and falls back to `run()` with a reason in the record. A stack that runs out of memory
is split in halves.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from atoll.compute import shared_training
from atoll.compute.accelerated import Accelerated, Capture, CaptureKind, Kind, StackKind
from atoll.compute.autotune import Tuner
from atoll.compute.choice import Choice
from atoll.compute.choice_files import (
    CONVOLUTION,
    keep_timings,
    name_of,
    stored_timings,
    timings,
)
from atoll.compute.deterministic import BY_TIMING, FIXED
from atoll.compute.graphs import Lane
from atoll.compute.kinds import CAPTURED, COMPOSED, STACKED
from atoll.compute.perturb import ACTUAL
from atoll.compute.probe import Probe
from atoll.compute.proof import prove, sampled
from atoll.compute.verify import STEPS, Verifier, Verify, disagreement, place_of
from atoll.core.errors import note_client, out_of_memory
from atoll.core.federation import Moment
from atoll.jobs.identity import no_identity
from atoll.kernels.batched_layers import Timings, Way, fixed_ways, timed_ways

__all__ = ["Executor", "JobExecutor", "Mode"]

Mode = Literal["auto", "loop", "stacked", "captured"]
Jobs = Mapping[str, Any]  # by the id of the client that asks
Results = dict[str, Any]


class JobExecutor(Protocol):
    """Runs jobs."""

    @property
    def mode(self) -> str:
        """auto, loop, stacked or captured."""
        ...

    def do(self, jobs: Jobs, moment: Moment | None = None) -> Results:
        """The results of jobs by the id of their client."""
        ...


class Executor:
    """Runs jobs, and keeps buffers and choices for later rounds."""

    def __init__(  # noqa: PLR0913 - the engine's options, each by its name
        self,
        mode: Mode = "auto",
        folder: Path | None = None,
        *,
        tf32: bool = False,
        streams: bool = False,
        keep: Path | None = None,
        tune: bool = False,
        parts: int = 1,
        rounds: int = 0,
        deterministic: bool = False,
        verify: Verify = "off",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`parts`: how many stacks jobs of one key are dealt to, by a plan of memory.

        `rounds`: how often jobs of one key will come; 0: unknown.
        `deterministic`: choose by fixed rules instead of by timing.
        `verify`: when results are compared with the loop's during the run (verify.py).
        """
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, tune
        self.mode, self.streams, self.keep, self.deterministic = mode, streams, keep, deterministic
        self.tuner = Tuner(mode, folder, FIXED if deterministic else BY_TIMING, parts, rounds)
        self.verifier = Verifier(verify, clock)
        self.moment: Moment | None = None
        self._ways: dict[str, Way] = {}  # of convolutions, chosen by a fixed rule
        self._timings = Timings(stored_timings() | timings(self.choices.values()))
        self._stacks: dict[StackKind, list[tuple[Hashable, Accelerated]]] = {}
        self._captured: dict[tuple[CaptureKind, tuple[str, ...], Hashable], Any] = {}
        self._lanes: dict[str, Lane] = {}  # by client: where its graphs run

    @property
    def choices(self) -> dict[str, Choice]:
        """The choices, by their names in the cache."""
        return self.tuner.choices

    def do(self, jobs: Jobs, moment: Moment | None = None) -> Results:
        """The results of jobs by the id of their client; some may come from the cache.

        `moment`: the current place in the run, which decides when results are checked.
        """
        self.moment = moment
        settings = f"{self.mode}, {torch.backends.cudnn.allow_tf32}{self.tuner.rules.name}"
        names = shared_training.files_of(jobs, self.keep, settings)
        ways = fixed_ways(self._ways) if self.deterministic else timed_ways(self._timings)
        with shared_training.alone(names), ways:
            stored = {
                id: shared_training.load(path, jobs[id])
                for id, path in names.items()
                if path.exists()
            }
            results = self._run({id: job for id, job in jobs.items() if id not in stored})
            for id in names.keys() - stored.keys():
                shared_training.save_as(names[id], results[id])
        return {id: stored[id] if id in stored else results[id] for id in jobs}

    def _run(self, jobs: Jobs) -> Results:
        if self.mode == "loop":
            return {id: _alone(id, job) for id, job in jobs.items()}
        results = self._common(jobs) if self.deterministic else {}
        stacked, refused = self._stack(_without(jobs, results))
        results |= stacked
        composed = {id: job for id, job in jobs.items() if type(job) in COMPOSED}
        composed = _without(composed, results)
        results |= self._capture(_without(jobs, results | composed), refused)
        results |= self._compose(composed)
        return {id: results[id] if id in results else _alone(id, job) for id, job in jobs.items()}

    def _common(self, jobs: Jobs) -> Results:
        """Jobs that other runs have too, one by one.

        In a stack their last bits would depend on the other members. Here they depend on the job
        alone, so all methods that begin with it continue from the same bits.
        """
        results: Results = {}
        for id, job in jobs.items():
            if getattr(job, "common", False):
                alone = self._capture({id: job})
                results[id] = alone[id] if alone else _alone(id, job)
        return results

    def _compose(self, jobs: Jobs) -> Results:
        """Jobs that consist of other jobs: their parts run together."""
        parts = {id: COMPOSED[type(job)](job) for id, job in jobs.items()}
        results: Results = {}
        answers: Results = dict.fromkeys(parts)
        while answers:
            pending: Results = {}
            for id, answer in answers.items():
                try:
                    pending[id] = parts[id].send(answer)
                except StopIteration as end:
                    results[id] = end.value
            answers = self._run(pending)
        return results

    # many jobs in one computation

    def _stack(self, jobs: Jobs) -> tuple[Results, frozenset[str]]:
        """The results of stacked jobs, and the clients of groups that are not stacked."""
        results: Results = {}
        refused: set[str] = set()
        for (kind, key, _), ids in self._groups(jobs).items():
            works = [jobs[id] for id in ids]
            about = kind.about(key)
            if kind.worth(works) and kind.choose(self.tuner, about, works).mode == "stacked":
                stacked = self._in_parts(kind, about, works)
                results |= dict(zip(ids, stacked or (), strict=stacked is not None))
            elif len(ids) > 1:
                refused |= {*ids}
        return results, frozenset(refused)

    def _groups(self, jobs: Jobs) -> dict[tuple[StackKind, Hashable, str], list[str]]:
        """The clients whose jobs may be one stack; records the reason for the others."""
        groups: dict[tuple[StackKind, Hashable, str], list[str]] = {}
        for id, job in jobs.items():
            kind = STACKED.get(type(job))
            if kind is None and type(job) not in CAPTURED:
                self.tuner.refuse(job, f"no acceleration for {type(job).__name__}")
            if kind is None or self.mode not in kind.modes:
                continue
            key = job.key()
            reason = no_identity(job.functions) if key is None else kind.obstacle(job)
            if reason:
                self.tuner.refuse(job, reason)
                continue
            alone = id if self.mode == "captured" else ""
            groups.setdefault((kind, key, alone), []).append(id)
        return groups

    def _in_parts(self, kind: StackKind, about: Hashable, jobs: Sequence[Any]) -> list[Any] | None:
        """The results of a stack, or of halves of it, and of halves of these, as memory allows.

        Jobs change nothing, so those that ran before memory ran out run again. None: not enough
        memory for a stack that cannot be halved.
        """
        choice = self.tuner[about]
        size = max(1, -(-len(jobs) // choice.parts)) if kind.halves else len(jobs)
        member = self.verifier.due(about, self.moment, len(jobs))
        try:
            results: list[Any] = []
            agrees = True
            for start in range(0, len(jobs), size):
                part, place = jobs[start : start + size], -1 if member is None else member - start
                probe = Probe(place, STEPS) if 0 <= place < len(part) else None
                buffers = self._buffers(kind, about, part, choice)
                part_results = buffers.run(part, probe) if probe else buffers.run(part)
                if probe is not None:
                    agrees = self._verified(kind.kind, about, part, probe, part_results[place])
                results += part_results
            self._note_convolutions()
            return results if agrees else [job.run() for job in jobs]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if (kind.halves and size == 1) or not out_of_memory(error):
                raise
        self._stacks.clear()  # here, the error and the tensors of its traceback are released
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not kind.halves:
            return None
        self.tuner.halve(about)
        return self._in_parts(kind, about, jobs)

    def _buffers(
        self, kind: StackKind, about: Hashable, jobs: Sequence[Any], choice: Choice
    ) -> Accelerated:
        """Buffers that fit these jobs; the oldest make room for new ones."""
        pool = self._stacks.setdefault(kind, [])
        for key, buffers in pool:
            if key == about and buffers.fits(jobs):
                return buffers
        del pool[: max(0, len(pool) + 1 - max(kind.pool_size, choice.parts))]
        built = kind.build(jobs, choice.way)
        pool.append((about, built))
        return built

    # each job in captured buffers

    def _capture(self, jobs: Jobs, refused: frozenset[str] = frozenset()) -> Results:
        """The results of jobs that run in captured buffers."""
        results: Results = {}
        for type_of_job, kind in CAPTURED.items():
            several = {id: job for id, job in jobs.items() if type(job) is type_of_job}
            if several:
                results |= self._captured_by(kind, several, refused)
        return results

    def _captured_by(self, kind: CaptureKind, jobs: Jobs, refused: frozenset[str]) -> Results:
        captures = kind.captures(self.tuner, jobs, refused)
        buffers = self._captured_buffers(kind, captures, jobs)
        works = [[jobs[id] for id in capture.ids] for capture in captures]
        probes = self._probes(captures)
        looks = [probes.get(capture.ids) for capture in captures]
        captured = kind.run(buffers, works, self.streams, looks)
        results: Results = {}
        for capture, several in zip(captures, captured, strict=True):
            results |= dict(zip(capture.ids, several, strict=True))
        for capture, several, probe in zip(captures, works, looks, strict=True):
            if probe is None:
                continue
            result = results.get(capture.ids[probe.member])
            if not self._verified(kind.kind, capture.about, several, probe, result):
                wrong = {id for c in captures if c.about == capture.about for id in c.ids}
                results = {id: result for id, result in results.items() if id not in wrong}
                for place in [p for p in self._captured if p[0] is kind and wrong & {*p[1]}]:
                    del self._captured[place]
        return results

    def _captured_buffers(
        self, kind: CaptureKind, captures: Sequence[Capture], jobs: Jobs
    ) -> list[Any]:
        """The buffers of each capture; frees those that are no longer needed."""
        needed = {(kind, capture.ids, capture.layout) for capture in captures}
        coming = {capture.ids for capture in captures}
        for place in self._captured.keys() - needed:
            if place[0] is kind and (kind.prunes or place[1] in coming):
                del self._captured[place]
        for capture in captures:
            works, place = [jobs[id] for id in capture.ids], (kind, capture.ids, capture.layout)
            if place in self._captured and not self._captured[place].fits(works):
                del self._captured[place]
            if place not in self._captured:
                lane = self._lane(kind.lane(capture, self.streams), kind.kind.weights(works[0]))
                self._captured[place] = kind.build(works, lane)
        return [self._captured[kind, capture.ids, capture.layout] for capture in captures]

    def _lane(self, name: str, weights: Mapping[str, torch.Tensor]) -> Lane:
        """The lane on which a client's graphs run: those of local and public steps alternate.

        Where clients' graphs run one after another, all lanes are on one stream and local steps
        have one for all: another run of a sweep may use them while public steps wait.
        """
        if name not in self._lanes:
            device = next(iter(weights.values())).device
            first = next(iter(self._lanes.values()), None)
            shared = None if self.streams or first is None else first.stream
            self._lanes[name] = Lane(device, shared)
        return self._lanes[name]

    def _probes(self, captures: Sequence[Capture]) -> dict[tuple[str, ...], Probe]:
        """Probes of the jobs that are to be checked now."""
        probes: dict[tuple[str, ...], Probe] = {}
        for about in dict.fromkeys(capture.about for capture in captures):
            ids = [capture.ids for capture in captures if capture.about == about]
            seats = [(several, member) for several in ids for member in range(len(several))]
            place = self.verifier.due(about, self.moment, len(seats))
            if place is not None:
                several, member = seats[place]
                probes[several] = Probe(member, STEPS)
        return probes

    # checks

    def _verified(
        self, kind: Kind, about: Hashable, jobs: Sequence[Any], probe: Probe, result: Any
    ) -> bool:
        """Whether the member of a probe agrees with the loop; if not, the record states it."""
        job, choice = jobs[probe.member], self.tuner[about]
        seen = kind.seen(job, result) or probe.seen
        if seen is None:  # it has no steps
            return True
        others = sampled(jobs, probe.member)
        confirm = lambda: prove(kind, others, ACTUAL, choice.way)  # noqa: E731
        with self.verifier.checking(about, self.moment):
            try:
                wrong = disagreement(kind, job, seen, choice.rounding, confirm)
            except RuntimeError as error:  # without memory, skip the check
                if not out_of_memory(error):
                    raise
                wrong = ""
        if wrong:
            reason = f"{place_of(self.moment)}: {wrong}; from there one by one"
            self._refute(kind, about, job, reason)
        return not wrong

    def _refute(self, kind: Kind, about: Hashable, job: Any, reason: str) -> None:
        """Run such jobs by the loop from now on."""
        stacked = STACKED.get(type(job))
        falls = [about, *(stacked.rests_on(job) if stacked and stacked.kind is kind else ())]
        for fall in falls:
            self.tuner.refute(fall, reason)
        for key, pool in self._stacks.items():
            self._stacks[key] = [stack for stack in pool if stack[0] not in falls]

    def _note_convolutions(self) -> None:
        """Store the ways of convolutions with the run and for later runs."""
        used = {key: self._timings.by_shape[key] for key in sorted(self._timings.used)}
        fresh = {key: timing for key, timing in used.items() if name_of(key) not in self.choices}
        for key, timing in fresh.items():
            slow, fast = max(timing.seconds.values()), timing.seconds[timing.way]
            choice = Choice(f"{CONVOLUTION}{key}", 1, "stacked", timing.way, ratio=slow / fast)
            self.tuner.set(name_of(key), choice)
        if fresh:
            keep_timings(self._timings.by_shape)


def _alone(client: str, job: Any) -> Any:
    """The result of one job; an error names its client."""
    try:
        return job.run()
    except Exception as error:
        note_client(error, client)
        raise


def _without(jobs: Jobs, results: Mapping[str, Any]) -> Results:
    return {id: job for id, job in jobs.items() if id not in results}
