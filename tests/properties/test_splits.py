"""What every split keeps: each row and column is held once, and nothing that was not given."""

from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.rng import Stream
from atoll.data import partition, splits
from atoll.data.dataset import Dataset
from atoll.data.scenario import Scenario
from atoll.data.splits import split
from atoll.data.splits.parties import image_quadrants, image_strips
from atoll.data.splits.tasks import task_allocation, task_draws, task_rows

Array = np.ndarray[Any, Any]

few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**31)
shares = st.sampled_from([(0.6, 0.2), (0.5, 0.0), (0.3, 0.3), (0.7, 0.1)])


def options_for(split: str = "rows", **values: Any) -> Any:
    """The options of a split."""
    return splits.load(split).options(**values)


def dataset(
    rows: int, classes: int = 6, kind: Literal["table", "image"] = "table", official: bool = False
) -> Dataset:
    width = (5,) if kind == "table" else (2, 3, 8)
    return Dataset(
        name="any",
        kind=kind,
        x=np.zeros((rows, *width), dtype=np.float32),
        y=np.arange(rows) % classes,
        columns=tuple("abcde") if kind == "table" else (),
        classes=tuple(f"k{number}" for number in range(classes)),
        source="a test",
        test=(np.arange(rows) // classes) % 3 == 0 if official else None,
        group=(np.arange(rows) // classes) % 4,
        groups=("d", "c", "b", "a"),
    )


def held(made: Scenario, id: str) -> list[int]:
    """All rows that a client learns from or chooses by, each once for each stage."""
    return [int(r) for part in made.holdings[id] for r in np.concatenate([part.train, part.valid])]


def rows_tested(made: Scenario) -> set[int]:
    return {int(row) for tests in made.tests.values() for rows in tests for row in rows}


def same(first: Scenario, second: Scenario) -> bool:
    return repr(plain(first)) == repr(plain(second))


def plain(made: Scenario) -> list[Any]:
    parts = [
        [part.train.tolist(), part.valid.tolist(), part.own.tolist()]
        for id in made.clients
        for part in made.holdings[id]
    ]
    tests = [[rows.tolist() for rows in made.tests[id]] for id in made.clients]
    return [made.clients, parts, made.common.tolist(), tests, made.tasks, made.known_at]


# Rows


@few
@given(st.integers(0, 300), shares, seeds, st.booleans(), st.booleans())
def test_a_cut_holds_every_row_once(
    count: int, share: tuple[float, float], seed: int, stratified: bool, official: bool
) -> None:
    rows, labels = np.arange(count) + 5, np.arange(count + 5) % 4
    generator = Stream.of(seed).numpy()
    take = partition.by_class(labels, generator) if stratified else partition.at_random(generator)
    marks = rows % 3 == 0 if official else None
    parts = partition.cut(rows, *share, take, marks)
    assert sorted(np.concatenate([parts.train, parts.valid, parts.test]).tolist()) == rows.tolist()
    if official:
        assert set(parts.test.tolist()) == set(rows[rows % 3 == 0].tolist())
    else:
        assert len(parts.train) == round(share[0] * count)
        assert len(parts.test) == count - round(sum(share) * count)


@few
@given(st.integers(0, 200), st.integers(1, 30))
def test_even_parts_are_equal_and_drop_less_than_one_each(count: int, parts: int) -> None:
    dealt = partition.even(np.arange(count), parts)
    assert [len(part) for part in dealt] == [count // parts] * parts
    assert np.concatenate(dealt).tolist() == list(range(count - count % parts))


@few
@given(
    st.lists(st.integers(0, 12), max_size=300),
    st.integers(1, 40),
    st.floats(1e-6, 1e6),
    st.integers(0, 4),
    seeds,
)
def test_dirichlet_deals_every_row_once_and_the_least_to_all(
    labels: list[int], clients: int, alpha: float, least: int, seed: int
) -> None:
    generator = Stream.of(seed).numpy()
    share = partition.dirichlet_shares(13, clients, alpha, generator)
    rows = np.arange(len(labels))
    parts = partition.by_shares(rows, np.array(labels, dtype=np.int64), share, least, generator)
    sizes = [len(part) for part in parts]
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
    if len(labels) >= clients * least:
        assert min(sizes) >= least
    else:
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows", [500, 777, 20_000])
@pytest.mark.parametrize("alpha", [1e-9, 0.05, 100.0])
def test_dirichlet_ends_with_500_clients_and_100_classes(rows: int, alpha: float) -> None:
    generator = Stream.of(rows).numpy()
    share = partition.dirichlet_shares(100, 500, alpha, generator)
    assert np.allclose(share.sum(1), 1)
    parts = partition.by_shares(np.arange(rows), np.arange(rows) % 100, share, 1, generator)
    assert min(len(part) for part in parts) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))


@few
@given(st.lists(st.integers(0, 5), max_size=120), st.integers(0, 140), st.integers(0, 2), seeds)
def test_a_sample_by_class_is_exact_and_within_one_of_its_proportion(
    kinds: list[int], count: int, keep: int, seed: int
) -> None:
    labels = np.array(kinds, dtype=np.int64)
    count = min(count, len(kinds))
    taken, left = partition.by_class(labels, Stream.of(seed).numpy(), keep)(
        np.arange(len(kinds)), count
    )
    sizes = np.bincount(labels, minlength=6)
    assert sorted([*taken.tolist(), *left.tolist()]) == list(range(len(kinds)))
    assert len(taken) == min(count, int(np.maximum(sizes - keep, 0).sum()))
    assert (np.bincount(labels[left], minlength=6) >= np.minimum(sizes, keep)).all()
    if keep == 0 and len(kinds):
        quota = sizes * count / len(kinds)
        assert (np.abs(np.bincount(labels[taken], minlength=6) - quota) < 1).all()


# Columns


@few
@given(st.integers(1, 130), st.floats(0, 1), st.integers(1, 12), seeds)
def test_common_and_own_columns_are_disjoint_and_cover(
    width: int, ratio: float, clients: int, seed: int
) -> None:
    order = Stream.of(seed).numpy().permutation(width)
    common, own = partition.columns_common_and_own(order, round(ratio * width), clients)
    sizes = [len(piece) for piece in own]
    assert sorted(np.concatenate([common, *own]).tolist()) == list(range(width))
    assert len(common) == round(ratio * width)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@few
@given(st.floats(0.2, 1), st.floats(0.2, 1), st.integers(1, 8), st.integers(1, 8), seeds)
def test_common_columns_are_nested_over_ratios_and_equal_over_clients(
    ratio: float, other: float, clients: int, more: int, seed: int
) -> None:
    options = options_for(split="columns", clients=clients, ratio=ratio, feature_seed=seed)
    rows = dataset(90)
    first = split(rows, options, 0)
    wider = split(rows, replace(options, ratio=max(ratio, other)), 1)
    assert set(first.common.tolist()) <= set(wider.common.tolist())
    assert first.common.tolist() == split(rows, replace(options, clients=more), 2).common.tolist()


@few
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 33), st.data())
def test_strips_side_by_side_restore_the_image(
    channels: int, height: int, width: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, width))
    image = np.random.default_rng(0).integers(0, 256, (channels, height, width))
    strips = [
        image.ravel()[strip].reshape(channels, height, -1)
        for strip in image_strips(channels, height, width, clients)
    ]
    assert [strip.shape[2] for strip in strips[:-1]] == [width // clients] * (clients - 1)
    assert np.array_equal(np.concatenate(strips, axis=2), image)


@few
@given(st.integers(1, 4), st.integers(2, 9), st.integers(2, 9))
def test_quadrants_restore_the_image(channels: int, height: int, width: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (channels, height, width))
    places = image_quadrants(channels, height, width)
    heights = (height // 2, height // 2, height - height // 2, height - height // 2)
    parts = [
        image.ravel()[place].reshape(channels, high, -1)
        for place, high in zip(places, heights, strict=True)
    ]
    upper, lower = (np.concatenate(half, axis=2) for half in (parts[:2], parts[2:]))
    assert np.array_equal(np.concatenate([upper, lower], axis=1), image)


# Classes and tasks


@few
@given(st.integers(1, 60), st.data())
def test_classes_by_stage_are_disjoint_contiguous_and_cover(
    classes: int, data: st.DataObject
) -> None:
    stages = partition.class_partition(classes, data.draw(st.integers(1, classes)))
    assert np.concatenate(stages).tolist() == list(range(classes))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@few
@given(st.integers(1, 6), st.integers(1, 6), seeds)
def test_every_task_is_allocated_once(clients: int, tasks: int, seed: int) -> None:
    sequences = task_allocation(clients, tasks, seed)
    assert [len(sequence) for sequence in sequences] == [tasks] * clients
    assert sorted(task for sequence in sequences for task in sequence) == list(
        range(clients * tasks)
    )


@few
@given(st.lists(st.integers(0, 6), max_size=200), st.integers(1, 20))
def test_parts_of_a_class_over_tasks_are_disjoint_and_cover(kinds: list[int], tasks: int) -> None:
    labels, draws = np.array(kinds, dtype=np.int64), task_draws(7, 4, tasks)
    parts = task_rows(np.arange(len(kinds)), labels, draws)
    drawn = {kind for draw in draws for kind in draw}
    expected = [row for row, kind in enumerate(kinds) if kind in drawn]
    assert sorted(np.concatenate(parts).tolist()) == expected
    for part, draw in zip(parts, draws, strict=True):
        assert set(labels[part].tolist()) <= set(draw)


# Scenarios


def split_of(options: Any) -> str:
    return type(options).__module__.rpartition(".")[2]


def fields_of(options: Any) -> set[str]:
    return {field.name for field in fields(options)}


HORIZONTAL = [
    options_for(split="rows", rows="even"),
    options_for(split="rows", rows="dirichlet", tests="own"),
    options_for(split="columns"),
    options_for(split="sites"),
    options_for(split="sites", tests="own"),
    options_for(split="classes", stages=3),
    options_for(split="classes", stages=2, rows="dirichlet", tests="own"),
    options_for(split="tasks", stages=2),
    options_for(split="domains"),
    options_for(split="domains", stratified=True, sizes=(9, 8, 7, 6)),
]
VERTICAL = [
    options_for(split="parties", cut="strips"),
    options_for(split="parties", cut="permuted", mode="classes", stages=3),
    options_for(split="parties", mode="columns"),
    options_for(split="parties", cut="quadrants", clients=4),
]
DROPPING = {"rows": 2 * 4, "columns": 2 * 4, "classes": 2 * 3 * 4}  # remainders of up to 5 clients


@pytest.mark.parametrize("options", HORIZONTAL, ids=repr)
@few
@given(rows=st.integers(200, 400), clients=st.integers(1, 5), seed=seeds, official=st.booleans())
def test_horizontal_clients_hold_every_row_once_and_no_test_row(
    options: Any, rows: int, clients: int, seed: int, official: bool
) -> None:
    given_rows = dataset(rows, official=official)
    name, own = split_of(options), fields_of(options)
    options = replace(options, clients=clients) if "clients" in own else options
    made = split(given_rows, options, seed)
    everything = [row for id in made.clients for row in held(made, id)]
    assert len(everything) == len(set(everything))
    assert not set(everything) & rows_tested(made)
    assert set(everything) | rows_tested(made) <= set(range(rows))
    shared = getattr(options, "tests", "shared") == "shared"
    if given_rows.test is not None and shared and name != "tasks":
        assert rows_tested(made) == set(np.flatnonzero(given_rows.test).tolist())
    if getattr(options, "rows", "") == "dirichlet" or name == "sites":
        assert set(everything) | rows_tested(made) == set(range(rows))
    elif name in DROPPING:
        assert len(everything) + len(rows_tested(made)) >= rows - DROPPING[name]


@pytest.mark.parametrize("options", VERTICAL, ids=lambda o: f"{o.cut}-{o.mode}")
@few
@given(rows=st.integers(200, 300), seed=seeds, official=st.booleans())
def test_parties_hold_every_column_once_and_the_same_rows(
    options: Any, rows: int, seed: int, official: bool
) -> None:
    made = split(dataset(rows, kind="image", official=official), options, seed)
    last = made.stages - 1
    columns = np.concatenate([made.holdings[id][last].own for id in made.clients])
    assert sorted(columns.tolist()) == list(range(48))
    for stage in range(made.stages):
        present = [made.holdings[id][stage] for id in made.clients]
        trains = {tuple(part.train.tolist()) for part in present if len(part.own)}
        assert len(trains) == 1
        assert all(len(part.train) == len(part.valid) == 0 for part in present if not len(part.own))
    stages = 1 if options.mode == "columns" else made.stages
    once = [row for part in made.holdings["site-0"][:stages] for row in (*part.train, *part.valid)]
    assert len(once) == len(set(once))
    assert set(once) | rows_tested(made) == set(range(rows))
    assert not set(once) & rows_tested(made)


@pytest.mark.parametrize("options", HORIZONTAL + VERTICAL, ids=repr)
@few
@given(seed=seeds)
def test_the_same_seed_gives_the_same_scenario_and_another_another(options: Any, seed: int) -> None:
    rows = dataset(240, kind="table" if split_of(options) == "columns" else "image")
    first = split(rows, options, seed)
    assert same(first, split(rows, options, seed))
    assert not same(first, split(rows, options, seed + 1))
    assert list(first.clients) == sorted(first.clients)
    assert {len(parts) for parts in first.holdings.values()} == {first.stages}
    assert {len(tests) for tests in first.tests.values()} == {len(first.tasks)}
