"""How many trained runs on shuffled labels have any site that reads helps or hurts; at most 8 %.

Run from the repository's root: `python -m bench.shuffled [--runs 200]`.
"""

import argparse

import torch

from tests.properties.shuffled import decides, shuffled_answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decided, overall = [], []
    for seed in range(options.runs):
        body = shuffled_answer(seed)
        if decides(body):
            decided.append(seed)
        if body["overall"]["verdict"]["kind"] in ("helps", "hurts"):
            overall.append(seed)
        print(f"{seed + 1} runs: any site {len(decided)}, overall {len(overall)}", flush=True)


if __name__ == "__main__":
    main()
