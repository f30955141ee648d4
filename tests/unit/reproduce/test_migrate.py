"""Every measured cell is found under the present spelling of its setting."""

import json
import shutil
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.reproduce.fedseit import PAPER, Plan, Setting
from atoll.reproduce.ledger import as_json, as_markdown
from atoll.reproduce.measured import file_name
from atoll.reproduce.migrate import migrate, old_config
from atoll.reproduce.papers import Asked, again

LEDGERS = Path(__file__).parents[3] / "docs" / "reproduction"
FOLDER = LEDGERS / "fedseit"
# Files and cells of each paper, counted before options became replacements.
COUNTS = {"chfl": (19, 51), "fccl": (36, 228), "fedseit": (86, 86), "vleto": (97, 586)}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.name != "ledger.json")


@pytest.mark.parametrize("paper", COUNTS)
def test_no_measured_cell_is_lost(paper: str) -> None:
    made, _ = again(paper, Asked(LEDGERS / paper, render=True, studies=True))
    counts = len(files(LEDGERS / paper)), sum(bool(cell.ours) for cell in made.cells)
    assert counts == COUNTS[paper]
    assert as_markdown(made) == (LEDGERS / paper / "ledger.md").read_text()


def test_the_ledger_has_the_present_fingerprints() -> None:
    made, _ = again("fedseit", Asked(FOLDER, render=True, studies=True))
    kept = json.loads((FOLDER / "ledger.json").read_text())
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
        assert old_config(setting, plan) == config
        name = f"{file_name(setting.name)}.json"
        text = (FOLDER / name).read_text()
        new = f'"config": "{PAPER.config(setting, plan)}"'
        assert new in text
        (tmp_path / name).write_text(text.replace(new, f'"config": "{config}"'))
        assert PAPER.known(setting, plan) is None
    assert sorted(migrate(tmp_path)) == files(tmp_path)
    for path in files(tmp_path):
        assert path.read_bytes() == (FOLDER / path.name).read_bytes()
    assert migrate(tmp_path) == []  # a second time nothing is left


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    setting = Setting("R8", "FedSeIT", "1.0")
    name = f"{file_name(setting.name)}.json"
    shutil.copy(FOLDER / name, tmp_path)
    with pytest.raises(UserError, match="a measurement of something else is here"):
        migrate(tmp_path, Plan(tmp_path, rounds=3))
    assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
