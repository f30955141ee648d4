"""What a site releases of its comparison, and the answer that is assembled from releases."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from atoll.metrics.answer import ALONE, GUESS, JOINED, LOGISTIC, MODELS, Outcome, answer
from atoll.metrics.release import Release, assemble, fault, release
from atoll.metrics.statistics import Comparison, combine_dependent

Array = np.ndarray[Any, Any]
MARGIN = 0.02


def outputs(y: Array, right: Array) -> Array:
    """Logits of two classes whose largest is right or wrong, different in every row."""
    return np.eye(2)[np.where(right, y, 1 - y)] * (2 + np.arange(len(y)) / 97)[:, None]


def outcome(counts: tuple[int, int, int, int], first_row: int = 0) -> Outcome:
    """Rows on which both models, the joined one, the one alone, or none is right."""
    joined = np.repeat([True, True, False, False], counts)
    alone = np.repeat([True, False, True, False], counts)
    rows = np.arange(len(joined))
    y = rows % 2
    models = {JOINED: outputs(y, joined), ALONE: outputs(y, alone), GUESS: outputs(y, y == 0)}
    models[LOGISTIC] = outputs(y, joined | (rows % 7 == 0))
    return Outcome(rows + first_row, y, models, 4 * len(rows))


SITES = {
    "north": outcome((53, 26, 4, 4)),
    "south": outcome((30, 2, 2, 9), 87),
    "west": outcome((40, 9, 0, 6), 130),
}
ROWS = {"north": (87, 80, 40), "south": (43, 40, 20), "west": (55, 50, 20)}  # exact, tens, class


def assembled(metric: Any = "accuracy", **changes: Outcome) -> dict[str, Any]:
    sites = SITES | changes
    releases = {id: release(one, metric, MARGIN, len(sites)) for id, one in sites.items()}
    assert [fault(one) for one in releases.values()] == [""] * len(releases)
    return assemble(releases, {}, metric, MARGIN)


def without_counts(value: Any) -> Any:
    """An answer without the numbers of rows, which are rounded, and what is never released."""
    dropped = ("units", "test_rows", "smallest_class", "rows_needed", "quality", "notes", "text")
    if isinstance(value, dict):
        return {key: without_counts(item) for key, item in value.items() if key not in dropped}
    return value


@pytest.mark.parametrize(
    "metric", ["accuracy", "auroc", "auprc", "balanced accuracy", "brier score", "log loss"]
)
def test_the_assembled_answer_is_the_one_computed_in_one_place(metric: Any) -> None:
    here = answer({id: [one] for id, one in SITES.items()}, metric, MARGIN)
    there = assembled(metric)
    means = [body["overall"]["gain"].pop("p") for body in (here, there)]
    assert means[1] == pytest.approx(means[0], rel=0.2, abs=1e-6)  # freedom from rounded counts
    for name in ("joined_over_guessing", "alone_over_guessing"):
        for body in (here, there):
            body["overall"][name].pop("p")
    assert without_counts(there) == without_counts(here)
    assert list(there["sites"]) == list(here["sites"])
    assert there["sites"].keys() == SITES.keys()
    for entry, full in zip(there["sites"].values(), here["sites"].values(), strict=True):
        assert entry.keys() == full.keys() - {"quality"}


def test_row_counts_are_tens_everywhere_and_words_have_no_others() -> None:
    body = assembled()
    for id, (exact, tens, smallest) in ROWS.items():
        entry = body["sites"][id]
        assert (entry["test_rows"], entry["smallest_class"]) == (tens, smallest)
        for name in ("gain", "joined_over_guessing", "alone_over_guessing"):
            assert entry[name]["units"] == tens
        assert f"{exact}" not in entry["verdict"]["text"]
    assert body["overall"]["gain"]["units"] == 170
    many = release(outcome((3000, 20, 20, 7)), "accuracy", MARGIN, 1)
    text = assemble({"a": many}, {}, "accuracy", 0.0005)["sites"]["a"]["verdict"]["text"]
    assert text == "cannot tell: needs more than these 3,040 test rows"


def test_no_count_of_discordant_rows_and_no_quality_is_a_field() -> None:
    """26 and 4 rows are discordant at north."""
    one = asdict(release(SITES["north"], "accuracy", MARGIN, 3))
    assert set(one["scores"]) == {JOINED, ALONE, GUESS, LOGISTIC}
    whole = [value for value in json.loads(json.dumps(one)).values() if type(value) is int]
    assert whole == [80, 40, one["needed"], one["needed_plain"], 0]
    assert not {26, 4, 30, 53, 87} & set(whole)
    assert float(f"{one['needed']:.1e}") == one["needed"]
    assert float(f"{one['needed_plain']:.1e}") == one["needed_plain"]
    assert len(json.dumps(one)) < 3000


@pytest.mark.parametrize(
    ("counts", "metric", "reason"),
    [
        ((5, 2, 1, 1), "accuracy", "too few test rows"),
        ((5, 2, 1, 1), "brier score", "too few test rows"),
        ((5, 2, 1, 4), "auroc", "too few test rows of a class"),
        ((10, 5, 2, 2), "balanced accuracy", "too few test rows of a class"),
        ((5, 2, 1, 2), "accuracy", ""),
        ((12, 5, 2, 1), "auroc", ""),
    ],
)
def test_release_is_all_or_nothing(
    counts: tuple[int, int, int, int], metric: Any, reason: str
) -> None:
    one = release(outcome(counts), metric, MARGIN, 3)
    assert one.reason == reason
    if reason:
        assert one == Release(one.reason)
        assert not any([one.test_rows, one.scores, one.comparisons, one.needed, one.identical])
    else:
        assert one.test_rows >= 10


def test_a_site_with_too_few_rows_is_left_out_of_overall() -> None:
    few = outcome((5, 2, 1, 1), 87)
    body = assembled(south=few)
    assert body["withheld"] == {"south": "too few test rows"}
    assert list(body["sites"]) == ["north", "west"]
    gains = [body["sites"][id]["gain"]["gain"] for id in ("north", "west")]
    assert body["overall"]["gain"]["gain"] == pytest.approx(np.mean(gains))
    assert body["overall"]["sites"] == 2
    assert body["sites"]["north"]["gain"] == assembled()["sites"]["north"]["gain"]


def test_nobody_releases_anything() -> None:
    body = assemble({"a": Release("too few test rows")}, {"b": "it was away"}, "accuracy", MARGIN)
    assert body["overall"]["gain"] is None
    assert body["withheld"] == {"a": "too few test rows", "b": "it was away"}


def test_equal_outputs_are_no_difference() -> None:
    one = SITES["north"]
    same = replace(one, outputs=dict(one.outputs) | {ALONE: one.outputs[JOINED]})
    body = assemble({"a": release(same, "accuracy", MARGIN, 1)}, {}, "accuracy", MARGIN)
    words = "no difference: both models give the same outputs"
    assert body["sites"]["a"]["verdict"]["text"] == words
    assert body["overall"]["verdict"]["text"] == words
    assert body["overall"]["gain"]["gain"] == 0


def test_shared_rows_have_the_wider_interval() -> None:
    releases = {id: release(one, "accuracy", MARGIN, 3) for id, one in SITES.items()}
    apart = assemble(releases, {}, "accuracy", MARGIN)["overall"]["gain"]
    shared = assemble(releases, {}, "accuracy", MARGIN, shared_rows=True)["overall"]["gain"]
    assert shared["gain"] == pytest.approx(apart["gain"])
    assert shared["low"] < apart["low"] < apart["high"] < shared["high"]
    lows = [one.comparisons["gain"]["plain_low"] for one in releases.values()]
    assert shared["low"] == pytest.approx(np.mean(lows))


def test_dependent_comparisons_by_hand() -> None:
    one = combine_dependent([Comparison(0.1, 0.02, 0.06, 0.15, 0.0, 30, 5.0),
                             Comparison(0.3, 0.04, 0.2, 0.35, 0.0, 20)])  # fmt: skip
    assert (one.gain, one.error) == pytest.approx((0.2, 0.03))
    assert (one.low, one.high) == pytest.approx((0.13, 0.25))
    assert (one.units, one.freedom) == (30, 5.0)


GOOD = release(SITES["north"], "accuracy", MARGIN, 3)
GAIN = GOOD.comparisons["gain"]


@pytest.mark.parametrize(
    "changes",
    [
        {"test_rows": 87}, {"test_rows": 0}, {"smallest_class": -10}, {"needed": -1},
        {"scores": {"a stranger": 0.5}}, {"comparisons": {}},
        {"comparisons": GOOD.comparisons | {"other": GAIN}},
        {"comparisons": GOOD.comparisons | {"gain": GAIN | {"low": 2.0}}},
        {"comparisons": GOOD.comparisons | {"gain": GAIN | {"p": 1.5}}},
        {"comparisons": GOOD.comparisons | {"gain": GAIN | {"error": float("nan")}}},
        {"comparisons": GOOD.comparisons | {"gain": {"gain": 0.1}}},
        {"reason": "too few test rows"},
    ],
    ids=str,
)  # fmt: skip
def test_a_release_that_cannot_be_is_told_apart(changes: dict[str, Any]) -> None:
    assert fault(GOOD) == ""
    assert fault(replace(GOOD, **changes)) != ""


def test_models_without_scores_are_none_and_named_in_a_note() -> None:
    body = assembled()
    assert body["sites"]["north"]["scores"][MODELS[-1]] is None
    assert f"no {MODELS[-1]}" in body["notes"]


def test_groups_are_rounded_and_decide_the_unit() -> None:
    one = outcome((50, 24, 4, 2))
    grouped = replace(one, groups=np.arange(len(one.rows)) // 3)  # 27 groups
    leaves = release(grouped, "accuracy", 0.02, 1)
    assert (leaves.groups, fault(leaves)) == (20, "")
    body = assemble({"a": leaves}, {}, "accuracy", 0.02)
    assert body["unit"] == "groups"
    assert body["sites"]["a"]["gain"]["units"] == 20
    here = answer({"a": [grouped]})
    assert body["sites"]["a"]["gain"]["low"] == here["sites"]["a"]["gain"]["low"]
    assert fault(replace(leaves, groups=27))
    assert fault(replace(leaves, groups=leaves.test_rows + 10))
