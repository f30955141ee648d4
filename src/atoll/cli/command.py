"""The command: registers its parts, runs, and converts every error to three lines."""

import errno
import os
import re
import sys
from itertools import pairwise
from typing import Annotated

import typer

from atoll.cli.completion import joined_words
from atoll.cli.console import complain, out, traceback_file
from atoll.cli.lazy import LazyGroup
from atoll.cli.option_values import configs, option_values
from atoll.core import VERSION
from atoll.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_OUR_FAULT,
    EXIT_SITE_FAILED,
    EXIT_USER,
    BadMessageError,
    ClientFailedError,
    UserError,
    memory_error,
    out_of_memory,
)

__all__ = ["app", "main"]

app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # its help shows flags as options that take a bool
    pretty_exceptions_enable=False,
)


def _print_version(flag: bool) -> None:
    if flag:
        out.print(f"atoll {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Federated continual learning: sites learn together, keep their data, and do not forget."""


TAKES_SET = ("run", "sweep", "inspect", "reproduce")  # commands with --set
# errors of printing; other system errors without a file have other causes
UNWRITABLE = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)


def main() -> None:
    """Run the command; every error ends in at most three lines and an exit code."""
    try:
        with joined_words():
            code = app(standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # Ctrl-C while no run was active
            complain("interrupted", "atoll", "start it again", EXIT_INTERRUPTED)
        sys.stdout.flush()
    except UserError as error:
        complain(error.what, error.where, error.remedy, error.exit_code)
    except (ClientFailedError, BadMessageError) as error:
        complain(str(error), _notes(error), _remedy(error), EXIT_SITE_FAILED)
    except Exception as error:
        _usage(error)
        _unwritable(error)
        if out_of_memory(error):
            short = memory_error(_notes(error) or "atoll")
            complain(short.what, short.where, short.remedy, short.exit_code)
        what = f"a fault of atoll's own: {type(error).__name__}"
        where = _notes(error) or traceback_file(error, None)
        complain(what, where, "please report it with that file", EXIT_OUR_FAULT)


def _remedy(error: Exception) -> str:
    """The remedy for a failed client; a run continues only with its own config."""
    if "not finite" in str(error):
        return "training diverged: lower the rate, and start a new run in another folder"
    return "fix what failed, then continue with --resume"


def _usage(error: Exception) -> None:
    """Convert usage errors of the command line to our format."""
    message = getattr(error, "format_message", None)
    if message is None:
        return
    lines = str(message()).splitlines()
    if lines[0].startswith("Usage: "):  # called without a command: the message is the help
        print("\n".join(lines))
        raise SystemExit(EXIT_USER)
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "atoll"
    what, remedy = lines[0], f"see {path} --help"
    if path.split()[-1] in TAKES_SET and (option := _as_option(error, what)):
        what, remedy = what.partition(" (Possible")[0], f"to set an option, write --set {option}"
    elif (config := _unknown_command(what)) in configs():
        remedy = f"to run it, write atoll run {config}"
    complain(what, "command line", remedy, EXIT_USER)


def _unknown_command(what: str) -> str:
    """The unknown word in place of a command; empty for other errors."""
    unknown = re.match(r"No such command '(.+?)'", what)
    return unknown.group(1) if unknown else ""


def _as_option(error: Exception, what: str) -> str:
    """The error of --set for a run's option given to the command; else nothing."""
    from atoll.core.options import SYNONYMS  # noqa: PLC0415 - help must not wait for pydantic

    name = str(getattr(error, "option_name", ""))
    flag = name.lstrip("-").replace("-", "_")
    option = SYNONYMS.get(flag, flag)
    config = next((word for word in sys.argv[2:] if not word.startswith("-")), "")
    options = {"model", *option_values(config), *option_values("")}  # latter: of all splits
    if option in options:
        return f"{option}={_value_after(name)}"
    extra = re.search(r"extra arguments?(?:\(s\))? \((\w[\w.]*=[^)]*)\)", what)
    return " --set ".join(extra.group(1).split()) if extra else ""


def _value_after(flag: str) -> str:
    """The value after a flag on the command line; VALUE if there is none."""
    for word, following in pairwise([*sys.argv[1:], "-"]):
        if word == flag and not following.startswith("-"):
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return "VALUE"


def _unwritable(error: Exception) -> None:
    """Handle output that cannot be written; discards the rest, so that Python ends silently."""
    if not isinstance(error, OSError) or error.filename or _notes(error):
        return
    if error.errno in UNWRITABLE:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reason = f"cannot print: {str(error.strerror).lower()}"
        complain(reason, "standard output", "send it to another place", EXIT_USER)


def _notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))
