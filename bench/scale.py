"""What a task costs as tasks and clients grow: bytes and seconds, with and without selection.

Made-up texts, every client with a task of its own at every stage. For each stage it tells what
crosses in the round that begins it (others' parts are sent then) and in a later one, and the time
of a later round, the median of those between the first and the last, which is tested: of the
processor on a CPU, which other programs do not change, else of the clock.
With selection (`sit`) a client is given `keep` parts whatever there is; without it one of every
client. The term that holds past tasks has one summand for each of them with either.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from atoll.core.record import Message
from atoll.engines.local import local_engine
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.result import Run


def values(given: argparse.Namespace, clients: int, transfer: str) -> dict[str, Any]:
    """A run of so many clients."""
    data = {
        "name": "synthetic-text", "rows": clients * given.tasks * given.rows,
        "classes": max(8, 4 * clients),  # so that a task's classes have few test rows
        "vocabulary": 5000, "length": given.length,
    }  # fmt: skip
    return change(
        read("fedseit"),
        {
            "data": data, "clients": clients, "stages": given.tasks, "rounds": given.rounds,
            "method.epochs": given.epochs, "method.transfer": transfer, "method.keep": given.keep,
            "widths": [given.filters], "vectors": f"random-{given.dimension}",
            "engine.device": given.device, "engine.mode": given.mode, "engine.packing": False,
            "engine.threads": 1, "checkpoints": False, "looks": False,
        },
    )  # fmt: skip


def measure(given: argparse.Namespace, clients: int, transfer: str) -> dict[str, Any]:
    """By stage: bytes of the first and of a later round for one client, seconds of a round."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        clock = time.process_time if given.device == "cpu" else time.monotonic
        marks = [(-1, 0, clock())]
        config = resolve(values(given, clients, transfer), "scale")
        execute(
            config, folder, local_engine, watch=lambda p: marks.append((p.stage, p.round, clock()))
        )
        sent = [e for e in Run(folder).events if isinstance(e, Message) and e.action != "check"]
    found: dict[str, Any] = {"seconds": marks[-1][2] - marks[0][2]}
    for stage in range(given.tasks):
        for name, number in (("first round", 0), ("later round", 1)):
            here = [m.bytes for m in sent if (m.stage, m.round) == (stage, number)]
            found.setdefault(f"bytes a client, {name}", []).append(sum(here) // clients)
        between = {(stage, number) for number in range(1, given.rounds - 1)}
        later = [b[2] - a[2] for a, b in pairwise(marks) if b[:2] in between]
        found.setdefault("seconds of a later round", []).append(statistics.median(later))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", default="3,20")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--transfers", default="sit,previous")
    parser.add_argument("--rounds", type=int, default=3, help="of a task, 3 or more")
    parser.add_argument("--rows", type=int, default=150, help="texts of a task, a fifth to test")
    parser.add_argument("--length", type=int, default=100, help="words of a text; half at least")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--filters", type=int, default=128)
    parser.add_argument("--dimension", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="loop")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for transfer in given.transfers.split(","):
        for clients in given.clients.split(","):
            found = measure(given, int(clients), transfer)
            print(transfer, clients, "clients", f"{found['seconds']:.0f} s in all")
            for name, row in found.items():
                if isinstance(row, list):
                    shown = [round(v, 3) if isinstance(v, float) else v for v in row]
                    print(f"  {name}: {shown}; last / second: {row[-1] / row[1]:.3f}")


if __name__ == "__main__":
    main()
