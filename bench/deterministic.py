"""Do methods that begin with the same training begin with the same bits, and what does it cost?

One seed of FCCL, FedMD, FML and FedMatch on four domains made of scikit-learn's digits. Every run
is a process of its own with an empty cache, with and without `engine.deterministic` in alternation.
Printed are the accuracy of `solo`, a hash of its weights and scores, a hash of all events, and the
seconds of the run without the start of Python. Two sites have the same network, so that there is
something to put together. The last line says whether `solo` was the same in all runs with the
option.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METHODS = ("fccl", "fedmd", "fml", "fedmatch")
MODELS = ["cnn", "cnn", "small-resnet", "small-mobilenet"]


def values(method: str, deterministic: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """The config of one run."""
    options = {"name": method, "rate": 0.003, "batch": 32, "epochs": 1}
    options["pretrain_epochs"] = arguments.epochs
    if method != "fml":
        options["public_batch"] = 128
    return {
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "data": {"name": "digits-shifted"},
        "public": {"name": "digits-public", "rows": 512},
        "scenario": {"split": "domains", "train": 1.0, "valid": 0.0},
        "models": MODELS,
        "method": options,
        "engine": {"deterministic": deterministic, "device": arguments.device},
        "looks": False,
    }


def one(method: str, deterministic: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run in this process: accuracies, hashes and seconds."""
    # here, so that the process that only starts others does not import torch
    from safetensors.numpy import load_file  # noqa: PLC0415

    from atoll.engines.local import local_engine  # noqa: PLC0415
    from atoll.runs.config import resolve  # noqa: PLC0415
    from atoll.runs.execute import execute  # noqa: PLC0415
    from atoll.runs.result import Run  # noqa: PLC0415

    config = resolve(values(method, deterministic, arguments), "bench")
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        began = time.perf_counter()
        execute(config, folder, local_engine)
        seconds = time.perf_counter() - began
        tensors = load_file(folder / "checkpoint.safetensors")
        run = Run(folder)
        digest = hashlib.sha256()
        for name in sorted(name for name in tensors if "/solo/" in name):
            digest.update(name.encode() + tensors[name].tobytes())
        for score in run.scores:
            if score.variant == "solo":
                digest.update(repr(score).encode())
        return {
            "own": run.metrics["solo"]["intra_accuracy"],
            "others": run.metrics["solo"]["inter_accuracy"],
            "solo": digest.hexdigest()[:16],
            "events": hashlib.sha256((folder / "events.jsonl").read_bytes()).hexdigest()[:16],
            "seconds": seconds,
            "device": run.facts["device"],
        }


def in_a_process(method: str, deterministic: bool, given: list[str]) -> dict[str, Any]:
    """The same in a process of its own, with an empty cache of choices."""
    command = [sys.executable, __file__, *given, "--one", method]
    command += ["--deterministic"] * deterministic
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(given: list[str], repeats: int) -> bool:
    """Print all runs; whether `solo` was the same in all that were deterministic."""
    runs: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    print("method    deterministic  solo own  others  hash of solo      hash of events    seconds")
    for _, method, fixed in itertools.product(range(repeats), METHODS, (False, True)):
        run = in_a_process(method, fixed, given)
        runs.setdefault((method, fixed), []).append(run)
        print(
            f"{method:10s}{'yes' if fixed else 'no':13s}{run['own']:10.4f}{run['others']:8.4f}"
            f"  {run['solo']}  {run['events']}{run['seconds']:9.2f}",
            flush=True,
        )
    different = {}
    for fixed in (False, True):
        these = {method: found for (method, kind), found in runs.items() if kind == fixed}
        different[fixed] = len({run["solo"] for found in these.values() for run in found})
        again = sum(len({run["events"] for run in found}) == 1 for found in these.values())
        repeated = f"{again} of {len(these)} methods repeat all events, " if repeats > 1 else ""
        seconds = statistics.median(run["seconds"] for found in these.values() for run in found)
        print(
            f"deterministic = {str(fixed).lower()}: {different[fixed]} different solo, "
            f"{repeated}median {seconds:.2f} s"
        )
    print(f"device: {runs[METHODS[0], True][0]['device']}")
    return different[True] == 1


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=10, help="of training before any exchange")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.deterministic, arguments)))
        return 0
    equal = table(sys.argv[1:], arguments.repeats)
    print(f"equal: {'yes' if equal else 'no'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
