"""Every client has its own sequence of tasks; no two share a training row (FedSeIT)."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.core.options import AtLeastOne, Fraction
from atoll.core.rng import Stream
from atoll.data import partition
from atoll.data.dataset import Dataset
from atoll.data.partition import Array
from atoll.data.scenario import Holding, Scenario, Split

__all__ = ["SPLIT", "Options", "task_allocation", "task_draws", "task_rows"]
DRAW_SEED: Final = 42  # FedSeIT, g.2 and g.3: the tasks are the same in every run


@dataclass(frozen=True)
class Options:
    """How tasks are drawn and dealt to clients."""

    clients: AtLeastOne = 3  # number of clients
    stages: AtLeastOne = 1  # number of tasks of a client, one for each stage
    task_classes: AtLeastOne = 4  # number of classes of a task
    held_back: Fraction = 0.125  # share of a task's rows to validate on, by class
    train: Fraction = 0.6  # share of the rows in the tasks, together with valid; the rest is tested
    valid: Fraction = 0.2  # counts as train here: held_back says what is validated on
    official_test: bool = True  # test on the data set's own test rows, if it has some


def deal(dataset: Dataset, options: Options, seed: int) -> Scenario:
    """Draw tasks, cut the rows of each class over them, and allocate the tasks to clients."""
    _check(dataset, options)
    parts = partition.cut_all(dataset, options, Stream.of(seed, "split"))
    pool = np.sort(np.concatenate([parts.train, parts.valid]))  # g.3: in file order
    tasks = _drawn_tasks(dataset, options, parts.test)
    stream = Stream.of(DRAW_SEED, "split", "tasks")
    holdings = []
    for number, rows in enumerate(task_rows(pool, dataset.strata, tasks)):
        take = partition.by_class(dataset.strata, stream.child(number).numpy(), keep=1)
        valid, train = take(rows, math.ceil(options.held_back * len(rows) - 1e-9))
        holdings.append(Holding(train, valid, partition.NONE))
    tested = [partition.of_classes(parts.test, dataset.strata, kinds) for kinds in tasks]
    order = task_allocation(options.clients, options.stages, seed)
    return partition.build_scenario(
        partition.client_ids(options.clients),
        [[holdings[number] for number in sequence] for sequence in order],
        [[tested[number] for number in sequence] for sequence in order],
        partition.task_names(options.stages),
        partition.all_columns(dataset),
    )


def _check(dataset: Dataset, options: Options) -> None:
    """Refuse tasks that the rows cannot fill, before anything is built for them."""
    if dataset.stage is not None:
        raise partition.refusal("your own texts have tasks of their own", "use split = 'streams'")
    partition.check_clients(dataset, options.clients)
    if options.clients * options.stages > len(dataset):
        raise partition.refusal(
            f"{len(dataset):,} rows are too few for {options.clients:,} clients with"
            f" {options.stages:,} tasks each",
            "ask for fewer clients or stages",
        )


def _drawn_tasks(dataset: Dataset, options: Options, test: Array) -> list[tuple[int, ...]]:
    """The classes of each task, drawn from those that have test rows, in the order of names."""
    kinds = sorted(np.unique(dataset.strata[test]).tolist(), key=lambda kind: dataset.classes[kind])
    if options.task_classes > len(kinds):
        raise partition.refusal(
            f"a task of {options.task_classes} classes cannot be drawn from {len(kinds)}",
            "lower task_classes",
        )
    draws = task_draws(len(kinds), options.task_classes, options.clients * options.stages)
    return [tuple(kinds[place] for place in draw) for draw in draws]


def task_draws(classes: int, size: int, tasks: int) -> list[tuple[int, ...]]:
    """The classes of each task, as FedSeIT draws them: the same in every run."""
    ids = list(range(classes))
    random.Random(DRAW_SEED).shuffle(ids)
    return [tuple(random.Random(DRAW_SEED + task).sample(ids, size)) for task in range(tasks)]


def task_allocation(clients: int, tasks_each: int, seed: int) -> list[list[int]]:
    """The tasks of each client in its order, as FedSeIT allocates them."""
    names = sorted(range(clients * tasks_each), key=str)  # file names sort as text: 0, 1, 10, 2
    used: set[int] = set()
    sequences = []
    for client in range(clients):
        order = list(names)
        random.Random(client * seed + 5).shuffle(order)
        tasks = [task for task in order if task not in used][:tasks_each]
        used.update(tasks)
        sequences.append(tasks)
    return sequences


def task_rows(rows: Array, labels: Array, tasks: Sequence[Sequence[int]]) -> list[Array]:
    """Rows of each task: a class's rows, in the order given, are cut over the tasks that drew it.

    The parts are contiguous, disjoint and equal; the last one takes the remainder.
    """
    pieces: list[list[Array]] = [[] for _ in tasks]
    for kind in sorted({kind for task in tasks for kind in task}):
        takers = [number for number, task in enumerate(tasks) if kind in task]
        members = rows[labels[rows] == kind]
        size = len(members) // len(takers)
        borders = [size * number for number in range(1, len(takers))]
        for taker, piece in zip(takers, np.split(members, borders), strict=True):
            pieces[taker].append(piece)
    return [np.sort(np.concatenate(parts)) for parts in pieces]


SPLIT = Split(Options, deal)
