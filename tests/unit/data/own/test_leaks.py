"""A column is a suspect if it predicts labels of rows that it has not seen."""

import random

import pytest

from atoll.data.own.leaks import gives_label_away


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
