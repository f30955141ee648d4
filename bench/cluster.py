"""Blocks of a sweep on a Ray cluster, beside the same blocks as plain processes.

    python bench/cluster.py [--blocks 4] [--rounds 3000] [--repeats 1] [--write]

Two slots: two plain processes of one thread at a time, or two nodes of one CPU without dashboard.
Starting the cluster is not counted; starting a worker is, as starting a process is. Choose
`--rounds` so that a block takes a minute or more. `--write` renews `bench/results/cluster.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

COMMAND = Path(sys.executable).with_name("atoll")
HERE = Path(__file__).resolve().parents[1]
SLOTS = 2
STORE = 80 << 20  # bytes of a node's object store


def command(seeds: str, rounds: int, out: Path) -> list[str]:
    """A sweep over seeds, one thread each."""
    options = ["data=digits", "clients=4", f"rounds={rounds}", "threads=1", "engine.mode=loop"]
    words = [word for option in options for word in ("--set", option)]
    return [str(COMMAND), "sweep", "fedavg", "--axis", f"seed={seeds}", *words, "--quiet",
            "--out", str(out)]  # fmt: skip


def plain(blocks: int, rounds: int, folder: Path) -> float:
    """Seconds for all blocks, each in a process of its own, two at a time."""
    began = time.monotonic()
    waiting, running = list(range(blocks)), list[subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < SLOTS:
            seed = waiting.pop(0)
            words = command(str(seed), rounds, folder / f"plain-{seed}")
            running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        time.sleep(0.05)
        for process in [one for one in running if one.poll() is not None]:
            running.remove(process)
            if process.returncode:
                raise SystemExit(f"a plain process ended with {process.returncode}")
    return time.monotonic() - began


def on_ray(address: str, blocks: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds for all blocks on the cluster, and what each of them says of itself."""
    began, out = time.monotonic(), folder / "ray"
    words = [*command(f"0..{blocks - 1}", rounds, out), "--on", f"ray://{address}"]
    subprocess.run([*words, "--points-per-block", "1"], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    rows = json.loads((out / "blocks.json").read_text())
    per_block = [{"seconds": row["seconds"], "overhead": row["overhead"]} for row in rows]
    return {"clock_s": seconds, "blocks": per_block}


def measured(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Both, in turn, with the load of the machine before each."""
    rows = []
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory() as name:
            load = os.getloadavg()[0]
            seconds = plain(asked.blocks, asked.rounds, Path(name))
            rows.append({"how": "plain", "clock_s": seconds, "load": load})
            node = {"num_cpus": 1, "object_store_memory": STORE}
            first = {**node, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=first)
            cluster.add_node(**node)
            load = os.getloadavg()[0]
            try:
                result = on_ray(cluster.address, asked.blocks, asked.rounds, Path(name))
            finally:
                cluster.shutdown()
            rows.append({"how": "ray", **result, "load": load})
    return rows


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("--blocks", 4), ("--rounds", 3000), ("--repeats", 1)):
        parser.add_argument(name, type=int, default=usual)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = measured(asked)
    body = {"cores": os.cpu_count(), "blocks": asked.blocks, "rounds": asked.rounds, "runs": rows}
    text = json.dumps(body, indent=1) + "\n"
    print(text)
    if asked.write:
        (HERE / "bench" / "results" / "cluster.json").write_text(text)


if __name__ == "__main__":
    main()
