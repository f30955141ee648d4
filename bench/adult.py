"""UCI Adult as four CSV files: two larger sites, two small ones, columns of their own.

    python bench/adult.py FOLDER          # writes the files
    python bench/adult.py FOLDER SWEEP    # what the models of a sweep in it say of new people

Rows are drawn without putting back, so no person is at two sites or both old and new. In between
the folder is used with `atoll` alone: see docs/own-data.md, which has the commands and what they
measured. New people are 5,000 a site, since a small site has few rows of its own to test on.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet

from atoll.data.sources.fetch import folder as data_folder
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.tables import predict

COMMON = ("age", "education-num", "hours-per-week", "sex", "marital-status", "income")
SITES = {
    "north": (3000, ("occupation", "workclass")),
    "south": (1500, ("relationship", "capital-gain")),
    "east": (400, ("occupation",)),
    "west": (200, ("race",)),
}
NEW = 5000
MODELS = ("local", "auto", "common")


def write(home: Path) -> None:
    """Write the files: those of the sites, then those of new people."""
    people = pyarrow.parquet.read_table(data_folder() / "tabular" / "adult.parquet").to_pylist()
    order = iter(np.random.default_rng(0).permutation(len(people)))
    home.mkdir(parents=True, exist_ok=True)
    files = [(name, rows, own) for name, (rows, own) in SITES.items()]
    files += [(f"{name}-new", NEW, own) for name, (_, own) in SITES.items()]
    for name, rows, own in files:
        with (home / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*COMMON, *own], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(people[next(order)] for _ in range(rows))
        print(f"{rows} rows in {home / name}.csv")


def compare(home: Path, sweep: str) -> None:
    """The accuracy of each site's models on new people, and what together adds to alone."""
    for site in SITES:
        found: dict[str, list[float]] = {model: [] for model in MODELS}
        for run in sorted((home / sweep).glob("point-*")):
            for model in MODELS:
                to = home / "predictions.csv"
                done = predict(Predictor(run, site, model), home / f"{site}-new.csv", to, False)
                found[model].append(float(done.right or 0) / done.rows)
        means = ", ".join(f"{model} {np.mean(values):.4f}" for model, values in found.items())
        print(f"{site}: {means}")
        for model in ("auto", "common"):
            gain = 100 * (np.array(found[model]) - np.array(found["local"]))
            error = gain.std(ddof=1) / np.sqrt(len(gain))
            above = int((gain > 0).sum())
            print(f"  {model} - local: {gain.mean():+.2f} ± {error:.2f}, above in {above} runs")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        compare(Path(sys.argv[1]), sys.argv[2])
    else:
        write(Path(sys.argv[1]))
