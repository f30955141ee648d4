"""A new method is one file: those of docs/method.md, saved as the page says."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

import atoll
from atoll import cli, methods
from atoll.compute import autotune
from atoll.core.record import Score, read_events
from atoll.engines.local import local_engine
from atoll.runs.execute import execute
from atoll.testing import Case, Check, checks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\w+)\.py -->\n```python\n(.*?)```", PAGE, re.DOTALL))
MOST_CONCEPTS = 9

every_file = pytest.mark.parametrize("name", FILES)


@pytest.fixture(autouse=True)
def new_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both files in a folder of methods."""
    folder = tmp_path / "methods"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(f"atoll.methods.{name}", None)
        vars(methods).pop(name, None)


def test_the_page_has_two_methods() -> None:
    assert list(FILES) == ["fedmedian", "scaffold"]


@every_file
def test_it_is_found_by_its_name(name: str) -> None:
    assert name in methods.names()
    assert methods.load(name).options.__name__ == "Options"


@every_file
def test_it_is_short(name: str) -> None:
    assert len(FILES[name].splitlines()) < 150


@every_file
def test_it_runs(name: str) -> None:
    run = atoll.run(name, data="digits-table", clients=3, rounds=5, widths=[32], seed=0)
    assert run.accuracy > 0.5
    assert run.table().startswith(f"{name} on digits-table")


@every_file
@pytest.mark.parametrize(
    ("arguments", "words"), [(["show"], "learning rate"), (["list", "methods"], "")]
)
def test_the_command_knows_it(
    name: str,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["atoll", *arguments, name] if words else ["atoll", *arguments]
    monkeypatch.setattr(sys, "argv", given)
    cli.main()
    first = FILES[name].splitlines()[0].removeprefix('"""').partition(":")[0]
    assert (words or first) in capsys.readouterr().out


@every_file
@pytest.mark.parametrize("mode", ["auto", "stacked"])
def test_a_stack_gives_the_result_of_the_loop(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-10 in double precision, and all training is stacked: `auto` takes what is proved."""
    monkeypatch.setattr(autotune, "GAIN", float("inf"))  # however slow it is
    monkeypatch.setattr(autotune, "_trial", lambda members: 0)
    how: dict[str, Any] = {"dtype": "float64", "clients": 4, "rounds": 5}
    how |= {"scenario.rows": "dirichlet", "scenario.alpha": 1.0}
    for way in ("loop", mode):
        config = Case(name).config(**how, **{"engine.mode": way})
        execute(config, tmp_path / way, local_engine)
    wanted, tensors = (
        load((tmp_path / way / "checkpoint.safetensors").read_bytes()) for way in ("loop", mode)
    )
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(tensors[key], tensor, rtol=1e-10, atol=1e-10)
    one, other = (read_events(tmp_path / way) for way in ("loop", mode))
    assert [e for e in one if isinstance(e, Score)] == [e for e in other if isinstance(e, Score)]
    choices = json.loads((tmp_path / mode / "engine.json").read_text()).values()
    way = "mapped" if name == "scaffold" else "batched"  # sums over all entries of a weight
    assert [(choice["mode"], choice["way"]) for choice in choices] == [("stacked", way)]


@every_file
@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_the_conformance_suite_takes_it_up(name: str, check: Check, tmp_path: Path) -> None:
    check(name, tmp_path / "run")


def test_nine_concepts_are_enough() -> None:
    """The table lists them, and the page explains every class of atoll that the files import."""
    table = PAGE.partition("## Nine concepts")[2].partition("## ")[0]
    concepts = re.findall(r"^\| \*\*(\w+)\*\* \|", table, re.MULTILINE)
    assert len(concepts) == MOST_CONCEPTS
    imports = [
        node
        for text in FILES.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("atoll")
    ]
    classes = {alias.name for node in imports for alias in node.names if alias.name[0].isupper()}
    data = {"Rows", "Score", "Working", "Architecture", "Clients", "AtLeastOne"}  # types of values
    assert [name for name in sorted(classes - data) if name not in table] == []


def test_scaffold_moves_its_control_variates_as_the_paper_states(tmp_path: Path) -> None:
    """After a round, c is the mean of the c_i, and no c_i is zero."""
    config = Case("scaffold").config(rounds=1, dtype="float64", clients=2)
    execute(config, tmp_path / "run", local_engine)
    tensors = load((tmp_path / "run" / "checkpoint.safetensors").read_bytes())
    for key, control in tensors.items():
        if key.startswith("server/control/"):
            name = key.removeprefix("server/control/")
            own = [tensors[f"client/site-{i}/{name}"] for i in range(2)]
            assert own[0].abs().max() > 0
            torch.testing.assert_close(control, (own[0] + own[1]) / 2)


def test_control_variates_are_not_taken_for_weights_where_a_round_may_miss_clients() -> None:
    """A state of a method with `quorum` must be a mean of the answers: its weights alone."""
    text = FILES["scaffold"]
    assert text.count("METHOD = Method(Options, Server, Client, ") == 1
    Path("absent.py").write_text(text.replace("Server, Client, ", "Server, Client, quorum=True, "))
    small: dict[str, Any] = {"data": "wine", "clients": 3, "widths": [16], "answer": False}
    run = atoll.run("./absent.py:METHOD", rounds=2, rate=0.001, **small)
    assert len(run.scores) == 3
