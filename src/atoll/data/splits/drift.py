"""Classes come and go gradually, without boundaries of tasks; all columns are common.

Each class has its time of the stream, and its rows arrive around it in a normal distribution, as
in task-free continual learning: Shanahan, Kaplanis, Mitrović, Encoders and Ensembles for Task-Free
Continual Learning, 2021. With one round for each stage no method sees where anything ends.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from atoll.core.options import AtLeastOne, Fraction, Positive
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.scenario import Scenario, Split

__all__ = ["SPLIT", "Options"]


@dataclass(frozen=True)
class Options:
    """How rows are dealt to clients, and when they arrive."""

    clients: AtLeastOne = 3  # number of clients
    stages: AtLeastOne = 20  # steps of the stream
    spread: Positive = 0.1  # standard deviation of a class's times, in lengths of the stream
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
    """Every row arrives once; a task for each class, known from the time of the class on."""
    generator = Stream.of(seed, "split", "drift").numpy()
    classes = len(dataset.classes)
    times = (dataset.strata + 0.5) / classes + options.spread * generator.normal(size=len(dataset))
    # equally many rows at each stage
    ranks = np.argsort(np.argsort(times, kind="stable"), kind="stable")
    arrival = ranks * options.stages // len(dataset)
    stages = [np.array([stage]) for stage in range(options.stages)]
    names = partition.task_names(options.stages)
    scenario = partition.horizontal(dataset, options, seed, stages, names, arrival)
    tests = {}
    for id, several in scenario.tests.items():
        rows = np.concatenate(several)
        tests[id] = tuple(
            partition.of_classes(rows, dataset.strata, [kind]) for kind in range(classes)
        )
        for kind, part in enumerate(tests[id]):
            partition.check_tests(id, dataset.classes[kind], len(part))
    starts = tuple((kind * options.stages) // classes for kind in range(classes))
    return replace(scenario, tests=tests, tasks=tuple(dataset.classes), known_at=starts)


SPLIT = Split(Options, deal)
