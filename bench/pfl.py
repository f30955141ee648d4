"""The pfl-research yardstick: CIFAR-10 shapes, 1,000 users x 50 rows, 50 of them a round, a CNN.

Rows are made up (the arithmetic does not depend on them). 1,500 rounds, batch 10, one epoch, SGD,
and a test on 10,000 images every 10 rounds; all of it is in the seconds that are printed. The
table of ways runs fewer rounds of each: the per-client loop, all ways to do convolutions with
weights of each client, with and without a CUDA graph, in single precision and in TF32. With --idle
the steps are left out: what the host does around them is what is left.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import torch

from atoll.compute.choice_files import stored_timings
from atoll.compute.kinds import STACKED
from atoll.compute.kinds.train import TRAIN_STACKS
from atoll.compute.stacking import Stack
from atoll.data.dataset import Dataset
from atoll.jobs.train import TrainJob
from atoll.kernels import batched_layers


@dataclass(frozen=True)
class Variant:
    """One way to do the task."""

    rounds: int
    mode: str = "stacked"
    way: str = ""  # of convolutions; empty: the one that a probe finds faster
    graph: bool = True
    tf32: bool = False
    idle: bool = False  # no steps


class Idle(Stack):
    """A stack that takes no steps."""

    def advance(self, active: int, count: int) -> None:
        """Nothing."""


def pictures(users: int, rows: int, tests: int, side: int = 32) -> Dataset:
    """Images of CIFAR-10's shape: a faint pattern for each of ten classes, and noise."""
    generator = np.random.default_rng(0)
    total = users * rows + tests
    y = generator.integers(10, size=total)
    patterns = generator.integers(0, 60, size=(10, 3, side, side), dtype=np.uint8)
    x = generator.integers(0, 196, size=(total, 3, side, side), dtype=np.uint8) + patterns[y]
    names = tuple(f"class {n}" for n in range(10))
    test = np.arange(total) >= users * rows
    return Dataset("cifar10-shapes", "image", x, y, (), names, "made up", test=test)


def values(given: Any, variant: Variant) -> dict[str, Any]:
    """The run's config."""
    return {
        "name": "pfl",
        "rounds": variant.rounds,
        "data": {"name": "made-up"},
        "score_every": 10,
        "scenario": {"split": "rows", "clients": given.users, "train": 1.0, "valid": 0.0},
        "model": {"name": "nets:pfl_cnn"},
        "method": {
            "name": "fedavg", "optimiser": "sgd", "rate": 0.1, "batch": 10, "epochs": 1,
            "cohort": given.cohort, "tester": "first",
        },
        "engine": {
            "mode": variant.mode, "packing": False, "device": given.device, "tf32": variant.tf32,
            "verify": "off" if variant.idle else given.verify,  # idle steps are no result
        },
    }  # fmt: skip


@contextmanager
def only(variant: Variant) -> Iterator[None]:
    """Let the engine do convolutions in one way, with or without a graph."""
    ways = batched_layers.WAYS
    if variant.way:
        batched_layers.WAYS = {variant.way: ways[variant.way]}  # type: ignore[index,dict-item]
    kind = Idle if variant.idle else Stack

    def build(jobs: Any, way: str) -> Stack:
        return kind(jobs, variant.graph, mapped=way == "mapped")

    STACKED[TrainJob] = replace(TRAIN_STACKS, build=build)
    try:
        yield
    finally:
        batched_layers.WAYS, STACKED[TrainJob] = ways, TRAIN_STACKS


def measure(given: Any, variant: Variant, dataset: Dataset) -> dict[str, Any]:
    """Run once; what it took."""
    with only(variant):
        done = jobs.run(jobs.config(values(given, variant)), dataset, inside=given.inside)
        ways = {k: [t.way, t.seconds] for k, t in stored_timings().items()}
    return {
        **vars(variant), "seconds": round(done.seconds, 3), "work": round(done.work, 3),
        "seconds for 1,500 rounds": round(1500 * done.seconds / variant.rounds, 2),
        "accuracy": done.accuracy, "ways": ways,
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else 0,
    }  # fmt: skip


def variants(given: Any) -> list[Variant]:
    """What is measured: one variant, or the table of all."""
    one = Variant(given.rounds, given.mode, given.way, not given.no_graph, given.tf32, given.idle)
    if not given.table:
        return [one]
    found = [
        replace(one, rounds=max(2, given.rounds // 40), mode="loop", tf32=t) for t in (False, True)
    ]
    for tf32 in (False, True):
        for way in batched_layers.WAYS:
            for graph in (False, True):
                found.append(Variant(given.rounds, "stacked", way, graph, tf32))
        found.append(Variant(given.rounds, tf32=tf32))
    return found


def profile(given: Any, dataset: Dataset) -> str:
    """Where the device's time goes in a few rounds."""
    variant = Variant(12, tf32=given.tf32)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        measure(given, variant, dataset)
    table = found.key_averages()
    return "\n".join(
        table.table(sort_by=by, row_limit=40, max_name_column_width=90)
        for by in ("self_cuda_time_total", "self_cpu_time_total")
    )


def main() -> None:
    """Run, print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--side", type=int, default=32, help="of an image; fewer for a try")
    parser.add_argument("--tests", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--mode", default="stacked", choices=["auto", "loop", "stacked"])
    parser.add_argument("--way", default="", choices=["", *batched_layers.WAYS])
    parser.add_argument("--verify", default="sampled", choices=["sampled", "off", "always"])
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--inside", action="store_true", help="also time the local training alone")
    parser.add_argument("--idle", action="store_true", help="leave the training steps out")
    parser.add_argument("--table", action="store_true", help="all ways, so many rounds of each")
    parser.add_argument("--profile", help="a file for where the device's time goes")
    given = parser.parse_args()
    dataset = pictures(given.users, 50, given.tests, given.side)
    for variant in variants(given):
        print(json.dumps(measure(given, variant, dataset)), flush=True)
    if given.profile:
        Path(given.profile).write_text(profile(given, dataset))


if __name__ == "__main__":
    main()
