"""Help texts: names of values in capitals, whole sentences. Needs no torch.

typer shows types of Python (`--set <list[str]>`, `{RUN...}...`) and cuts the help of commands.
"""

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["readable"]

VALUES = {"path": "PATH", "int": "NUMBER", "int range": "NUMBER", "float": "NUMBER"}
TYPE = re.compile(r" <([^<>]*)>")


class PlainCommand(TyperCommand):
    """A command whose usage line and tables name values in capitals."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] CONFIG [FILE]`: optional arguments in brackets, repeated ones with dots."""
        pieces = ["[OPTIONS]"]
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                name = _name(parameter) + ("..." if parameter.nargs == -1 else "")
                pieces.append(name if parameter.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options."""
        arguments, options = [], []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            head, text = record
            if parameter.param_type_name == "argument":
                arguments.append((_name(parameter), text.removesuffix("  [required]")))
            else:
                options.append((TYPE.sub(lambda m: f" {VALUES.get(m[1], 'TEXT')}", head), text))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class PlainGroup(TyperGroup):
    """A group that shows the whole help of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.help or "") for name, command in self.commands.items()]
            )


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def readable(app: typer.Typer) -> None:
    """Give all commands of an app, those of its groups too, readable help."""
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        group.cls = PlainGroup
        if group.typer_instance is not None:
            readable(group.typer_instance)
