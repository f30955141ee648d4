"""TAB completes configs, run folders, and the keys of --set with their values, without torch."""

import os
import resource
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from atoll import data, methods
from atoll.cli.completion import SKETCHES
from atoll.cli.lazy import COMMANDS
from atoll.cli.option_values import configs, option_values
from atoll.core.options import describe
from atoll.data import splits
from atoll.reproduce.papers import PAPERS
from atoll.runs.config import EngineOptions, RunConfig, presets

HEAVY = {"torch", "pyarrow", "matplotlib", "sklearn", "scipy", "numpy", "nvflare"}
CODE = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from atoll.cli import main
sys.argv = ["atoll"]
main()
"""


def complete(line: str, where: Path, shell: str = "bash") -> list[str]:
    """What TAB offers at the end of a line; nothing heavy may be imported for it."""
    words = line.replace("=", " = ").split(" ") if shell == "bash" else line.split(" ")
    words = [word for word in words[:-1] if word] + words[-1:]
    environment = {
        "_ATOLL_COMPLETE": f"complete_{shell}", "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    ended = subprocess.run(
        [sys.executable, "-c", CODE], cwd=where, env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent < 1.0  # 0.15 s on an idle machine; torch takes 2
    assert not HEAVY & {name.partition(".")[0] for name in ended.stderr.split()}
    return ended.stdout.split()


def make_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()


def test_configs_are_presets_methods_and_files(tmp_path: Path) -> None:
    (tmp_path / "fed-own.toml").touch()
    assert complete("atoll run fed", tmp_path) == [
        "fed-own.toml", "fedavg", "fedmatch", "fedmd", "fedseit",
    ]  # fmt: skip
    assert {*configs()} >= {*presets(), *methods.names()}


def test_run_folders(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "demo-1")
    make_run(tmp_path / "runs" / "chfl-1" / "seed-0")
    for command in ("report", "answer", "export", "predict", "watch"):
        assert complete(f"atoll {command} ", tmp_path) == ["runs/chfl-1", "runs/demo-1"]
    assert complete("atoll run demo --resume --out runs/d", tmp_path) == ["runs/demo-1"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("atoll run fedavg --set roun", ["rounds="]),
        ("atoll run chfl --set mu", ["mu="]),
        ("atoll run fedavg --set engine.mo", ["engine.mode="]),
        ("atoll run fedavg --set mode=", ["auto", "loop", "stacked", "captured"]),
        ("atoll run fedavg --set mode=lo", ["loop"]),
        ("atoll run fedavg --set rate=0.1 --set optim", ["optimiser="]),
        ("atoll run fedavg --set method.optimiser=", ["adam", "sgd"]),
        ("atoll run fedavg --set tf32=", ["false", "true"]),
        ("atoll run fedavg --set split=col", ["columns"]),
        ("atoll run fedavg --set data=digits-t", ["digits-table"]),
        ("atoll run demo --device c", ["cpu", "cuda"]),
        ("atoll list p", ["presets"]),
        ("atoll run demo --res", ["--resume"]),
    ],
)
def test_keys_values_and_options(line: str, words: list[str], tmp_path: Path) -> None:
    assert complete(line, tmp_path) == words


def test_other_shells_take_whole_words(tmp_path: Path) -> None:
    assert complete("atoll run fedavg --set mode=lo", tmp_path, "fish") == ["mode=loop"]
    assert "mode=loop" in "".join(complete("atoll run fedavg --set mode=lo", tmp_path, "zsh"))


def test_the_source_has_the_options_that_a_run_has() -> None:
    known = option_values("chfl")
    for option in describe(methods.load("chfl").options):
        assert f"method.{option.name}" in known
    for option in describe(EngineOptions):
        assert f"engine.{option.name}" in known
    for field in fields(RunConfig):
        assert (
            field.name in known
            or field.name in ("scenario", "model", "public", "engine")
            or any(key.startswith(f"{field.name}.") for key in known)
        )
    assert {*known["data"]} == {*data.names()}
    assert {*known["split"]} == {*splits.names()}


def commands_of(group: TyperGroup, path: str = "") -> dict[str, Any]:
    """The commands of a group by their paths, such as `network init`."""
    paths: dict[str, Any] = {}
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            paths |= commands_of(command, f"{path}{name} ")
        else:
            paths[path + name] = command
    return paths


@cache
def commands() -> dict[str, Any]:
    """Every command of atoll."""
    app = typer.Typer()
    for module in {listed.module for section in COMMANDS.values() for listed in section.values()}:
        import_module(f"atoll.cli.{module}").register(app)
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return commands_of(group)


def test_every_command_has_a_sketch() -> None:
    assert SKETCHES.keys() == commands().keys()


@pytest.mark.parametrize("name", SKETCHES)
def test_a_sketch_has_the_options_of_its_command(name: str) -> None:
    values: list[str] = []
    flags: list[str] = []
    arguments = []
    for parameter in commands()[name].params:
        if parameter.param_type_name == "argument":
            arguments.append(parameter.nargs == -1)
        else:
            names = [*parameter.opts, *parameter.secondary_opts]
            (flags if parameter.is_flag else values).extend(names)
    assert sorted(values) == sorted(SKETCHES[name].options.split())
    assert sorted(flags) == sorted(SKETCHES[name].flags.split())
    assert arguments == [kind.endswith("*") for kind in SKETCHES[name].arguments.split()]


@pytest.mark.parametrize("name", sorted({name.partition(" ")[0] for name in SKETCHES}))
def test_every_command_completes_its_options(name: str, tmp_path: Path) -> None:
    groups = {path.partition(" ")[0]: path for path in SKETCHES if " " in path}
    words = complete(f"atoll {groups.get(name, name)} --", tmp_path)
    assert "--help" in words


def test_groups_and_papers(tmp_path: Path) -> None:
    assert complete("atoll new ", tmp_path) == ["method", "project"]
    assert complete("atoll network re", tmp_path) == ["request", "renew"]
    assert complete("atoll sweep fedavg --axis optim", tmp_path) == ["optimiser="]
    assert complete("atoll reproduce ", tmp_path) == sorted(PAPERS)
