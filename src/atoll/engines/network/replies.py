"""Replies to the coordinator: an answer, or the kind of an error with fixed words.

The details of an error stay in the site's own log.
"""

from collections.abc import Callable
from typing import Any

from atoll.core.errors import BadMessageError, UserError, printable
from atoll.core.federation import Moment
from atoll.core.messages import Packet
from atoll.engines.network.contract import RefusedError
from atoll.engines.network.faults import spoilt
from atoll.engines.network.policy import Gate, log

__all__ = ["Reply", "error_kind", "handle_request", "reply_of"]

MOST_WORDS = 2000  # of an error, in the log of this process
Reply = dict[str, Any]  # ok, followed by the result or the reason of a refusal


def reply_of(gate: Gate, action: str, work: Callable[[Gate], dict[str, Any] | None]) -> Reply:
    """Execute a function and return its reply; of an error only its kind and fixed words leave."""
    try:
        return {"ok": True, **(work(gate) or {})}
    except Exception as error:
        words = printable(f"{action[:80]}: {error}"[:MOST_WORDS])
        log.warning("%s", words, exc_info=not isinstance(error, UserError))
        kind, reason = error_kind(error)
        return {"ok": False, "kind": kind, "reason": reason}


def handle_request(
    gate: Gate, number: int, action: str, moment: list[int], packet: Packet, run: str = ""
) -> Reply:
    """Answer a request from the network; malformed requests get a reply of the same form."""

    def work(gate: Gate) -> dict[str, Any]:
        if not (isinstance(packet.header, bytes) and isinstance(packet.block, bytes)):
            raise RefusedError("a question that is not made of bytes")
        if not all(type(n) is int for n in (number, *moment)) or len(moment) != 3:
            raise RefusedError("a moment that is not three whole numbers")
        reply = spoilt(gate.handle(number, str(action), Moment(*moment), packet, str(run)))
        return {"header": reply.header, "block": reply.block}

    return reply_of(gate, str(action), work)


def error_kind(error: BaseException) -> tuple[str, str]:
    """The kind of an error and fixed words without local details, for the coordinator."""
    if isinstance(error, RefusedError):
        return "refused", str(error)
    if isinstance(error, BadMessageError):
        return "failed", error.reason
    if isinstance(error, UserError) and error.what == "the disk is full":
        return "failed", "the disk is full there"
    if isinstance(error, UserError):
        return "failed", "the site has to fix something; its log says what"
    return "failed", f"a fault there: {type(error).__name__}; the site's log says more"
