"""Converts errors of a node to JSON and back, without pickle."""

import json
import traceback

from atoll.core.errors import BadMessageError, ClientFailedError, UserError, printable

__all__ = ["NodeError", "as_text", "from_text"]


class NodeError(Exception):
    """An error of a node that is not one of atoll's error classes; its traceback is a note."""


def as_text(error: BaseException) -> str:
    """An error as JSON."""
    if isinstance(error, UserError):
        return json.dumps(["UserError", error.what, error.where, error.remedy, error.exit_code])
    if isinstance(error, ClientFailedError):
        return json.dumps(["ClientFailedError", error.client, error.action, error.reason])
    if isinstance(error, BadMessageError):
        return json.dumps(["BadMessageError", error.sender, error.reason])
    if isinstance(error, NodeError):
        return json.dumps(["NodeError", str(error), " ".join(getattr(error, "__notes__", ()))])
    trace = "".join(traceback.format_exception(error))
    return json.dumps(["NodeError", f"{type(error).__name__}: {printable(str(error))}", trace])


def from_text(text: str) -> Exception:
    """The error that `as_text` wrote."""
    kind, *values = json.loads(text)
    kinds = {
        "UserError": UserError,
        "ClientFailedError": ClientFailedError,
        "BadMessageError": BadMessageError,
    }
    if kind in kinds:
        rebuilt: Exception = kinds[kind](*values)
        return rebuilt
    error = NodeError(values[0])
    error.add_note(values[1])
    return error
