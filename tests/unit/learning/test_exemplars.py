"""An exemplar memory, worked out by hand."""

import pytest
import torch

from atoll.core.rows import Rows
from atoll.learning import exemplars


def rows(*values: float) -> Rows:
    x = torch.tensor(values)[:, None]
    return Rows(x, x[:, :0], torch.arange(len(values)))


def test_herding_follows_the_mean() -> None:
    """Directions 0, 90 and 30 degrees: their mean points to 37 degrees.

    The third is nearest; after it, the mean with the second (60 degrees) is nearer than with the
    first (15 degrees).
    """
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3**0.5, 1.0]])
    assert exemplars.herding_order(features, 2) == [2, 1]
    assert exemplars.herding_order(features, 9) == [2, 1, 0]


def test_equal_rows_are_taken_in_their_order_and_each_once() -> None:
    assert exemplars.herding_order(torch.ones(3, 2), 3) == [0, 1, 2]


def test_all_groups_have_equal_parts_of_the_memory() -> None:
    groups = {(0, 0): [4, 2, 9], (1, 0): [7], (1, 1): [3, 5, 1]}
    assert exemplars.shortened(groups, 7) == {(0, 0): [4, 2], (1, 0): [7], (1, 1): [3, 5]}
    assert exemplars.shortened(groups, 2) == {}
    assert exemplars.shortened({}, 2) == {}


def test_a_table_holds_groups_in_their_order() -> None:
    groups = {(3, 0): [4, 2], (1, 2): [7]}
    table = exemplars.to_table(groups)
    assert table.tolist() == [[3, 0, 4], [3, 0, 2], [1, 2, 7]]
    assert list(exemplars.from_table(table).items()) == list(groups.items())
    assert exemplars.from_table(exemplars.to_table({})) == {}


@pytest.mark.parametrize(
    ("others", "share", "expected"),
    [(3, 0.5, [1.0, 2.0, 1.0]), (6, 0.25, [1.0, 2.0]), (2, 0.1, [1.0, 2.0])],
)
def test_memory_rows_are_repeated_up_to_their_share(
    others: int, share: float, expected: list[float]
) -> None:
    assert exemplars.repeated(rows(1, 2), others, share).x.flatten().tolist() == expected


def test_rows_are_joined_in_order() -> None:
    both = exemplars.joined([rows(1, 2), rows(5)])
    assert both.x.flatten().tolist() == [1, 2, 5]
    assert both.y.tolist() == [0, 1, 0]
    assert both.own.shape == (3, 0)
