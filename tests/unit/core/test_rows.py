"""Rows of tables and of sequences: what is side by side, and how much room sequences need."""

import torch

from atoll.core.rows import PIECE, Bounds, Rows, distinct, pieces, room


def test_rows_know_whether_they_are_sequences_and_put_columns_side_by_side() -> None:
    numbers = Rows(torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2))
    tokens = Rows(torch.ones(2, 1, dtype=torch.int64), torch.zeros(2, 0), torch.zeros(2))
    assert (numbers.sequences, tokens.sequences) == (False, True)
    assert numbers.all.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert tokens.all is tokens.x
    stack = Rows(torch.ones(3, 2, 1), torch.zeros(3, 2, 1), torch.zeros(3, 2))
    assert stack.all.shape == (3, 2, 2)
    assert len(stack) == 2


def test_a_sequence_fills_pieces_up_to_its_last_token_whatever_is_padded() -> None:
    x = torch.zeros((4, 2 * PIECE), dtype=torch.int64)
    x[1, PIECE - 2] = 1  # place 15 of 16
    x[2, PIECE - 1] = 1  # the filter that begins there reads the next piece
    x[3, 0] = 5
    assert PIECE == 16
    assert pieces(x).tolist() == [1, 1, 2, 1]


def test_a_batch_needs_the_pieces_of_all_and_the_tokens_of_its_richest_member() -> None:
    x = torch.zeros((2, 2, 16), dtype=torch.int64)
    x[0, 0, :3] = torch.tensor([4, 2, 4])
    x[1, 0, :2] = torch.tensor([1, 2])
    x[1, 1, 15] = 3
    assert distinct(x, 5).tolist() == [[1, 0, 1, 0, 1], [1, 1, 1, 1, 0]]
    assert room(x) == Bounds(pieces=5, tokens=4)
