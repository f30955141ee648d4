"""The log of everything that leaves a site: one line per answer, chained by hashes.

Each line contains the hash of the previous line, so changing, removing or inserting a line breaks
the chain. The last hash suffices to verify the whole log.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError, printable
from atoll.core.federation import Moment
from atoll.core.messages import Packet
from atoll.core.record import disk_errors
from atoll.engines.network.mirror import End, Mirror, append_only
from atoll.engines.network.requests import COMPARE

__all__ = [
    "SHOWN",
    "SINGLED",
    "Counted",
    "EgressLog",
    "Line",
    "Spent",
    "accept",
    "audited",
    "lines",
    "mirrored",
]

FIRST = "0" * 32
LATER = ("data", "rounds", "epochs")  # fields missing in older logs
MOST_NAMED = 6  # maximum number of tensors that a line lists individually
# Refusals that depend on rows; counted over all runs
SINGLED = "the weights single out"
SHOWN = "the answer would show training rows of this site"
ACCEPTED = "accepted at this site"  # for a log without a mirror
MOST_REFUSALS = 100_000  # maximum number of lines about refusals, so that they do not fill the disk


@dataclass(frozen=True)
class Line:
    """One answer that left the site, or one refused request."""

    time: str
    run: str
    words: str
    action: str
    bytes: int  # bytes sent; 0 for a refusal
    digest: str  # hash of the packet's bytes
    before: str  # hash of the previous line
    hash: str
    data: str = ""  # key of the data behind an answer; budgets over all runs are counted by it
    rounds: int = 0  # rounds that began with this answer, or were trained for it
    epochs: int = 0  # epochs of training behind this answer


@dataclass(frozen=True)
class Counted:
    """The cost of an answer in the budgets over all runs on the same data."""

    data: str = ""
    rounds: int = 0
    epochs: int = 0


@dataclass
class Spent:
    """The used part of these budgets over all runs."""

    rounds: int = 0
    epochs: int = 0
    answers: int = 0
    comparisons: int = 0


NOTHING = Counted()


def _is_probe(words: str, action: str) -> bool:
    """Whether a line records a refusal that depends on rows of the site.

    The coordinator chooses the action, so only the reason counts.
    """
    return words.removeprefix(f"refused '{action}': ").startswith((SINGLED, SHOWN))


def _hash(body: dict[str, Any]) -> str:
    plain = {
        key: value for key, value in body.items() if key != "hash" and (value or key not in LATER)
    }
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def lines(path: Path) -> Iterator[Line]:
    """The lines of a log; raises an error with the line number if the chain is broken."""
    before = FIRST
    with disk_errors(path):
        texts = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(texts, 1):
        try:
            line = Line(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise _broken(path, number) from error
        if line.before != before or line.hash != _hash(vars(line)):
            raise _broken(path, number)
        before = line.hash
        yield line


def _broken(path: Path, number: int) -> UserError:
    return UserError(
        f"the chain of the egress log is broken at line {number}",
        str(path),
        "the log was changed or damaged there: keep it, and begin a new one in another store",
    )


def audited(store: Path) -> list[Line]:
    """The lines of a store or log, verified against the mirror if there is one.

    Raises an error if the log is missing or shorter than before.
    """
    path = store / "egress.jsonl" if store.is_dir() else store
    mirror = Mirror.of_store(path.parent)
    end = mirror.read() if mirror else End()  # read before the log, which a site may be writing now
    if not path.exists() and not (mirror and end.lines):
        remedy = "give the site's store, as its site.toml names it; the first atoll join makes it"
        raise UserError("no egress log here", str(path), remedy)
    logged = list(lines(path))
    if mirror:
        mark = logged[end.lines - 1].hash if 0 < end.lines <= len(logged) else ""
        mirror.check(path, len(logged), mark, end)
    return logged


def mirrored(store: Path) -> bool:
    """Whether a store's log has a mirror."""
    mirror = Mirror.of_store(store if store.is_dir() else store.parent)
    return mirror is not None and mirror.path.exists()


def accept(path: Path, mirror: Mirror) -> None:
    """Accept a log without its mirror; adds a line to the log about it."""
    log = EgressLog(path) if not mirror.path.exists() else None
    if log and log.count:
        log.accepted()
        mirror.write(log.end)


class EgressLog:
    """A site's log, open for writing; its end is copied to a mirror if there is one."""

    def __init__(self, path: Path, mirror: Mirror | None = None) -> None:
        self.path, self._mirror = path, mirror
        self.last, self._sums, self.count = FIRST, dict[str, int](), 0
        self._spent: dict[str, Spent] = {}
        self._refusals = 0
        self.probes = 0  # number of refusals that depend on rows of the site
        with disk_errors(path), _locked(path) if path.parent.exists() else nullcontext():
            self._read()

    def _read(self) -> None:
        """Read the log while no other process writes."""
        self._mend()
        mirror = self._mirror
        end, mark = mirror.read() if mirror else End(), ""
        for line in lines(self.path):
            self.count, self.last = self.count + 1, line.hash
            self._sums[line.run] = self._sums.get(line.run, 0) + line.bytes
            self._count_refusal(line.bytes, line.words, line.action)
            self._spend(line.bytes, Counted(line.data, line.rounds, line.epochs), line.action)
            mark = line.hash if self.count == end.lines else mark
        self._size = self._length()
        if mirror:
            if self.count and not mirror.path.exists():
                raise mirror.absent
            mirror.check(self.path, self.count, mark, end)
            mirror.write(self.end)

    @property
    def end(self) -> End:
        """The end of the log."""
        spent = {
            data: [one.rounds, one.epochs, one.answers, one.comparisons]
            for data, one in self._spent.items()
            if one.answers
        }
        return End(self.count, self.last, self.total(), self._size, spent)

    def _length(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _mend(self) -> None:
        """Remove an incomplete last line, left by a killed process."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            append_only(self.path, False)
            os.truncate(self.path, content.rfind(b"\n") + 1)

    def total(self, run: str | None = None) -> int:
        """The total bytes sent for a run, or for all runs."""
        return sum(self._sums.values()) if run is None else self._sums.get(run, 0)

    def spent(self, data: str) -> Spent:
        """The budgets used by all runs on this data; each line updates the object."""
        return self._spent.setdefault(data, Spent())

    def _count_refusal(self, count: int, words: str, action: str) -> None:
        """Count a refusal; refusals that depend on rows have a counter of their own."""
        if not count and _is_probe(words, action):
            self.probes += 1
        elif not count and not words.startswith(ACCEPTED):
            self._refusals += 1

    def _spend(self, count: int, counted: Counted, action: str) -> None:
        if count and counted.data:
            spent = self.spent(counted.data)
            spent.answers += 1
            spent.rounds += counted.rounds
            spent.epochs += counted.epochs
            spent.comparisons += action == COMPARE

    def left(
        self,
        run: str,
        action: str,
        moment: Moment,
        packet: Packet,
        counted: Counted = NOTHING,
        again: bool = False,
    ) -> None:
        """Log an answer, or a repeated answer, before it leaves."""
        place = f"at stage {moment.stage + 1}, round {moment.round + 1}"
        verb = "answered again" if again else "answered"
        words = f"{verb} '{action}' {place}: {packet.size:,} bytes, {_contents(packet)}"
        digest = _digest(packet.header + packet.block)
        self._add(run, words, action, packet.size, digest, counted)

    def refused(self, run: str, action: str, reason: str) -> None:
        """Log a refused request with its reason, up to a maximum number of lines.

        Refusals that depend on rows always get a line: their number is limited.
        """
        name, most = printable(action[:80]), MOST_REFUSALS
        words = f"refused '{name}': {printable(reason)}"
        probe = _is_probe(words, name)
        if self._refusals == most and not probe:
            words = f"{most:,} refusals are written down here; further ones are in nvflare.log"
            words += " alone"
        if self._refusals <= most or probe:
            self._add(run, words, name, 0, "")

    def disclosure(self, run: str, action: str, what: str, content: str) -> None:
        """Log a short answer that is not a message of a method."""
        size, digest = len(content.encode()), _digest(content.encode())
        self._add(run, f"answered '{action}': {size:,} bytes, {what}", action, size, digest)

    def accepted(self) -> None:
        """Log that the site accepts this log without a mirror."""
        words = f"{ACCEPTED}: {self.count:,} lines without a copy of their end"
        self._add("", words, "accept", 0, "")

    def _add(
        self,
        run: str,
        words: str,
        action: str,
        count: int,
        digest: str,
        counted: Counted = NOTHING,
    ) -> None:
        if self._mirror and not self._mirror.path.exists():
            raise self._mirror.absent
        with disk_errors(self.path), _locked(self.path):
            self._chain(run, words, action, count, digest, counted)

    def _chain(
        self, run: str, words: str, action: str, count: int, digest: str, counted: Counted
    ) -> None:
        """Append a line while no other process writes."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        body: dict[str, Any] = {
            "time": time, "run": run, "words": words, "action": action, "bytes": count,
            "digest": digest, "before": self.last,
        }  # fmt: skip
        body |= {key: value for key, value in vars(counted).items() if value}
        body["hash"] = _hash(body)
        content = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        if self._length() != self._size:
            what = "another process changed the egress log"
            raise UserError(what, str(self.path), "stop the site, and look at the log")
        self._append(content)
        self.last, self.count = body["hash"], self.count + 1
        self._count_refusal(count, words, action)
        self._size += len(content)
        self._sums[run] = self._sums.get(run, 0) + count
        self._spend(count, counted, action)
        if self._mirror:
            self._mirror.write(self.end)

    def _append(self, content: bytes) -> None:
        """Append a whole line; if the disk is full, remove the partial line."""
        try:
            with self.path.open("ab") as file:
                file.write(content)
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, self._size)
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the log against other processes: a coordinator may start two jobs at once."""
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _contents(packet: Packet) -> str:
    """A description of a packet: the shape of every tensor, and the plain values."""
    descriptions = [
        f"{name} {'x'.join(map(str, shape)) or 'one number'}" for name, _, shape in packet.tensors
    ]
    more = f" and {len(descriptions) - MOST_NAMED} more" if len(descriptions) > MOST_NAMED else ""
    values = sorted(json.loads(packet.header)["values"])
    tensors = (
        f"{len(descriptions)} tensors ({', '.join(descriptions[:MOST_NAMED])}{more})"
        if descriptions
        else "no tensors"
    )
    return f"{tensors}; values: {', '.join(values) or 'none'}"
