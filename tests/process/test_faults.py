"""What networks and machines do to a run: it ends as an undisturbed one, or says by name why not.

Rounds are slowed down at the sites, so that there is a moment in which to do harm.
"""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import EXIT_INTERRUPTED
from atoll.core.record import Absence, Exclusion, read_events
from atoll.engines.local import local_engine
from atoll.engines.network import egress
from atoll.engines.network.process import running
from atoll.engines.network.rehearsal import outdate
from atoll.runs.config import read, resolve
from atoll.runs.execute import execute

from .federation import SITES, Federation, federation, free_port, wait_for

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

ROUNDS = 8


def config(method: str, clients: int = 3, rounds: int = ROUNDS) -> str:
    return f"""\
rounds = {rounds}
data = "wine"
scenario = {{ clients = {clients} }}
model = {{ widths = [8] }}
method = {{ name = "{method}", epochs = 1 }}
engine = {{ mode = "loop", threads = 1 }}
checkpoint_seconds = 0
"""


@pytest.fixture(scope="module")
def alps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three sites that have joined; what they do to their answers is read from a file each."""
    with federation(tmp_path_factory.mktemp("alps")) as made:
        made.allow(["alone", "fedavg"])
        for method in ("alone", "fedavg"):
            (made.folder / f"{method}.toml").write_text(config(method))
            path = str(made.folder / f"{method}.toml")
            execute(resolve(read(path), path), made.folder / "local" / method, local_engine)
        for site in SITES:
            calm(made, site)
            come(made, site)
        yield made


def calm(made: Federation, site: str, how: str = "slow=0.2") -> None:
    (made.folder / f"{site}.spoil").write_text(how)


def come(made: Federation, site: str) -> None:
    made.join(site, ATOLL_REHEARSAL=f"@{made.folder / site}.spoil")


def rounds(made: Federation, name: str) -> int:
    path = made.folder / name / "times.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def begun(made: Federation, name: str, *further: str, method: str = "alone") -> Any:
    """A run that has done two rounds."""
    serving = made.serve(f"{method}.toml", "--out", name, "--silence", "8", *further)
    wait_for("two rounds", lambda: rounds(made, name) >= 2 or serving.poll() is not None, 400)
    assert serving.poll() is None, serving.communicate()
    return serving


def ended_well(made: Federation, name: str, serving: Any, method: str = "alone") -> str:
    """The run is over and is the undisturbed one; what was said of it."""
    _, said = serving.communicate(timeout=300)
    assert serving.returncode == 0, said[-3000:]
    for file in ("config.toml", "events.jsonl", "result.json"):
        whole = made.folder / "local" / method / file
        assert (made.folder / name / file).read_bytes() == whole.read_bytes(), file
    return str(said)


def test_a_sites_job_process_that_is_killed_costs_no_round(alps: Federation) -> None:
    serving = begun(alps, "job")
    os.kill(alps.job_process("basel"), signal.SIGKILL)
    said = ended_well(alps, "job", serving)
    # A busy machine may notice the silence of the site before the end of its process.
    assert re.search(r"basel[^\n]*; going on from the last checkpoint", said), said


@pytest.mark.long
def test_a_whole_site_that_is_killed_comes_back_and_the_run_ends_the_same(
    alps: Federation,
) -> None:
    """ATOLL_LONG_ABSENCE=120 makes it the two minutes of the specification."""
    serving = begun(alps, "site")
    gone = alps.joined.pop("bern")
    for process in (gone.pid, alps.main_process("bern"), alps.job_process("bern")):
        os.kill(process, signal.SIGKILL)
    gone.communicate()
    wait_for("it is missed", lambda: not alps.job_process("geneva"), 60)
    time.sleep(float(os.environ.get("ATOLL_LONG_ABSENCE", "0")))
    assert serving.poll() is None, serving.communicate()
    come(alps, "bern")
    said = ended_well(alps, "site", serving)
    assert "bern away, last seen" in said


def test_a_server_that_is_killed_is_started_again(alps: Federation) -> None:
    serving = begun(alps, "server")
    os.kill(alps.main_process("coordinator"), signal.SIGKILL)
    ended_well(alps, "server", serving)


def test_a_kit_is_used_by_one_command_at_a_time(alps: Federation) -> None:
    wait_for("the first one", (alps.kit("basel") / "lock").exists)
    ended = alps.call("join", "kits/basel", "kits/basel/site.toml")
    assert ended.returncode == 2
    assert "another command uses this kit now" in ended.stderr


def test_serve_itself_may_be_killed_and_goes_on_with_resume(alps: Federation) -> None:
    serving = begun(alps, "serve")
    serving.kill()
    serving.communicate()
    again = alps.serve("alone.toml", "--out", "serve", "--resume")
    ended_well(alps, "serve", again)


def test_a_signal_to_end_leaves_nothing_running_at_either_end(alps: Federation) -> None:
    """SIGTERM is what service managers send; the run is saved, and goes on with --resume."""
    serving = begun(alps, "term")
    kits = {name: str(alps.kit(name).resolve()) for name in ("coordinator", "geneva")}
    assert all(running(kit) for kit in kits.values())
    serving.send_signal(signal.SIGTERM)
    _, said = serving.communicate(timeout=60)
    assert serving.returncode == EXIT_INTERRUPTED, said[-3000:]
    assert "interrupted; the state is saved" in said
    wait_for("nothing runs there", lambda: not running(kits["coordinator"]), 10)
    assert alps.joined["geneva"].poll() is None, "a site goes on waiting"
    again = alps.serve("alone.toml", "--out", "term", "--resume")
    ended_well(alps, "term", again)
    leaving = alps.joined["geneva"]
    leaving.send_signal(signal.SIGTERM)
    _, said = leaving.communicate(timeout=60)
    assert leaving.returncode == 0, said[-3000:]
    wait_for("nothing runs here", lambda: not running(kits["geneva"]), 10)
    come(alps, "geneva")


def test_a_site_that_stays_away_is_named_and_asked_again_when_it_is_back(
    alps: Federation,
) -> None:
    alps.leave("geneva")
    few = ("--at-least", "2", "--patience", "3")
    calm(alps, "basel", "slow=15")  # so that geneva is back before the run ends
    serving = begun(alps, "few", *few, method="fedavg")
    come(alps, "geneva")
    wait_for("it is seen", (alps.kit("coordinator") / "work" / "stop").exists, 200)
    calm(alps, "basel")
    _, said = serving.communicate(timeout=300)
    assert serving.returncode == 0, said[-3000:]
    away = [e for e in read_events(alps.folder / "few") if isinstance(e, Absence)]
    assert away[0] == Absence(0, 0, "site-2", "fit")
    assert {e.client for e in away} == {"site-2"}
    assert max(e.round for e in away) < ROUNDS - 1  # it was there again at the end
    assert "geneva away, not seen yet" in said
    before = said[: said.index("geneva connected")].splitlines()
    for line in before:  # while others worked; its key is shown when it is first heard
        assert "geneva" not in line or "geneva away, not seen yet" in line or "has the key" in line


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan", "has numbers that are not finite"),
        pytest.param("shape", "not torch.float32", marks=pytest.mark.long),
        pytest.param("unknown", "unknown tensor 'slipped in'", marks=pytest.mark.long),
        pytest.param("large", "not torch.float32", marks=pytest.mark.long),
    ],
)
def test_an_answer_that_is_spoilt_is_left_out_by_name(
    how: str, words: str, alps: Federation
) -> None:
    calm(alps, "basel", how)
    serving = alps.serve("fedavg.toml", "--out", f"spoilt-{how}", "--quiet")
    _, said = serving.communicate(timeout=200)
    calm(alps, "basel")
    assert serving.returncode == 0, said
    events = read_events(alps.folder / f"spoilt-{how}")
    out = [event for event in events if isinstance(event, Exclusion)]
    assert {(e.client, e.action) for e in out} == {("site-0", "fit")}
    assert [e.round for e in out] == list(range(ROUNDS))  # nothing of it was applied
    assert all(words in e.reason for e in out)


@pytest.mark.long
def test_a_step_that_outlasts_every_sign_of_silence_is_waited_for(alps: Federation) -> None:
    """ATOLL_LONG_STEP=300 makes it the five minutes of the specification."""
    seconds = float(os.environ.get("ATOLL_LONG_STEP", "20"))
    (alps.folder / "one.toml").write_text(config("alone", rounds=1))
    calm(alps, "geneva", f"slow={seconds}")
    serving = alps.serve("one.toml", "--out", "long", "--silence", "8")
    _, said = serving.communicate(timeout=6 * seconds + 200)
    calm(alps, "geneva")
    assert serving.returncode == 0, said[-2000:]
    assert "geneva working on fit" in said
    assert "lost" not in said


def test_a_contract_is_kept_and_both_ends_say_so(alps: Federation) -> None:
    alps.leave("basel")
    alps.allow(["fedavg"], ["basel"], largest=100)
    come(alps, "basel")
    try:
        ended = alps.call("serve", "kits/coordinator", "fedavg.toml", "--out", "terms", "--quiet")
    finally:
        alps.leave("basel")
        alps.allow(["alone", "fedavg"], ["basel"])
        come(alps, "basel")
    assert ended.returncode == 4
    assert "client basel failed in fit: refused there: an answer of" in ended.stderr
    log = list(egress.lines(alps.store("basel") / "egress.jsonl"))
    assert "larger than the contract allows" in log[-1].words


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk, mount = tmp_path / "disk", shutil.which("mount")
    disk.mkdir()
    if mount is None or os.geteuid() != 0:
        pytest.skip("needs to mount a file system, which this user may not")
    options = ["-t", "tmpfs", "-o", "size=20k", "tmpfs", str(disk)]
    if subprocess.run([mount, *options], check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a file system, which is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.long
def test_a_full_disk_at_a_site_is_said_and_the_run_goes_on_once_there_is_room(
    alps: Federation, small_disk: Path
) -> None:
    alps.leave("bern")
    file = alps.kit("bern") / "site.toml"
    before = file.read_text()
    file.write_text(before.replace('"../bern-store"', f'"{small_disk}"'))
    mirror = alps.kit("bern-egress.json")  # a new store has a new log
    aside = mirror.with_suffix(".aside")
    if mirror.exists():
        mirror.rename(aside)
    come(alps, "bern")
    first = alps.call("serve", "kits/coordinator", "alone.toml", "--out", "full", "--quiet")
    assert first.returncode == 4, first.stderr
    assert "client bern failed in" in first.stderr
    assert "the disk is full there" in first.stderr
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    again = alps.serve("alone.toml", "--out", "full", "--resume")
    ended_well(alps, "full", again)
    alps.leave("bern")
    file.write_text(before)
    mirror.unlink()
    if aside.exists():
        aside.rename(mirror)
    come(alps, "bern")


# Kits that must not work


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A coordinator that waits for its sites."""
    with federation(tmp_path_factory.mktemp("waiting")) as made:
        made.allow(["fedavg"])
        (made.folder / "run.toml").write_text(config("fedavg"))
        made.serve("run.toml", "--out", "never")
        port = _port(made)
        wait_for("the server", lambda: _open(port))
        yield made


def _port(made: Federation) -> int:
    text = (made.folder / "project.toml").read_text()
    return int(text.split("port = ")[1].split("\n")[0])


def _open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_kit_under_another_name_is_found_out(waiting: Federation) -> None:
    stolen = waiting.folder / "stolen"
    shutil.copytree(waiting.kit("basel"), stolen)
    about = (stolen / "kit.json").read_text()
    (stolen / "kit.json").write_text(about.replace("basel", "geneva"))
    ended = waiting.call("join", "stolen", "stolen/site.toml")
    assert ended.returncode == 2
    assert "the kit is named geneva, but its certificate is of 'basel'" in ended.stderr


def test_an_expired_certificate_is_found_out_here_and_refused_there(waiting: Federation) -> None:
    expired = waiting.folder / "expired"
    shutil.copytree(waiting.kit("basel"), expired)
    outdate(expired, waiting.folder / "kits/authority/alps/state/cert.json")
    ended = waiting.call("join", "expired", "expired/site.toml")
    assert ended.returncode == 2
    assert "the certificate of basel ended on" in ended.stderr
    assert "expired" in refusal(expired, _port(waiting))
    assert refusal(waiting.kit("basel"), _port(waiting)) == ""


def test_a_certificate_of_another_authority_is_found_out(
    waiting: Federation, tmp_path: Path
) -> None:
    other = Federation(tmp_path)
    text = (waiting.folder / "project.toml").read_text()
    (tmp_path / "project.toml").write_text(text)
    assert other.call("network", "init", "project.toml").returncode == 0
    other.allow(["fedavg"])
    ended = other.call("join", "kits/basel", "kits/basel/site.toml")
    assert ended.returncode == 2
    assert "the coordinator's certificate is not trusted here" in ended.stderr
    mixed = tmp_path / "mixed"  # with the authority of the first, to see what that one says
    shutil.copytree(other.kit("basel"), mixed)
    shutil.copy(waiting.kit("basel") / "startup" / "rootCA.pem", mixed / "startup" / "rootCA.pem")
    assert "unknown ca" in refusal(mixed, _port(waiting))
    ended = other.call("join", "mixed", "mixed/site.toml")
    assert "is not from this project's authority" in ended.stderr


def refusal(kit: Path, port: int) -> str:
    """What the server itself says to a kit, past our own checks."""
    startup = kit / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(str(startup / "client.crt"), str(startup / "client.key"))
    with socket.create_connection(("localhost", port), timeout=10) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secure:
                secure.settimeout(3)
                secure.recv(1)
        except ssl.SSLError as error:
            return str(error).lower().replace("_", " ")
        except (TimeoutError, ConnectionResetError):
            return ""
    return ""


def test_two_servers_on_one_host_need_two_ports_and_then_do_not_meet(
    waiting: Federation, tmp_path: Path
) -> None:
    other = Federation(tmp_path)
    project = 'name = "sea"\nsites = ["kiel"]\nport = '
    (tmp_path / "project.toml").write_text(f"{project}{_port(waiting)}\n")
    run = config("fedavg", clients=1, rounds=1)
    (tmp_path / "run.toml").write_text(run.replace("epochs = 1", "epochs = 3"))  # enough steps
    assert other.call("network", "init", "project.toml", "--run", "run.toml").returncode == 0
    ended = other.call("serve", "kits/coordinator", "run.toml")
    assert ended.returncode == 2
    assert f"port {_port(waiting)} is taken" in ended.stderr
    shutil.rmtree(tmp_path / "kits")
    (tmp_path / "project.toml").write_text(f"{project}{free_port()}\n")
    assert other.call("network", "init", "project.toml", "--run", "run.toml").returncode == 0
    other.join("kiel")
    try:
        ended = other.call("serve", "kits/coordinator", "run.toml", "--quiet", seconds=200)
        assert ended.returncode == 0, ended.stderr
        assert _open(_port(waiting))
    finally:
        other.close()


def test_a_log_that_breaks_while_a_site_waits_is_told_with_the_sites_name(alps: Federation) -> None:
    log = alps.store("basel") / "egress.jsonl"
    whole = log.read_bytes() if log.exists() else b""
    alps.rewrite_log("basel", b"{}\n" + whole)
    try:
        serving = alps.serve("alone.toml", "--out", "broken-log")
        _, said = serving.communicate(timeout=300)
    finally:
        alps.rewrite_log("basel", whole)
    assert serving.returncode == 4, said[-3000:]
    assert "basel failed in prepare" in said
    assert "the site has to fix something" in said
