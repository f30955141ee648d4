"""The benchmark of methods against forgetting, on scikit-learn's digits."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "bench" / "fcl.py"


@pytest.fixture(scope="module")
def fcl() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_fcl", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_fcl"] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_fcl"]


def test_every_method_runs_on_the_digits_and_has_a_line(fcl: ModuleType, tmp_path: Path) -> None:
    small = ["--seeds", "1", "--rounds", "1", "--stages", "2", "--features", "30", "--clients", "2"]
    results = fcl.measure_all(fcl.arguments(small), tmp_path)
    assert results.keys() == fcl.METHODS.keys()
    lines = fcl.table(results)[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(fcl.METHODS)
    assert all(0.05 < runs[0].accuracy <= 1 for runs in results.values())
    triangle, cross, weight = 31 * 32 // 2, 31 * 10, 31 * 10  # of 30 features and a constant
    least = 2 * 2 * 8 * (triangle + cross + weight) / 1e6  # two sites, two stages
    assert least < results["analytic"][0].megabytes < 1.2 * least


def test_seeds_are_paired(fcl: ModuleType) -> None:
    """Gains 0.1 and 0.3: mean 0.2, standard error 0.1, t of one degree of freedom 12.706."""
    base = [fcl.Measured(0.5, 0.4, 1.0, 2.0), fcl.Measured(0.7, 0.2, 3.0, 4.0)]
    other = [fcl.Measured(0.6, 0.1, 1.0, 2.0), fcl.Measured(1.0, 0.1, 1.0, 2.0)]
    lines = fcl.table({"fedavg": base, "other": other})
    assert lines[2] == "| fedavg | 0.6000 | 0.1414 | +0.0000 | 0.3000 | 2.0 | 3.0 |"
    assert (
        lines[3] == "| other | 0.8000 | 0.2828 | +0.2000 [-1.0706, +1.4706] | 0.1000 | 1.0 | 2.0 |"
    )
