"""The list of measurements for a lent GPU: commands that exist, in limited time, continued."""

import importlib.util
import json
import shlex
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.reproduce import chfl, fedseit, vleto

ROOT = Path(__file__).parents[2]
LEDGERS = {"vleto": vleto, "chfl": chfl, "fedseit": fedseit}


def loaded(name: str) -> types.ModuleType:
    """A script of bench, as a module."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gpu = loaded("gpu")
every_measurement = pytest.mark.parametrize("one", gpu.MEASUREMENTS, ids=lambda one: one.name)


def test_names_are_unique() -> None:
    names = [one.name for one in gpu.MEASUREMENTS]
    assert len(set(names)) == len(names)


@every_measurement
def test_every_command_is_one_of_this_version(one: Any, tmp_path: Path) -> None:
    words = one.command(tmp_path, tmp_path / "before", "cpu", 3.0)[1:]
    assert not [word for word in words if "{" in word.replace("{to}", "")]
    if words[:2] == ["-m", "atoll"]:
        flags = [word for word in words if word.startswith("--")]
        places = [number for number, word in enumerate(words) if word.startswith("--")]
        shown = CliRunner().invoke(app, [*words[2 : min(places)], "--help"])
        assert shown.exit_code == 0
        assert all(flag in shown.output for flag in flags)
    elif words[:2] != ["-m", "pytest"]:
        source = (ROOT / words[0]).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


@every_measurement
def test_cells_are_settings_of_their_paper(one: Any) -> None:
    words = list(one.words)
    if "--only" not in words:
        return
    paper = LEDGERS[words[words.index("reproduce") + 1]]
    names = {one.name for one in (*paper.SETTINGS, *getattr(paper, "STUDIES", ()))}
    assert set(words[words.index("--only") + 1].split("; ")) <= names


def test_it_names_no_path_of_a_machine() -> None:
    words = [word for one in gpu.MEASUREMENTS for word in one.words]
    assert not [word for word in words if word.startswith(("/", "~"))]


def fake(name: str, code: str, **values: object) -> Any:
    return gpu.Measurement(name, 0.5, ("-c", code), **values)


Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def call(measurements: list[Any], *words: str) -> list[str]:
        monkeypatch.setattr(gpu, "MEASUREMENTS", tuple(measurements))
        return list(gpu.measure(gpu.parser().parse_args(["--to", str(tmp_path / "to"), *words])))

    return call


def test_what_has_a_result_is_skipped_and_what_failed_is_tried_last(
    run: Run, tmp_path: Path
) -> None:
    good, bad = fake("good", "print(7)"), fake("bad", "raise SystemExit(3)")
    first = run([bad, good])
    assert [line.split(" after")[0] for line in first] == ["bad: failed with code 3", "good: ended"]
    assert (tmp_path / "to" / "good.txt").read_text() == "7\n"
    assert json.loads((tmp_path / "to" / "good.json").read_text())["command"] == ["-c", "print(7)"]
    fresh = fake("fresh", "pass")
    again = run([bad, good, fresh])
    assert [line.split(":")[0] for line in again] == ["fresh", "bad"]


def test_what_says_that_it_goes_on_has_no_result_yet(run: Run) -> None:
    cut = fake("cut", f"print({gpu.AGAIN!r})", goes_on=True)
    assert run([cut])[0].startswith("cut: cut")
    assert run([cut])[0].startswith("cut: cut")


def test_a_measurement_that_does_not_fit_is_not_started(run: Run, tmp_path: Path) -> None:
    (line,) = run([fake("long", "pass")], "--minutes", "0.5")
    assert "not started" in line
    assert not (tmp_path / "to" / "long.txt").exists()


def test_a_command_that_takes_too_long_is_cut(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert gpu.ended(words, tmp_path / "log", 0.005, []) is None


def test_wheels_that_are_missing_are_unpacked_with_their_programs(tmp_path: Path) -> None:
    for name in ("absent_thing-1.0-py3-none-any.whl", "numpy-9.9-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            entry = zipfile.ZipInfo(f"{name.split('-')[0]}/run")
            entry.external_attr = 0o755 << 16
            wheel.writestr(entry, "#!/bin/sh\n")
    site = gpu.unpacked(tmp_path, tmp_path / "site")
    assert (site / "absent_thing" / "run").stat().st_mode & 0o100
    assert not (site / "numpy").exists()  # the machine has one


def test_stored_runs_of_two_versions_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interleaved, calls = loaded("interleaved"), list[str]()

    def measured(tree: Path, *_: object) -> dict[str, float]:
        calls.append(tree.name)
        return {"seconds": 2.0 if tree.name == "before" else 3.0}

    monkeypatch.setattr(interleaved, "measure", measured)
    places = [str(tmp_path / "before"), str(tmp_path / "after")]
    for repeats in ("1", "2", "2"):
        words = ["interleaved.py", *places, "--repeats", repeats]
        monkeypatch.setattr(sys, "argv", [*words, "--stored", str(tmp_path / "runs.jsonl")])
        interleaved.main()
    assert calls == ["before", "after", "after", "before"]
    assert "ratio 1.500" in capsys.readouterr().out


def test_the_list_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", shlex.split("gpu.py --list"))
        gpu.main()
    shown = capsys.readouterr().out
    assert all(one.name in shown for one in gpu.MEASUREMENTS)
