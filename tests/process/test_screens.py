"""What both ends show of each other is true: names, who was there, who is revoked, whose clock."""

import datetime as times
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.engines.network import kits
from atoll.engines.network.kits import Kit
from atoll.engines.network.process import STANDING
from atoll.engines.network.site import _remedy, _standing_of, reachable

from .federation import Federation, federation, wait_for

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

DAY = times.timedelta(days=1)
CONFIG = """\
rounds = 1
data = "wine"
scenario = { clients = 2 }
model = { widths = [8] }
method = { name = "fedavg", epochs = 1 }
engine = { mode = "loop", threads = 1 }
"""


def test_errors_name_the_site_and_not_its_number_in_the_run() -> None:
    from atoll.engines.network import nvflare  # noqa: PLC0415 - only where it is installed

    names = {"site-0": "basel"}
    bad = nvflare._ended(BadMessageError("site-0", "x"), names)
    assert bad == {"ended": "refused", "sender": "basel", "reason": "x"}
    failed = nvflare._ended(ClientFailedError("site-0", "fit", "x"), names)
    assert failed == {"ended": "failed", "client": "basel", "action": "fit", "reason": "x"}
    server = nvflare._ended(BadMessageError("server", "x"), names)
    assert server["sender"] == "server"


def test_a_site_that_is_away_from_the_start_was_never_seen() -> None:
    from atoll.engines.network import nvflare  # noqa: PLC0415

    parties = nvflare._parties(["bern", "basel"], ("site-0", "site-1"), {"bern": object()})
    assert {party.name: party.seen for party in parties.values()} == {"basel": 0.0, "bern": 0.0}


def test_a_sites_own_words_cannot_command_the_coordinators_terminal() -> None:
    from atoll.engines.network import remote  # noqa: PLC0415
    from atoll.runs.config import change, resolve  # noqa: PLC0415

    run = resolve(change({"method": "fedavg"}, {}), "test")
    party = remote.Party("basel", "site-0", object())
    engine = remote.Remote(run, {"site-0": party}, 60.0, 60.0, lambda: None)
    for reply in ({"ok": False, "reason": "\x1b[2J\nall is well"}, {"version": "\x1b[2J"}):
        with pytest.raises(ClientFailedError) as caught:
            engine._checked("site-0", "handle", "fit", reply)
        assert str(caught.value).isprintable()


# Clocks


@pytest.mark.parametrize(("days", "words"), [(-9, "is not valid before"), (9000, "ended on")])
def test_a_clock_that_is_wrong_is_shown_beside_the_certificates_time(
    days: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Federation(tmp_path)
    made.init(["basel"])

    class Clock(times.datetime):
        """The clock of a machine that is some days off."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return times.datetime.now(tz) + days * DAY

    monkeypatch.setattr(kits, "datetime", Clock)
    with pytest.raises(UserError, match=f"the certificate of basel {words}") as caught:
        Kit(made.kit("basel")).check()
    assert f"the clock here says {Clock.now(times.UTC):%Y-%m-%d}" in caught.value.what
    assert "it is valid from" in caught.value.what
    assert caught.value.remedy.startswith("set this machine's clock")


def certified(made: Federation, begins: Any, ends: Any) -> ssl.SSLContext:
    """A server with the coordinator's key, and a certificate for another time."""
    from cryptography import x509  # noqa: PLC0415 - comes with NVFlare
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

    state = json.loads((made.folder / "kits/authority/alps/state/cert.json").read_text())
    key: Any = serialization.load_pem_private_key(state["root_pri_key"].encode(), None)
    startup = made.kit("coordinator") / "startup"
    old = x509.load_pem_x509_certificate((startup / "server.crt").read_bytes())
    body = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), x509.random_serial_number(), begins, ends
    )
    for one in old.extensions:
        body = body.add_extension(one.value, one.critical)
    path = made.folder / "other.crt"
    path.write_bytes(body.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path, startup / "server.key")
    return context


@contextmanager
def greeting(context: ssl.SSLContext, port: int) -> Iterator[None]:
    """Somebody who greets two callers."""

    def greet() -> None:
        for _ in range(2):
            plain, _ = server.accept()
            try:
                context.wrap_socket(plain, server_side=True).close()
            except OSError:
                plain.close()

    with socket.create_server(("localhost", port)) as server:
        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield
        thread.join(10)


@pytest.mark.parametrize(
    ("begins", "ends", "words"),
    [(1, 9, "certificate is not yet valid; it is not valid before"), (-9, -1, "expired; it ended")],
)
def test_a_coordinators_certificate_of_another_time_is_shown_with_both_times(
    begins: int, ends: int, words: str, tmp_path: Path
) -> None:
    made, now = Federation(tmp_path), times.datetime.now(times.UTC)
    made.init(["basel"])
    kit = Kit(made.kit("basel"))
    with greeting(certified(made, now + begins * DAY, now + ends * DAY), kit.port):
        reason = reachable(kit)
    assert words in reason
    assert f"it is valid from {now + begins * DAY:%Y-%m-%d}" in reason
    assert "the clock here says" in reason
    assert _remedy(reason).startswith("check the clocks here and at the coordinator")
    assert _remedy("certificate unknown") == "ask the project's owner for a new kit"


# Who is connected


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("target_unreachable", "waiting for the coordinator: it does not answer"),
        ("timeout", "waiting for the coordinator: it does not answer"),
        ("comm_error", "waiting for the coordinator: it does not answer"),
        (None, "waiting for the coordinator: it does not answer"),
        ("authentication_error", "the coordinator does not admit this site: no more"),
        ("ok", ""),
    ],
)
def test_a_coordinator_that_is_gone_has_refused_nobody(
    code: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a normal end of a run the server is gone, and heartbeats reach nobody."""
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell  # noqa: PLC0415
    from nvflare.fuel.f3.cellnet.utils import make_reply  # noqa: PLC0415

    from atoll.engines.network import standing  # noqa: PLC0415

    reply = make_reply(code, error="no more") if code == "authentication_error" else None
    reply = reply or (make_reply(code) if code else None)
    monkeypatch.setattr(CoreCell, "send_request", lambda *_, **__: reply)
    standing.watch_server(tmp_path / STANDING)
    CoreCell.send_request(None, "task", "heart_beat")
    (tmp_path / "kit.json").write_text('{"name": "bern", "server": "localhost", "port": 8102}')
    assert _standing_of(Kit(tmp_path)) == words


def test_a_run_that_has_ended_shows_the_bytes_of_every_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its jobs; the file with the status of a job is gone when the job is."""
    from atoll.engines.network import coordinator  # noqa: PLC0415

    made, noted = Federation(tmp_path), list[str]()
    made.init(["basel"])
    kit = Kit(made.kit("coordinator"))
    serving = coordinator._Serving(
        kit, [], coordinator.Terms(), lambda *_: None, lambda: False, noted.append
    )
    serving.control.mkdir()
    ends = iter(["lost", "done"])

    def watch(job: str, sites: list[str]) -> None:
        status = {"sites": {"basel": {"sent": 1000, "received": 300}}}
        (serving.control / "status.json").write_text(json.dumps(status))
        (serving.control / "ended.json").write_text(json.dumps({"ended": next(ends)}))
        assert serving._views()[0].sent in (1000, 2000)

    monkeypatch.setattr(serving, "_watch", watch)
    monkeypatch.setattr(serving, "_wait", lambda: ["basel"])
    monkeypatch.setattr(serving.session, "submit", lambda folder: "job")
    serving.go()
    assert noted == ["basel: 2,000 bytes to it, 600 from it"]


def test_a_job_that_was_lost_is_told_with_the_site_whose_end_went_first(tmp_path: Path) -> None:
    from atoll.engines.network import coordinator  # noqa: PLC0415
    from atoll.engines.network.process import ENDS  # noqa: PLC0415

    made = Federation(tmp_path)
    made.init(["basel", "bern"])
    kit = Kit(made.kit("coordinator"))
    serving = coordinator._Serving(
        kit, [], coordinator.Terms(), lambda *_: None, lambda: False, print
    )
    serving.control.mkdir()
    ends = {"job-1": [["bern", 1], ["basel", 0]], "job-2": [["basel", 9]]}
    (serving.control / ENDS).write_text(json.dumps(ends))
    assert serving._lost({"job": "job-1"}) == "the job's process at bern ended"
    assert serving._lost({"job": "job-3"}) == "the coordinator's own end of the job is gone"
    silent = {"job": "job-1", "site": "basel", "what": "basel: silent for 30 s in fit"}
    assert serving._lost(silent) == "basel: silent for 30 s in fit"


def reading(process: subprocess.Popen[str]) -> list[str]:
    """The lines that a process prints, as they come."""
    said = list[str]()

    def keep() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line.rstrip())

    threading.Thread(target=keep, daemon=True).start()
    return said


def test_a_site_that_is_revoked_is_connected_at_neither_end(tmp_path: Path) -> None:
    with federation(tmp_path, ("basel", "bern")) as made:
        made.allow(["fedavg"], ("basel", "bern"))
        (made.folder / "run.toml").write_text(CONFIG)
        serving = made.serve("run.toml", "--out", "run")
        there = reading(serving)
        basel = made.start("join", "kits/basel", "kits/basel/site.toml")
        here = reading(basel)
        wait_for("basel", lambda: any("basel  connected to" in line for line in here), 120)
        wait_for("its line", lambda: any("basel connected" in line for line in there))
        body = json.dumps({"sites": ["bern"]})
        (made.kit("coordinator") / "sites.json").write_text(body)
        wait_for("it is shown there", lambda: any("basel revoked" in line for line in there))

        def line_of_basel() -> str:  # how it stands, not a notice between two of these lines
            return [line for line in here if line.startswith("basel  ")][-1]

        wait_for("it is told here", lambda: "connected" not in line_of_basel(), 60)
        assert any("is not in the list of sites" in line for line in here), here
        for process in (serving, basel):  # before their pipes are closed under the readers
            process.terminate()
            process.wait(60)
