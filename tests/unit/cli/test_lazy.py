"""The command imports what a command needs when it is called, and not before."""

import subprocess
import sys
from importlib import import_module

import pytest
import typer
from typer.core import TyperGroup

from atoll.cli.lazy import COMMANDS

HEAVY = {"torch", "pyarrow", "matplotlib", "sklearn", "scipy", "numpy", "nvflare"}


def imported_by(code: str) -> set[str]:
    listing = f"{code}\nimport sys; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in ended.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import atoll.cli",
        "from atoll.cli import app; app(['--help'], standalone_mode=False)",
        "from atoll.cli import app; app(['--version'], standalone_mode=False)",
    ],
)
def test_help_waits_for_no_heavy_import(code: str) -> None:
    assert not HEAVY & imported_by(code)


def test_completion_of_command_names_waits_for_no_heavy_import() -> None:
    code = (
        "import os; os.environ |= {'_ATOLL_COMPLETE': 'complete_bash', 'COMP_WORDS': 'atoll re',"
        " 'COMP_CWORD': '1'}\n"
        "from atoll.cli import app\n"
        "try: app(prog_name='atoll')\n"
        "except SystemExit: print()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["reproduce", "report", "rehearse"]
    assert not HEAVY & imported_by(code)


def registered(module: str) -> dict[str, str]:
    """The commands that a module adds, each with its help."""
    app = typer.Typer()
    import_module(f"atoll.cli.{module}").register(app)
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {name: command.help or "" for name, command in group.commands.items()}


def test_the_table_lists_every_command_of_every_module() -> None:
    listed = {n: one.module for section in COMMANDS.values() for n, one in section.items()}
    for module in sorted({*listed.values()}):
        names = {name for name, owner in listed.items() if owner == module}
        assert names == registered(module).keys()


def test_the_line_in_the_table_begins_as_the_help_of_the_command() -> None:
    for section in COMMANDS.values():
        for name, listed in section.items():
            start = listed.help.removesuffix(".").split(",")[0]
            assert registered(listed.module)[name].startswith(start), name
