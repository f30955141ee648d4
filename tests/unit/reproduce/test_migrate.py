"""Every measured cell is found under the present spelling of its setting."""

import json
import shutil
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.data.splits import options_of
from atoll.reproduce import vleto
from atoll.reproduce.fedseit import PAPER, Plan, Setting
from atoll.reproduce.ledger import as_json
from atoll.reproduce.measured import file_name
from atoll.reproduce.migrate import migrate, old_fedseit, old_vleto
from atoll.reproduce.pages import as_markdown
from atoll.reproduce.papers import Selection, again, load

LEDGERS = Path(__file__).parents[3] / "docs" / "reproduction"
FOLDER = LEDGERS / "fedseit"
# Files and measured cells of each paper: none may be lost, new measurements raise the number.
COUNTS = {"chfl": (19, 51), "fccl": (36, 284), "fedseit": (86, 95), "vleto": (98, 590)}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.name != "ledger.json")


@pytest.mark.parametrize("paper", COUNTS)
def test_no_measured_cell_is_lost(paper: str) -> None:
    made, _ = again(paper, Selection(LEDGERS / paper, render=True, studies=True))
    runs = [cost["runs"] for cost in made.costs.values() if cost["measured"]]
    counts = len(files(LEDGERS / paper)), sum(bool(cell.ours) for cell in made.cells)
    assert counts >= COUNTS[paper]
    assert counts[1] >= COUNTS[paper][1]
    used = sum(runs) if paper == "fccl" else len(made.origins)
    assert used == counts[0]  # no file is left out
    assert as_markdown(made) == (LEDGERS / paper / "ledger.md").read_text()


@pytest.mark.parametrize("paper", COUNTS)
def test_every_setting_has_options_of_its_own_split_alone(paper: str) -> None:
    """So no fingerprint had to change when each split got options of its own."""
    settings = [*load(paper).settings, *load(paper).studies]
    assert len(settings) > 10
    for setting in settings:
        options_of(setting.values()["scenario"], setting.name)  # refuses those of other splits


@pytest.mark.parametrize("paper", ["fedseit", "vleto"])
def test_the_ledger_has_the_present_fingerprints(paper: str) -> None:
    made, _ = again(paper, Selection(LEDGERS / paper, render=True, studies=True))
    kept = json.loads((LEDGERS / paper / "ledger.json").read_text())
    assert json.loads(json.dumps(as_json(made)))["cells"] == kept["cells"]


def test_old_fingerprints_become_the_present_ones(tmp_path: Path) -> None:
    """The stored fingerprints of three files, from before `profile` and `faults` were moved."""
    stored = {
        Setting("R8", "FedSeIT", "1.0"): "51d57e9e15ac",
        Setting("TMN", "FedWeIT", "1.0", "released"): "5822fe7c662d",
        Setting("R8", "FedSeIT", "1.0", fault="all but tests"): "a1959a67b394",
    }
    plan = Plan(tmp_path)
    for setting, config in stored.items():
        assert old_fedseit(setting, plan) == config
        name = f"{file_name(setting.name)}.json"
        text = (FOLDER / name).read_text()
        new = f'"config": "{PAPER.config(setting, plan)}"'
        assert new in text
        (tmp_path / name).write_text(text.replace(new, f'"config": "{config}"'))
        assert PAPER.complete(setting, plan) is None
    assert sorted(migrate(tmp_path, "fedseit")) == files(tmp_path)
    for path in files(tmp_path):
        assert path.read_bytes() == (FOLDER / path.name).read_bytes()
    assert migrate(tmp_path, "fedseit") == []  # a second time nothing is left


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    setting = Setting("R8", "FedSeIT", "1.0")
    name = f"{file_name(setting.name)}.json"
    shutil.copy(FOLDER / name, tmp_path)
    with pytest.raises(UserError, match="a measurement of something else is here"):
        migrate(tmp_path, "fedseit", Plan(tmp_path, rounds=3))
    assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_the_label_oracle_of_vleto_is_found_under_its_replacement(tmp_path: Path) -> None:
    """The stored fingerprints from when `fil_eval = "label_oracle"` was an option."""
    stored = {"MNIST FIL label_oracle": "c70e655a2350", "FMNIST FIL label_oracle": "c3c97f1c58fa"}
    plan, moved = vleto.Plan(tmp_path), []
    for setting in vleto.SETTINGS:
        old, new = old_vleto(setting, plan), vleto.PAPER.config(setting, plan)
        assert (old != new) is (setting.name in stored)
        if old != new:
            assert old == stored[setting.name]
            text = (LEDGERS / "vleto" / f"{file_name(setting.name)}.json").read_text()
            assert f'"config": "{new}"' in text
            moved.append(tmp_path / f"{file_name(setting.name)}.json")
            moved[-1].write_text(text.replace(new, old))
    assert migrate(tmp_path, "vleto") == moved
    assert [vleto.PAPER.complete(s, plan) is None for s in vleto.SETTINGS if s.name in stored] == [
        False,
        False,
    ]
