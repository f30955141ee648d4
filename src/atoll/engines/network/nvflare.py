"""The two classes that a job names: the site's end and the coordinator's end of a run.

NVFlare starts them in the processes of a job. `remote` carries the packets of a run, `session`
starts jobs, and `guard` filters all messages. Only modules that the import contract lists import
nvflare.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.collab import collab
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
from atoll.core.federation import Moment
from atoll.core.integrity import read_json
from atoll.core.messages import Packet
from atoll.core.record import (
    Exclusion,
    Record,
    write_whole,
)
from atoll.data.own.agreement import (
    Plan,
    elsewhere,
)
from atoll.engines.network.collection import collect, reason_for_none
from atoll.engines.network.contract import read_site
from atoll.engines.network.faults import spoilt
from atoll.engines.network.limits import expect
from atoll.engines.network.mirror import ENVIRONMENT as MIRROR
from atoll.engines.network.mirror import Mirror
from atoll.engines.network.policy import Gate, log
from atoll.engines.network.remote import Party, Remote, SiteLostError, packet_bytes
from atoll.engines.network.replies import Reply, error_kind, handle_request, reply_of
from atoll.engines.network.requests import COMPARE
from atoll.engines.network.size import answer_bytes
from atoll.runs.answer import write_assembled
from atoll.runs.config import read, resolve, to_toml
from atoll.runs.execute import prepare
from atoll.runs.facts import facts
from atoll.runs.loop import Progress, go
from atoll.runs.parts import Parts, refuse_labels
from atoll.runs.result import write_result

__all__ = ["Coordinator", "Outpost"]

LOCK_PATIENCE = 60.0  # seconds to wait for the process of an earlier job to end


def _die_with_parent() -> None:
    """End this process when its parent ends, so that no process is left running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="atoll-parent").start()


class Outpost:
    """The site's end: passes requests from the network to the gate."""

    def __init__(self) -> None:
        self._gate: Gate | None = None
        self._fault: Exception = RuntimeError("the gate was never opened")

    @collab.init  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Open the gate with the site's own file; an error here is the reply to every request."""
        _die_with_parent()
        try:
            mirror = Mirror(Path(os.environ[MIRROR])) if MIRROR in os.environ else None
            self._gate = Gate(read_site(Path(os.environ["ATOLL_SITE"])), mirror)
        except Exception as error:  # raised here, it would end the job silently
            self._fault = error

    @collab.publish  # type: ignore[untyped-decorator]
    def offer(
        self, run: str, config: str, client: str, header: bytes, block: bytes
    ) -> dict[str, Any]:
        """Describe this site's own table."""
        packet = Packet(header, block, 0, 0, ())
        return self._reply("offer", lambda gate: _left(gate.offer(run, config, client, packet)))

    @collab.publish  # type: ignore[untyped-decorator]
    def agree(self, header: bytes, block: bytes) -> dict[str, Any]:
        """Describe the common columns."""
        packet = Packet(header, block, 0, 0, ())
        return self._reply("agree", lambda gate: _left(gate.agree(packet)))

    @collab.publish  # type: ignore[untyped-decorator]
    def prepare(
        self, run: str, config: str, client: str, clients: list[str], plan: str
    ) -> dict[str, Any]:
        """Prepare a run."""
        return self._reply(
            "prepare",
            lambda gate: {
                "data": gate.prepare(run, config, client, clients, plan),
                "answer": gate.terms.answer,
            },
        )

    @collab.publish  # type: ignore[untyped-decorator]
    def handle(
        self, run: str, number: int, action: str, moment: list[int], header: bytes, block: bytes
    ) -> dict[str, Any]:
        """Answer a request of the method."""
        gate = self._gate
        if gate is None:
            return self._closed(str(action))
        packet = Packet(header, block, 0, 0, ())
        return _stranger(str(action)) or handle_request(
            gate, number, action, moment, packet, str(run) or "no run"
        )

    @collab.publish  # type: ignore[untyped-decorator]
    def finish(self, header: bytes, block: bytes) -> dict[str, Any]:
        """Store what predictions need."""
        packet = Packet(header, block, 0, 0, ())
        return self._reply("finish", lambda gate: gate.finish(packet))

    @collab.publish  # type: ignore[untyped-decorator]
    def compare(self, header: bytes, block: bytes) -> dict[str, Any]:
        """Compare the joined model with this site alone."""
        packet = Packet(header, block, 0, 0, ())
        return self._reply(COMPARE, lambda gate: _left(gate.compare(packet)))

    @collab.publish  # type: ignore[untyped-decorator]
    def alone(self) -> dict[str, Any]:
        """Restart as the only party, for the comparison."""
        return self._reply(COMPARE, lambda gate: _left(gate.alone()))

    @collab.publish  # type: ignore[untyped-decorator]
    def keep(self, place: str) -> dict[str, Any]:
        """Save the client's memory here."""
        return self._reply("keep", lambda gate: gate.keep(place))

    @collab.publish  # type: ignore[untyped-decorator]
    def restore(self, place: str) -> dict[str, Any]:
        """Restore what was saved here."""
        return self._reply("restore", lambda gate: {"there": gate.restore(place)})

    @collab.publish  # type: ignore[untyped-decorator]
    def snapshot(self, moment: list[int]) -> dict[str, Any]:
        """Store the client's snapshots here."""
        return self._reply("snapshot", lambda gate: gate.snapshot(Moment(*moment)))

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> dict[str, Any]:
        """Report the current work of this site."""
        allowed = self._gate is not None and not _stranger("ping")
        return {"doing": self._gate.doing if self._gate and allowed else ""}

    def _reply(self, action: str, work: Callable[[Gate], dict[str, Any] | None]) -> Reply:
        if self._gate is None:
            reply = self._closed(action)
        else:
            reply = _stranger(action) or reply_of(self._gate, action, work)
        return {**reply, "version": VERSION}

    def _closed(self, action: str) -> Reply:
        """Why the gate is closed, in fixed words; details are in the log of this site."""
        log.warning("%s", printable(f"{action[:80]}: {self._fault}"))
        kind, reason = error_kind(self._fault)
        return {"ok": False, "kind": kind, "reason": reason}


def _stranger(action: str) -> Reply:
    """The refusal of a call that is not from the run's server; empty if it is.

    NVFlare takes the name from a header that senders write. The filter of this process has already
    checked the connection; this is a second check.
    """
    caller = getattr(collab.context, "caller", "")
    if caller == "server":
        return {}
    words = printable(f"refused {action[:80]} from {str(caller)[:80]}: only the server asks")
    log.warning("%s", words)
    return {"ok": False, "kind": "refused", "reason": "only the server asks"}


def _left(packet: Packet) -> dict[str, Any]:
    return packet_bytes(spoilt(packet))


class Coordinator:
    """The coordinator's end: executes the runs of the plan one after another."""

    def __init__(self, control: str) -> None:
        self.control = Path(control)
        self._shown, self._done = 0.0, ""
        self._names: dict[str, str] = {}  # names of sites by the client's id
        self._notes: list[str] = []  # a note for the coordinator's screen at the end

    @collab.main  # type: ignore[untyped-decorator]
    def go(self) -> None:
        """Execute every run of the plan that is not finished, then report how it ended."""
        _die_with_parent()
        threading.Thread(target=self._live, daemon=True, name="atoll-alive").start()
        plan = json.loads((self.control / "plan.json").read_text())
        proxies = {proxy.name: proxy for proxy in collab.clients}
        try:
            for run in plan["runs"]:
                self._run(plan, run, proxies)
            ended: dict[str, Any] = {"ended": "done", "notes": self._notes}
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
        run_parts, record = (
            (None, None) if own else prepare(config, folder, True, None, LOCK_PATIENCE)
        )
        clients = run_parts.scenario.clients if run_parts else tuple(plan["sites"])
        parties = _parties(plan["sites"], clients, proxies)
        self._names = {id: party.name for id, party in parties.items()}
        self._tell(parties, run["id"], always=True)
        engine = Remote(
            config,
            parties,
            plan["deadline"],
            plan["silence"],
            tell=lambda: self._tell(parties, run["id"]),
            at_least=plan["at_least"],
        )
        if run_parts is None or record is None:
            run_parts, record = _on_own_tables(engine, run["id"], folder)
        else:
            _same_data(run_parts, engine.prepare(run["id"], None))
        self._notes += [f"{p.name} {p.excluded}" for p in parties.values() if p.excluded]
        expect(answer_bytes(run_parts))
        stop = self.control / "stop"
        with record:
            go(run_parts, engine, record, partial(self._progress, parties), stop.exists)
            if own and config.checkpoints:
                engine.finish(folder)
            body = self._collected(engine, run_parts, record) if plan["answer"] else None
            self._tell(parties, run["id"], always=True)
            write_result(folder, record.extents)
            if body:
                write_assembled(folder, body)

    def _collected(self, engine: Remote, run_parts: Parts, record: Record) -> dict[str, Any] | None:
        """Whether joining helps, from what sites release; None, and a note, where none does."""
        willing = sum(party.compares for party in engine.parties.values())
        reason = reason_for_none(run_parts, willing)
        if reason:
            self._notes.append(f"no answer for {record.folder.name}: {reason}")
            return None
        stop = self.control / "stop"
        return collect(engine, run_parts, record.folder, record, stop.exists, self._comparing)

    def _comparing(self, id: str) -> None:
        """Show which party trains alone."""
        self._done = f"comparing {self._names[id]}"

    def _live(self) -> None:
        """A heartbeat every other second."""
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
        """Write the state of all parties to a file that `serve` reads."""
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
    """Map sites to clients: by name if the names are equal, else in order."""
    if len(sites) != len(clients):
        raise UserError(
            f"{len(sites)} sites for a run with {len(clients)} clients", "the run's scenario",
            "let the run have as many clients as the project has sites",
        )  # fmt: skip
    names = sorted(sites)
    return {id: Party(name, id, proxies.get(name)) for name, id in zip(names, clients, strict=True)}


def _agreed(path: Path) -> dict[str, Any]:
    """The agreed plan of this run, and the fingerprints of the sites' tables."""
    parse = TypeAdapter(Plan).validate_python
    return read_json(path, lambda body: {"plan": parse(body["plan"]), "data": dict(body["data"])})


def _on_own_tables(engine: Remote, run: str, folder: Path) -> tuple[Parts, Record]:
    """The parts and record of a run on the sites' own tables; the run stores the agreement."""
    config, path = engine.config, folder / "agreed.json"
    if "text" in config.data or methods.load(config.method["name"]).split == "parties":
        remedy = "use tables, with chfl, fedavg or alone"
        raise UserError("own files of this kind stay on one machine", "data", remedy)
    agreed = _agreed(path) if path.exists() else None
    plan = agreed["plan"] if agreed else engine.agreement(run)
    if agreed:
        engine.introduce(run, plan, engine.parties.keys() - agreed["data"].keys())
    fingerprints = engine.prepare(run, plan)
    for id, fingerprint in fingerprints.items():
        if agreed and agreed["data"].get(id, fingerprint) != fingerprint:
            what, remedy = "its table has changed since the run began", "start a new run"
            raise UserError(what, engine.parties[id].name, remedy)
    ids = sorted(engine.parties)
    run_parts = Parts(config, *elsewhere(plan, ids, config.data["files"]))
    refuse_labels(run_parts.dataset, config)
    if agreed:
        return run_parts, Record.reopen(folder, LOCK_PATIENCE)
    record = Record.create(folder, to_toml(config), facts(run_parts), LOCK_PATIENCE)
    write_whole(path, json.dumps({"plan": asdict(plan), "data": fingerprints}, indent=1).encode())
    return run_parts, record


def _same_data(run_parts: Parts, fingerprints: Mapping[str, str]) -> None:
    """Refuse a site with different data under the same name."""
    for id, fingerprint in fingerprints.items():
        if fingerprint != run_parts.dataset.fingerprint:
            raise ClientFailedError(
                id, "prepare", f"it has other data named '{run_parts.dataset.name}'"
            )


def _ended(error: Exception, names: Mapping[str, str]) -> dict[str, Any]:  # noqa: PLR0911
    """How a job ended, as JSON for `serve`, with the names of sites."""
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
