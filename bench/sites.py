"""Seconds and memory of `atoll inspect` on the files of many sites.

    python bench/sites.py [ROWS [COLUMNS [SITES]]]

100,000 rows in total, 50 columns and 10 sites by default: numbers, integer codes, words, dates,
gaps, an id and patients who come several times. The files are made in a temporary folder and
deleted.
"""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ATOLL = [sys.executable, "-c", "from atoll.cli import main; main()"]
WORDS = np.array(["north", "south", "east", "west", ""])


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


def main(rows: int = 100_000, columns: int = 50, sites: int = 10) -> None:
    """Make the files, time the command, delete the files."""
    home = Path(tempfile.mkdtemp(prefix="atoll-sites-"))
    try:
        os.chdir(home)
        files = [f"site{number}.csv" for number in range(sites)]
        for number, name in enumerate(files):
            with Path(name).open("w", newline="") as file:
                csv.writer(file).writerows(table(rows // sites, columns, number))
        size = sum(Path(name).stat().st_size for name in files)
        data = f'[data]\nfiles = {files}\nlabel = "outcome"\nid = "visit"\ngroup = "patient"\n'
        Path("run.toml").write_text(f'rounds = 1\n{data}[method]\nname = "chfl"\n')
        began = time.monotonic()
        child = subprocess.Popen([*ATOLL, "inspect", "run.toml"], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        assert status == 0
        print(
            f"{sites} files, {rows:,} rows, {columns} columns, {size / 1e6:.0f} MB: inspect took "
            f"{time.monotonic() - began:.1f} s ({used.ru_utime + used.ru_stime:.1f} s of processor "
            f"time) and held {used.ru_maxrss / 1024:.0f} MB; load {os.getloadavg()[0]:.1f}"
        )
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
