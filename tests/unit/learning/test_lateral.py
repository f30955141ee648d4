"""Which rows are right, and what the concatenation reads; worked out by hand."""

import pytest
import torch

from atoll.learning.lateral import concat_logits, stack_models

HIT, MISS = [2.0, 1.0], [1.0, 2.0]  # logits of one row whose class is 0


def test_the_models_of_a_bank_come_after_the_first_model() -> None:
    """Two rows of class 0: by its hits each model is known."""
    first, last = torch.tensor([HIT, MISS]), torch.tensor([MISS, MISS])
    bank = torch.tensor([[HIT, HIT], [MISS, HIT]])
    y = torch.tensor([0, 0])
    expected = [[True, False], [True, True], [False, True], [False, False]]
    right = stack_models([first, last], bank).argmax(-1) == y
    assert right.tolist() == expected
    right = stack_models([first, last], None).argmax(-1) == y
    assert right.tolist() == [expected[0], expected[3]]


@pytest.mark.parametrize(("how", "common"), [("prob", [0.5, 0.5]), ("logit", [3.0, 3.0])])
def test_the_concatenation_reads_probabilities_or_logits_beside_the_own_columns(
    how: str, common: list[float]
) -> None:
    """One layer: the first output is a sum of all inputs, the second the own column less one."""
    weights = {
        "concat/weight0": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]),
        "concat/bias0": torch.tensor([0.0, -1.0]),
    }
    z, own = torch.tensor([[3.0, 3.0]]), torch.tensor([[7.0]])
    assert concat_logits(weights, own, z, how).tolist() == [[sum(common) + 7.0, 6.0]]
