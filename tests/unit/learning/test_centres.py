"""Task representations: similarity, and that no centre is a single text."""

import numpy as np
import pytest
import torch

from atoll.core.rng import Stream
from atoll.learning.centres import _merged, centres, normalised, similarity, unit_mean
from atoll.learning.textcnn import normal


def vectors(rows: int = 40, name: str = "a") -> torch.Tensor:
    return normal((rows, 5), 1.0, Stream.of(0, name))


def smallest_distance(found: torch.Tensor, rows: torch.Tensor) -> float:
    return float(torch.cdist(found.double(), rows.double()).min())


def test_no_centre_is_a_single_text_even_where_texts_are_far_apart_or_come_twice() -> None:
    rows = vectors()
    rows[3], rows[4] = 1000.0, -1000.0  # each a cluster of its own
    rows[7:10] = rows[6]  # one text four times: its copies must not be a cluster
    found = centres(rows, 200, 2)
    assert 1 <= len(found) <= 20
    assert smallest_distance(found, rows) > 1e-4


def test_the_probe_finds_a_text_where_clusters_of_one_are_allowed() -> None:
    rows = vectors()
    assert smallest_distance(centres(rows, 200, 1), rows) < 1e-5


@pytest.mark.parametrize("rows", [0, 1])
def test_a_task_of_one_text_has_no_centre(rows: int) -> None:
    assert centres(vectors(rows), 200, 2).shape == (0, 5)


def test_zero_vectors_are_left_out() -> None:
    assert centres(torch.zeros((6, 5)), 200, 2).shape == (0, 5)
    with_zeros = torch.cat([vectors(), torch.zeros((5, 5))])
    assert torch.equal(centres(with_zeros, 200, 2), centres(vectors(), 200, 2))


def test_centres_are_the_means_of_clusters_at_most_one_for_two_rows() -> None:
    pairs = torch.tensor(
        [[0.1, 0.0], [0.3, 0.0], [10.1, 5.0], [10.3, 5.0], [20.1, 0.0], [20.3, 2.0]]
    )
    found = centres(pairs, 200, 2)
    wanted = torch.tensor([[0.2, 0.0], [10.2, 5.0], [20.2, 1.0]])
    torch.testing.assert_close(found[found[:, 0].argsort()], wanted)
    # one by one, 6.9 would join 5 rather than 11, and all would be one
    near = torch.tensor([[1.0], [5.0], [6.9], [11.0]])
    assert sorted(centres(near, 200, 2).flatten().tolist()) == pytest.approx([3.0, 8.95])


def test_where_a_cluster_of_one_is_allowed_each_row_is_a_centre_as_far_as_there_may_be() -> None:
    rows = torch.tensor([[1.0], [2.0], [5.0], [9.0]])
    assert sorted(centres(rows, 200, 1).flatten().tolist()) == [1.0, 2.0, 5.0, 9.0]
    assert sorted(centres(rows, 2, 1).flatten().tolist()) == pytest.approx([1.5, 7.0])


def test_as_many_rows_as_a_cluster_needs_are_one_and_fewer_are_none() -> None:
    assert centres(torch.tensor([[1.0], [2.0]]), 200, 2).tolist() == [[1.5]]
    assert centres(torch.tensor([[1.0], [2.0]]), 200, 3).shape == (0, 1)
    assert centres(torch.zeros((0, 1)), 200, 1).shape == (0, 1)


def test_scores_are_shared_out_without_negative_ones_and_equally_where_all_are_zero() -> None:
    assert normalised([3.0, -2.0, 1.0]).tolist() == [0.75, 0.0, 0.25]
    assert normalised([0.0, -1.0]).tolist() == [0.5, 0.5]
    assert normalised([0.0]).tolist() == [1.0]
    assert normalised([]).tolist() == []


def test_equal_rows_in_another_order_give_equal_centres() -> None:
    assert torch.equal(centres(vectors(), 7, 2), centres(vectors().flip(0), 7, 2))


def test_similarity_is_the_mean_cosine_of_all_pairs_and_symmetric() -> None:
    one, other = vectors(6, "b"), vectors(9, "c")
    pairs = torch.nn.functional.cosine_similarity(one[:, None], other[None], dim=-1)
    assert similarity(one, other) == pytest.approx(float(pairs.mean()), abs=1e-6)
    assert similarity(one, other) == pytest.approx(similarity(other, one), abs=1e-9)
    dot = float((unit_mean(one) * unit_mean(other)).sum())
    assert similarity(one, other) == pytest.approx(dot, abs=1e-6)
    high = torch.where(pairs > 0.3, pairs, 0).mean()
    assert similarity(one, other, 0.3) == pytest.approx(float(high), abs=1e-6)


def test_nothing_is_like_a_task_without_centres() -> None:
    none = torch.zeros((0, 5))
    assert similarity(none, vectors()) == 0
    assert similarity(vectors(), none, 0.7) == 0


def merged(groups: list[list[list[float]]], least: int) -> list[int]:
    rows = np.array([row for group in groups for row in group])
    member = np.array([n for n, group in enumerate(groups) for _ in group], dtype=np.int32)
    return [int(cluster) for cluster in _merged(rows, member, least)]


def test_a_cluster_that_is_too_small_joins_the_one_with_the_nearest_mean() -> None:
    groups = [[[-1.0, -1.0]] * 3, [[30.0, 12.0]] * 3, [[10.0, 0.0]] * 3, [[8.0, 3.0]] * 2]
    assert merged(groups, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert merged(groups, 2) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]  # large enough


def test_a_merged_cluster_is_as_large_as_its_rows_and_stands_at_their_mean() -> None:
    # 101 joins the two at 105; their mean, 103.7, is nearer to 111 than to 95.5
    groups = [[[101.0]], [[105.0]] * 2, [[95.5]] * 4, [[111.0]] * 4]
    assert merged(groups, 4) == [3, 3, 3, 2, 2, 2, 2, 3, 3, 3, 3]


def test_merging_ends_with_one_cluster_however_few_rows_it_has() -> None:
    assert merged([[[0.0]], [[1.0]]], 5) == [1, 1]


def test_a_zero_vector_has_no_say_in_the_mean_however_short_the_others_are() -> None:
    short = torch.tensor([[0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(unit_mean(short), torch.tensor([[0.6, 0.8]]))
    assert unit_mean(torch.zeros((0, 5))).tolist() == [[0.0] * 5]
    along = torch.tensor([[0.2, 0.0], [0.0, 0.0]])
    assert similarity(along, short) == pytest.approx(0.6)
    assert similarity(along, short, 0.5) == pytest.approx(0.6)


def test_with_a_threshold_a_task_without_centres_is_like_none_whichever_comes_first() -> None:
    none = torch.zeros((0, 5))
    assert similarity(none, vectors(), 0.7) == 0
    assert similarity(vectors(), none, 0.7) == 0


def test_a_cosine_must_be_above_the_threshold_to_count() -> None:
    one, other = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones((1, 4))
    assert similarity(one, other, 0.49) == 0.5
    assert similarity(one, other, 0.5) == 0
