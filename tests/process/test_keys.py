"""Keys and names with real processes: by request, under a passphrase, once each, and no longer.

One federation stands and waits for a third site while everything is tried: basel has made its own
key, bern is copied, zug is revoked. Then the run begins, and ends as in one process.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.engines.local import local_engine
from atoll.engines.network.kits import Kit
from atoll.engines.network.site import reachable
from atoll.runs.config import read, resolve
from atoll.runs.execute import execute

from .federation import COMMAND, Federation, contract, free_port, wait_for
from .hostile import refused, said

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SECRET = "correct horse battery staple"
RUN = """\
rounds = 2
data = "wine"
scenario = { clients = 2 }
model = { widths = [8] }
method = { name = "fedavg", epochs = 1 }
engine = { mode = "loop", threads = 1 }
"""


@dataclass
class Scene:
    """A federation whose commands write what they say into files."""

    made: Federation
    port: int

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        with (self.made.folder / f"{name}.said").open("w") as file:
            process = subprocess.Popen(
                [str(COMMAND), *arguments], cwd=self.made.folder, stderr=file, text=True,
                stdout=subprocess.DEVNULL, env=self.made._environment(**environment),
            )  # fmt: skip
        self.made.started.append(process)
        return process

    def join(self, name: str, kit: str, **environment: str) -> subprocess.Popen[str]:
        return self.start(name, "join", kit, f"{kit}/site.toml", **environment)

    def shown(self, name: str) -> str:
        return (self.made.folder / f"{name}.said").read_text()

    def project(self, *sites: str) -> None:
        text = f'name = "alps"\nport = {self.port}\nsites = {json.dumps(sites)}\n'
        (self.made.folder / "project.toml").write_text(text)

    def wait_for(self, name: str, words: str, seconds: float = 90) -> None:
        try:
            wait_for(f"{name} says '{words}'", lambda: words in self.shown(name), seconds)
        except AssertionError as error:
            log = said(self.made, "coordinator")[-3000:]
            raise AssertionError(f"{error}\n{self.shown(name)}\n{log}") from error

    def copied(self, site: str, name: str) -> str:
        """A copy of a site's kit and store, as on another machine."""
        for suffix in ("", "-store"):
            source = self.made.kit(f"{site}{suffix}")
            if source.exists():
                ignored = shutil.ignore_patterns("*.log", "pid", "lock", "notices.jsonl")
                shutil.copytree(source, self.made.kit(f"{name}{suffix}"), ignore=ignored)
        mirror = self.made.kit(f"{site}-egress.json")
        if mirror.exists():
            shutil.copy(mirror, self.made.kit(f"{name}-egress.json"))
        kit = self.made.kit(name)
        text = (kit / "site.toml").read_text().replace(f"{site}-store", f"{name}-store")
        (kit / "site.toml").write_text(text)
        return f"kits/{name}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Federation(tmp_path_factory.mktemp("keys"), {"ATOLL_PASSPHRASE": ""})
    one = Scene(made, free_port())
    one.project("basel", "bern", "zug")
    (made.folder / "run.toml").write_text(RUN)
    asked = one.start("request", "network", "request", "basel", "--out", "kits/basel",
                      ATOLL_PASSPHRASE=SECRET)  # fmt: skip
    assert asked.wait(60) == 0, one.shown("request")
    assert made.call("network", "init", "project.toml").returncode == 0
    signed = made.call("network", "sign", "project.toml", "kits/basel/basel.csr", "--replace")
    assert signed.returncode == 0, signed.stderr
    install = ("network", "install", "kits/basel", "kits/basel.signed.json")
    assert one.start("install", *install, ATOLL_PASSPHRASE=SECRET).wait(60) == 0
    for site in ("basel", "bern", "zug"):
        text = f'store = "../{site}-store"\nengine = {{ threads = 1 }}\n{contract(["fedavg"])}'
        (made.kit(site) / "site.toml").write_text(text)
    try:
        one.start("serve", "serve", "kits/coordinator", "run.toml", "--out", "run")
        one.join("basel", "kits/basel", ATOLL_PASSPHRASE=SECRET)
        one.join("bern", "kits/bern")
        path = made.folder / "run.toml"
        execute(resolve(read(str(path)), str(path)), made.folder / "local", local_engine)
        yield one
    finally:
        made.close()


def test_both_ends_show_the_same_keys(scene: Scene) -> None:
    """That of a site which made its own key, under a passphrase, and that of an ordinary one."""
    for site in ("basel", "bern"):
        key = Kit(scene.made.kit(site)).fingerprint
        scene.wait_for("serve", f"{site} has the key {key}")
        assert f"{site}: the key {key}" in scene.shown(site)
    assert b"ENCRYPTED" in (scene.made.kit("basel") / "startup" / "client.key").read_bytes()
    own = Kit(scene.made.kit("coordinator"))
    assert f"the key {own.fingerprint}; the authority {own.authority}" in scene.shown("serve")


def test_a_second_connection_under_one_name_is_refused_and_both_are_told(scene: Scene) -> None:
    copy = scene.join("copy", scene.copied("bern", "copy"))
    why = "the coordinator refuses this site: a site of this name is connected already"
    scene.wait_for("copy", why)
    scene.wait_for("serve", "refused a second connection of bern from 127.0.0.1")
    scene.wait_for("bern", "the coordinator refused a second connection under this site's name")
    refused(scene.made, "coordinator", "task:challenge from bern: a site of this name")
    before = scene.made.main_process("bern")
    copy.terminate()
    copy.wait(30)
    assert scene.made.main_process("bern") == before, "the first one was thrown out"
    assert "refuses this site" not in scene.shown("bern")


JOB = "9ed80a6e-fb83-4a5d-b303-0e6b87c52e97"


def impostor(scene: Scene, *names: str) -> subprocess.CompletedProcess[str]:
    """Connect with bern's kit under a name, and try to register."""
    kit, port = str(scene.made.kit("bern")), str(scene.port)
    command = [sys.executable, "-m", "tests.process.impostor", kit, port, *names]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


@pytest.mark.parametrize("name", ["basel", f"basel.{JOB}", f"server.{JOB}", "_admin_x"])
def test_the_certificate_of_a_site_is_taken_under_no_other_name(scene: Scene, name: str) -> None:
    """Neither for another site or its job, nor for the coordinator's own processes."""
    scene.wait_for("serve", "basel has the key")
    before = scene.made.main_process("basel")
    ended = impostor(scene, "bern", name, name)
    assert ended.stdout.startswith("FLCommunicationError"), ended.stdout + ended.stderr[-3000:]
    words = f"authenticated as 'bern' but claimed endpoint '{name}'"
    assert words in said(scene.made, "coordinator")
    assert scene.made.main_process("basel") == before
    assert "refuses this site" not in scene.shown("basel")


@pytest.mark.parametrize("origin", ["bern", f"bern.{JOB}"])
def test_a_stolen_kit_registers_for_no_site_on_a_line_named_like_a_job(
    scene: Scene, origin: str
) -> None:
    """Only the site's own connection registers; the site that is there stays."""
    before = scene.made.main_process("bern")
    ended = impostor(scene, f"bern.{JOB}", origin)
    assert "registered" not in ended.stdout, ended.stdout
    assert "refused" in ended.stdout, ended.stdout + ended.stderr[-3000:]
    refused(scene.made, "coordinator", f"task:challenge from {origin}: '")
    assert scene.made.main_process("bern") == before
    assert "refuses this site" not in scene.shown("bern")


def test_a_site_that_died_comes_back_at_once(scene: Scene) -> None:
    before = scene.made.main_process("bern")
    os.kill(before, 9)
    log = scene.made.kit("bern") / "notices.jsonl"
    count = log.read_text().count('"taken"')
    wait_for("bern is taken again", lambda: log.read_text().count('"taken"') > count, 60)
    assert scene.made.main_process("bern") != before
    assert "refuses this site" not in scene.shown("bern")


def test_the_coordinators_certificate_is_taken_for_no_site(scene: Scene) -> None:
    startup = scene.made.kit("coordinator") / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(str(startup / "server.crt"), str(startup / "server.key"))

    def greet() -> None:
        with (
            socket.create_connection(("localhost", scene.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.settimeout(5)
            secure.recv(1)

    with pytest.raises(OSError, match=r"(?i)certificate|reset"):
        greet()
    line = refused(scene.made, "coordinator", "a TLS connection with 127.0.0.1")
    assert "purpose" in line


def test_a_connection_that_says_nothing_holds_up_nobody(scene: Scene) -> None:
    with socket.create_connection(("localhost", scene.port)):
        assert reachable(Kit(scene.made.kit("bern"))) == ""


def listen(server: socket.socket, startup: Path, got: list[bytes]) -> None:
    """Speak TLS with a site's certificate, as a coordinator does; keep what is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(startup / "client.crt"), str(startup / "client.key"))

    def answer() -> None:
        while True:
            try:
                plain, _ = server.accept()
                with context.wrap_socket(plain, server_side=True) as secure:
                    got.append(secure.recv(1))
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()


def test_another_site_is_taken_for_no_coordinator(scene: Scene) -> None:
    """A server with bern's certificate, at which zug's own process calls."""
    kit, got = scene.made.kit("zug-astray"), list[bytes]()
    shutil.copytree(scene.made.kit("zug"), kit)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name in ("kit.json", "startup/fed_client.json"):
            text = (kit / name).read_text().replace(str(scene.port), str(port))
            (kit / name).write_text(text)
        listen(server, scene.made.kit("bern") / "startup", got)
        assert "certificate is not trusted here" in reachable(Kit(kit))
        command = [sys.executable, "-m", "atoll.engines.network.guard", "client", "-m", str(kit),
                   "-s", "fed_client.json", "--set", "secure_train=true", "uid=zug", "org=atoll",
                   "config_folder=config"]  # fmt: skip
        with (kit / "nvflare.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            refused(scene.made, "zug-astray", "a TLS connection with 127.0.0.1", 60)
        finally:
            process.kill()
            process.wait()
        server.shutdown(socket.SHUT_RDWR)
    assert got in ([], [b""]), "something was said to it"


def test_a_revoked_site_is_refused_at_its_first_message(scene: Scene) -> None:
    """The server runs on; the run begins without the site."""
    scene.project("basel", "bern")
    assert scene.made.call("network", "init", "project.toml").returncode == 0
    zug = scene.join("zug", "kits/zug")
    scene.wait_for("zug", "the coordinator refuses this site: 'zug' is not in the list of sites")
    refused(scene.made, "coordinator", "task:challenge from zug: 'zug' is not in the list")
    scene.wait_for("serve", "refused zug: 'zug' is not in the list of sites")
    zug.terminate()


def test_the_run_beside_all_that_is_as_in_one_process(scene: Scene) -> None:
    ended = scene.made.folder / "run" / "result.json"
    wait_for("the run has ended", ended.exists, 300)
    for file in ("config.toml", "events.jsonl"):
        own = (scene.made.folder / "run" / file).read_bytes()
        assert own == (scene.made.folder / "local" / file).read_bytes(), file


def test_a_wrong_or_missing_passphrase_is_said_in_three_lines(scene: Scene) -> None:
    for number, (given, words) in enumerate(
        (("", "the private key is under a passphrase"), ("wrong", "the passphrase does not open"))
    ):
        kit = scene.copied("basel", f"locked-{number}")
        ended = scene.join(f"locked-{number}", kit, ATOLL_PASSPHRASE=given)
        assert ended.wait(60) == 2
        lines = scene.shown(f"locked-{number}").splitlines()
        assert words in lines[0]
        assert lines[1].endswith("client.key")
        assert lines[2].endswith("give --passphrase, or set ATOLL_PASSPHRASE")
