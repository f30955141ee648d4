"""Every client has rows of its own of every domain, and domains arrive by stage."""

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
    """How rows are dealt to clients, and domains to stages."""

    clients: AtLeastOne = 3  # number of clients
    sequence: tuple[str, ...] = ()  # domains, one for each stage; empty: as the data set lists them
    train: Fraction = 0.6  # share of the rows to train on; train and valid leave the test rows
    valid: Fraction = 0.2  # share of the rows to validate on; with official test rows: train:valid
    official_test: bool = True  # test on the data set's own test rows, if it has some
    tests: Literal["shared", "own", "valid"] = (
        "shared"  # own: every client has test rows of its own; valid: validation rows, for tuning
    )
    rows: Literal["even", "dirichlet"] = "even"  # equal parts without remainder, or uneven classes
    alpha: Positive = 0.5  # Dirichlet concentration; smaller is more uneven
    least: AtLeastOne = 1  # fewest training rows of a client at a stage, with Dirichlet shares


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """One stage and one task for each domain; all classes occur at each stage."""
    names = list(partition.group_rows(dataset))
    order = options.sequence or tuple(names)
    if len(set(order)) < len(order) or not set(order) <= set(names):
        raise partition.refusal(
            f"sequence lists {', '.join(order)}",
            f"choose from {', '.join(names)}, each at most once",
        )
    stages = [np.array([names.index(name)]) for name in order]
    return partition.horizontal(dataset, options, seed, stages, order, dataset.group)


SPLIT = Split(Options, deal)
