"""Errors in the words of a Python call: keyword arguments instead of options of the command."""

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.core.errors import UserError

__all__ = ["keyword_errors"]

CHANGES = re.compile(r"--(?:set|axis)\b")  # options of the command that take key=value
FLAG = re.compile(r"--([a-z][a-z-]*)(?: ([\w./]+))?")
SWITCHES = {"resume"}  # keyword arguments that are true or false: a word after them is no value
FULL = "write it in full"
ENTRY = re.compile(r"\b([a-z_]+) = (\{ .* \}|\[.*?\])(?: in \[data\])?")  # as TOML has it


@contextmanager
def keyword_errors() -> Iterator[None]:
    """Name keyword arguments in user errors where they name options of the command.

    >>> with keyword_errors():
    ...     raise UserError("no site 'a'", "--site", "use --site b")
    Traceback (most recent call last):
    atoll.core.errors.UserError: no site 'a' (site=): use site="b"
    """
    try:
        yield
    except UserError as error:
        what, where, remedy = map(_as_keywords, (error.what, error.where, error.remedy))
        if remedy == FULL and CHANGES.search(error.where):
            remedy = "write it in full, in a dictionary: **{'table.option': value}"
        if (what, where, remedy) == (error.what, error.where, error.remedy):
            raise
        raise UserError(what, where, remedy, error.exit_code) from error


def _as_keywords(words: str) -> str:
    """A part of an error, with `--set key` as keyword argument key and `--name value` as name=."""
    if words in ("--set", "--axis", "command line"):
        return "arguments" if words == "command line" else "keyword arguments"
    words = re.sub(r"--(?:set|axis) (?=[\w.]+)", "keyword argument ", words)
    words = ENTRY.sub(_entry, words)
    words = re.sub(r"(?<![\w.])([a-z_]+) = (?=[\"'])", r"\1=", words)
    words = re.sub(r"did you mean 'data\.(\w+)'", r"did you mean '\1'", words)
    words = CHANGES.sub("keyword arguments", words)
    return FLAG.sub(_keyword, words)


def _entry(match: re.Match[str]) -> str:
    """An entry of a config as a keyword argument: labels={'0': 'no'}."""
    try:
        value = tomllib.loads(f"value = {match[2]}")["value"]
    except tomllib.TOMLDecodeError:  # only an example, such as ignore = [...]
        return match[0]
    return f"{match[1]}={value!r}"


def _keyword(match: re.Match[str]) -> str:
    name, value = match[1].replace("-", "_"), match[2]
    if name in SWITCHES:
        return f"{name}=True{match[0].removeprefix(f'--{match[1]}')}"
    return f'{name}="{value}"' if value else f"{name}="
