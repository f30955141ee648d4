"""Errors of regression in messages, scores and records."""

import json
import math
from pathlib import Path

import pytest

from atoll.core.errors import BadMessageError
from atoll.core.federation import Moment, _other_variants, _plausible, _scores_of
from atoll.core.messages import Checked, pack, unpack
from atoll.core.record import Record, Score, read_events

ERRORS = {"mse": 1.5, "mae": 1.0, "variance": 6.0}
NUMBERS = Checked(4, {}, {}, {"": ERRORS})
CLASSES = Checked(4, {"": 3}, {"": 0.5})


def test_errors_are_written_only_where_there_are_some() -> None:
    assert b"errors" not in pack(CLASSES).header
    assert json.loads(pack(NUMBERS).header)["values"]["errors"] == {"": ERRORS}
    for message in (CLASSES, NUMBERS):
        assert unpack(pack(message), Checked, "a") == message


def test_a_score_has_errors_in_regression_alone(tmp_path: Path) -> None:
    moment = Moment(0, 2, 3)
    events = [*_scores_of("a", NUMBERS, 0, moment), *_scores_of("b", CLASSES, 0, moment)]
    assert events[0] == Score(0, 2, "a", 0, "", "test", 4, 0, 0.0, ERRORS)
    record = Record.create(tmp_path / "run", "", {})
    record.add(events)
    record.close()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["errors"] == ERRORS
    assert "errors" not in json.loads(lines[1])
    assert read_events(tmp_path / "run") == events


def test_the_score_of_regression_is_r2() -> None:
    score = Score(0, 0, "a", 0, "", "test", 4, 0, 0.0, ERRORS)
    assert (score.accuracy, score.name) == (0.75, "R2")  # 1 - 1.5 / 6
    assert NUMBERS.accuracy("") == 0.75
    assert CLASSES.accuracy("") == 0.75
    equal = {**ERRORS, "variance": 0.0}
    assert math.isnan(Score(0, 0, "a", 0, "", "test", 4, 0, 0.0, equal).accuracy)
    assert math.isnan(Checked(4, {}, {}, {"": equal}).accuracy(""))


@pytest.mark.parametrize(
    "errors",
    [{**ERRORS, "mse": -1.0}, {"mse": 1.0}, {**ERRORS, "mean": 3.0}],
    ids=["negative", "lacking", "more"],
)
def test_errors_that_cannot_be_are_refused(errors: dict[str, float]) -> None:
    _plausible("a", NUMBERS)
    with pytest.raises(BadMessageError, match="errors of a regression that cannot be"):
        _plausible("a", Checked(4, {}, {}, {"": errors}))


def test_hits_beside_errors_are_refused() -> None:
    with pytest.raises(BadMessageError, match="cannot be"):
        _plausible("a", Checked(4, {"": 3}, {"": 0.5}, {"": ERRORS}))


def test_who_sends_hits_among_errors_is_left_out() -> None:
    replies = {"a": NUMBERS, "b": CLASSES, "c": NUMBERS}
    assert list(_other_variants(replies)) == ["b"]
