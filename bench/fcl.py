"""Methods against forgetting on one class-incremental scenario, with paired seeds: one table.

Classes arrive by stage, every stage's rows are dealt to sites by Dirichlet shares. All methods of
a seed have the same rows; gradient methods have the same network, rounds, epochs and rate. Nothing
is tuned: penalties have the strengths below, so the table is no ranking. Accuracy is the mean over
stages of that on their test rows, after the last stage.

Bounds: `pooled` trains on all rows at once (its accuracy is that on all test rows), `pooled-stages`
has one site with the rows of each stage, and `alone-stages` shares nothing. For MNIST:
python bench/fcl.py --data mnist --train 1 --valid 0 --alpha 0.1 --features 2000 --device cuda
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

import atoll

BASE = "fedavg"  # differences are to this one
ONE_SITE = {"clients": 1, "rows": "even"}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "pooled": {"method": "fedavg", **ONE_SITE, "stages": 1},
    "pooled-stages": {"method": "fedavg", **ONE_SITE},
    "alone-stages": {"method": "alone"},
    "fedavg": {"method": "fedavg"},
    "fedprox": {"method": "fedavg", "penalty": "proximal", "strength": 0.01},
    "ewc": {"method": "fedavg", "penalty": "ewc", "strength": 100.0},
    "si": {"method": "fedavg", "penalty": "si", "strength": 1.0},
    "lwf": {"method": "fedavg", "penalty": "lwf", "strength": 1.0},
    "replay": {"method": "replay", "choice": "random"},
    "herding": {"method": "replay", "choice": "herding"},
    "fot": {"method": "fot"},
    "analytic": {"method": "analytic"},
}


@dataclass(frozen=True)
class Measured:
    """One run: accuracy on all classes after the last stage, and what it cost."""

    accuracy: float
    forgetting: float  # 0 with one stage
    megabytes: float
    seconds: float


def options(name: str, asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The options of a run of a method."""
    scenario = {
        "data": asked.data, "split": "classes", "stages": asked.stages, "clients": asked.clients,
        "rows": "dirichlet", "alpha": asked.alpha, "train": asked.train, "valid": asked.valid,
    }  # fmt: skip
    run = {"seed": seed, "engine.device": asked.device, "robust.rule": "none", "checkpoints": False}
    given = {**scenario, **run, "rounds": asked.rounds, "widths": asked.widths, **METHODS[name]}
    if given["method"] == "analytic":
        return given | {"rounds": 1, "width": asked.features, "projection": seed}
    if name == "pooled":
        given["rounds"] = asked.rounds * asked.stages  # as many rounds as the others have in all
    given |= {"epochs": asked.epochs, "batch": asked.batch, "rate": asked.rate}
    if given["method"] == "replay":
        given["memory"] = asked.memory
    if given["method"] == "alone":
        given["columns"] = "common"
    elif name not in ("pooled", "pooled-stages"):
        given["weighting"] = "rows"
    return given


def measure(name: str, asked: argparse.Namespace, seed: int, folder: Path) -> Measured:
    """Run a method with a seed."""
    given = options(name, asked, seed)
    method, began = given.pop("method"), time.monotonic()
    run = atoll.run(method, out=folder, answer=False, method={"name": method}, **given)
    (metrics,) = run.metrics.values()
    megabytes = (metrics["bytes_up"] + metrics["bytes_down"]) / 1e6
    seconds = time.monotonic() - began
    forgetting = metrics["forgetting_best_last"]
    return Measured(metrics["final_accuracy"], forgetting, megabytes, seconds)


def line(name: str, runs: Sequence[Measured], base: Sequence[Measured]) -> str:
    """One line of the table; with two seeds or more, the 95 % interval of the paired difference."""
    accuracies = [run.accuracy for run in runs]
    spread = statistics.stdev(accuracies) if len(runs) > 1 else float("nan")
    gains = np.array([one.accuracy - other.accuracy for one, other in zip(runs, base, strict=True)])
    apart = f"{gains.mean():+.4f}"
    if len(runs) > 1 and name != BASE:
        reach = t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
        apart += f" [{gains.mean() - reach:+.4f}, {gains.mean() + reach:+.4f}]"
    forgetting = statistics.mean(run.forgetting for run in runs)
    megabytes, seconds = (
        statistics.mean(getattr(run, field) for run in runs) for field in ("megabytes", "seconds")
    )
    cells = [name, f"{statistics.mean(accuracies):.4f}", f"{spread:.4f}", apart,
             f"{forgetting:.4f}", f"{megabytes:.1f}", f"{seconds:.1f}"]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table(results: Mapping[str, Sequence[Measured]]) -> list[str]:
    """The whole table."""
    head = "| method | accuracy | sd | difference to fedavg | forgetting | MB | seconds |"
    lines = [line(name, runs, results[BASE]) for name, runs in results.items()]
    return [head, "|---|---|---|---|---|---|---|", *lines]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits-table")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="keep the runs, for atoll report")
    for name, kind, usual in (
        ("clients", int, 5), ("stages", int, 5), ("alpha", float, 0.5), ("train", float, 0.6),
        ("valid", float, 0.2),
        ("rounds", int, 10), ("epochs", int, 1), ("batch", int, 64), ("rate", float, 0.01),
        ("memory", int, 200), ("features", int, 500),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=usual)
    parser.add_argument("--widths", type=int, nargs="+", default=[64])
    return parser.parse_args(given)


def measure_all(asked: argparse.Namespace, folder: Path) -> dict[str, list[Measured]]:
    """Every method with every seed."""
    results = {}
    for name in asked.methods.split(","):
        results[name] = [
            measure(name, asked, seed, folder / f"{name}-{seed}") for seed in range(asked.seeds)
        ]
        print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Print the table of all methods."""
    asked = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure_all(asked, asked.out or Path(scratch))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
