"""Files of choices: the cache of timings on this machine."""

from pathlib import Path

import pytest

from atoll.compute.choice_files import keep_timings, stored_timings
from atoll.kernels.batched_layers import Timing

FIRST = {"one shape": Timing("near", {"near": 1.0, "grouped": 2.0})}
SECOND = {"another": Timing("grouped", {"grouped": 1.0})}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_two_executors_add_their_timings_to_one_file() -> None:
    assert stored_timings() == {}
    keep_timings(FIRST)
    keep_timings(SECOND)
    assert stored_timings() == FIRST | SECOND


def test_a_newer_timing_of_a_shape_replaces_the_older() -> None:
    keep_timings(FIRST)
    newer = {"one shape": Timing("grouped", {"near": 3.0, "grouped": 2.0})}
    keep_timings(newer)
    assert stored_timings() == newer
