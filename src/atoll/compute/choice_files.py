"""Files of choices: those of a run in its folder, and a cache for later runs on this machine.

A choice is cached under a name that changes with the source of all that it depends on (cache.py).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from atoll.compute.cache import Key
from atoll.compute.choice import Choice
from atoll.core.errors import UserError
from atoll.core.record import write_whole
from atoll.kernels import batched_layers
from atoll.kernels.batched_layers import Timing

__all__ = [
    "CONVOLUTION",
    "choices",
    "keep_timings",
    "name_of",
    "remember",
    "remembered",
    "stored_timings",
    "timings",
]

CONVOLUTION = "convolution "  # begins the description of a convolution's choice


def choices(folder: Path) -> dict[str, Choice]:
    """The choices that a run stored in its folder."""
    path = folder / "engine.json"
    if not path.exists():
        return {}
    try:
        return {name: Choice(**body) for name, body in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError("not an engine's choices", str(path), "delete the file") from error


def timings(chosen: Iterable[Choice]) -> dict[str, Timing]:
    """The ways of convolutions among a run's choices."""
    return {
        choice.work.removeprefix(CONVOLUTION): Timing(way, {way: 1.0})
        for choice in chosen
        if choice.work.startswith(CONVOLUTION)
        for way in batched_layers.WAYS
        if way == choice.reason
    }


def stored_timings() -> dict[str, Timing]:
    """The fastest ways of convolutions in earlier runs on this machine."""
    try:
        body = json.loads((_cache() / "batched_layers.json").read_text())
        return {key: Timing(**timing) for key, timing in body.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep_timings(timings: Mapping[str, Timing]) -> None:
    """Add timings to those of earlier runs on this machine."""
    body = {key: asdict(timing) for key, timing in (stored_timings() | dict(timings)).items()}
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        write_whole(_cache() / "batched_layers.json", json.dumps(body).encode())
    except (OSError, UserError):  # a cache that cannot be written is ignored
        pass


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "atoll" / "choices"


def name_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def remembered(key: Key, find: Callable[[], Choice]) -> Choice:
    """The choice of an earlier run on this machine, else the result of `find`."""
    if not key.lasting:
        return find()
    try:
        return Choice(**json.loads((_cache() / f"{key.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        choice = find()
    remember(key.name, choice)
    return choice


def remember(name: str, choice: Choice) -> None:
    """Keep a choice for later runs on this machine."""
    path = _cache() / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(choice)).encode())
    except (OSError, UserError):  # a cache that cannot be written is ignored
        pass
