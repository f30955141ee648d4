"""When the rate is cut and training ends, epoch by epoch."""

import torch

from atoll.jobs.early_stopping import Rule, stepped

RULE = Rule(patience=3, cut=2.0, least=0.2)


def after(course: list[float], *losses: float) -> list[list[float]]:
    """The course after each of some epochs with these losses on validation rows."""
    found, state = [], torch.tensor(course, dtype=torch.float64)
    for loss in losses:
        state = stepped(state, loss, RULE)
        found.append(state.tolist())
    return found


def test_an_epoch_without_gain_costs_one_of_patience_and_the_last_of_it_cuts_the_rate() -> None:
    courses = after([0.8, 0.5, 3, 0], 0.5, 0.6, 0.5)  # as good as the best is no gain
    assert courses == [[0.8, 0.5, 2, 0], [0.8, 0.5, 1, 0], [0.4, 0.5, 3, 0]]


def test_a_gain_is_the_new_best_and_gives_all_patience_back() -> None:
    assert after([0.8, 0.5, 1, 0], 0.4, 0.45) == [[0.8, 0.4, 3, 0], [0.8, 0.4, 2, 0]]


def test_training_ends_below_the_least_rate_and_not_at_it() -> None:
    courses = after([0.4, 0.5, 1, 0], 0.9, 0.9, 0.9, 0.9, 0.1)
    assert courses[0] == [0.2, 0.5, 3, 0]
    assert courses[3] == [0.1, 0.5, 3, 1]
    assert courses[4] == courses[3]  # what has ended stays as it is
