"""The network engine: clients are processes at their sites, over mutual TLS, carried by NVFlare.

Only this file, `guard`, `presence`, `provision`, `standing` and `wire` import nvflare. It has the
two classes that a job names, one for the sites and one for the coordinator, and a few functions
around NVFlare's own: processes, jobs.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from nvflare.collab import CollabCallError, collab
from nvflare.fuel.f3.drivers import tcp_driver
from nvflare.fuel.f3.drivers.net_utils import ssl_required
from pydantic import TypeAdapter

from atoll import methods
from atoll.core import VERSION
from atoll.core.errors import (
    BadMessageError,
    ClientFailedError,
    InterruptedRunError,
    UserError,
    printable,
)
from atoll.core.federation import Moment, actions, kinds
from atoll.core.integrity import damaged
from atoll.core.messages import Packet, Tensors, opened, pack
from atoll.core.options import build
from atoll.core.record import (
    Exclusion,
    Look,
    Record,
    Score,
    read_checkpoint,
    read_events,
    write_whole,
)
from atoll.data.own.agreement import (
    Agree,
    Agreed,
    Offer,
    Offered,
    Plan,
    common,
    elsewhere,
    planned,
)
from atoll.data.own.tables import TableOptions
from atoll.engines.network.addresses import spelled, way_in
from atoll.engines.network.faults import spoilt
from atoll.engines.network.mirror import ENVIRONMENT as MIRROR
from atoll.engines.network.mirror import Mirror
from atoll.engines.network.policy import (
    Finish,
    Gate,
    Reply,
    answered,
    handled,
    log,
    read_site,
    told,
)
from atoll.engines.network.process import GUARD
from atoll.engines.network.tls import checked
from atoll.engines.network.wire import connecting
from atoll.learning.weights import without
from atoll.runs.config import RunConfig, read, resolve, to_toml
from atoll.runs.execute import prepare
from atoll.runs.facts import facts
from atoll.runs.loop import Progress, go
from atoll.runs.parts import Parts
from atoll.runs.result import write_result

__all__ = ["ENVIRONMENT", "Coordinator", "Outpost", "Remote", "SiteLostError"]

# Else a timer thread of every reply lives on for a minute.
ENVIRONMENT = {"NVFLARE_STREAMING_RETRY_TIMEOUT": "2", "NVFLARE_STREAMING_RETRY_WAIT": "0.5"}
PING_SECONDS = 2.0  # between looks at sites that have not answered yet
PING_TIMEOUT = 5.0
LOCK_PATIENCE = 60.0  # seconds for the process of a job before this one to end
TRIES = 3  # of one question to a site that is there
MISFORMED = "its answer is not of the agreed form"


class SiteLostError(Exception):
    """A site that was there and does not answer any more; the run can go on when it is back."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(f"site {site} was lost: {reason}")
        self.site, self.reason = site, reason


def _die_with_parent() -> None:
    """End this process when the one that started it is gone, so that nothing is left running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="atoll-parent").start()


class Outpost:
    """A site's end: takes questions off the network and hands them to the gate."""

    def __init__(self) -> None:
        self._gate: Gate | None = None
        self._fault: Exception = RuntimeError("the gate was never opened")

    @collab.init  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Open the gate with the site's own file; what hinders is the answer to every question."""
        _die_with_parent()
        try:
            mirror = Mirror(Path(os.environ[MIRROR])) if MIRROR in os.environ else None
            self._gate = Gate(read_site(Path(os.environ["ATOLL_SITE"])), mirror)
        except Exception as error:  # raised here, it would end the job without a word
            self._fault = error

    @collab.publish  # type: ignore[untyped-decorator]
    def offer(
        self, run: str, config: str, client: str, header: bytes, block: bytes
    ) -> dict[str, Any]:
        """Say what this site's own table has."""
        asked = Packet(header, block, 0, 0, ())
        return self._told("offer", lambda gate: _left(gate.offer(run, config, client, asked)))

    @collab.publish  # type: ignore[untyped-decorator]
    def agree(self, header: bytes, block: bytes) -> dict[str, Any]:
        """Say what else must be known of the common columns."""
        asked = Packet(header, block, 0, 0, ())
        return self._told("agree", lambda gate: _left(gate.agree(asked)))

    @collab.publish  # type: ignore[untyped-decorator]
    def prepare(
        self, run: str, config: str, client: str, clients: list[str], plan: str
    ) -> dict[str, Any]:
        """Make ready for a run."""
        return self._told(
            "prepare", lambda gate: {"data": gate.prepare(run, config, client, clients, plan)}
        )

    @collab.publish  # type: ignore[untyped-decorator]
    def handle(
        self, run: str, number: int, action: str, moment: list[int], header: bytes, block: bytes
    ) -> dict[str, Any]:
        """Answer a question of the method."""
        gate = self._gate
        if gate is None:
            return self._closed(str(action))
        asked = Packet(header, block, 0, 0, ())
        return _stranger(str(action)) or handled(
            gate, number, action, moment, asked, str(run) or "no run"
        )

    @collab.publish  # type: ignore[untyped-decorator]
    def finish(self, header: bytes, block: bytes) -> dict[str, Any]:
        """Keep what predictions need."""
        asked = Packet(header, block, 0, 0, ())
        return self._told("finish", lambda gate: gate.finish(asked))

    @collab.publish  # type: ignore[untyped-decorator]
    def keep(self, place: str) -> dict[str, Any]:
        """Save the client's memory here."""
        return self._told("keep", lambda gate: gate.keep(place))

    @collab.publish  # type: ignore[untyped-decorator]
    def restore(self, place: str) -> dict[str, Any]:
        """Go back to what was saved here."""
        return self._told("restore", lambda gate: {"there": gate.restore(place)})

    @collab.publish  # type: ignore[untyped-decorator]
    def look(self, moment: list[int]) -> dict[str, Any]:
        """Keep here what the client sees of itself."""
        return self._told("look", lambda gate: gate.look(Moment(*moment)))

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> dict[str, Any]:
        """What is being done here now."""
        known = self._gate is not None and not _stranger("ping")
        return {"doing": self._gate.doing if self._gate and known else ""}

    def _told(self, action: str, work: Callable[[Gate], dict[str, Any] | None]) -> Reply:
        if self._gate is None:
            reply = self._closed(action)
        else:
            reply = _stranger(action) or answered(self._gate, action, work)
        return {**reply, "version": VERSION}

    def _closed(self, action: str) -> Reply:
        """Why there is no gate, in the fixed words that may leave; the rest is for the log here."""
        log.warning("%s", printable(f"{action[:80]}: {self._fault}"))
        kind, reason = told(self._fault)
        return {"ok": False, "kind": kind, "reason": reason}


def _stranger(action: str) -> Reply:
    """The refusal of a call that is not from the run's server; empty for the server's own.

    The name is what NVFlare makes of a header that senders write. The filter of this process has
    looked at the connection before; this is the second look.
    """
    caller = getattr(collab.context, "caller", "")
    if caller == "server":
        return {}
    words = printable(f"refused {action[:80]} from {str(caller)[:80]}: only the server asks")
    log.warning("%s", words)
    return {"ok": False, "kind": "refused", "reason": "only the server asks"}


def _bytes(packet: Packet) -> dict[str, Any]:
    return {"header": packet.header, "block": packet.block}


def _left(packet: Packet) -> dict[str, Any]:
    return _bytes(spoilt(packet))


@dataclass
class Party:
    """What the coordinator knows of a site."""

    name: str
    client: str  # its id in the run
    proxy: Any = None  # None where it is away
    doing: str = ""
    seen: float = 0.0  # when it gave the last sign of life; 0 for never
    sent: int = 0  # bytes to it
    received: int = 0  # bytes from it
    excluded: str = ""  # when and why its answers were left out last


@dataclass
class Remote:
    """The engine: carries packets to sites and looks after those that take long."""

    config: RunConfig
    parties: Mapping[str, Party]  # by the client's id
    deadline: float  # seconds that one exchange may take
    silence: float  # seconds without a sign of life after which a site counts as lost
    tell: Callable[[], None]  # called when something is to be shown
    at_least: int = 0
    _number: int = 0
    _run: str = ""

    def __post_init__(self) -> None:
        """A thread for every question, and one for a look at who answers it."""
        self._pool = ThreadPoolExecutor(2 * len(self.parties))

    def agreement(self, run: str) -> Plan:
        """Let sites with own tables agree on columns; only hashes, types and levels come here."""
        given = {key: value for key, value in self.config.data.items() if key != "name"}
        options = build(TableOptions, given, "[data]")
        about = {"run": run, "config": to_toml(self.config)}
        offer = pack(Offer(run))
        asked = {id: {**about, "client": id, **_bytes(offer)} for id in self.present}
        offers = self._told("offer", asked, Offered)
        columns = pack(Agree(common(offers, options)))
        agreed = self._told("agree", {id: _bytes(columns) for id in self.present}, Agreed)
        return planned(run, offers, agreed, options)

    def _told(self, what: str, asked: Mapping[str, dict[str, Any]], kind: type) -> dict[str, Any]:
        """Messages that sites with own tables give, in the order of the run's files."""
        replies = self._ask(what, asked)
        order = [Path(file).stem for file in self.config.data["files"]]
        ids = sorted(replies, key=lambda id: (order.index(id) if id in order else len(order), id))
        return {id: self._opened(id, replies[id], kind).message for id in ids}

    def prepare(self, run: str, plan: Plan | None) -> dict[str, str]:
        """Make all sites ready for a run; the fingerprints of their data."""
        about = {
            "run": run, "config": to_toml(self.config), "clients": sorted(self.parties),
            "plan": json.dumps(asdict(plan)) if plan else "",
        }  # fmt: skip
        self._run = run
        replies = self._ask("prepare", {id: {**about, "client": id} for id in self.present})
        for id, reply in replies.items():
            if not isinstance(reply.get("data"), str):
                raise BadMessageError(id, MISFORMED)
        return {id: reply["data"] for id, reply in replies.items()}

    @property
    def present(self) -> list[str]:
        """The clients whose sites are there."""
        return [id for id in sorted(self.parties) if self.parties[id].proxy is not None]

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Bring each packet to its site and bring back the answers; those away give none."""
        self._number += 1
        kind = kinds(actions(methods.load(self.config.method["name"]).client)[action])[1]
        when, asked = [moment.stage, moment.round, moment.rounds], {}
        for id in (id for id in self.present if id in packets):
            packet = packets[id]
            packet = pack(packet.message) if packet.message is not None else packet
            asked[id] = {
                "run": self._run, "number": self._number, "action": action, "moment": when,
                "header": packet.header, "block": packet.block,
            }  # fmt: skip
            self.parties[id].sent += packet.size
        replies = self._ask("handle", asked, action)
        return {id: self._carried(id, reply, kind) for id, reply in replies.items()}

    def _carried(self, id: str, reply: Mapping[str, Any], kind: type) -> Packet:
        """An answer; one that cannot be read stays as it came, and whoever asked refuses it."""
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
        """Give every site what it needs to predict by itself: the shared state, its own scores."""
        tensors = read_checkpoint(folder)[0]
        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        scores = [e for e in read_events(folder) if isinstance(e, Score)]
        about, asked = (folder / "facts.json").read_text(), {}
        for id in self.present:
            own = "".join(
                json.dumps({"event": "score", **vars(e)}) + "\n" for e in scores if e.client == id
            )
            asked[id] = _bytes(pack(Finish.of(without("server", state), own, about)))
        self._ask("finish", asked)

    def states(self, place: str) -> dict[str, Tensors]:
        """Let every site keep its client's memory; nothing of it comes here."""
        self._ask("keep", {id: {"place": place} for id in self.present})
        return {}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Let every site go back to what it kept."""
        replies = self._ask("restore", {id: {"place": place} for id in self.present})
        for id, reply in replies.items():
            if not reply.get("there") and not self.at_least:
                name = self.parties[id].name
                raise UserError(
                    f"site {name} has no memory of round {place}", name,
                    "give it back its store, or start the run anew in another folder",
                )  # fmt: skip

    def looks(self, moment: Moment) -> list[Look]:
        """Let every site keep what it sees of itself; nothing of it comes here."""
        when = [moment.stage, moment.round, moment.rounds]
        self._ask("look", {id: {"moment": when} for id in self.present})
        return []

    def _ask(
        self, what: str, asked: Mapping[str, dict[str, Any]], doing: str = ""
    ) -> dict[str, dict[str, Any]]:
        """One exchange: all at once, each answer checked, those that wait looked after."""
        began = looked = time.monotonic()
        waiting: dict[Future[Any], str] = {}
        for id, arguments in asked.items():
            self.parties[id].doing = doing or what
            self.parties[id].seen = time.time()
            waiting[self._pool.submit(self._call, id, what, arguments)] = id
        replies: dict[str, dict[str, Any]] = {}
        self.tell()
        while waiting:
            done, _ = wait(waiting, PING_SECONDS, FIRST_COMPLETED)
            for one in done:
                id = waiting.pop(one)
                replies[id] = self._checked(id, what, doing or what, one.result())
            if waiting and time.monotonic() - looked > PING_SECONDS:
                self._look_after(waiting.values(), doing or what, time.monotonic() - began)
                looked = time.monotonic()
        return {id: replies[id] for id in sorted(replies)}

    def _call(self, id: str, what: str, arguments: dict[str, Any]) -> Any:
        """A question to one site; asked again where the way there failed but the site is there."""
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
                return {}  # as an answer that cannot be read: whoever asked refuses it
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


class Coordinator:
    """The coordinator's end: runs what the plan says, one run after another."""

    def __init__(self, control: str) -> None:
        self.control = Path(control)
        self._shown, self._done = 0.0, ""
        self._names: dict[str, str] = {}  # of sites, by the client's id

    @collab.main  # type: ignore[untyped-decorator]
    def go(self) -> None:
        """Do every run of the plan that has not been done, then say how it ended."""
        _die_with_parent()
        threading.Thread(target=self._live, daemon=True, name="atoll-alive").start()
        plan = json.loads((self.control / "plan.json").read_text())
        proxies = {proxy.name: proxy for proxy in collab.clients}
        try:
            for run in plan["runs"]:
                self._run(plan, run, proxies)
            ended = {"ended": "done"}
        except Exception as error:
            ended = _ended(error, self._names)
            log.warning("%s", error, exc_info=True)
        write_whole(self.control / "ended.json", json.dumps(ended).encode())

    def _run(self, plan: dict[str, Any], run: dict[str, Any], proxies: Mapping[str, Any]) -> None:
        folder = Path(run["folder"])
        if (folder / "result.json").exists():
            return
        source = folder / "config.toml" if (folder / "config.toml").exists() else run["config"]
        config = resolve(read(str(source)), str(source))
        own = "files" in config.data
        made, record = (None, None) if own else prepare(config, folder, True, None, LOCK_PATIENCE)
        clients = made.scenario.clients if made else tuple(plan["sites"])
        parties = _parties(plan["sites"], clients, proxies)
        self._names = {id: party.name for id, party in parties.items()}
        self._tell(parties, run["id"], always=True)
        engine = Remote(
            *(config, parties, plan["deadline"], plan["silence"]),
            tell=lambda: self._tell(parties, run["id"]),
            at_least=plan["at_least"],
        )
        if made is None or record is None:
            made, record = _on_own_tables(engine, run["id"], folder)
        else:
            _same_data(made, engine.prepare(run["id"], None))
        stop = self.control / "stop"
        with record:
            go(made, engine, record, partial(self._progress, parties), stop.exists)
            if own and config.checkpoints:
                engine.finish(folder)
            self._tell(parties, run["id"], always=True)
            write_result(folder, record.extents)

    def _live(self) -> None:
        """A sign of life every other second, whatever is being done."""
        while True:
            with suppress(OSError):
                os.utime(self.control / "status.json")
            time.sleep(2)

    def _progress(self, parties: Mapping[str, Party], progress: Progress) -> None:
        stage, number = progress.stage + 1, progress.round + 1
        for event in progress.events:
            if isinstance(event, Exclusion):
                where = f"stage {event.stage + 1} round {event.round + 1}"
                parties[event.client].excluded = f"left out of {where}: {event.reason}"
        self._done = f"stage {stage}/{progress.stages} round {number}/{progress.rounds} done"

    def _tell(self, parties: Mapping[str, Party], run: str, always: bool = False) -> None:
        """Write down where everybody stands, for whoever watches."""
        now = time.time()
        if not always and now - self._shown < 0.3:
            return
        self._shown = now
        body = {
            party.name: {
                "there": party.proxy is not None, "doing": party.doing, "seen": party.seen,
                "sent": party.sent, "received": party.received, "excluded": party.excluded,
            }
            for party in parties.values()
        }  # fmt: skip
        path = self.control / "status.json"
        part = path.with_name(".status.json.part")
        with suppress(OSError):
            part.write_text(json.dumps({"run": run, "done": self._done, "sites": body}))
            part.replace(path)


def _parties(
    sites: list[str], clients: tuple[str, ...], proxies: Mapping[str, Any]
) -> dict[str, Party]:
    """Which site is which client: by name where the names are the same, else in their order."""
    if len(sites) != len(clients):
        raise UserError(
            f"{len(sites)} sites for a run with {len(clients)} clients", "the run's scenario",
            "let the run have as many clients as the project has sites",
        )  # fmt: skip
    named = sorted(sites)
    return {id: Party(name, id, proxies.get(name)) for name, id in zip(named, clients, strict=True)}


def _agreed(path: Path) -> dict[str, Any]:
    """What the sites have agreed on for this run, and the fingerprints of their tables."""
    try:
        body = json.loads(path.read_bytes())
        return {"plan": TypeAdapter(Plan).validate_python(body["plan"]), "data": dict(body["data"])}
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path) from error


def _on_own_tables(engine: Remote, run: str, folder: Path) -> tuple[Parts, Record]:
    """A run whose tables are at the sites: what was agreed once stays with the run."""
    config, path = engine.config, folder / "agreed.json"
    if "text" in config.data or methods.load(config.method["name"]).split == "parties":
        remedy = "use tables, with chfl, fedavg or alone"
        raise UserError("own files of this kind stay on one machine", "data", remedy)
    kept = _agreed(path) if path.exists() else None
    plan = kept["plan"] if kept else engine.agreement(run)
    found = engine.prepare(run, plan)
    for id, fingerprint in found.items():
        if kept and kept["data"].get(id, fingerprint) != fingerprint:
            what, remedy = "its table has changed since the run began", "start a new run"
            raise UserError(what, engine.parties[id].name, remedy)
    ids = sorted(engine.parties)
    made = Parts(config, *elsewhere(plan, ids, config.data["files"]))
    if kept:
        return made, Record.reopen(folder, LOCK_PATIENCE)
    record = Record.create(folder, to_toml(config), facts(made), LOCK_PATIENCE)
    write_whole(path, json.dumps({"plan": asdict(plan), "data": found}, indent=1).encode())
    return made, record


def _same_data(made: Parts, found: Mapping[str, str]) -> None:
    """Refuse a site that has other data under the same name."""
    for id, fingerprint in found.items():
        if fingerprint != made.dataset.fingerprint:
            raise ClientFailedError(id, "prepare", f"it has other data named '{made.dataset.name}'")


def _ended(error: Exception, names: Mapping[str, str]) -> dict[str, Any]:  # noqa: PLR0911
    """How a job ended, for whoever started it: one line for each kind, with names of sites."""
    if isinstance(error, SiteLostError):
        return {"ended": "lost", "site": error.site, "what": str(error)}
    if isinstance(error, InterruptedRunError):
        return {"ended": "stopped"}
    if isinstance(error, UserError):
        parts = {"what": error.what, "where": error.where, "remedy": error.remedy}
        return {"ended": "mistake", **parts, "exit_code": error.exit_code}
    if isinstance(error, ClientFailedError):
        parts = {"action": error.action, "reason": error.reason}
        return {"ended": "failed", "client": names.get(error.client, error.client), **parts}
    if isinstance(error, BadMessageError):
        sender = names.get(error.sender, error.sender)
        return {"ended": "refused", "sender": sender, "reason": error.reason}
    if type(error).__name__ == "RunAborted":
        return {"ended": "lost", "site": "", "what": "the job was ended from outside"}
    return {"ended": "fault", "what": f"{type(error).__name__}: {error}"}


# Around NVFlare: processes, jobs


def command(kind: str, kit: Path, name: str) -> list[str]:
    """How NVFlare's process of a server or a site is started, behind its filter."""
    own = [f"uid={name}"] if kind == "client" else []
    return [
        *(sys.executable, "-u", "-m", GUARD, kind, "-m", str(kit), "-s", f"fed_{kind}.json"),
        *("--set", "secure_train=true", *own, "org=atoll", "config_folder=config"),
    ]


class Session:
    """The coordinator's line to its own server: who is there, start a job, how does it stand."""

    def __init__(self, admin: str, kit: Path, server: str) -> None:
        """`server`: the public name, as certificates have it; the line stays on this machine."""
        self.admin, self.kit = admin, kit
        connecting({spelled(server): way_in(server)})
        self._session: Any = None
        tcp_driver.get_ssl_context = checked(ssl_required, log.warning)
        logging.getLogger().addHandler(logging.NullHandler())  # it would print what it retries
        logging.getLogger().setLevel(logging.CRITICAL)

    def connect(self) -> bool:
        """Whether the server could be reached."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session  # noqa: PLC0415

        self.close()
        quiet = StringIO()
        try:
            with redirect_stdout(quiet):
                self._session = new_secure_session(self.admin, str(self.kit), timeout=2.0)
        except Exception:  # whatever it is, the server is not there yet
            return False
        return True

    def sites(self) -> dict[str, float] | None:
        """The sites that are connected, each with when it was last heard; None: no server."""
        info = self._do(lambda session: session.get_system_info())
        if info is None:
            return None
        return {one.name: float(one.last_connect_time) for one in info.client_info}

    def submit(self, job: Path) -> str:
        """Start a job; its id, empty where there is no server."""
        return str(self._do(lambda session: session.submit_job(str(job))) or "")

    def state(self, job: str) -> str | None:
        """How a job stands, in NVFlare's words; None: no server."""
        meta = self._do(lambda session: session.get_job_meta(job))
        return None if meta is None else str(meta.get("status", ""))

    def abort(self, job: str) -> None:
        """End a job."""
        self._do(lambda session: session.abort_job(job))

    def ban(self, site: str) -> None:
        """Let the server hear no more of a site, from now on."""
        self._do(lambda session: session.disable_client(site))

    def _do(self, work: Callable[[Any], Any]) -> Any:
        quiet = StringIO()
        if self._session is None and not self.connect():
            return None
        try:
            with redirect_stdout(quiet):
                return work(self._session)
        except Exception:  # the line is made anew the next time
            self.close()
            return None

    def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            with suppress(Exception), redirect_stdout(StringIO()):
                self._session.close()
            self._session = None
