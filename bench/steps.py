"""CHFL's local step, side by side: a DataLoader for each client, our loop, our stack.

The step is that of one client with 16 common and 8 own columns, hidden widths 512-256-128, batch
64, Adam, two losses (column one, column two); a client-step is one batch of one client. All ways
do the same arithmetic on the same batches; the weights they end with are compared.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from atoll.compute.compare import max_relative_error
from atoll.compute.executor import Executor
from atoll.compute.stacking import Stack
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.train import Optimiser, Phase, TrainJob
from atoll.learning.models import draw_linear
from atoll.methods import chfl

COMMON, OWN, CLASSES, WIDTHS, BATCH = 16, 8, 7, (512, 256, 128), 64
SIZES = (*WIDTHS, CLASSES)


def column(inputs: int, stream: Stream, lateral: bool) -> dict[str, torch.Tensor]:
    """First weights of a column."""
    found = {}
    for i, size in enumerate(SIZES):
        below = SIZES[i - 1] if i else inputs
        found[f"weight{i}"], found[f"bias{i}"] = draw_linear(size, below, stream.child(i))
        if lateral and i:
            (found[f"lateral{i}"],) = draw_linear(size, below, stream.child("u", i), bias=False)
    return found


def client(number: int, rows: int, device: torch.device, epochs: int) -> TrainJob:
    """One client's work: a bank of one second column."""
    stream = Stream.of(0, number)
    generator = stream.child("data").numpy()
    x, own = (
        torch.from_numpy(generator.normal(size=(rows, d))).float().to(device) for d in (COMMON, OWN)
    )
    y = torch.from_numpy(generator.integers(0, CLASSES, rows)).to(device)
    common = column(COMMON, stream.child("common"), lateral=False)
    unique = column(OWN, stream.child("unique"), lateral=True)
    weights = {f"common/{n}": w.to(device) for n, w in common.items()}
    weights |= {f"unique/{n}": w.unsqueeze(0).to(device) for n, w in unique.items()}
    weights["mu"] = torch.full((1, 1, 1), 0.1, device=device)
    phases = tuple(
        Phase(name, tuple(n for n in weights if n.startswith(start)), loss, Optimiser("adam", 1e-3))
        for name, start, loss in (
            ("common", "common/", partial(chfl.common_loss, depth=4)),
            ("joint", "unique/", partial(chfl.joint_loss, depth=4, source="common", concat="")),
        )
    )
    return TrainJob(weights, {}, phases, Rows(x, own, y), BATCH, epochs, stream.child("fit"))


class InOrder(Sampler[int]):
    """The rows in the order that our loop takes them."""

    def __init__(self, work: TrainJob) -> None:
        self.work, self.epoch = work, 0

    def __len__(self) -> int:
        return len(self.work.rows)

    def __iter__(self) -> Any:
        order = self.work.stream.child("epoch", self.epoch).permutation(len(self.work.rows))
        self.epoch += 1
        return iter(order.tolist())


def with_loader(work: TrainJob, device: torch.device) -> dict[str, torch.Tensor]:
    """What PyTorch users write: a DataLoader on the CPU, batches copied, two torch.optim.Adam."""
    weights = {n: w.clone().requires_grad_(n != "mu") for n, w in work.weights.items()}
    adams = [torch.optim.Adam([weights[n] for n in p.moves], lr=1e-3) for p in work.phases]
    rows = work.rows
    loader = DataLoader(
        TensorDataset(rows.x.cpu(), rows.own.cpu(), rows.y.cpu()),
        batch_size=BATCH,
        sampler=InOrder(work),
    )
    for _ in range(work.epochs):
        for x, own, y in loader:
            batch = Rows(x.to(device), own.to(device), y.to(device))
            for phase, adam in zip(work.phases, adams, strict=True):
                adam.zero_grad()
                phase.loss(weights, batch).sum().backward()
                adam.step()
    return {n: w.detach() for n, w in weights.items()}


def double(work: TrainJob) -> TrainJob:
    """The same work in double precision, in which two ways can be told to be the same."""
    rows = replace(work.rows, x=work.rows.x.double(), own=work.rows.own.double())
    return replace(work, rows=rows, weights={n: w.double() for n, w in work.weights.items()})


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds, and the result."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def measure(
    clients: int, rows: int, epochs: int, device: torch.device, given: argparse.Namespace
) -> dict[str, Any]:
    """Client-steps per second of each way with so many clients; the slow ways on a few of them."""
    loops: int = given.loops
    works = [client(n, rows, device, epochs) for n in range(clients)]
    steps = epochs * -(-rows // BATCH)
    few = works[:loops]
    warm = replace(works[0], epochs=1)
    warm.run(), with_loader(warm, device)
    loader_seconds, _ = timed(lambda: [with_loader(w, device) for w in few], device)
    loop_seconds, _ = timed(lambda: [w.run() for w in few], device)
    stack = Stack(works)
    first_seconds, _ = timed(lambda: stack.run(works), device)
    stack_seconds, _ = timed(lambda: stack.run(works), device)
    exactly = not torch.backends.cuda.matmul.allow_tf32
    auto = Executor("auto", tf32=not exactly, verify=given.verify)
    jobs = {str(n): work for n, work in enumerate(works)}
    for _ in range(2):  # the first makes the trial; both are checked, where checks are asked for
        auto.do(jobs)
    auto_seconds, _ = timed(lambda: [auto.do(jobs) for _ in range(given.rounds)], device)
    (choice,) = auto.choices.values()
    exact = [double(replace(w, epochs=1, rows=w.rows.at(slice(0, 4 * BATCH)))) for w in works[:8]]
    pairs = zip([w.run() for w in exact], Stack(exact).run(exact), strict=True)
    difference = max(max_relative_error(one.weights, other.weights) for one, other in pairs)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "clients": clients, "steps": steps, "loader": len(few) * steps / loader_seconds,
        "loop": len(few) * steps / loop_seconds, "stacked": clients * steps / stack_seconds,
        "auto": clients * steps * given.rounds / auto_seconds,
        "auto is": f"{choice.mode} x {choice.parts}",
        "first call": first_seconds, "difference loop/stacked": difference,
        "GiB": memory / 2**30,
    }  # fmt: skip


def floor(device: torch.device) -> float:
    """Client-steps per second that Adam's memory traffic allows: 28 bytes a weight."""
    size = sum(w.numel() for w in client(0, 64, device, 1).weights.values())
    a = torch.empty(1 << 29, device=device)
    b = torch.empty_like(a)
    b.copy_(a)
    seconds, _ = timed(lambda: [b.copy_(a) for _ in range(10)], device)
    return 10 * 2 * a.nbytes / seconds / (28 * size)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", default="5,50")
    parser.add_argument("--rows", type=int, default=1814)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--loops", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="of auto that are timed")
    parser.add_argument("--verify", default="sampled", choices=["sampled", "off", "always"])
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    device = torch.device(given.device)
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # what earlier runs found is not known here
    torch.backends.cuda.matmul.allow_tf32 = given.tf32
    found = [
        measure(int(n), given.rows, given.epochs, device, given) for n in given.clients.split(",")
    ]
    for row in found:
        print({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
    if device.type == "cuda":
        print("floor by memory traffic:", round(floor(device)), "client-steps/s")
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
