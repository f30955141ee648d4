"""A rehearsal on this machine with real kits: first without faults, then with faults.

The real sites are not affected: kits are copied, stores are new, and a run is shortened to a few
rounds. It repeats the network tests and shows whether these kits, this
config and this machine pass them.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.record import Exclusion, read_events
from atoll.engines.local import local_engine
from atoll.engines.network.kits import (
    COORDINATOR,
    Kit,
    Project,
    init,
    read_project,
    signed_file,
)
from atoll.engines.network.mirror import append_only
from atoll.engines.network.process import running
from atoll.engines.network.site import reachable
from atoll.runs.config import RunConfig, to_toml
from atoll.runs.execute import execute

__all__ = ["Item", "rehearse", "rehearse_once"]

SECONDS = 300.0  # maximum seconds of one step
BUDGETS = 10  # factor on the budgets of a contract over all runs: a rehearsal has many runs
COMMAND = (sys.executable, "-c", "from atoll.cli import main; main()")


@dataclass(frozen=True)
class Item:
    """A line of the final list."""

    what: str
    passed: bool
    words: str


@dataclass
class _Stage:
    """The copied kits and the processes of a rehearsal."""

    folder: Path
    config: RunConfig
    kits: Path
    sites: Sequence[str]
    authority: Path  # the folder with the key that signs
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def spoil(self, site: str, fault: str) -> None:
        """Let this site corrupt its answers from now on."""
        (self.folder / f"{site}.spoil").write_text(fault)

    def join(self, site: str) -> None:
        """Start a site."""
        environment = {**os.environ, "ATOLL_REHEARSAL": f"@{self.folder / site}.spoil"}
        kit = self.kits / site
        self.processes[site] = subprocess.Popen(
            [*COMMAND, "join", str(kit), str(kit / "site.toml"), "--quiet"], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def serve(self, name: str) -> subprocess.Popen[str]:
        """Start the coordinator with the shortened run."""
        kit, out = self.kits / COORDINATOR, self.folder / name
        self.processes[name] = subprocess.Popen(
            [*COMMAND, "serve", str(kit), str(self.folder / "run.toml"), "--out", str(out),
             "--silence", "10", "--quiet"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self.processes[name]

    def begun(self, name: str) -> bool:
        """Wait for the first round of a run; return whether it came."""
        path, end = self.folder / name / "times.jsonl", time.monotonic() + SECONDS
        while time.monotonic() < end and self.processes[name].poll() is None:
            if path.exists() and path.stat().st_size:
                return True
            time.sleep(0.1)
        return False

    def ended(self, name: str) -> tuple[int, str]:
        """Wait for the end of a run; return its exit code and the first line of its errors."""
        process = self.processes[name]
        try:
            _, output = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            _end([process])
            return 1, f"not within {SECONDS:.0f} s"
        return process.returncode, " ".join(output.splitlines()[:1])

    def kill(self, name: str) -> None:
        """Kill all of NVFlare's processes of a kit at once."""
        for pid in running(str((self.kits / name).resolve())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all running processes."""
        _end(list(self.processes.values()))  # before NVFlare's processes, which they would restart
        for name in (COORDINATOR, *self.sites):
            self.kill(name)
        for log in self.folder.glob("kits/*/egress.jsonl"):
            append_only(log, False)  # otherwise the folder cannot be removed


def _end(commands: Sequence[subprocess.Popen[str]]) -> None:
    """End commands: the first signal ends a round, the second ends them immediately."""
    for end in ("terminate", "terminate", "kill"):
        for process in commands:
            getattr(process, end)()
        for process in commands:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)


def rehearse(
    project: Path, kits: Path, config: RunConfig, folder: Path, tell: Callable[[str], None]
) -> list[Item]:
    """Rehearse all steps; return the results in order."""
    about, folder = read_project(project), folder.resolve()
    items = [_checked(kits / name, name in about.sites) for name in (COORDINATOR, *about.sites)]
    for item in items:
        tell(_line(item))
    if not all(item.passed for item in items):
        return items
    short = dataclasses.replace(config, rounds=min(3, config.rounds), checkpoint_seconds=0.0)
    with _staged(about, kits, short, folder) as (stage, words):
        items.append(Item("kits for this machine", True, words))
        tell(_line(items[-1]))
        twin = _twin(short, folder)
        for step in (_plain, _slow, _site_killed, _server_killed, _expired, _nan):
            items.append(step(stage, twin))
            tell(_line(items[-1]))
    return items


def rehearse_once(config: RunConfig, sites: Sequence[str], port: int, folder: Path) -> Item:
    """Run once undisturbed with new kits for this machine; compare with the run in one process."""
    about = Project(name="rehearsal", port=port, sites=tuple(sites))
    with _staged(about, folder / "none", config, folder) as (stage, _):
        return _plain(stage, _twin(config, folder))


def _line(item: Item) -> str:
    return f"{'go   ' if item.passed else 'NO GO'}  {item.what}: {item.words}"


def _checked(folder: Path, site: bool) -> Item:
    if site and not folder.exists() and signed_file(folder.parent, folder.name).exists():
        return Item(f"the kit of {folder.name}", True, "not here: the site has made its own key")
    kit = Kit(folder)
    try:
        warning = kit.check()
    except UserError as error:
        return Item(f"the kit of {folder.name}", False, f"{error.what}: {error.remedy}")
    words = warning or f"in order until {kit.until:%Y-%m-%d}"
    return Item(f"the kit of {folder.name}", True, words)


@contextmanager
def _staged(
    about: Project, kits: Path, config: RunConfig, folder: Path
) -> Iterator[tuple[_Stage, str]]:
    """Copies of the real kits; new ones for localhost where not all of them can be used here."""
    folder.mkdir(parents=True)
    copies, names = folder / "kits", (COORDINATOR, *about.sites)
    whole = all((kits / name).exists() for name in names)
    copied = whole and _is_here(about.server)
    if copied:
        for name in names:
            ignored = shutil.ignore_patterns("store", "work", "*.log", "*.txt", "*-*-*-*-*")
            shutil.copytree(kits / name, copies / name, ignore=ignored)
        words, authority = "copies of the real ones", kits / "authority"
    else:
        own = folder / "project.toml"
        values = {"name": about.name, "port": about.port, "sites": list(about.sites)}
        own.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        init(own, copies, config)
        for name in (name for name in about.sites if (kits / name).exists()):
            shutil.copy(kits / name / "site.toml", copies / name / "site.toml")
        reason = f"{about.server} is not this machine" if whole else "sites have their own keys"
        words = f"made for localhost, since {reason}"
        authority = copies / "authority"
    (folder / "run.toml").write_text(to_toml(config))
    state = authority / about.name / "state"
    stage = _Stage(folder, config, copies, sorted(about.sites), state)
    try:
        for site in stage.sites:
            _extend_budgets(copies / site / "site.toml")
            stage.spoil(site, "")
            stage.join(site)
        yield stage, words
    finally:
        stage.close()


def _extend_budgets(site: Path) -> None:
    """Let a copied contract allow all runs of a rehearsal; its other terms stay as they are."""

    def more(term: re.Match[str]) -> str:
        return f"{term[1]}{BUDGETS * int(term[2].replace('_', ''))}"

    terms = r"(?m)^((?:rounds|epochs|answers|comparisons)_in_all = )([\d_]+)"
    site.write_text(re.sub(terms, more, site.read_text()))


def _is_here(host: str) -> bool:
    """Whether a name belongs to this machine, that is, whether its address can be bound."""
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind(address[4][:2])
    except OSError:
        return False
    return True


def _twin(config: RunConfig, folder: Path) -> bytes:
    """The record of the same run in one process; empty if the files are at the sites."""
    if "files" in config.data:
        return b""
    execute(config, folder / "twin", local_engine)
    return (folder / "twin" / "events.jsonl").read_bytes()


def _same(stage: _Stage, name: str, twin: bytes) -> tuple[bool, str]:
    """Whether a run finished, with the same record as in one process."""
    code, words = stage.ended(name)
    if code:
        return False, words
    events = (stage.folder / name / "events.jsonl").read_bytes()
    if twin and events != twin:
        same = stage.config.engine_options().mode != "loop"
        return same, "completed; not bit for bit as in one process" + (
            ", which works on all clients together" if same else ""
        )
    return True, "completed" + (", bit for bit as in one process" if twin else "")


def _plain(stage: _Stage, twin: bytes) -> Item:
    began = time.monotonic()
    stage.serve("plain")
    passed, words = _same(stage, "plain", twin)
    return Item("a short run", passed, f"{words}, {time.monotonic() - began:.0f} s")


def _slow(stage: _Stage, twin: bytes) -> Item:
    stage.spoil(stage.sites[0], "slow=2")
    stage.serve("slow")
    passed, words = _same(stage, "slow", twin)
    stage.spoil(stage.sites[0], "")
    return Item("a site that answers two seconds late", passed, words)


def _disturbed(stage: _Stage, twin: bytes, name: str, what: str, harm: Callable[[], None]) -> Item:
    for site in stage.sites:
        stage.spoil(site, "slow=0.5")
    stage.serve(name)
    if stage.begun(name):
        harm()
    passed, words = _same(stage, name, twin)
    for site in stage.sites:
        stage.spoil(site, "")
    return Item(what, passed, words)


def _site_killed(stage: _Stage, twin: bytes) -> Item:
    what = f"site {stage.sites[-1]} killed in a round"
    return _disturbed(stage, twin, "site", what, lambda: stage.kill(stage.sites[-1]))


def _server_killed(stage: _Stage, twin: bytes) -> Item:
    what = "the server killed in a round"
    return _disturbed(stage, twin, "server", what, lambda: stage.kill(COORDINATOR))


def _nan(stage: _Stage, twin: bytes) -> Item:
    stage.spoil(stage.sites[0], "nan")
    stage.serve("nan")
    code, words = stage.ended("nan")
    stage.spoil(stage.sites[0], "")
    if code == 0:
        events = read_events(stage.folder / "nan")
        reasons = [event.reason for event in events if isinstance(event, Exclusion)]
        words = "completed: no answer of this method has numbers to spoil"
        words = f"completed without that site: {reasons[0]}" if reasons else words
    return Item("an update that is not a number", "not finite" in words or code == 0, words)


def _expired(stage: _Stage, twin: bytes) -> Item:
    """A certificate that has ended: found out at the site, and refused by the server itself."""
    what, name = "an expired certificate", stage.sites[0]
    key = stage.authority / "cert.json"
    if not key.exists():
        return Item(what, True, "not tried: the authority's key is not here")
    old = stage.folder / "expired-kit"
    shutil.copytree(stage.kits / name, old, ignore=shutil.ignore_patterns("store"))
    outdate(old, key)
    try:
        Kit(old).check()
        at_site = "NOT found out at the site"
    except UserError:
        at_site = "found out at the site"
    stage.serve("expired")
    at_server = reachable(Kit(old)) if stage.begun("expired") else "no server"
    passed, words = _same(stage, "expired", twin)
    passed = passed and at_site.startswith("found") and "expired" in at_server
    return Item(what, passed, f"{at_site}; {at_server or 'TAKEN by the server'}; the run {words}")


def outdate(kit: Path, authority: Path) -> None:
    """Replace the certificate of a kit by one that expired yesterday."""
    from cryptography import x509  # noqa: PLC0415 - comes with NVFlare
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

    body = json.loads(authority.read_text())
    key: Any = serialization.load_pem_private_key(body["root_pri_key"].encode(), None)
    root = x509.load_pem_x509_certificate(body["root_cert"].encode())
    path = kit / "startup" / "client.crt"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(root.subject)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now - timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
