"""Runs of a sweep on one GPU: one stacked process, two processes, two workers of half a GPU on Ray.

    python bench/halves.py --device cuda [--points 16] [--rounds 200] [--repeats 2]

All ways run the same seeds. Starting the cluster is not counted; starting a worker or a process is.
With --device cpu the workers have a core each instead.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STORE = 80 << 20  # bytes of the node's object store


def command(first: int, points: int, given: argparse.Namespace, out: Path) -> list[str]:
    """A sweep over seeds."""
    options = ["data=digits", "clients=8", f"rounds={given.rounds}", f"device={given.device}"]
    words = [word for option in options for word in ("--set", option)]
    seeds = f"seed={first}..{first + points - 1}"
    return [sys.executable, "-m", "atoll", "sweep", "fedavg", "--axis", seeds, *words, "--quiet",
            "--out", str(out)]  # fmt: skip


def timed(commands: list[list[str]]) -> float:
    """Seconds of commands that run at the same time."""
    began = time.monotonic()
    running = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for words in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"a process ended with {max(codes)}")
    return round(time.monotonic() - began, 2)


def on_ray(given: argparse.Namespace, folder: Path) -> float:
    """Seconds on a cluster of one node with one GPU."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - the other ways need no Ray

    graphics = given.device != "cpu"
    node = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args=node | ({"num_gpus": 1} if graphics else {})
    )
    words = [*command(0, given.points, given, folder / "ray"), "--on", f"ray://{cluster.address}",
             "--points-per-block", str(given.points // 2)]  # fmt: skip
    try:
        return timed([[*words, *(["--gpus-per-block", "0.5"] if graphics else [])]])
    finally:
        cluster.shutdown()


def main() -> None:
    """Measure the three ways in turn and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("--points", 16), ("--rounds", 200), ("--repeats", 2)):
        parser.add_argument(name, type=int, default=usual)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    half = given.points // 2
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for number in range(given.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            row = {
                "repeat": number, "points": given.points, "rounds": given.rounds,
                "one process": timed([command(0, given.points, given, folder / "one")]),
                "two processes": timed(
                    [command(first, half, given, folder / f"two-{first}") for first in (0, half)]
                ),
                "two workers": on_ray(given, folder),
            }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
