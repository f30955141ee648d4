"""Seconds and GPU memory of one seed of the methods of FCCL's tables on the digits, at paper sizes.

SOLO is the model before any exchange, which each run reports too.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from atoll.data.dataset import Dataset
from atoll.reproduce.fccl import COMPARED, Plan, Setting, measure_seed


def main() -> None:
    """Run each method in turn, all in one process; the first one also trains alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", default=",".join(COMPARED))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--mode", default="captured", choices=("auto", "loop", "captured"))
    parser.add_argument("--streams", action="store_true", help="the four networks side by side")
    parser.add_argument("--tune", action="store_true", help="cuDNN tries its ways first")
    parser.add_argument("--out", type=Path, help="keep the runs, for atoll reproduce fccl --render")
    asked = parser.parse_args()
    plan = Plan(
        asked.out or Path(tempfile.mkdtemp()),
        asked.device,
        (asked.seed,),
        asked.rounds,
        tf32=True,
        precision=asked.precision,
        mode=asked.mode,
        streams=asked.streams,
        tune=asked.tune,
    )
    loaded: dict[str, Dataset] = {}
    say = partial(print, file=sys.stderr, flush=True)
    began = time.monotonic()
    for method in asked.methods.split(","):
        found = measure_seed(Setting("digits", method), asked.seed, plan, say, loaded)
        line = {"method": method, "seconds": round(found["seconds"], 1)}
        line["rounds only"] = round(found["round_seconds"], 1)
        if asked.device == "cuda":
            line["GiB"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps(line), flush=True)
    print(json.dumps({"all": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
