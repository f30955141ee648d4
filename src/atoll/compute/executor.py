"""The executor: runs the jobs that clients yield one by one, or those of one form together.

On a GPU the steps of a client that runs alone may be captured and replayed. With `auto` the
autotuner chooses a candidate (autotune.py); no candidate is used without a proof (proof.py). A
stack that runs out of memory is split in halves.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch

from atoll.compute import captured, shared_training
from atoll.compute.autotune import (
    CONVOLUTION,
    RUNS,
    Choice,
    choices,
    keep_timings,
    kept_timings,
    name_of,
    proved,
    proved_captured,
    proved_passes,
    proved_public,
    proved_watch,
    remember,
    remembered,
    timed_ways,
    timings,
    too_few,
    what,
)
from atoll.compute.cache import UNRESOLVED, Key, cache_key
from atoll.compute.captured import Captured, step_key
from atoll.compute.deterministic import BY_TIMING, EQUAL, FIXED
from atoll.compute.early_stopping import EarlyStoppedStack
from atoll.compute.graphs import Lane
from atoll.compute.probe import Probe, Seen
from atoll.compute.proof import (
    ACTUAL,
    Verdict,
    first_steps,
    prove_captured,
    prove_passes,
    prove_public,
    prove_stack,
    prove_tally,
    prove_watch,
    sampled,
)
from atoll.compute.public_steps import CapturedStep, capturable, stepped
from atoll.compute.split_rounds import SplitStack, Way, split_signature, trial_key
from atoll.compute.stacking import Stack, obstacle, signature, tally
from atoll.compute.verify import STEPS, Verifier, Verify, disagreement, place_of, seen_of
from atoll.core.errors import out_of_memory
from atoll.core.federation import Moment
from atoll.core.record import write_whole
from atoll.jobs.early_stopping import EarlyStoppedJob, EarlyStoppedResult
from atoll.jobs.public_step import PublicJob
from atoll.jobs.split_round import SplitJob
from atoll.jobs.train import EvalJob, TrainJob
from atoll.kernels import batched_layers

__all__ = ["Executor", "JobExecutor", "Mode"]

Mode = Literal["auto", "loop", "stacked", "captured"]
STACKS = 8  # stacks that keep their buffers
WATCHES = 4  # the same, of those whose epochs are one computation
SPLITS = 3  # of split networks, which hold the rows of a stage too
LOCAL = ""  # stands for all clients
PLANNED = "; in parts: planned"
HALVED = "; in parts: out of memory"


class JobExecutor(Protocol):
    """Runs jobs."""

    @property
    def mode(self) -> str:
        """auto, loop or stacked."""
        ...

    def do(self, jobs: Mapping[str, Any], moment: Moment | None = None) -> dict[str, Any]:
        """The results of jobs by the id of who asked for them."""
        ...


class Executor:
    """Where works are done; remembers what it chose."""

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
        """`parts`: how many stacks works of one form are dealt to, by a plan of memory.

        `rounds`: how often works of one form will be asked for; 0 where nobody knows.
        `deterministic`: choose by fixed rules instead of by timing.
        `verify`: when results are held to the loop's during the run (verify.py), by this clock.
        """
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, tune
        self.mode, self.folder, self.streams, self.keep = mode, folder, streams, keep
        self.parts, self.rounds, self.deterministic = parts, rounds, deterministic
        self.rules = FIXED if deterministic else BY_TIMING
        self._ways: dict[str, batched_layers.Way] = {}  # of convolutions, chosen by a fixed rule
        self.verifier, self.moment = Verifier(verify, clock), cast("Moment | None", None)
        known = choices(folder) if folder else {}
        self.choices = {n: c for n, c in known.items() if not n.startswith(UNRESOLVED)}
        batched_layers.CHOSEN.update(kept_timings() | timings(self.choices.values()))
        batched_layers.TAKEN.clear()
        self._decided: dict[Hashable, str] = {}
        self._stacks: dict[Hashable, Stack | SplitStack] = {}
        self._watches: list[tuple[Hashable, EarlyStoppedStack]] = []
        self._captured: dict[tuple[tuple[str, ...], Hashable], Captured] = {}
        self._steps: dict[str, tuple[Hashable, CapturedStep]] = {}  # by client
        self._lanes: dict[str, Lane] = {}  # by client: where its graphs run

    def do(self, jobs: Mapping[str, Any], moment: Moment | None = None) -> dict[str, Any]:
        """The results of jobs by the id of who asked for them; some may be known from before.

        `moment`: where the run stands, by which it is known when results are checked.
        """
        self.moment = moment
        how = f"{self.mode}, {torch.backends.cudnn.allow_tf32}{self.rules.name}"
        names = shared_training.named(jobs, self.keep, how)
        fixed = batched_layers.fixed_ways(self._ways) if self.deterministic else nullcontext()
        with shared_training.alone(names), fixed:
            found = {
                id: shared_training.load(path, jobs[id])
                for id, path in names.items()
                if path.exists()
            }
            done = self._do({id: job for id, job in jobs.items() if id not in found})
            for id in names.keys() - found.keys():
                shared_training.save_as(names[id], done[id])
        return {id: found[id] if id in found else done[id] for id in jobs}

    def _do(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
        public = {id: job for id, job in jobs.items() if isinstance(job, PublicJob)}
        watched = {id: job for id, job in jobs.items() if isinstance(job, EarlyStoppedJob)}
        common = self._common(jobs) if self.deterministic else {}
        apart = public.keys() | watched.keys() | common.keys()
        rest = {id: job for id, job in jobs.items() if id not in apart}
        return common | self._public(public) | self._watched(watched) | self._works(rest)

    def _common(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
        """Works that other runs have too, each by itself.

        In a stack their last bits would depend on who else is in it. Here they depend on the work
        alone, so all methods that begin with it go on from the same bits.
        """
        done: dict[str, Any] = {}
        for id, job in jobs.items():
            if isinstance(job, TrainJob) and job.common:
                done |= self._alone({id: job})
        return done

    def _public(self, jobs: Mapping[str, PublicJob]) -> dict[str, Any]:
        """Steps on public images: captured as asked for, on a GPU also where nothing is."""
        made: dict[str, CapturedStep] = {}
        keys: dict[Hashable, list[str]] = {}
        for id, job in jobs.items():
            cuda = next(iter(job.weights.values())).is_cuda
            if self.mode == "captured" or (self.mode == "auto" and cuda):
                key = job.key() if capturable(job) else None
                if key is not None and self._public_proved(key, job):
                    made[id] = self._captured_step(id, key, job)
                    keys.setdefault(key, []).append(id)
        parts = [list(made)] if self.streams else [[id] for id in made]
        found: dict[str, Any] = {}
        for ids in parts:
            done = stepped([made[id] for id in ids], [jobs[id] for id in ids])
            found |= dict(zip(ids, done, strict=True))
        for key, ids in keys.items():
            if not self._public_verified(key, {id: jobs[id] for id in ids}, found):
                found = {id: one for id, one in found.items() if id not in ids}
                self._steps = {id: one for id, one in self._steps.items() if id not in ids}
        return {id: found[id] if id in found else job.run() for id, job in jobs.items()}

    def _public_verified(
        self, key: Hashable, jobs: Mapping[str, PublicJob], found: Mapping[str, Any]
    ) -> bool:
        """Whether steps of a form are what the loop gives, as far as they are looked at."""
        member = self.verifier.due(key, self.moment, len(jobs))
        if member is None:
            return True
        id, job = list(jobs.items())[member]
        refused = Verdict("", math.inf, "nothing to follow yet")
        confirm = lambda: refused if job.follow is None else prove_public(job, ACTUAL)  # noqa: E731
        return self._verified(key, job, seen_of(job, found[id]), confirm)

    def _public_proved(self, key: Hashable, job: PublicJob) -> bool:
        """Whether captured steps are proved; until there is a batch to follow they are not."""
        if key not in self._decided:
            if job.follow is None:
                return False
            named = cache_key(key, next(iter(job.weights.values())).device)
            self._decide(key, named, lambda: remembered(named, lambda: proved_public(job)))
        return self.choices[self._decided[key]].mode == "captured"

    def _captured_step(self, id: str, form: Hashable, job: PublicJob) -> CapturedStep:
        known = self._steps.get(id)
        if known is None or known[0] != form or not known[1].fits(job):
            self._steps.pop(id, None)  # its memory is wanted
            device = next(iter(job.weights.values())).device
            self._steps[id] = form, CapturedStep(job, self._lane(id, device))
        return self._steps[id][1]

    def _lane(self, id: str, device: torch.device) -> Lane:
        """Where a client's graphs run: those of local and of public steps take turns.

        Where clients' graphs run one after another, all lanes are on one stream and local steps
        have one for all: another run of a sweep may be at them while public steps wait.
        """
        if id not in self._lanes:
            first = next(iter(self._lanes.values()), None)
            shared = None if self.streams or first is None else first.stream
            self._lanes[id] = Lane(device, shared)
        return self._lanes[id]

    def _watched(self, jobs: Mapping[str, EarlyStoppedJob]) -> dict[str, EarlyStoppedResult]:
        """On a GPU all epochs of a stack are one computation; else epoch by epoch."""
        if self.mode == "loop":
            return {id: job.run() for id, job in jobs.items()}
        groups: dict[Hashable, list[str]] = {}
        for id, job in jobs.items():
            if (
                job.work.rows.y.is_cuda
                and not isinstance(self._form(id, job.first), str)
                and job.key()
            ):
                groups.setdefault(job.key(), []).append(id)
        done: dict[str, EarlyStoppedResult] = {}
        for key, ids in groups.items():
            works = [jobs[id].first for id in ids]
            choice = self._choice(works[0].key(), works)
            whole = choice.mode == "stacked" and choice.way == "batched"
            if whole and self._watch_proved(key, [jobs[id] for id in ids]):
                found = self._watch(key, [jobs[id] for id in ids])
                done |= dict(zip(ids, found, strict=False))
        return done | self._by_epochs({id: jobs[id] for id in jobs if id not in done})

    def _watch_proved(self, key: Hashable, jobs: Sequence[EarlyStoppedJob]) -> bool:
        """Whether all epochs of a round may be one computation."""
        about = ("watch", key, len(jobs).bit_length())
        if about not in self._decided:
            named = cache_key(about, jobs[0].work.rows.y.device)
            self._decide(about, named, lambda: remembered(named, lambda: proved_watch(jobs)))
        return self.choices[self._decided[about]].mode == "stacked"

    def _watch(self, key: Hashable, jobs: Sequence[EarlyStoppedJob]) -> list[EarlyStoppedResult]:
        """Members of a stack that is there already are done in it, if they are most of it.

        Where memory ends nothing is done: epoch by epoch a stack can be done in halves.
        """
        fitting = (watch for known, watch in self._watches if known == key and watch.fits(jobs))
        about = ("watch", key, len(jobs).bit_length())
        member = self.verifier.due(about, self.moment, len(jobs))
        probe = None if member is None else Probe(member, STEPS)
        try:
            watch = next(fitting, None)
            if watch is None:
                watch = EarlyStoppedStack(jobs)
                self._watches = [*self._watches[1 - WATCHES :], (key, watch)]
            found = watch(jobs, probe)
            if probe is None or self._probed(
                about, jobs, probe, partial(prove_watch, draws=ACTUAL)
            ):
                return found
            self._refute(jobs[0].first.key(), self.choices[self._decided[about]].reason)
            return [job.run() for job in jobs]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        self._watches.clear()
        return []

    def _by_epochs(self, jobs: Mapping[str, EarlyStoppedJob]) -> dict[str, EarlyStoppedResult]:
        """Works and counts of all that are watched, side by side."""
        parts = {id: job.parts() for id, job in jobs.items()}
        done: dict[str, EarlyStoppedResult] = {}
        results: dict[str, Any] = dict.fromkeys(parts)
        while results:
            wanted: dict[str, Any] = {}
            for id, result in results.items():
                try:
                    wanted[id] = parts[id].send(result)
                except StopIteration as end:
                    done[id] = end.value
            results = self._works(wanted)
        return done

    def _works(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
        if not jobs:
            return {}  # no reason to give up what was captured
        groups: dict[Hashable, list[str]] = {}
        for id, job in jobs.items():
            groups.setdefault(self._form(id, job), []).append(id)
        done: dict[str, Any] = {}
        alone: dict[str, Any] = {}
        refused: set[str] = set()
        for key, ids in groups.items():
            works = [jobs[id] for id in ids]
            worth = len(ids) > 1 or _several(key, works[0])
            if worth and self._choice(key, works, self.rounds).mode == "stacked":
                done |= dict(zip(ids, self._in_parts(key, works), strict=True))
            else:
                alone |= dict(zip(ids, works, strict=True))
                refused |= {*ids} if len(ids) > 1 else set()
        return done | self._alone(alone, refused)

    def _alone(self, jobs: Mapping[str, Any], refused: Collection[str] = ()) -> dict[str, Any]:
        """Works that are no stack: replicas together, others one by one, captured if better.

        Those whose stack was `refused` are not tried together once more.
        """
        groups = self._replicas(jobs, refused)
        keys = {tuple(ids): (tuple(ids), _layout(jobs[ids[0]])) for _, ids in groups}
        for old in self._captured.keys() - set(keys.values()):  # their memory is wanted
            del self._captured[old]
        for ids, key in keys.items():
            if key not in self._captured:
                # graphs that run one after another may share the memory of their activations
                lane = self._lane(ids[0] if self.streams else LOCAL, jobs[ids[0]].rows.y.device)
                self._captured[key] = Captured([jobs[id] for id in ids], lane)
        made = {ids: self._captured[key] for ids, key in keys.items()}
        works = {ids: [jobs[id] for id in ids] for ids in made}
        probes = self._captured_probes(groups)
        looks = [probes.get(ids) for ids in made]
        results = captured.done(list(made.values()), list(works.values()), self.streams, looks)
        found = {
            id: one
            for ids, several in zip(made, results, strict=True)
            for id, one in zip(ids, several, strict=True)
        }
        for wrong in self._captured_wrong(groups, works, probes):
            found = {id: one for id, one in found.items() if id not in wrong}
            self._captured = {k: c for k, c in self._captured.items() if wrong.isdisjoint(k[0])}
        return {id: found[id] if id in found else job.run() for id, job in jobs.items()}

    def _captured_probes(
        self, groups: Sequence[tuple[Hashable, list[str]]]
    ) -> dict[tuple[str, ...], Probe]:
        """Probes of the works, captured alone or as replicas, that are to be checked now."""
        found: dict[tuple[str, ...], Probe] = {}
        for about in dict.fromkeys(about for about, _ in groups):
            seats = [(tuple(ids), n) for a, ids in groups if a == about for n in range(len(ids))]
            place = self.verifier.due(about, self.moment, len(seats))
            if place is not None:
                ids, member = seats[place]
                found[ids] = Probe(member, STEPS)
        return found

    def _captured_wrong(
        self,
        groups: Sequence[tuple[Hashable, list[str]]],
        works: Mapping[tuple[str, ...], Sequence[TrainJob]],
        probes: Mapping[tuple[str, ...], Probe],
    ) -> Iterator[set[str]]:
        """All who asked for works of a form whose check has failed."""
        confirm = partial(prove_captured, draws=ACTUAL)
        for about, ids in groups:
            probe = probes.get(tuple(ids))
            if probe and not self._probed(about, works[tuple(ids)], probe, confirm):
                yield {id for other, several in groups if other == about for id in several}

    def _replicas(
        self, jobs: Mapping[str, Any], refused: Collection[str]
    ) -> list[tuple[Hashable, list[str]]]:
        """Works whose steps are captured: those that are alike in one step, if that is better.

        Each with what its choice is about.
        """
        alike: dict[tuple[Hashable, int], list[str]] = {}
        for id, job in jobs.items():
            if isinstance(job, TrainJob) and self.mode != "loop" and len(job.rows):
                key = step_key(job)
                if key is not None:
                    alike.setdefault((key, len(job.rows)), []).append(id)
        found: list[tuple[Hashable, list[str]]] = []
        for (key, _), ids in alike.items():
            works = [jobs[id] for id in ids]
            several = len(ids) > 1 and not any(id in refused for id in ids)
            if several and captured.replicas(works) and self._as_replicas(key, works):
                found.append((_replicas_key(key, works), ids))
            else:
                single = ("captured", key)
                found += [(single, [id]) for id in ids if self._to_capture(single, jobs[id])]
        return found

    def _as_replicas(self, key: Any, jobs: Sequence[TrainJob]) -> bool:
        """Whether works that are alike take their steps together: as asked for, or as tried."""
        if self.mode not in ("auto", "stacked"):
            return False
        about = _replicas_key(key, jobs)
        if about not in self._decided:
            named = self._key(about, jobs[0].rows.y.device)
            if self.mode == "stacked":
                self._decide(about, named, lambda: proved_captured(jobs))
            else:
                find = lambda: self.rules.replicas(jobs)  # noqa: E731
                self._decide(about, named, lambda: remembered(named, find))
        return self.choices[self._decided[about]].mode == "stacked"

    def _to_capture(self, key: Hashable, job: TrainJob) -> bool:
        """Whether steps of this work are captured: as asked for, or on a GPU as a trial says."""
        if self.mode != "captured" and (self.mode == "stacked" or not job.rows.x.is_cuda):
            return False
        if key not in self._decided:
            named = self._key(key, job.rows.y.device)
            if self.mode == "captured":
                self._decide(key, named, lambda: proved_captured([job]))
            else:
                find = lambda: self.rules.captured(job)  # noqa: E731
                self._decide(key, named, lambda: remembered(named, find))
        return self.choices[self._decided[key]].mode == "captured"

    def _key(self, about: Hashable, device: torch.device) -> Key:
        """The key of a choice by these rules: what was timed is not taken for what is fixed."""
        return cache_key((about, self.rules.name), device)

    def _form(self, id: str, job: Any) -> Hashable:
        if self.mode in ("loop", "captured"):
            return id
        reason = obstacle(job)
        if not reason:
            return cast("Hashable", job.key())
        self._chose(name_of(reason), Choice(type(job).__name__, 1, "loop", reason))
        return id

    def _choice(self, key: Hashable, jobs: Sequence[Any], rounds: int = 0) -> Choice:
        """How works of this form are done; tried once, whatever their number is later.

        If they come back in so few `rounds` that a trial would take longer than it could gain, they
        are done one by one.
        """
        if key not in self._decided:
            if isinstance(jobs[0], SplitJob):
                self._choose_passes(key, jobs)
            else:
                self._choose(key, jobs, rounds)
        return self.choices[self._decided[key]]

    def _choose(self, key: Hashable, jobs: Sequence[Any], rounds: int) -> None:
        size = len(jobs).bit_length()  # a choice for 60 members will do for 50
        named = self._key((key, size), jobs[0].rows.y.device)
        if self.mode == "stacked":
            self._decide(key, named, lambda: proved(key, jobs))
        elif rounds > 0 and too_few(jobs, rounds):
            little = Choice(what(key), len(jobs), "loop", "too little to try both ways")
            self._decide(key, named, lambda: little)
        else:
            find = lambda: self.rules.works(key, jobs)  # noqa: E731
            self._decide(key, named, lambda: remembered(named, find))

    def _choose_passes(self, key: Hashable, jobs: Sequence[SplitJob]) -> None:
        """Which way is fastest depends on the halves alone; whether it is right, on all the rest.

        So a later stage, with another loss, is proved again and not timed again.
        """
        runs = min(len(jobs), RUNS)
        reason = EQUAL if self.deterministic else "asked for"
        timing = Choice(what(key), runs, "stacked", reason, way="grouped")
        device = jobs[0].y.device
        if self.mode != "stacked" and not self.deterministic:
            about = (trial_key(jobs[0]), runs)
            clocked = cache_key(about, device)
            find = lambda: remembered(clocked, lambda: timed_ways(key, jobs))  # noqa: E731
            self._decide(about, clocked, find)
            timing = self.choices[clocked.name]
        named = cache_key((first_steps(jobs[0]).key(), runs), device)
        self._decide(key, named, lambda: proved_passes(key, jobs, timing))

    def _decide(self, key: Hashable, named: Key, find: Callable[[], Choice]) -> None:
        """What is known under a name holds for a form of work; else what is found."""
        if named.name not in self.choices:
            self._chose(named.name, find())
        self._decided[key] = named.name

    def _in_parts(self, key: Hashable, jobs: Sequence[Any]) -> list[Any]:
        """The results of a stack, or of halves of it, and of halves of these, as memory allows.

        Works change nothing, so those that were done before memory ended are done again.
        """
        choice = self.choices[self._decided[key]]
        size = max(1, -(-len(jobs) // choice.parts))
        member = self.verifier.due(key, self.moment, len(jobs))
        try:
            found: list[Any] = []
            agrees = True
            for start in range(0, len(jobs), size):
                part, place = jobs[start : start + size], -1 if member is None else member - start
                probe = Probe(place, STEPS) if 0 <= place < len(part) else None
                results = self._together(key, part, choice, probe)
                if probe is not None:
                    confirm, result = partial(_again, choice), results[place]
                    agrees = self._probed(key, part, probe, confirm, result)
                found += results
            self._tell_convolutions()
            return found if agrees else [job.run() for job in jobs]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if size == 1 or not out_of_memory(error):
                raise
        self._stacks.clear()  # out here, the error and all that its trace held is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        told = choice.reason.removesuffix(HALVED).removesuffix(PLANNED)
        self._tell(
            self._decided[key], replace(choice, parts=2 * choice.parts, reason=told + HALVED)
        )
        return self._in_parts(key, jobs)

    def _probed(
        self,
        key: Hashable,
        jobs: Sequence[Any],
        probe: Probe,
        confirm: Callable[[Sequence[Any]], Verdict],
        result: Any = None,
    ) -> bool:
        """Whether the member that a probe looked at has what the loop gives."""
        job = jobs[probe.member]
        seen = seen_of(job, result) or probe.seen
        others = sampled(jobs, probe.member)
        return self._verified(key, job, seen, lambda: confirm(others))

    def _verified(
        self, key: Hashable, job: Any, seen: Seen | None, confirm: Callable[[], Verdict]
    ) -> bool:
        """Whether what was seen of a member is what the loop gives; if not, the record says so."""
        if seen is None:  # it has no steps
            return True
        with self.verifier.checking(key, self.moment):
            rounding = self.choices[self._decided[key]].rounding
            try:
                wrong = disagreement(job, seen, rounding, confirm)
            except RuntimeError as error:  # a check that finds no memory is left out
                if not out_of_memory(error):
                    raise
                wrong = ""
        if wrong:
            self._refute(key, f"{place_of(self.moment)}: {wrong}; from there one by one")
        return not wrong

    def _refute(self, key: Hashable, reason: str) -> None:
        """Do works of a form by the loop from now on, in later runs on this machine too."""
        name = self._decided[key]
        choice = replace(self.choices[name], mode="loop", reason=reason, refuted=reason)
        self._tell(name, choice)
        if not name.startswith(UNRESOLVED):
            remember(name, choice)
        for stack in [known for known in self._stacks if cast("Any", known)[0] == key]:
            del self._stacks[stack]

    def _together(
        self, key: Hashable, jobs: Sequence[Any], choice: Choice, probe: Probe | None = None
    ) -> list[Any]:
        if isinstance(jobs[0], EvalJob):
            return list(tally(jobs))
        passes = isinstance(jobs[0], SplitJob)
        whole = (key, split_signature(jobs) if passes else signature(jobs))
        if whole not in self._stacks:
            while len(self._stacks) >= (SPLITS if passes else max(STACKS, choice.parts)):
                self._stacks.pop(next(iter(self._stacks)))
            if passes:
                self._stacks[whole] = SplitStack(jobs, cast("Way", choice.way))
            else:
                self._stacks[whole] = Stack(jobs, mapped=choice.way == "mapped")
        stack = self._stacks[whole]
        return list(stack(jobs, probe) if probe else stack(jobs))

    def _tell_convolutions(self) -> None:
        """Keep which way convolutions were done, with the run and for later ones."""
        taken = {k: batched_layers.CHOSEN[k] for k in sorted(batched_layers.TAKEN)}
        fresh = {k: t for k, t in taken.items() if name_of(k) not in self.choices}
        for key, timing in fresh.items():
            slow, fast = max(timing.seconds.values()), timing.seconds[timing.way]
            work = f"{CONVOLUTION}{key}"
            self._tell(name_of(key), Choice(work, 1, "stacked", timing.way, ratio=slow / fast))
        if fresh:
            keep_timings()

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


def _layout(job: TrainJob) -> Hashable:
    """What the buffers of captured steps depend on."""
    return step_key(job), len(job.rows)


def _replicas_key(key: Any, jobs: Sequence[TrainJob]) -> Hashable:
    """What the choice to step replicas together is about."""
    return ("replicas", key, len(jobs))


def _again(choice: Choice, jobs: Sequence[Any]) -> Verdict:
    """The way of a choice, held to the loop from the actual values in double precision."""
    if isinstance(jobs[0], EvalJob):
        return prove_tally(jobs, ACTUAL)
    if isinstance(jobs[0], SplitJob):
        return prove_passes(jobs[:RUNS], [cast("Way", choice.way)], ACTUAL)
    return prove_stack(jobs, ACTUAL, choice.way)


def _several(key: Hashable, job: Any) -> bool:
    """Whether one piece of work may be a stack: split networks have several clients in it, and on
    a GPU the steps of one client are a graph then."""
    return isinstance(job, SplitJob) or (not isinstance(key, str) and job.rows.y.is_cuda)
