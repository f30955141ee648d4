"""A new method is one file: the lesson of docs/method.md, saved as the lesson says."""

import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import atoll
from atoll import cli, methods

ROOT = Path(__file__).parents[2]
NAME = "fedmedian"


def lesson() -> str:
    """The first block of Python in the lesson that is a whole method."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "method.md").read_text(), re.S)
    return str(next(block for block in blocks if "class Server" in block))


def conformance() -> ModuleType:
    path = ROOT / "tests" / "conformance" / "test_methods.py"
    spec = importlib.util.spec_from_file_location("conformance_of_a_new_method", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SUITE = conformance()


def checks() -> Iterator[Any]:
    """Every check of the suite that takes a method's name, with each set of its parameters."""
    for title, check in inspect.getmembers(SUITE, inspect.isfunction):
        if title.startswith("test_") and "name" in inspect.signature(check).parameters:
            marks = [m for m in getattr(check, "pytestmark", []) if m.args and m.args[0] != "name"]
            for values in itertools.product(*(mark.args[1] for mark in marks)):
                given = dict(zip((mark.args[0] for mark in marks), values, strict=True))
                yield pytest.param(check, given, id="-".join([title, *map(str, values)]))


@pytest.fixture(autouse=True)
def new_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(lesson())
    (tmp_path / f"{NAME}.md").write_text("`rate` and `batch`")
    monkeypatch.setattr(SUITE, "DOCS", tmp_path)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield folder
    sys.modules.pop(f"atoll.methods.{NAME}", None)
    vars(methods).pop(NAME, None)


def test_it_is_found_by_its_name() -> None:
    assert NAME in methods.names()
    assert methods.load(NAME).options.__name__ == "Options"


def test_it_is_short() -> None:
    assert len(lesson().splitlines()) < 200


def test_it_runs() -> None:
    run = atoll.run(NAME, data="digits-table", clients=3, rounds=5, widths=[32], seed=0)
    assert run.accuracy > 0.5
    assert run.table().startswith("fedmedian on digits-table")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["show", NAME], "size of a local step"), (["list", "methods"], "FedMedian: clients train")],
)
def test_the_command_knows_it(
    arguments: list[str],
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    cli.main()
    assert word in capsys.readouterr().out


@pytest.mark.parametrize(("check", "given"), list(checks()))
def test_the_conformance_suite_takes_it_up(
    check: Callable[..., None], given: dict[str, Any], tmp_path: Path
) -> None:
    if "tmp_path" in inspect.signature(check).parameters:
        given = {**given, "tmp_path": tmp_path / "run"}
    check(name=NAME, **given)


def test_the_conformance_suite_is_all_there() -> None:
    assert len(list(checks())) >= 11
