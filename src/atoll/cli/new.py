"""The command `new`: writes a small package with a method, or a folder for a project."""

import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from atoll import methods
from atoll.cli.console import out
from atoll.core import VERSION
from atoll.core.errors import UserError
from atoll.core.record import disk_errors
from atoll.engines.network.drafts import drafted_file
from atoll.runs.config import read, resolve

__all__ = ["register"]

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
Folder = Annotated[Path | None, typer.Option("-o", "--out", help="the folder to write")]


def method_command(
    name: Annotated[str, typer.Argument(help="lower-case letters, digits and -")],
    to: Folder = None,
) -> None:
    """Write a package with one method, its entry point and its conformance test."""
    module = name.replace("-", "_")
    if not NAME.fullmatch(name) or keyword.iskeyword(module) or module in sys.stdlib_module_names:
        remedy = "use lower-case letters, digits and -, and no name of Python's own"
        raise UserError(f"a method cannot be called '{name}'", "atoll new method", remedy)
    if methods.exists(name):
        what = f"there is a method '{name}' already"
        raise UserError(what, "atoll new method", "choose another name; atoll list methods")
    home = to or Path(name)
    title = name.replace("-", " ").capitalize()
    _write(home, "method", name=name, module=module, title=title, version=VERSION)
    out.print(f"wrote {home}; next: cd {home}, then see README.md", soft_wrap=True)


def project_command(
    name: Annotated[str, typer.Argument(help="the name, and the folder to write")] = "federation",
    to: Folder = None,
) -> None:
    """Write a config, the file of a site, the file of a federation and a README."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,40}", name):
        remedy = "use a letter, then letters, digits and -"
        raise UserError(f"a project cannot be called '{name}'", "atoll new project", remedy)
    home = to or Path(name)
    _write(home, "project", name=name)
    config = str(home / "run.toml")
    with disk_errors(home):
        (home / "site.toml").write_text(drafted_file(resolve(read(config), config)))
    out.print(f"wrote {home}; next: cd {home}, then atoll run run.toml", soft_wrap=True)


def _write(home: Path, kind: str, **values: str) -> None:
    """Fill the templates of a kind into a new folder."""
    if home.exists():
        raise UserError("the folder is there already", str(home), "choose another with -o")
    root = Path(str(files("atoll") / "templates" / kind))
    with disk_errors(home):
        for path in sorted(root.rglob("*.template")):
            place = str(path.relative_to(root)).removesuffix(".template")
            target = home / place.replace("module", values.get("module", ""))
            target.parent.mkdir(parents=True, exist_ok=True)
            text = Template(path.read_text(encoding="utf-8")).substitute(values)
            target.write_text(text, encoding="utf-8")


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(
        help="Write a package with a method, or a project.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("method")(method_command)
    group.command("project")(project_command)
    app.add_typer(group, name="new")
