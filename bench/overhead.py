"""What a run costs beyond its arithmetic: one client in atoll against a bare loop of PyTorch.

Both train the same network (512-256-128) on the same 1,814 rows in the same order with Adam. The
bare loop has its rows on the device and nothing else to do: no messages, no record, no named
streams. Both are run in turns; CPU seconds of the process are compared, since other processes on
the machine disturb them less than the clock on the wall.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jobs
import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from atoll.core.federation import Moment
from atoll.data.dataset import Dataset
from atoll.learning.models import outputs
from atoll.runs.config import RunConfig
from atoll.runs.parts import Parts, parts

COLUMNS, CLASSES, WIDTHS, ROWS, BATCH, EPOCHS = 24, 7, (512, 256, 128), 1814, 64, 5


def table() -> Dataset:
    """Rows around a centre for each class."""
    generator = np.random.default_rng(0)
    y = generator.integers(CLASSES, size=ROWS + 100)
    x = generator.normal(size=(CLASSES, COLUMNS))[y] + generator.normal(size=(len(y), COLUMNS))
    columns = tuple(f"column {n}" for n in range(COLUMNS))
    names = tuple(f"class {n}" for n in range(CLASSES))
    test = np.arange(len(y)) >= ROWS
    return Dataset("bench", "table", x.astype(np.float32), y, columns, names, "made up", test=test)


def config(rounds: int, device: str) -> RunConfig:
    """The run: one client, everything as a user has it by default, checkpoints too."""
    return jobs.config(
        {
            "name": "overhead", "rounds": rounds, "data": {"name": "bench"}, "scale": "none",
            "scenario": {"split": "rows", "clients": 1, "train": 1.0, "valid": 0.0},
            "model": {"widths": list(WIDTHS)}, "checkpoints": True, "looks": True,
            "method": {"name": "fedavg", "batch": BATCH, "epochs": EPOCHS},
            "engine": {"device": device},
        }
    )  # fmt: skip


def bare(made: Parts, rounds: int) -> dict[str, torch.Tensor]:
    """The same training as one writes it by hand."""
    site = made.site(made.scenario.clients[0])
    rows, weights = site.train(0), dict(made.server().weights)
    for number in range(rounds):
        leaves = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
        adam = torch.optim.Adam(leaves.values(), lr=0.001, fused=True)
        stream = site.stream("fit", Moment(0, number, rounds))
        for epoch in range(EPOCHS):
            order = stream.child("epoch", epoch).permutation(len(rows), site.device)
            for start in range(0, len(rows), BATCH):
                batch = order[start : start + BATCH]
                adam.zero_grad()
                said = outputs(leaves, rows.x[batch], len(WIDTHS) + 1)[-1]
                F.cross_entropy(said, rows.y[batch]).backward()
                adam.step()
        weights = leaves
    return {n: w.detach() for n, w in weights.items()}


def seconds(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """CPU seconds of this process, on a GPU seconds of the clock; and the result."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    jobs.wait(device)()
    began = clock()
    result = call()
    jobs.wait(device)()
    return clock() - began, result


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    jobs.warm(given.device)
    job, dataset = config(given.rounds, given.device), table()
    made = parts(job, {json.dumps(job.data, sort_keys=True): dataset})
    ours, theirs, far = [], [], 0.0
    for turn in range(given.turns + 1):
        taken, weights = seconds(lambda: bare(made, given.rounds), given.device)
        done = jobs.run(job, dataset, cpu=given.device == "cpu")
        far = max(float((done.weights[n].cpu() - w.cpu()).abs().max()) for n, w in weights.items())
        if turn:  # the first one warms up
            theirs.append(taken)
            ours.append(done.seconds)
    ratio = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    print(
        json.dumps(
            {
                "device": given.device,
                "bare loop, seconds": round(min(theirs), 4),
                "atoll with one client, seconds": round(min(ours), 4),
                "overhead by the least": f"{min(ours) / min(theirs) - 1:+.1%}",
                "overhead, median of the turns": f"{statistics.median(ratio):+.1%}",
                "largest difference of a weight": far,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
