"""The engine between sites: carries packets over NVFlare and monitors slow sites."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from nvflare.collab import CollabCallError

from atoll import methods
from atoll.core import VERSION
from atoll.core.errors import (
    BadMessageError,
    ClientFailedError,
    SiteLostError,
    UserError,
    printable,
)
from atoll.core.federation import Moment, actions, kinds
from atoll.core.messages import Empty, Packet, Tensors, opened, pack
from atoll.core.options import build
from atoll.core.record import Score, Snapshot, read_checkpoint, read_events
from atoll.data.own.agreement import (
    Agree,
    Agreed,
    Offer,
    Offered,
    Plan,
    common,
    narrowing,
    planned,
)
from atoll.data.own.tables import TableOptions
from atoll.engines.network.plans import most_of_all
from atoll.engines.network.requests import COMPARE, FEW_COLUMNS, LARGEST, Finish
from atoll.learning.weights import without
from atoll.metrics.release import Release, fault
from atoll.runs.config import RunConfig, to_toml

__all__ = ["Party", "Remote", "SiteLostError", "packet_bytes"]

PING_SECONDS = 2.0  # seconds between checks of sites that have not answered yet
PING_TIMEOUT = 5.0
TRIES = 3  # seconds of one request to a connected site
MISFORMED = "its answer is not of the agreed form"


def packet_bytes(packet: Packet) -> dict[str, Any]:
    """A packet in NVFlare's format."""
    return {"header": packet.header, "block": packet.block}


@dataclass
class Party:
    """The state of a site at the coordinator."""

    name: str
    client: str  # client id in the run
    proxy: Any = None  # None if it is away
    doing: str = ""
    seen: float = 0.0  # time of the last sign of life; 0 for never
    sent: int = 0  # bytes sent to it
    received: int = 0  # bytes received from it
    excluded: str = ""  # time and reason of the last exclusion of its answers
    compares: bool = False  # whether its contract allows a comparison at the end


@dataclass
class Remote:
    """The engine: carries packets to sites and monitors slow ones."""

    config: RunConfig
    parties: Mapping[str, Party]  # by the client's id
    deadline: float  # seconds that one exchange may take
    silence: float  # seconds without a sign of life after which a site counts as lost
    tell: Callable[[], None]  # called when there is something to show
    at_least: int = 0
    _number: int = 0
    _run: str = ""
    _narrowing: str = ""  # which site takes columns from all others

    def __post_init__(self) -> None:
        """Start a thread for every request, and one that monitors the sites."""
        self._pool = ThreadPoolExecutor(2 * len(self.parties))

    def agreement(self, run: str) -> Plan:
        """Let sites with own tables agree on columns; they send only hashes, types and levels."""
        values = {key: value for key, value in self.config.data.items() if key != "name"}
        options = build(TableOptions, values, "[data]")
        offers = self._offers(run, self.present)
        self._narrowing = narrowing(offers, options)
        agreed = self._agreed(common(offers, options), offers)
        if len(agreed) < len(offers):
            return self.agreement(run)  # without a site, others may have more columns in common
        return planned(run, offers, agreed, options)

    def introduce(self, run: str, plan: Plan, ids: Collection[str]) -> None:
        """Let sites that were away agree to a plan; a site refuses a plan without its agreement."""
        late = [id for id in self.present if id in ids]
        if late:
            offers = self._offers(run, late)
            self._agreed([column.hash for column in plan.columns], offers)

    def _offers(self, run: str, ids: Collection[str]) -> dict[str, Offered]:
        about = {"run": run, "config": to_toml(self.config), **packet_bytes(pack(Offer(run)))}
        offers = self._ask_each("offer", {id: {**about, "client": id} for id in ids}, Offered)
        id, reason = most_of_all(offers)
        while reason:  # the sites would refuse such a plan, and be blamed for it
            self._leave_out(id, reason)
            del offers[id]
            id, reason = most_of_all(offers)
        return offers

    def _leave_out(self, id: str, reason: str) -> None:
        """Start without a site whose answer allows no plan, or name it and end the run."""
        party = self.parties[id]
        if not self.at_least or len(self.present) <= self.at_least:
            raise BadMessageError(id, reason)
        party.proxy, party.excluded = None, f"left out of the run: {printable(reason)}"
        self.tell()

    def _agreed(self, columns: list[str], ids: Collection[str]) -> dict[str, Agreed]:
        packet = packet_bytes(pack(Agree(columns)))
        return self._ask_each("agree", dict.fromkeys(ids, packet), Agreed)

    def _ask_each(
        self, what: str, requests: Mapping[str, dict[str, Any]], kind: type
    ) -> dict[str, Any]:
        """Request a message from each site with own tables; in the order of the run's files."""
        replies = self._ask(what, requests)
        order = [Path(file).stem for file in self.config.data["files"]]
        ids = sorted(replies, key=lambda id: (order.index(id) if id in order else len(order), id))
        messages = {}
        for id in ids:
            try:
                messages[id] = self._opened(id, replies[id], kind).message
            except BadMessageError as error:
                self._leave_out(id, error.reason)
        return messages

    def prepare(self, run: str, plan: Plan | None) -> dict[str, str]:
        """Prepare a run at all sites; return the fingerprints of their data."""
        about = {
            "run": run, "config": to_toml(self.config), "clients": sorted(self.parties),
            "plan": json.dumps(asdict(plan)) if plan else "",
        }  # fmt: skip
        self._run = run
        try:
            replies = self._ask("prepare", {id: {**about, "client": id} for id in self.present})
        except ClientFailedError as error:
            if not self._narrowing or FEW_COLUMNS not in error.reason:
                raise
            reason = f"{error.reason}; {self._narrowing}"
            raise ClientFailedError(error.client, error.action, reason) from error
        for id, reply in replies.items():
            if not isinstance(reply.get("data"), str):
                raise BadMessageError(id, MISFORMED)
            self.parties[id].compares = reply.get("answer") is True
            self.parties[id].received += len(reply["data"].encode())  # as the site's log counts it
        return {id: reply["data"] for id, reply in replies.items()}

    @property
    def present(self) -> list[str]:
        """The clients with connected sites."""
        return [id for id in sorted(self.parties) if self.parties[id].proxy is not None]

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Send each packet to its site and return the answers; absent sites give none."""
        self._number += 1
        kind = kinds(actions(methods.load(self.config.method["name"]).client)[action])[1]
        when, requests = [moment.stage, moment.round, moment.rounds], {}
        for id in (id for id in self.present if id in packets):
            packet = packets[id]
            packet = pack(packet.message) if packet.message is not None else packet
            requests[id] = {
                "run": self._run, "number": self._number, "action": action, "moment": when,
                "header": packet.header, "block": packet.block,
            }  # fmt: skip
            self.parties[id].sent += packet.size
        replies = self._ask("handle", requests, action)
        return {id: self._carried(id, reply, kind) for id, reply in replies.items()}

    def _carried(self, id: str, reply: Mapping[str, Any], kind: type) -> Packet:
        """An answer as a packet; if it cannot be decoded, the server refuses it later."""
        try:
            return self._opened(id, reply, kind)
        except BadMessageError:
            parts = [reply.get(name) for name in ("header", "block")]
            header, block = (part if isinstance(part, bytes) else b"" for part in parts)
            return Packet(header, block, 0, len(header) + len(block), ())

    def _opened(self, id: str, reply: Mapping[str, Any], kind: type) -> Packet:
        header, block = reply.get("header"), reply.get("block")
        if not isinstance(header, bytes) or not isinstance(block, bytes):
            raise BadMessageError(id, "its answer is not made of bytes")
        self.parties[id].received += len(header) + len(block)
        return opened(header, block, kind, id)

    def finish(self, folder: Path) -> None:
        """Send every site what it needs for predictions: the shared state and its own scores."""
        tensors = read_checkpoint(folder)[0]
        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        scores = [e for e in read_events(folder) if isinstance(e, Score)]
        about, requests = (folder / "facts.json").read_text(), {}
        for id in self.present:
            own = "".join(
                json.dumps({"event": "score", **vars(e)}) + "\n" for e in scores if e.client == id
            )
            requests[id] = packet_bytes(pack(Finish.of(without("server", state), own, about)))
        self._ask("finish", requests)

    def compare(self, request: Packet) -> dict[str, Packet | str]:
        """Ask each site whose contract allows it for its comparison: a `Release`, or why not.

        The run is already complete, so a failed site does not stop others.
        """
        ids = [id for id in self.present if self.parties[id].compares]
        with ThreadPoolExecutor(max(1, len(ids))) as pool:
            replies = pool.map(lambda id: self._compared(id, request), ids)
            return dict(zip(ids, replies, strict=True))

    def _compared(self, id: str, request: Packet) -> Packet | str:
        self.parties[id].sent += request.size
        try:
            reply = self._ask(COMPARE, {id: packet_bytes(request)})[id]
            packet = self._opened(id, reply, Release)
            return MISFORMED if packet.size > LARGEST or fault(packet.message) else packet
        except (ClientFailedError, BadMessageError) as error:
            return printable(error.reason)
        except SiteLostError as error:
            return f"lost: {printable(error.reason)}"

    def willing(self, id: str) -> bool:
        """Whether a site's contract allows a comparison."""
        return self.parties[id].compares

    def alone(self, id: str) -> None:
        """Restart with one party as the only one besides the server."""
        self._opened(id, self._ask("alone", {id: {}}, COMPARE)[id], Empty)

    def states(self, place: str) -> dict[str, Tensors]:
        """Let every site save its client's state; no state is sent to the coordinator."""
        self._ask("keep", {id: {"place": place} for id in self.present})
        return {}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Let every site restore its state."""
        replies = self._ask("restore", {id: {"place": place} for id in self.present})
        for id, reply in replies.items():
            if not reply.get("there") and not self.at_least:
                name = self.parties[id].name
                raise UserError(
                    f"site {name} has no memory of round {place}", name,
                    "give it back its store, or start the run anew in another folder",
                )  # fmt: skip

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """Let every site store its snapshots; none are sent to the coordinator."""
        when = [moment.stage, moment.round, moment.rounds]
        self._ask("snapshot", {id: {"moment": when} for id in self.present})
        return []

    def _ask(
        self, what: str, requests: Mapping[str, dict[str, Any]], doing: str = ""
    ) -> dict[str, dict[str, Any]]:
        """Send all requests at once, check each answer, and monitor slow sites."""
        began = looked = time.monotonic()
        waiting: dict[Future[Any], str] = {}
        for id, arguments in requests.items():
            self.parties[id].doing = doing or what
            self.parties[id].seen = time.time()
            waiting[self._pool.submit(self._call, id, what, arguments)] = id
        replies: dict[str, dict[str, Any]] = {}
        self.tell()
        while waiting:
            finished, _ = wait(waiting, PING_SECONDS, FIRST_COMPLETED)
            for one in finished:
                id = waiting.pop(one)
                replies[id] = self._checked(id, what, doing or what, one.result())
            if waiting and time.monotonic() - looked > PING_SECONDS:
                self._look_after(waiting.values(), doing or what, time.monotonic() - began)
                looked = time.monotonic()
        return {id: replies[id] for id in sorted(replies)}

    def _call(self, id: str, what: str, arguments: dict[str, Any]) -> Any:
        """Send a request to one site; repeat it if the connection failed but the site is there."""
        party = self.parties[id]
        for left in reversed(range(TRIES)):
            try:
                return getattr(party.proxy(timeout=self.deadline), what)(**arguments)
            except CollabCallError as error:
                if not left or not self._ping(party):
                    raise SiteLostError(party.name, f"{type(error).__name__} in {what}") from error
        raise AssertionError

    def _ping(self, party: Party) -> bool:
        with suppress(CollabCallError):
            party.proxy(timeout=PING_TIMEOUT).ping()
            party.seen = time.time()
            return True
        return False

    def _look_after(self, ids: Iterable[str], doing: str, seconds: float) -> None:
        for id in ids:
            party = self.parties[id]
            self._ping(party)
            if time.time() - party.seen > self.silence:
                raise SiteLostError(party.name, f"silent for {self.silence:.0f} s in {doing}")
            if seconds > self.deadline:
                raise SiteLostError(party.name, f"no answer to {doing} in {self.deadline:.0f} s")
        self.tell()

    def _checked(self, id: str, what: str, doing: str, reply: Any) -> dict[str, Any]:
        party = self.parties[id]
        party.doing, party.seen = "", time.time()
        self.tell()
        if not isinstance(reply, dict):
            if what == "handle":
                return {}  # like an answer that cannot be decoded: the server's half refuses it
            raise BadMessageError(id, MISFORMED)
        version = str(reply.get("version", VERSION))[:40]
        if version != VERSION:
            reason = f"it has atoll {version} and the coordinator {VERSION}; install the same"
            raise ClientFailedError(party.name, doing, reason)
        if reply.get("ok") is not True:
            kind = "refused" if reply.get("kind") == "refused" else "failed"
            reason = str(reply.get("reason"))[:300]
            raise ClientFailedError(party.name, doing, f"{kind} there: {reason}")
        return reply
