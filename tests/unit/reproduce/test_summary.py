"""Pages are what the ledgers say, ledgers what the files say, and verdicts what statistics say."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from atoll.cli import app
from atoll.reproduce.alternatives import Comparison, comparisons
from atoll.reproduce.margins import RULES
from atoll.reproduce.papers import PAPERS, Selection, again
from atoll.reproduce.summary import PAGE, PAGES, SUMMARY, page, summarize, update
from atoll.reproduce.vleto import PAPER, SETTINGS, Plan

FOLDER = Path(__file__).parents[3] / "docs" / "reproduction"
LEDGERS = {name: json.loads((FOLDER / name / "ledger.json").read_text()) for name in PAPERS}


def test_the_summary_is_what_the_ledgers_say() -> None:
    stored = json.loads((FOLDER / SUMMARY).read_text())
    assert summarize({name: LEDGERS[name] for name in stored["papers"]}) == stored
    assert stored["papers"].keys() == {*PAPERS}


def test_the_page_is_what_the_summary_says() -> None:
    summary = json.loads((FOLDER / SUMMARY).read_text())
    for name in PAGES:
        assert page((FOLDER / name).read_text(), summary) == (FOLDER / name).read_text()
    text = (FOLDER / PAGE).read_text()
    for name in ("costs", "counts", *PAPERS):
        assert f"<!-- begin: {name} -->\n\n" in text
    changed = json.loads(json.dumps(summary))
    changed["papers"]["vleto"]["cells"]["reproduced"] += 1
    assert page(text, changed) != text


def test_every_printed_cell_and_claim_has_one_of_the_four_verdicts() -> None:
    four = {"reproduced", "refuted", "undecided", "undecidable here"}
    for ledger in LEDGERS.values():
        for cell in ledger["cells"]:
            assert cell["verdict"] in (four if cell["theirs"] is not None else {"not printed"})
            if cell["verdict"] in ("undecided", "undecidable here"):
                assert cell["reason"]
        assert {claim["verdict"] for claim in ledger["claims"]} <= four


@pytest.mark.parametrize("paper", PAPERS)
def test_no_verdict_of_a_cell_contradicts_the_statistics(paper: str) -> None:
    """The intervals are computed here once more, by scipy."""
    decided = 0
    for cell in LEDGERS[paper]["cells"]:
        if cell["theirs"] is None or cell["verdict"] not in ("reproduced", "refuted"):
            continue
        values = np.asarray(cell["splits"] or cell["ours"]) - cell["theirs"]
        margin = RULES[paper].margin + (cell["their_spread"] or 0)
        assert cell["obstacle"] == cell["invalid"] == ""
        assert len(values) > 1
        decided += 1
        error = stats.sem(values)
        level = 0.90 if cell["verdict"] == "reproduced" else 0.95
        low, high = (
            stats.t.interval(level, len(values) - 1, values.mean(), error)
            if error
            else (values.mean(), values.mean())
        )
        if cell["verdict"] == "reproduced":
            assert -margin < low <= high < margin
        else:
            assert low > margin or high < -margin
    if paper == "vleto":
        assert decided > 100


@pytest.mark.parametrize("paper", PAPERS)
def test_no_verdict_of_a_claim_contradicts_the_statistics(paper: str) -> None:
    for claim in LEDGERS[paper]["claims"]:
        if claim["obstacle"]:
            assert claim["verdict"] == "undecidable here"
        if claim["verdict"] not in ("reproduced", "refuted"):
            continue
        assert claim["p"] <= claim["p_holm"] < 0.05
        assert not claim["missing"]
        above = [part for part in claim["parts"] if part["margin"] is None]
        means = [float(np.mean(part["gains"])) - part["at"] for part in above]
        if claim["verdict"] == "reproduced":
            assert all(mean > 0 for mean in means)
        elif len(above) == len(claim["parts"]):
            assert min(means) < 0
        for part, mean in zip(above, means, strict=True):
            if claim["verdict"] == "reproduced" and np.std(part["gains"]) > 0:
                assert stats.ttest_1samp(part["gains"], part["at"]).pvalue <= claim["p"] + 1e-9
                assert mean > 0


def copied(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "vleto"
    folder.mkdir()
    for name in names:
        shutil.copy(FOLDER / "vleto" / name, folder)
    return folder


def cell_of(folder: Path, setting: str, column: str) -> Any:
    made, _ = again("vleto", Selection(folder, render=True))
    (cell,) = [c for c in made.cells if c.setting == setting and c.column == column
               and c.table.startswith("Table 1")]  # fmt: skip
    return cell


def test_a_doctored_file_flips_a_verdict(tmp_path: Path) -> None:
    name, setting = "fmnist-cil-standalone.json", "FMNIST CIL Standalone"
    folder = copied(tmp_path, name)
    before = cell_of(folder, setting, "Task 4")
    assert before.verdict == "refuted"  # 95.6 beside 90.66
    one = json.loads((folder / name).read_text())
    for run in one["runs"]:
        run["tasks"]["4|4"] -= before.difference
    (folder / name).write_text(json.dumps(one))
    assert cell_of(folder, setting, "Task 4").verdict == "reproduced"


def test_a_file_with_other_seeds_counts_and_one_of_another_config_does_not(tmp_path: Path) -> None:
    name, setting = "fmnist-cil-v-leto.json", "FMNIST CIL V-LETO"
    folder = copied(tmp_path, name)
    one = json.loads((folder / name).read_text())
    chosen = next(s for s in SETTINGS if s.name == setting)
    more = [{**run, "seed": seed} for seed, run in enumerate((one["runs"] * 7)[:20])]
    config = PAPER.config(chosen, Plan(folder, seeds=tuple(range(20))))
    (folder / name).write_text(json.dumps({**one, "runs": more, "config": config}))
    assert len(cell_of(folder, setting, "Task 4").ours) == 20
    again("vleto", Selection(folder, only=setting, device="cpu"))  # it is not measured again
    assert len(json.loads((folder / name).read_text())["runs"]) == 20
    (folder / name).write_text(json.dumps({**one, "runs": more, "config": "another"}))
    cell = cell_of(folder, setting, "Task 4")
    assert not cell.ours
    assert cell.note == f"measured with another config: {name}"


def test_rendering_updates_the_summary_beside_it(tmp_path: Path) -> None:
    folder = copied(tmp_path, "fmnist-cil-standalone.json")
    words = ["reproduce", "vleto", "--render", "--out", str(folder)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert not (tmp_path / SUMMARY).exists()  # nobody asked for one
    (tmp_path / SUMMARY).write_text("{}")
    (tmp_path / PAGE).write_text(
        "Own words.\n<!-- begin: counts -->\n<!-- end: counts -->\nMore.\n"
    )
    assert CliRunner().invoke(app, words).exit_code == 0
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["papers"]["vleto"]["cells"]["refuted"] > 0
    text = (tmp_path / PAGE).read_text()
    assert text.startswith("Own words.\n")
    assert "| [V-LETO](vleto/ledger.md) |" in text
    assert text.endswith("-->\nMore.\n")
    update(tmp_path)
    assert (tmp_path / PAGE).read_text() == text


def test_costs_are_the_runs_that_are_lacking_times_measured_seconds() -> None:
    costs = {
        "MNIST CIL Pass+VFL": {"measured": True, "runs": 3, "seconds": 30.0},
        "FMNIST CIL Pass+VFL": {"measured": False, "runs": 3, "seconds": 60.0},
        "MNIST CIL V-LETO": {"measured": True, "runs": 20, "seconds": 100.0},
    }
    ledger = {**LEDGERS["vleto"], "costs": costs}
    first, rest = summarize({"vleto": ledger})["costs"]
    assert (first["settings"], first["measured"], first["runs_open"]) == (2, 1, 17)
    assert first["gpu_minutes"] == pytest.approx((7 * 10 + 10 * 20) / 60)
    assert (rest["settings"], rest["gpu_minutes"]) == (1, 0.0)


def test_a_method_is_held_against_its_best_alternative_unit_by_unit() -> None:
    ours, alone, fedavg = (0.80, 0.82, 0.84), (0.70, 0.71, 0.72), (0.79, 0.80, 0.83)
    one = Comparison("a task", "a method", ours, {"alone": alone, "FedAvg": fedavg})
    assert one.best == "FedAvg"
    assert one.gains == pytest.approx((0.01, 0.02, 0.01))
    assert one.answer == "cannot tell"  # 0.0133, 95 %: -0.001 to 0.028
    assert Comparison("a task", "a method", ours, {"alone": alone}).answer == "yes"
    fixed = Comparison("a task", "a method", ours, {"linear": (0.9,) * 3})
    assert fixed.gains == pytest.approx((-0.10, -0.08, -0.06))
    assert fixed.answer == "no"
    assert Comparison("a task", "a method", (0.9,), {"alone": (0.1,)}).answer == "cannot tell"


def test_an_alternative_with_fewer_units_is_not_dropped() -> None:
    cells = [
        ("CHFL mu>0", [0.8, 0.7, 0.6, 0.5]), ("Local", [0.7, 0.7]), ("Common", [0.1] * 4),
    ]  # fmt: skip
    rows = [
        {"table": "Table III", "row": "covertype K=5 30%", "column": column, "ours": values,
         "splits": values, "obstacle": ""} for column, values in cells
    ]  # fmt: skip
    (one,) = comparisons({"chfl": {"cells": rows}})
    assert one.best == "alone"
    assert one.gains == pytest.approx((0.1, 0.0))
