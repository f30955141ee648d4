"""Cells are measured again, and a stored value that is another is seen."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.core.errors import UserError
from atoll.core.source import source
from atoll.reproduce import papers, vleto
from atoll.reproduce.origin import describe, provenance
from atoll.reproduce.paper import silent
from atoll.reproduce.verify import Check, prediction_interval, verify
from atoll.reproduce.vleto import PAPER
from tests.unit.reproduce.test_vleto import by_name, miniature


def stored(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "fmnist-cil-pyvertical.json"
    return path, json.loads(path.read_text())


def test_cells_are_measured_again_and_a_doctored_one_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = miniature(monkeypatch, tmp_path, seeds=(0, 1))
    PAPER.measure([by_name("FMNIST CIL PyVertical")], plan)
    path, one = stored(tmp_path)
    before = sorted(tmp_path.iterdir())
    (check,) = verify(PAPER, plan, 5, silent)
    assert check.exact  # the same machine and source: to the last bit
    assert check.passed
    assert check.again == check.stored
    assert sorted(tmp_path.iterdir()) == before  # nothing is written
    for run in one["runs"]:
        for scores in (run["union"], run["tasks"]):
            scores.update({place: value + 1e-9 for place, value in scores.items()})
    path.write_text(json.dumps(one))
    assert not verify(PAPER, plan, 1, silent)[0].passed
    del one["provenance"]
    path.write_text(json.dumps(one))
    (near,) = verify(PAPER, plan, 1, silent)
    assert (near.exact, near.passed) == (False, True)  # inside the prediction interval
    for run in one["runs"]:
        for scores in (run["union"], run["tasks"]):
            scores.update({place: value + 50 for place, value in scores.items()})
    path.write_text(json.dumps(one))
    assert not verify(PAPER, plan, 1, silent)[0].passed


def test_a_new_measurement_names_its_commit_machine_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = miniature(monkeypatch, tmp_path)
    one = PAPER.measure([by_name("FMNIST CIL PyVertical")], plan)["FMNIST CIL PyVertical"]
    origin = one["provenance"]
    assert origin["source"] == source()
    assert origin["machine"].startswith("CPU")
    assert origin["together"] == ["FMNIST CIL PyVertical"]
    assert origin["wall_seconds"] > 0
    assert "commit not recorded" not in describe(one)
    assert describe(one).endswith("float32")
    old = {key: value for key, value in one.items() if key != "provenance"}
    assert describe(old) == "commit not recorded; cpu, model not recorded; float32"


def test_the_source_is_named_where_there_is_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.reproduce.origin.commit", lambda: "")
    origin = provenance("cpu", 1.25, ["a", "b"])
    assert (origin["commit"], origin["wall_seconds"], origin["together"]) == ("", 1.2, ["a", "b"])
    measurement = {"provenance": origin, "runs": [{}], "facts": {}, "engine": {"tf32": True}}
    assert describe(measurement).startswith(f"source {source()}; CPU, ")


def test_the_prediction_interval_is_for_one_more_run() -> None:
    # two runs: t = 63.657, deviation 0.01, sqrt(1.5): half-width 0.7796
    low, high = prediction_interval([0.5 - 0.01 / math.sqrt(2), 0.5 + 0.01 / math.sqrt(2)])
    assert (low, high) == pytest.approx((0.5 - 0.77963, 0.5 + 0.77963), abs=1e-4)
    assert prediction_interval([1.0, 1.0, 1.0]) == pytest.approx((0.999, 1.001))
    assert prediction_interval([0.5]) == (-math.inf, math.inf)


def test_a_check_passes_by_bits_or_by_interval() -> None:
    check = Check("s", "c", 0.5, 0.5 + 1e-12, 0.4, 0.6, exact=True)
    assert not check.passed
    assert str(check).startswith("FAILED: s, c: 0.5, again 0.5")
    assert Check("s", "c", 0.5, 0.59, 0.4, 0.6, exact=False).passed
    assert not Check("s", "c", 0.5, 0.61, 0.4, 0.6, exact=False).passed


def test_without_measurements_there_is_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to verify"):
        verify(PAPER, vleto.Plan(tmp_path), 1, silent)


def test_the_command_fails_where_a_cell_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Check("s", "c", 0.5, 0.5, 0.4, 0.6, exact=False)
    bad = Check("t", "c", 0.5, 0.7, 0.4, 0.6, exact=False)
    words = ["reproduce", "vleto", "--verify", "2"]
    monkeypatch.setattr(papers, "verified", lambda *_: [good, good])
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, "2 cells are what is stored" in result.output) == (0, True)
    monkeypatch.setattr(papers, "verified", lambda *_: [good, bad])
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert "1 of 2 cells are not what is stored" in str(result.exception)
    assert "FAILED: t, c" in result.output
