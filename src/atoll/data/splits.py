"""Pure functions that part rows, columns and classes, and the scenarios that are built from them.

Every array of rows or columns is an array of indices; `labels` are those of the whole data set, so
that `labels[rows]` are the labels of some rows.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from atoll.core.errors import UserError
from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset
from atoll.data.scenario import Holding, Scenario

__all__ = [
    "Parts",
    "ScenarioOptions",
    "Take",
    "at_random",
    "by_class",
    "by_shares",
    "class_partition",
    "class_windows",
    "client_ids",
    "columns_by_stage",
    "columns_common_and_own",
    "columns_of_parties",
    "cut",
    "dirichlet_shares",
    "even",
    "image_quadrants",
    "image_strips",
    "own_sizes",
    "scenario",
    "task_allocation",
    "task_draws",
    "task_rows",
]

Array = np.ndarray[Any, Any]
Take = Callable[[Array, int], tuple[Array, Array]]  # (rows, count) -> those taken, those left
Deal = Callable[[Array, int], list[Array]]  # (rows, stage) -> the rows of each client

Split = Literal["rows", "columns", "sites", "classes", "parties", "tasks", "domains", "files"]
Stages = tuple[tuple[int, ...], ...] | Literal["overlap4", "disjoint2"]
Cut = Literal["contiguous", "permuted", "strips", "quadrants"]

_DRAW_SEED: Final = 42  # FedSeIT, g.2 and g.3: the tasks are the same in every run
_STAGES: Final = {  # V-LETO, g: the classes of each of four stages
    "overlap4": ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (6, 7, 8, 9)),
    "disjoint2": ((0, 1), (2, 3), (4, 5), (6, 7)),
}
_FEWEST: Final = 5  # rows of a site at a stage: to learn from, to choose by, to test on
_NONE: Final = np.empty(0, dtype=np.int64)
_ABSENT: Final = Holding(_NONE, _NONE, _NONE)  # of a client that has not joined yet


@dataclass(frozen=True)
class ScenarioOptions:
    """How a data set is dealt to clients and stages."""

    split: Split = "rows"  # what parts the clients from each other
    clients: AtLeastOne = 3  # how many clients; sites, domains: one for each group instead
    stages: AtLeastOne = 1  # steps in time: classes, parties by class; tasks: tasks of a client
    train: Fraction = 0.6  # share of the rows to learn from; what train and valid leave is tested
    valid: Fraction = 0.2  # share of the rows to choose by; with official test rows: train to valid
    official_test: bool = True  # test on the set's own test rows where it has them: all splits
    tests: Literal["shared", "own"] = "shared"  # own: test rows are dealt out too
    rows: Literal["even", "dirichlet"] = "even"  # even drops the remainder: where rows are dealt
    alpha: Positive = 0.5  # of the Dirichlet shares, small is uneven: where rows are dealt
    least: AtLeastOne = 1  # fewest training rows at a stage by Dirichlet: where rows are dealt
    ratio: Fraction = 0.3  # share of the columns that are common: columns
    common: tuple[int, ...] = ()  # the common columns, empty to draw by ratio: columns
    feature_seed: NotNegativeInt = 0  # seed of the order of columns: columns, parties if permuted
    cut: Cut = "contiguous"  # how columns are cut, strips and quadrants for images: parties
    mode: Literal["none", "classes", "columns"] = "none"  # what comes by stage: parties
    window: NotNegativeInt = 0  # classes in a stage, 0 parts all evenly: classes, parties by class
    stride: AtLeastOne = 2  # classes from one window to the next: classes, parties by class
    stage_classes: Stages = ()  # instead: lists of numbers, overlap4, disjoint2: classes, parties
    joint_aug: bool = False  # whole images moved and mirrored before the cut; simulation: parties
    task_classes: AtLeastOne = 4  # classes drawn for a task: tasks
    held_back: Fraction = 0.125  # share of a task's rows to choose by, by class: tasks
    sizes: tuple[int, ...] = ()  # training rows of each client, empty for all: domains
    stratified: bool = False  # keep the shares of the classes in every cut: domains
    paper_compat: bool = False  # as FCCL's published code: tests on training rows too: domains
    drawn_twice: bool = False  # as there: other rows before the first round, with sizes: domains


@dataclass(frozen=True)
class Parts:
    """Rows to learn from, to choose by, and to test on."""

    train: Array
    valid: Array
    test: Array


def _refusal(what: str, remedy: str) -> UserError:
    return UserError(what, "scenario", remedy)


def client_ids(count: int) -> tuple[str, ...]:
    """The ids of so many clients, padded so that sorted ids stay in order."""
    width = len(str(count - 1))
    return tuple(f"site-{number:0{width}d}" for number in range(count))


# Rows


def at_random(generator: np.random.Generator) -> Take:
    """Takes any rows, each with equal chance."""

    def take(rows: Array, count: int) -> tuple[Array, Array]:
        shuffled = generator.permutation(rows)
        return shuffled[:count], shuffled[count:]

    return take


def by_class(labels: Array, generator: np.random.Generator, keep: int = 0) -> Take:
    """Takes from each class in proportion, leaving at least `keep` rows of each."""

    def take(rows: Array, count: int) -> tuple[Array, Array]:
        shuffled = generator.permutation(rows)
        _, kinds, sizes = np.unique(labels[shuffled], return_inverse=True, return_counts=True)
        counts = _proportional(sizes, count, np.maximum(sizes - keep, 0))
        order = np.argsort(kinds, kind="stable")
        rank = np.empty(len(rows), dtype=np.int64)  # of a row among those of its class
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        taken = rank < counts[kinds]
        return shuffled[taken], shuffled[~taken]

    return take


def _proportional(sizes: Array, count: int, most: Array) -> Array:
    """Whole numbers near sizes * count / sum(sizes), none above `most`, with the sum `count`."""
    quota = sizes * count / max(1, int(sizes.sum()))
    counts = np.minimum(np.floor(quota).astype(np.int64), most)
    left = min(count, int(most.sum())) - int(counts.sum())
    while left > 0:
        behind = np.where(counts < most, quota - counts, -np.inf)
        counts[np.argmax(behind)] += 1
        left -= 1
    return counts


def cut(
    rows: Array, train: float, valid: float, take: Take, official: Array | None = None
) -> Parts:
    """Rows to learn from, to choose by and to test on; `official` marks those to test on.

    Without official test rows the shares leave the rest for testing; with them, the other rows
    are cut in the proportion of train to valid.
    """
    if official is None:
        pool, test = take(rows, round((train + valid) * len(rows)))
        count = round(train * len(rows))
    else:
        pool, test = rows[~official], rows[official]
        count = round(train * len(pool) / (train + valid)) if train > 0 else 0
    chosen, rest = take(pool, count)
    return Parts(chosen, rest, test)


def even(rows: Array, parts: int) -> list[Array]:
    """Contiguous parts of equal size; the remainder, fewer rows than parts, is dropped."""
    size = len(rows) // parts
    return [rows[number * size : (number + 1) * size] for number in range(parts)]


def dirichlet_shares(
    classes: int, clients: int, alpha: float, generator: np.random.Generator
) -> Array:
    """For each class the share that each client has of it: (classes, clients), rows sum to 1."""
    return generator.dirichlet(np.full(clients, alpha), size=classes)


def by_shares(
    rows: Array, labels: Array, shares: Array, least: int, generator: np.random.Generator
) -> list[Array]:
    """Every row goes to one client, by its class's shares; then the largest give to the smallest.

    Each client has `least` rows in the end, or, where there are too few, sizes differ by 1 at most.
    """
    shuffled = generator.permutation(rows)
    parts: list[list[int]] = [[] for _ in range(shares.shape[1])]
    for kind in np.unique(labels[rows]):
        mine = shuffled[labels[shuffled] == kind]
        # One offset for all cuts: each client's number of rows is right on average, however few.
        places = np.floor(np.cumsum(shares[kind])[:-1] * len(mine) + generator.random())
        pieces = np.split(mine, np.minimum(places, len(mine)).astype(np.int64))
        for part, piece in zip(parts, pieces, strict=True):
            part.extend(piece.tolist())
    _level(parts, least)
    return [np.array(part, dtype=np.int64) for part in parts]


def _level(parts: list[list[int]], least: int) -> None:
    """Moves one row at a time from the largest part to the smallest, until that has `least`."""
    sizes = np.array([len(part) for part in parts])
    while True:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        if sizes[poor] >= least or sizes[rich] - sizes[poor] <= 1:
            return
        parts[poor].append(parts[rich].pop())
        sizes[poor] += 1
        sizes[rich] -= 1


# Columns


def columns_common_and_own(order: Array, common: int, clients: int) -> tuple[Array, list[Array]]:
    """The first columns of an order are common, the rest is cut into one piece for each client."""
    pieces = np.array_split(order[common:], clients)
    return np.sort(order[:common]), [np.sort(piece) for piece in pieces]


def columns_of_parties(order: Array, clients: int) -> list[Array]:
    """Contiguous pieces of an order of columns, whose sizes differ by 1 at most."""
    return columns_common_and_own(order, 0, clients)[1]


def image_strips(channels: int, height: int, width: int, clients: int) -> list[Array]:
    """Strips from left to right, of equal width but for the last, which takes the remainder."""
    pixels = np.arange(channels * height * width).reshape(channels, height, width)
    borders = [number * (width // clients) for number in range(1, clients)]
    return [strip.ravel() for strip in np.split(pixels, borders, axis=2)]


def image_quadrants(channels: int, height: int, width: int) -> list[Array]:
    """Upper left, upper right, lower left, lower right; the latter ones take the remainder."""
    pixels = np.arange(channels * height * width).reshape(channels, height, width)
    halves = np.split(pixels, [height // 2], axis=1)
    return [part.ravel() for half in halves for part in np.split(half, [width // 2], axis=2)]


def columns_by_stage(pieces: Sequence[Array]) -> list[list[Array]]:
    """For each client its columns at each stage: client k has none before stage k."""
    stages = range(len(pieces))
    return [
        [piece if stage >= number else _NONE for stage in stages]
        for number, piece in enumerate(pieces)
    ]


# Classes and tasks


def class_partition(classes: int, stages: int) -> list[Array]:
    """Contiguous disjoint runs of classes, whose sizes differ by 1 at most."""
    if stages > classes:
        raise _refusal(f"{classes} classes cannot fill {stages} stages", "ask for fewer stages")
    return np.array_split(np.arange(classes), stages)


def class_windows(classes: int, size: int, stride: int, stages: int) -> list[Array]:
    """Runs of `size` classes, each `stride` classes after the one before."""
    if (stages - 1) * stride + size > classes:
        raise _refusal(
            f"{stages} windows of {size} classes, {stride} apart, need more than {classes} classes",
            "ask for fewer stages, a smaller window or a smaller stride",
        )
    return [np.arange(size) + number * stride for number in range(stages)]


def _given_classes(classes: int, stages: Sequence[Sequence[int]]) -> list[Array]:
    """The user's own list of classes for each stage, where it makes sense."""
    for number, stage in enumerate(stages):
        if not stage or len(set(stage)) < len(stage) or not set(stage) <= set(range(classes)):
            raise _refusal(
                f"stage_classes lists {list(stage)} for stage {number}",
                f"give each stage some of the classes 0 to {classes - 1}, each of them once",
            )
    return [np.array(stage, dtype=np.int64) for stage in stages]


def task_draws(classes: int, size: int, tasks: int) -> list[tuple[int, ...]]:
    """The classes of each task, as FedSeIT draws them: the same in every run."""
    ids = list(range(classes))
    random.Random(_DRAW_SEED).shuffle(ids)
    return [tuple(random.Random(_DRAW_SEED + task).sample(ids, size)) for task in range(tasks)]


def task_allocation(clients: int, tasks_each: int, seed: int) -> list[list[int]]:
    """The tasks of each client in its order, as FedSeIT allocates them."""
    names = sorted(range(clients * tasks_each), key=str)  # file names sort as text: 0, 1, 10, 2
    taken: set[int] = set()
    sequences = []
    for client in range(clients):
        order = list(names)
        random.Random(client * seed + 5).shuffle(order)
        mine = [task for task in order if task not in taken][:tasks_each]
        taken.update(mine)
        sequences.append(mine)
    return sequences


def task_rows(rows: Array, labels: Array, tasks: Sequence[Sequence[int]]) -> list[Array]:
    """Rows of each task: a class's rows, in the order given, are cut over the tasks that drew it.

    The parts are contiguous, disjoint and equal; the last one takes the remainder.
    """
    pieces: list[list[Array]] = [[] for _ in tasks]
    for kind in sorted({kind for task in tasks for kind in task}):
        takers = [number for number, task in enumerate(tasks) if kind in task]
        mine = rows[labels[rows] == kind]
        size = len(mine) // len(takers)
        borders = [size * number for number in range(1, len(takers))]
        for taker, piece in zip(takers, np.split(mine, borders), strict=True):
            pieces[taker].append(piece)
    return [np.sort(np.concatenate(parts)) for parts in pieces]


# Scenarios


def scenario(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """The scenario that these options make of a data set; equal seeds give equal scenarios."""
    _shares(options)
    own = "files" if dataset.group is not None else "parties"  # rows apart, or columns
    if dataset.layout is not None and options.split != own:
        raise _refusal(
            f"your own tables cannot be dealt out by split = '{options.split}'",
            f"use split = '{own}', or leave it out",
        )
    if options.joint_aug and (options.split != "parties" or dataset.kind != "image"):
        raise _refusal(
            "joint_aug changes images that are cut among parties",
            "use it with split = 'parties' and images, or leave it out",
        )
    _refuse_too_many(dataset, options)
    made = _SPLITS[options.split](dataset, options, seed)
    if options.stages not in (1, made.stages):
        raise _refusal(
            f"stages = {options.stages}, but the rest of the options makes {made.stages}",
            "leave out stages",
        )
    return made


def _refuse_too_many(dataset: Dataset, options: ScenarioOptions) -> None:
    """Refuse more clients than there is something to deal to, before anything is built for them."""
    rows, columns = len(dataset), math.prod(dataset.x.shape[1:])
    own = dataset.layout is not None  # then clients are not counted by an option
    has_columns = dataset.kind != "text"
    if options.split == "parties" and has_columns and not own and options.clients > columns:
        raise _refusal(
            f"{columns:,} columns are too few for {options.clients:,} clients",
            "ask for fewer clients",
        )
    if options.split in ("rows", "classes", "columns", "tasks") and options.clients > rows:
        raise _refusal(
            f"{rows:,} rows are too few for {options.clients:,} clients", "ask for fewer clients"
        )
    if options.split == "tasks" and options.clients * options.stages > rows:
        raise _refusal(
            f"{rows:,} rows are too few for {options.clients:,} clients with"
            f" {options.stages:,} tasks each",
            "ask for fewer clients or stages",
        )


def _shares(options: ScenarioOptions) -> None:
    """Refuse shares that leave less than nothing."""
    if options.train <= 0 or options.train + options.valid > 1 + 1e-9:
        raise _refusal(
            f"train = {options.train:g} and valid = {options.valid:g} cannot be shares of the rows",
            "choose train above 0, and both together at most 1",
        )


def _by_rows(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients have rows of their own; all columns are common and there is one stage."""
    return _horizontal(dataset, options, seed, [np.arange(len(dataset.classes))], ("all",))


def _by_classes(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients have rows of their own; all columns are common and classes come by stage."""
    stages = _class_stages(dataset, options)
    return _horizontal(dataset, options, seed, stages, _task_names(len(stages)))


def _horizontal(
    dataset: Dataset,
    options: ScenarioOptions,
    seed: int,
    stages: Sequence[Array],
    tasks: tuple[str, ...],
) -> Scenario:
    """Rows dealt to clients, of the classes of each stage."""
    stream = Stream.of(seed, "split")
    parts, labels = _cut_all(dataset, options, stream), dataset.y
    train = _staged(
        parts.train, labels, stages, _deal(dataset, options, stream, "training", options.least)
    )
    valid = _staged(
        parts.valid, labels, stages, _deal(dataset, options, stream, "validation", least=0)
    )
    tests = [[_of_classes(parts.test, labels, stage) for stage in stages]]
    if options.tests == "own":
        deal = _deal(dataset, options, stream, "test", least=1)
        tests = _staged(parts.test, labels, stages, deal)
    holdings = [
        [Holding(*rows, _NONE) for rows in zip(*client, strict=True)]
        for client in zip(train, valid, strict=True)
    ]
    return _made(client_ids(options.clients), holdings, tests, tasks, _all_columns(dataset))


def _by_columns(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients have rows of their own, the common columns and columns of their own (CHFL)."""
    if dataset.kind != "table":
        raise _refusal(f"'{dataset.name}' has no columns", "use split = 'rows', or a table")
    order, count = _common_first(_column_order(dataset, options), options)
    common, own = columns_common_and_own(order, count, options.clients)
    dealt = _by_rows(dataset, options, seed)
    holdings = {
        id: tuple(replace(held, own=columns) for held in dealt.holdings[id])
        for id, columns in zip(dealt.clients, own, strict=True)
    }
    return replace(dealt, holdings=holdings, common=common)


def _by_sites(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients are the groups of the data set, by name; all columns are common."""
    stream = Stream.of(seed, "split", "sites")
    groups = sorted(_group_rows(dataset).items())
    parts = [
        _cut_some(dataset, options, rows, at_random(stream.child(name).numpy()))
        for name, rows in groups
    ]
    tests = [[part.test] for part in parts]
    if options.tests == "shared":
        tests = [[np.concatenate([part.test for part in parts])]]
    holdings = [[Holding(part.train, part.valid, _NONE)] for part in parts]
    names = tuple(name for name, _ in groups)
    return _made(names, holdings, tests, ("all",), _all_columns(dataset))


def _by_parties(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients have columns of the same rows, the server has the labels (V-LETO)."""
    parts = _cut_all(dataset, options, Stream.of(seed, "split"))
    own = dataset.layout is not None  # the user's own tables
    pieces, ids = _party_columns(dataset, options), client_ids(options.clients)
    ids = dataset.groups if own else ids
    tasks, inside = _party_stages(dataset, options)
    train, valid, tests = (
        [rows[there[rows]] for there in inside] for rows in (parts.train, parts.valid, parts.test)
    )
    holdings = [
        [Holding(*rows, piece) for rows in zip(train, valid, strict=True)] for piece in pieces
    ]
    if options.mode == "columns":
        present = Holding(train[0], valid[0], _NONE)
        holdings = [
            [replace(present, own=own) if len(own) else _ABSENT for own in client]
            for client in columns_by_stage(pieces)
        ]
    made = _made(ids, holdings, [tests], tasks, common=_NONE)
    return replace(made, labels_at_server=True, joint_aug=options.joint_aug)


def _party_stages(
    dataset: Dataset, options: ScenarioOptions
) -> tuple[tuple[str, ...], list[Array]]:
    """The tasks, and for each which rows of the data set belong to it."""
    layout = dataset.layout
    if options.mode == "classes":
        stages = _class_stages(dataset, options)
        return _task_names(len(stages)), [np.isin(dataset.y, kinds) for kinds in stages]
    if layout is not None and layout.stages:
        if options.mode == "columns":
            raise _refusal(
                "rows come by stage, and columns too", "leave the stage out, or mode = 'columns'"
            )
        return layout.stages, [layout.stage == number for number in range(len(layout.stages))]
    return ("all",), [np.ones(len(dataset), dtype=bool)]


def _by_tasks(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients have a sequence of tasks each, of which no two share a training row (FedSeIT)."""
    if dataset.stage is not None:
        return _by_streams(dataset, options, seed)
    parts = _cut_all(dataset, options, Stream.of(seed, "split"))
    pool = np.sort(np.concatenate([parts.train, parts.valid]))  # g.3: in file order
    tasks = _drawn_tasks(dataset, options, parts.test)
    stream = Stream.of(_DRAW_SEED, "split", "tasks")
    held = []
    for number, rows in enumerate(task_rows(pool, dataset.y, tasks)):
        take = by_class(dataset.y, stream.child(number).numpy(), keep=1)
        valid, train = take(rows, math.ceil(options.held_back * len(rows) - 1e-9))
        held.append(Holding(train, valid, _NONE))
    tested = [_of_classes(parts.test, dataset.y, kinds) for kinds in tasks]
    order = task_allocation(options.clients, options.stages, seed)
    return _made(
        client_ids(options.clients),
        [[held[number] for number in sequence] for sequence in order],
        [[tested[number] for number in sequence] for sequence in order],
        _task_names(options.stages),
        _all_columns(dataset),
    )


def _by_streams(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Tasks as the data set tells them: a client for each group, a task for each of its stages."""
    groups, stream = list(_group_rows(dataset).values()), Stream.of(seed, "split", "streams")
    ids, shares = client_ids(len(groups)), (1 - options.train - options.valid, options.valid)
    holdings: list[list[Holding]] = []
    tests: list[list[Array]] = []
    for id, mine in zip(ids, groups, strict=True):
        holdings.append([])
        tests.append([])
        for number, name in enumerate(dataset.stages):
            assert dataset.stage is not None
            rows = mine[dataset.stage[mine] == number]
            if not len(rows):
                what = f"client '{id}' has no rows for stage '{name}'"
                raise _refusal(what, "give every file rows of every stage, or leave the stage out")
            take = by_class(dataset.y, stream.child(id, name).numpy(), keep=1)
            test, pool = take(rows, round(shares[0] * len(rows)))
            valid, train = take(pool, round(shares[1] * len(rows)))
            holdings[-1].append(Holding(train, valid, _NONE))
            tests[-1].append(test)
    return _made(ids, holdings, tests, dataset.stages, _all_columns(dataset))


def _by_domains(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Client i has the training rows of domain i; all are tested on every domain (FCCL)."""
    stream = Stream.of(seed, "split", "domains")
    if dataset.group is None:
        raise _refusal(
            f"the data set '{dataset.name}' has no domains",
            "choose one that has: data = digits-domains (MNIST, USPS, SVHN and one more), "
            "digits-shifted, office-caltech10, office-home, or images of your own",
        )
    groups = _group_rows(dataset)
    if options.sizes and len(options.sizes) != len(groups):
        raise _refusal(
            f"sizes has {len(options.sizes)} numbers for {len(groups)} domains",
            f"give one for each of {', '.join(groups)}",
        )
    if options.drawn_twice and not options.sizes:
        raise _refusal(
            "drawn_twice has nothing to draw: without sizes all rows are taken",
            "give sizes, or leave drawn_twice out",
        )
    holdings, tests = [], []
    for number, (name, rows) in enumerate(groups.items()):
        size = options.sizes[number] if options.sizes else None
        held, test = _of_domain(dataset, options, (name, rows), size, stream.child(name))
        holdings.append([held])
        tests.append(test)
    ids, remark = client_ids(len(groups)), " (tested on training rows too)"
    tasks = tuple(f"{name}{remark * options.paper_compat}" for name in groups)
    return _made(ids, holdings, [tests], tasks, _all_columns(dataset))


def _of_domain(
    dataset: Dataset,
    options: ScenarioOptions,
    domain: tuple[str, Array],  # name, rows
    size: int | None,
    stream: Stream,
) -> tuple[Holding, Array]:
    """What the client of a domain holds, and the test rows of the domain.

    With `drawn_twice` the rows before the first round are drawn anew from the same pool (J8 of the
    FCCL specification); both draws may have rows in common.
    """
    (name, rows), generator = domain, stream.numpy()
    again = stream.child("before").numpy()
    take, retake = (
        by_class(dataset.y, draws) if options.stratified else at_random(draws)
        for draws in (generator, again)
    )
    before = None
    if options.paper_compat:
        most = len(rows) if size is None else size
        train = _as_published(dataset, rows, most, generator)
        if options.drawn_twice:
            before = _as_published(dataset, rows, most, again)
        return Holding(train, _NONE, _NONE, before), rows
    part = _cut_some(dataset, options, rows, take)
    if size is None:
        return Holding(part.train, part.valid, _NONE), part.test
    train = _private(part.train, name, size, take)
    if options.drawn_twice:
        before = _private(part.train, name, size, retake)
    return Holding(train, part.valid, _NONE, before), part.test


def _as_published(
    dataset: Dataset, rows: Array, size: int, generator: np.random.Generator
) -> Array:
    """The training rows of FCCL's published code for Office-Home, for diagnosis only.

    30 % of each class are set aside at random, and the first rows of the rest are taken class by
    class, so that later classes may be absent; the test set is the whole domain.
    """
    aside = by_class(dataset.y, generator)(rows, round(0.3 * len(rows)))[0]
    rest = np.setdiff1d(rows, aside)
    return np.sort(rest[np.argsort(dataset.y[rest], kind="stable")][:size])


def _by_files(dataset: Dataset, options: ScenarioOptions, seed: int) -> Scenario:
    """Clients are the sites of the user's own tables, tested on rows and columns of their own."""
    layout, stream = dataset.layout, Stream.of(seed, "split", "files")
    if layout is None:
        raise _refusal(f"'{dataset.name}' is not made of files", "give data = { files = [...] }")
    common, stages = layout.held.all(0), layout.stages or ("all",)
    holdings, tests = [], []
    for number, (name, rows) in enumerate(_group_rows(dataset).items()):
        parts = []
        for stage, at in enumerate(stages):
            mine = rows[layout.stage[rows] == stage]
            _enough(name, at if layout.stages else "", len(mine))
            take = by_class(dataset.y, stream.child(name, stage).numpy())
            parts.append(_cut_some(dataset, options, mine, take))
        own = np.flatnonzero(layout.held[number] & ~common)
        holdings.append([Holding(part.train, part.valid, own) for part in parts])
        tests.append([part.test for part in parts])
    return _made(dataset.groups, holdings, tests, tuple(stages), np.flatnonzero(common))


def _enough(site: str, stage: str, count: int) -> None:
    if count < _FEWEST:
        when = f" at stage '{stage}'" if stage else ""
        raise _refusal(
            f"site '{site}' has too few rows{when}: {count}",
            f"a site needs {_FEWEST} or more: add rows, or leave it out",
        )


def own_sizes(site: str, stages: Mapping[str, int], options: ScenarioOptions) -> Array:
    """How many rows of its own a site learns from, chooses by and tests on: (stages, 3).

    As `_by_files` deals them, from their numbers alone: a large file is not held for it.
    """
    _shares(options)
    found = []
    for number, (stage, count) in enumerate(stages.items()):
        _enough(site, stage, count)
        pool, train = round((options.train + options.valid) * count), round(options.train * count)
        _learnable(site, number, train)
        _testable(site, stage or "all", count - pool)
        found.append((train, pool - train, count - pool))
    return np.array(found)


_SPLITS: Final[Mapping[Split, Callable[[Dataset, ScenarioOptions, int], Scenario]]] = {
    "rows": _by_rows,
    "columns": _by_columns,
    "sites": _by_sites,
    "classes": _by_classes,
    "parties": _by_parties,
    "tasks": _by_tasks,
    "domains": _by_domains,
    "files": _by_files,
}


# What the scenarios are made of


def _made(
    ids: tuple[str, ...],
    holdings: Sequence[Sequence[Holding]],
    tests: Sequence[Sequence[Array]],
    tasks: tuple[str, ...],
    common: Array,
) -> Scenario:
    """A scenario in which there is something to learn and to test; one list of tests is for all."""
    if len(tests) == 1:
        tests = list(tests) * len(ids)
    for id, held, tested in zip(ids, holdings, tests, strict=True):
        for stage, holding in enumerate(held):
            if holding is not _ABSENT:
                _learnable(id, stage, len(holding.train))
        for task, rows in zip(tasks, tested, strict=True):
            _testable(id, task, len(rows))
    by_stage = len(tasks) == len(holdings[0])
    return Scenario(
        clients=ids,
        holdings={id: tuple(held) for id, held in zip(ids, holdings, strict=True)},
        common=common,
        tests={id: tuple(tested) for id, tested in zip(ids, tests, strict=True)},
        tasks=tasks,
        known_at=tuple(range(len(tasks))) if by_stage else (0,) * len(tasks),
    )


def _learnable(id: str, stage: int, rows: int) -> None:
    if not rows:
        raise _refusal(
            f"client '{id}' has no training rows at stage {stage}",
            "ask for fewer clients or stages, or give more rows",
        )


def _testable(id: str, task: str, rows: int) -> None:
    if not rows:
        raise _refusal(
            f"client '{id}' has no test rows for task '{task}'",
            "lower train and valid, ask for shared tests, or give more rows",
        )


def _task_names(count: int) -> tuple[str, ...]:
    width = len(str(count - 1))
    return tuple(f"task-{number:0{width}d}" for number in range(count))


def _width(dataset: Dataset) -> int:
    """How many columns an input has when flattened; text has none."""
    return 0 if dataset.kind == "text" else math.prod(dataset.x.shape[1:])


def _all_columns(dataset: Dataset) -> Array:
    return np.arange(_width(dataset))


def _of_classes(rows: Array, labels: Array, kinds: Array | Sequence[int]) -> Array:
    return rows[np.isin(labels[rows], kinds)]


def _cut_all(dataset: Dataset, options: ScenarioOptions, stream: Stream) -> Parts:
    take = at_random(stream.child("rows").numpy())
    return _cut_some(dataset, options, np.arange(len(dataset)), take)


def _cut_some(dataset: Dataset, options: ScenarioOptions, rows: Array, take: Take) -> Parts:
    known = dataset.test if options.official_test else None
    official = None if known is None else known[rows]
    return cut(rows, options.train, options.valid, take, official)


def _group_rows(dataset: Dataset) -> dict[str, Array]:
    """The rows of each group, in the order of the groups."""
    if dataset.group is None:
        raise _refusal(
            f"the data set '{dataset.name}' does not say which group a row belongs to",
            "choose another split, or a data set with sites or domains",
        )
    return {
        name: np.flatnonzero(dataset.group == number) for number, name in enumerate(dataset.groups)
    }


def _private(rows: Array, domain: str, size: int, take: Take) -> Array:
    """So many of a domain's training rows."""
    if not 1 <= size <= len(rows):
        raise _refusal(
            f"domain '{domain}' has {len(rows)} training rows, not {size}",
            "ask for 1 or more rows of those it has, or raise train",
        )
    return take(rows, size)[0]


def _deal(
    dataset: Dataset, options: ScenarioOptions, stream: Stream, purpose: str, least: int
) -> Deal:
    """How rows go to clients; the Dirichlet shares are the same for every purpose."""
    if options.rows == "even":
        return lambda rows, stage: even(rows, options.clients)
    shares = dirichlet_shares(
        len(dataset.classes), options.clients, options.alpha, stream.child("shares").numpy()
    )

    def deal(rows: Array, stage: int) -> list[Array]:
        if 0 < len(rows) < options.clients * least:
            raise _refusal(
                f"{len(rows)} {purpose} rows at stage {stage} are too few"
                f" for {options.clients} clients with {least} or more each",
                "ask for fewer clients or stages, or lower least",
            )
        generator = stream.child(purpose, stage).numpy()
        return by_shares(rows, dataset.y, shares, least, generator)

    return deal


def _staged(rows: Array, labels: Array, stages: Sequence[Array], deal: Deal) -> list[list[Array]]:
    """For each client its rows at each stage; a row stays with the client that had it first."""
    seen, owned = _NONE, deal(_NONE, 0)
    by_stage = []
    for number, stage in enumerate(stages):
        fresh = _of_classes(rows, labels, np.setdiff1d(stage, seen))
        owned = [np.concatenate(pair) for pair in zip(owned, deal(fresh, number), strict=True)]
        by_stage.append([_of_classes(mine, labels, stage) for mine in owned])
        seen = np.union1d(seen, stage)
    return [list(client) for client in zip(*by_stage, strict=True)]


def _class_stages(dataset: Dataset, options: ScenarioOptions) -> list[Array]:
    """The classes of each stage: the user's own list, windows, or an even partition."""
    classes = len(dataset.classes)
    given = options.stage_classes
    if given:
        return _given_classes(classes, _STAGES[given] if isinstance(given, str) else given)
    if options.window:
        return class_windows(classes, options.window, options.stride, options.stages)
    return class_partition(classes, options.stages)


def _drawn_tasks(dataset: Dataset, options: ScenarioOptions, test: Array) -> list[tuple[int, ...]]:
    """The classes of each task, drawn from those that have test rows, in the order of names."""
    known = sorted(np.unique(dataset.y[test]).tolist(), key=lambda kind: dataset.classes[kind])
    if options.task_classes > len(known):
        raise _refusal(
            f"a task of {options.task_classes} classes cannot be drawn from {len(known)}",
            "lower task_classes",
        )
    draws = task_draws(len(known), options.task_classes, options.clients * options.stages)
    return [tuple(known[place] for place in draw) for draw in draws]


def _column_order(dataset: Dataset, options: ScenarioOptions) -> Array:
    """The order of columns that the feature seed draws, the same for every ratio and run."""
    width = _width(dataset)
    if width == 0:
        raise _refusal(
            f"the data set '{dataset.name}' has no columns that could be parted",
            "choose a split by rows, classes or tasks",
        )
    return Stream.of(options.feature_seed, "split", "columns").numpy().permutation(width)


def _common_first(order: Array, options: ScenarioOptions) -> tuple[Array, int]:
    """An order that begins with the common columns, and how many they are."""
    count = round(options.ratio * len(order))
    if options.common:
        given = np.array(options.common, dtype=np.int64)
        if len(np.unique(given)) < len(given) or not np.isin(given, order).all():
            raise _refusal(
                f"common lists {list(options.common)}",
                f"give some of the columns 0 to {len(order) - 1}, each of them once",
            )
        order, count = np.concatenate([given, order[~np.isin(order, given)]]), len(given)
    if count == 0:
        raise _refusal(
            f"ratio = {options.ratio:g} of {len(order)} columns leaves no common column",
            "choose a larger ratio",
        )
    return order, count


def _party_columns(dataset: Dataset, options: ScenarioOptions) -> list[Array]:
    """The columns of each client where rows are common to all."""
    if dataset.layout is not None:
        return [np.flatnonzero(held) for held in dataset.layout.held]
    order = _column_order(dataset, options)
    if options.cut in ("strips", "quadrants"):
        return _image_columns(dataset, options)
    if options.clients > len(order):
        raise _refusal(
            f"{len(order)} columns are too few for {options.clients} clients",
            "ask for fewer clients",
        )
    return columns_of_parties(
        order if options.cut == "permuted" else np.sort(order), options.clients
    )


def _image_columns(dataset: Dataset, options: ScenarioOptions) -> list[Array]:
    """The pixels of each client, by their places in the flattened image."""
    if dataset.kind != "image":
        raise _refusal(
            f"cut = '{options.cut}' is for images and '{dataset.name}' is a {dataset.kind}",
            "choose cut = 'contiguous' or 'permuted'",
        )
    channels, height, width = dataset.x.shape[1:]
    if options.cut == "strips":
        if options.clients > width:
            raise _refusal(
                f"images {width} wide cannot be cut into {options.clients} strips",
                "ask for fewer clients",
            )
        return image_strips(channels, height, width, options.clients)
    if options.clients != 4 or min(height, width) < 2:
        raise _refusal(
            f"quadrants of {height} x {width} images are not for {options.clients} clients",
            "ask for 4 clients, and images of 2 x 2 or more",
        )
    return image_quadrants(channels, height, width)
