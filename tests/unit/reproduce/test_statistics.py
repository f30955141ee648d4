"""The means and errors of the papers' tables, worked out by hand."""

from typing import Any

import numpy as np
import pytest

from atoll.core.record import Score
from atoll.reproduce import (
    chfl_claims,
    fccl,
    fccl_scores,
    fedseit_claims,
    figures,
    vleto_claims,
)
from atoll.reproduce.vleto_tables import STAGES


def test_the_means_of_splits_are_over_the_runs_of_each_in_the_order_of_their_numbers() -> None:
    runs = [(7, 0.5), (2, 0.1), (7, 0.7), (2, 0.3), (2, 0.5)]
    found: Any = {"runs": [{"feature_seed": s, "accuracy": {"own": a}} for s, a in runs]}
    assert chfl_claims.series(found, "own") == pytest.approx({2: 0.3, 7: 0.6})
    assert list(chfl_claims.series(found, "own")) == [2, 7]


def test_own_domains_are_on_the_diagonal_and_others_are_averaged_without_it() -> None:
    matrix = [[0.9, 0.1, 0.3], [0.2, 0.6, 0.6], [0.5, 0.1, 0.3]]
    assert fccl_scores.by_domain(matrix, "intra") == pytest.approx([0.9, 0.6, 0.3])
    assert fccl_scores.by_domain(matrix, "inter") == pytest.approx([0.2, 0.4, 0.3])
    assert fccl_scores.by_domain(matrix[:2], "inter") == pytest.approx([0.2, 0.4])
    assert fccl_scores.means_of(matrix) == pytest.approx({"intra": 0.6, "inter": 0.3})


def test_a_domain_can_be_left_out_as_client_and_as_test_domain() -> None:
    matrix = [[0.9, 0.1, 0.3], [0.2, 0.6, 0.6], [0.5, 0.1, 0.3]]
    assert fccl_scores.by_domain(matrix, "inter", 2) == pytest.approx([0.1, 0.2])
    assert fccl_scores.by_domain(matrix, "intra", 2) == pytest.approx([0.9, 0.6])


def test_a_matrix_has_the_scores_of_one_variant_after_one_round() -> None:
    def score(client: str, task: int, number: int, variant: str, correct: int) -> Score:
        return Score(0, number, client, task, variant, "test", 10, correct, 0.0)

    wanted = {("b", 0): 1, ("b", 1): 2, ("a", 0): 3, ("a", 1): 4}
    scores = [score(client, task, 3, "own", n) for (client, task), n in wanted.items()]
    scores += [score("a", 0, 2, "own", 9), score("b", 1, 3, "solo", 9)]
    assert fccl._matrix(scores, "own", 3) == [[0.3, 0.4], [0.1, 0.2]]


def test_relative_gains_are_of_the_seeds_that_both_have() -> None:
    one: Any = {"runs": [{"seed": 1, "accuracy": 0.9}, {"seed": 2, "accuracy": 0.6}]}
    other: Any = {"runs": [{"seed": 2, "accuracy": 0.5}, {"seed": 3, "accuracy": 0.1}]}
    assert fedseit_claims.relative(one, other) == pytest.approx({2: 0.2})


def test_forgetting_is_the_mean_fall_of_earlier_tasks_by_seed() -> None:
    tasks = {"1|1": 0.9, "2|2": 0.8, "3|3": 0.7, "1|4": 0.3, "2|4": 0.5, "3|4": 0.6, "4|4": 1.0}
    found: Any = {"runs": [{"seed": 5, "union": {}, "tasks": tasks}]}
    assert vleto_claims.forgetting(found) == pytest.approx({5: (0.6 + 0.3 + 0.1) / 3})


def test_the_error_of_a_paired_difference_is_its_deviation_by_the_root_of_the_runs() -> None:
    assert figures._error(np.array([1.0, 3.0])) == pytest.approx(1.0)  # 1.414 / 1.414
    assert figures._error(np.array([1.0, 2.0, 3.0, 6.0])) == pytest.approx(np.sqrt(14 / 3) / 2)
    assert figures._error(np.array([5.0])) == 0.0


def run(**tasks: float) -> dict[str, Any]:
    named = {place.replace("_", "|").removeprefix("t"): value for place, value in tasks.items()}
    return {"union": {}, "tasks": named}


def test_an_accuracy_after_a_stage_is_that_of_a_task_or_of_all_classes_so_far() -> None:
    full = {"union": {"2": 0.7}, "tasks": {"1|1": 0.9, "1|2": 0.4, "2|2": 0.8}}
    found: Any = {"runs": [full, {**full, "union": {"2": 0.5}}]}
    assert vleto_claims.after(found, None, 2) == [0.7, 0.5]
    assert vleto_claims.after(found, 1, 2) == [0.4, 0.4]
    assert vleto_claims.after(found, None, 1) == [0.9, 0.9]  # no union: the stage's own task


def test_without_a_union_the_stages_own_task_comes_before_the_first_and_the_only_one() -> None:
    own, first, only = run(t2_2=0.8, t1_2=0.4, t1_1=0.9), run(t1_2=0.4, t1_1=0.9), run(t1_1=0.9)
    found: Any = {"runs": [own, first, only]}
    assert vleto_claims.after(found, None, 2) == [0.8, 0.4, 0.9]


def test_averages_are_over_seeds_by_stage_or_over_stages_by_seed() -> None:
    one = {"union": {str(stage): 0.1 * stage for stage in range(1, STAGES + 1)}, "tasks": {}}
    other = {"union": {str(stage): 0.3 for stage in range(1, STAGES + 1)}, "tasks": {}}
    found: Any = {"runs": [one, other]}
    assert STAGES == 4
    assert vleto_claims.by_stage(found) == pytest.approx([0.2, 0.25, 0.3, 0.35])
    assert vleto_claims.average(found) == pytest.approx([0.25, 0.3])
