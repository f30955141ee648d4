"""The folders of a federation's parties: keys, certificates, and NVFlare's start files.

Certificates are checked before use.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.integrity import read_json
from atoll.core.options import AtLeastOne, build
from atoll.core.record import disk_errors, write_whole
from atoll.core.storage import read_toml
from atoll.engines.network.addresses import encode_host, is_host
from atoll.engines.network.drafts import drafted_file
from atoll.engines.network.job import CLASSES
from atoll.engines.network.process import certificates, provision
from atoll.engines.network.tls import passphrase
from atoll.runs.config import RunConfig

__all__ = [
    "ADMIN", "COORDINATOR", "NAME", "Kit", "Project", "authority", "fill", "init", "read_project",
    "renew", "signed_file", "untimely",
]  # fmt: skip

COORDINATOR = "coordinator"
ADMIN = "coordinator@atoll.local"
WARN_DAYS = 30  # days before a certificate expires
HIGHEST_PORT = 32_767  # systems use higher ports for outgoing connections
NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,40}")


@dataclass(frozen=True)
class Project:
    """A federation: its parties and the address of its coordinator."""

    name: str = "federation"  # letters, digits and -
    server: str = "localhost"  # the name or address by which the sites reach the coordinator
    port: AtLeastOne = 8102  # the one port that must be open, at the coordinator
    sites: tuple[str, ...] = ()  # letters, digits and -; a name that goes is revoked
    days: AtLeastOne = 3600  # that the authority is valid; certificates are for 360 at most


def read_project(path: Path) -> Project:
    """A project's file, checked."""
    values = read_toml(path)
    project = build(Project, values, str(path))
    for name in (project.name, *project.sites):
        if not NAME.fullmatch(name) or name in (COORDINATOR, "server"):
            remedy = "use a letter, then letters, digits and -; not 'server' or 'coordinator'"
            raise UserError(f"nothing can be called '{name}'", str(path), remedy)
    if not is_host(project.server):
        remedy = "write a name, or an address without port and brackets: fl.example.org, ::1"
        raise UserError(f"'{project.server}' is not a host", f"{path}: server", remedy)
    if project.port > HIGHEST_PORT:
        what = f"port {project.port} may be taken by connections that go out"
        raise UserError(what, str(path), f"choose one up to {HIGHEST_PORT}")
    if not project.sites or len({name.lower() for name in project.sites}) < len(project.sites):
        raise UserError("no sites, or one twice", str(path), "name each site once in sites = [...]")
    return project


@dataclass(frozen=True)
class Kit:
    """One party's folder: its key, its certificates, and NVFlare's start files."""

    folder: Path

    @property
    def _about(self) -> dict[str, Any]:
        path = self.folder / "kit.json"
        if not path.exists():
            raise self._absent()
        kinds = {"name": str, "server": str, "port": int}
        error = UserError("the kit is damaged", str(path), "ask for a new kit")
        return read_json(path, lambda kit: {key: kinds[key](kit[key]) for key in kinds}, error)

    def _absent(self) -> UserError:
        """The error for a folder that is not a kit, or that lacks the owner's signed answer."""
        where = str(self.folder)
        request = next(iter(sorted(self.folder.glob("*.csr"))), None)
        if request is None:
            return UserError("not a party's folder", where, "make one with atoll network init")
        signed = f"{request.stem}.signed.json"
        remedy = (
            f"send {request} to the project's owner, then atoll network install {where} {signed}"
        )
        return UserError("the kit has a key, but no certificate yet", where, remedy)

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
        """The sorted list of sites that may take part, at the coordinator."""
        path = self.folder / "sites.json"
        remedy = "remove it, then use atoll network init"
        error = UserError("the list of sites is damaged", str(path), remedy)
        return read_json(path, lambda body: sorted(map(str, body["sites"])), error)

    @property
    def _certificate(self) -> Any:
        return self._read(self._file(".crt"))

    def _read(self, path: Path) -> Any:
        with disk_errors(path):
            content = path.read_bytes()
        return certificates().read_certificate(content, str(path))

    def _file(self, suffix: str) -> Path:
        name = "server" if self.name == COORDINATOR else "client"
        return self.folder / "startup" / f"{name}{suffix}"

    def _fits(self) -> bool:
        """Whether the kit's key matches its certificate."""
        path = self._file(".key")
        with disk_errors(path):
            content = path.read_bytes()
        key = certificates().read_key(content, str(path), passphrase())
        return bool(key.public_key() == self._certificate.public_key())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the party's key."""
        return str(certificates().fingerprint(self._certificate.public_key()))

    @property
    def authority(self) -> str:
        """The fingerprint of the authority's key."""
        root = self._read(self.folder / "startup" / "rootCA.pem")
        return str(certificates().fingerprint(root.public_key()))

    @property
    def until(self) -> datetime:
        """The end of the certificate's validity."""
        expiry: datetime = self._certificate.not_valid_after_utc
        return expiry

    def check(self) -> str:
        """Refuse a kit that cannot work; returns a warning if its certificate expires soon."""
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - comes with NVFlare

        certificate, where = self._certificate, str(self.folder)
        wrong = untimely(certificate.not_valid_before_utc, self.until)
        if wrong:
            remedy = "set this machine's clock; if it is right, ask the project's owner: atoll"
            what = f"the certificate of {self.name} {wrong}"
            raise UserError(what, where, f"{remedy} network renew project.toml {self.name}")
        common = certificates().common_name(certificate)
        expected = encode_host(self.server) if self.name == COORDINATOR else self.name
        if common != expected:
            what = f"the kit is named {self.name}, but its certificate is of '{common}'"
            raise UserError(what, where, "use each kit under its own name")
        try:
            root = self._read(self.folder / "startup" / "rootCA.pem")
            certificate.verify_directly_issued_by(root)
        except (ValueError, TypeError, InvalidSignature) as error:
            what = f"the certificate of {self.name} is not from this project's authority"
            raise UserError(what, where, "use the kit as it was made") from error
        self._check_purpose()
        if not self._fits():
            what = f"the key does not fit the certificate of {self.name}"
            raise UserError(what, str(self._file(".key")), "use the kit as it was made")
        left = (self.until - datetime.now(UTC)).days
        return f"the certificate of {self.name} ends in {left} days" if left < WARN_DAYS else ""

    @property
    def _renewal(self) -> str:
        return f"ask the project's owner: atoll network renew project.toml {self.name}"

    def _check_purpose(self) -> None:
        """Refuse certificates whose purpose the other side would refuse."""
        pairs = [(self._file(".crt"), "server" if self.name == COORDINATOR else "client")]
        if self.name == COORDINATOR:
            pairs.append((self.folder / "admin" / "startup" / "client.crt", "client"))
        for path, purpose in pairs:
            if purpose not in certificates().purposes_of(self._read(path)):
                what = f"the certificate of {self.name} does not say that it is for a {purpose}"
                raise UserError(what, str(path), self._renewal)
        matches = certificates().for_host(self._certificate, encode_host(self.server))
        if self.name == COORDINATOR and not matches:
            what = f"the certificate of {self.name} does not name the host {self.server}"
            raise UserError(what, str(self._file(".crt")), self._renewal)


def untimely(begins: datetime, ends: datetime) -> str:
    """Why a certificate is not valid at this machine's time; empty if it is."""
    now = datetime.now(UTC)
    if begins <= now < ends:
        return ""
    reason = (
        f"ended on {ends:%Y-%m-%d}" if ends <= now else f"is not valid before {begins:%Y-%m-%d}"
    )
    valid = f"it is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M}"
    return f"{reason}: {valid}, and the clock here says {now:%Y-%m-%d %H:%M}, all in UTC"


def init(
    path: Path, out: Path, run: RunConfig | None = None, by_request: bool = False
) -> dict[str, list[str]]:
    """Create missing folders of parties; return the new and the revoked parties.

    With `by_request` sites create their own keys, now and in every later call.
    """
    project, changes = read_project(path), dict[str, list[str]]()
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        authority(project, out)
        mark = out / "authority" / "by-request"
        if by_request:
            mark.touch()
    ours = (COORDINATOR,) if mark.exists() else (COORDINATOR, *project.sites)
    existing = [name for name in ours if (out / name).exists() or signed_file(out, name).exists()]
    changes["new"] = [name for name in ours if name not in existing]
    if changes["new"]:
        _issue(project, out, changes["new"], run)
    changes["awaited"] = [
        name for name in project.sites if name not in ours and not signed_file(out, name).exists()
    ]
    coordinator = Kit(out / COORDINATOR)
    before = coordinator.sites if (coordinator.folder / "sites.json").exists() else []
    changes["revoked"] = [name for name in before if name not in project.sites]
    body = json.dumps({"sites": sorted(project.sites)}).encode()
    write_whole(coordinator.folder / "sites.json", body)
    return changes


def signed_file(out: Path, name: str) -> Path:
    """The owner's file with the signed answer for a site that made its own key."""
    return out / f"{name}.signed.json"


def renew(path: Path, out: Path, name: str) -> Path:
    """Renew the certificate of one party; its other files and all other parties do not change."""
    project = read_project(path)
    if name in project.sites and signed_file(out, name).exists():
        what, remedy = f"site {name} has made its own key", f"atoll network sign {path} {name}.csr"
        raise UserError(what, str(signed_file(out, name)), f"sign its request again: {remedy}")
    if name not in (COORDINATOR, *project.sites) or not (out / name).exists():
        raise UserError(f"no party '{name}'", str(out), "see the project's sites")
    folder = authority(project, out).issue(project.sites, ADMIN, _wanted(project, [name]))
    try:
        pairs = [(folder / _called(project, name), out / name)]
        if name == COORDINATOR:
            pairs.append((folder / ADMIN, out / name / "admin"))
        for source, target in pairs:
            for file in (source / "startup").iterdir():
                if file.suffix in (".crt", ".key", ".pem"):
                    shutil.copy2(file, target / "startup" / file.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out / name


def authority(project: Project, out: Path) -> Any:
    """The signing authority of a project, with its folder."""
    folder = out / "authority"
    with disk_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    server, port = encode_host(project.server), project.port
    return provision().Authority(folder.resolve(), project.name, server, port, project.days)


def _called(project: Project, name: str) -> str:
    return encode_host(project.server) if name == COORDINATOR else name


def _wanted(project: Project, names: Sequence[str]) -> list[str]:
    """The parties that get a new key, by their names in NVFlare."""
    admin = [ADMIN] if COORDINATOR in names else []
    return [*(_called(project, name) for name in names), *admin]


def _issue(project: Project, out: Path, names: Sequence[str], run: RunConfig | None) -> None:
    issued = authority(project, out).issue(project.sites, ADMIN, _wanted(project, names))
    try:
        for name in names:
            part = out / f".{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(mode=0o700)
            fill(part, issued, project, name)
            if name != COORDINATOR:
                text = drafted_file(run, f"../{name}-store")
                (part / "site.toml").write_text(text, encoding="utf-8")
            part.replace(out / name)
    finally:
        shutil.rmtree(issued, ignore_errors=True)


def fill(part: Path, issued: Path, project: Project, name: str) -> None:
    """Fill one party's folder from NVFlare's output, with our policies in place of its own."""
    source = issued / _called(project, name)
    _take(source, part)
    coordinator = name == COORDINATOR
    resources = json.loads((source / "local" / "resources.json.default").read_text())
    resources["class_allow_list"] = list(CLASSES)
    resources["class_list_enforcement_mode"] = "enforce"
    needed = (
        "job_scheduler",
        "job_manager",
        "job_store",
        "process_launcher",
        "resource_manager",
        "resource_consumer",
    )
    resources["components"] = [c for c in resources["components"] if c["id"] in needed]
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
    """Copy keys, certificates and NVFlare's settings, but no scripts."""
    for folder in ("startup", "local", "transfer"):
        (target / folder).mkdir(mode=0o700, parents=True)
    for file in (source / "startup").iterdir():
        if file.suffix in (".crt", ".key", ".pem", ".json"):
            shutil.copy2(file, target / "startup" / file.name)
    for key in (target / "startup").glob("*.key"):
        key.chmod(0o600)
