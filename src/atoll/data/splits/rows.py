"""Every client has rows of its own; all columns are common and there is one stage."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.core.options import AtLeastOne, Fraction, Positive
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.scenario import Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How rows are dealt to clients."""

    clients: AtLeastOne = 3  # number of clients
    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on; with official test rows: train:valid
    official_test: bool = True  # test on the data set's own test rows, if it has some
    tests: Literal["shared", "own"] = "shared"  # own: every client has test rows of its own
    rows: Literal["even", "dirichlet"] = "even"  # equal parts without remainder, or uneven classes
    alpha: Positive = 0.5  # Dirichlet concentration; smaller is more uneven
    least: AtLeastOne = 1  # fewest training rows of a client, with Dirichlet shares


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """Rows of all classes, at one stage."""
    return partition.horizontal(dataset, options, seed, [np.arange(len(dataset.classes))], ("all",))


SPLIT = Split(Options, deal)
