"""When the rate is cut and training ends, epoch by epoch."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.jobs.early_stopping import EarlyStoppedJob, Rule, stepped
from atoll.jobs.train import Optimiser, Phase, TrainJob

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


def loss_of(weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    return ((weights["w"] - 1) ** 2).sum()


@pytest.mark.parametrize(("alone", "ours"), [({}, False), ({"alone": True}, True)])
def test_only_alone_do_later_epochs_go_on_in_the_same_memory(
    alone: dict[str, bool], ours: bool
) -> None:
    """The first epoch begins with weights that are somebody else's, in either case."""
    rows = Rows(torch.zeros(2, 1), torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64))
    phase = Phase("loss", ("w",), loss_of, Optimiser("sgd", 0.1))
    work = TrainJob({"w": torch.zeros(1)}, {}, (phase,), rows, 2, 1, Stream(0))
    job = EarlyStoppedJob(
        *(work, (Stream(1), Stream(2)), (3, 4), rows.at(slice(0, 0)), loss_of, ("w",)),
        course=torch.tensor([0.1, math.inf, 3.0, 0.0], dtype=torch.float64),
        rule=RULE,
    )
    parts = job.parts(**alone)
    first = next(parts)
    assert isinstance(first, TrainJob)
    second = parts.send(first.run())
    assert isinstance(second, TrainJob)
    assert (first.ours, second.ours) == (False, ours)
