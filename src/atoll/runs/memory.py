"""Estimates the memory of a run before it begins.

It runs one round and one test with a few clients, then with twice as many, and counts all tensor
allocations; the difference is the cost of a client. It discards the results of these trials and
does not count Python objects.
"""

import gc
import json
import resource
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.core.federation import Clients, Moment, Transport
from atoll.core.record import write_whole
from atoll.runs.parts import Parts

__all__ = ["FEWEST", "Meter", "Peak", "Plan", "plan", "points_per_stack", "write_plan"]

FEWEST = 200  # clients per round; smaller runs are not planned
FEW, MORE = 8, 16  # numbers of clients of the two trials
SHARE = 0.9  # fraction of the free memory that a plan may use


@dataclass(frozen=True)
class Plan:
    """The planned peak of tensors in memory, in bytes."""

    clients: int  # clients per round
    fixed: int  # independent of the number of clients
    each: int  # per client
    peak: int  # planned: fixed + clients x each
    free: int  # free memory on the device before the run; 0 if unknown

    @property
    def parts(self) -> int:
        """The number of stacks to split the clients into, a power of two."""
        count = 1
        room = max(1.0, SHARE * self.free - self.fixed)
        while self.free and count < self.clients and self.clients * self.each / count > room:
            count *= 2
        return count


class Meter(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count its output tensors."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        self._alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size

    def again(self) -> None:
        """Reset the peak to the current size."""
        gc.collect()
        self.peak = self.now


def plan(
    parts: Parts,
    again: Callable[[], Parts],
    engine: Callable[[Parts], Transport],
    fewest: int = FEWEST,
) -> Plan | None:
    """Plan the memory of a run; None if the run is small or cannot be divided.

    `again` rebuilds the parts for each trial, so that trials do not affect the run.
    """
    every = parts.scenario.clients
    concurrent = parts.concurrency
    vertical = parts.scenario.labels_at_server
    if concurrent < max(fewest, MORE) or vertical or parts.config.engine_options().mode == "loop":
        return None
    rows = _row_bytes(parts) * (
        len(every) - concurrent
    )  # clients outside the round keep their rows
    free, plans = _free_bytes(parts), []
    for few, more in zip(*(_peaks(again(), engine, n) for n in (FEW, MORE)), strict=True):
        each = max(0, (more - few) // (MORE - FEW))
        fixed = max(0, few - FEW * each) + rows
        plans.append(Plan(concurrent, fixed, each, fixed + concurrent * each, free))
    return max(plans, key=lambda one: one.peak)


def points_per_stack(
    parts: Parts,
    again: Callable[[], Parts],
    engine: Callable[[Parts], Transport],
    share: float = 1.0,
) -> int:
    """The number of such runs that fit into a share of the free memory, at least one.

    Measures a round and a test of one run; if the free memory is unknown, all runs fit.
    """
    free = _free_bytes(parts)
    if not free or parts.scenario.labels_at_server:
        return sys.maxsize
    peak = max(_peaks(again(), engine, parts.concurrency))
    return max(1, int(SHARE * share * free // max(1, peak)))


def _peaks(parts: Parts, engine: Callable[[Parts], Transport], count: int) -> list[int]:
    """The peaks of a round and a test with this many clients, after a warm-up creates buffers."""
    packing = parts.config.engine_options().packing
    ids = parts.scenario.clients[:count]
    peaks = []
    with Meter() as meter:
        server, transport = parts.server(), engine(parts)
        for number in range(2):
            moment, tasks = Moment(0, number, 3), parts.scenario.tasks_at(0)
            for act in (server.round, server.evaluate):
                meter.again()
                act(Clients(ids, transport, moment, tasks, packing), moment)
                peaks.append(meter.peak)
    return peaks[2:]


def _row_bytes(parts: Parts) -> int:
    """The mean size in bytes of a client's training rows as tensors."""
    counts = [len(h.train) for holdings in parts.scenario.holdings.values() for h in holdings[:1]]
    kind = torch.empty(0, dtype=getattr(torch, parts.config.dtype)).element_size()
    wide = parts.dataset.x[0].size
    return int(sum(counts) / max(1, len(counts)) * (wide * kind + 8))


def _free_bytes(parts: Parts) -> int:
    """The free memory on the device of a run; 0 if the system does not report it.

    With `engine.deterministic` the total memory: use by others must not change the stacks.
    """
    total = parts.config.engine_options().deterministic
    if parts.site(parts.scenario.clients[0]).device.type == "cuda":
        return int(torch.cuda.mem_get_info()[int(total)])
    field = "MemTotal:" if total else "MemAvailable:"
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith(field)]
    return sizes[0] if sizes else 0


class Peak:
    """The measured peak of a run: tensors on a GPU, growth of the whole process on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.before = self._now()

    def _now(self) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10  # in KiB on Linux

    @property
    def bytes(self) -> int:
        """The peak so far; on the CPU 0 if the process had a higher peak before."""
        return self._now() - (0 if self.cuda else self.before)


def write_plan(folder: Path, plan: Plan, measured: int | None = None) -> None:
    """Write the plan of a run, and at the end the measured peak."""
    body = asdict(plan) | {"parts": plan.parts, "measured": measured}
    write_whole(folder / "memory.json", json.dumps(body, indent=1).encode() + b"\n")
