"""`atoll new`: what it refuses, and a project whose README runs as printed."""

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from atoll import cli
from atoll.core import VERSION


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def printed_commands(page: Path) -> list[list[str]]:
    """The lines of the blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in "".join(blocks).splitlines()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mine", "a method cannot be called 'Mine'"),
        ("../mine", "a method cannot be called"),
        ("class", "a method cannot be called 'class'"),
        ("json", "no name of Python's own"),
        ("fedavg", "there is a method 'fedavg' already"),
        ("there", "the folder is there already"),
    ],
)
def test_a_method_that_cannot_be_written(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there").mkdir()
    assert atoll(monkeypatch, "new", "method", name) == 2
    assert words in capsys.readouterr().err
    assert list(Path("there").iterdir()) == []


def test_a_method_is_a_small_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "new", "method", "my-mean", "-o", "code") == 0
    assert capsys.readouterr().out == "wrote code; next: cd code, then see README.md\n"
    names = {str(path.relative_to("code")) for path in Path("code").rglob("*") if path.is_file()}
    assert names == {"pyproject.toml", "README.md", "my_mean.py", "tests/test_my_mean.py"}
    project = tomllib.loads(Path("code/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["atoll.methods"] == {"my-mean": "my_mean:METHOD"}
    assert project["dependencies"] == [f"atoll>={VERSION}"]
    assert "$" not in "".join(Path("code", name).read_text() for name in names)
    assert atoll(monkeypatch, "show", "./code/my_mean.py:METHOD") == 0
    assert "My mean: clients train" in capsys.readouterr().out


def test_a_project_runs_as_its_readme_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "new", "project", "alps") == 0
    assert capsys.readouterr().out == "wrote alps; next: cd alps, then atoll run run.toml\n"
    monkeypatch.chdir("alps")
    commands = printed_commands(Path("README.md"))
    assert len(commands) == 5
    for command in commands:
        if "network" in command and importlib.util.find_spec("nvflare") is None:
            continue
        assert atoll(monkeypatch, *command[1:]) == 0, command
    assert Path("report.html").exists()
    if importlib.util.find_spec("nvflare"):
        drafted = tomllib.loads(Path("kits/basel/site.toml").read_text())["contract"]
        assert tomllib.loads(Path("site.toml").read_text())["contract"] == drafted
    assert atoll(monkeypatch, "new", "project", "no dots.") == 2
