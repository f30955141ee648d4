"""Which past tasks a client is given, and how the index survives a restart."""

import math

import torch

from atoll.learning.centres import product
from atoll.learning.task_index import TaskIndex

NORTH, EAST = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])


def filled(keep: int = 1) -> TaskIndex:
    """Two clients, one past task each; now a is like b's past task."""
    index = TaskIndex(keep, product)
    index.adaptive = {(0, "a"): {"values": torch.ones(1)}, (0, "b"): {"values": torch.zeros(1)}}
    index.described = {(0, "a"): NORTH, (0, "b"): EAST, (1, "a"): EAST, (1, "b"): EAST}
    return index


def test_without_a_comparison_every_clients_last_task_is_chosen() -> None:
    assert TaskIndex(1, None).chosen(("a", "b"), "a", 2) == ([(1, "a"), (1, "b")], [])


def test_the_nearest_past_tasks_are_chosen_and_their_parts_numbered_by_slot() -> None:
    index = filled(keep=2)
    assert index.chosen(("a", "b"), "a", 1) == ([(0, "b"), (0, "a")], [1.0, 0.0])
    parts = index.parts([(0, "b"), (0, "a")])
    assert {name: part.tolist() for name, part in parts.items()} == {
        "0/values": [0.0],
        "1/values": [1.0],
    }


def test_tables_have_a_row_for_each_client_and_nan_where_nothing_was_given() -> None:
    names, slots, scores = filled().tables(("a", "b"), 1)
    assert names == ("a task 0", "b task 0")
    assert all(math.isnan(row[0]) for row in (*slots, *scores))
    assert [row[1] for row in slots] == [0.0, 0.0]
    assert [row[1] for row in scores] == [1.0, 1.0]


def test_a_restored_index_chooses_the_same() -> None:
    one, other = filled(), filled()
    other.adaptive, other.described = {}, {}
    other.restore(one.state())
    assert other.chosen(("a", "b"), "a", 1) == one.chosen(("a", "b"), "a", 1)
    assert other.adaptive[0, "a"]["values"].tolist() == [1.0]
