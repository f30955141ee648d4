"""The help of each command: values in capitals, no types of Python, no cut sentence."""

import re

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.cli.lazy import COMMANDS

NAMES = [name for section in COMMANDS.values() for name in section]
INSIDE = [("network", "init"), ("contract", "explain"), ("new", "method"), ("bench", "fcl")]


def help_of(*words: str) -> str:
    ended = CliRunner().invoke(app, [*words, "--help"], prog_name="atoll", terminal_width=80)
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.parametrize("words", [*((name,) for name in NAMES), *INSIDE], ids=" ".join)
def test_no_help_shows_a_type_of_python(words: tuple[str, ...]) -> None:
    text = help_of(*words)
    assert not re.search(r"[<{}]|list\[", text)
    assert not re.search(r"\w\.\.\.$", text.partition("\n")[2], re.M)  # a sentence is whole


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("run", "Usage: atoll run [OPTIONS] CONFIG"),
        ("report", "Usage: atoll report [OPTIONS] RUN..."),
        ("predict", "Usage: atoll predict [OPTIONS] RUN [FILE]"),
        ("serve", "Usage: atoll serve [OPTIONS] KIT RUN..."),
        ("run", "  --set KEY=VALUE "),
        ("run", "  --seeds TEXT "),
        ("sweep", "  --axis KEY=VALUES "),
        ("run", "  --out PATH "),
        ("run", "  CONFIG  a preset, a method, or a .toml file\n"),
        ("network", "has none; other kits"),
    ],
)
def test_values_have_names(name: str, line: str) -> None:
    assert line in help_of(name)
