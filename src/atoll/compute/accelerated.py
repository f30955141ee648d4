"""What the executor knows of jobs: each type of job has a kind that says how it runs fast.

A kind builds buffers (`Accelerated`) for jobs of one key. It also holds all that the proof, the
autotuner and the checks need to know of this type of job, so these name no type of job.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from atoll.compute.choice import Choice
from atoll.compute.perturb import Draw
from atoll.compute.probe import Probe, Seen

__all__ = ["Accelerated", "Candidate", "Kind"]


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


class Kind(Protocol):
    """What is to be known of a type of job."""

    @property
    def reason(self) -> str:
        """Why it is accelerated, where nothing is timed."""
        ...

    def mode(self, jobs: Sequence[Any]) -> Literal["stacked", "captured"]:
        """How the record calls this acceleration."""
        ...

    # for the proof

    def sample(self, jobs: Sequence[Any], draws: Sequence[Draw]) -> Sequence[Any]:
        """The jobs that take part in a proof."""
        ...

    def exact(self, job: Any, number: int, draw: Draw) -> Any:
        """A short version of a job with the values of this draw."""
        ...

    def reference(self, job: Any) -> Any:
        """The result of the plain loop."""
        ...

    def candidates(self, way: str) -> Sequence[Candidate]:
        """The ways to prove; `way`: this one alone, or first."""
        ...

    def values(self, result: Any) -> dict[str, Tensor]:
        """All numbers of a result by name."""
        ...

    def start(self, job: Any) -> dict[str, Tensor]:
        """The values that training begins with, by the names of `values`."""
        ...

    def weights(self, job: Any) -> Mapping[str, Tensor]:
        """All weights of a job."""
        ...

    # for the autotuner

    def timed(self, jobs: Sequence[Any], choice: Choice) -> Choice:
        """A proved choice, or the loop if that is faster."""
        ...

    def fixed(self, jobs: Sequence[Any], choice: Choice) -> Choice:
        """A proved choice by a fixed rule: nothing is timed."""
        ...

    # for checks during a run

    def seen(self, job: Any, result: Any) -> Seen | None:
        """What a check compares of a result that is seen whole; None: a probe has to look."""
        ...

    def first_steps(self, job: Any, steps: int) -> tuple[Mapping[str, Tensor], Seen]:
        """The start of a job, and what the plain loop has after its first steps."""
        ...
