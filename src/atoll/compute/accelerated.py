"""What the executor knows of jobs: each type of job has a kind that describes how to accelerate it.

A kind is a table of functions. It holds all that the proof, the autotuner and the checks need to
know of a type of job, so these name no type of job. A kind accelerates in one of two ways: one
computation for many jobs (`StackKind`), or captured buffers for each (`CaptureKind`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from atoll.compute.choice import Choice
from atoll.compute.perturb import Draw
from atoll.compute.probe import Probe, Seen
from atoll.jobs.identity import rowwise

__all__ = [
    "Accelerated",
    "Candidate",
    "Capture",
    "CaptureKind",
    "Kind",
    "Rules",
    "StackKind",
    "padding_obstacle",
]


class Accelerated(Protocol):
    """Buffers, and on a GPU graphs, in which jobs run fast; built once and used every round."""

    def fits(self, jobs: Sequence[Any]) -> bool:
        """Whether these jobs can run in these buffers."""
        ...

    def run(self, jobs: Sequence[Any], probe: Probe | None = None) -> list[Any]:
        """Run jobs; a probe copies what its member has after the first steps."""
        ...


@dataclass(frozen=True)
class Candidate:
    """An accelerated way to run jobs."""

    way: str
    run: Callable[[Sequence[Any]], Sequence[Any]]


def _stacked(jobs: Sequence[Any]) -> Literal["stacked", "captured"]:
    return "stacked"


def _unchanged(jobs: Sequence[Any], choice: Choice) -> Choice:
    return choice


@dataclass(frozen=True, eq=False)
class Kind:
    """What the proof, the autotuner and the checks need to know of a type of job."""

    reason: str  # why it is accelerated, where nothing is timed
    # for the proof
    exact: Callable[[Any, int, Draw], Any]  # job, number, draw -> a short job with drawn values
    candidates: Callable[[str], Sequence[Candidate]]  # the ways to prove; by name: this one alone
    values: Callable[[Any], dict[str, Tensor]]  # all numbers of a result by name
    start: Callable[[Any], dict[str, Tensor]]  # values before training, by the names of `values`
    # for checks: job, steps -> the start, and what the plain loop has after so many steps
    first_steps: Callable[[Any, int], tuple[Mapping[str, Tensor], Seen]]
    # what a check compares of a result that is seen whole; None: a probe reads it
    seen: Callable[[Any, Any], Seen | None] = lambda job, result: None
    mode: Callable[[Sequence[Any]], Literal["stacked", "captured"]] = _stacked  # in the record
    sample: Callable[[Sequence[Any], Sequence[Draw]], Sequence[Any]] = lambda jobs, draws: jobs
    reference: Callable[[Any], Any] = lambda job: job.run()  # the result of the plain loop
    weights: Callable[[Any], Mapping[str, Tensor]] = lambda job: job.weights
    # for the autotuner: a proved choice, or the loop if that is faster; by time, by a fixed rule
    timed: Callable[[Sequence[Any], Choice], Choice] = _unchanged
    fixed: Callable[[Sequence[Any], Choice], Choice] = _unchanged


@dataclass(frozen=True)
class Rules:
    """How to decide between the loop and a way that is proved."""

    name: str  # part of the cache key: choices of different rules are kept apart
    finish: Callable[[Kind, Sequence[Any], Choice], Choice]


def padding_obstacle(job: Any) -> str:
    """Why a job cannot be padded; empty if it can."""
    return "" if rowwise(job.functions) else "padding would change its batch statistics"


@dataclass(frozen=True, eq=False)
class StackKind:
    """Jobs of one key run as one computation."""

    kind: Kind
    obstacle: Callable[[Any], str]  # why a job cannot be part of a stack; empty if it can
    worth: Callable[[Sequence[Any]], bool]  # whether these may be a stack: several, or one too
    choose: Callable[[Any, Hashable, Sequence[Any]], Choice]  # tuner, about, jobs -> how they run
    build: Callable[[Sequence[Any], str], Accelerated]  # jobs, way -> their buffers
    modes: tuple[str, ...] = ("auto", "stacked")  # of the engine, in which jobs are stacked
    pool_size: int = 1  # how many buffers the executor keeps
    halves: bool = True  # whether a stack can be split where memory ends
    about: Callable[[Hashable], Hashable] = lambda key: key  # what the choice for jobs is about
    rests_on: Callable[[Any], Sequence[Hashable]] = (
        lambda job: ()
    )  # other choices that fall with it


@dataclass(frozen=True)
class Capture:
    """Jobs that share captured buffers: one, or several replicas that step together."""

    about: Hashable  # what their choice is about
    ids: tuple[str, ...]
    layout: Hashable  # what the buffers depend on


@dataclass(frozen=True, eq=False)
class CaptureKind:
    """Each job runs in buffers of its own, side by side with the others."""

    kind: Kind
    # tuner, jobs, ids whose stack was refused -> the jobs to capture
    captures: Callable[[Any, Mapping[str, Any], frozenset[str]], list[Capture]]
    lane: Callable[[Capture, bool], str]  # the name of the lane; True: jobs run side by side
    build: Callable[[Sequence[Any], Any], Any]  # jobs, lane -> their buffers
    # buffers, jobs, whether side by side, probes -> results
    run: Callable[
        [Sequence[Any], Sequence[Sequence[Any]], bool, Sequence[Probe | None]], list[list[Any]]
    ]
    prunes: bool = False  # whether to give up the buffers of jobs that do not come
