"""Splits on examples that were worked out by hand or stand in the specifications."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import data
from atoll.core.errors import EXIT_USER, UserError
from atoll.core.options import describe
from atoll.core.rng import Stream
from atoll.data import partition, splits
from atoll.data.dataset import Dataset
from atoll.data.own import tables
from atoll.data.splits import options_of, split
from atoll.data.splits.files import own_sizes
from atoll.data.splits.parties import columns_by_stage, image_quadrants, image_strips
from atoll.data.splits.tasks import task_allocation, task_draws, task_rows
from atoll.runs.config import change, read, resolve
from atoll.runs.parts import parts

Array = np.ndarray[Any, Any]


def options_for(split: str = "rows", **values: Any) -> Any:
    """The options of a split."""
    return splits.load(split).options(**values)


def table(rows: int = 60, columns: int = 10, classes: int = 3) -> Dataset:
    return Dataset(
        name="little",
        kind="table",
        x=np.zeros((rows, columns), dtype=np.float32),
        y=np.arange(rows) % classes,
        columns=tuple(f"c{number}" for number in range(columns)),
        classes=tuple(f"k{number}" for number in range(classes)),
        source="a test",
    )


def images(rows: int = 40, shape: tuple[int, ...] = (1, 4, 8), classes: int = 10) -> Dataset:
    pixels = np.zeros((rows, *shape), dtype=np.uint8)
    return replace(table(rows, 1, classes), kind="image", x=pixels, columns=())


def texts(train: list[int], test: list[int]) -> Dataset:
    """Texts with so many training rows, then so many test rows, of each class."""
    classes = range(len(train))
    y = np.concatenate([np.repeat(classes, train), np.repeat(classes, test)])
    official = np.arange(len(y)) >= sum(train)
    names = tuple(f"k{number}" for number in classes)
    x = np.zeros((len(y), 2), dtype=np.int32)
    return Dataset("words", "text", x, y, (), names, "a test", test=official)


def grouped(dataset: Dataset, names: tuple[str, ...]) -> Dataset:
    return replace(dataset, group=np.arange(len(dataset)) % len(names), groups=names)


def listed(arrays: list[Array]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


def held_at(dataset: Dataset, options: Any, seed: int = 0) -> list[set[int]]:
    """The classes that the first client learns at each stage."""
    made = split(dataset, options, seed)
    return [set(dataset.y[held.train].tolist()) for held in made.holdings[made.clients[0]]]


# Ids and options


def test_ids_are_padded_only_where_there_are_more_than_ten_clients() -> None:
    assert partition.client_ids(10)[-1] == "site-9"
    assert partition.client_ids(11)[0] == "site-00"
    assert partition.client_ids(11)[-1] == "site-10"
    assert list(partition.client_ids(101)) == sorted(partition.client_ids(101))


def test_every_option_has_a_remark() -> None:
    for name in splits.names():
        options = describe(splits.load(name).options)
        assert [option.name for option in options if not option.remark] == [], name


def test_options_come_from_a_plain_mapping() -> None:
    values = {"split": "classes", "stage_classes": [[0, 1], [2]], "clients": 2}
    made = options_of(values, "scenario")
    assert type(made).__module__ == "atoll.data.splits.classes"
    assert (made.stage_classes, made.clients) == (((0, 1), (2,)), 2)
    with pytest.raises(UserError, match="unknown split 'diagonal'"):
        options_of({"split": "diagonal"}, "scenario")


def test_an_option_of_another_split_is_refused_with_the_options_of_this_one() -> None:
    with pytest.raises(UserError) as caught:
        options_of({"split": "files", "train": 0.5, "clients": 4}, "[scenario]")
    assert caught.value.what == "split 'files' has no option 'clients'"
    assert caught.value.remedy == (
        "remove it; 'files' has train, valid; "
        "'clients' belongs to classes, columns, drift, parties, rows, shifts, tasks"
    )
    with pytest.raises(UserError, match="unknown option 'trian'") as caught:
        options_of({"split": "files", "trian": 0.5}, "[scenario]")
    assert caught.value.remedy == "did you mean 'train'?"


def test_a_new_split_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text('''"""Two clients, each with one half of the rows."""

from dataclasses import dataclass

import numpy as np

from atoll.data import partition
from atoll.data.scenario import Holding, Split


@dataclass(frozen=True)
class Options:
    """How the rows are halved."""

    test: int = 2  # number of test rows


def deal(dataset, options, seed):
    rows = np.arange(len(dataset))
    halves = partition.even(rows[options.test :], 2)
    holdings = [[Holding(half, partition.NONE, partition.NONE)] for half in halves]
    ids, columns = partition.client_ids(2), partition.all_columns(dataset)
    return partition.build_scenario(ids, holdings, [[rows[: options.test]]], ("all",), columns)


SPLIT = Split(Options, deal)
''')
    monkeypatch.setattr(splits, "__path__", [*splits.__path__, str(tmp_path)])
    assert "halves" in splits.names()
    config = resolve(
        change(read("fedavg"), {"data": "wine", "split": "halves", "scenario.test": 4}), "here"
    )
    assert config.scenario == {"split": "halves", "test": 4}
    made = parts(config)
    assert [len(made.scenario.holdings[id][0].train) for id in made.scenario.clients] == [87, 87]
    monkeypatch.delitem(sys.modules, "atoll.data.splits.halves")
    monkeypatch.delattr(splits, "halves")


def test_stages_of_classes_go_by_the_names_of_the_paper_too() -> None:
    ten = images(80)
    for name, kinds in (
        ("overlap4", [{0, 1, 2, 3}, {2, 3, 4, 5}, {4, 5, 6, 7}, {6, 7, 8, 9}]),
        ("disjoint2", [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
    ):
        values = {"split": "parties", "clients": 4, "mode": "classes", "stage_classes": name}
        assert held_at(ten, options_of(values, "scenario")) == kinds
    named = options_for(split="classes", stage_classes="overlap4")
    with pytest.raises(UserError, match=r"stage_classes lists \[4, 5, 6, 7\] for stage 2"):
        split(table(classes=6), named, 0)
    with pytest.raises(UserError, match="option 'stage_classes' cannot be"):
        options_of({"split": "classes", "stage_classes": "overlap"}, "scenario")


def test_only_images_are_changed_jointly() -> None:
    with pytest.raises(UserError, match="joint_aug changes images that are cut among parties"):
        split(table(), options_for("parties", joint_aug=True), 0)


# Rows


@pytest.mark.parametrize(("rows", "sizes"), [(15120, (9072, 3024, 3024)), (10, (6, 2, 2))])
def test_rows_are_cut_60_20_20(rows: int, sizes: tuple[int, ...]) -> None:
    parts = partition.cut(np.arange(rows), 0.6, 0.2, partition.at_random(Stream.of(1).numpy()))
    assert (len(parts.train), len(parts.valid), len(parts.test)) == sizes


def test_official_test_rows_are_the_test_rows_and_the_others_are_cut_three_to_one() -> None:
    official = np.array([False, True, False, False, True, False])
    take = partition.at_random(Stream.of(1).numpy())
    parts = partition.cut(np.arange(10, 16), 0.6, 0.2, take, official)
    assert parts.test.tolist() == [11, 14]
    assert (len(parts.train), len(parts.valid)) == (3, 1)
    assert sorted([*parts.train, *parts.valid]) == [10, 12, 13, 15]


def test_even_parts_drop_the_remainder() -> None:
    assert listed(partition.even(np.arange(7), 3)) == [[0, 1], [2, 3], [4, 5]]
    assert listed(partition.even(np.arange(2), 3)) == [[], [], []]


def test_shares_of_one_or_nothing_deal_whole_classes() -> None:
    labels = np.array([0, 1, 0, 1, 0])
    shares = np.array([[1.0, 0.0], [0.0, 1.0]])
    parts = partition.by_shares(np.arange(5), labels, shares, 0, Stream.of(1).numpy())
    assert [sorted(part) for part in listed(parts)] == [[0, 2, 4], [1, 3]]


def test_the_largest_gives_to_the_smallest_until_all_have_the_least() -> None:
    shares = np.array([[1.0, 0.0, 0.0]])
    labels = np.zeros(9, dtype=np.int64)
    parts = partition.by_shares(np.arange(9), labels, shares, 2, Stream.of(1).numpy())
    assert [len(part) for part in parts] == [5, 2, 2]
    assert sorted(np.concatenate(parts).tolist()) == list(range(9))


def test_too_few_rows_for_the_least_are_levelled_instead() -> None:
    shares = np.array([[1.0, 0.0, 0.0]])
    labels = np.zeros(4, dtype=np.int64)
    parts = partition.by_shares(np.arange(4), labels, shares, 5, Stream.of(1).numpy())
    assert sorted(len(part) for part in parts) == [1, 1, 2]


def test_one_row_of_a_class_goes_to_each_client_as_often_as_its_share_says() -> None:
    shares, labels = np.full((1, 4), 0.25), np.zeros(1, dtype=np.int64)
    winners = [0, 0, 0, 0]
    for seed in range(400):
        parts = partition.by_shares(np.arange(1), labels, shares, 0, Stream.of(seed).numpy())
        winners[[len(part) for part in parts].index(1)] += 1
    assert min(winners) > 60
    assert max(winners) < 140


def test_a_sample_by_class_keeps_proportions_and_what_must_be_kept() -> None:
    labels = np.array([0] * 8 + [1] * 4 + [2])
    take = partition.by_class(labels, Stream.of(1).numpy(), keep=1)
    taken, left = take(np.arange(13), 4)
    assert np.bincount(labels[taken], minlength=3).tolist() == [3, 1, 0]
    assert np.bincount(labels[left], minlength=3).tolist() == [5, 3, 1]
    everything, rest = take(np.arange(13), 13)
    assert (len(everything), np.sort(labels[rest]).tolist()) == (10, [0, 1, 2])


# Columns


@pytest.mark.parametrize(
    ("ratio", "clients", "common", "own"),
    [
        (0.1, 5, 5, [10, 10, 10, 10, 9]),
        (0.2, 5, 11, [9, 9, 9, 8, 8]),
        (0.3, 5, 16, [8, 8, 8, 7, 7]),
        (0.4, 5, 22, [7, 7, 6, 6, 6]),
        (0.5, 5, 27, [6, 6, 5, 5, 5]),
        (0.3, 2, 16, [19, 19]),
        (0.3, 10, 16, [4, 4, 4, 4, 4, 4, 4, 4, 3, 3]),
    ],
)
def test_covertype_has_the_columns_of_the_specification(
    ratio: float, clients: int, common: int, own: list[int]
) -> None:
    options = options_for(split="columns", clients=clients, ratio=ratio)
    made = split(table(15120, 54, 7), options, seed=0)
    assert len(made.common) == common
    assert [len(made.holdings[id][0].own) for id in made.clients] == own


@pytest.mark.parametrize(("clients", "train", "valid"), [(2, 4536, 1512), (10, 907, 302)])
def test_covertype_has_the_rows_of_the_specification(clients: int, train: int, valid: int) -> None:
    made = split(table(15120, 54, 7), options_for(split="columns", clients=clients), 3)
    for id in made.clients:
        assert len(made.holdings[id][0].train) == train
        assert len(made.holdings[id][0].valid) == valid
        assert made.tests[id][0] is made.tests["site-0"][0]
    assert len(made.tests["site-0"][0]) == 3024


def test_an_order_of_columns_is_cut_into_common_and_own() -> None:
    order = np.array([3, 0, 5, 1, 4, 2, 6])
    common, own = partition.columns_common_and_own(order, 2, 2)
    assert common.tolist() == [0, 3]
    assert listed(own) == [[1, 4, 5], [2, 6]]


def test_the_run_seed_moves_rows_and_the_feature_seed_moves_columns() -> None:
    options = options_for(split="columns")
    first, second = (split(table(), options, seed) for seed in (0, 1))
    other = split(table(), replace(options, feature_seed=1), 0)
    assert first.common.tolist() == second.common.tolist() != other.common.tolist()
    trains = [made.holdings["site-0"][0].train.tolist() for made in (first, second, other)]
    assert trains[0] == trains[2] != trains[1]


def test_common_columns_can_be_given() -> None:
    options = options_for(split="columns", clients=2, common=(7, 1))
    made = split(table(), options, 0)
    assert made.common.tolist() == [1, 7]
    owns = [made.holdings[id][0].own.tolist() for id in made.clients]
    assert sorted(owns[0] + owns[1]) == [0, 2, 3, 4, 5, 6, 8, 9]
    assert [len(own) for own in owns] == [4, 4]


def test_strips_go_from_left_to_right_and_the_last_takes_the_remainder() -> None:
    assert listed(image_strips(1, 2, 5, 2)) == [[0, 1, 5, 6], [2, 3, 4, 7, 8, 9]]
    assert listed(image_strips(2, 1, 2, 2)) == [[0, 2], [1, 3]]
    assert [len(strip) for strip in image_strips(3, 32, 32, 4)] == [768] * 4


def test_quadrants_go_by_rows() -> None:
    assert listed(image_quadrants(1, 2, 3)) == [[0], [1, 2], [3], [4, 5]]


def test_a_client_has_no_columns_before_its_stage() -> None:
    by_client = columns_by_stage([np.array([0, 1]), np.array([2])])
    assert [listed(client) for client in by_client] == [[[0, 1], [0, 1]], [[], [2]]]


# Classes and tasks


def test_classes_are_parted_by_stage() -> None:
    assert listed(partition.class_partition(5, 2)) == [[0, 1, 2], [3, 4]]
    overlapping = [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert listed(partition.class_windows(10, 4, 2, 4)) == overlapping
    assert listed(partition.class_windows(10, 2, 2, 4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


DRAWS = {
    8: "4356 3654 0213 2706 4732 5372 5421 4673 1065 7025 2351 7120 6721 4106 3752",
    7: "0154 1432 2601 4205 1253 4126 6430 1425 2403 3605 4162 6325 3264 1304 5612",
    6: "5302 3214 4035 2401 3452 2345 0215 3245 4205 1053 2341 0142 1425 3102 0342",
}


@pytest.mark.parametrize("classes", [8, 7, 6], ids=["R8", "TMN", "TREC6"])
def test_the_draws_of_fedseit_are_reproduced(classes: int) -> None:
    draws = task_draws(classes, 4, 15)
    assert " ".join("".join(map(str, draw)) for draw in draws) == DRAWS[classes]


@pytest.mark.parametrize(
    ("seed", "second", "third"),
    [
        (1, [14, 3, 6, 5, 13], [2, 12, 4, 1, 0]),
        (2, [2, 6, 12, 4, 3], [1, 14, 0, 5, 13]),
        (3, [4, 2, 5, 12, 3], [13, 0, 1, 14, 6]),
    ],
)
def test_the_allocations_of_fedseit_are_reproduced(
    seed: int, second: list[int], third: list[int]
) -> None:
    assert task_allocation(3, 5, seed) == [[10, 11, 8, 7, 9], second, third]


def test_a_class_is_cut_over_the_tasks_that_drew_it() -> None:
    labels = np.array([0, 0, 1, 0, 1, 0, 0, 2])
    rows = task_rows(np.arange(8), labels, [(0, 1), (2, 0)])
    assert listed(rows) == [[0, 1, 2, 4], [3, 5, 6, 7]]


R8 = [1596, 253, 2840, 41, 190, 206, 108, 251]  # training rows of acq, crude, earn, ...


def test_tasks_of_reuters_have_the_sizes_of_the_specification() -> None:
    dataset = texts(R8, [10] * 8)
    made = split(dataset, options_for(split="tasks", clients=3, stages=5), 1)
    sizes = sorted(
        (len(held.train), len(held.valid)) for id in made.clients for held in made.holdings[id]
    )
    assert len(sizes) == 15
    assert (sizes[0], sizes[-1]) == ((66, 10), (539, 78))
    assert sum(train + valid for train, valid in sizes) == sum(R8)


def test_each_client_is_tested_on_all_test_rows_of_its_own_tasks() -> None:
    dataset = texts(R8, [1, 2, 3, 4, 5, 6, 7, 8])
    made = split(dataset, options_for(split="tasks", clients=3, stages=5), 1)
    assert (made.stages, made.tasks[0], made.known_at) == (5, "task-0", (0, 1, 2, 3, 4))
    assert len(made.common) == 0
    for id, task, draw in (("site-0", 0, 10), ("site-1", 1, 3), ("site-2", 4, 0)):
        kinds = sorted(task_draws(8, 4, 15)[draw])
        tested = dataset.y[made.tests[id][task]]
        assert np.unique(tested).tolist() == kinds
        assert len(tested) == sum(kind + 1 for kind in kinds)
        assert np.unique(dataset.y[made.holdings[id][task].train]).tolist() == kinds


def test_a_class_of_one_row_stays_in_training() -> None:
    dataset = texts([1, 1, 16], [1, 1, 1])
    options = options_for(split="tasks", clients=1, stages=1, task_classes=3)
    [held] = split(dataset, options, 0).holdings["site-0"]
    assert np.bincount(dataset.y[held.train]).tolist() == [1, 1, 13]
    assert np.bincount(dataset.y[held.valid]).tolist() == [0, 0, 3]


def test_no_class_is_held_back_whole() -> None:
    dataset = texts([1, 1, 2], [1, 1, 1])
    options = options_for(split="tasks", clients=1, task_classes=3, held_back=0.5)
    [held] = split(dataset, options, 0).holdings["site-0"]
    assert np.bincount(dataset.y[held.train]).tolist() == [1, 1, 1]
    assert dataset.y[held.valid].tolist() == [2]


def test_tasks_are_drawn_in_the_order_of_class_names() -> None:
    dataset = replace(texts([8] * 5, [1] * 5), classes=tuple("edcba"))
    options = options_for(split="tasks", clients=1, task_classes=2)
    assert held_at(dataset, options) == [{4 - place for place in task_draws(5, 2, 1)[0]}]


def test_classes_without_test_rows_are_not_drawn() -> None:
    dataset = texts([8, 8, 8, 8], [2, 0, 2, 2])
    options = options_for(split="tasks", clients=2, stages=2, task_classes=3)
    assert held_at(dataset, options) == [{0, 2, 3}, {0, 2, 3}]


# Scenarios


def test_rows_are_dealt_and_all_columns_are_common() -> None:
    made = split(table(60, 10), options_for(split="rows", clients=4), 0)
    assert made.clients == ("site-0", "site-1", "site-2", "site-3")
    assert made.common.tolist() == list(range(10))
    assert (made.stages, made.tasks, made.known_at) == (1, ("all",), (0,))
    assert {len(made.holdings[id][0].train) for id in made.clients} == {9}
    assert {len(made.holdings[id][0].valid) for id in made.clients} == {3}
    assert {len(made.tests[id][0]) for id in made.clients} == {12}
    assert not made.labels_at_server


def test_validation_rows_are_the_test_rows_of_a_scenario_for_tuning() -> None:
    """Of 60 rows 36 are trained on and 12 validate; the 12 test rows stay unseen."""
    usual = split(table(60, 10), options_for(split="classes", clients=2), 0)
    tuning = split(table(60, 10), options_for(split="classes", clients=2, tests="valid"), 0)
    valid = {row for id in usual.clients for row in usual.holdings[id][0].valid.tolist()}
    assert set(tuning.tests["site-0"][0].tolist()) == valid
    assert len(valid) == 12
    for id in usual.clients:
        own, before = tuning.holdings[id][0], usual.holdings[id][0]
        assert own.train.tolist() == before.train.tolist()
        assert own.valid.tolist() == []


def test_own_tests_part_the_test_rows() -> None:
    made = split(table(60, 10), options_for(split="rows", clients=4, tests="own"), 0)
    parts = [made.tests[id][0].tolist() for id in made.clients]
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    assert len({row for part in parts for row in part}) == 12


def test_the_test_rows_of_the_set_are_used_unless_refused() -> None:
    dataset = replace(table(60, 10), test=np.arange(60) >= 50)
    options = options_for(split="rows", clients=2)
    made = split(dataset, options, 0)
    assert made.tests["site-0"][0].tolist() == list(range(50, 60))
    assert len(made.holdings["site-0"][0].train) == 19  # 37.5 is rounded to 38, for two
    own = split(dataset, replace(options, official_test=False), 0)
    assert len(own.tests["site-0"][0]) == 12


def test_dirichlet_clients_choose_by_rows_like_those_they_learn_from() -> None:
    dataset = table(3000, 2, 3)
    options = options_for(split="rows", clients=3, rows="dirichlet", alpha=0.3)
    made = split(dataset, options, 0)
    for held in (made.holdings[id][0] for id in made.clients):
        train, valid = (np.bincount(dataset.y[r], minlength=3) for r in (held.train, held.valid))
        assert np.abs(train - 3 * valid).max() <= 60  # shares of 600 and of 200 rows a class
    assert sum(len(made.holdings[id][0].train) for id in made.clients) == 1800


def test_sites_are_the_groups_by_name() -> None:
    dataset = grouped(table(60, 10), ("north", "east"))
    made = split(dataset, options_for(split="sites"), 0)
    assert made.clients == ("east", "north")
    assert set((made.holdings["north"][0].train % 2).tolist()) == {0}
    assert set((made.holdings["east"][0].valid % 2).tolist()) == {1}
    assert [len(made.holdings[id][0].train) for id in made.clients] == [18, 18]
    assert len(made.tests["east"][0]) == 12
    own = split(dataset, options_for(split="sites", tests="own"), 0)
    assert set((own.tests["east"][0] % 2).tolist()) == {1}


def test_classes_come_by_stage() -> None:
    dataset = table(120, 3, 6)
    made = split(dataset, options_for(split="classes", clients=2, stages=3), 0)
    assert (made.tasks, made.known_at) == (("task-0", "task-1", "task-2"), (0, 1, 2))
    for stage in range(3):
        kinds = {2 * stage, 2 * stage + 1}
        sizes = {len(made.holdings[id][stage].train) for id in made.clients}
        assert len(sizes) == 1
        assert set(dataset.y[made.tests["site-1"][stage]].tolist()) == kinds
        for id in made.clients:
            assert set(dataset.y[made.holdings[id][stage].train].tolist()) == kinds


def test_classes_come_in_windows_or_as_the_user_says() -> None:
    dataset = table(400, 3, 10)
    windows = options_for(split="classes", clients=2, stages=4, window=4)
    assert held_at(dataset, windows) == [{0, 1, 2, 3}, {2, 3, 4, 5}, {4, 5, 6, 7}, {6, 7, 8, 9}]
    given = options_for(split="classes", clients=2, stage_classes=((9, 0), (4,)))
    assert held_at(dataset, given) == [{0, 9}, {4}]


def test_a_row_of_overlapping_stages_stays_with_its_client() -> None:
    options = options_for(split="classes", clients=3, stages=4, window=4)
    made = split(table(400, 3, 10), options, 0)
    held = [set(np.concatenate([h.train for h in made.holdings[id]])) for id in made.clients]
    assert not held[0] & held[1]
    assert not held[0] & held[2]
    assert not held[1] & held[2]
    twice = set(made.holdings["site-0"][0].train) & set(made.holdings["site-0"][1].train)
    assert len(twice) > 0


def test_blurred_boundaries_move_a_share_of_the_training_rows_to_other_stages() -> None:
    """A fifth of a client's rows of a stage comes at the others, the rest stays."""
    dataset = table(180, 3, 6)
    options = options_for(split="classes", clients=2, stages=3)
    sharp, blurred = (
        split(dataset, one, 0) for one in (options, replace(options, blur=0.2, tests="shared"))
    )
    for id in sharp.clients:
        before, after = sharp.holdings[id], blurred.holdings[id]
        for stage in range(3):
            kinds = {2 * stage, 2 * stage + 1}
            inside = np.isin(dataset.y[after[stage].train], list(kinds))
            rows = len(before[stage].train)
            assert rows - int(inside.sum()) == round(0.2 * rows) > 0
            assert len(after[stage].train) > int(inside.sum())
            assert np.array_equal(before[stage].valid, after[stage].valid)
        rows_before, rows_after = (
            np.sort(np.concatenate([h.train for h in held])) for held in (before, after)
        )
        assert np.array_equal(rows_before, rows_after)
    assert listed(list(sharp.tests["site-0"])) == listed(list(blurred.tests["site-0"]))


def test_clients_can_have_the_stages_in_orders_of_their_own() -> None:
    dataset = table(240, 3, 8)
    options = options_for(split="classes", clients=3, stages=4)
    same, own = (split(dataset, one, 1) for one in (options, replace(options, orders="own")))
    orders = []
    for id in same.clients:
        trains = [set(holding.train.tolist()) for holding in same.holdings[id]]
        orders.append([trains.index(set(holding.train.tolist())) for holding in own.holdings[id]])
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert own.known_at == tuple(min(o.index(task) for o in orders) for task in range(4))
    assert listed(list(same.tests["site-0"])) == listed(list(own.tests["site-0"]))


def test_domains_arrive_by_stage_at_all_clients() -> None:
    dataset = grouped(images(300), ("usps", "mnist", "syn"))
    made = split(dataset, options_for(split="shifts", clients=2, sequence=("syn", "usps")), 0)
    assert (made.tasks, made.known_at) == (("syn", "usps"), (0, 1))
    for id in made.clients:
        for stage, domain in enumerate((2, 0)):
            assert set((made.holdings[id][stage].train % 3).tolist()) == {domain}
            assert set((made.tests[id][stage] % 3).tolist()) == {domain}
            assert len(set(dataset.y[made.holdings[id][stage].train].tolist())) > 5


def test_classes_drift_without_boundaries() -> None:
    """Ten steps, four classes: every row once, early steps of early classes, equal sizes."""
    dataset = table(800, 3, 4)
    made = split(dataset, options_for(split="drift", clients=2, stages=10, spread=0.2), 0)
    assert (made.tasks, made.known_at) == (dataset.classes, (0, 2, 5, 7))
    for id in made.clients:
        trains = [holding.train for holding in made.holdings[id]]
        sizes = [len(train) for train in trains]
        assert len(np.unique(np.concatenate(trains))) == sum(sizes)
        assert max(sizes) < 2 * min(sizes)
        means = [float(dataset.y[train].mean()) for train in trains]
        assert means[0] < 0.8
        assert means[-1] > 2.2
        assert all(len(np.unique(dataset.y[train])) > 1 for train in trains)
        for kind, rows in enumerate(made.tests[id]):
            assert set(dataset.y[rows].tolist()) == {kind}


def test_parties_have_strips_of_the_same_rows() -> None:
    options = options_for(split="parties", clients=4, cut="strips")
    made = split(images(), options, 0)
    assert made.labels_at_server
    assert len(made.common) == 0
    assert made.holdings["site-1"][0].own.tolist() == [2, 3, 10, 11, 18, 19, 26, 27]
    trains = {tuple(made.holdings[id][0].train.tolist()) for id in made.clients}
    assert len(trains) == 1


def test_parties_have_contiguous_or_permuted_columns_or_quadrants() -> None:
    options = options_for(split="parties", clients=3)
    plain, mixed = (
        [
            split(table(), replace(options, cut=cut), 0).holdings[f"site-{k}"][0].own
            for k in range(3)
        ]
        for cut in ("contiguous", "permuted")
    )
    assert listed(plain) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [len(own) for own in mixed] == [4, 3, 3]
    assert sorted(np.concatenate(mixed).tolist()) == list(range(10))
    assert listed(mixed) != listed(plain)
    quarters = split(images(), replace(options, clients=4, cut="quadrants"), 0)
    assert quarters.holdings["site-3"][0].own.tolist() == [20, 21, 22, 23, 28, 29, 30, 31]


def test_parties_can_have_classes_by_stage() -> None:
    options = options_for(split="parties", clients=4, cut="strips", mode="classes")
    options = replace(options, stages=4, window=4, valid=0.0)
    dataset = images(400)
    made = split(dataset, options, 0)
    assert (made.stages, made.known_at) == (4, (0, 1, 2, 3))
    assert held_at(dataset, options)[1] == {2, 3, 4, 5}
    assert set(dataset.y[made.tests["site-2"][3]].tolist()) == {6, 7, 8, 9}
    assert len(made.holdings["site-3"][0].valid) == 0


def test_parties_can_join_by_stage() -> None:
    options = options_for(split="parties", clients=3, mode="columns")
    made = split(table(60, 10), options, 0)
    assert (made.stages, made.tasks, made.known_at) == (3, ("all",), (0,))
    for number, id in enumerate(made.clients):
        for stage, held in enumerate(made.holdings[id]):
            joined = stage >= number
            assert len(held.own) == ((4, 3, 3)[number] if joined else 0)
            assert (len(held.train), len(held.valid)) == ((36, 12) if joined else (0, 0))
        assert len(made.tests[id][0]) == 12


def test_client_i_has_domain_i_and_is_tested_on_all() -> None:
    dataset = grouped(images(300), ("usps", "mnist", "syn"))
    options = options_for(split="domains", sizes=(7, 30, 11), train=0.7, valid=0.0)
    made = split(dataset, options, 0)
    assert (made.clients, made.tasks) == (("site-0", "site-1", "site-2"), ("usps", "mnist", "syn"))
    assert (made.stages, made.known_at) == (1, (0, 0, 0))
    for number, id in enumerate(made.clients):
        train = made.holdings[id][0].train
        assert len(train) == options.sizes[number]
        assert set((train % 3).tolist()) == {number}
        assert [len(rows) for rows in made.tests[id]] == [30, 30, 30]
        assert [set((rows % 3).tolist()) for rows in made.tests[id]] == [{0}, {1}, {2}]
        assert not set(train.tolist()) & set(np.concatenate(made.tests[id]).tolist())


def test_domains_can_keep_the_shares_of_the_classes() -> None:
    dataset = grouped(images(400, classes=5), ("art", "product"))
    options = options_for(split="domains", sizes=(20, 50), train=0.7, valid=0.0)
    made = split(dataset, replace(options, stratified=True), 0)
    trains = [np.bincount(dataset.y[made.holdings[id][0].train]).tolist() for id in made.clients]
    assert trains == [[4] * 5, [10] * 5]
    assert np.bincount(dataset.y[made.tests["site-0"][1]]).tolist() == [12] * 5


# What is refused

REFUSALS = {
    "shares above one": (table(), options_for(train=0.9, valid=0.2), "shares of the rows"),
    "nothing to learn": (table(), options_for(train=0.0), "shares of the rows"),
    "nothing to test": (table(), options_for(train=0.8), "no test rows"),
    "too many clients": (table(), options_for(clients=61), "60 rows are too few for 61"),
    "too few for Dirichlet": (
        table(),
        options_for(clients=10, rows="dirichlet", least=4),
        "36 training rows at stage 0 are too few",
    ),
    "too many own tests": (table(), options_for(clients=13, tests="own"), "no test rows"),
    "blurred windows": (
        table(400, 3, 10),
        options_for(split="classes", clients=2, stages=4, window=4, blur=0.1),
        "belong to one stage each",
    ),
    "an unknown domain": (
        grouped(images(), ("usps", "mnist")),
        options_for(split="shifts", clients=2, sequence=("usps", "mnits")),
        "sequence lists",
    ),
    "stages of one stage": (table(), options_for("parties", stages=2), "makes 1"),
    "no common column": (table(), options_for(split="columns", ratio=0.04), "no common column"),
    "unknown column": (table(), options_for(split="columns", common=(10,)), "common lists"),
    "column below 0": (table(), options_for(split="columns", common=(-1,)), "common lists"),
    "column twice": (table(), options_for(split="columns", common=(1, 1)), "common lists"),
    "columns of text": (texts([5], [5]), options_for(split="columns"), "no columns"),
    "parties of text": (texts([5], [5]), options_for(split="parties"), "no columns"),
    "no sites": (table(), options_for(split="sites"), "no groups of rows"),
    "no domains": (table(), options_for(split="domains"), "has no domains"),
    "sizes of other domains": (
        grouped(table(), ("a", "b")),
        options_for(split="domains", sizes=(1,)),
        "1 numbers for 2 domains",
    ),
    "a domain too small": (
        grouped(table(), ("a", "b")),
        options_for(split="domains", sizes=(1, 19)),
        "domain 'b' has 18 training rows, not 19",
    ),
    "an empty site": (
        replace(grouped(table(), ("a", "b")), groups=("a", "b", "c")),
        options_for(split="sites"),
        "client 'c' has no training rows",
    ),
    "more stages than classes": (
        table(),
        options_for(split="classes", stages=4),
        "3 classes cannot fill 4 stages",
    ),
    "windows past the end": (
        table(),
        options_for(split="classes", stages=2, window=2, stride=2),
        "need more than 3 classes",
    ),
    "an unknown class": (
        table(),
        options_for(split="classes", stage_classes=((0,), (3,))),
        r"lists \[3\] for stage 1",
    ),
    "a class below 0": (
        table(),
        options_for(split="classes", stage_classes=((-1,),)),
        r"lists \[-1\] for stage 0",
    ),
    "an empty stage": (
        table(),
        options_for(split="classes", stage_classes=((0,), ())),
        r"lists \[\] for stage 1",
    ),
    "a domain of no rows": (
        grouped(table(), ("a", "b")),
        options_for(split="domains", sizes=(0, 5)),
        "domain 'a' has 18 training rows, not 0",
    ),
    "stages against the list": (
        table(),
        options_for(split="classes", stages=3, stage_classes=((0,), (1,))),
        "makes 2",
    ),
    "more parties than columns": (
        table(),
        options_for(split="parties", clients=11),
        "10 columns are too few for 11 clients",
    ),
    "strips of a table": (table(), options_for(split="parties", cut="strips"), "is a table"),
    "strips too thin": (
        images(),
        options_for(split="parties", cut="strips", clients=9),
        "8 wide",
    ),
    "three quadrants": (
        images(),
        options_for(split="parties", cut="quadrants", clients=3),
        "not for 3 clients",
    ),
    "tasks too wide": (
        texts([9, 9, 9], [1, 1, 1]),
        options_for(split="tasks"),
        "4 classes cannot be drawn from 3",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused(case: str) -> None:
    dataset, options, what = REFUSALS[case]
    with pytest.raises(UserError, match=what) as caught:
        split(dataset, options, 0)
    assert (caught.value.where, caught.value.exit_code) == ("scenario", EXIT_USER)
    assert caught.value.remedy


def test_the_published_split_of_domains_tests_on_training_rows_and_says_so() -> None:
    """J7 of the FCCL specification: class-sorted first rows, the whole domain as test set."""
    made = data.load("synthetic-images", rows=400)
    options = options_for(split="domains", sizes=(60, 60), paper_compat=True)
    dealt = split(made, options, 0)
    assert all(name.endswith("(tested on training rows too)") for name in dealt.tasks)
    assert made.group is not None
    for number, id in enumerate(dealt.clients):
        train, tested = dealt.holdings[id][0].train, dealt.tests[id][number]
        assert len(train) == 60
        assert np.isin(train, tested).all()
        assert tested.tolist() == np.flatnonzero(made.group == number).tolist()
        assert len(np.unique(made.y[train])) < len(made.classes)  # later classes are absent
    clean = split(made, options_for(split="domains"), 0)
    assert not any("training rows" in name for name in clean.tasks)


@pytest.mark.parametrize("more", [{}, {"stratified": True}, {"paper_compat": True}], ids=str)
def test_rows_before_the_first_round_are_the_same_unless_they_are_drawn_twice(
    more: dict[str, Any],
) -> None:
    """J8 of the FCCL specification."""
    made = data.load("synthetic-images", rows=400)
    once = split(made, options_for(split="domains", sizes=(60, 40), **more), 0)
    twice = split(made, options_for(split="domains", sizes=(60, 40), drawn_twice=True, **more), 0)
    assert made.group is not None
    for number, id in enumerate(once.clients):
        (one,), (other,) = once.holdings[id], twice.holdings[id]
        assert one.before is None
        assert other.train.tolist() == one.train.tolist()  # federation has the rows it always had
        assert other.before is not None
        assert len(other.before) == len(np.unique(other.before)) == (60, 40)[number]
        assert other.before.tolist() != other.train.tolist()
        assert (made.group[other.before] == number).all()
        tested = np.isin(other.before, twice.tests[id][number]).any()
        assert tested == ("paper_compat" in more)


def test_nothing_is_drawn_twice_where_all_rows_are_taken() -> None:
    with pytest.raises(UserError, match="without sizes all rows are taken"):
        split(data.load("synthetic-images"), options_for(split="domains", drawn_twice=True), 0)


def test_the_numbers_of_own_rows_are_those_that_will_be_dealt(tmp_path: Path) -> None:
    """`atoll inspect` tells them without holding the file."""
    lines = [f"{n % 7},{'ab'[n % 2]},{n % 3 // 2}" for n in range(97)]
    for name, part in (("one", lines), ("two", lines[:41])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,outcome,month", *part]) + "\n")
    files = tuple(str(tmp_path / f"{name}.csv") for name in ("one", "two"))
    for stage in ("", "month"):
        given: dict[str, Any] = {"files": files, "label": "outcome"}
        given |= {"stage": stage} if stage else {}
        options = options_for(split="files")
        found, dealt = tables.survey(**given), split(tables.load(**given), options, 0)
        common, own = tables.widths(found)
        assert common == len(dealt.common)
        for site in found.sites:
            stages = {s: site.stages[s] for s in found.stages or ("",)}
            parts = zip(dealt.holdings[site.name], dealt.tests[site.name], strict=True)
            expected = [(len(h.train), len(h.valid), len(t)) for h, t in parts]
            assert own_sizes(site.name, stages, options).tolist() == [list(n) for n in expected]
            assert own[site.name] == len(dealt.holdings[site.name][-1].own)


@pytest.mark.parametrize(
    ("train", "valid", "what"),
    [
        (0.9, 0.3, "cannot be shares of the rows"),
        (0.8, 0.2, "has no test rows for task 'all'"),
        (0.001, 0.2, "has no training rows at stage 0"),
    ],
)
def test_what_a_run_refuses_is_refused_where_rows_are_but_counted(
    train: float, valid: float, what: str, tmp_path: Path
) -> None:
    lines = ["x,outcome", *(f"{n % 7},{'ab'[n % 2]}" for n in range(97))]
    (tmp_path / "one.csv").write_text("\n".join(lines) + "\n")
    options = options_for(split="files", train=train, valid=valid)
    made = tables.load(files=(str(tmp_path / "one.csv"),), label="outcome")
    with pytest.raises(UserError, match=what):
        split(made, options, 0)
    with pytest.raises(UserError, match=what):
        own_sizes("one", {"": 97}, options)
