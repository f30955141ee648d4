"""Who decides between ways that are proved equal: a stopwatch, or a fixed rule.

Ways that agree in double precision differ in the last bits of single precision. If the faster one
is taken, the bits of a run depend on how busy the machine is. With `engine.deterministic` nothing
is timed: the accelerated way is taken wherever the proof accepts it, so a choice is a function of
shapes, types, device and code. Torch is restricted to deterministic kernels for the same reason.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.engines.trials import (
    TOLERANCE,
    Choice,
    captured_difference,
    passes_differences,
    proved,
    replicas_difference,
    stacks_that_fit,
    tried,
    tried_captured,
    tried_replicas,
    what,
)
from atoll.learning.convolutions import fixed_ways
from atoll.learning.passes import Passes, Way
from atoll.learning.train import Work

__all__ = ["BY_TIMING", "FIXED", "Rules", "deterministic_torch"]

EQUAL = "equal; a fixed rule, nothing was timed"
PASSES_ORDER: tuple[Way, ...] = ("grouped", "unfolded", "each")  # "each" always agrees
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when a handle is created


@dataclass(frozen=True)
class Rules:
    """How to choose for works of one form, for replicas, and for the steps of one client."""

    name: str  # part of the cache key: choices of different rules are kept apart
    works: Callable[[Hashable, Sequence[Any]], Choice]
    replicas: Callable[[Sequence[Work]], Choice]
    captured: Callable[[Work], Choice]


def fixed_works(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """Stack works wherever the proof accepts it."""
    if isinstance(jobs[0], Passes):
        return _fixed_passes(key, jobs)
    choice = proved(key, jobs)
    if not isinstance(jobs[0], Work) or choice.mode == "loop":
        return choice
    return replace(choice, reason=EQUAL, parts=stacks_that_fit(jobs))


def _fixed_passes(key: Hashable, jobs: Sequence[Passes]) -> Choice:
    """Split networks: the first way in a fixed order that agrees with each client alone."""
    if all(lent.still for job in jobs for lent in job.lent):
        reason = "nothing moves at the clients"
        return Choice(what(key), len(jobs), "stacked", reason, way="grouped")
    differences = passes_differences(jobs)
    way = next(way for way in PASSES_ORDER if differences[way] <= TOLERANCE)
    return Choice(what(key), len(jobs), "stacked", EQUAL, differences[way], TOLERANCE, way=way)


def fixed_replicas(jobs: Sequence[Work]) -> Choice:
    """Replicas take each step together wherever that is equal."""
    difference = replicas_difference(jobs)
    equal = difference <= TOLERANCE
    reason = EQUAL if equal else f"replicas differ by {difference:.1e}"
    return Choice(
        "replicas", len(jobs), "stacked" if equal else "loop", reason, difference, TOLERANCE
    )


def fixed_captured(job: Work) -> Choice:
    """Capture the steps of a client wherever that is equal."""
    difference = captured_difference(job)
    equal = difference <= TOLERANCE
    reason = EQUAL if equal else f"captured steps differ by {difference:.1e}"
    return Choice("work", 1, "captured" if equal else "loop", reason, difference, TOLERANCE)


BY_TIMING = Rules("", tried, tried_replicas, tried_captured)
FIXED = Rules(", fixed rules", fixed_works, fixed_replicas, fixed_captured)


@contextmanager
def deterministic_torch(enabled: bool) -> Iterator[None]:
    """Restrict torch to deterministic kernels, and restore all of its settings afterwards.

    Operations without a deterministic kernel warn. The variable for cuBLAS has an effect only if
    it is set before the first product on the GPU.
    """
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    memory: Any = torch.utils.deterministic  # its property is unknown to the type checker
    mode, workspace = torch.get_deterministic_debug_mode(), os.environ.get(WORKSPACE)
    flags = (cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    # not use_deterministic_algorithms(), which imports torch's compiler: seconds
    torch.set_deterministic_debug_mode("warn")
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    try:
        with fixed_ways({}):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = flags
        torch.set_deterministic_debug_mode(mode)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
