"""What checks during a run cost: the same run with `engine.verify` off and sampled, in turns.

FedAvg on the digits, stacked. Runs of 10, 100 and 1,000 rounds: two rounds are checked in any case,
later ones as 1 % of the elapsed time allows. CPU seconds of the process are compared, since other
processes on the machine disturb them less than the clock on the wall.
"""

import argparse
import json
import statistics
from typing import Any

import jobs

from atoll.runs.config import RunConfig


def config(given: Any, rounds: int, verify: str) -> RunConfig:
    """The run."""
    return jobs.config(
        {
            "name": "verify", "rounds": rounds, "data": {"name": "digits"},
            "scenario": {"split": "rows", "clients": given.clients},
            "model": {"widths": [64]},
            "method": {"name": "fedavg", "batch": 16, "epochs": given.epochs},
            "engine": {
                "mode": "stacked", "packing": False, "device": given.device, "verify": verify,
            },
        }
    )  # fmt: skip


def measure(given: Any, rounds: int) -> dict[str, Any]:
    """Runs in turns; the first of each warms up."""
    cpu = given.device == "cpu"
    seconds: dict[str, list[float]] = {"off": [], "sampled": []}
    shares = []
    for turn in range(given.turns + 1):
        for verify, found in seconds.items():
            done = jobs.run(config(given, rounds, verify), cpu=cpu)
            if turn:
                found.append(done.seconds)
            if turn and verify == "sampled":
                shares.append(done.checks / done.seconds)
    ratios = [a / b - 1 for a, b in zip(seconds["sampled"], seconds["off"], strict=True)]
    return {
        "rounds": rounds,
        **{f"{verify}, seconds": statistics.median(found) for verify, found in seconds.items()},
        "cost, median": f"{statistics.median(ratios):+.1%}",
        "cost, least and most": f"{min(ratios):+.1%} {max(ratios):+.1%}",
        "share of time in checks": f"{statistics.median(shares):.1%}",
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", default="10,100,1000")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    jobs.warm(given.device)
    for rounds in given.rounds.split(","):
        print(json.dumps(measure(given, int(rounds))), flush=True)


if __name__ == "__main__":
    main()
