"""A run's folder: its config, its events, its last checkpoint. Needs no torch.

events.jsonl has one event per line and no clock, so equal runs have equal files. times.jsonl has
seconds, and looks.jsonl has snapshots, which are never sent. A checkpoint stores the lengths and
digests of these files; resuming checks and truncates them.
One process at a time writes in a folder: it holds the folder's lock.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from atoll.core.errors import EXIT_USER, UserError, printable
from atoll.core.integrity import (
    DIGESTED,
    DIGESTS,
    FINAL,
    FORMAT,
    GROWING,
    STATIC,
    Extent,
    Integrity,
    Rolling,
    digest,
    format_of,
    read_digests,
)
from atoll.core.storage import (
    LOCK,
    FolderLock,
    disk_errors,
    is_temporary,
    locked,
    remove_temporary,
    write_whole,
)

__all__ = [
    "CHECKPOINT",
    "FAILURE",
    "FILES",
    "NAMES",
    "Absence",
    "Event",
    "Exclusion",
    "Message",
    "Record",
    "Round",
    "Score",
    "Snapshot",
    "Stage",
    "disk_errors",
    "locked",
    "read_checkpoint",
    "read_events",
    "read_integrity",
    "read_snapshots",
    "read_times",
    "write_whole",
]


@dataclass(frozen=True)
class Score:
    """A client's hits on its test (or validation) rows of a task, after a round.

    In regression there are no hits: `errors` has `mse`, `mae` and the `variance` of the labels.
    """

    stage: int
    round: int
    client: str
    task: int
    variant: str  # which of a method's models, "" where it has one
    part: str  # "test" or "valid"
    rows: int
    correct: int
    macro_f1: float
    errors: dict[str, float] = field(default_factory=dict)  # in the unit of the label

    @property
    def accuracy(self) -> float:
        """Hits per row, 0 where there are no rows; in regression `r2`."""
        if self.errors:
            return self.r2
        return self.correct / self.rows if self.rows else 0.0

    @property
    def name(self) -> str:
        """What `accuracy` is: accuracy, or R2 in regression."""
        return "R2" if self.errors else "accuracy"

    @property
    def r2(self) -> float:
        """The share of the labels' variance that predictions explain; NaN where there is none."""
        variance = self.errors["variance"]
        return 1 - self.errors["mse"] / variance if variance > 0 else math.nan


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
class Snapshot:
    """Numbers about a client or the server at the end of a stage, for figures; never sent."""

    stage: int
    part: str  # a client, or "server"
    name: str  # what it is, e.g. "attention" or "frozen share"
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # a row each


T = TypeVar("T")
FILES = ("events", "times", "looks")
CHECKPOINT = "checkpoint.safetensors"
REASON = 500  # characters of a failure that are stored
FAILURE = "failure.json"  # why a run failed; removed when it continues
DERIVED = ("result.json", "answer.json", "outcomes.safetensors")
NAMES = (*GROWING, *STATIC, *FINAL, CHECKPOINT, DIGESTS, FAILURE, *DERIVED)  # that a run writes
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
        if isinstance(event, Score) and not event.errors:
            del body["errors"]
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
    event: Event = KINDS[body.pop("event")](**body)
    for name, fits in _CHECKS[type(event)]:
        if not fits(getattr(event, name)):
            raise ValueError(name)
    return event


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_tensors(value: Any) -> bool:
    return all(
        type(name) is str and type(kind) is str and all(map(_is_count, shape))
        for name, kind, shape in value
    )


_FITS: Mapping[Any, Callable[[Any], bool]] = {
    int: _is_count,
    str: lambda value: type(value) is str,
    float: _is_number,
    dict[str, float]: lambda value: all(map(_is_number, value.values())),
    tuple[tuple[str, str, tuple[int, ...]], ...]: _are_tensors,
}
_CHECKS: Mapping[type, tuple[tuple[str, Callable[[Any], bool]], ...]] = {
    kind: tuple((one.name, _FITS[one.type]) for one in fields(kind)) for kind in KINDS.values()
}


def read_integrity(folder: Path) -> Integrity:
    """Lengths and digests of a run's files: from its end, else from its last checkpoint."""
    if (folder / "result.json").exists():
        return read_digests(folder)
    if not (folder / CHECKPOINT).exists():
        return Integrity()
    return _known(folder, _head(folder))


def _known(folder: Path, head: Mapping[str, Any]) -> Integrity:
    """The extents in the head of a checkpoint; empty for a run of an older format."""
    path = folder / CHECKPOINT
    if "files" not in head:
        if format_of(folder) >= DIGESTED:
            raise _damaged(path)
        return Integrity()
    try:
        return Integrity.from_json(head["files"], final=False)
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(path) from error


def _head(folder: Path) -> dict[str, Any]:
    """The head of a checkpoint without its tensors, checked by the digest of its own."""
    path = folder / CHECKPOINT
    try:
        with disk_errors(path), safe_open(path, "np") as file:
            head: dict[str, Any] = json.loads(file.metadata()["atoll"])
        own = head.pop("head", None)
        head.pop("digest")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    if own is not None and own != _head_digest(head):
        raise _damaged(path)
    return head


def _parsed(
    path: Path, integrity: Integrity | None, parse: Callable[[bytes], T], optional: bool = False
) -> list[T]:
    """The lines of a file, checked and parsed; a last line that was cut off is left out."""
    integrity = read_integrity(path.parent) if integrity is None else integrity
    lines = (integrity.read(path, optional) or b"").split(b"\n")[:-1]
    try:
        return [parse(line) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "continue the run with atoll run --resume, or restore the file from a copy"
        raise UserError("a line of the record is damaged", str(path), remedy) from error


def read_events(folder: Path, integrity: Integrity | None = None) -> list[Event]:
    """The events of a run, in order; a last line that was cut off is left out."""
    return _parsed(folder / "events.jsonl", integrity, _event)


def read_snapshots(folder: Path, integrity: Integrity | None = None) -> list[Snapshot]:
    """The snapshots of a run."""
    return _parsed(folder / "looks.jsonl", integrity, _snapshot, optional=True)


def read_times(folder: Path, integrity: Integrity | None = None) -> list[float]:
    """The seconds of each round."""
    return _parsed(folder / "times.jsonl", integrity, _seconds, optional=True)


def _seconds(line: bytes) -> float:
    return float(json.loads(line)["seconds"])


def _snapshot(line: bytes) -> Snapshot:
    body = json.loads(line)
    values = tuple(tuple(math.nan if v is None else v for v in row) for row in body.pop("values"))
    rows, columns = tuple(body.pop("rows")), tuple(body.pop("columns"))
    snapshot = Snapshot(**body, rows=rows, columns=columns, values=values)
    numbers = all(_is_number(value) for row in values for value in row)
    names = (snapshot.part, snapshot.name, *rows, *columns)
    if not numbers or not _is_count(snapshot.stage) or any(type(name) is not str for name in names):
        raise ValueError("a snapshot")
    return snapshot


def read_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The tensors of a run's last checkpoint and its head; changes nothing."""
    path = folder / CHECKPOINT
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


class Record:
    """A run's folder, open for writing."""

    def __init__(self, folder: Path, lock: FolderLock | None = None) -> None:
        """A record of a folder that this process alone writes; see `create` and `reopen`."""
        self.folder = folder
        self._files = {name: folder / f"{name}.jsonl" for name in FILES}
        self._lock = lock
        self._rolling: dict[str, Rolling] = {}
        self._static: dict[str, Extent] = {}

    @staticmethod
    def create(
        folder: Path, config: str, facts: Mapping[str, Any], patience: float = 0.0
    ) -> "Record":
        """A new folder with its config and the facts it was made under; this process locks it."""
        with disk_errors(folder):
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        record = Record(folder, FolderLock(folder, patience))
        try:
            record._refuse_used()
            record._begin(config, facts)
        except UserError:
            record.close()
            if new:  # nothing is left half-made
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return record

    @staticmethod
    def reopen(folder: Path, patience: float = 0.0) -> "Record":
        """The record of a resumed run; this process locks it. Checks the files written once."""
        with disk_errors(folder):
            lock = FolderLock(folder, patience)
        record = Record(folder, lock)
        try:
            remove_temporary(folder, NAMES)
            with disk_errors(folder):
                (folder / FAILURE).unlink(missing_ok=True)
            integrity = read_integrity(folder)
            for name in STATIC:
                integrity.read(folder / name, optional=True)
        except UserError:
            record.close()
            raise
        return record

    def _refuse_used(self) -> None:
        with disk_errors(self.folder):
            if _unfinished(self.folder):
                return
            used = (self.folder / "config.toml").exists()
        remedy = "choose another --out; no run is in this one that could go on"
        if used:
            remedy = "choose another --out, or --resume to go on with the run in it"
        raise UserError("the folder is not empty", str(self.folder), remedy)

    def _begin(self, config: str, facts: Mapping[str, Any]) -> None:
        remove_temporary(self.folder, NAMES)
        body = {**facts, "format": FORMAT}
        content = json.dumps(body, indent=2, sort_keys=True).encode() + b"\n"
        write_whole(self.folder / "facts.json", content)
        for name, file in self._files.items():
            write_whole(file, b"")
            self._rolling[name] = Rolling()
        write_whole(self.folder / "config.toml", config.encode())  # last: a folder with it is whole

    def close(self) -> None:
        """Let other processes write in the folder."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_failure(self, error: Exception) -> None:
        """Write why the run failed, for those who watch it."""
        reason = printable(str(error))[:REASON] or type(error).__name__
        with contextlib.suppress(UserError):  # the disk may be what failed
            write_whole(self.folder / FAILURE, json.dumps({"reason": reason}).encode() + b"\n")

    def add(self, events: Iterable[Event]) -> None:
        """Append events."""
        self._append("events", b"".join(_line(event) for event in events))

    def write_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        """Append snapshots."""
        lines = [json.dumps(_plain_snapshot(s), separators=(",", ":")) for s in snapshots]
        if lines:
            self._append("looks", "".join(f"{line}\n" for line in lines).encode())

    def time(self, **values: float) -> None:
        """Append seconds, apart from the events."""
        self._append("times", json.dumps(values).encode() + b"\n")

    def _append(self, name: str, lines: bytes) -> None:
        path, rolling = self._files[name], self._roll(name)
        with disk_errors(path), path.open("ab") as file:
            file.write(lines)
        rolling.update(lines)

    def _roll(self, name: str) -> Rolling:
        """The digest of a growing file; from its content where this process has not written it."""
        if name not in self._rolling:
            path = self._files[name]
            with disk_errors(path):
                self._rolling[name] = Rolling(path.read_bytes())
        return self._rolling[name]

    @property
    def extents(self) -> dict[str, Extent]:
        """Lengths and digests of the growing files, as this process wrote them."""
        return {path.name: self._roll(name).extent for name, path in self._files.items()}

    def checkpoint(
        self, tensors: Mapping[str, np.ndarray[Any, Any]], progress: Mapping[str, int]
    ) -> None:
        """Save a checkpoint as one file, written whole or not at all."""
        for name, path in self._files.items():
            with disk_errors(path), path.open("rb+") as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            if size != self._roll(name).length:
                what, remedy = "another process has written this file", "start a new run"
                raise UserError(what, str(path), remedy)
        files = Integrity(self.extents | self._written_once())
        lengths = {name: self._roll(name).length for name in self._files}
        head: dict[str, Any] = {
            "progress": dict(progress),
            "lengths": lengths,
            "files": files.as_json(),
        }
        head["head"] = _head_digest(head)
        head["digest"] = _digest(tensors, head)
        # safetensors writes the memory of a view unchanged, so make each array contiguous
        arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        content = save(arrays, {"atoll": json.dumps(head)})
        write_whole(self.folder / CHECKPOINT, content)

    def _written_once(self) -> dict[str, Extent]:
        """The extents of the files that do not change, read at the first checkpoint."""
        if not self._static:
            for path in (self.folder / name for name in STATIC):
                if path.exists():
                    with disk_errors(path):
                        self._static[path.name] = Extent.of(path.read_bytes())
        return self._static

    def ended(self, checkpoints: bool) -> bool:
        """Whether the run has ended with its checkpoints; checks its files if so."""
        has_checkpoint = (self.folder / CHECKPOINT).exists()
        if not (self.folder / "result.json").exists() or (checkpoints and not has_checkpoint):
            return False
        integrity = read_integrity(self.folder)
        for name in integrity.files:
            integrity.read(self.folder / name)
        if has_checkpoint:
            head = read_checkpoint(self.folder)[1]
            self._check_lines(head)
        return True

    def resume(self) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, int]] | None:
        """What the last checkpoint holds, with the events cut to it; None where there is none."""
        exists = (self.folder / CHECKPOINT).exists()
        tensors, head = read_checkpoint(self.folder) if exists else ({}, {})
        contents = self._check_lines(head)
        with disk_errors(self.folder):
            for name in ("result.json", DIGESTS):  # they describe the end of the run
                (self.folder / name).unlink(missing_ok=True)
        for name, path in self._files.items():
            with disk_errors(path):
                os.truncate(path, len(contents[name]))
            self._rolling[name] = Rolling(contents[name])
        return (tensors, head["progress"]) if exists else None

    def _check_lines(self, head: Mapping[str, Any]) -> dict[str, bytes]:
        """The growing files up to a checkpoint, if they are unchanged."""
        integrity = _known(self.folder, head) if head else Integrity()
        contents = {}
        for name, path in self._files.items():
            length = head["lengths"][name] if head else 0
            with disk_errors(path):
                content = path.read_bytes()
            if len(content) < length:
                what = "the record is shorter than its checkpoint says"
                raise UserError(what, str(path), "start the run again in another folder")
            integrity.check(path, content)
            contents[name] = content[:length]
        return contents


def _plain_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    values = [[float(v) if math.isfinite(v) else None for v in row] for row in snapshot.values]
    return {**vars(snapshot), "values": values}


def _unfinished(folder: Path) -> bool:
    """Whether the folder has nothing but the remains of an interrupted creation."""
    ours = {"facts.json", LOCK, *GROWING}
    final = {*ours, "config.toml"}
    names = [entry.name for entry in folder.iterdir()]
    return all(name in ours or is_temporary(name, final) for name in names)


def _damaged(path: Path) -> UserError:
    return UserError(
        "the checkpoint is damaged",
        str(path),
        "delete it to start the run again from its first round, or restore it from a copy",
        EXIT_USER,
    )


def _head_digest(head: Mapping[str, Any]) -> str:
    return digest(json.dumps(head, sort_keys=True).encode())


def _digest(tensors: Mapping[str, np.ndarray[Any, Any]], head: Mapping[str, Any]) -> str:
    rolling = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        rolling.update(
            name.encode() + str(tensors[name].dtype).encode() + str(tensors[name].shape).encode()
        )
        rolling.update(np.ascontiguousarray(tensors[name]).tobytes())
    return rolling.hexdigest()
