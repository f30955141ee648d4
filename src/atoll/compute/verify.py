"""Checks while a run goes on: one member's first steps by the loop, from the actual start values.

The accelerated computation does the round as always and copies what the member's buffers hold
after at most eight steps (probe.py). Nothing is computed twice on its side, so graphs,
buffers and random draws are those of a run without checks. The plain loop then does these steps for
that member alone, in the run's own type. Both are compared within a tolerance that the proof has
measured: the rounding error between two correct ways. An apparent error is checked again in double
precision, from the actual values and in the chosen way, so that a converged run, whose gradients
are rounding errors, is not reported as wrong. Losses that differ by more are always an error.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.compute.accelerated import Kind
from atoll.compute.compare import norm_errors
from atoll.compute.probe import Seen
from atoll.compute.proof import Verdict
from atoll.core.federation import Moment

__all__ = ["STEPS", "Verifier", "Verify", "disagreement", "place_of"]

Verify = Literal["sampled", "off", "always"]
STEPS = 8  # of a member that are repeated
ALWAYS = 2  # first rounds of a key that are checked in any case
SHARE = 0.01  # of the elapsed time that later checks may take
FACTOR = 10  # from measured rounding errors to the tolerance
FLOORS = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the tolerance; of others 1e-2
LOSSES = {torch.float64: 1e-8, torch.float32: 1e-3}  # the same for losses
FAR = 0.05  # losses that differ by more than this are not rounding


@dataclass
class _State:
    """The checks of one key so far."""

    checks: int = 0
    place: tuple[int, int] | None = None  # stage and round of the last one
    stages: set[int] = field(default_factory=set)
    cost: float = 0.0  # seconds of the last one


class Verifier:
    """Decides when jobs of a key are checked, and which member."""

    def __init__(self, options: Verify, clock: Callable[[], float] = time.perf_counter) -> None:
        self.options, self.clock = options, clock
        self.began, self.spent = clock(), 0.0
        self._states: dict[Hashable, _State] = {}

    def due(self, key: Hashable, moment: Moment | None, members: int) -> int | None:
        """The member to check now, another one each time; None: no check."""
        if self.options == "off" or not members:
            return None
        state = self._states.setdefault(key, _State())
        if self.options == "always" or self._sampled(state, moment):
            return state.checks % members
        return None

    def _sampled(self, state: _State, moment: Moment | None) -> bool:
        if moment is not None and state.place == (moment.stage, moment.round):
            return False  # one check a round is enough, however many exchanges it has
        if state.checks < ALWAYS or (moment is not None and moment.stage not in state.stages):
            return True
        return self.spent + state.cost <= SHARE * (self.clock() - self.began)

    @contextmanager
    def checking(self, key: Hashable, moment: Moment | None) -> Iterator[None]:
        """Counts a check and the seconds it takes; waits until the device is idle."""
        state = self._states.setdefault(key, _State())
        _wait()
        began = self.clock()
        yield
        state.cost = self.clock() - began
        self.spent += state.cost
        state.checks += 1
        if moment is not None:
            state.place = (moment.stage, moment.round)
            state.stages.add(moment.stage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place_of(moment: Moment | None) -> str:
    """The current place in the run, in words."""
    return "a round" if moment is None else f"round {moment.round + 1} of stage {moment.stage + 1}"


def disagreement(
    kind: Kind, job: Any, actual: Seen, rounding: float, confirm: Callable[[], Verdict]
) -> str:
    """Why a member disagrees with the loop; empty if it agrees.

    `confirm` compares the accelerated way with the loop in double precision, from the actual
    values.
    """
    start, expected = kind.first_steps(job, STEPS)
    dtype = _dtype(kind.weights(job))
    tolerance = max(FLOORS.get(dtype, 1e-2), FACTOR * rounding)
    weights, losses = norm_errors(start, expected, actual)
    if weights <= tolerance and losses <= LOSSES.get(dtype, 1e-2):
        return ""
    if losses <= FAR and confirm().holds:
        return ""
    apart = f"weights {weights:.1e} (tolerance {tolerance:.0e}), losses {losses:.1e}"
    return f"the first steps of a member differ from the loop's: {apart}"


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The type in which a job computes."""
    types = [t.dtype for t in tensors.values() if t.is_floating_point()]
    return types[0] if types else torch.float32
