"""What a remedy names exists: commands and their options, options of configs, extras, pages."""

import ast
import dataclasses
import functools
import inspect
import re
import tomllib
from importlib import import_module
from typing import Any

import typer

from atoll import methods
from atoll.cli.lazy import COMMANDS
from atoll.core.influence import RobustOptions
from atoll.data import sources, splits
from atoll.data.own import images, parties, profiles, texts
from atoll.data.own.harmonise import DateRule, Unit
from atoll.learning.models import ModelOptions
from atoll.runs.config import EngineOptions, ReportOptions, RunConfig
from tests.unit.test_errors_page import MAKERS, ROOT, words

PROSE = {"detects", "reads"}  # words behind "atoll" that are no commands
FILES = {"sites", "one_of", "least", "most"}  # entries of a project's file, and of a contract
SECTIONS = (
    RunConfig, RobustOptions, ModelOptions, EngineOptions, ReportOptions, profiles.TableOptions,
    parties.PartyOptions, texts.TextOptions, DateRule, Unit,
)  # fmt: skip


@functools.cache
def remedies() -> tuple[tuple[str, str], ...]:
    """Every text that an error has behind its message, with its place in the source."""
    texts_of = []
    for path in sorted((ROOT / "src" / "atoll").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for scope in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if name not in {*MAKERS, "complain"}:
                    continue
                place = f"{path.relative_to(ROOT)}:{call.lineno}"
                texts_of += [(place, text) for one in call.args[1:] for text in words(one, scope)]
    return tuple(dict.fromkeys(texts_of))


@functools.cache
def commands() -> dict[str, set[str]]:
    """The options of each command; those of a group of commands by both words."""
    app = typer.Typer()
    for module in sorted({listed.module for part in COMMANDS.values() for listed in part.values()}):
        import_module(f"atoll.cli.{module}").register(app)
    every: dict[str, set[str]] = {}
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        every[name] = {flag for one in command.params for flag in [*one.opts, *one.secondary_opts]}
        for second, one in inner.items():
            every[f"{name} {second}"] = {flag for param in one.params for flag in param.opts}
    return every


def options() -> set[str]:
    """The names of all options of configs and of own files."""
    kinds = [*SECTIONS, *(methods.load(name).options for name in methods.names())]
    kinds += [splits.load(name).options for name in splits.names()]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    functions = [getattr(module, name) for module in sources.modules() for name in module.__all__]
    for function in (*functions, images.image_files):
        names |= {*inspect.signature(function).parameters}
    return names | {"name", "split", *FILES}


def named_commands(text: str) -> list[str]:
    """The commands that a text names, as `network init`."""
    named = []
    for first, second in re.findall(r"\batoll ([a-z]+)(?: ([a-z]+))?", text):
        both = f"{first} {second}"
        grouped = any(name.startswith(f"{first} ") for name in commands())
        named.append(both if grouped else first)
    return [name for name in named if name not in PROSE]


def test_remedies_name_commands_that_exist() -> None:
    wrong = [
        f"{place}: atoll {name}"
        for place, text in remedies()
        for name in named_commands(text)
        if name not in commands()
    ]
    assert wrong == []


def test_remedies_name_options_that_the_command_has() -> None:
    wrong = []
    for place, text in remedies():
        if text.startswith("curl"):
            continue
        for part in re.split(r", or |; |, then ", text):
            known = [commands()[name] for name in named_commands(part)] or [*commands().values()]
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", part):
                if not any(flag in {*flags, "--help"} for flags in known):
                    wrong.append(f"{place}: {flag}")
    assert wrong == []


def test_remedies_name_options_of_configs_that_exist() -> None:
    known = options()
    wrong = [
        f"{place}: {name}"
        for place, text in remedies()
        for name in re.findall(r"(?<![\w.'\"…])(?:[a-z]+\.)?([a-z_]+) = ", text)
        if name not in known
    ]
    assert wrong == []


def test_remedies_name_extras_and_pages_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for place, text in remedies():
        for extra in re.findall(r"atoll\[(\w+)\]", text):
            assert extra in project["optional-dependencies"], place
        for page in re.findall(r"docs/[\w/-]+\.md", text):
            assert (ROOT / page).exists(), place


def test_there_is_something_to_check() -> None:
    named = [name for _, text in remedies() for name in named_commands(text)]
    assert {"align", "init", "join", "network init", "list"} <= {*named}
    flags = [flag for _, text in remedies() for flag in re.findall(r"--[a-z-]+", text)]
    assert {"--resume", "--out", "--assume-aligned", "--accept-log"} <= {*flags}
    assert len(remedies()) > 400
