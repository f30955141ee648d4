"""A site's end: keeps NVFlare's process running, and shows the state of the site."""

import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.record import disk_errors
from atoll.engines.network.addresses import encode_host, open_connection, proxies
from atoll.engines.network.contract import Contract, read_site
from atoll.engines.network.deny import JOB
from atoll.engines.network.egress import EgressLog, accept
from atoll.engines.network.kits import COORDINATOR, Kit, untimely
from atoll.engines.network.limits import environment as limits_of
from atoll.engines.network.mirror import ENVIRONMENT as MIRROR
from atoll.engines.network.mirror import End, Mirror, append_only
from atoll.engines.network.notices import Notice, Notices
from atoll.engines.network.process import (
    STANDING,
    Process,
    alone,
    end_former,
    environment,
    own_store,
    read_json,
)
from atoll.engines.network.tls import client_context, passphrase

__all__ = ["join", "reachable"]

CALM_SECONDS = 15.0  # seconds between checks of a reachable coordinator
FRESH_SECONDS = 45.0  # seconds for the coordinator's server to notice a connected site
OUTSIDE_SECONDS = 40.0  # seconds after which a refused site gives up


def reachable(kit: Kit) -> str:
    """Why the coordinator is not reachable with this kit; empty if it is."""
    startup = kit.folder / "startup"
    try:
        pair = (str(startup / "client.crt"), str(startup / "client.key"))
        context = client_context(
            str(startup / "rootCA.pem"),
            pair,
            encode_host(kit.server),
            lambda line: None,
            passphrase(),
        )
    except OSError as error:  # and every ssl.SSLError; they may be in the midst of a renewal
        return f"this site's key and certificate cannot be used: {_alert(error)}"
    try:
        with (
            open_connection([kit.server], kit.port, 5) as plain,
            context.wrap_socket(plain, server_hostname=encode_host(kit.server)) as secure,
        ):
            secure.settimeout(1.0)
            with suppress(TimeoutError):
                secure.recv(1)  # a refused certificate is reported only now
    except ssl.SSLCertVerificationError as error:
        detail = error.verify_message + _timed(kit, context)
        return f"the coordinator's certificate is not trusted here: {detail}"
    except ssl.SSLError as error:
        return f"the coordinator refuses this site's certificate: {_alert(error)}"
    except ConnectionResetError:
        return ""  # it closed a silent connection, after the handshake
    except OSError as error:
        reason = f"waiting for the coordinator: {str(error.strerror or error).lower()}"
        return f"{reason} ({proxies()} is set, but no proxy is used)" if proxies() else reason
    return ""


def _timed(kit: Kit, context: ssl.SSLContext) -> str:
    """How the coordinator's certificate and the local clock differ, if they do."""
    from cryptography import x509  # noqa: PLC0415 - comes with NVFlare

    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to read it
    with (
        suppress(OSError, ValueError),
        open_connection([kit.server], kit.port, 5) as plain,
        context.wrap_socket(plain) as secure,
    ):
        certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
        wrong = untimely(certificate.not_valid_before_utc, certificate.not_valid_after_utc)
        return f"; it {wrong}" if wrong else ""
    return ""


def _alert(error: OSError) -> str:
    words = str(getattr(error, "reason", "") or error.strerror or error).lower().replace("_", " ")
    return re.sub(r"^(tlsv\d+|sslv3) alert ", "", words)


def _store(kit: Kit, site: Path) -> Path:
    """The site's store; refuses one inside its kit, since jobs have their folders there."""
    store, home = Path(read_site(site).store).resolve(), kit.folder.resolve()
    if store.is_relative_to(home):
        what, remedy = "the store lies within the kit", f'write store = "../{home.name}-store"'
        raise UserError(what, str(site), f"{remedy}, and move what is there to that folder")
    return store


def _traces(kit: Kit, store: Path) -> str:
    """Describe what earlier runs have left in a site's store and kit; empty if nothing."""
    with disk_errors(store):
        runs = sorted(path.name for path in store.iterdir() if path.is_dir())
        jobs = [path for path in kit.folder.iterdir() if JOB.fullmatch(path.name)]
    pieces = [f"{', '.join(runs[:5])} in the store"] if runs else []
    return ", ".join([*pieces, *([f"{len(jobs)} jobs in the kit"] if jobs else [])])


@contextmanager
def _appended(log: Path) -> Iterator[bool]:
    """Make the log append-only while a site has joined; yields whether the system supports it."""
    with disk_errors(log):
        log.touch(mode=0o600)
    try:
        yield append_only(log, True)
    finally:
        append_only(log, False)


def _standing(kit: Kit, terms: Contract, end: End, appended: bool) -> list[str]:
    """Describe what has left this site so far, how its log is protected, and the used budgets."""
    summary = f"{end.left:,} bytes have left in {end.lines:,} lines, which end in {end.hash}"
    protection = "can only be appended to" if appended else "is not append-only: not permitted here"
    lines = [f"{kit.name}: {summary}; the log {protection}"]
    budgets = {
        "rounds": terms.rounds_in_all,
        "epochs": terms.epochs_in_all,
        "answers": terms.answers_in_all,
        "comparisons": terms.comparisons_in_all,
    }
    for data, counts in end.spent.items():
        pairs = zip(counts, budgets.items(), strict=True)
        spent = [f"{count:,} of {most:,} {name}" for count, (name, most) in pairs]
        lines.append(f"{kit.name}: {', '.join(spent)} on the data {data} are spent")
    return lines


def join(
    kit: Kit,
    site: Path,
    tell: Callable[[str], None],
    stopping: Callable[[], bool],
    note: Callable[[str], None] = lambda line: None,
    accept_log: bool = False,
) -> None:
    """Take part until stopped: keep NVFlare's process running, and show its state.

    `note` receives what has left the site so far, once at the start, and later refusals by the
    coordinator and second connections under this site's name. With `accept_log` a log goes on
    though the copy of its end is gone, and has a line that says so.
    """
    if kit.name == COORDINATOR:
        raise UserError("this is the coordinator's kit", str(kit.folder), "use atoll serve")
    kit.check()
    store, mirror = _store(kit, site), Mirror.of_kit(kit.folder)
    log = store / "egress.jsonl"
    with alone(kit), own_store(store):
        end_former(kit)
        if accept_log:
            accept(log, mirror)
        traces = "" if mirror.path.exists() else _traces(kit, store)
        end = EgressLog(log, mirror).end  # a log that is broken or shorter is found out here
        if traces and not end.lines:
            words = "the egress log and the copy of its end are gone, but there are traces of"
            note(f"{kit.name}: {words} earlier runs: {traces}; budgets begin anew")
        with _appended(log) as appended:
            for line in _standing(kit, read_site(site).terms(), end, appended):
                note(line)
            note(f"{kit.name}: the key {kit.fingerprint}; the authority {kit.authority}")
            _joined(_Joined(kit, site, log, mirror, note), tell, stopping)


@dataclass(frozen=True)
class _Joined:
    """A running site."""

    kit: Kit
    site: Path
    log: Path
    mirror: Mirror
    note: Callable[[str], None]

    def process(self) -> Process:
        """NVFlare's process, with the local paths and size limits."""
        own = {"ATOLL_SITE": str(self.site.resolve()), MIRROR: str(self.mirror.path)}
        limits = limits_of(read_site(self.site).terms().question)
        return Process("client", self.kit, environment(**own, **limits))


class _Outside:
    """Whether the coordinator accepts this site, from the log of NVFlare's process."""

    def __init__(self, kit: Kit, note: Callable[[str], None]) -> None:
        self.kit, self.note, self.notices = kit, note, Notices(kit.folder)
        self.words, self._since = "", 0.0
        self.notices.clear()

    def look(self) -> None:
        """Report news; raises an error if the coordinator keeps refusing."""
        for notice in self.notices.new():
            self._take(notice)
        if self.words and time.monotonic() - self._since > OUTSIDE_SECONDS:
            remedy = "stop the other one, or ask the project's owner: the kit may have been copied"
            if "connected already" not in self.words:
                remedy = "ask the project's owner whether this site still takes part"
            raise UserError(self.words, str(self.kit.folder), remedy)

    def _take(self, notice: Notice) -> None:
        if notice.kind == "refused" and not self.words:
            self._since = time.monotonic()
        if notice.kind in ("refused", "taken"):
            refused = notice.kind == "refused"
            words = f"the coordinator refuses this site: {notice.words}" if refused else ""
            if words and words != self.words:
                self.note(f"{self.kit.name}: {words}")
            self.words = words
        else:
            self.note(f"{self.kit.name}: {notice.words}")


def _joined(joined: _Joined, tell: Callable[[str], None], stopping: Callable[[], bool]) -> None:
    kit, status = joined.kit, joined.log.with_name("status.json")
    status.unlink(missing_ok=True)
    (kit.folder / STANDING).unlink(missing_ok=True)
    process, outside = joined.process(), _Outside(kit, joined.note)
    refused, reason, good = 0, "", -CALM_SECONDS
    try:
        while not stopping():
            joined.mirror.watch(joined.log)
            outside.look()
            if time.monotonic() - good > CALM_SECONDS:
                reason = reachable(kit)
                good = -CALM_SECONDS if reason else time.monotonic()
                refused = refused + 1 if "certificate" in reason else 0
            if refused >= 3:
                raise UserError(reason, str(kit.folder), _remedy(reason))
            if not reason:
                process.ensure()
            tell(_site_line(kit, status, reason or outside.words or _standing_of(kit)))
            end = time.monotonic() + 3
            while time.monotonic() < end and not stopping():
                time.sleep(0.2)
    finally:
        process.stop()


def _remedy(reason: str) -> str:
    """The remedy for a refused certificate; a wrong clock needs no new kit."""
    if any(words in reason for words in ("expired", "not yet valid")):
        remedy = "check the clocks here and at the coordinator"
        return f"{remedy}; if they are right, ask the project's owner for a new kit"
    return "ask the project's owner for a new kit"


def _standing_of(kit: Kit) -> str:
    """Why this site is not connected though TLS is; empty if the server has admitted it."""
    standing = read_json(kit.folder / STANDING)
    if time.time() - float(standing.get("time", 0.0)) > FRESH_SECONDS:
        return f"reaches {kit.server}:{kit.port}, not admitted yet"
    reason = str(standing.get("refused", ""))
    if standing.get("silent"):
        return "waiting for the coordinator: it does not answer"
    if "is disabled" in reason:
        return "the coordinator has revoked this site"
    return f"the coordinator does not admit this site: {reason}" if reason else ""


def _site_line(kit: Kit, status: Path, reason: str) -> str:
    """The state of this site, in one line."""
    status_fields = read_json(status)
    pieces = [kit.name, reason or f"connected to {kit.server}:{kit.port}"]
    if status_fields.get("run"):
        pieces.append(f"run {status_fields['run']} ({status_fields['method']})")
        ago = time.time() - float(status_fields["time"])
        pieces.append(
            f"working on {status_fields['doing']}"
            if status_fields["doing"]
            else f"idle for {ago:.0f} s"
        )
        pieces.append(f"{status_fields['bytes']:,} bytes have left")
    return "  ".join(pieces)
