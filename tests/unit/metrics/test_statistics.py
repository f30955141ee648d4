"""Paired comparisons: published and hand-worked values, coverage and power by simulation."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from atoll.metrics.statistics import (
    Comparison,
    combine,
    compare_accuracy,
    compare_auroc,
    compare_losses,
    compare_over_seeds,
    compare_over_splits,
    compare_units,
    holm,
    mid_p,
    placements,
    rows_for_error,
    rows_needed,
    tango,
    with_least_width,
)
from atoll.metrics.verdicts import judge, shared_level

Array = np.ndarray[Any, Any]


def rows_of(both: int, first: int, second: int, neither: int) -> tuple[Array, Array]:
    """Two models by the number of rows on which both, one or none is right."""
    ones = np.repeat([True, True, False, False], [both, first, second, neither])
    others = np.repeat([True, False, True, False], [both, first, second, neither])
    return ones, others


def test_tango_without_discordant_rows_by_hand() -> None:
    """The limit d solves n d^2 = z^2 d (1 - d), so d = z^2 / (n + z^2)."""
    limit = stats.norm.ppf(0.975) ** 2 / (44 + stats.norm.ppf(0.975) ** 2)
    assert tango(0, 0, 44) == pytest.approx((-limit, limit), abs=1e-9)


def test_tango_excludes_zero_exactly_where_the_score_test_rejects() -> None:
    z = float(stats.norm.ppf(0.975))
    for only_first in range(30):
        for only_second in range(0, 30, 3):
            low, high = tango(only_first, only_second, 100)
            total = only_first + only_second
            rejected = total > 0 and abs(only_first - only_second) / math.sqrt(total) > z
            assert (low > 0 or high < 0) == rejected
            assert low <= (only_first - only_second) / 100 <= high


def test_tango_turns_with_the_order_of_the_models() -> None:
    low, high = tango(7, 2, 50)
    assert tango(2, 7, 50) == pytest.approx((-high, -low), abs=1e-9)


def test_tango_is_whole_where_every_row_is_discordant() -> None:
    assert tango(10, 0, 10)[1] == 1.0
    assert tango(0, 10, 10)[0] == -1.0


def test_mid_p_of_mcnemar_by_hand() -> None:
    """3 against 0: 2 * (0.5^3 - 0.5 * 0.5^3) = 0.125; no discordant row says nothing."""
    assert mid_p(3, 0) == pytest.approx(0.125)
    assert mid_p(0, 3) == pytest.approx(0.125)
    assert mid_p(0, 0) == 1.0
    assert mid_p(2, 2) == pytest.approx(1.0)


def test_accuracy_counts_only_discordant_rows() -> None:
    few = compare_accuracy(*rows_of(40, 6, 1, 3))
    assert few.gain == pytest.approx(0.1)
    assert few.error == pytest.approx(math.sqrt((7 / 50 - 0.01) / 50))
    assert few.units == 50
    assert few == compare_accuracy(*rows_of(3, 6, 1, 40))


def test_a_group_is_one_unit() -> None:
    """Five copies of every row as a group: the same interval as one row each, by t."""
    first, second = rows_of(10, 6, 2, 4)
    one = compare_accuracy(first, second, groups=np.arange(22))
    many = compare_accuracy(
        np.repeat(first, 5), np.repeat(second, 5), groups=np.repeat(np.arange(22), 5)
    )
    assert (many.gain, many.error, many.low) == pytest.approx((one.gain, one.error, one.low))
    assert many.units == 22
    plain = compare_losses(1.0 - first, 1.0 - second)
    assert one.error == pytest.approx(plain.error)


def test_losses_follow_the_paired_t_test() -> None:
    first, second = np.array([0.1, 0.4, 0.2, 0.9]), np.array([0.3, 0.5, 0.1, 1.2])
    found = compare_losses(first, second)
    expected = stats.ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx(
        (expected.pvalue, interval.low, interval.high)
    )
    assert found.gain == pytest.approx(0.125)


def test_auroc_gain_equals_scikit_learn() -> None:
    stream = np.random.default_rng(3)
    labels = stream.random(60) < 0.3
    first, second = stream.normal(labels, 1.0), stream.normal(0.5 * labels, 1.0).round(1)
    found = compare_auroc(labels, first, second)
    expected = roc_auc_score(labels, first) - roc_auc_score(labels, second)
    assert found.gain == pytest.approx(expected, abs=1e-12)
    alike = compare_auroc(labels, first, 2 * first)
    assert (alike.gain, alike.error, alike.p) == (0.0, 0.0, 1.0)


def test_auroc_error_of_delong_by_hand() -> None:
    """Positives 3, 1 and negatives 2, 0: placements 1, 1/2 and 1/2, 1 against a constant score."""
    labels = np.array([True, True, False, False])
    found = compare_auroc(labels, np.array([3.0, 1.0, 2.0, 0.0]), np.zeros(4))
    assert found.gain == pytest.approx(0.25)
    assert found.error == pytest.approx(math.sqrt(0.125 / 2 + 0.125 / 2))


def test_seeds_and_rows_both_vary() -> None:
    """Equal seeds give the interval of rows; equal rows that of seeds."""
    row_gains = np.array([1.0, 0, 0, -1, 1, 0, 0, 0, 1, 0])
    alike = compare_over_seeds(np.tile(row_gains, (5, 1)))
    assert alike.error == pytest.approx(row_gains.std(ddof=1) / math.sqrt(10))
    seed_gains = np.array([0.1, 0.2, 0.0, 0.3, 0.1])
    constant = compare_over_seeds(np.tile(seed_gains[:, None], (1, 10)))
    assert constant.error == pytest.approx(seed_gains.std(ddof=1) / math.sqrt(5))
    assert constant.freedom == pytest.approx(4)


def test_redrawn_splits_are_corrected() -> None:
    """Nadeau and Bengio: 1/5 + 20/80 in place of 1/5."""
    values = [0.01, 0.03, 0.02, 0.00, 0.04]
    found = compare_over_splits(values, train_rows=80, test_rows=20)
    assert found.error == pytest.approx(np.std(values, ddof=1) * math.sqrt(0.45))
    assert found.freedom == 4


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_no_signal_seldom_gets_a_verdict() -> None:
    """Four sites without any signal: any verdict of helps or hurts in at most 8 %."""
    stream = np.random.default_rng(1)
    level, any_verdict = shared_level(4), 0
    for _ in range(300):
        kinds = set()
        for _ in range(4):
            labels, first, second = stream.random((3, 80)) < 0.4
            guess = np.zeros(80, bool) == labels
            comparisons = (
                compare_accuracy(first == labels, second == labels, level=level),
                compare_accuracy(first == labels, guess, level=level),
                compare_accuracy(second == labels, guess, level=level),
            )
            kinds.add(judge(*comparisons).kind)
        any_verdict += bool(kinds & {"helps", "hurts"})
    assert any_verdict <= 24


def test_the_mean_of_sites_by_hand() -> None:
    """Limits are combined by the root of the sum of squares, each side for itself."""
    one = Comparison(0.1, 0.02, 0.07, 0.14, 0.01, 50)
    other = Comparison(0.0, 0.04, -0.04, 0.03, 0.9, 20, freedom=5)
    mean = combine([one, other])
    assert mean.gain == pytest.approx(0.05)
    assert mean.low == pytest.approx(0.05 - 0.05 / 2)
    assert mean.high == pytest.approx(0.05 + 0.05 / 2)
    assert mean.error == pytest.approx(math.hypot(0.02, 0.04) / 2)
    satterthwaite = (0.01**2 + 0.02**2) ** 2 / (0.01**4 / 49 + 0.02**4 / 5)
    assert mean.freedom == pytest.approx(satterthwaite)
    assert mean.units == 70


def test_sites_without_any_discordant_row_still_have_an_interval() -> None:
    mean = combine([compare_accuracy(*rows_of(20, 0, 0, 20))] * 4)
    single = tango(0, 0, 40)[1]
    assert (mean.gain, mean.error, mean.p) == (0, 0, 1)
    assert mean.high == pytest.approx(single / 2)


def test_an_interval_is_never_narrower_than_without_discordant_rows() -> None:
    certain = Comparison(0.0, 0.0, 0.0, 0.0, 1.0, 40)
    widened = with_least_width(certain, 40)
    assert (widened.low, widened.high) == pytest.approx(tango(0, 0, 40), abs=1e-9)
    wide = Comparison(0.0, 0.1, -0.2, 0.2, 1.0, 40)
    assert with_least_width(wide, 40) == wide


def test_units_follow_the_t_test() -> None:
    values = np.array([0.1, -0.2, 0.3, 0.0, 0.2])
    expected = stats.ttest_1samp(values, 0)
    limits = expected.confidence_interval(0.95)
    result = compare_units(values)
    assert (result.p, result.low, result.high) == pytest.approx(
        (expected.pvalue, limits.low, limits.high)
    )


def test_rows_needed_where_all_discordant_rows_agree_by_hand() -> None:
    """The score test rejects from 4 of 4 rows on: the least N with P(Bin(N, 0.02) >= 4) = 0.8."""
    rows = rows_needed(0.0, 0.02)
    assert stats.binom.sf(3, rows, 0.02) >= 0.8 > stats.binom.sf(3, rows - 1, 0.02)


def test_rows_for_an_error_by_hand() -> None:
    quantiles = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert rows_for_error(0.3, 0.02) == math.ceil((quantiles * 15) ** 2)


def interval(low: float, high: float) -> Comparison:
    return Comparison((low + high) / 2, 0.01, low, high, 0.5, 100)


@pytest.mark.parametrize(
    ("gain", "joined", "alone", "text"),
    [
        ((0.01, 0.05), (0.1, 0.2), (0.1, 0.2), "helps"),
        ((0.001, 0.015), (0.1, 0.2), (0.1, 0.2), "helps, by less than 2 points"),
        (
            (0.01, 0.05),
            (-0.1, 0.2),
            (0.1, 0.2),
            "cannot tell: the joined model is not shown to beat",
        ),
        (
            (0.01, 0.05),
            (-0.1, 0.2),
            (-0.1, 0.2),
            "cannot tell: neither model is shown to beat guessing",
        ),
        ((-0.05, -0.01), (-0.1, 0.2), (0.1, 0.2), "hurts"),
        ((-0.01, -0.001), (0.1, 0.2), (0.1, 0.2), "hurts, by less than 2 points"),
        ((-0.01, 0.01), (0.1, 0.2), (0.1, 0.2), "no difference larger than 2 points"),
        ((-0.01, 0.03), (0.1, 0.2), (0.1, 0.2), "cannot tell: needs more test rows"),
        ((0.0, 0.05), (0.1, 0.2), (0.1, 0.2), "cannot tell: needs more test rows"),
    ],
)
def test_verdicts(
    gain: tuple[float, float],
    joined: tuple[float, float],
    alone: tuple[float, float],
    text: str,
) -> None:
    verdict = judge(interval(*gain), interval(*joined), interval(*alone))
    assert verdict.text.startswith(text)
    assert text.startswith(verdict.kind)


def test_sites_share_the_level() -> None:
    assert shared_level(1) == pytest.approx(0.95)
    assert shared_level(4) == pytest.approx(0.9875)


def test_variances_of_seeds_rows_and_their_rest_by_hand() -> None:
    """Seeds -2, 0, 2; rows -1, -1, 1, 1; rest +1 and -1 in turn, of the first and last seed.

    The mean squares are 4 * 4 = 16, 3 * 4/3 = 4 and 8 / (2 * 3) = 4/3; the total is 56/3.
    """
    seeds, rows = np.array([-2.0, 0.0, 2.0]), np.array([-1.0, -1.0, 1.0, 1.0])
    rest = np.outer([1.0, 0.0, -1.0], [1.0, -1.0, 1.0, -1.0])
    found = compare_over_seeds(1 + seeds[:, None] + rows[None, :] + rest)
    assert found.gain == pytest.approx(1.0)
    assert found.error == pytest.approx(math.sqrt(56 / 3 / 12))
    parts = 16**2 / 2 + 4**2 / 3 + (4 / 3) ** 2 / 6
    assert found.freedom == pytest.approx((56 / 3) ** 2 / parts)
    assert found.units == 4


def test_placements_are_shares_of_the_other_class_that_are_ordered_rightly() -> None:
    """Positives 3, 1 and negatives 2, 0, 1: a tie counts half."""
    labels = np.array([True, True, False, False, False])
    found = placements(labels, np.array([3.0, 1.0, 2.0, 0.0, 1.0]))
    assert found == pytest.approx([1.0, 1.5 / 3, 1 / 2, 1.0, 1.5 / 2])


def test_auroc_error_of_groups_by_hand() -> None:
    """Against a constant score the rows' influences are 1/8, -1/8, -1/8, 1/8.

    Two groups with the sums 1/4 and -1/4: the variance is 2/1 * (1/16 + 1/16).
    """
    labels = np.array([True, True, False, False])
    scores = np.array([3.0, 1.0, 2.0, 0.0])
    found = compare_auroc(labels, scores, np.zeros(4), groups=np.array([0, 1, 1, 0]))
    assert found.error == pytest.approx(0.5)
    assert (found.units, found.freedom) == (2, 1)
    own = compare_auroc(labels, scores, np.zeros(4), groups=np.arange(4))
    assert own.error == pytest.approx(math.sqrt(4 / 3 * 4 / 64))


@pytest.mark.parametrize(
    ("gain", "joined", "alone", "text"),
    [
        ((0.01, 0.05), (0.1, 0.2), (-0.1, 0.2), "helps"),  # one model beats guessing
        (
            (0.01, 0.05),
            (0.0, 0.2),
            (0.1, 0.2),
            "cannot tell: the joined model is not shown to beat",
        ),
        (
            (0.01, 0.05),
            (0.0, 0.2),
            (0.0, 0.2),
            "cannot tell: neither model is shown to beat guessing",
        ),
        ((0.0, 0.05), (-0.1, 0.2), (0.1, 0.2), "cannot tell: needs more test rows"),
        ((-0.05, 0.0), (0.1, 0.2), (0.1, 0.2), "cannot tell: needs more test rows"),
        ((0.0, 0.01), (0.1, 0.2), (0.1, 0.2), "no difference larger than 2 points"),
        ((-0.02, 0.01), (0.1, 0.2), (0.1, 0.2), "cannot tell: needs more test rows"),
        ((-0.01, 0.02), (0.1, 0.2), (0.1, 0.2), "cannot tell: needs more test rows"),
    ],
)
def test_an_interval_that_touches_a_bound_decides_nothing(
    gain: tuple[float, float],
    joined: tuple[float, float],
    alone: tuple[float, float],
    text: str,
) -> None:
    verdict = judge(interval(*gain), interval(*joined), interval(*alone))
    assert verdict.text.startswith(text)
