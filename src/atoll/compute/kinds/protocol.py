"""Two ways to accelerate: one computation for many jobs, or captured buffers for each."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.compute.accelerated import Accelerated, Kind
from atoll.compute.autotune import Tuner
from atoll.compute.choice import Choice
from atoll.compute.probe import Probe

__all__ = ["Capture", "CaptureKind", "StackKind"]


class StackKind(Kind, Protocol):
    """Jobs of one key run as one computation."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of the engine in which they do."""
        ...

    @property
    def kept(self) -> int:
        """How many buffers the executor keeps."""
        ...

    @property
    def halves(self) -> bool:
        """Whether a stack can be split where memory ends."""
        ...

    def obstacle(self, job: Any) -> str:
        """Why a job with a key cannot be part of a stack; empty if it can."""
        ...

    def worth(self, jobs: Sequence[Any]) -> bool:
        """Whether these may be a stack: several, or one where that is faster too."""
        ...

    def about(self, key: Hashable, jobs: Sequence[Any]) -> Hashable:
        """What the choice for these jobs is about."""
        ...

    def choose(self, tuner: Tuner, about: Hashable, jobs: Sequence[Any]) -> Choice:
        """Whether and how these jobs are stacked."""
        ...

    def rests_on(self, job: Any) -> Sequence[Hashable]:
        """What else was chosen for it, and falls with it."""
        ...

    def build(self, jobs: Sequence[Any], way: str) -> Accelerated:
        """Buffers for these jobs."""
        ...


@dataclass(frozen=True)
class Capture:
    """Jobs that share captured buffers: one, or several replicas that step together."""

    about: Hashable  # what their choice is about
    ids: tuple[str, ...]
    layout: Hashable  # what the buffers depend on


class CaptureKind(Kind, Protocol):
    """Each job runs in buffers of its own, side by side with the others."""

    @property
    def prunes(self) -> bool:
        """Whether to give up the buffers of jobs that do not come."""
        ...

    def captures(
        self, tuner: Tuner, jobs: Mapping[str, Any], refused: frozenset[str]
    ) -> list[Capture]:
        """The jobs to capture; those whose stack was `refused` are not stepped together."""
        ...

    def lane(self, capture: Capture, streams: bool) -> str:
        """The name of the lane on which it runs."""
        ...

    def build(self, jobs: Sequence[Any], lane: Any) -> Any:
        """Buffers for these jobs."""
        ...

    def run(
        self,
        buffers: Sequence[Any],
        jobs: Sequence[Sequence[Any]],
        streams: bool,
        probes: Sequence[Probe | None],
    ) -> list[list[Any]]:
        """Run jobs, with `streams` side by side."""
        ...
