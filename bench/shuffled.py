"""How many trained runs on shuffled labels have any site that reads helps or hurts; at most 8 %.

Run from the repository's root: `python -m bench.shuffled [--runs 200] [--first 0] [--write]`.
`--write` renews `bench/results/shuffled.json` after every run; `--first` goes on from a seed.
"""

import argparse
import json
from pathlib import Path

import torch

from tests.properties.shuffled import decides, shuffled_answer

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results" / "shuffled.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="go on from this seed")
    parser.add_argument("--write", action="store_true", help="renew bench/results/shuffled.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {"runs": 0, "any_site": [], "overall": []}  # seeds of runs with a verdict
    if options.first:
        results = json.loads(RESULTS.read_text())
        assert results["runs"] == options.first, "the file has another number of runs"
    for seed in range(options.first, options.runs):
        body = shuffled_answer(seed)
        if decides(body):
            results["any_site"].append(seed)
        if body["overall"]["verdict"]["kind"] in ("helps", "hurts"):
            results["overall"].append(seed)
        results["runs"] = seed + 1
        any_site, overall = len(results["any_site"]), len(results["overall"])
        print(f"{seed + 1} runs: any site {any_site}, overall {overall}", flush=True)
        if options.write:
            RESULTS.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
