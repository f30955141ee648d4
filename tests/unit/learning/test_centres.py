"""Task representations: similarity, and that no centre is a single text."""

import pytest
import torch

from atoll.core.rng import Stream
from atoll.learning.centres import centres, similarity, unit_mean
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
