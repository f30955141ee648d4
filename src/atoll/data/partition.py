"""Pure functions that partition rows, columns and classes, and build scenarios for the splits.

Every array of rows or columns is an array of indices. `labels` are those of the whole data set, so
`labels[rows]` are the labels of some rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np

from atoll.core.errors import UserError
from atoll.core.rng import Stream
from atoll.data.dataset import Dataset
from atoll.data.scenario import ABSENT, Holding, Scenario

__all__ = [
    "NONE", "Array", "ClassLists", "Dealing", "Parts", "Shares", "Take", "all_columns",
    "at_random", "build_scenario", "by_class", "by_shares", "check_clients", "check_shares",
    "check_stages", "check_tests", "check_training", "class_partition", "class_stages",
    "class_windows", "client_ids", "column_order", "columns_common_and_own", "cut", "cut_all",
    "cut_people", "cut_rows", "deal_stages", "dealer", "dirichlet_shares", "even", "group_rows",
    "horizontal", "of_classes", "parts_by_stage", "refusal", "task_names", "width_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Take = Callable[[Array, int], tuple[Array, Array]]  # (rows, count) -> those taken, those left
Deal = Callable[[Array, int], list[Array]]  # (rows, stage) -> the rows of each client
ClassLists = tuple[tuple[int, ...], ...] | Literal["overlap4", "disjoint2"]

NONE: Final = np.empty(0, dtype=np.int64)
_CLASS_LISTS: Final = {  # V-LETO, g: the classes of each of four stages
    "overlap4": ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (6, 7, 8, 9)),
    "disjoint2": ((0, 1), (2, 3), (4, 5), (6, 7)),
}


class Shares(Protocol):
    """The options of a split that divides rows into training, validation and test rows."""

    @property
    def train(self) -> float: ...

    @property
    def valid(self) -> float: ...

    @property
    def official_test(self) -> bool: ...


class Dealing(Shares, Protocol):
    """The options of a split that deals rows to a number of clients."""

    @property
    def clients(self) -> int: ...

    @property
    def tests(self) -> Literal["shared", "own", "valid"]: ...

    @property
    def rows(self) -> Literal["even", "dirichlet"]: ...

    @property
    def alpha(self) -> float: ...

    @property
    def least(self) -> int: ...


def refusal(what: str, remedy: str) -> UserError:
    """The error for an impossible scenario."""
    return UserError(what, "scenario", remedy)


def client_ids(count: int) -> tuple[str, ...]:
    """The ids of `count` clients, zero-padded to keep their order when sorted."""
    width = len(str(count - 1))
    return tuple(f"site-{number:0{width}d}" for number in range(count))


# Rows


@dataclass(frozen=True)
class Parts:
    """Training, validation and test rows."""

    train: Array
    valid: Array
    test: Array


def at_random(generator: np.random.Generator) -> Take:
    """Takes rows uniformly at random."""

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
        rank = np.empty(len(rows), dtype=np.int64)  # index of a row among those of its class
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        mask = rank < counts[kinds]
        return shuffled[mask], shuffled[~mask]

    return take


def _proportional(sizes: Array, count: int, most: Array) -> Array:
    """Integers proportional to sizes with the sum `count`, none above `most`."""
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
    """Split rows into training, validation and test rows; `official` marks official test rows.

    Without official test rows, the remaining rows are the test rows. With them, the
    other rows are split in the proportion of train to valid.
    """
    if official is None:
        pool, test = take(rows, round((train + valid) * len(rows)))
        count = round(train * len(rows))
    else:
        pool, test = rows[~official], rows[official]
        count = round(train * len(pool) / (train + valid)) if train > 0 else 0
    chosen, rest = take(pool, count)
    return Parts(chosen, rest, test)


def cut_people(
    strata: Array,
    people: Array,
    train: float,
    valid: float,
    generator: np.random.Generator,
    dealt_before: Mapping[int, int] | None = None,
) -> Array:
    """For each row 0 (train), 1 (validation) or 2 (test), equal for all rows of a person.

    People come in random order, and each goes to the part that lacks the largest share of the rows
    of this person's strata. Whole numbers, so that no tie depends on rounding. `dealt_before` has
    the parts of people already assigned at another site; they come first.
    """
    before = dealt_before or {}
    shares = [round(share * 10_000) for share in (train, valid)]
    shares.append(max(0, 10_000 - sum(shares)))
    possible = [part for part in range(3) if shares[part]]
    names, numbers = np.unique(people, return_inverse=True)
    totals = np.bincount(strata).tolist()
    dealt = [[0] * len(totals) for _ in range(3)]
    members = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    parts = np.empty(len(people), dtype=np.int64)
    order = generator.permutation(len(members)).tolist()
    for number in sorted(order, key=lambda number: int(names[number]) not in before):
        kinds = Counter(strata[members[number]].tolist())
        lacks = {}
        for part in possible:
            lacking = 0
            for kind, count in kinds.items():
                lacking += count * (shares[part] * totals[kind] - 10_000 * dealt[part][kind])
            other = math.prod(shares[one] for one in possible if one != part)
            lacks[part] = lacking * other  # in units of the part's share
        wanting = max(possible, key=lambda part: (lacks[part], shares[part], -part))
        chosen = before.get(int(names[number]), wanting)
        parts[members[number]] = chosen
        for kind, count in kinds.items():
            dealt[chosen][kind] += count
    return parts


def parts_by_stage(rows: Array, stage: Array, dealt: Array, stages: int) -> list[Parts]:
    """The parts of each stage, from the assignment of `cut_people`."""
    every = []
    for number in range(stages):
        train, valid, test = (rows[(stage == number) & (dealt == part)] for part in range(3))
        every.append(Parts(train, valid, test))
    return every


def even(rows: Array, parts: int) -> list[Array]:
    """Contiguous parts of equal size; drops the remainder."""
    size = len(rows) // parts
    return [rows[number * size : (number + 1) * size] for number in range(parts)]


def dirichlet_shares(
    classes: int, clients: int, alpha: float, generator: np.random.Generator
) -> Array:
    """For each class the share of each client: (classes, clients), rows sum to 1."""
    return generator.dirichlet(np.full(clients, alpha), size=classes)


def by_shares(
    rows: Array, labels: Array, shares: Array, least: int, generator: np.random.Generator
) -> list[Array]:
    """Every row goes to one client, by its class's shares; then the largest give to the smallest.

    Each client ends with `least` rows or, if there are too few, sizes differ by 1 at most.
    """
    shuffled = generator.permutation(rows)
    parts: list[list[int]] = [[] for _ in range(shares.shape[1])]
    for kind in np.unique(labels[rows]):
        members = shuffled[labels[shuffled] == kind]
        # One offset for all cuts: each client's expected number of rows is exact, however small.
        places = np.floor(np.cumsum(shares[kind])[:-1] * len(members) + generator.random())
        pieces = np.split(members, np.minimum(places, len(members)).astype(np.int64))
        for part, piece in zip(parts, pieces, strict=True):
            part.extend(piece.tolist())
    _level(parts, least)
    return [np.array(part, dtype=np.int64) for part in parts]


def _level(parts: list[list[int]], least: int) -> None:
    """Move one row at a time from the largest part to the smallest, until that has `least` rows."""
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
    """The first columns of an order are common, the rest is split into one slice per client."""
    pieces = np.array_split(order[common:], clients)
    return np.sort(order[:common]), [np.sort(piece) for piece in pieces]


def width_of(dataset: Dataset) -> int:
    """The number of columns of a flattened input; 0 for text."""
    return 0 if dataset.kind == "text" else math.prod(dataset.x.shape[1:])


def all_columns(dataset: Dataset) -> Array:
    """The indices of all columns."""
    return np.arange(width_of(dataset))


def column_order(dataset: Dataset, feature_seed: int) -> Array:
    """The order of columns that a seed draws, the same for every ratio and run."""
    width = width_of(dataset)
    if width == 0:
        raise refusal(
            f"the data set '{dataset.name}' has no columns to divide",
            "choose a split by rows, classes or tasks",
        )
    return Stream.of(feature_seed, "split", "columns").numpy().permutation(width)


# Classes


def class_partition(classes: int, stages: int) -> list[Array]:
    """Contiguous disjoint ranges of classes, with sizes that differ by 1 at most."""
    if stages > classes:
        raise refusal(f"{classes} classes cannot fill {stages} stages", "ask for fewer stages")
    return np.array_split(np.arange(classes), stages)


def class_windows(classes: int, size: int, stride: int, stages: int) -> list[Array]:
    """Ranges of `size` classes, each `stride` classes after the previous one."""
    if (stages - 1) * stride + size > classes:
        raise refusal(
            f"{stages} windows of {size} classes, {stride} apart, need more than {classes} classes",
            "ask for fewer stages, a smaller window or a smaller stride",
        )
    return [np.arange(size) + number * stride for number in range(stages)]


def _given_classes(classes: int, stages: Sequence[Sequence[int]]) -> list[Array]:
    """The user's list of classes per stage, validated."""
    for number, stage in enumerate(stages):
        if not stage or len(set(stage)) < len(stage) or not set(stage) <= set(range(classes)):
            raise refusal(
                f"stage_classes lists {list(stage)} for stage {number}",
                f"give each stage some of the classes 0 to {classes - 1}, each of them once",
            )
    return [np.array(stage, dtype=np.int64) for stage in stages]


def class_stages(
    classes: int, stages: int, window: int, stride: int, lists: ClassLists
) -> list[Array]:
    """The classes of each stage: the user's lists, windows, or an even partition."""
    if lists:
        class_lists = _given_classes(
            classes, _CLASS_LISTS[lists] if isinstance(lists, str) else lists
        )
        check_stages(stages, len(class_lists))
        return class_lists
    if window:
        return class_windows(classes, window, stride, stages)
    return class_partition(classes, stages)


def check_stages(stages: int, actual: int) -> None:
    """Refuse a number of stages that contradicts other options; 1 is the default."""
    if stages not in (1, actual):
        raise refusal(
            f"stages = {stages}, but the rest of the options makes {actual}", "leave out stages"
        )


def of_classes(rows: Array, labels: Array, kinds: Array | Sequence[int]) -> Array:
    """The rows that have one of these classes."""
    return rows[np.isin(labels[rows], kinds)]


# Scenarios


def check_shares(train: float, valid: float) -> None:
    """Refuse shares that exceed the rows, or leave no training rows."""
    if train <= 0 or train + valid > 1 + 1e-9:
        raise refusal(
            f"train = {train:g} and valid = {valid:g} cannot be shares of the rows",
            "choose train above 0, and both together at most 1",
        )


def check_clients(dataset: Dataset, clients: int) -> None:
    """Refuse more clients than rows before building anything for them."""
    if clients > len(dataset):
        raise refusal(
            f"{len(dataset):,} rows are too few for {clients:,} clients", "ask for fewer clients"
        )


def cut_all(dataset: Dataset, options: Shares, stream: Stream) -> Parts:
    """Training, validation and test rows of a whole data set."""
    take = at_random(stream.child("rows").numpy())
    return cut_rows(dataset, options, np.arange(len(dataset)), take)


def cut_rows(dataset: Dataset, options: Shares, rows: Array, take: Take) -> Parts:
    """Training, validation and test rows among these rows."""
    check_shares(options.train, options.valid)
    mask = dataset.test if options.official_test else None
    official = None if mask is None else mask[rows]
    return cut(rows, options.train, options.valid, take, official)


def group_rows(dataset: Dataset) -> dict[str, Array]:
    """The rows of each group, in the order of the groups."""
    if dataset.group is None:
        raise refusal(
            f"the data set '{dataset.name}' has no groups of rows",
            "choose another split, or a data set with sites or domains",
        )
    return {
        name: np.flatnonzero(dataset.group == number) for number, name in enumerate(dataset.groups)
    }


def dealer(dataset: Dataset, options: Dealing, stream: Stream, purpose: str, least: int) -> Deal:
    """How to assign rows to clients; the Dirichlet shares are the same for every purpose."""
    if options.rows == "even":
        return lambda rows, stage: even(rows, options.clients)
    shares = dirichlet_shares(
        len(dataset.classes), options.clients, options.alpha, stream.child("shares").numpy()
    )

    def deal(rows: Array, stage: int) -> list[Array]:
        if 0 < len(rows) < options.clients * least:
            raise refusal(
                f"{len(rows)} {purpose} rows at stage {stage} are too few"
                f" for {options.clients} clients with {least} or more each",
                "ask for fewer clients or stages, or lower least",
            )
        generator = stream.child(purpose, stage).numpy()
        return by_shares(rows, dataset.strata, shares, least, generator)

    return deal


def deal_stages(
    rows: Array, labels: Array, stages: Sequence[Array], deal: Deal
) -> list[list[Array]]:
    """For each client its rows at each stage; a row stays with its first client."""
    seen, owned = NONE, deal(NONE, 0)
    by_stage = []
    for number, stage in enumerate(stages):
        fresh = of_classes(rows, labels, np.setdiff1d(stage, seen))
        owned = [np.concatenate(pair) for pair in zip(owned, deal(fresh, number), strict=True)]
        by_stage.append([of_classes(part, labels, stage) for part in owned])
        seen = np.union1d(seen, stage)
    return [list(client) for client in zip(*by_stage, strict=True)]


def horizontal(
    dataset: Dataset,
    options: Dealing,
    seed: int,
    stages: Sequence[Array],
    tasks: tuple[str, ...],
    labels: Array | None = None,
) -> Scenario:
    """Every client has separate rows, of the classes of each stage; all columns are common.

    `labels` determine the stage of a row, if not the classes.
    """
    check_clients(dataset, options.clients)
    stream = Stream.of(seed, "split")
    parts, labels = cut_all(dataset, options, stream), dataset.strata if labels is None else labels
    if options.tests == "valid":
        parts = Parts(parts.train, NONE, parts.valid)  # test rows are never seen
    train = deal_stages(
        parts.train, labels, stages, dealer(dataset, options, stream, "training", options.least)
    )
    valid = deal_stages(
        parts.valid, labels, stages, dealer(dataset, options, stream, "validation", least=0)
    )
    tests = [[of_classes(parts.test, labels, stage) for stage in stages]]
    if options.tests == "own":
        deal = dealer(dataset, options, stream, "test", least=1)
        tests = deal_stages(parts.test, labels, stages, deal)
    holdings = [
        [Holding(*rows, NONE) for rows in zip(*client, strict=True)]
        for client in zip(train, valid, strict=True)
    ]
    return build_scenario(client_ids(options.clients), holdings, tests, tasks, all_columns(dataset))


def build_scenario(
    ids: tuple[str, ...],
    holdings: Sequence[Sequence[Holding]],
    tests: Sequence[Sequence[Array]],
    tasks: tuple[str, ...],
    common: Array,
) -> Scenario:
    """A scenario, checked for training and test rows; a single list of tests applies to all."""
    if len(tests) == 1:
        tests = list(tests) * len(ids)
    for id, site_holdings, tested in zip(ids, holdings, tests, strict=True):
        for stage, holding in enumerate(site_holdings):
            if holding is not ABSENT:
                check_training(id, stage, len(holding.train))
        for task, rows in zip(tasks, tested, strict=True):
            check_tests(id, task, len(rows))
    by_stage = len(tasks) == len(holdings[0])
    return Scenario(
        clients=ids,
        holdings={
            id: tuple(site_holdings) for id, site_holdings in zip(ids, holdings, strict=True)
        },
        common=common,
        tests={id: tuple(tested) for id, tested in zip(ids, tests, strict=True)},
        tasks=tasks,
        known_at=tuple(range(len(tasks))) if by_stage else (0,) * len(tasks),
    )


def check_training(id: str, stage: int, rows: int) -> None:
    """Refuse a client without training rows."""
    if not rows:
        raise refusal(
            f"client '{id}' has no training rows at stage {stage}",
            "ask for fewer clients or stages, or give more rows",
        )


def check_tests(id: str, task: str, rows: int) -> None:
    """Refuse a client without test rows."""
    if not rows:
        raise refusal(
            f"client '{id}' has no test rows for task '{task}'",
            "lower train and valid, ask for shared tests, or give more rows",
        )


def task_names(count: int) -> tuple[str, ...]:
    """The names of `count` tasks, zero-padded to keep their order when sorted."""
    width = len(str(count - 1))
    return tuple(f"task-{number:0{width}d}" for number in range(count))
