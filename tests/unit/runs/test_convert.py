"""Run folders of older releases are read with the present names of options."""

import base64
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.core.integrity import FORMAT
from atoll.runs.config import read, resolve
from atoll.runs.convert import convert_config
from atoll.runs.result import Run

OLD = Path(__file__).parent / "old"
FORMATS = ("format-1", "format-2")
CONFIG = """
rounds = 2
checkpoint_seconds = 0
data = { files = ["a.csv", "b.csv"], label = "outcome" }
method = "fedavg"
model = { widths = [2] }
engine = { mode = "loop", device = "cpu", threads = 1 }
"""  # with which the folders `cut` were started
OTHERS = [
    "masks", "head", "foreign", "projections", "weighting", "past", "similarity", "dls", "sparse",
    "stop", "draws", "order",
]  # fmt: skip
# The options of every scenario before format 3, with their defaults.
EVERY: dict[str, Any] = {
    "clients": 3, "stages": 1, "train": 0.6, "valid": 0.2, "official_test": True,
    "tests": "shared", "rows": "even", "alpha": 0.5, "least": 1, "ratio": 0.3, "common": [],
    "feature_seed": 0, "cut": "contiguous", "mode": "none", "window": 0, "stride": 2,
    "stage_classes": [], "joint_aug": False, "task_classes": 4, "held_back": 0.125, "sizes": [],
    "stratified": False, "paper_compat": False, "drawn_twice": False,
}  # fmt: skip
SHARES = ("train", "valid", "official_test")
Call = Callable[..., int]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old folders, with checkpoints, in the current directory."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    for text in tmp_path.rglob("checkpoint.base64"):
        text.with_suffix(".safetensors").write_bytes(base64.decodebytes(text.read_bytes()))
        text.unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_folders_are_of_older_formats() -> None:
    kept = [json.loads((OLD / name / "ended/facts.json").read_text()) for name in FORMATS]
    assert [facts.get("format", 1) for facts in kept] == [1, 2]
    assert FORMAT > 2


@pytest.mark.parametrize("name", FORMATS)
def test_an_old_run_is_reported(name: str, old: Path, call: Call) -> None:
    assert call("report", f"{name}/ended", "--out", "page.html") == 0
    assert "fedavg" in (old / "page.html").read_text()


@pytest.mark.parametrize("name", FORMATS)
def test_an_old_run_predicts(name: str, old: Path, call: Call) -> None:
    assert call("predict", f"{name}/ended", "a.csv", "--site", "a", "--out", "out.csv") == 0
    rows = (old / "out.csv").read_text().splitlines()
    assert len(rows) == len((old / "a.csv").read_text().splitlines())


@pytest.mark.parametrize("name", FORMATS)
def test_an_old_run_is_exported(name: str, old: Path, call: Call) -> None:
    assert call("export", f"{name}/ended", "--site", "a", "--out", "model") == 0
    assert any(path.suffix == ".safetensors" for path in (old / "model").iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_an_old_run_goes_on(name: str, old: Path, call: Call) -> None:
    """Its second round gives the numbers that the old release gave."""
    (old / "old.toml").write_text(CONFIG)
    assert call("run", "old.toml", "--out", f"{name}/cut", "--resume", "--quiet") == 0
    resumed, ended = Run(old / name / "cut"), Run(old / name / "ended")
    assert [type(event) for event in resumed.events] == [type(event) for event in ended.events]
    assert resumed.accuracy == pytest.approx(ended.accuracy)
    assert resumed.config == ended.config


def test_an_old_run_with_a_fault_of_published_code_has_a_replacement(old: Path) -> None:
    run = Run(old / "format-2/faults")
    assert run.config["replace"] == "atoll.reproduce.faults.fedseit:head"
    assert resolve(run.config, "old").replace == run.config["replace"]


@pytest.mark.parametrize("name", [*(f"{name}/ended" for name in FORMATS), "format-2/faults"])
def test_no_option_of_an_old_run_is_lost(name: str) -> None:
    """Converted and resolved values are those that stand in the file, but for renamed options."""
    values = tomllib.loads((OLD / name / "config.toml").read_text())
    config = resolve(Run(OLD / name).config, "old")
    for key in ("seed", "rounds", "data", "dtype"):
        assert getattr(config, key) == values[key]
    added = {"frozen": [], "initial": "drawn", "weights": ""}  # what such runs had, unwritten
    assert config.model == values["model"] | added
    method = {k: v for k, v in values["method"].items() if k not in ("profile", "faults")}
    assert config.method == method


@pytest.mark.parametrize(
    ("options", "replacement"),
    [
        ({}, None),
        ({"profile": "default", "faults": []}, None),
        ({"profile": "released", "faults": []}, "released"),
        ({"profile": "released", "faults": ["head"]}, "released"),
        ({"profile": "default", "faults": ["order"]}, "order"),
        ({"faults": OTHERS}, "all_but_tests"),
    ],
)
def test_faults_become_a_replacement(options: dict[str, Any], replacement: str | None) -> None:
    values = {"rounds": 3, "method": {"name": "fedseit", "rate": 0.1, **options}}
    converted = convert_config(values, 2, "here")
    wanted = {"replace": f"atoll.reproduce.faults.fedseit:{replacement}"} if replacement else {}
    assert converted == {"rounds": 3, "method": {"name": "fedseit", "rate": 0.1}, **wanted}


def test_faults_that_no_replacement_names_are_an_error() -> None:
    values = {"method": {"name": "fedseit", "faults": ["head", "order"]}}
    with pytest.raises(UserError, match="combines the faults head, order"):
        convert_config(values, 2, "here")


def test_a_config_of_this_format_is_not_converted() -> None:
    values = {"method": {"name": "fedseit", "faults": ["head"]}}
    assert convert_config(values, FORMAT, "here") is values


def test_a_newer_format_names_the_remedy() -> None:
    with pytest.raises(UserError, match=f"reads up to {FORMAT}") as caught:
        convert_config({}, FORMAT + 1, "here")
    assert "upgrade atoll" in caught.value.remedy


def test_an_old_scenario_keeps_the_options_of_its_split(old: Path) -> None:
    run = old / "format-2/ended"
    assert "drawn_twice" in (run / "config.toml").read_text()
    wanted = {"split": "files", "train": 0.6, "valid": 0.2}
    assert Run(run).config["scenario"] == wanted
    assert resolve(read(str(run / "config.toml")), "old").scenario == wanted


@pytest.mark.parametrize(
    ("data", "split", "kept"),
    [
        ({"name": "wine"}, "rows", {"clients", "rows", "alpha", "least", "tests", *SHARES}),
        ({"files": ["a.jsonl"], "text": "body"}, "tasks", {"train", "valid"}),
        ({"parties": ["a.csv", "b.csv"]}, "parties", {"cut", "mode", "feature_seed", "joint_aug",
         "stages", "window", "stride", "stage_classes", *SHARES}),
    ],
)  # fmt: skip
def test_options_of_other_splits_are_dropped(
    data: dict[str, Any], split: str, kept: set[str]
) -> None:
    values = {"data": data, "scenario": {"split": split, **EVERY}, "rounds": 3}
    converted = convert_config(values, 2, "here")
    assert converted["scenario"].keys() == kept | {"split"}
    assert converted["scenario"]["split"] == ("streams" if "text" in data else split)
    method = {"rows": "fedavg", "tasks": "fedseit", "parties": "splitnn"}[split]
    config = resolve({**converted, "method": method}, "here")
    assert config.scenario.get("clients") == {"rows": 3, "parties": 2}.get(split)


def test_what_is_not_a_scenario_of_a_known_split_stays_as_it_is() -> None:
    damaged: tuple[dict[str, Any], ...] = (
        {},
        {"scenario": 3},
        {"data": {}, "scenario": {"split": "diagonal"}},
    )
    for values in damaged:
        assert convert_config(dict(values), 2, "here") == values


@pytest.mark.parametrize(
    ("mode", "protocol", "replacement"),
    [
        ("columns", "P1", "atoll.reproduce.faults.vleto:label_oracle"),
        ("columns", "P2", None),
        ("classes", "P1", None),
    ],
)
def test_an_old_label_oracle_is_a_replacement_where_it_read_labels(
    mode: str, protocol: str, replacement: str | None
) -> None:
    method = {"name": "vleto", "protocol": protocol}
    values = {"scenario": {"mode": mode}, "method": {**method, "fil_eval": "label_oracle"}}
    converted = convert_config(values, 2, "config.toml")
    assert converted["method"] == method
    assert converted.get("replace") == replacement
