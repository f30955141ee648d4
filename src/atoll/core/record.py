"""A run's folder: its config, its events, its last checkpoint. Needs no torch.

events.jsonl has one event a line and no clock in it, so two equal runs have equal files; seconds
stand in times.jsonl, and what parts saw of themselves and sent to nobody in looks.jsonl. A
checkpoint remembers how long these files were, and resuming cuts them there.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from atoll.core.errors import EXIT_USER, UserError

__all__ = [
    "FILES",
    "Absence",
    "Event",
    "Exclusion",
    "Look",
    "Message",
    "Record",
    "Round",
    "Score",
    "Stage",
    "disk_errors",
    "locked",
    "read_checkpoint",
    "read_events",
    "read_looks",
    "write_whole",
]


@dataclass(frozen=True)
class Score:
    """A client's hits on its test (or validation) rows of a task, after a round."""

    stage: int
    round: int
    client: str
    task: int
    variant: str  # which of a method's models, "" where it has one
    part: str  # "test" or "valid"
    rows: int
    correct: int
    macro_f1: float

    @property
    def accuracy(self) -> float:
        """Hits per row; 0 where there are no rows."""
        return self.correct / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class Round:
    """A round has ended; what the server notes of it."""

    stage: int
    round: int
    notes: dict[str, float]


@dataclass(frozen=True)
class Stage:
    """A stage has ended after this many rounds."""

    stage: int
    rounds: int


@dataclass(frozen=True)
class Message:
    """A line of the ledger: messages of one form between two parts in one round."""

    stage: int
    round: int
    sender: str
    receiver: str
    action: str
    kind: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type, shape
    count: int
    payload: int  # bytes of the tensors alone
    bytes: int  # bytes that travel


@dataclass(frozen=True)
class Absence:
    """A client that was not there for an exchange, where the run could do without it."""

    stage: int
    round: int
    client: str
    action: str


@dataclass(frozen=True)
class Exclusion:
    """A client whose answer is left out of a round, and why."""

    stage: int
    round: int
    client: str
    action: str
    reason: str


@dataclass(frozen=True)
class Look:
    """What a part saw of itself at the end of a stage, for pictures; it is never sent."""

    stage: int
    part: str  # a client, or "server"
    name: str  # what it is, e.g. "attention" or "frozen share"
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # a row each


FILES = ("events", "times", "looks")
Event = Score | Round | Stage | Message | Absence | Exclusion
KINDS: Mapping[str, type] = {
    kind.__name__.lower(): kind for kind in (Score, Round, Stage, Message, Absence, Exclusion)
}


_ENCODER = json.JSONEncoder(separators=(",", ":"))


@lru_cache(maxsize=4096)
def _json(value: Any) -> str:
    """Names, and the tensors of a message, in JSON; many messages have the same."""
    return _ENCODER.encode(value)


def _line(event: Event) -> bytes:
    if not isinstance(event, Message):
        body = {"event": type(event).__name__.lower(), **vars(event)}
        if isinstance(event, Round):  # JSON has no number for what is not finite
            body["notes"] = {n: v if math.isfinite(v) else None for n, v in event.notes.items()}
        return _ENCODER.encode(body).encode() + b"\n"
    # a round has two of these for each client, so the line is put together here
    return (
        f'{{"event":"message","stage":{event.stage},"round":{event.round}'
        f',"sender":{_json(event.sender)},"receiver":{_json(event.receiver)}'
        f',"action":{_json(event.action)},"kind":{_json(event.kind)}'
        f',"tensors":{_json(event.tensors)},"count":{event.count}'
        f',"payload":{event.payload},"bytes":{event.bytes}}}\n'
    ).encode()


def _event(line: bytes) -> Event:
    body = json.loads(line)
    if "tensors" in body:  # JSON has no tuples
        body["tensors"] = tuple((name, kind, tuple(shape)) for name, kind, shape in body["tensors"])
    if "notes" in body:
        body["notes"] = {n: math.nan if v is None else v for n, v in body["notes"].items()}
    return KINDS[body.pop("event")](**body)  # type: ignore[no-any-return]


def read_events(folder: Path) -> list[Event]:
    """The events of a run, in order; a last line that was cut off is left out."""
    path = folder / "events.jsonl"
    with disk_errors(path):
        lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [_event(line) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "a line of the record is damaged", str(path), "use --resume, or restore it from a copy"
        ) from error


def read_looks(folder: Path) -> list[Look]:
    """What the parts of a run saw of themselves."""
    path = folder / "looks.jsonl"
    if not path.exists():
        return []
    with disk_errors(path):
        lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [_look(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "a line of the record is damaged", str(path), "use --resume, or restore it from a copy"
        ) from error


def _look(body: dict[str, Any]) -> Look:
    values = tuple(tuple(math.nan if v is None else v for v in row) for row in body.pop("values"))
    rows, columns = tuple(body.pop("rows")), tuple(body.pop("columns"))
    return Look(**body, rows=rows, columns=columns, values=values)


def read_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The tensors of a run's last checkpoint and its head; changes nothing."""
    path = folder / "checkpoint.safetensors"
    try:
        with disk_errors(path), safe_open(path, "np") as file:
            head = json.loads(file.metadata()["atoll"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole = head.pop("digest") == _digest(tensors, head)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if not whole:
        raise _damaged(path)
    return tensors, head


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Whatever the disk refuses becomes an error that the user can mend."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "the disk is full", str(path), "free some space, then use --resume"
            ) from error
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot read or write: {reason.lower()}",
            str(path),
            "check that the folder exists and its permissions",
        ) from error


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Of several processes that want a lock one is in here; a process that ends gives it back."""
    while True:
        with disk_errors(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file.fileno(), lock):
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        # who had it took the file away while this process waited: another file is the lock now


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Record:
    """A run's folder, open for writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: folder / f"{name}.jsonl" for name in FILES}

    @staticmethod
    def create(folder: Path, config: str, facts: Mapping[str, Any]) -> "Record":
        """A new folder with its config and the facts it was made under."""
        with disk_errors(folder):
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if not _unfinished(folder):
                remedy = "choose another --out; no run is in this one that could go on"
                if (folder / "config.toml").exists():
                    remedy = "choose another --out, or --resume to go on with the run in it"
                raise UserError("the folder is not empty", str(folder), remedy)
        record = Record(folder)
        try:
            record._begin(config, facts)
        except UserError:
            if new:  # nothing is left half-made
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return record

    def _begin(self, config: str, facts: Mapping[str, Any]) -> None:
        content = json.dumps(facts, indent=2, sort_keys=True).encode() + b"\n"
        write_whole(self.folder / "facts.json", content)
        for file in self._files.values():
            write_whole(file, b"")
        write_whole(self.folder / "config.toml", config.encode())  # last: a folder with it is whole

    def add(self, events: Iterable[Event]) -> None:
        """Append events."""
        self._append("events", b"".join(_line(event) for event in events))

    def look(self, looks: Iterable[Look]) -> None:
        """Append what parts saw of themselves."""
        lines = [json.dumps(_plain_look(look), separators=(",", ":")) for look in looks]
        if lines:
            self._append("looks", "".join(f"{line}\n" for line in lines).encode())

    def time(self, **values: float) -> None:
        """Append seconds, apart from the events."""
        self._append("times", json.dumps(values).encode() + b"\n")

    def _append(self, name: str, lines: bytes) -> None:
        path = self._files[name]
        with disk_errors(path), path.open("ab") as file:
            file.write(lines)

    def checkpoint(
        self, tensors: Mapping[str, np.ndarray[Any, Any]], progress: Mapping[str, int]
    ) -> None:
        """Save where the run stands, in one file that is there whole or not at all."""
        for path in self._files.values():
            with disk_errors(path), path.open("rb+") as file:
                os.fsync(file.fileno())
        lengths = {name: path.stat().st_size for name, path in self._files.items()}
        head: dict[str, Any] = {"progress": dict(progress), "lengths": lengths}
        head["digest"] = _digest(tensors, head)
        # safetensors writes a view's memory as it lies, so each array is laid out first
        arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        content = save(arrays, {"atoll": json.dumps(head)})
        write_whole(self.folder / "checkpoint.safetensors", content)

    def resume(self) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, int]] | None:
        """What the last checkpoint holds, with the events cut to it; None where there is none."""
        if not (self.folder / "checkpoint.safetensors").exists():
            self._cut(dict.fromkeys(self._files, 0))
            return None
        tensors, head = read_checkpoint(self.folder)
        self._cut(head["lengths"])
        return tensors, head["progress"]

    def _cut(self, lengths: Mapping[str, int]) -> None:
        for name, path in self._files.items():
            with disk_errors(path):
                if path.stat().st_size < lengths[name]:
                    raise UserError(
                        "the record is shorter than its checkpoint says",
                        str(path),
                        "start the run again in another folder",
                    )
                os.truncate(path, lengths[name])


def _plain_look(look: Look) -> dict[str, Any]:
    values = [[float(v) if math.isfinite(v) else None for v in row] for row in look.values]
    return {**vars(look), "values": values}


def _unfinished(folder: Path) -> bool:
    """Whether nothing is in the folder but what a creation that was cut off leaves."""
    ours = {"facts.json", *(f"{name}.jsonl" for name in FILES)}
    parts = {f".{name}.part" for name in (*ours, "config.toml")}
    return all(entry.name in ours | parts for entry in folder.iterdir())


def _damaged(path: Path) -> UserError:
    return UserError(
        "the checkpoint is damaged",
        str(path),
        "delete it to start the run again from its first round, or restore it from a copy",
        EXIT_USER,
    )


def _digest(tensors: Mapping[str, np.ndarray[Any, Any]], head: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(
            name.encode() + str(tensors[name].dtype).encode() + str(tensors[name].shape).encode()
        )
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()
