"""The folder of a finished run at a site for `predict`, written once."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.federation import Moment
from atoll.core.integrity import read_json
from atoll.core.messages import Packet
from atoll.core.record import FILES, Record, write_whole
from atoll.engines.network.requests import Finish
from atoll.runs.parts import Parts
from atoll.runs.recipe import write_recipe
from atoll.runs.result import write_result

__all__ = ["go_on", "has_ended", "other_end", "write_end"]

END = "finished.json"  # the request that completed the folder, and the last round


def _digest(packet: Packet) -> str:
    return hashlib.blake2b(packet.header + packet.block, digest_size=16).hexdigest()


def _read(home: Path) -> tuple[str, list[int]] | None:
    path = home / END
    if not path.exists():
        return None
    error = UserError("a file is damaged", str(path), "restore it from a copy")
    return read_json(
        path, lambda body: (str(body["request"]), [int(n) for n in body["place"]]), error
    )


def other_end(home: Path, packet: Packet) -> str:
    """Why this request does not end the run; empty for the first request and its repeats."""
    before = _read(home)
    other = before is not None and before[0] != _digest(packet)
    return "a second end of a run, with other content" if other else ""


def has_ended(home: Path) -> bool:
    """Whether the folder is complete and no later round has begun since."""
    return _read(home) is not None


def go_on(home: Path, moment: Moment) -> None:
    """Allow a resumed run to end again after another round."""
    before = _read(home)
    if before is not None and [moment.stage, moment.round] > before[1]:
        (home / END).unlink()


def write_end(
    home: Path,
    parts: Parts,
    packet: Packet,
    request: Finish,
    state: Mapping[str, np.ndarray[Any, Any]],
    place: tuple[int, int],
) -> None:
    """Complete the folder; `state` contains the states of the server and of this site's client.

    `place`: stage and round of the last answer.
    """
    for name in FILES:
        content = request.events.numpy().tobytes() if name == "events" else b""
        write_whole(home / f"{name}.jsonl", content)
    write_whole(home / "facts.json", request.facts.numpy().tobytes())
    write_recipe(parts, home)
    Record(home).checkpoint(state, {"stage": 0, "round": 0})
    write_result(home)
    body = {"request": _digest(packet), "place": place}
    write_whole(home / END, json.dumps(body).encode())
