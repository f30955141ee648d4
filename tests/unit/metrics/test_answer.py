"""Answers from outcomes: two sites worked by hand, shared rows, seeds, and what is withheld."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.metrics import answer as module
from atoll.metrics import quality
from atoll.metrics.answer import ALONE, GUESS, JOINED, LOGISTIC, Outcome, answer
from atoll.metrics.statistics import compare_accuracy, rows_needed, tango
from atoll.metrics.verdicts import in_words

Array = np.ndarray[Any, Any]


def outputs(y: Array, right: Array) -> Array:
    """Logits of two classes whose largest is right or wrong."""
    return np.eye(2)[np.where(right, y, 1 - y)] * 2.0


def site(counts: tuple[int, int, int, int], first_row: int = 0, **more: Array) -> Outcome:
    """Rows on which both models, the joined one, the one alone, or none is right.

    Half of the rows of each kind have class 1, and guessing always says 0.
    """
    joined = np.repeat([True, True, False, False], counts)
    alone = np.repeat([True, False, True, False], counts)
    rows = np.arange(len(joined))
    y = rows % 2
    models = {JOINED: outputs(y, joined), ALONE: outputs(y, alone), GUESS: outputs(y, y == 0)}
    return Outcome(rows + first_row, y, models | more, 4 * len(rows))


def test_two_sites_by_hand() -> None:
    """80 rows, 24 against 4 discordant; and 40 rows, 2 against 2."""
    body = answer({"north": [site((50, 24, 4, 2))], "south": [site((30, 2, 2, 6), 80)]})
    north, south = body["sites"]["north"], body["sites"]["south"]
    assert north["scores"][JOINED] == pytest.approx(74 / 80)
    assert north["scores"][ALONE] == pytest.approx(54 / 80)
    assert north["scores"][GUESS] == pytest.approx(0.5)
    assert north["scores"][LOGISTIC] is None
    assert north["gain"]["gain"] == pytest.approx(20 / 80)
    assert (north["gain"]["low"], north["gain"]["high"]) == pytest.approx(tango(24, 4, 80, 0.975))
    assert tuple(north["unadjusted"].values()) == pytest.approx(tango(24, 4, 80))
    assert north["verdict"] == {"kind": "helps", "text": "helps"}
    assert (north["test_rows"], north["smallest_class"]) == (80, 40)
    assert south["gain"]["gain"] == 0
    assert south["verdict"]["kind"] == "cannot tell"
    assert south["rows_needed"] == rows_needed(0.1, 0.02, level=0.975)
    about = float(f"{south['rows_needed']:.1e}")
    assert south["verdict"]["text"] == f"cannot tell: needs about {about:,.0f} test rows"
    overall = body["overall"]
    assert overall["gain"]["gain"] == pytest.approx(0.125)
    below = [20 / 80 - tango(24, 4, 80)[0], 0 - tango(2, 2, 40)[0]]
    assert overall["gain"]["low"] == pytest.approx(0.125 - math.hypot(*below) / 2)
    assert (overall["sites"], overall["helps"], overall["hurts"]) == (2, 1, 0)
    assert overall["verdict"]["text"] == "helps"
    assert (body["unit"], body["withheld"]) == ("rows", {})


def test_the_words_of_two_sites() -> None:
    body = answer({"north": [site((50, 24, 4, 2))], "south": [site((30, 2, 2, 6), 80)]})
    lines = in_words(body)
    assert lines[0].startswith("Joining helps at 1 of 2 sites; on average +12.5 points (95 % int")
    assert lines[1].startswith("  north: helps; +25.0 points (")
    assert lines[1].endswith(", 80 test rows")
    assert lines[2].startswith("  south: cannot tell: needs about ")
    assert "; 0.0 points (" not in lines[2]
    assert "; +0.0 points (" in lines[2]


@pytest.mark.parametrize(("metric", "name"), [("brier score", "Brier score"), ("log loss",) * 2])
def test_a_loss_has_no_points_in_words(metric: Any, name: str) -> None:
    """As on the page of the report: the smaller loss is the better one."""
    one = site((190, 6, 4, 0))
    body = answer({"a": [one]}, metric, margin=0.1)
    line = in_words(body)[1]
    assert body["sites"]["a"]["gain"]["gain"] > 0
    assert f"; change in {name} -0.0" in line
    assert body["sites"]["a"]["verdict"]["text"] == f"no difference larger than 0.1 in {name}"
    assert "points" not in line


def test_the_words_on_logistic_regression() -> None:
    """It is right on 20 rows fewer at one site, and as the joined model at the other."""
    worse = site((50, 24, 4, 2))
    weak = outputs(worse.y, np.arange(80) < 40)
    same = site((30, 2, 2, 6), 80)
    body = answer({
        "a": [replace(worse, outputs={**worse.outputs, LOGISTIC: weak})],
        "b": [replace(same, outputs={**same.outputs, LOGISTIC: same.outputs[JOINED]})],
    })  # fmt: skip
    assert in_words(body)[-1] == (
        "The joined model is shown to beat logistic regression of the site alone at 1 of 2 sites."
    )
    assert body["sites"]["a"]["remarks"] == []
    assert len(body["sites"]["b"]["remarks"]) == 1


def test_the_words_say_where_logistic_regression_is_better() -> None:
    one = site((50, 4, 24, 2))
    right = np.arange(80) < 78
    body = answer({"a": [replace(one, outputs={**one.outputs, LOGISTIC: outputs(one.y, right)})]})
    assert in_words(body)[-1] == (
        "The joined model is shown to beat logistic regression of the site alone at 0 of 1 site; "
        "logistic regression beats it at 1."
    )
    assert body["sites"]["a"]["remarks"] == [
        "logistic regression at the site beats the joined model"
    ]


def test_the_order_of_sites_does_not_matter() -> None:
    one, other = [site((50, 24, 4, 2))], [site((30, 2, 2, 6), 80)]
    first, second = answer({"a": one, "b": other}), answer({"b": other, "a": one})
    assert first["sites"] == second["sites"]
    assert first["overall"]["gain"] == pytest.approx(second["overall"]["gain"])


def test_a_site_with_nine_rows_is_withheld_and_left_out() -> None:
    body = answer({"big": [site((50, 24, 4, 2))], "small": [site((9, 0, 0, 0), 80)]})
    assert body["withheld"] == {"small": "too few test rows"}
    assert list(body["sites"]) == ["big"]
    alone = answer({"big": [site((50, 24, 4, 2))]})
    assert body["overall"] == alone["overall"]
    assert "small: too few test rows" in in_words(body)[-1]


def test_ten_rows_are_enough() -> None:
    assert list(answer({"a": [site((10, 0, 0, 0))]})["sites"]) == ["a"]


def test_all_sites_may_be_withheld() -> None:
    body = answer({"small": [site((9, 0, 0, 0))]})
    assert body["overall"]["gain"] is None
    assert in_words(body)[0] == (
        "Cannot tell whether joining helps: too few test rows at every site."
    )


def test_equal_outputs_are_no_difference_whatever_the_number_of_rows() -> None:
    body = answer({"a": [site((9, 0, 0, 3))]})
    gain = body["sites"]["a"]["gain"]
    assert [gain[name] for name in ("gain", "low", "high", "p")] == [0, 0, 0, 1]
    assert body["sites"]["a"]["verdict"]["kind"] == "no difference"
    assert body["overall"]["verdict"]["kind"] == "no difference"
    assert in_words(body)[0].startswith("Joining makes no difference: both models")


def test_few_equal_predictions_are_not_yet_no_difference() -> None:
    """The same classes with other probabilities: 12 rows cannot exclude a difference."""
    one = site((9, 0, 0, 3))
    other = Outcome(one.rows, one.y, {**one.outputs, ALONE: one.outputs[ALONE] * 2}, 40)
    assert answer({"a": [other]})["sites"]["a"]["verdict"]["kind"] == "cannot tell"


def test_models_that_do_not_beat_guessing_cannot_help() -> None:
    """24 against 4, but both are right on fewer rows than the majority class."""
    one = site((10, 24, 4, 42))
    assert answer({"a": [one]})["sites"]["a"]["verdict"]["text"] == (
        "cannot tell: neither model is shown to beat guessing"
    )


def test_shared_test_rows_are_one_unit() -> None:
    """Three sites with the same outcomes on the same rows know no more than one of them."""
    same = site((60, 10, 5, 5))
    body = answer({name: [same] for name in "abc"})
    gains = np.repeat([0.0, 1.0, -1.0, 0.0], (60, 10, 5, 5))
    error = gains.std(ddof=1) / math.sqrt(80)
    assert body["overall"]["gain"]["error"] == pytest.approx(error)
    assert body["overall"]["gain"]["units"] == 80
    assert any("share test rows" in note for note in body["notes"])
    apart = answer({name: [site((60, 10, 5, 5), 80 * n)] for n, name in enumerate("abc")})
    assert apart["overall"]["gain"]["error"] == pytest.approx(error / math.sqrt(3), rel=0.01)


def test_a_row_that_two_tasks_test_is_one_unit() -> None:
    one = site((30, 6, 2, 2))
    twice = Outcome(
        np.tile(one.rows, 2), np.tile(one.y, 2),
        {name: np.tile(values, (2, 1)) for name, values in one.outputs.items()}, 100,
    )  # fmt: skip
    gain = answer({"a": [twice]})["sites"]["a"]["gain"]
    gains = np.repeat([0.0, 1.0, -1.0, 0.0], (30, 6, 2, 2))
    assert gain["units"] == 40
    assert gain["error"] == pytest.approx(gains.std(ddof=1) / math.sqrt(40))


def test_seeds_with_the_same_rows_are_crossed_with_them() -> None:
    """Equal seeds know no more than one."""
    body = answer({"a": [site((60, 10, 5, 5))] * 3})
    gains = np.repeat([0.0, 1.0, -1.0, 0.0], (60, 10, 5, 5))
    assert body["unit"] == "rows and seeds"
    assert body["sites"]["a"]["gain"]["error"] == pytest.approx(
        gains.std(ddof=1) / math.sqrt(80), rel=1e-9
    )


def test_seeds_with_other_rows_are_splits() -> None:
    """Nadeau and Bengio: 1/3 + 80/320."""
    seeds = [site((60, 10, 5, 5), 0), site((60, 12, 3, 5), 1), site((60, 5, 10, 5), 2)]
    body = answer({"a": seeds})
    gains = [5 / 80, 9 / 80, -5 / 80]
    error = np.std(gains, ddof=1) * math.sqrt(1 / 3 + 1 / 4)
    assert body["unit"] == "splits"
    assert body["sites"]["a"]["gain"]["error"] == pytest.approx(error)
    assert body["overall"]["gain"]["error"] == pytest.approx(error)


def test_seeds_that_differ_more_than_rows_ask_for_seeds() -> None:
    """Two seeds gain on 8 of 80 rows, another loses on as many."""
    seeds = [site((70, 8, 0, 2)), site((70, 0, 8, 2)), site((70, 8, 0, 2))]
    entry = answer({"a": seeds})["sites"]["a"]
    assert entry["verdict"]["text"] == "cannot tell: needs more seeds or splits, not rows"
    assert entry["rows_needed"] is None


def test_auroc_is_compared_by_its_own_rows() -> None:
    stream = np.random.default_rng(0)
    y = (np.arange(60) % 3 == 0).astype(int)
    models = {}
    for name, strength in ((JOINED, 3.0), (ALONE, 1.0), (GUESS, 0.0)):
        scores = strength * y + stream.normal(size=60) * (strength > 0)
        models[name] = np.stack([-scores, scores], 1)
    one = Outcome(np.arange(60), y, models, 100)
    entry = answer({"a": [one]}, "auroc")["sites"]["a"]
    assert entry["scores"][GUESS] == pytest.approx(0.5)
    assert entry["gain"]["gain"] == pytest.approx(entry["scores"][JOINED] - entry["scores"][ALONE])
    assert entry["scores"][JOINED] == pytest.approx(entry["quality"][JOINED]["auroc"])
    few = Outcome(one.rows[:25], y[:25], {n: v[:25] for n, v in models.items()}, 100)
    assert answer({"a": [few]}, "auroc")["withheld"] == {"a": "too few test rows of a class"}


@pytest.mark.parametrize("metric", ["accuracy", "auroc", "balanced accuracy", "brier score"])
def test_contributions_have_the_metric_as_their_mean(metric: Any) -> None:
    stream = np.random.default_rng(1)
    y = (stream.random(50) < 0.3).astype(int)
    logits = stream.normal(size=(50, 2)) + np.eye(2)[y]
    values = module.contributions(metric, y, logits)
    described = quality.describe(y, quality.softmax(logits))
    sign = -1 if metric == "brier score" else 1
    assert sign * values.mean() == pytest.approx(described[metric], abs=1e-12)


def test_the_threshold_of_a_sensitivity_comes_from_validation_rows() -> None:
    """Ten negative validation rows with margins 0 to 9: at 90 % the threshold is that of 8."""
    one = site((20, 4, 2, 4))
    margins = np.arange(10.0)
    valid = np.stack([np.zeros(10), margins], 1)
    chosen = replace(one, valid_y=np.zeros(10, int), valid={JOINED: valid})
    entry = answer({"a": [chosen]})["sites"]["a"]["quality"]
    assert entry[JOINED]["threshold"] == pytest.approx(1 / (1 + math.exp(-8)))
    assert (entry[JOINED]["sensitivity"], entry[JOINED]["specificity"]) == (0.0, 1.0)
    assert "threshold" not in entry[ALONE]


# ---------------------------------------------------------------- groups


def grouped(one: Outcome, size: int, first: int = 0) -> Outcome:
    """Rows in groups of a size, in their order."""
    return replace(one, groups=first + np.arange(len(one.rows)) // size)


def test_with_groups_the_group_is_the_unit_and_there_is_no_mcnemar() -> None:
    one = grouped(site((50, 24, 4, 2)), 4)
    body = answer({"a": [one]})
    gain = body["sites"]["a"]["gain"]
    right = {model: one.outputs[model].argmax(1) == one.y for model in (JOINED, ALONE)}
    expected = compare_accuracy(right[JOINED], right[ALONE], one.groups)
    assert (gain["low"], gain["high"], gain["p"]) == (expected.low, expected.high, expected.p)
    assert (gain["units"], body["unit"]) == (20, "groups")
    assert body["notes"][0].startswith("rows of a group depend on each other")
    assert "80 test rows of 20 groups" in in_words(body)[1]
    alone = answer({"a": [replace(one, groups=None)]})["sites"]["a"]["gain"]
    assert gain["high"] - gain["low"] > alone["high"] - alone["low"]  # alike rows lie together


def test_groups_of_one_row_are_rows() -> None:
    plain = site((50, 24, 4, 2))
    with_groups = answer({"a": [grouped(plain, 1)]})
    assert with_groups["sites"] == answer({"a": [plain]})["sites"]


def test_nine_groups_are_too_few_whatever_the_number_of_rows() -> None:
    one = site((50, 24, 4, 2))
    assert answer({"a": [grouped(one, 9)]})["withheld"] == {"a": "too few test rows"}
    assert answer({"a": [grouped(one, 8)]})["withheld"] == {}


def test_groups_need_more_rows_by_their_design_effect() -> None:
    """Every group is one row four times: four times as many rows are needed."""
    single = site((30, 6, 6, 10))
    places = np.repeat(np.arange(52), 4)
    models = {name: outputs[places] for name, outputs in single.outputs.items()}
    four = Outcome(np.arange(208), single.y[places], models, 800, groups=places)
    first, second = answer({"a": [single]}), answer({"a": [four]})
    needed = [body["sites"]["a"]["rows_needed"] for body in (first, second)]
    assert needed[1] == pytest.approx(4 * needed[0], rel=0.03)


def test_sites_with_groups_of_their_own_are_combined_and_shared_groups_are_one_unit() -> None:
    counts = [(50, 24, 4, 2), (30, 12, 2, 6)]
    apart = {"a": [grouped(site(counts[0]), 4)], "b": [grouped(site(counts[1], 80), 4, 100)]}
    same = {"a": apart["a"], "b": [grouped(site(counts[1], 80), 4, 0)]}
    separate, shared = answer(apart), answer(same)
    gains = [body["overall"]["gain"]["gain"] for body in (separate, shared)]
    assert gains[0] == pytest.approx(gains[1])
    assert separate["overall"]["gain"]["units"] == 20 + 13
    assert shared["overall"]["gain"]["units"] == 20
    assert "sites share test groups; overall, each group counts once" in shared["notes"]


def test_seeds_with_groups_count_groups_and_seeds() -> None:
    one = grouped(site((50, 24, 4, 2)), 4)
    other = grouped(site((52, 22, 4, 2)), 4)
    body = answer({"a": [one, replace(other, rows=one.rows)]})
    assert (body["unit"], body["sites"]["a"]["gain"]["units"]) == ("groups and seeds", 20)
