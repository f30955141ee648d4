"""Verdicts of claims, worked out by hand."""

from dataclasses import replace

import pytest

from atoll.reproduce.claims import Claim, Part, above, judge, mean_of, near

# Three gains of mean 0.1 and deviation 0.01: t = 17.3, two-sided p = 0.00332.
GAINS = (0.09, 0.10, 0.11)
LOSSES = (-0.09, -0.10, -0.11)


def claim(*parts: Part, source: str = "abstract", obstacle: str = "") -> Claim:
    return Claim("a claim", source, parts, obstacle)


def test_series_are_paired_by_unit_not_by_place() -> None:
    part = above("gain", {0: 0.5, 1: 0.7, 2: 0.9}, {2: 0.8, 1: 0.5, 5: 0.0})
    assert part.gains == pytest.approx((0.2, 0.1))  # units 1 and 2
    assert mean_of({0: 0.2, 1: 0.4}, {1: 0.6, 0: 0.0, 2: 1.0}) == pytest.approx({0: 0.1, 1: 0.5})


def test_differences_of_equal_values_are_zero() -> None:
    assert above("gain", {0: 0.1 + 0.2}, {0: 0.3}).gains == (0.0,)


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [(GAINS, "reproduced"), (LOSSES, "refuted"), ((0.3, -0.1, 0.0), "undecided")],
)
def test_an_order_is_decided_by_a_two_sided_test(gains: tuple[float, ...], verdict: str) -> None:
    (judged,) = judge([claim(Part("gain", gains))])
    assert judged.verdict == verdict
    if verdict == "reproduced":
        assert judged.p == pytest.approx(0.003316, abs=1e-5)


def test_two_standard_errors_of_three_runs_decide_nothing() -> None:
    gains = (0.5, 1.0, 1.5)  # mean 1, error 0.289: 3.5 errors, and p = 0.074
    (judged,) = judge([claim(Part("gain", gains))])
    assert judged.verdict == "undecided"
    assert judged.runs == 4  # 3.182 * 0.5 / 2 = 0.796 < 1; three: 4.303 * 0.289 = 1.242
    assert judge([claim(Part("gain", (0.8, 1.0, 1.2)))])[0].verdict == "reproduced"


def test_a_threshold_is_part_of_the_test() -> None:
    (judged,) = judge([claim(Part("gain", GAINS, at=0.15))])
    assert judged.verdict == "refuted"


def test_similar_means_two_one_sided_tests() -> None:
    # the 90 % half-width of these is 2.920 * 0.002 / sqrt(3) = 0.00337
    gains = (-0.002, 0.0, 0.002)
    inside = Part("difference", gains, margin=0.0034)
    assert judge([claim(inside)])[0].verdict == "reproduced"
    assert judge([claim(replace(inside, margin=0.0033))])[0].verdict == "undecided"
    # the 95 % half-width is 0.00497: 0.01 - 0.00497 lies beyond 0.005
    outside = replace(inside, gains=tuple(g + 0.01 for g in gains), margin=0.005)
    assert judge([claim(outside)])[0].verdict == "refuted"
    assert judge([claim(replace(outside, margin=0.0051))])[0].verdict == "undecided"
    assert near("size", {0: 0.1, 1: 0.1}, at=0.1, margin=0.01).p_holds == 0.0


def test_all_parts_must_hold_and_one_contradicted_part_refutes() -> None:
    good, open_, bad = (Part("gain", g) for g in (GAINS, (0.3, -0.1, 0.0), LOSSES))
    assert judge([claim(good, good)])[0].verdict == "reproduced"
    assert judge([claim(good, open_)])[0].verdict == "undecided"
    (judged,) = judge([claim(good, bad)])
    assert judged.verdict == "refuted"
    assert judged.p == pytest.approx(2 * 0.003316, abs=1e-5)  # of two parts one may err


def test_one_run_or_a_missing_part_decides_nothing() -> None:
    for one in (claim(Part("gain", (0.5,))), claim(Part("gain", GAINS), Part("gain", (0.5,))),
                replace(claim(Part("gain", GAINS)), missing="the rest")):  # fmt: skip
        (judged,) = judge([one])
        assert (judged.verdict, judged.p, judged.runs) == ("undecided", 1.0, None)


def test_holm_adjusts_over_the_claims_of_the_paper_that_are_tested() -> None:
    good = claim(Part("gain", GAINS))
    untested = Claim("b", "conclusion", missing="not run")
    assert judge([good, untested])[0].adjusted == pytest.approx(0.003316, abs=1e-5)
    twenty = judge([good] * 20)
    assert {j.verdict for j in twenty} == {"undecided"}  # 20 * 0.0033 = 0.066
    assert {j.verdict for j in judge([good] * 15)} == {"reproduced"}
    beside = judge([good, *[claim(Part("gain", GAINS), source="study")] * 20])
    assert {j.verdict for j in beside} == {"reproduced"}  # studies are not adjusted


def test_a_stand_in_decides_nothing_and_says_what_it_would() -> None:
    (judged,) = judge([claim(Part("gain", GAINS), obstacle="a stand-in")])
    assert (judged.verdict, judged.here) == ("undecidable here", "reproduced")


def test_the_evidence_is_the_mean_with_its_interval() -> None:
    assert Part("gain", GAINS).evidence == "gain +0.1000 (+0.0752 to +0.1248, n = 3)"
    assert Part("gain", (0.5,)).evidence == "gain +0.5000 (one run)"
