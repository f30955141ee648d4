"""Options from plain mappings, and what a mistake is answered with."""

import datetime
import math
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, Literal

import pytest

from atoll.core.errors import UserError
from atoll.core.options import (
    AtLeastOne,
    Fraction,
    NotNegative,
    NotNegativeInt,
    Positive,
    build,
    describe,
    nearest,
)


@dataclass(frozen=True)
class Options:
    """Options of every sort."""

    rate: Positive = 0.1  # size of a local step
    batch: AtLeastOne = 16  # rows in a local step
    keep: NotNegativeInt = 3  # foreign tasks, 0 for none
    share: Fraction = 0.5  # of rows; # is no end of it
    mu: NotNegative = 0.0  # pull towards the anchor
    penalty: Literal["none", "L2", "EWC"] = "none"  # what holds weights back
    widths: tuple[int, ...] = (64, 32)  # of the hidden layers
    names: list[str] = field(default_factory=lambda: ["a"])  # of columns
    wide: bool = False
    free: float = 1.0  # any number


def refused(**values: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        build(Options, values, "run.toml, [method]")
    assert caught.value.where == "run.toml, [method]"
    assert caught.value.exit_code == 2
    return caught.value


def test_what_is_not_given_has_its_default() -> None:
    assert build(Options, {}, "here") == Options()
    assert build(Options, {"batch": 4}, "here") == Options(batch=4)


def test_values_come_out_as_the_types_say() -> None:
    built = build(Options, {"rate": 1, "widths": [8, 4], "names": ["x"]}, "here")
    assert type(built.rate) is float
    assert built.widths == (8, 4)
    assert built.names == ["x"]


def test_options_stay_as_they_were_made() -> None:
    with pytest.raises(FrozenInstanceError):
        build(Options, {}, "here").batch = 3  # type: ignore[misc]


def test_the_values_given_are_not_changed() -> None:
    values = {"widths": [8, 4], "batch": 2}
    build(Options, values, "here")
    assert values == {"widths": [8, 4], "batch": 2}


def test_an_unknown_key_is_answered_with_the_nearest_known_one() -> None:
    error = refused(penalti="none")
    assert error.what == "unknown option 'penalti'"
    assert error.remedy == "did you mean 'penalty'?"


def test_a_key_like_no_other_is_answered_with_all_of_them() -> None:
    remedy = refused(zzz=1).remedy
    assert all(name in remedy for name in ("rate", "batch", "penalty", "widths"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", "16"),
        ("batch", 1.5),
        ("batch", True),
        ("rate", "fast"),
        ("wide", 1),
        ("widths", [1, "2"]),
        ("widths", 3),
        ("names", "abc"),
        ("batch", None),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_option(
    name: str, value: object
) -> None:
    error = refused(**{name: value})
    assert f"option '{name}' cannot be" in error.what
    assert error.remedy


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("rate", 0, "greater than 0"),
        ("rate", -1.0, "greater than 0"),
        ("batch", 0, "greater than or equal to 1"),
        ("keep", -1, "greater than or equal to 0"),
        ("share", 1.01, "less than or equal to 1"),
        ("mu", -0.1, "greater than or equal to 0"),
    ],
)
def test_a_value_out_of_range_is_answered_with_the_limit(
    name: str, value: float, limit: str
) -> None:
    error = refused(**{name: value})
    assert str(value) in error.what
    assert limit in error.remedy


@pytest.mark.parametrize("name", ["rate", "mu", "share"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_out_of_range(name: str, value: float) -> None:
    assert name in refused(**{name: value}).what


def test_the_ends_of_a_range_belong_to_it_where_it_says_so() -> None:
    built = build(Options, {"share": 1, "batch": 1, "keep": 0, "mu": 0}, "here")
    assert (built.share, built.batch, built.keep, built.mu) == (1.0, 1, 0, 0.0)


def test_a_choice_that_is_not_offered_is_answered_with_the_offered_ones_as_written() -> None:
    remedy = refused(penalty="l2").remedy
    assert "'L2'" in remedy
    assert "'EWC'" in remedy


def test_a_value_that_no_option_can_have_is_a_users_error() -> None:
    assert "type" in refused(batch=datetime.date(2024, 1, 1)).what


def test_options_are_described_with_type_default_range_and_remark() -> None:
    shown = {option.name: option for option in describe(Options)}
    assert list(shown) == list(Options.__dataclass_fields__)
    rate = shown["rate"]
    assert (rate.kind, rate.default, rate.range) == ("float", 0.1, "> 0")
    assert rate.remark == "size of a local step"
    assert shown["batch"].range == ">= 1"
    assert shown["keep"].range == ">= 0"
    assert shown["share"].range == ">= 0, <= 1"
    assert shown["free"].range == ""
    assert shown["penalty"].kind == "none | L2 | EWC"
    assert shown["widths"].kind == "list of int"
    assert shown["names"].default == ["a"]


def test_a_remark_is_the_comment_beside_its_own_field() -> None:
    remarks = {option.name: option.remark for option in describe(Options)}
    assert remarks["keep"] == "foreign tasks, 0 for none"
    assert remarks["share"] == "of rows; # is no end of it"
    assert remarks["names"] == "of columns"
    assert remarks["wide"] == ""


def test_a_comment_that_stands_alone_is_nobodys_remark() -> None:
    @dataclass(frozen=True)
    class Sparse:
        one: int = 1
        # what follows is about two
        two: int = 2  # the second

    assert {option.name: option.remark for option in describe(Sparse)} == {
        "one": "",
        "two": "the second",
    }


def test_the_nearest_name_is_offered_only_if_it_is_near() -> None:
    assert nearest("fedvag", ["fedavg", "alone"]) == "did you mean 'fedavg'?"
    assert nearest("xyz", ["fedavg", "alone"]) == "known: alone, fedavg"
    assert nearest("xyz", []) == "known: none"
