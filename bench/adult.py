"""UCI Adult as four CSV files: two larger sites, two small ones, columns of their own.

    python bench/adult.py FOLDER          # writes the files
    python bench/adult.py FOLDER SWEEP    # what the models of a sweep in it say of new people

Rows are drawn without putting back, so no person is at two sites or both old and new. In between
the folder is used with `atoll` alone: see docs/own-data.md, which has the commands and what they
measured. New people are 5,000 a site, since a small site has few rows of its own to test on.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from atoll.data.sources.fetch import folder as data_folder
from atoll.metrics.statistics import compare_over_seeds
from atoll.metrics.verdicts import judge, shared_level
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.tables import predict

Array = np.ndarray[Any, Any]
LABEL = "income"
COMMON = ("age", "education-num", "hours-per-week", "sex", "marital-status", LABEL)
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
    """Each site's models on new people, with the verdict of the answer over people and seeds."""
    runs = sorted((home / sweep).glob("point-*"))
    for site in SITES:
        truth = column(home / f"{site}-new.csv", LABEL)
        values, counts = np.unique(column(home / f"{site}.csv", LABEL), return_counts=True)
        guessing = np.tile(truth == values[counts.argmax()], (len(runs), 1))
        right = {model: hits(home, site, model, runs, truth) for model in MODELS}
        means = ", ".join(f"{model} {100 * one.mean():.1f} %" for model, one in right.items())
        print(f"{site}: {means}, majority class {100 * guessing.mean():.1f} %")
        for model in ("auto", "common"):
            gain, joined, alone = (
                compare_over_seeds(one.astype(float) - other, shared_level(len(SITES)))
                for one, other in (
                    (right[model], right["local"]),
                    (right[model], guessing),
                    (right["local"], guessing),
                )
            )
            verdict = judge(gain, joined, alone, needed="more seeds or people").text
            points = [100 * value for value in (gain.gain, gain.low, gain.high)]
            print(f"  {model}: {verdict}; {points[0]:+.1f} ({points[1]:+.1f} to {points[2]:+.1f})")


def column(path: Path, name: str) -> Array:
    """The words of one column of a file."""
    with path.open(newline="") as file:
        return np.array([row[name] for row in csv.DictReader(file)])


def hits(home: Path, site: str, model: str, runs: Sequence[Path], truth: Array) -> Array:
    """(runs, people): where a model of each run predicts the class of new people."""
    results, to = [], home / "predictions.csv"
    for run in runs:
        predict(Predictor(run, site, model), home / f"{site}-new.csv", to, False)
        results.append(column(to, "prediction") == truth)
    return np.stack(results)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        compare(Path(sys.argv[1]), sys.argv[2])
    else:
        write(Path(sys.argv[1]))
