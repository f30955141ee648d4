"""The comparison of events notices what it is for."""

import tomllib
from pathlib import Path

import pytest

from .compare import HERE, compare, first_difference
from .record import configs

LINE = '{"event":"round","stage":0,"round":1,"notes":{"loss":0.7399938310895647}}\n'
MESSAGE = '{"event":"message","kind":"Weights","tensors":[["w/bias","float32",[2]]],"bytes":396}\n'
MAP = {"keys": {"cost": "loss"}, "names": {"Model": "Weights", "v/bias": "w/bias"}}


def test_equal_events_have_no_difference() -> None:
    assert first_difference(LINE + MESSAGE, LINE + MESSAGE, {}) is None


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        (LINE, LINE.replace("5647", "5648"), "line 1 notes loss: 0.7399938310895647 is now"),
        (LINE, LINE.replace('"round":1', '"round":1.0'), "line 1 round: 1 is now 1.0"),
        (LINE, LINE.replace('"round":1', '"round":"1"'), "line 1 round: 1 is now 1"),
        (LINE, LINE.replace("0.7399938310895647", "null"), "line 1 notes loss"),
        (LINE, LINE.replace("loss", "cost"), "line 1 notes: key 'loss' is gone"),
        (LINE, LINE.replace("notes", "remarks"), "line 1: key 'notes' is gone"),
        (LINE, LINE.replace('"stage":0', '"stage":0,"more":1'), "line 1: key 'more' is new"),
        (MESSAGE, MESSAGE.replace("Weights", "Model"), "line 1 kind: Weights is now Model"),
        (LINE + MESSAGE, LINE + MESSAGE.replace("[2]", "[3]"), "line 2 tensors[0][2][0]: 2 is"),
        (MESSAGE, MESSAGE.replace("[2]", "[2,1]"), "line 1 tensors[0][2]"),
        (LINE + LINE, LINE, "2 lines are now 1"),
        (LINE, LINE + LINE, "1 lines are now 2"),
    ],
)
def test_a_difference_is_reported_with_its_place(before: str, after: str, place: str) -> None:
    difference = first_difference(before, after, MAP)
    assert difference is not None
    assert difference.startswith(place)


def test_renamed_keys_and_names_are_equal() -> None:
    before = LINE.replace("loss", "cost") + MESSAGE.replace("Weights", "Model")
    before = before.replace("w/bias", "v/bias")
    assert first_difference(before, LINE + MESSAGE, MAP) is None
    assert first_difference(before, LINE + MESSAGE, {}) is not None


def test_a_renamed_key_hides_no_number() -> None:
    before = LINE.replace("loss", "cost").replace("5647", "5648")
    assert first_difference(before, LINE, MAP) == (
        "line 1 notes loss: 0.7399938310895648 is now 0.7399938310895647"
    )


def test_a_run_of_one_checkout_alone_is_a_difference(tmp_path: Path) -> None:
    for side, names in {"before": ("a", "b"), "after": ("b", "c")}.items():
        (tmp_path / side).mkdir()
        for name in names:
            (tmp_path / side / f"{name}.jsonl").write_text(LINE)
    results = compare(tmp_path / "before", tmp_path / "after", {})
    assert results == {"a": "runs only before", "b": None, "c": "runs only after"}


def test_a_case_that_the_checkout_lists_itself_is_not_spelled_out_again() -> None:
    root = HERE.parents[1]
    older = tomllib.loads((HERE / "renamed.toml").read_text())["before"]
    assert configs(root, older).keys() == configs(root, {}).keys()
