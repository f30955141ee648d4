"""A federation of real sites: the folders of its parties, the coordinator's end, a site's end.

NVFlare does the network, TLS and authentication. What it leaves out is done here: a run whose
site, job or server dies is handed in again and goes on from its checkpoint, waiting is never
silent, and a certificate that cannot work is found out before anything waits for it.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, Positive, build
from atoll.core.record import disk_errors, write_whole
from atoll.engines.egress import EgressLog
from atoll.engines.gate import TELLING, Contract, read_site
from atoll.runs.config import RunConfig, to_toml

__all__ = [
    "Kit", "Project", "Terms", "View", "init", "join", "read_project", "renew", "running", "serve",
]  # fmt: skip

COORDINATOR = "coordinator"
ADMIN = "coordinator@atoll.local"
WARN_DAYS = 30  # before a certificate ends
FRESH = 20.0  # seconds since NVFlare last heard of a site, from which it counts as away
STUCK = 5  # jobs in a row that bring a run no further
START_SECONDS = 90.0  # in which a job must have begun
END_SECONDS = 8.0  # in which NVFlare should have ended a job that has done its work
CALM_SECONDS = 15.0  # between looks at a coordinator that could be reached
HIGHEST_PORT = 32_767  # systems take higher ones for connections that go out
NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,40}")


@dataclass(frozen=True)
class Project:
    """A federation: who is in it and where its coordinator is."""

    name: str = "federation"  # letters, digits and -
    server: str = "localhost"  # the host name by which the sites reach the coordinator
    port: AtLeastOne = 8102  # the one port that must be open, at the coordinator
    sites: tuple[str, ...] = ()  # letters, digits and -; a name that goes is revoked
    days: AtLeastOne = 3600  # that the authority is valid; certificates are for 360 at most


@dataclass(frozen=True)
class Terms:
    """How patient the coordinator is."""

    deadline: Positive = 3600.0  # seconds that one exchange may take
    silence: Positive = 30.0  # seconds without a sign of life after which a site counts as lost
    patience: NotNegative = 120.0  # seconds to wait for a site before going on without it
    at_least: NotNegativeInt = 0  # sites that must be there, where some may be away; 0: all


def nvflare() -> Any:
    """The engine's own module, or how to install what it needs."""
    try:
        from atoll.engines import nvflare as found  # noqa: PLC0415 - only where it is needed
    except ImportError as error:
        raise UserError(
            "NVFlare is not installed", str(error), "pip install 'atoll[nvflare]'"
        ) from error
    return found


def read_project(path: Path) -> Project:
    """A project's file, checked."""
    with disk_errors(path):
        text = path.read_bytes()
    try:
        values = tomllib.loads(text.decode())
    except ValueError as error:
        raise UserError(f"not TOML: {error}", str(path), "mend that line") from error
    found = build(Project, values, str(path))
    for name in (found.name, *found.sites):
        if not NAME.fullmatch(name) or name in (COORDINATOR, "server"):
            remedy = "use a letter, then letters, digits and -; not 'server' or 'coordinator'"
            raise UserError(f"nothing can be called '{name}'", str(path), remedy)
    if found.port > HIGHEST_PORT:
        what = f"port {found.port} may be taken by connections that go out"
        raise UserError(what, str(path), f"choose one up to {HIGHEST_PORT}")
    if not found.sites or len({name.lower() for name in found.sites}) < len(found.sites):
        raise UserError("no sites, or one twice", str(path), "name each site once in sites = [...]")
    return found


@dataclass(frozen=True)
class Kit:
    """One party's folder: its key, its certificates, and what NVFlare needs to start there."""

    folder: Path

    @property
    def _about(self) -> dict[str, Any]:
        path = self.folder / "kit.json"
        if not path.exists():
            raise UserError(
                "not a party's folder", str(self.folder), "make one with atoll network init"
            )
        with disk_errors(path):
            content = path.read_bytes()
        try:
            found = dict(json.loads(content))
            return {"name": str(found["name"]), "server": str(found["server"]),
                    "port": int(found["port"])}  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise UserError("the kit is damaged", str(path), "ask for a new kit") from error

    @property
    def name(self) -> str:
        """The party's name."""
        return str(self._about["name"])

    @property
    def server(self) -> str:
        """The coordinator's host name."""
        return str(self._about["server"])

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return int(self._about["port"])

    @property
    def sites(self) -> list[str]:
        """The coordinator's list of the sites that may take part, sorted."""
        with disk_errors(self.folder):
            content = (self.folder / "sites.json").read_bytes()
        try:
            return sorted(map(str, json.loads(content)["sites"]))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                "the list of sites is damaged", str(self.folder / "sites.json"),
                "remove it, then use atoll network init",
            ) from error  # fmt: skip

    @property
    def _certificate(self) -> Any:
        from cryptography import x509  # noqa: PLC0415 - comes with NVFlare

        path = self._file(".crt")
        with disk_errors(path):
            content = path.read_bytes()
        try:
            return x509.load_pem_x509_certificate(content)
        except ValueError as error:
            raise UserError("not a certificate", str(path), "ask for a new kit") from error

    def _file(self, suffix: str) -> Path:
        name = "server" if self.name == COORDINATOR else "client"
        return self.folder / "startup" / f"{name}{suffix}"

    def _fits(self) -> bool:
        """Whether the kit's key is that of its certificate."""
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
            load_pem_private_key,
        )

        path = self._file(".key")
        with disk_errors(path):
            content = path.read_bytes()
        try:
            key = load_pem_private_key(content, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UserError("not a private key", str(path), "ask for a new kit") from error
        return bool(key.public_key() == self._certificate.public_key())

    @property
    def until(self) -> datetime:
        """When the certificate ends."""
        found: datetime = self._certificate.not_valid_after_utc
        return found

    def check(self) -> str:
        """Refuse a kit that cannot work; a warning where its certificate ends soon."""
        from cryptography import x509  # noqa: PLC0415
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

        certificate, where = self._certificate, str(self.folder)
        if self.until <= datetime.now(UTC):
            what = f"the certificate of {self.name} ended on {self.until:%Y-%m-%d}"
            raise UserError(
                what, where, f"ask the project's owner: atoll network renew {self.name}"
            )
        common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
        wanted = self.server if self.name == COORDINATOR else self.name
        if common != wanted:
            what = f"the kit is named {self.name}, but its certificate is of '{common}'"
            raise UserError(what, where, "use each kit under its own name")
        with disk_errors(self.folder):
            content = (self.folder / "startup" / "rootCA.pem").read_bytes()
        try:
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(content))
        except (ValueError, TypeError, InvalidSignature) as error:
            what = f"the certificate of {self.name} is not from this project's authority"
            raise UserError(what, where, "use the kit as it was made") from error
        if not self._fits():
            what = f"the key does not fit the certificate of {self.name}"
            raise UserError(what, str(self._file(".key")), "use the kit as it was made")
        left = (self.until - datetime.now(UTC)).days
        return f"the certificate of {self.name} ends in {left} days" if left < WARN_DAYS else ""


# Folders of parties


def init(path: Path, out: Path, run: RunConfig | None = None) -> dict[str, list[str]]:
    """Make the folders of all parties that have none yet; who is new, and who is revoked."""
    project, made = read_project(path), dict[str, list[str]]()
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    there = [name for name in (COORDINATOR, *project.sites) if (out / name).exists()]
    made["new"] = [name for name in (COORDINATOR, *project.sites) if name not in there]
    if made["new"]:
        _issue(project, out, made["new"], run)
    known = Kit(out / COORDINATOR)
    before = known.sites if (known.folder / "sites.json").exists() else []
    made["revoked"] = [name for name in before if name not in project.sites]
    body = json.dumps({"sites": sorted(project.sites)}).encode()
    write_whole(known.folder / "sites.json", body)
    return made


def renew(path: Path, out: Path, name: str) -> Path:
    """A new certificate for one party; its other files and all other parties stay as they are."""
    project = read_project(path)
    if name not in (COORDINATOR, *project.sites) or not (out / name).exists():
        raise UserError(f"no party '{name}'", str(out), "see the project's sites")
    issued = _authority(project, out)
    folder = issued.issue(project.sites, ADMIN)
    try:
        pairs = [(folder / _called(project, name), out / name)]
        if name == COORDINATOR:
            pairs.append((folder / ADMIN, out / name / "admin"))
        for source, target in pairs:
            for file in (source / "startup").iterdir():
                if file.suffix in (".crt", ".key", ".pem"):
                    shutil.copy2(file, target / "startup" / file.name)
    finally:
        _clean(issued, folder)
    return out / name


def _authority(project: Project, out: Path) -> Any:
    folder = out / "authority"
    with disk_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    server, port = project.server, project.port
    return nvflare().Authority(folder.resolve(), project.name, server, port, project.days)


def _called(project: Project, name: str) -> str:
    return project.server if name == COORDINATOR else name


def _issue(project: Project, out: Path, names: Sequence[str], run: RunConfig | None) -> None:
    issued = _authority(project, out)
    folder = issued.issue(project.sites, ADMIN)
    try:
        for name in names:
            part = out / f".{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(mode=0o700)
            _fill(part, folder, project, name)
            if name != COORDINATOR:
                (part / "site.toml").write_text(_draft(run), encoding="utf-8")
            part.replace(out / name)
    finally:
        _clean(issued, folder)


def _clean(issued: Any, folder: Path) -> None:
    """Leave no private key but the authority's own behind."""
    shutil.rmtree(folder, ignore_errors=True)
    issued.forget_all()


def _fill(part: Path, issued: Path, project: Project, name: str) -> None:
    """One party's folder out of what NVFlare has made, with our policies in place of its own."""
    source, own = issued / _called(project, name), nvflare()
    _take(source, part)
    coordinator = name == COORDINATOR
    resources = json.loads((source / "local" / "resources.json.default").read_text())
    resources["class_allow_list"] = list(own.CLASSES)
    resources["class_list_enforcement_mode"] = "enforce"
    kept = ("job_scheduler", "job_manager", "job_store", "process_launcher", "resource_manager",
            "resource_consumer")  # fmt: skip
    resources["components"] = [c for c in resources["components"] if c["id"] in kept]
    if coordinator:
        resources["servers"][0]["heart_beat_timeout"] = 30
        _take(issued / ADMIN, part / "admin")
        admin = (issued / ADMIN / "local" / "resources.json.default").read_bytes()
        (part / "admin" / "local" / "resources.json").write_bytes(admin)
    else:
        resources["allow_log_streaming"] = False
    logs = (source / "local" / "log_config.json.default").read_text()
    rights = dict.fromkeys(("submit_job", "clone_job", "manage_job", "view", "operate"), "any")
    rights |= dict.fromkeys(("shell_commands", "byoc", "download_job"), "none")
    policy = {"format_version": "1.0", "permissions": {"project_admin": rights}}
    about = {"project": project.name, "name": name, "server": project.server, "port": project.port}
    for file, body in (
        ("local/resources.json", json.dumps(resources, indent=1)),
        ("local/authorization.json", json.dumps(policy, indent=1)),
        ("local/log_config.json", logs.replace('"INFO"', '"WARNING"')),
        ("kit.json", json.dumps(about, indent=1)),
    ):
        (part / file).write_text(body)


def _take(source: Path, target: Path) -> None:
    """Keys, certificates and NVFlare's own settings; no scripts."""
    for folder in ("startup", "local", "transfer"):
        (target / folder).mkdir(mode=0o700, parents=True)
    for file in (source / "startup").iterdir():
        if file.suffix in (".crt", ".key", ".pem", ".json"):
            shutil.copy2(file, target / "startup" / file.name)
    for key in (target / "startup").glob("*.key"):
        key.chmod(0o600)


def _draft(run: RunConfig | None) -> str:
    """A site's file to begin with; for a run that is known, its contract is filled in."""
    from atoll.core.federation import actions  # noqa: PLC0415

    name = str(run.method["name"]) if run else ""
    allowed = json.dumps([name] if run else [])
    every = sorted(actions(methods.load(name).client)) if run else []
    every += TELLING if run and "files" in run.data else ()
    asked = json.dumps(every)
    used = [str(run.model.get("name", "")), *run.models] if run else []
    networks = json.dumps(sorted({one for one in used if ":" in one}))
    terms = Contract()
    return f"""\
# This site's own file. Paths are meant from the folder that this file is in.
store = "store"  # models, checkpoints and the log of what left; never sent

# data = {{ files = ["my-table.csv"] }}  # for runs on own tables: this site's one file
# engine = {{ device = "cpu", threads = 1 }}  # of this site alone

[contract]  # what may leave this site; what is not in it is refused
methods = {allowed}  # that may be run here
actions = {asked}  # that may be answered
stages = 0  # that may be answered; 0 for all
largest = {terms.largest}  # bytes of one answer
total = {terms.total}  # bytes of all answers of a run
in_all = {terms.in_all}  # bytes of all answers of all runs, ever
networks = {networks}  # package.module:function that a run may name: code of this machine
"""


# Processes


def _environment(**further: str) -> dict[str, str]:
    return {**os.environ, **nvflare().ENVIRONMENT, **further}


class _Process:
    """NVFlare's own process at one end; started again when it is gone."""

    def __init__(self, kind: str, kit: Kit, environment: Mapping[str, str]) -> None:
        self.kit, self.environment = kit, dict(environment)
        self.command = nvflare().command(kind, kit.folder.resolve(), kit.name)
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def ensure(self) -> bool:
        """Start it where it does not run; whether it was started now."""
        if self.process is not None and self.process.poll() is None:
            return False
        log = self.kit.folder / "nvflare.log"
        with disk_errors(log), log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip
        (self.kit.folder / "pid").write_text(f"{self.process.pid}\n")
        self.starts += 1
        return True

    def stop(self) -> None:
        """End it and all that it has started."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
        (self.kit.folder / "pid").unlink(missing_ok=True)


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether a lock could be had; a command that was killed holds it no more."""
    with disk_errors(path):
        file = path.open("w")
    with file:
        yield _lock(file, path)


def _lock(file: Any, path: Path) -> bool:
    with disk_errors(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _alone(kit: Kit) -> Iterator[None]:
    """Refuse to use a kit that another command uses."""
    with _held(kit.folder / "lock") as free:
        if not free:
            raise UserError(
                "another command uses this kit now", str(kit.folder), "stop that one first"
            )
        yield


@contextmanager
def _own(store: Path) -> Iterator[None]:
    """Refuse a store that another site uses: two that write one log break its chain for good."""
    with disk_errors(store):
        store.mkdir(parents=True, exist_ok=True)
    with _held(store / ".lock") as free:
        if not free:
            remedy = "give each site a store of its own in its site.toml"
            raise UserError("another site uses this store", str(store), remedy)
        yield


def _end_former(kit: Kit) -> None:
    """End what an earlier command that was killed has left running with this kit."""
    for _ in range(20):
        found = running(str(kit.folder.resolve()))
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        time.sleep(0.2)
    (kit.folder / "pid").unlink(missing_ok=True)


def running(folder: str, kind: str = "") -> list[int]:
    """NVFlare's processes that were started with a folder, where the system shows processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().decode(errors="replace").split("\0")
            modules = [word for word in line if word.startswith("nvflare.private")]
            if folder in line and any(word.endswith(kind) for word in modules):
                found.append(int(path.parent.name))
    return found


# The coordinator's end


@dataclass
class View:
    """What the coordinator sees of a party, for a line on the screen."""

    name: str
    state: str  # connected, working, away, revoked
    doing: str = ""
    seen: float = 0.0  # seconds ago; 0 for never
    sent: int = 0
    received: int = 0


@dataclass
class _Serving:
    """A coordinator at work."""

    kit: Kit
    todo: Sequence[tuple[RunConfig, Path]]
    terms: Terms
    tell: Callable[[str, list[View]], None]  # what is going on, and the parties
    stopping: Callable[[], bool]
    control: Path = field(init=False)

    def __post_init__(self) -> None:
        self.control = self.kit.folder.resolve() / "work"
        self.host = _Process("server", self.kit, _environment(PYTHONUNBUFFERED="1"))
        self.session = nvflare().Session(ADMIN, self.kit.folder.resolve() / "admin")
        self.heard: dict[str, float] = {}
        self.lost = ""  # why the last job ended

    @property
    def quorum(self) -> int:
        """Sites without which nothing begins."""
        can = all(methods.load(config.method["name"]).quorum for config, _ in self.todo)
        return self.terms.at_least if can and self.terms.at_least else len(self.kit.sites)

    def go(self) -> None:
        """Do all runs; jobs that are lost are handed in again."""
        idle, before = 0, self._progress()
        try:
            while True:
                sites = self._wait()
                ended = self._job(sites)
                if self._over(ended):
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
        """Until enough sites are there."""
        began, all_sites = time.monotonic(), self.kit.sites
        while True:
            if self.stopping():
                raise InterruptedRunError
            here = self._here()
            waited = time.monotonic() - began
            enough = len(here) >= self.quorum and waited > self.terms.patience
            if len(here) == len(all_sites) or enough:
                return here
            missing = [name for name in all_sites if name not in here]
            self.tell(f"waiting for {len(missing)} of {len(all_sites)}", self._views())
            time.sleep(0.5)

    def _here(self) -> list[str]:
        """The sites that NVFlare has heard of a moment ago; the server is started where need be."""
        if self.host.ensure() and self.host.starts > 1:
            self.session.close()
        found = self.session.sites()
        if found is not None:
            self.heard |= found
            for name in found.keys() - set(self.kit.sites):
                self.session.ban(name)  # a site that was revoked, or of another list
        now = time.time()
        return [n for n in self.kit.sites if found and now - found.get(n, 0.0) < FRESH]

    def _views(self) -> list[View]:
        """Every party, with what the job says of it where there is one."""
        now, told = time.time(), _json(self.control / "status.json").get("sites", {})
        views = []
        for name in self.kit.sites:
            one = told.get(name, {})
            seen = max(self.heard.get(name, 0.0), float(one.get("seen", 0.0)))
            ago = now - seen if seen else 0.0
            doing = str(one.get("doing", ""))
            state = "away" if not seen or ago > FRESH else "working" if doing else "connected"
            views.append(View(name, state, doing, ago, one.get("sent", 0), one.get("received", 0)))
        strangers = [name for name in self.heard if name not in self.kit.sites]
        return views + [View(name, "revoked", "", now - self.heard[name]) for name in strangers]

    def _job(self, sites: list[str]) -> dict[str, Any]:
        """Hand in a job and watch it to its end; how it ended, empty where nobody could say."""
        for name in ("ended.json", "status.json", "stop"):
            (self.control / name).unlink(missing_ok=True)
        plan = {
            "sites": self.kit.sites, "deadline": self.terms.deadline,
            "silence": self.terms.silence,
            "at_least": 0 if self.quorum == len(self.kit.sites) else self.quorum,
            "runs": [
                {"folder": str(f.resolve()), **_json(_beside(self.kit, f))} for _, f in self.todo
            ],
        }  # fmt: skip
        write_whole(self.control / "plan.json", json.dumps(plan).encode())
        folder = self.control / "job"
        nvflare().write_job(folder, self.control, sites)
        job = self.session.submit(folder)
        if not job:
            return {}
        self._watch(job, sites)
        return _json(self.control / "ended.json")

    def _watch(self, job: str, sites: list[str]) -> None:
        """Until the job has ended, its server is gone, or it has gone quiet."""
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
            done = str(_json(self.control / "status.json").get("done", ""))
            self.tell(done or ("running" if quiet < 10 else "starting"), self._views())

    def _said_so(self) -> bool:
        """Whether the job has said how it ended, some seconds ago."""
        try:
            return time.time() - (self.control / "ended.json").stat().st_mtime > END_SECONDS
        except OSError:
            return False

    def _end(self, job: str) -> None:
        """End a job that has done what it can: NVFlare waits a minute for a site that is gone."""
        self.session.abort(job)
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            if (self.session.state(job) or "").startswith("FINISHED"):
                return
            time.sleep(0.5)
        for pid in running(str(self.kit.folder.resolve()), "runner_process"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _quiet(self, began: float) -> float:
        """Seconds since the job's own process last gave a sign of life."""
        try:
            return time.time() - (self.control / "status.json").stat().st_mtime
        except OSError:
            return time.monotonic() - began + 10

    def _returned(self, sites: list[str]) -> bool:
        """Whether a site that the job goes without is back."""
        now = time.time()
        away = [name for name in self.kit.sites if name not in sites]
        return any(now - self.heard.get(name, 0.0) < FRESH / 2 for name in away)

    def _over(self, ended: Mapping[str, Any]) -> bool:
        """Whether that was the end; what cannot be helped by another job is raised."""
        how = ended.get("ended", "")
        if how == "done":
            return True
        if how == "mistake":
            what, where, remedy = (str(ended[k]) for k in ("what", "where", "remedy"))
            raise UserError(what, where, remedy, int(ended["exit_code"]))
        if how == "failed":
            raise ClientFailedError(ended["client"], ended["action"], ended["reason"])
        if how == "refused":
            raise BadMessageError(ended["sender"], ended["reason"])
        if how == "fault":
            raise RuntimeError(str(ended["what"]))
        if how == "stopped" and self.stopping():
            raise InterruptedRunError
        self.lost = str(ended.get("what", "the job ended without a word"))
        if how != "stopped":
            self.tell(f"{self.lost}; going on from the last checkpoint", self._views())
        return False


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _beside(kit: Kit, folder: Path) -> Path:
    """Where the coordinator keeps what a run is called at the sites."""
    short = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()
    return kit.folder.resolve() / "work" / f"run-{short}.json"


def serve(
    kit: Kit,
    todo: Sequence[tuple[RunConfig, Path]],
    terms: Terms,
    tell: Callable[[str, list[View]], None],
    stopping: Callable[[], bool],
) -> None:
    """Coordinate some runs to their end; runs that were cut go on."""
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
    with _alone(kit):
        _end_former(kit)
        _free(kit)
        _settle(kit)
        for config, folder in todo:
            _register(kit, config, folder)
        _Serving(kit, todo, terms, tell, stopping).go()


def _register(kit: Kit, config: RunConfig, folder: Path) -> None:
    """Write down what a run is to be, and its name at the sites: a new one for a new run."""
    path = _beside(kit, folder)
    if not (folder / "config.toml").exists() or not path.exists():
        name = f"{re.sub(r'[^A-Za-z0-9-]+', '-', config.name)}-{os.urandom(6).hex()}"
        write_whole(path.with_suffix(".toml"), to_toml(config).encode())
        body = {"id": name, "config": str(path.with_suffix(".toml"))}
        write_whole(path, json.dumps(body).encode())


def _settle(kit: Kit) -> None:
    """A job store of this kit alone; NVFlare's own is shared by all servers of a machine."""
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
    banned = _json(kit.folder / "disabled_clients.json").get("disabled_clients", [])
    still = [name for name in banned if name not in kit.sites]  # who is back on the list is heard
    body = json.dumps({"disabled_clients": still}).encode()
    write_whole(kit.folder / "disabled_clients.json", body)


def _free(kit: Kit) -> None:
    """Refuse a port that something else listens at."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", kit.port))
        except OSError as error:
            raise UserError(
                f"port {kit.port} is taken by another program", str(kit.folder),
                "stop that, or give the project another port and make its kits anew",
            ) from error  # fmt: skip


# A site's end


def reachable(kit: Kit) -> str:
    """Why the coordinator cannot be reached with this kit; empty where it can."""
    startup = kit.folder / "startup"
    try:
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.load_cert_chain(str(startup / "client.crt"), str(startup / "client.key"))
    except OSError as error:  # and every ssl.SSLError; they may be in the midst of a renewal
        return f"this site's key and certificate cannot be used: {_alert(error)}"
    try:
        with (
            socket.create_connection((kit.server, kit.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=kit.server) as secure,
        ):
            secure.settimeout(1.0)
            with suppress(TimeoutError):
                secure.recv(1)  # a certificate that is not wanted is refused only now
    except ssl.SSLCertVerificationError as error:
        return f"the coordinator's certificate is not trusted here: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the coordinator refuses this site's certificate: {_alert(error)}"
    except ConnectionResetError:
        return ""  # it hung up on a silent caller, after the greeting
    except OSError as error:
        return f"waiting for the coordinator: {str(error.strerror or error).lower()}"
    return ""


def _alert(error: OSError) -> str:
    words = str(getattr(error, "reason", "") or error.strerror or error).lower().replace("_", " ")
    return re.sub(r"^(tlsv\d+|sslv3) alert ", "", words)


def join(
    kit: Kit,
    site: Path,
    tell: Callable[[str], None],
    stopping: Callable[[], bool],
) -> None:
    """Take part until stopped: keep NVFlare's process at it, and say how it stands."""
    if kit.name == COORDINATOR:
        raise UserError("this is the coordinator's kit", str(kit.folder), "use atoll serve")
    kit.check()
    store = Path(read_site(site).store)
    with _alone(kit), _own(store):
        _end_former(kit)
        EgressLog(store / "egress.jsonl")  # a chain that is broken is found before anyone waits
        _joined(kit, site, store / "status.json", tell, stopping)


def _joined(
    kit: Kit, site: Path, status: Path, tell: Callable[[str], None], stopping: Callable[[], bool]
) -> None:
    status.unlink(missing_ok=True)
    process = _Process("client", kit, _environment(ATOLL_SITE=str(site.resolve())))
    refused, reason, good = 0, "", -CALM_SECONDS
    try:
        while not stopping():
            if time.monotonic() - good > CALM_SECONDS:
                reason = reachable(kit)
                good = -CALM_SECONDS if reason else time.monotonic()
                refused = refused + 1 if "certificate" in reason else 0
            if refused >= 3:
                raise UserError(reason, str(kit.folder), "ask the project's owner for a new kit")
            if not reason:
                process.ensure()
            tell(_site_line(kit, status, reason))
            end = time.monotonic() + 3
            while time.monotonic() < end and not stopping():
                time.sleep(0.2)
    finally:
        process.stop()


def _site_line(kit: Kit, status: Path, reason: str) -> str:
    """How this site stands, in one line."""
    told = _json(status)
    pieces = [kit.name, reason or f"connected to {kit.server}:{kit.port}"]
    if told.get("run"):
        pieces.append(f"run {told['run']} ({told['method']})")
        ago = time.time() - float(told["time"])
        pieces.append(f"working on {told['doing']}" if told["doing"] else f"idle for {ago:.0f} s")
        pieces.append(f"{told['bytes']:,} bytes have left")
    return "  ".join(pieces)


def lines(what: str, views: Iterable[View]) -> list[str]:
    """What is going on, one line for each party."""
    said = []
    for view in views:
        ago = f"last seen {view.seen:.0f} s ago" if view.seen else "not seen yet"
        doing = f"working on {view.doing}" if view.state == "working" else view.state
        moved = f"{view.sent:,} bytes to it, {view.received:,} from it"
        said.append(f"{what}: {view.name} {doing}, {ago}, {moved}")
    return said
