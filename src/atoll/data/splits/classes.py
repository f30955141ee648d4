"""Every client has rows of its own, and classes arrive by stage; all columns are common."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.partition import Array
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
    blur: Fraction = 0.0  # share of a client's training rows of a stage that come at other stages
    orders: Literal["same", "own"] = "same"  # own: each client has the stages in a random order
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
    tasks = partition.task_names(len(stages))
    scenario = partition.horizontal(dataset, options, seed, stages, tasks)
    stream = Stream.of(seed, "split")
    if options.blur:
        if sum(len(stage) for stage in stages) > len(np.unique(np.concatenate(stages))):
            raise partition.refusal(
                "blur needs classes that belong to one stage each", "leave out blur or the windows"
            )
        scenario = _blurred(scenario, options.blur, stream.child("blur"))
    return _reordered(scenario, stream.child("order")) if options.orders == "own" else scenario


def _blurred(scenario: Scenario, share: float, stream: Stream) -> Scenario:
    """Each client's training rows, a share of each stage dealt to the other stages in turn."""
    holdings = {}
    for id, periods in scenario.holdings.items():
        generator = stream.child(id).numpy()
        parts: list[list[Array]] = [[] for _ in periods]
        for stage, holding in enumerate(periods):
            rows = generator.permutation(holding.train)
            moved = round(share * len(rows)) if len(periods) > 1 else 0
            parts[stage].append(rows[moved:])
            others = [number for number in range(len(periods)) if number != stage]
            for turn, number in enumerate(others):
                parts[number].append(rows[:moved][turn :: len(others)])
        trains = [np.concatenate(several) for several in parts]
        holdings[id] = tuple(
            replace(holding, train=train) for holding, train in zip(periods, trains, strict=True)
        )
        for stage, train in enumerate(trains):
            partition.check_training(id, stage, len(train))
    return replace(scenario, holdings=holdings)


def _reordered(scenario: Scenario, stream: Stream) -> Scenario:
    """The stages of each client in an order of its own; a task is known once any client has it."""
    holdings, first = {}, [scenario.stages] * scenario.stages
    for id, periods in scenario.holdings.items():
        order = stream.child(id).numpy().permutation(scenario.stages).tolist()
        holdings[id] = tuple(periods[task] for task in order)
        for stage, task in enumerate(order):
            first[task] = min(first[task], stage)
    return replace(scenario, holdings=holdings, known_at=tuple(first))


SPLIT = Split(Options, deal)
