"""Two versions of atoll, side by side: the same benchmark in turns, medians with their spread.

    python bench/interleaved.py BEFORE AFTER --repeats 5 --device cuda [--stored FILE]

BEFORE and AFTER are checkouts. Each repeat runs `steps.py` and `pfl.py` of both, in an order that
alternates, so that a machine that slows down slows both. A number is a rate or a time of one
benchmark; the last column is AFTER over BEFORE. With --stored, runs that ended are lines of that
file, and the same command runs what is missing.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def output(tree: Path, arguments: list[str]) -> list[str]:
    """The lines that a benchmark of a checkout prints, with a tuning cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": cache}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tree / "bench", env=environment, capture_output=True, text=True, check=True
        )
    return done.stdout.splitlines()


def measure(tree: Path, device: str, clients: str, rounds: int) -> dict[str, float]:
    """One repeat: client-steps per second, where there are clients, and seconds of rounds."""
    numbers: dict[str, float] = {}
    if rounds:
        (line,) = output(tree, ["pfl.py", "--device", device, "--rounds", str(rounds)])
        numbers[f"pfl, {rounds} rounds (s)"] = json.loads(line)["seconds"]
    if not clients:
        return numbers
    steps = ["steps.py", "--device", device, "--clients", clients, "--epochs", "2", "--loops", "1"]
    for line in output(tree, steps):
        if line.startswith("{"):
            row = ast.literal_eval(line)
            for way in ("stacked", "auto"):
                numbers[f"steps, {row['clients']} clients, {way} (steps/s)"] = row[way]
    return numbers


def stored(file: Path | None) -> dict[tuple[int, str], dict[str, float]]:
    """The numbers of earlier calls, by repeat and version."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["repeat"], row["version"]): row["numbers"] for row in rows}


def store(file: Path | None, number: int, name: str, numbers: dict[str, float]) -> None:
    """Add a line for a run that has ended."""
    if file is not None:
        row = {"repeat": number, "version": name, "numbers": numbers}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def main() -> None:
    """Run the repeats in turns and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", default="75,1125", help="empty: no steps.py")
    parser.add_argument("--rounds", type=int, default=1500, help="of pfl.py; 0: none")
    parser.add_argument("--stored", type=Path, help="file of runs that have ended")
    given = parser.parse_args()
    earlier = stored(given.stored)
    trees = {"before": given.before.resolve(), "after": given.after.resolve()}
    repeats: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(given.repeats):
        order = list(trees) if number % 2 == 0 else list(reversed(trees))
        for name in order:
            numbers = earlier.get((number, name))
            if numbers is None:
                numbers = measure(trees[name], given.device, given.clients, given.rounds)
                store(given.stored, number, name, numbers)
            repeats[name].append(numbers)
            print(number, name, repeats[name][-1], flush=True)
    for key in repeats["before"][0]:
        medians, spreads = {}, {}
        for name, several in repeats.items():
            values = [one[key] for one in several]
            medians[name] = statistics.median(values)
            spreads[name] = f"{min(values):.4g} to {max(values):.4g}"
        ratio = medians["after"] / medians["before"]
        print(
            f"{key}: before {medians['before']:.4g} ({spreads['before']}),"
            f" after {medians['after']:.4g} ({spreads['after']}), ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
