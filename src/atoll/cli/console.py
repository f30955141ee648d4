"""Standard output and standard error of the command, and its three-line errors. Needs no torch."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

from rich.console import Console

from atoll.core.errors import printable

__all__ = ["aside", "complain", "err", "out", "traceback_file"]

PLAIN_WIDTH = 240  # characters per line in a file or a pipe, so that few lines wrap


def _console(stderr: bool) -> Console:
    """A console as wide as the terminal or COLUMNS; else PLAIN_WIDTH."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(stderr=stderr, width=wide, markup=False, emoji=False, highlight=False)


out, err = _console(stderr=False), _console(stderr=True)


def aside(words: str) -> None:
    """Print a remark to standard error."""
    err.print(words, soft_wrap=True)


def complain(what: str, where: str, remedy: str, exit_code: int) -> None:
    """Print three lines on what is wrong, where, and what to do; then exit."""
    for name, text in (("error", what), ("where", where), ("to do", remedy)):
        print(f"{name}: {printable(text)}", file=sys.stderr)
    raise SystemExit(exit_code)


def traceback_file(error: Exception, folder: Path | None) -> str:
    """The file with the traceback of a fault: in the run's folder, else a temporary one."""
    content = "".join(traceback.format_exception(error))
    try:
        whole = folder is not None and (folder / "config.toml").exists()
        home = folder if folder and whole else Path(tempfile.mkdtemp(prefix="atoll-"))
        path = home / "traceback.txt"
        path.write_text(content)
        return str(path)
    except OSError as refused:
        return f"no traceback file, {refused.strerror}: {error}"
