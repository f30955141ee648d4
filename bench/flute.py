"""The FLUTE yardstick: logistic regression on MNIST, 1,000 clients, 10 a round, batch 10.

100 rounds, one epoch over a client's 60 rows, SGD with rate 0.03. Published for this task on CPU:
Flower 1.0 30 min 14 s, FLUTE 3 min 20 s (Garcia et al. 2022), on other machines than ours.
"""

import argparse
import json
from typing import Any

import jobs


def values(given: Any) -> dict[str, Any]:
    """The run's config."""
    return {
        "name": "flute",
        "rounds": given.rounds,
        "data": {"name": "mnist"},
        "scenario": {"split": "rows", "clients": given.clients, "train": 1.0, "valid": 0.0},
        "model": {"name": "nets:logistic"},
        "method": {
            "name": "fedavg", "optimiser": "sgd", "rate": 0.03, "batch": 10, "epochs": 1,
            "cohort": 10, "tester": "first",
        },
        "engine": {"mode": given.mode, "device": given.device, "packing": not given.unpacked},
    }  # fmt: skip


def main() -> None:
    """Run once, print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--mode", default="auto", choices=["auto", "loop", "stacked"])
    parser.add_argument("--unpacked", action="store_true")
    given = parser.parse_args()
    whole = jobs.run(jobs.config(values(given)))
    inside = jobs.run(jobs.config(values(given)), inside=True)
    print(
        json.dumps(
            {
                **vars(given),
                "seconds of all rounds and the test": round(whole.seconds, 3),
                "of these local training": round(inside.work, 3),
                "accuracy": whole.accuracy,
            }
        )
    )


if __name__ == "__main__":
    main()
