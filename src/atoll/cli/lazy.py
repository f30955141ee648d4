"""A group of commands whose modules are imported when a command is called. Needs no torch.

Help and completion of the command line need names and one line for each command, and must not
wait for torch.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from atoll.cli.completion import sketch
from atoll.cli.help import readable

__all__ = ["COMMANDS", "LazyGroup", "Listed"]


class Listed(NamedTuple):
    """One command in the help of the group."""

    module: str  # in atoll.cli; its `register` adds the command to an app
    help: str


COMMANDS: Mapping[str, Mapping[str, Listed]] = {
    "Train": {
        "run": Listed("run", "Run a method and print its results."),
        "sweep": Listed("run", "Run every combination of some values, as one computation."),
        "reproduce": Listed("run", "Reproduce a paper's tables and print ours beside theirs."),
        "bench": Listed("bench", "Compare methods against forgetting."),
    },
    "Results": {
        "answer": Listed("results", "Decide whether joining helps, site by site."),
        "report": Listed("results", "Write one HTML page about one or several runs."),
        "watch": Listed("results", "Serve a live report of running runs to this machine alone."),
        "predict": Listed("results", "Predict rows, images or texts with the model of one site."),
        "export": Listed("results", "Write one site's model as safetensors with a card in JSON."),
    },
    "Data and options": {
        "init": Listed("data", "Write a commented config for your own data."),
        "inspect": Listed("data", "Show what each site holds, before anything trains."),
        "align": Listed("data", "Find the rows that several tables share, privately."),
        "list": Listed("data", "List methods, data sets, splits, presets or runs."),
        "show": Listed("data", "Show the options of a preset or method."),
        "new": Listed("new", "Write a package with a method, or a project."),
        "doctor": Listed("data", "Check the installation and suggest fixes."),
    },
    "Between sites": {
        "network": Listed("network", "Create and maintain the kits of a federation."),
        "contract": Listed("network", "Explain the contract of a site."),
        "serve": Listed("network", "Coordinate a run between sites that have joined."),
        "join": Listed("network", "Take part with this site's data until stopped with Ctrl-C."),
        "egress": Listed("network", "Show what has left a site, after verifying its log."),
        "rehearse": Listed("network", "Try a federation on this machine, with injected faults."),
    },
}


@contextmanager
def _sign_of_life() -> Iterator[None]:
    """A word on a terminal while torch is imported, which takes seconds."""
    quiet = {"-q", "--quiet", "--json"} & {*sys.argv} or "_ATOLL_COMPLETE" in os.environ
    shown = sys.stderr.isatty() and not quiet
    if shown:
        sys.stderr.write("starting ...")
        sys.stderr.flush()
    yield
    if shown:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


class LazyGroup(TyperGroup):
    """Has a placeholder for each command, and imports its module when the command is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for section in COMMANDS.values():
            for name, listed in section.items():
                self.add_command(TyperCommand(name=name, help=listed.help))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments call, imported now."""
        names = [name for section in COMMANDS.values() for name in section]
        if ctx.resilient_parsing and args and args[0] in names:  # completion
            outer: Any = typer.main.get_command(sketch(args[0]))
            command = getattr(outer, "commands", {}).get(args[0], outer)  # a group is in the outer
            self.add_command(command, args[0])
            return super().resolve_command(ctx, args)
        for section in COMMANDS.values():
            if args and args[0] in section:
                self._import(section[args[0]].module)
        return super().resolve_command(ctx, args)

    def _import(self, module: str) -> None:
        """Replace the placeholders of a module's commands."""
        app = typer.Typer(context_settings=dict(self.context_settings), rich_markup_mode=None)
        with _sign_of_life():
            import_module(f"atoll.cli.{module}").register(app)
        readable(app)
        group: Any = typer.main.get_command(app)
        for name, command in group.commands.items():
            self.add_command(command, name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by section."""
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, listed.help) for name, listed in section.items()])
