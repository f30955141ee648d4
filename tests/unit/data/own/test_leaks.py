"""A column is a suspect if it predicts labels of rows that it has not seen."""

import random
from typing import Any

import numpy as np
import pytest

from atoll.data.own.leaks import gives_label_away, strength

Array = np.ndarray[Any, Any]


def labels(rows: int, seed: int = 0) -> list[str]:
    return [random.Random(f"{seed} {row}").choice(["ill", "well"]) for row in range(rows)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("numeric", [True, False])
def test_a_random_column_with_two_values_is_no_suspect(seed: int, numeric: bool) -> None:
    values = [str(random.Random(f"{seed} value {row}").randrange(2)) for row in range(60)]
    assert not gives_label_away(values, labels(60, seed), numeric)


@pytest.mark.parametrize("numeric", [True, False])
def test_a_column_that_is_right_on_97_of_100_rows_is_a_suspect(numeric: bool) -> None:
    truth = labels(200)
    values = ["1" if label == "ill" else "0" for label in truth]
    for row in range(0, 198, 33):  # 6 of 200 are wrong
        values[row] = str(1 - int(values[row]))
    assert gives_label_away(values, truth, numeric)


def test_a_threshold_on_a_number_is_found_and_one_with_noise_is_not() -> None:
    values = [str(row) for row in range(100)]
    assert gives_label_away(values, ["a" if row < 50 else "b" for row in range(100)], True)
    noisy = ["a" if (row < 50) != (row % 5 == 0) else "b" for row in range(100)]  # 80 % right
    assert not gives_label_away(values, noisy, True)


def test_an_identifier_tells_nothing_of_rows_that_it_has_not_seen() -> None:
    assert not gives_label_away([f"x{row}" for row in range(100)], labels(100), False)


def test_a_decimal_comma_is_a_number() -> None:
    values = [f"{row},5" for row in range(40)]
    assert gives_label_away(values, ["a" if row < 20 else "b" for row in range(40)], True)


def test_few_rows_and_rare_classes_are_not_judged() -> None:
    assert not gives_label_away(["0", "1"] * 9, ["a", "b"] * 9, True)
    assert not gives_label_away(["0"] * 38 + ["1"] * 2, ["a"] * 38 + ["b"] * 2, True)


@pytest.mark.parametrize("names", [("True", "False"), ("true", "false")])
def test_truth_values_are_numbers(names: tuple[str, str]) -> None:
    truth = labels(60)
    values = [names[label == "ill"] for label in truth]
    assert gives_label_away(values, truth, True)
    assert not gives_label_away([names[row % 2] for row in range(60)], truth, True)


def test_very_large_and_odd_numbers_are_taken_as_they_are() -> None:
    values = ["1e308", "-1e308", "+3", "0"] * 15
    assert not gives_label_away(values, labels(60), True)


def alarms(columns: Array, truth: Array, numeric: bool) -> int:
    names = truth.astype(str).tolist()
    return sum(gives_label_away(column.astype(str).tolist(), names, numeric) for column in columns)


def test_random_columns_raise_at_most_one_alarm_in_a_hundred() -> None:
    """10,000 columns: two values, five levels, whole and real numbers; two or four classes."""
    draws, total = np.random.default_rng(1), 0
    for count in (20, 40, 60, 200):
        for classes in (2, 4):
            truth = draws.integers(0, classes, count)
            total += alarms(draws.integers(0, 2, (500, count)), truth, True)
            total += alarms(draws.integers(0, 5, (250, count)), truth, False)
            total += alarms(draws.integers(0, 100, (250, count)), truth, True)
            total += alarms(draws.normal(size=(250, count)).round(3), truth, True)
    assert total <= 100


@pytest.mark.parametrize("numeric", [True, False])
def test_columns_right_in_97_of_100_cases_are_found(numeric: bool) -> None:
    draws = np.random.default_rng(2)
    truth = np.arange(200) % 2
    columns = np.tile(truth, (400, 1))
    for column in columns:
        wrong = draws.choice(200, 6, replace=False)
        column[wrong] = 1 - column[wrong]
    assert alarms(columns, truth, numeric) >= 0.95 * len(columns)


def test_a_number_that_is_right_in_97_of_100_cases_is_found() -> None:
    draws = np.random.default_rng(3)
    truth = np.arange(200) % 2
    columns = []
    for _ in range(200):
        side = truth.copy()
        wrong = draws.choice(200, 6, replace=False)
        side[wrong] = 1 - side[wrong]
        columns.append((10 * side + draws.uniform(0, 9, 200)).round(3))
    assert alarms(np.array(columns), truth, True) >= 0.95 * len(columns)


@pytest.mark.parametrize("numeric", [True, False])
def test_a_constant_column_is_no_suspect_where_97_of_100_rows_have_one_class(numeric: bool) -> None:
    truth = ["well"] * 970 + ["ill"] * 30
    assert strength(["1"] * 1000, truth, numeric) <= 0.5
    assert not gives_label_away(["1"] * 1000, truth, numeric)


@pytest.mark.parametrize("rows", [40, 200, 2000])
def test_an_honest_predictor_of_auroc_85_is_no_suspect(rows: int) -> None:
    draws = np.random.default_rng(4)
    truth = np.arange(rows) % 2
    apart = 1.4657  # of two normal distributions: their AUROC is 0.85
    columns = draws.normal(size=(300, rows)).round(4) + apart * truth
    assert alarms(columns, truth, True) == 0


def test_strength_is_the_estimate_less_one_standard_error() -> None:
    truth = ["a", "b"] * 50
    bound = strength(truth, truth, False)  # all right: 51 of 52, once smoothed, in each class
    error = np.sqrt(2 * (51 / 52) * (1 / 52) / 52) / 2
    assert bound == pytest.approx(1 - error)
