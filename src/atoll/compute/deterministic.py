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

from atoll.compute.autotune import (
    Choice,
    proved,
    proved_captured,
    stacks_that_fit,
    tried,
    tried_captured,
    tried_replicas,
)
from atoll.jobs.train import TrainJob
from atoll.kernels.batched_layers import fixed_ways

__all__ = ["BY_TIMING", "EQUAL", "FIXED", "Rules", "deterministic_torch"]

EQUAL = "equal; a fixed rule, nothing was timed"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when a handle is created


@dataclass(frozen=True)
class Rules:
    """How to choose for works of one form, for replicas, and for the steps of one client."""

    name: str  # part of the cache key: choices of different rules are kept apart
    works: Callable[[Hashable, Sequence[Any]], Choice]
    replicas: Callable[[Sequence[TrainJob]], Choice]
    captured: Callable[[TrainJob], Choice]


def fixed_works(key: Hashable, jobs: Sequence[Any]) -> Choice:
    """Stack works wherever the proof accepts it."""
    choice = proved(key, jobs)
    if not isinstance(jobs[0], TrainJob) or choice.mode == "loop":
        return choice
    return replace(choice, reason=EQUAL, parts=stacks_that_fit(jobs))


def fixed_replicas(jobs: Sequence[TrainJob]) -> Choice:
    """Replicas take each step together wherever the proof accepts it."""
    return _equal(proved_captured(jobs))


def fixed_captured(job: TrainJob) -> Choice:
    """Capture the steps of a client wherever the proof accepts it."""
    return _equal(proved_captured([job]))


def _equal(choice: Choice) -> Choice:
    return choice if choice.mode == "loop" else replace(choice, reason=EQUAL)


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
