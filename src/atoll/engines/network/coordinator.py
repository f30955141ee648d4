"""The coordinator: submits runs as jobs, watches the sites, and resumes after faults.

NVFlare provides the network, TLS and authentication. If a site, a job or the server dies, the run
is submitted again and resumes from its checkpoint. The coordinator reports missing sites.
"""

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll import methods
from atoll.core.errors import (
    EXIT_SITE_FAILED,
    BadMessageError,
    ClientFailedError,
    InterruptedRunError,
    UserError,
)
from atoll.core.options import NotNegative, NotNegativeInt, Positive, build
from atoll.core.record import disk_errors, write_whole
from atoll.engines.network.addresses import is_taken
from atoll.engines.network.job import write_job
from atoll.engines.network.kits import ADMIN, COORDINATOR, Kit
from atoll.engines.network.notices import Notices
from atoll.engines.network.process import (
    ENDS,
    Process,
    alone,
    end_former,
    environment,
    nvflare,
    read_json,
    running,
)
from atoll.runs.config import RunConfig, to_toml

__all__ = ["Terms", "View", "lines", "serve"]

FRESH = 20.0  # seconds without contact to NVFlare after which a site counts as away
STUCK = 5  # maximum number of successive jobs without progress
START_SECONDS = 90.0  # seconds for a job to start
END_SECONDS = 8.0  # seconds for NVFlare to end a finished job


@dataclass(frozen=True)
class Terms:
    """How patient the coordinator is, and whether it asks for comparisons."""

    deadline: Positive = 3600.0  # maximum seconds of one exchange
    silence: Positive = 30.0  # seconds without a sign of life after which a site counts as lost
    patience: NotNegative = 120.0  # seconds to wait for a site before going on without it
    at_least: NotNegativeInt = 0  # minimum number of connected sites if some may be away; 0: all
    answer: bool = True  # ask sites at the end whether joining helps


@dataclass
class View:
    """The state of a party, for one line on the screen."""

    name: str
    state: str  # connected, working, away, revoked
    doing: str = ""
    seen: float = 0.0  # seconds ago; 0 for never
    sent: int = 0
    received: int = 0
    excluded: str = ""  # time and reason of the last exclusion of its answers


@dataclass
class _Serving:
    """A coordinator at work."""

    kit: Kit
    todo: Sequence[tuple[RunConfig, Path]]
    terms: Terms
    tell: Callable[[str, list[View]], None]  # shows progress and the parties
    stopping: Callable[[], bool]
    note: Callable[[str], None]  # shows a persistent line on the screen
    control: Path = field(init=False)

    def __post_init__(self) -> None:
        self.control = self.kit.folder.resolve() / "work"
        self.host = Process("server", self.kit, environment(PYTHONUNBUFFERED="1"))
        self.session = nvflare().Session(
            ADMIN, self.kit.folder.resolve() / "admin", self.kit.server
        )
        self.heard: dict[str, float] = {}
        self.notices = Notices(self.kit.folder)
        self.notices.clear()
        self.lost = ""  # why the last job ended
        self.moved: dict[str, tuple[int, int]] = {}  # bytes to and from each site in earlier jobs

    @property
    def quorum(self) -> int:
        """The sites required to begin."""
        can = all(methods.load(config.method["name"]).quorum for config, _ in self.todo)
        return self.terms.at_least if can and self.terms.at_least else len(self.kit.sites)

    def go(self) -> None:
        """Execute all runs; submits lost jobs again."""
        idle, before = 0, self._progress()
        try:
            while True:
                sites = self._wait()
                ended = self._job(sites)
                if self._over(ended):
                    for line in ended.get("notes", []):
                        self.note(str(line))
                    for name, (sent, received) in sorted(self.moved.items()):
                        self.note(f"{name}: {sent:,} bytes to it, {received:,} from it")
                    return
                idle = 0 if self._progress() != before else idle + 1
                before = self._progress()
                if idle >= STUCK:
                    raise UserError(
                        f"{STUCK} jobs in a row brought the run no further: {self.lost}",
                        str(self.kit.folder / "nvflare.log"),
                        "mend what failed, then start atoll serve again: it goes on",
                        EXIT_SITE_FAILED,
                    )
        finally:
            self.session.close()
            self.host.stop()

    def _progress(self) -> list[int]:
        paths = [folder / "checkpoint.safetensors" for _, folder in self.todo]
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]

    def _wait(self) -> list[str]:
        """Wait until enough sites are connected."""
        began = time.monotonic()
        while True:
            if self.stopping():
                raise InterruptedRunError
            connected, all_sites = self._here(), self.kit.sites  # revoked sites are not awaited
            waited = time.monotonic() - began
            enough = len(connected) >= self.quorum and waited > self.terms.patience
            if len(connected) == len(all_sites) or enough:
                return connected
            missing = [name for name in all_sites if name not in connected]
            self.tell(f"waiting for {len(missing)} of {len(all_sites)}", self._views())
            time.sleep(0.5)

    def _here(self) -> list[str]:
        """The sites that contacted NVFlare recently; starts the server if it is not running."""
        if self.host.ensure() and self.host.starts > 1:
            self.session.close()
        for notice in self.notices.new():
            self.note(notice.words)
        last_seen = self.session.sites()
        if last_seen is not None:
            self.heard |= last_seen
            for name in last_seen.keys() - set(self.kit.sites):
                self.session.ban(name)  # a revoked site, or one of another list
        now = time.time()
        return [n for n in self.kit.sites if last_seen and now - last_seen.get(n, 0.0) < FRESH]

    def _views(self) -> list[View]:
        """The view of every party, including the job's status."""
        now, reports = time.time(), read_json(self.control / "status.json").get("sites", {})
        views = []
        for name in self.kit.sites:
            one = reports.get(name, {})
            seen = max(self.heard.get(name, 0.0), float(one.get("seen", 0.0)))
            ago = now - seen if seen else 0.0
            doing = str(one.get("doing", ""))
            state = "away" if not seen or ago > FRESH else "working" if doing else "connected"
            moved, excluded = self._moved(name, one), str(one.get("excluded", ""))
            views.append(View(name, state, doing, ago, *moved, excluded))
        strangers = [name for name in self.heard if name not in self.kit.sites]
        return views + [View(name, "revoked", "", now - self.heard[name]) for name in strangers]

    def _moved(self, name: str, status: Mapping[str, Any]) -> tuple[int, int]:
        """The bytes to and from a site in all jobs, including those reported by the current job."""
        sent, received = self.moved.get(name, (0, 0))
        return sent + int(status.get("sent", 0)), received + int(status.get("received", 0))

    def _job(self, sites: list[str]) -> dict[str, Any]:
        """Submit a job and watch it to its end; return how it ended, empty if unknown."""
        for name in ("ended.json", "status.json", "stop"):
            (self.control / name).unlink(missing_ok=True)
        plan = {
            "sites": self.kit.sites, "deadline": self.terms.deadline,
            "silence": self.terms.silence, "answer": self.terms.answer,
            "at_least": 0 if self.quorum == len(self.kit.sites) else self.quorum,
            "runs": [
                {"folder": str(f.resolve()), **read_json(_beside(self.kit, f))}
                for _, f in self.todo
            ],
        }  # fmt: skip
        write_whole(self.control / "plan.json", json.dumps(plan).encode())
        folder = self.control / "job"
        write_job(folder, self.control, sites)
        job = self.session.submit(folder)
        if not job:
            return {}
        self._watch(job, sites)
        for name, status in read_json(self.control / "status.json").get("sites", {}).items():
            self.moved[name] = self._moved(name, status)
        (self.control / "status.json").unlink(missing_ok=True)  # nobody works on anything now
        return {**read_json(self.control / "ended.json"), "job": job}

    def _watch(self, job: str, sites: list[str]) -> None:
        """Wait until the job has ended, its server has stopped, or it stops responding."""
        began, looked, starts = time.monotonic(), 0.0, self.host.starts
        while True:
            time.sleep(0.25)
            if self.stopping() or self._returned(sites):
                (self.control / "stop").touch()
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                self._here()
                state = self.session.state(job)
                if self.host.starts > starts or (state or "").startswith("FINISHED"):
                    return
                if self._said_so():
                    self._end(job)
                    return
            quiet = self._quiet(began)
            if quiet > START_SECONDS:
                self._end(job)
                return
            progress = str(read_json(self.control / "status.json").get("done", ""))
            self.tell(progress or ("running" if quiet < 10 else "starting"), self._views())

    def _said_so(self) -> bool:
        """Whether the job reported its end more than some seconds ago."""
        try:
            return time.time() - (self.control / "ended.json").stat().st_mtime > END_SECONDS
        except OSError:
            return False

    def _end(self, job: str) -> None:
        """End a finished job: NVFlare waits a minute for a disconnected site."""
        self.session.abort(job)
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            if (self.session.state(job) or "").startswith("FINISHED"):
                return
            time.sleep(0.5)
        for pid in running(str(self.kit.folder.resolve()), "server_job"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _quiet(self, began: float) -> float:
        """Seconds since the last sign of life from the job's process."""
        try:
            return time.time() - (self.control / "status.json").stat().st_mtime
        except OSError:
            return time.monotonic() - began + 10

    def _returned(self, sites: list[str]) -> bool:
        """Whether a missing site of the job has returned."""
        now = time.time()
        away = [name for name in self.kit.sites if name not in sites]
        return any(now - self.heard.get(name, 0.0) < FRESH / 2 for name in away)

    def _lost(self, ended: Mapping[str, Any]) -> str:
        """Why a job was lost, and which site ended first if known."""
        if ended.get("site"):
            return str(ended["what"])
        ends = read_json(self.control / ENDS).get(str(ended.get("job", "")), [])
        failed = sorted({site for site, code in ends if code != 0})  # who was told to stop says 0
        if failed:
            return f"the job's process at {' and '.join(failed)} ended"
        return str(ended.get("what", "the coordinator's own end of the job is gone"))

    def _over(self, ended: Mapping[str, Any]) -> bool:
        """Whether the run is finished; raises errors that another job cannot fix."""
        outcome = ended.get("ended", "")
        if outcome == "done":
            return True
        if outcome == "mistake":
            what, where, remedy = (str(ended[k]) for k in ("what", "where", "remedy"))
            raise UserError(what, where, remedy, int(ended["exit_code"]))
        if outcome == "failed":
            raise ClientFailedError(ended["client"], ended["action"], ended["reason"])
        if outcome == "refused":
            raise BadMessageError(ended["sender"], ended["reason"])
        if outcome == "fault":
            raise RuntimeError(str(ended["what"]))
        if outcome == "stopped" and self.stopping():
            raise InterruptedRunError
        self.lost = self._lost(ended)
        if outcome != "stopped":
            self.tell(f"{self.lost}; going on from the last checkpoint", self._views())
        return False


def _beside(kit: Kit, folder: Path) -> Path:
    """The file with the run's name at the sites."""
    short = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()
    return kit.folder.resolve() / "work" / f"run-{short}.json"


def serve(
    kit: Kit,
    todo: Sequence[tuple[RunConfig, Path]],
    terms: Terms,
    tell: Callable[[str, list[View]], None],
    stopping: Callable[[], bool],
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Coordinate runs until they finish; resumes interrupted runs.

    `note` receives lines about the keys of the parties and refused connections.
    """
    build(Terms, vars(terms), "atoll serve")
    for name in sorted({str(config.method["name"]) for config, _ in todo}):
        if terms.at_least and not methods.load(name).quorum:
            able = ", ".join(n for n in methods.names() if methods.load(n).quorum)
            what, remedy = f"'{name}' cannot do without a site", f"leave it out; {able} can"
            raise UserError(what, "--at-least", remedy)
    if kit.name != COORDINATOR:
        raise UserError(f"this is the kit of site {kit.name}", str(kit.folder), "use atoll join")
    if terms.at_least > len(kit.sites):
        what = f"{terms.at_least} sites must be there and the project has {len(kit.sites)}"
        raise UserError(what, "--at-least", "name fewer, or leave it out for all")
    kit.check()
    with alone(kit):
        end_former(kit)
        _free(kit)
        _settle(kit)
        for config, folder in todo:
            _register(kit, config, folder)
        note(f"{kit.name}: the key {kit.fingerprint}; the authority {kit.authority}")
        _Serving(kit, todo, terms, tell, stopping, note).go()


def _register(kit: Kit, config: RunConfig, folder: Path) -> None:
    """Store the config of a run and its name at the sites; a new run gets a new name."""
    path = _beside(kit, folder)
    if not (folder / "config.toml").exists() or not path.exists():
        name = f"{re.sub(r'[^A-Za-z0-9-]+', '-', config.name)}-{os.urandom(6).hex()}"
        write_whole(path.with_suffix(".toml"), to_toml(config).encode())
        body = {"id": name, "config": str(path.with_suffix(".toml"))}
        write_whole(path, json.dumps(body).encode())


def _settle(kit: Kit) -> None:
    """Set up a job store for this kit; NVFlare's default is shared by all servers of a machine."""
    path, work = kit.folder / "local" / "resources.json", kit.folder.resolve() / "work"
    with disk_errors(work):
        work.mkdir(mode=0o700, exist_ok=True)
        resources = json.loads(path.read_text())
    storage = resources["snapshot_persistor"]["args"]["storage"]["args"]
    storage["root_dir"] = str(work / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(work / "jobs")
    write_whole(path, json.dumps(resources, indent=1).encode())
    banned = read_json(kit.folder / "disabled_clients.json").get("disabled_clients", [])
    still = [name for name in banned if name not in kit.sites]  # who is back on the list is heard
    body = json.dumps({"disabled_clients": still}).encode()
    write_whole(kit.folder / "disabled_clients.json", body)


def _free(kit: Kit) -> None:
    """Refuse a port that another program uses."""
    if is_taken(kit.server, kit.port):
        raise UserError(
            f"port {kit.port} is taken by another program", str(kit.folder),
            "stop that, or give the project another port and make its kits anew",
        )  # fmt: skip


def lines(what: str, views: Iterable[View]) -> list[str]:
    """The state of each party, one line each."""
    texts = []
    for view in views:
        ago = f"last seen {view.seen:.0f} s ago" if view.seen else "not seen yet"
        doing = f"working on {view.doing}" if view.state == "working" else view.state
        doing += f" ({view.excluded})" if view.excluded else ""
        moved = f", {view.sent:,} bytes to it, {view.received:,} from it"
        moved = moved if view.sent or view.received else ""
        texts.append(f"{what}: {view.name} {doing}, {ago}{moved}")
    return texts
