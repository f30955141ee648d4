"""Finds the rows that several tables share without showing the others (private set intersection).

The hub (the party with the labels) asks each other party in turn. Ids are sent blinded by elliptic
curve keys; in the end the hub sends salted digests of the common ids, which only a party that has
the ids can match. Every party then orders its rows by id. Besides the result, the hub learns
which of the remaining ids each party lacks; the others learn how many ids the hub
requested, and the result.
"""

import hashlib
import secrets
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.data.own.sheets import as_written, opened

__all__ = [
    "SHOWN",
    "Aligned",
    "Hub",
    "Sent",
    "Spoke",
    "align",
    "assume_aligned",
    "normalised",
    "read_ids",
    "refuse_bad",
]

Array = np.ndarray[Any, Any]
FALSE_POSITIVES = 1e-9  # required, but unused by the exact data structure
CORES = 2  # threads that encrypt in parallel
SHOWN = 5  # maximum number of ids or rows in an error


@dataclass(frozen=True)
class Sent:
    """A message of the protocol, in its transmitted form."""

    sender: str
    receiver: str
    kind: str  # setup, request, response, common
    content: bytes


@dataclass(frozen=True)
class Aligned:
    """For each party the rows to select, in the same order for all."""

    rows: dict[str, Array]
    sent: list[Sent]


def normalised(ids: Sequence[str], exact: bool = False) -> list[str]:
    """Normalise ids: strip whitespace, fold case and Unicode form; exact: return them unchanged."""
    if exact:
        return list(ids)
    return [unicodedata.normalize("NFKC", text).strip().casefold() for text in ids]


def refuse_bad(ids: Sequence[str], where: str) -> None:
    """Refuse empty and duplicate ids: every id must identify one row."""
    empty = [row for row, text in enumerate(ids) if not text.strip()]
    if empty:
        listed = ", ".join(map(str, empty[:SHOWN]))
        raise UserError(f"{len(empty)} empty ids, in rows {listed}", where, "give every row an id")
    twice = [text for text, count in Counter(ids).items() if count > 1]
    if twice:
        listed = ", ".join(repr(text) for text in twice[:SHOWN])
        raise UserError(
            f"{len(twice)} ids come more than once: {listed}", where, "keep one row of each"
        )


def _psi() -> Any:
    """The library, or an error with install instructions."""
    try:
        import private_set_intersection.python as psi  # noqa: PLC0415 (an optional extra)
    except ImportError as error:
        raise UserError(
            "private set intersection needs the package openmined-psi",
            "align",
            "pip install 'atoll[psi]', or --assume-aligned where the rows already match",
        ) from error
    return psi


def _digest(salt: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=salt, digest_size=32).digest()


@dataclass
class Spoke:
    """A party that answers requests; its ids leave it only blinded."""

    name: str
    ids: list[str]
    _key: Any = field(default=None, repr=False)

    def setup(self, revision: int) -> bytes:
        """The party's ids, encrypted with its key."""
        psi = _psi()
        self._key = psi.server.CreateWithNewKey(True)
        message = self._key.CreateSetupMessage(
            FALSE_POSITIVES, revision, self.ids, psi.DataStructure.RAW
        )
        return bytes(message.SerializeToString())

    def respond(self, request: bytes) -> bytes:
        """The hub's blinded ids, also encrypted with this party's key."""
        psi = _psi()
        parts, response = _halves(psi.Request, request), psi.Response()
        keys = [psi.server.CreateFromKey(self._key.GetPrivateKeyBytes(), True) for _ in parts]
        with ThreadPoolExecutor(CORES) as pool:
            for part in pool.map(lambda key, some: key.ProcessRequest(some), keys, parts):
                response.MergeFrom(part)
        return bytes(response.SerializeToString())

    def rows(self, common: bytes) -> Array:
        """The rows with common ids, in the order of the ids."""
        salt = common[:32]
        digests = {common[start : start + 32] for start in range(32, len(common), 32)}
        matches = [n for n, text in enumerate(self.ids) if _digest(salt, text) in digests]
        if len(matches) != len(digests):
            raise UserError(
                f"{len(digests)} ids are common according to the hub, {len(matches)} are here",
                self.name,
                "align again: a table has changed in between",
            )
        return _ordered(self.ids, matches)


@dataclass
class Hub:
    """The party with the labels, which asks the others one after another."""

    name: str
    ids: list[str]
    left: list[int] = field(default_factory=list)  # rows whose ids all parties asked so far have
    _key: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Start with all rows."""
        self.left = list(range(len(self.ids)))

    def request(self) -> bytes:
        """A request with the remaining ids, blinded."""
        self._key = _psi().client.CreateWithNewKey(True)
        message = self._key.CreateRequest([self.ids[row] for row in self.left])
        return bytes(message.SerializeToString())

    def receive(self, setup: bytes, response: bytes) -> None:
        """Drop the rows that the party does not have."""
        psi = _psi()
        theirs, parts = psi.ServerSetup(), _halves(psi.Response, response)
        theirs.ParseFromString(setup)
        keys = [psi.client.CreateFromKey(self._key.GetPrivateKeyBytes(), True) for _ in parts]
        left, first = list[int](), 0
        with ThreadPoolExecutor(CORES) as pool:
            intersections = pool.map(
                lambda key, some: key.GetIntersection(theirs, some), keys, parts
            )
            for part, places in zip(parts, intersections, strict=True):
                left += [self.left[first + place] for place in places]
                first += len(part.encrypted_elements)
        self.left = sorted(left)

    def common(self) -> bytes:
        """Salted digests of the common ids; the salt is random."""
        salt = secrets.token_bytes(32)
        return salt + b"".join(sorted(_digest(salt, self.ids[row]) for row in self.left))

    def rows(self) -> Array:
        """The rows with common ids, in the order of the ids."""
        return _ordered(self.ids, self.left)


def _halves(kind: Any, message: bytes) -> list[Any]:
    """A request or response in ordered chunks: the library releases Python's global lock.

    Each thread needs a separate key object, made of the same bytes.
    """
    whole = kind()
    whole.ParseFromString(message)
    blinded = list(whole.encrypted_elements)
    size = max(1, -(-len(blinded) // CORES))
    parts = []
    for start in range(0, len(blinded), size):
        part = kind()
        part.CopyFrom(whole)
        del part.encrypted_elements[:]
        part.encrypted_elements.extend(blinded[start : start + size])
        parts.append(part)
    return parts


def _ordered(ids: Sequence[str], rows: Sequence[int]) -> Array:
    return np.array(sorted(rows, key=lambda row: ids[row]), dtype=np.int64)


def align(tables: Mapping[str, Sequence[str]], hub: str, exact: bool = False) -> Aligned:
    """The common rows of all tables, by the ids of each; runs the protocol in this process."""
    if hub not in tables:
        raise UserError(f"no table '{hub}'", "align", f"known: {', '.join(sorted(tables))}")
    _psi()
    ids = {name: normalised(values, exact) for name, values in tables.items()}
    for name, values in ids.items():
        refuse_bad(values, name)
    asking, sent = Hub(hub, ids[hub]), list[Sent]()
    others = [Spoke(name, ids[name]) for name in sorted(ids) if name != hub]
    for spoke in others:
        if not asking.left or not spoke.ids:
            raise _nothing(spoke.name)
        with ThreadPoolExecutor(1) as other:  # both work at once: the library needs no lock
            setting = other.submit(spoke.setup, len(asking.left))
            request = asking.request()
            setup = setting.result()
        response = spoke.respond(request)
        asking.receive(setup, response)
        sent += [
            Sent(spoke.name, hub, "setup", setup),
            Sent(hub, spoke.name, "request", request),
            Sent(spoke.name, hub, "response", response),
        ]
    if not asking.left:
        raise _nothing(others[-1].name)
    common = asking.common()
    sent += [Sent(hub, spoke.name, "common", common) for spoke in others]
    rows = {hub: asking.rows(), **{spoke.name: spoke.rows(common) for spoke in others}}
    return Aligned({name: rows[name] for name in sorted(rows)}, sent)


def _nothing(name: str) -> UserError:
    remedy = "compare how the tables write their ids"
    return UserError("no id is common to all tables", name, remedy)


def assume_aligned(
    tables: Mapping[str, Sequence[str]],
    exact: bool = False,
    remedy: str = "align the tables without --assume-aligned",
) -> Aligned:
    """All rows in file order, if every table has the same ids in the same order."""
    ids = {name: normalised(values, exact) for name, values in tables.items()}
    first, *others = sorted(ids)
    refuse_bad(ids[first], first)
    for name in others:
        if len(ids[name]) != len(ids[first]):
            what = f"{len(ids[name])} rows, but '{first}' has {len(ids[first])}"
            raise UserError(what, name, remedy)
        for row, (one, other) in enumerate(zip(ids[first], ids[name], strict=True)):
            if one != other:
                what = f"row {row} has another id than in '{first}'"
                raise UserError(what, name, remedy)
    return Aligned({name: np.arange(len(ids[name])) for name in sorted(ids)}, [])


def read_ids(path: Path, column: str) -> list[str]:
    """The column of ids of a CSV or Parquet file, as text."""
    sheet = opened(path)
    if column not in sheet.columns:
        names = ", ".join(sheet.columns[:20])
        raise UserError(f"no column '{column}'", str(path), f"columns: {names}")
    columns = (batch.column(column).to_pylist() for batch in as_written(sheet))
    return [text or "" for ids in columns for text in ids]
