"""UCI Adult as four CSV files: two larger sites, two small ones, columns of their own.

    python bench/adult.py FOLDER

Rows are drawn without putting back, so no person is at two sites. Then, in the folder, with
`atoll` alone: see docs/own-data.md, which has the commands and what they measured.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet

from atoll.data.fetch import folder as data_folder

COMMON = ("age", "education-num", "hours-per-week", "sex", "marital-status", "income")
SITES = {
    "north": (3000, ("occupation", "workclass")),
    "south": (1500, ("relationship", "capital-gain")),
    "east": (400, ("occupation",)),
    "west": (200, ("race",)),
}


def main(home: Path) -> None:
    """Write the files."""
    people = pyarrow.parquet.read_table(data_folder() / "tabular" / "adult.parquet").to_pylist()
    order = iter(np.random.default_rng(0).permutation(len(people)))
    home.mkdir(parents=True, exist_ok=True)
    for name, (rows, own) in SITES.items():
        with (home / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*COMMON, *own], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(people[next(order)] for _ in range(rows))
        print(f"{rows} rows in {home / name}.csv")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
