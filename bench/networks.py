"""Milliseconds of one training step of FCCL's networks: from Python and captured, each layout.

A step is forward, backward and Adam on one batch of 3x32x32 images, as local training does it.
Public steps are the same but for the loss.
"""

import argparse
import itertools
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.compute.captured import Captured, run_captured
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob
from atoll.learning.distill import distillation_loss
from atoll.learning.models import ModelOptions, network, skeleton

CLASSES = 10
SIZES = {"resnet10": 150, "resnet12": 80, "efficientnet": 512, "mobilenet": 512}  # of the digits


def work(options: ModelOptions, batch: int, device: torch.device) -> TrainJob:
    """Training of a network on made-up images, one batch an epoch."""
    stream = Stream.of(0, options.name)
    model = network((3, 32, 32), CLASSES, options, stream)
    draws = stream.child("data").numpy()
    x = torch.from_numpy(draws.standard_normal((batch, 3, 32, 32), dtype="float32")).to(device)
    y = torch.from_numpy(draws.integers(0, CLASSES, batch)).to(device)
    loss = partial(distillation_loss, network=skeleton(model, True))
    moves = tuple(name for name, _ in model.named_parameters())
    phase = Phase("loss", moves, loss, Optimiser("adam", 1e-3))
    weights = {name: weight.to(device) for name, weight in model.state_dict().items()}
    rows = Rows(x, x.new_zeros(batch, 0), y)
    return TrainJob(weights, {}, (phase,), rows, batch, 1, stream)


def timed(job: TrainJob, captured: Captured | None, steps: int) -> float:
    """Milliseconds of a step, the best of three."""
    job, best = replace(job, epochs=steps), float("inf")
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        _ = job.run() if captured is None else run_captured([captured], [[job]])
        if job.rows.x.is_cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / steps)
    return 1000 * best


def measured(
    name: str, how: tuple[str, str, bool, bool], batch: int, device: torch.device, steps: int
) -> dict[str, Any]:
    """One line of the table."""
    precision, layout, tf32, graph = how
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    options = ModelOptions(name, precision=precision, layout=layout)  # type: ignore[arg-type]
    job = work(options, batch, device)
    found = timed(job, Captured([job]) if graph else None, steps)
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    line = {"network": name, "batch": batch, "precision": precision, "layout": layout, "tf32": tf32}
    return {**line, "captured": graph, "milliseconds": round(found, 3), "GiB": round(peak, 2)}


def main() -> None:
    """Measure every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", default=",".join(SIZES))
    parser.add_argument("--batch", type=int, default=0, help="0: as on the digits")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found, device = [], torch.device(asked.device)
    precisions = (("float32", False), ("float32", True), ("bfloat16", True))
    for name, (precision, tf32), layout, graph in itertools.product(
        asked.networks.split(","), precisions, ("plain", "channels-last"), (False, True)
    ):
        batch = asked.batch or SIZES.get(name, 512)
        found.append(measured(name, (precision, layout, tf32, graph), batch, device, asked.steps))
        print(json.dumps(found[-1]), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
