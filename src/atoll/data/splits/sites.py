"""Every client is a group that the data set names; all columns are common."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.core.options import Fraction
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.scenario import Holding, Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How the rows of each group are divided."""

    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on; with official test rows: train:valid
    official_test: bool = True  # test on the data set's own test rows, if it has some
    tests: Literal["shared", "own"] = "shared"  # own: every client has test rows of its own


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """One client for each group, in the order of their names."""
    stream = Stream.of(seed, "split", "sites")
    groups = sorted(partition.group_rows(dataset).items())
    parts = [
        partition.cut_rows(dataset, options, rows, partition.at_random(stream.child(name).numpy()))
        for name, rows in groups
    ]
    tests = [[part.test] for part in parts]
    if options.tests == "shared":
        tests = [[np.concatenate([part.test for part in parts])]]
    holdings = [[Holding(part.train, part.valid, partition.NONE)] for part in parts]
    names = tuple(name for name, _ in groups)
    return partition.build_scenario(
        names, holdings, tests, ("all",), partition.all_columns(dataset)
    )


SPLIT = Split(Options, deal)
