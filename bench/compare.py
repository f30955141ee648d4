"""One FedAvg job, side by side: bare PyTorch, our loop, our stack, Flower's simulation.

All do the same arithmetic on the same rows in the same order from the same first weights; the
weights they end with are compared. Each way runs in a process of its own, so that its memory can
be told. Seconds are those of the rounds; what a framework needs to start is printed beside them.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from atoll.core.federation import Moment
from atoll.data.dataset import Dataset
from atoll.learning.models import outputs
from atoll.runs.config import RunConfig
from atoll.runs.parts import parts

COLUMNS, CLASSES, WIDTHS, ROWS, TESTS = 32, 10, (64, 32), 256, 1000
BATCH, RATE = 32, 0.1
HERE = Path(__file__).parent
FLOWER = HERE.parent / ".venv-flower" / "bin" / "python"
WAYS = ("bare", "loop", "stacked", "auto", "flower")
NAMES = {
    "bare": "bare PyTorch, a DataLoader for each client", "loop": "atoll, loop",
    "stacked": "atoll, stacked", "auto": "atoll, auto", "flower": "Flower 1.41.0, simulation",
}  # fmt: skip


def table(clients: int) -> Dataset:
    """Rows around a centre for each class."""
    generator = np.random.default_rng(0)
    total = clients * ROWS + TESTS
    y = generator.integers(CLASSES, size=total)
    x = generator.normal(size=(CLASSES, COLUMNS))[y] + generator.normal(size=(total, COLUMNS))
    columns = tuple(f"column {n}" for n in range(COLUMNS))
    names = tuple(f"class {n}" for n in range(CLASSES))
    test = np.arange(total) >= clients * ROWS
    return Dataset("bench", "table", x.astype(np.float32), y, columns, names, "made up", test=test)


def config(given: argparse.Namespace) -> RunConfig:
    """The job as a run of ours."""
    split = {"split": "rows"} if given.tasks == 1 else {"split": "classes", "stages": given.tasks}
    return jobs.config(
        {
            "name": "compare", "rounds": given.rounds, "data": {"name": "bench"}, "scale": "none",
            "scenario": {**split, "clients": given.clients, "train": 1.0, "valid": 0.0},
            "model": {"widths": list(WIDTHS)},
            "method": {
                "name": "fedavg", "optimiser": "sgd", "rate": RATE, "batch": BATCH, "epochs": 1,
                "tester": "first",
            },
            "engine": {
                "mode": given.way if given.way in ("loop", "stacked", "auto") else "loop",
                "device": given.device, "packing": not given.unpacked,
            },
        }
    )  # fmt: skip


def arrays(given: argparse.Namespace) -> dict[str, Any]:
    """The job as plain arrays: each client's rows, their order in each round, first weights."""
    job = config(given)
    made = parts(job, {json.dumps(job.data, sort_keys=True): table(given.clients)})
    found: dict[str, Any] = {
        "clients": given.clients, "rounds": given.rounds, "batch": BATCH, "rate": RATE,
    }  # fmt: skip
    for number, id in enumerate(made.scenario.clients):
        site = made.site(id)
        rows = site.train(0)
        found |= {f"x{number}": rows.x.cpu().numpy(), f"y{number}": rows.y.cpu().numpy()}
        found[f"order{number}"] = np.stack(
            [
                site.stream("fit", Moment(0, r, given.rounds))
                .child("epoch", 0)
                .permutation(len(rows))
                .numpy()
                for r in range(given.rounds)
            ]
        )
    weights = made.server().weights
    return found | {f"w/{name}": tensor.cpu().numpy() for name, tensor in weights.items()}


def bare(job: dict[str, Any], device: str) -> tuple[float, dict[str, np.ndarray]]:
    """What PyTorch users write: for each client a copy of the model, a DataLoader, torch.optim."""
    shared = {n[2:]: torch.from_numpy(w).to(device) for n, w in job.items() if n.startswith("w/")}
    depth = len(shared) // 2
    sets = [
        TensorDataset(torch.from_numpy(job[f"x{c}"]), torch.from_numpy(job[f"y{c}"]))
        for c in range(int(job["clients"]))
    ]
    jobs.wait(device)()
    began = time.perf_counter()
    for number in range(int(job["rounds"])):
        fitted = []
        for client, rows in enumerate(sets):
            weights = {n: w.clone().requires_grad_() for n, w in shared.items()}
            sgd = torch.optim.SGD(weights.values(), lr=float(job["rate"]))
            order = job[f"order{client}"][number].tolist()
            for x, y in DataLoader(rows, batch_size=int(job["batch"]), sampler=order):
                sgd.zero_grad()
                said = outputs(weights, x.to(device), depth)[-1]
                F.cross_entropy(said, y.to(device)).backward()
                sgd.step()
            fitted.append(weights)
        with torch.no_grad():
            shared = {
                n: torch.stack([w[n] for w in fitted]).double().mean(0).float() for n in shared
            }
    jobs.wait(device)()
    return time.perf_counter() - began, {n: w.cpu().numpy() for n, w in shared.items()}


def flower(source: Path, target: Path, device: str) -> tuple[float, dict[str, np.ndarray], int]:
    """The job in Flower's simulation; seconds of its rounds, weights, peak KiB."""
    done = subprocess.run(
        [str(FLOWER), str(HERE / "flower_job.py"), str(source), str(target), device],
        capture_output=True, text=True, check=False,
        env={**os.environ, "RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"},
    )  # fmt: skip
    if done.returncode or not target.exists():
        raise RuntimeError(done.stderr[-3000:])
    found = dict(np.load(target))
    peak = int(done.stdout.rsplit("peak KiB", 1)[1]) if "peak KiB" in done.stdout else 0
    return float(found.pop("seconds")), found, peak


def one(given: argparse.Namespace) -> None:
    """One way in this process: its seconds, memory and weights go to a file."""
    source, target = Path(given.source), Path(given.target)
    jobs.warm(given.device)
    base, device = _peak(), given.device
    extra = 0
    if given.way == "bare":
        seconds, weights = bare(dict(np.load(source)), device)
    elif given.way == "flower":
        seconds, weights, extra = flower(source, target.with_suffix(".flower.npz"), device)
    else:
        done = jobs.run(config(given), table(given.clients))
        seconds, weights = done.seconds, {n: w.cpu().numpy() for n, w in done.weights.items()}
    gpu = torch.cuda.max_memory_allocated() if device == "cuda" and given.way != "flower" else 0
    peak = extra or _peak() - base
    np.savez(target, **{f"w/{n}": w for n, w in weights.items()}, seconds=seconds,
             mib=peak / 1024, gpu=gpu / 2**20)  # fmt: skip


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(given: argparse.Namespace, way: str, folder: Path) -> dict[str, Any]:
    """One way in a process of its own."""
    source, target = folder / "job.npz", folder / f"{way}.npz"
    command = [
        sys.executable, __file__, "--way", way, "--clients", str(given.clients), "--tasks",
        str(given.tasks), "--rounds", str(given.rounds), "--device", given.device,
        "--source", str(source), "--target", str(target),
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run([*command, *(["--unpacked"] if given.unpacked else [])],
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        return {"way": way, "failed": done.stderr.strip().splitlines()[-1][:200]}
    found = dict(np.load(target))
    weights = {n: w for n, w in found.items() if n.startswith("w/")}
    return {
        "way": way, "clients": given.clients, "tasks": given.tasks,
        "seconds": float(found["seconds"]), "with start": time.perf_counter() - began,
        "MiB": float(found["mib"]), "GPU MiB": float(found["gpu"]), "weights": weights,
    }  # fmt: skip


def compare(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way on one job, and how far its weights are from those of the first."""
    with tempfile.TemporaryDirectory() as folder:
        if given.tasks == 1:
            np.savez(Path(folder) / "job.npz", **arrays(given))
        ways = [w for w in given.ways.split(",") if w and (given.tasks == 1 or w not in FOREIGN)]
        found = [measure(given, way, Path(folder)) for way in ways if _there(way)]
    done = [row for row in found if "weights" in row]
    for row in done:
        first = done[0]["weights"]
        row["difference"] = max(float(np.abs(row["weights"][n] - first[n]).max()) for n in first)
        row["times the first"] = done[0]["seconds"] / row["seconds"]
        row["equal"] = row["difference"] < 1e-4
    return [{k: v for k, v in row.items() if k != "weights"} for row in found]


FOREIGN = ("bare", "flower")  # ways that know one task


def _there(way: str) -> bool:
    if way == "flower" and not FLOWER.exists():
        print("Flower's simulation is skipped: .venv-flower is not there (make flower)")
        return False
    return True


def show(rows: list[dict[str, Any]]) -> None:
    """A table in Markdown."""
    keys = (
        "clients", "tasks", "seconds", "with start", "times the first", "MiB", "GPU MiB",
        "difference", "equal",
    )  # fmt: skip
    print("\n| way | " + " | ".join(keys) + " |\n|" + "---|" * (len(keys) + 1))
    for row in rows:
        if "failed" in row:
            print(f"| {NAMES[row['way']]} | failed: {row['failed']} |")
            continue
        cells = [f"{row[k]:.3g}" if isinstance(row[k], float) else str(row[k]) for k in keys]
        print(f"| {NAMES[row['way']]} | " + " | ".join(cells) + " |", flush=True)


def machine(device: str) -> str:
    """What this ran on."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line]
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    load = os.getloadavg()[0]
    return (
        f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores of "
        f"{os.cpu_count()}{gpu}, torch {torch.__version__}, load {load:.1f} before the run"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    """Compare all ways for several numbers of clients and tasks, and print tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", default="5,50,500")
    parser.add_argument("--tasks", default="1,2,5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--unpacked", action="store_true", help="ours: messages stay objects")
    parser.add_argument("--out", help="a file for the rows as JSON")
    for hidden in ("--way", "--source", "--target"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        given.clients, given.tasks = int(given.clients), int(given.tasks)
        one(given)
        return
    print(machine(given.device))
    rows = []
    counts, tasks = ([int(n) for n in text.split(",")] for text in (given.clients, given.tasks))
    pairs = [(n, 1) for n in counts] + [(counts[0], t) for t in tasks if t > 1]
    for clients, stages in pairs:
        job = argparse.Namespace(**{**vars(given), "clients": clients, "tasks": stages})
        found = compare(job)
        show(found)
        rows += found
    if given.out:
        Path(given.out).write_text(json.dumps(rows, indent=1))
    if not all(row.get("equal") for row in rows):
        sys.exit("not all ways gave the same weights")


if __name__ == "__main__":
    main()
