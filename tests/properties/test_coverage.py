"""Intervals cover the true gain as often as they promise; `bench/coverage.py` has more sets."""

import json
import math
from pathlib import Path

import pytest

from tests.properties.shuffled import decides, shuffled_answer
from tests.properties.simulations import (
    METRICS,
    announced_power,
    coverage,
    needed_power,
    overall_coverage,
    power,
    seeds_coverage,
    shared_coverage,
)

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
SETS = 500
NOISE = 2.6 * math.sqrt(0.05 * 0.95 / SETS)  # of a share of 95 %, at 99 %
CELLS = [(rows, size) for rows in (30, 100, 400) for size in (1, 4)]


def check(share: float, rows: int) -> None:
    """At least 93.5 % and, at 400 rows, at most 97 %, with room for the noise of few sets."""
    assert share >= 0.935 - NOISE
    assert rows < 400 or share <= 0.97 + NOISE


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("rows", "size"), CELLS)
def test_intervals_cover_the_true_gain(metric: str, rows: int, size: int) -> None:
    result = coverage(metric, rows, size, SETS)
    if not result.sets:
        pytest.skip("nothing is released: fewer than ten groups of a class")
    check(result.share, rows)


@pytest.mark.parametrize("rows", [(30, 30, 30, 30), (400, 100, 40)])
def test_the_mean_over_sites_covers_the_true_gain(rows: tuple[int, ...]) -> None:
    check(overall_coverage(rows, SETS), max(rows))


@pytest.mark.parametrize("rows", [(100, 100, 100, 100), (400, 400, 400)])
def test_the_mean_over_sites_with_groups_covers_the_true_gain(rows: tuple[int, ...]) -> None:
    check(overall_coverage(rows, SETS, size=4), max(rows))


@pytest.mark.parametrize(("seeds", "rows"), [(3, 100), (5, 400)])
def test_groups_and_seeds_cover_the_true_gain(seeds: int, rows: int) -> None:
    check(seeds_coverage(seeds, rows, SETS, size=4), rows)


@pytest.mark.parametrize("rows", [30, 400])
def test_the_mean_over_sites_with_the_same_rows_covers_the_true_gain(rows: int) -> None:
    check(shared_coverage(rows, 4, SETS), rows)


@pytest.mark.parametrize(("seeds", "rows"), [(3, 100), (5, 400), (10, 30)])
def test_rows_and_seeds_cover_the_true_gain(seeds: int, rows: int) -> None:
    check(seeds_coverage(seeds, rows, SETS), rows)


def test_five_points_on_400_rows_are_found() -> None:
    assert power(400, discordant=0.1, gain=0.05, sets=1000) >= 0.8


@pytest.mark.parametrize("discordant", [0.02, 0.05, 0.15])
def test_the_announced_number_of_rows_has_its_power(discordant: float) -> None:
    _, share = announced_power(discordant, 0.02, 1500)
    assert 0.75 <= share <= 0.85


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("size", [1, 4])
def test_the_announced_number_of_rows_has_its_power_for_every_metric(
    metric: str, size: int
) -> None:
    _, share = needed_power(metric, size, SETS)
    noise = 2.6 * math.sqrt(0.8 * 0.2 / SETS)
    assert 0.75 - noise <= share <= 0.85 + noise


def test_the_number_of_rows_announced_for_all_sites_has_its_power() -> None:
    _, share = needed_power("accuracy", 1, SETS, sites=4)
    assert 0.75 <= share <= 0.85


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffled_labels_get_no_verdict(seed: int) -> None:
    """Nothing can be learned; `bench/shuffled.py` has 200 runs."""
    body = shuffled_answer(seed)
    assert not decides(body)
    assert {site["verdict"]["kind"] for site in body["sites"].values()} == {"cannot tell"}


def test_the_committed_coverage_meets_every_bar() -> None:
    """At 5,000 sets a cell, without room for noise."""
    results = json.loads((RESULTS / "coverage.json").read_text())
    assert set(results) == {"power", "needed", "metric", "sites", "seeds"}
    assert [row[0] for row in results["metric"]["rows"]] == list(METRICS)
    for part in results.values():
        assert part["sets"] == 5000
        cells = [cell for row in part["rows"] for cell in row if isinstance(cell, dict)]
        released = [cell for cell in cells if cell["share"] is not None]
        assert len(released) >= len(part["rows"])
        for cell in released:
            assert cell["least"] <= cell["share"] <= cell["most"], cell
