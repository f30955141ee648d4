"""V-LETO's prototypes follow the drift of the batch's classes; worked out by hand."""

import pytest
import torch

from atoll.jobs.split_round import Step
from atoll.methods.vleto import moved

MEANS = torch.tensor([[1.0], [2.0], [3.0]])


def after(drift: str, gamma: float = 0.5, before: bool = True) -> list[float]:
    # class 0 moved from 0 to 2, class 1 from 4 to 10, class 2 has no rows
    joint = torch.tensor([[1.0], [3.0], [10.0]])
    past = torch.tensor([[0.0], [0.0], [4.0]]) if before else torch.zeros(0, 1)
    step = Step(joint, past, torch.tensor([0, 0, 1]), torch.tensor(0))
    found: list[float] = moved(MEANS, torch.tensor(gamma), drift, step).flatten().tolist()
    return found


def test_all_prototypes_move_by_the_mean_way_of_the_classes_that_are_there() -> None:
    assert after("vector") == pytest.approx([3.0, 4.0, 5.0])  # half of (2 + 6) / 2


def test_by_one_number_they_move_by_the_mean_cosine() -> None:
    assert after("scalar") == pytest.approx([1.25, 2.25, 3.25])  # half of (0 + 1) / 2


def test_without_drift_or_without_what_old_networks_said_they_stay() -> None:
    assert after("") == MEANS.flatten().tolist()
    assert after("vector", before=False) == MEANS.flatten().tolist()
