"""The statistics of the ledger, worked out by hand."""

from dataclasses import replace

import pytest

from atoll.reproduce.ledger import Cell, paired

CELL = Cell("table", "row", "column", theirs=0.5, their_spread=0.25, ours=(0.5,))


def test_a_cell_has_the_mean_and_the_population_deviation_of_its_runs() -> None:
    cell = replace(CELL, ours=(0.25, 0.75, 0.75, 0.25))
    assert (cell.mean, cell.spread) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (0.75, "inside the paper's spread"),  # the edge belongs to it
        (0.25, "inside the paper's spread"),
        (0.7501, "outside, the order holds"),
        (0.2499, "outside, the order holds"),
    ],
)
def test_the_papers_spread_reaches_both_ways_and_has_its_edges(ours: float, verdict: str) -> None:
    assert replace(CELL, ours=(ours,)).verdict == verdict


def test_beside_a_single_number_of_the_paper_stands_the_difference() -> None:
    cell = replace(CELL, their_spread=None, ours=(0.55, 0.57))
    assert cell.verdict == "+0.0600"
    assert replace(cell, ours=(0.3,), order_holds=False).verdict == "-0.2000"


def test_a_difference_of_two_standard_errors_is_not_told_and_of_more_is() -> None:
    claim = paired("a", [2.0, 4.0], [1.0, 1.0])  # differences 1 and 3: 2 with an error of 1
    assert claim.holds is None
    assert claim.evidence == "+2.0000 ± 1.0000, above in 2 of 2 runs"
    assert paired("a", [2.125, 4.0], [1.0, 1.0]).holds is True
    assert paired("a", [1.0, 1.0], [2.125, 4.0]).holds is False


def test_runs_that_are_equal_are_not_above() -> None:
    assert (
        "above in 2 of 4 runs" in paired("a", [1.0, 2.0, 3.0, 0.0], [1.0, 1.0, 1.0, 1.0]).evidence
    )


def test_one_run_is_open_whatever_it_says() -> None:
    claim = paired("a", [0.3], [0.2])
    assert (claim.open, claim.holds) == (True, None)
    assert claim.evidence == "+0.1000 in the one run that there is"


def test_runs_of_one_split_are_not_independent_so_the_means_of_splits_decide() -> None:
    one = [1.0, 1.0, 3.0, 3.0]
    assert paired("a", one, [0.0] * 4).holds is True
    claim = paired("a", one, [0.0] * 4, [1, 1, 0, 0])
    assert claim.holds is None
    runs = "+2.0000 ± 0.5774, above in 4 of 4 runs"
    assert claim.evidence == f"{runs}; splits +3.0000, +1.0000 (± 1.0000)"
    assert paired("a", one, [0.0] * 4, [5, 5, 5, 5]).evidence == runs


def test_splits_that_agree_do_not_hide_that_runs_do_not() -> None:
    assert paired("a", [0.0, 4.0, 0.0, 4.0], [0.0] * 4, [0, 0, 1, 1]).holds is None
