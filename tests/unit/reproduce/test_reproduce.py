"""The ledger says what the runs say."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from atoll.cli import app, main
from atoll.core.errors import EXIT_SITE_FAILED, ClientFailedError, UserError
from atoll.reproduce import chfl, papers
from atoll.reproduce.chfl import PAPER
from atoll.reproduce.ledger import Ledger, as_json
from atoll.reproduce.measured import Measurement
from atoll.reproduce.pages import as_markdown
from atoll.reproduce.paper import Say, silent
from atoll.reproduce.papers import Selection, again

LEDGER = Path(__file__).parents[3] / "docs" / "reproduction" / "chfl"


def measure(setting: chfl.Setting, plan: chfl.Plan, say: Say = silent) -> Measurement:
    return PAPER.measure([setting], plan, say)[setting.name]


def test_a_setting_is_tuned_on_validation_rows_measured_once_and_kept(tmp_path: Path) -> None:
    small = (("model.widths", [8, 6, 4]), ("mu", [0.1]))
    setting = chfl.Setting("covertype K=5 30%", "synthetic-table", 5, 0.3, small)
    plan = chfl.Plan(tmp_path, "cpu", (0, 1), (0,), (0,), 2, (1e-3, 1e-2))
    said: list[str] = []
    found = measure(setting, plan, said.append)
    assert found["rate"] == float(max(found["tuned"], key=lambda r: found["tuned"][r]))
    assert [(r["feature_seed"], r["seed"]) for r in found["runs"]] == [(0, 0), (1, 0)]
    assert set(found["runs"][0]["accuracy"]) >= {*chfl.METHODS.values(), "auto", "mu=0.1"}
    assert not any((tmp_path / "runs").iterdir())
    said.clear()
    assert measure(setting, plan, said.append) == found
    assert said == []  # nothing was run again
    assert PAPER.complete(setting, replace(plan, rounds=3)) is None
    made = PAPER.ledger({setting.name: found}, {})
    cell = next(c for c in made.cells if c.column == "CHFL mu>0" and c.table == "Table II")
    assert cell.mean == pytest.approx(np.mean([r["accuracy"]["mu>0"] for r in found["runs"]]))
    assert json.loads(json.dumps(as_json(made)))["cells"]
    assert "| helena maximum | Common | 0.2717 ± 0.0062 | - |" in as_markdown(made)


def test_a_study_takes_the_rate_of_its_setting_and_is_paired_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (("model.widths", [8, 6, 4]), ("mu", [0.1]))
    base = chfl.Setting("covertype K=5 30%", "synthetic-table", 5, 0.3, small)
    zeros = (*small, ("u_init", "zeros"))
    study = replace(base, name=f"{base.name}, U", changes=zeros, of=base.name)
    monkeypatch.setattr(chfl, "SETTINGS", (base,))
    monkeypatch.setattr(chfl, "STUDIES", (study,))
    plan = chfl.Plan(tmp_path, "cpu", (0, 1), (0,), (0,), 2, (1e-3, 1e-2))
    said: list[str] = []
    whole = measure(base, plan)
    found = measure(study, plan, said.append)
    assert found["rate"] == whole["rate"]
    assert not any("tuning" in text for text in said)
    assert "local" not in found["runs"][0]["accuracy"]
    assert [r["accuracy"]["common"] for r in found["runs"]] == [
        r["accuracy"]["common"] for r in whole["runs"]
    ]  # column one does not know of it
    both = {base.name: whole, study.name: found}
    claims = [c.text for c in PAPER.ledger(both, {}).claims if c.text.startswith(study.name)]
    variants = ("mu=0", "mu>0", "auto")
    assert claims == [f"{study.name}: {v} is above {v} without this change" for v in variants]
    assert "studies.svg" in PAPER.figures(both)
    assert "studies.svg" not in PAPER.figures({base.name: whole})


def test_unknown_tables_and_settings_are_named() -> None:
    with pytest.raises(UserError, match="no table '7'"):
        PAPER.select("", "7")
    with pytest.raises(UserError, match="no setting 'x'"):
        PAPER.select("x", "")
    with pytest.raises(
        UserError, match=r"table '4' has no setting that atoll can measure.*use 2, 3"
    ):
        PAPER.select("", "4")
    assert [s.name for s in PAPER.select("", "3")] == [
        "covertype K=5 30%", "covertype K=2 30%", "covertype K=10 30%",
    ]  # fmt: skip


def test_processes_that_measure_leave_missing_data_to_be_told(tmp_path: Path) -> None:
    asked = Selection(tmp_path, only="helena K=5 30%", device="cpu", quick=True, jobs=2)
    made, figures = again("chfl", asked)
    cell = next(c for c in made.cells if c.row == "helena K=5 30%")
    assert (cell.verdict, cell.obstacle) == ("undecidable here", "no data: helena")
    assert cell.note.startswith("not here: ")
    assert figures == {}


def test_a_process_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "raise SystemExit(70)"]
    monkeypatch.setattr(papers, "_command", lambda *given: failing)
    asked = Selection(tmp_path, only="helena K=5 30%", jobs=2)
    with pytest.raises(UserError, match=r"measuring 'helena K=5 30%' ended with exit code 70"):
        again("chfl", asked)


def test_the_plan_can_be_set(tmp_path: Path) -> None:
    """Other seeds and rounds; processes are told too; a wrong name or kind is answered."""
    asked = Selection(tmp_path, plan=("seeds=[7]", "rounds=3"))
    made = papers._plan(PAPER, asked)
    assert (made.seeds, made.rounds, made.rates) == ((7,), 3, chfl.RATES)
    command = papers._command("chfl", asked, "x")
    assert [command[i + 1] for i, part in enumerate(command) if part == "--set"] == [*asked.plan]
    with pytest.raises(UserError, match="the plan has no 'sedes'") as told:
        papers._plan(PAPER, Selection(tmp_path, plan=("sedes=[7]",)))
    assert "seeds" in told.value.remedy
    with pytest.raises(UserError, match="'many' is not of its kind"):
        papers._plan(PAPER, Selection(tmp_path, plan=("rounds=many",)))


@pytest.mark.parametrize("changes", [{"quick": True}, {"plan": ("rounds=3",)}])
def test_a_measurement_is_not_replaced_by_one_of_something_else(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    name = "covertype-k-5-30.json"
    shutil.copy(LEDGER / name, tmp_path)
    with pytest.raises(UserError, match="another config is here") as told:
        again("chfl", Selection(tmp_path, only="covertype K=5 30%", device="cpu", **changes))
    assert told.value.where == str(tmp_path / name)
    assert (tmp_path / name).read_bytes() == (LEDGER / name).read_bytes()


def test_a_longer_run_is_not_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    name = "digits-cifar100-fccl-seed-0.json"
    shutil.copy(LEDGER.parent / "fccl" / name, tmp_path)
    asked = Selection(tmp_path, only="digits cifar100 FCCL", device="cpu", plan=("rounds=2",))
    with pytest.raises(UserError, match="another config is here"):
        again("fccl", asked)
    assert (tmp_path / name).read_bytes() == (LEDGER.parent / "fccl" / name).read_bytes()


def test_papers_and_miniatures_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[Path] = []

    def noted(paper: str, asked: Selection, *_: object) -> tuple[Ledger, dict[str, bytes]]:
        found.append(asked.folder)
        asked.folder.mkdir(parents=True)
        return Ledger(paper), {}

    monkeypatch.setattr(papers, "again", noted)
    for words in (["chfl"], ["fccl"], ["chfl", "--quick"]):
        assert CliRunner().invoke(app, ["reproduce", *words]).exit_code == 0
    assert [str(f) for f in found] == [f"reproduction/{n}" for n in ("chfl", "fccl", "chfl-quick")]


def test_a_ledger_is_made_of_all_that_is_in_the_folder(tmp_path: Path) -> None:
    """What was asked for is measured, and nothing that was measured before is left out."""
    study = "covertype-k-5-30---u-begins-at-zero.json"
    for name in ("covertype-k-5-30.json", "covertype-k-2-30.json", study):
        shutil.copy(LEDGER / name, tmp_path)
    made, _ = again("chfl", Selection(tmp_path, only="covertype K=5 30%", device="cpu"))
    measured = {c.row for c in made.cells if c.table == "Table III" and c.ours}
    assert measured == {"covertype K=5 30%", "covertype K=2 30%"}
    assert any("U begins at zero" in claim.text for claim in made.claims)
    notes = {c.row: c.note for c in made.cells if not c.ours}
    assert notes["covertype K=10 30%"].startswith("not run yet: ")
    assert notes["helena K=5 30%"].startswith(
        "no data: get 'helena' (see atoll list data), then run "
    )
    assert notes["helena median"] == "not measured: atoll has no setting for this row"
    shown, _ = again("chfl", Selection(tmp_path, render=True, plan=("rounds=3",)))
    notes = {c.row: c.note for c in shown.cells if not c.ours}
    assert notes["covertype K=2 30%"] == "measured with another config: covertype-k-2-30.json"


def test_a_ledger_has_the_other_seeds_of_what_was_not_asked_for(tmp_path: Path) -> None:
    for name in ("fccl-seed-0", "fccl-seed-1", "fedmd-seed-0", "fedmd-seed-1"):
        shutil.copy(LEDGER.parent / "fccl" / f"digits-cifar100-{name}.json", tmp_path)
    asked = Selection(tmp_path, only="digits cifar100 FCCL", device="cpu", plan=("seeds=[0]",))
    cells = [c for c in again("fccl", asked)[0].cells if c.table.startswith("Table 1") and c.ours]
    assert {c.row: len(c.ours) for c in cells} == {"SOLO": 2, "FCCL": 1, "FedMD": 2}


def test_studies_are_measured_beside_settings_that_are_named(tmp_path: Path) -> None:
    asked = Selection(tmp_path, only=f"covertype K=5 30%; {chfl.STUDIES[0].name}", studies=True)
    names = [setting.name for setting in papers._select(PAPER, asked)]
    assert names == ["covertype K=5 30%", *(s.name for s in chfl.STUDIES)]


def test_a_failed_setting_leaves_the_ledger_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(LEDGER / "covertype-k-5-30.json", tmp_path)

    def failing(*_: object) -> Any:
        raise ClientFailedError("a", "fit", "it rained")

    monkeypatch.setattr(chfl, "PAPER", replace(PAPER, execute=failing))
    monkeypatch.setattr(sys, "argv", ["atoll", "reproduce", "chfl", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_SITE_FAILED
    what, where, remedy = capsys.readouterr().err.splitlines()
    assert what == "error: client a failed in fit: it rained"
    assert "it rained" in Path(where.removeprefix("where: ")).read_text()
    assert "start the command again" in remedy
    assert (
        "| covertype K=5 30% | Common | 0.6218 ± 0.1086 | 0."
        in (tmp_path / "ledger.md").read_text()
    )


def test_where_nothing_was_measured_there_is_nothing_to_render(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to render"):
        again("chfl", Selection(tmp_path / "none", render=True))


@pytest.mark.filterwarnings("error")
def test_a_miniature_is_one_small_run_with_its_figures(tmp_path: Path) -> None:
    plan = chfl.Plan.quick(tmp_path, "cpu")
    assert [s.name for s in papers._select(PAPER, Selection(tmp_path, quick=True))] == [
        "covertype K=5 30%"
    ]
    small = (("model.widths", [8, 6, 4]),)
    setting = chfl.Setting("covertype K=5 30%", "synthetic-table", 5, 0.3, small)
    found = measure(setting, replace(plan, rounds=1))
    (run,) = found["runs"]
    assert {v for v in run["accuracy"] if v.startswith("mu=")} == {"mu=0", "mu=0.01", "mu=0.1"}
    assert "mu.svg" in PAPER.figures({setting.name: found})
