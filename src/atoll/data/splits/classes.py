"""Every client has rows of its own, and classes arrive by stage; all columns are common."""

from dataclasses import dataclass
from typing import Literal

from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.scenario import Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How rows are dealt to clients, and classes to stages."""

    clients: AtLeastOne = 3  # number of clients
    stages: AtLeastOne = 1  # number of stages
    window: NotNegativeInt = 0  # classes of a stage; 0: an even partition of all classes
    stride: AtLeastOne = 2  # classes from the start of one window to the next
    stage_classes: partition.ClassLists = ()  # instead: lists of classes, overlap4 or disjoint2
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
    """Rows of the classes of each stage; a row stays with the client that had it first."""
    stages = partition.class_stages(
        len(dataset.classes), options.stages, options.window, options.stride, options.stage_classes
    )
    return partition.horizontal(dataset, options, seed, stages, partition.task_names(len(stages)))


SPLIT = Split(Options, deal)
