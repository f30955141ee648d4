"""The label of own tables: classes or numbers."""

from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.data.own.labels import spread
from atoll.data.own.survey import Survey, survey
from atoll.data.own.tables import load


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, labels: list[str], delimiter: str = ",") -> str:
    lines = [f"{30 + place % 9}{delimiter}{label}" for place, label in enumerate(labels)]
    Path(name).write_text("\n".join([f"age{delimiter}los", *lines]) + "\n")
    return name


def surveyed(labels: list[str], **options: str) -> Survey:
    return survey(files=[write("a.csv", labels)], label="los", **options)


NUMBERS = [f"{place / 4:g}" for place in range(40)]  # 0, 0.25, ... 9.75


def test_more_than_twenty_numbers_are_regressed_and_the_survey_says_so() -> None:
    plan = surveyed(NUMBERS)
    assert plan.options.task == "regression"
    assert plan.classes == ("los",)
    assert plan.findings[0] == (
        "label 'los' has 40 distinct numbers: regression",
        'set task = "classification" to treat values as classes',
    )
    assert str(plan.sites[0].numbers) == "0 to 9.75, mean 4.88, sd 2.89"
    assert "that the label is a number" in plan.crossing


@pytest.mark.parametrize(("distinct", "task"), [(20, "classification"), (21, "regression")])
def test_the_border_is_at_twenty(distinct: int, task: str) -> None:
    assert surveyed([str(place % distinct) for place in range(60)]).options.task == task


def test_a_few_numbers_are_classes_and_the_survey_says_how_to_change_that() -> None:
    plan = surveyed([str(place % 7) for place in range(60)])
    assert plan.options.task == "classification"
    assert plan.findings[0] == (
        "label 'los' has 7 distinct numbers: classification",
        'set task = "regression" to treat them as numbers',
    )
    assert surveyed(["0", "1"] * 20).findings == ()


def test_words_are_classes_however_many() -> None:
    assert surveyed([f"w{place % 25}" for place in range(60)]).options.task == "classification"


def test_the_options_decide_and_nothing_is_said_then() -> None:
    chosen = surveyed([str(place % 3) for place in range(60)], task="regression")
    assert (chosen.options.task, chosen.classes) == ("regression", ("los",))
    assert not any("distinct" in finding.what for finding in chosen.findings)
    classes = surveyed([str(place % 25) for place in range(100)], task="classification")
    assert len(classes.classes) == 25


def test_a_word_among_numbers_to_regress_is_refused() -> None:
    with pytest.raises(UserError, match="the label has the value 'dead'") as error:
        surveyed([*NUMBERS, "dead"], task="regression")
    assert "task = 'classification'" in error.value.remedy


def test_numbers_are_read_as_they_are_written_decimal_commas_too() -> None:
    path = write("a.csv", [text.replace(".", ",") for text in NUMBERS], ";")
    dataset = load(files=[path], label="los")
    assert dataset.regression
    assert dataset.y.dtype == np.float64
    assert dataset.y.tolist() == [float(text) for text in NUMBERS]
    assert dataset.layout is not None
    assert dataset.layout.recipe["task"] == "regression"
    assert dataset.strata.tolist() == [0] * 40


def test_a_spread_is_that_of_the_rows() -> None:
    one = spread({"1": 3, "5": 1}, comma=False)  # 1, 1, 1, 5: mean 2, variance (3 + 9) / 4
    assert (one.low, one.high, one.mean, one.deviation) == (1, 5, 2, 3**0.5)
