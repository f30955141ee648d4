"""Verdicts of cells, worked out by hand."""

from dataclasses import replace

import pytest

from atoll.metrics.verdicts import MARGIN
from atoll.reproduce.claims import Claim, Part
from atoll.reproduce.ledger import Cell, Ledger, as_json, counted
from atoll.reproduce.margins import RULES
from atoll.reproduce.pages import as_markdown, false_verdicts, verdict_of

# Three runs with a deviation of 0.01: the 90 % half-width is 2.920 * 0.01 / sqrt(3) = 0.01686, the
# 95 % half-width 4.303 * 0.01 / sqrt(3) = 0.02484.
CELL = Cell("table", "row", "column", theirs=0.5, their_spread=None, ours=(0.49, 0.50, 0.51))


def moved(by: float) -> Cell:
    return replace(CELL, ours=tuple(value + by for value in CELL.ours))


def test_a_cell_has_the_mean_and_the_population_deviation_of_its_runs() -> None:
    cell = replace(CELL, ours=(0.25, 0.75, 0.75, 0.25))
    assert (cell.mean, cell.spread) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        (0.0, "reproduced"),
        (0.0031, "reproduced"),  # 0.0031 + 0.01686 = 0.01996 lies inside 0.02
        (0.0032, "undecided"),
        (-0.0032, "undecided"),
        (0.0448, "undecided"),  # 0.0448 - 0.02484 = 0.01996 lies inside 0.02
        (0.0449, "refuted"),
        (-0.0449, "refuted"),
    ],
)
def test_the_90_interval_reproduces_and_the_95_interval_refutes(by: float, verdict: str) -> None:
    assert MARGIN == 0.02
    assert moved(by).verdict == verdict


def test_the_printed_deviation_widens_the_margin() -> None:
    assert moved(0.0449).verdict == "refuted"
    cell = replace(moved(0.0449), their_spread=0.05)
    assert cell.margin == pytest.approx(0.07)
    assert cell.verdict == "reproduced"


def test_feature_splits_are_the_units_where_there_are_some() -> None:
    runs = (0.49, 0.50, 0.51) * 5
    assert replace(CELL, ours=runs).verdict == "reproduced"
    split = replace(CELL, ours=runs, splits=(0.4, 0.6))
    assert (split.verdict, len(split.units)) == ("undecided", 2)


def test_stand_ins_and_parts_of_the_data_decide_nothing() -> None:
    for by in (0.0, 0.3):
        cell = replace(moved(by), obstacle="a stand-in")
        assert cell.verdict == "undecidable here"
        assert cell.here == moved(by).verdict
        assert verdict_of(cell).startswith("undecidable here (a stand-in; on these data: ")


def test_what_was_not_measured_is_undecided_and_has_a_budget() -> None:
    cell = replace(CELL, ours=(), seconds=90.0)
    assert verdict_of(cell) == "undecided (not measured; budget: 1.5 GPU minutes)"
    assert replace(cell, seconds=None).reason == "not measured; budget: not known"
    assert verdict_of(replace(CELL, ours=(0.5,))) == (
        "undecided (one run: its deviation is not known)"
    )


def test_what_does_not_count_is_undecided_whatever_it_says() -> None:
    cell = replace(moved(0.3), invalid="measured before a correction")
    assert verdict_of(cell) == "undecided (measured before a correction)"


def test_an_undecided_cell_names_the_runs_that_it_needs() -> None:
    cell = moved(0.01)  # 5 runs: 2.132 * 0.01 / sqrt(5) = 0.00953 < 0.01; 4 runs: 0.01177
    assert cell.runs == 5
    assert verdict_of(cell) == "undecided (needs 5 units)"
    derived = as_json(Ledger("T", cells=(cell,)))["cells"][0]
    assert derived["further_runs"] == 2
    assert derived["interval_90"] == pytest.approx([0.01 - 0.016858, 0.01 + 0.016858], abs=1e-5)


def test_a_cell_without_a_printed_number_has_no_verdict() -> None:
    assert replace(CELL, theirs=None).verdict == "not printed"


def test_the_page_counts_verdicts_and_what_chance_gives() -> None:
    cells = (moved(0.0), moved(0.3), moved(0.01), replace(CELL, obstacle="a stand-in"))
    assert false_verdicts(cells) == pytest.approx(0.15)
    assert counted([cell.verdict for cell in cells]) == {
        "reproduced": 1, "refuted": 1, "undecided": 1, "undecidable here": 1,
    }  # fmt: skip
    page = as_markdown(Ledger("T", cells=cells, rule=RULES["vleto"]))
    assert "4 cells with a printed number: 1 reproduced, 1 refuted, 1 undecided, 1 und" in page
    assert "at most 0.2 of the judged ones have a false verdict" in page
    assert "the paper prints no deviation" in page


def test_claims_stand_on_the_page_with_their_verdicts() -> None:
    holds = Claim("one above two", "abstract", (Part("gain", (0.1, 0.11, 0.12)),))
    fails = replace(holds, text="two above one", parts=(Part("gain", (-0.1, -0.11, -0.12)),))
    lacks = Claim("three", "abstract", missing="not measured: three")
    page = as_markdown(Ledger("T", claims=(holds, fails, lacks)))
    assert "| one above two | abstract | reproduced | 0.0055 | gain +0.1100" in page
    assert "| two above one | abstract | **refuted** | 0.0055 |" in page
    assert "| three | abstract | undecided (not measured) | - | not measured: three |" in page
