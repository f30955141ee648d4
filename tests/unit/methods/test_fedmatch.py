"""FedMatch: who helps whom, and how far a client is from its helpers; worked out by hand."""

import math

import pytest
import torch

from atoll.methods.fedmatch import consistency, nearest


def softmax(z: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in z)
    return [math.exp(value) / total for value in z]


def by_hand(weak: list[float], strong: list[float], helpers: list[list[float]], vote: int) -> float:
    q = softmax(weak)
    agree = 0.0
    for helper in helpers:
        p = softmax(helper)
        agree += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / len(helpers)
    return agree - math.log(softmax(strong)[vote])


SURE, UNSURE = [4.0, 0.0, 1.0], [0.2, 0.1, 0.0]
STRONG = [[1.0, 2.0, 0.0], [0.0, 0.0, 1.0]]
HELPERS = [[[0.0, 3.0, 1.0], [1.0, 0.0, 0.0]], [[0.5, 2.0, 0.0], [0.0, 1.0, 0.0]]]


def loss(weak: list[list[float]], confidence: float, rows: int = 2) -> float:
    tensors = [torch.tensor(t, dtype=torch.float64) for t in (weak, STRONG, HELPERS)]
    return float(consistency(tensors[0], tensors[1][:rows], tensors[2][:, :rows], confidence))


def test_rows_that_a_client_is_sure_of_count_with_what_most_of_all_name() -> None:
    first = by_hand(SURE, STRONG[0], [h[0] for h in HELPERS], vote=1)  # two helpers against one
    assert loss([SURE, UNSURE], 0.9) == pytest.approx(first)
    # all name another class: the lowest
    other = by_hand([0.0, 0.0, 4.0], STRONG[1], [h[1] for h in HELPERS], vote=0)
    assert loss([SURE, [0.0, 0.0, 4.0]], 0.9) == pytest.approx((first + other) / 2)


def test_a_row_at_the_confidence_counts_and_where_none_counts_there_is_no_loss() -> None:
    even = [0.0, 0.0, -math.inf]  # half and half, exactly
    weak = torch.tensor([even], dtype=torch.float64)
    strong = torch.zeros((1, 3), dtype=torch.float64)
    helpers = torch.tensor([[[0.0, 0.0, -1e9]]], dtype=torch.float64)
    at, above = (float(consistency(weak.clamp(min=-1e9), strong, helpers, c)) for c in (0.5, 0.51))
    assert at == pytest.approx(math.log(3))
    assert above == 0


def test_helpers_are_those_with_the_nearest_outputs_and_never_the_client_itself() -> None:
    answers = {id: torch.tensor([[z, 0.0]]) for id, z in (("a", 0.0), ("b", 5.0), ("c", 1.0))}
    assert nearest(answers, 2) == {"a": ["c", "b"], "b": ["c", "a"], "c": ["a", "b"]}
    assert nearest(answers, 1) == {"a": ["c"], "b": ["c"], "c": ["a"]}
    equal = {id: torch.zeros(1, 2) for id in ("b", "c", "a")}
    assert nearest(equal, 1) == {"a": ["b"], "b": ["a"], "c": ["a"]}  # the lowest of equals


def test_the_distance_is_over_all_rows_and_between_probabilities_not_logits() -> None:
    answers = {
        "a": torch.tensor([[0.0, 0.0], [0.0, 0.0]]),
        "b": torch.tensor([[0.0, 0.0], [9.0, 0.0]]),
        "c": torch.tensor([[50.0, 50.0], [1.0, 0.0]]),  # far in logits, near in probabilities
    }
    assert nearest(answers, 1)["a"] == ["c"]


def test_a_client_without_helpers_follows_its_own_vote() -> None:
    """Cross-entropy of the strong logits (0, 0) at the class of the weak ones: log 2."""
    weak, strong = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert float(consistency(weak, strong, torch.zeros(0, 1, 2), 0.5)) == pytest.approx(math.log(2))
