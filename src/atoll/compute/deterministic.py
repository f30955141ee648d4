"""What decides between ways that are proved equal: a stopwatch, or a fixed rule.

Ways that agree in double precision differ in the last bits of single precision. If the faster one
is taken, the bits of a run depend on how busy the machine is. With `engine.deterministic` nothing
is timed: the accelerated way is taken wherever the proof accepts it, so a choice is a function of
shapes, types, device and code. Torch is restricted to deterministic kernels for the same reason.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from atoll.compute.accelerated import Kind, Rules
from atoll.compute.choice import Choice
from atoll.kernels.batched_layers import fixed_ways

__all__ = ["BY_TIMING", "EQUAL", "FIXED", "deterministic_torch"]

EQUAL = "equal; a fixed rule, nothing was timed"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when a handle is created


def _timed(kind: Kind, jobs: Sequence[Any], choice: Choice) -> Choice:
    return kind.timed(jobs, choice)


def _fixed(kind: Kind, jobs: Sequence[Any], choice: Choice) -> Choice:
    return kind.fixed(jobs, choice)


BY_TIMING = Rules("", _timed)
FIXED = Rules(", fixed rules", _fixed)


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
