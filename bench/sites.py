"""Seconds and memory of `atoll inspect`, and of what a run reads, on the files of many sites.

    python bench/sites.py [--before CHECKOUT] [--write]

100,000 rows in total, 50 columns and 10 sites: numbers, integer codes, words, dates, gaps, an id
and patients who come several times. The files are made in a temporary folder and deleted. With
another checkout of atoll, what a run reads before it trains is measured with both, in turn.
`--write` renews `bench/results/sites.json`.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

INSPECT = "import sys; sys.argv[1:] = ['inspect', 'run.toml']; from atoll.cli import main; main()"
LOAD = """import tomllib, torch, atoll.data
with open('plain.toml', 'rb') as file: atoll.data.load('', **tomllib.load(file)['data'])
"""  # what a run does before it deals out the rows
HERE = Path(__file__).resolve().parents[1]
WORDS = np.array(["north", "south", "east", "west", ""])
ROWS, COLUMNS, SITES = 100_000, 50, 10
REPEATS = 3


def table(rows: int, columns: int, seed: int) -> list[list[str]]:
    """The names of columns, then rows: a tenth of the columns each codes, words and dates."""
    draw = np.random.default_rng(seed)
    patients = seed * rows + np.sort(draw.integers(0, rows // 2, rows))
    parts = [[f"{seed}-{row}" for row in range(rows)], [f"{number}" for number in patients]]
    names = ["visit", "patient"]
    score = np.zeros(rows)
    for place in range(columns - 3):
        names.append(f"column{place}")
        if place % 10 == 7:
            parts.append([str(code) for code in draw.integers(0, 5, rows)])
        elif place % 10 == 8:
            parts.append(draw.choice(WORDS, rows).tolist())
        elif place % 10 == 9:
            days = np.datetime64("2020-01-01") + draw.integers(0, 1000, rows)
            parts.append(days.astype(str).tolist())
        else:
            values = draw.normal(50, 10, rows)
            score += values - 50
            parts.append([f"{value:.2f}" for value in values])
    parts.append(np.where(score + draw.normal(0, 30, rows) > 0, "ill", "well").tolist())
    return [[*names, "outcome"], *map(list, zip(*parts, strict=True))]


def make_files() -> int:
    """Write the tables and two configs into this folder; the bytes of the tables."""
    files = [f"site{number}.csv" for number in range(SITES)]
    for number, name in enumerate(files):
        with Path(name).open("w", newline="") as file:
            csv.writer(file).writerows(table(ROWS // SITES, COLUMNS, number))
    data, method = f'[data]\nfiles = {files}\nlabel = "outcome"\n', '[method]\nname = "fedavg"\n'
    named = 'id = "visit"\ngroup = "patient"\n'
    Path("run.toml").write_text(f"rounds = 1\n{data}{named}{method}")
    Path("plain.toml").write_text(f'rounds = 1\n{data}ignore = ["visit", "patient"]\n{method}')
    return sum(Path(name).stat().st_size for name in files)


def measure(code: str, source: Path) -> dict[str, float]:
    """Seconds by the clock and of processor time, and the largest memory of some code."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    began = time.monotonic()
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, code
    return {
        "clock_s": round(time.monotonic() - began, 1),
        "processor_s": round(used.ru_utime + used.ru_stime, 1),
        "megabytes": round(used.ru_maxrss / 1024),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Make the files, time the commands, delete the files."""
    parser = argparse.ArgumentParser(description="Time atoll on the files of many sites.")
    parser.add_argument("--before", type=Path, help="another checkout, to compare reading with")
    parser.add_argument("--write", action="store_true", help="renew bench/results/sites.json")
    given = parser.parse_args()
    before = given.before.resolve() if given.before else None
    results: dict[str, Any] = {"rows": ROWS, "columns": COLUMNS, "sites": SITES}
    home = Path(tempfile.mkdtemp(prefix="atoll-sites-"))
    try:
        os.chdir(home)
        results["bytes"] = make_files()
        results["cores"] = os.cpu_count()
        results["machine"] = platform.machine()
        results["inspect"] = [measure(INSPECT, HERE) for _ in range(REPEATS)]
        loads: dict[str, list[dict[str, float]]] = {}
        for _ in range(REPEATS):
            loads.setdefault("load", []).append(measure(LOAD, HERE))
            if before:
                loads.setdefault("load_before", []).append(measure(LOAD, before))
        results |= loads
    finally:
        shutil.rmtree(home)
    for name, several in {"inspect": results["inspect"], **loads}.items():
        middle = {key: statistics.median(one[key] for one in several) for key in several[0]}
        print(name, middle)
    if given.write:
        path = HERE / "bench" / "results" / "sites.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
