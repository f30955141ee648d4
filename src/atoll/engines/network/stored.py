"""Small functions about what a site stores: sizes, digests of questions, states, their age."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.federation import Moment
from atoll.core.messages import Packet, Tensors

__all__ = ["age", "arrays_of", "bytes_in", "question_digest"]


def bytes_in(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def question_digest(action: str, moment: Moment, packet: Packet) -> str:
    """What makes a question the same as another."""
    about = json.dumps([action, list(vars(moment).values()), len(packet.header)]).encode()
    content = hashlib.blake2b(about, digest_size=16)
    content.update(packet.header)
    content.update(packet.block)
    return content.hexdigest()


def arrays_of(state: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    """A state as arrays, to be written."""
    return {name: np.asarray(t.detach().cpu().numpy(), order="C") for name, t in state.items()}


def age(path: Path) -> tuple[int, int]:
    """The stage and the round of a saved state, by which files are ordered."""
    stage, _, number = path.stem.removeprefix("state-").partition("-")
    return int(stage), int(number)
