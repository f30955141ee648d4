"""What holds of the metrics for every record."""

import math
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.record import Score
from atoll.metrics import scores as metrics

CELLS = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)),
    st.tuples(st.integers(0, 20), st.floats(0, 1)),
    max_size=40,
)
ACCURACIES = ("final_accuracy", "average_accuracy", "macro_f1", "worst_client")
FORGETTINGS = ("forgetting_first_last", "forgetting_best_last", "forgetting_diagonal_last")


@st.composite
def records(draw: st.DrawFn) -> list[Score]:
    cells = draw(CELLS)
    return [
        Score(stage, round, client, task, "", "test", 20, hits, f1)
        for (client, task, stage, round), (hits, f1) in cells.items()
    ]


def same(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(one[name], other[name], rel_tol=1e-9, abs_tol=1e-12)
        or (math.isnan(one[name]) and math.isnan(other[name]))
        for name in one
    )


@settings(deadline=None)
@given(records(), st.randoms(use_true_random=False))
def test_the_order_of_events_does_not_matter(events: list[Score], random: Random) -> None:
    shuffled = list(events)
    random.shuffle(shuffled)
    assert same(metrics.summary(events), metrics.summary(shuffled))


@settings(deadline=None)
@given(records())
def test_the_names_of_clients_do_not_matter(events: list[Score]) -> None:
    renamed = [replace(e, client="dbca"["abcd".index(e.client)]) for e in events]
    assert same(metrics.summary(events), metrics.summary(renamed))


@settings(deadline=None)
@given(records())
def test_a_client_that_is_there_twice_changes_no_mean(events: list[Score]) -> None:
    twice = [*events, *(replace(e, client=f"{e.client}2") for e in events)]
    assert same(metrics.summary(events), metrics.summary(twice))


@settings(deadline=None)
@given(records())
def test_accuracies_lie_between_0_and_1_and_forgetting_between_minus_1_and_1(
    events: list[Score],
) -> None:
    found = metrics.summary(events)
    for name in ACCURACIES:
        assert math.isnan(found[name]) or 0 <= found[name] <= 1 + 1e-12
    for name in FORGETTINGS:
        assert math.isnan(found[name]) or -1 <= found[name] <= 1


@settings(deadline=None)
@given(records())
def test_forgetting_from_the_best_is_never_negative_and_never_below_the_first(
    events: list[Score],
) -> None:
    found = metrics.summary(events)
    best, first = found["forgetting_best_last"], found["forgetting_first_last"]
    assert math.isnan(best) == math.isnan(first)
    assert math.isnan(best) or (best >= 0 and best >= first - 1e-12)


@settings(deadline=None)
@given(records())
def test_forgetting_is_0_when_nothing_changes(events: list[Score]) -> None:
    level = {(e.client, e.task): e.correct for e in events}
    still = [replace(e, correct=level[e.client, e.task]) for e in events]
    found = metrics.summary(still)
    for name in (*FORGETTINGS, "backward_transfer"):
        assert math.isnan(found[name]) or found[name] == 0


@settings(deadline=None)
@given(records())
def test_backward_transfer_is_diagonal_forgetting_with_its_sign_turned(
    events: list[Score],
) -> None:
    found = metrics.summary(events)
    one, other = found["backward_transfer"], found["forgetting_diagonal_last"]
    assert one == -other or (math.isnan(one) and math.isnan(other))


@settings(deadline=None)
@given(records())
def test_every_score_of_a_last_round_stands_in_its_cell_and_all_else_is_nan(
    events: list[Score],
) -> None:
    last: dict[tuple[str, int, int], Score] = {}
    for event in events:
        key = event.client, event.task, event.stage
        if key not in last or last[key].round <= event.round:
            last[key] = event
    result = metrics.primary(events)
    for (client, task, stage), score in last.items():
        cell = (
            result.clients.index(client),
            result.tasks.index(task),
            result.stages.index(stage),
        )
        assert result.accuracy[cell] == score.accuracy
        assert result.macro_f1[cell] == score.macro_f1
    assert np.isnan(result.accuracy).sum() == result.accuracy.size - len(last)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_a_spread_lies_within_its_values(values: list[float]) -> None:
    mean, deviation = metrics.spread(values)
    slack = 1e-9 * (1 + max(abs(value) for value in values))
    assert min(values) - slack <= mean <= max(values) + slack
    assert 0 <= deviation <= max(values) - min(values) + slack
