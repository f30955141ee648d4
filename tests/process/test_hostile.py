"""Hostile parties with real kits: what they try is refused, logged, and hurts no run beside it.

One federation has a hostile site, the other a hostile coordinator. In both an honest run goes on
while everything is tried, and in the end its record is that of a run in one process.
"""

import base64
import io
import json
import socket
import ssl
import subprocess
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.local import local_engine
from atoll.engines.network import deny, egress
from atoll.engines.network.job import site_config
from atoll.runs.config import read, resolve
from atoll.runs.execute import execute

from .federation import Federation, contract, federation, wait_for
from .hostile import Inside, hostile_coordinator, hostile_site, refused, said

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

SECRET = "diagnosis-of-a-person-who-is-in-nobodys-contract"
QUESTION = 3_000_000  # bytes of a question, in these sites' contracts
ROUNDS = 60


def config(clients: int) -> str:
    return f"""\
rounds = {ROUNDS}
data = "wine"
scenario = {{ clients = {clients} }}
model = {{ widths = [8] }}
method = {{ name = "fedavg", epochs = 1 }}
engine = {{ mode = "loop", threads = 1 }}
checkpoint_seconds = 5
"""


@dataclass
class Scene:
    """A federation in which an honest run goes on, slowly, until it is let go."""

    made: Federation
    inside: Inside
    sites: tuple[str, ...]
    serving: subprocess.Popen[str]

    def allow(self) -> None:
        text = "engine = { threads = 1 }\n" + contract(["fedavg"], question=QUESTION)
        for site in self.sites:
            (self.made.kit(site) / "site.toml").write_text(f'store = "../{site}-store"\n{text}')

    @property
    def secret(self) -> Path:
        """A file that no site.toml names."""
        return self.made.folder / "registry.csv"

    @property
    def key(self) -> Path:
        return self.made.kit("bern") / "startup" / "client.key"

    def calm(self, how: str) -> None:
        (self.made.folder / "pace").write_text(how)

    def join(self, *sites: str) -> None:
        pace = f"@{self.made.folder / 'pace'}"
        self.made.join(*sites, ATOLL_REHEARSAL=pace, **self.inside.environment)

    def begun(self) -> bool:
        path = self.made.folder / "run" / "times.jsonl"
        return self.serving.poll() is not None or (path.exists() and path.stat().st_size > 0)

    def ended_as_in_one_process(self) -> None:
        assert self.serving.poll() is None, "the run has ended before all was tried"
        self.calm("")
        _, complaint = self.serving.communicate(timeout=240)
        assert self.serving.returncode == 0, complaint[-3000:]
        for file in ("config.toml", "events.jsonl", "result.json"):
            own = (self.made.folder / "run" / file).read_bytes()
            assert own == (self.made.folder / "local" / file).read_bytes(), file
        for site in self.sites:
            chain = list(
                egress.lines(self.made.kit(site).with_name(f"{site}-store") / "egress.jsonl")
            )
            assert sum(line.action == "fit" for line in chain) >= ROUNDS

    def whole(self) -> None:
        """Nothing of bern is gone."""
        kit = self.made.kit("bern")
        assert {"client.crt", "client.key", "rootCA.pem"} <= {
            path.name for path in (kit / "startup").iterdir()
        }
        assert (kit.with_name("bern-store") / "egress.jsonl").stat().st_size
        assert self.made.joined["bern"].poll() is None


def scene(folder: Path, sites: tuple[str, ...]) -> Iterator[Scene]:
    """Kits, contracts, a secret, and the run as it is in one process."""
    with federation(folder, sites) as made:
        inside = Inside(folder / "inside")
        one = Scene(made, inside, sites, serving=None)  # type: ignore[arg-type]
        one.allow()
        one.secret.write_text(f"{SECRET}\n")
        path = folder / "run.toml"
        path.write_text(config(len(sites)))
        execute(resolve(read(str(path)), str(path)), folder / "local", local_engine)
        one.calm("slow=1")
        try:
            yield one
        finally:
            for process in inside.processes:
                process.kill()
                process.wait()


# One hostile site of four


@pytest.fixture(scope="module")
def oslo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three honest sites and coordinator; oslo takes part honestly, and sends what it likes."""
    for one in scene(tmp_path_factory.mktemp("oslo"), ("basel", "bern", "geneva", "oslo")):
        one.join("basel", "bern", "geneva")
        hostile_site(one.made, one.inside, "oslo")
        one.serving = one.made.start(
            "serve", "kits/coordinator", "run.toml", "--out", "run", "--quiet",
            **one.inside.environment,
        )  # fmt: skip
        wait_for("the first round", one.begun, 240)
        assert one.serving.poll() is None, one.serving.communicate()
        yield one


def test_a_site_reads_no_file_of_another(oslo: Scene) -> None:
    for path in (oslo.secret, oslo.key):
        answer = oslo.inside.ask(
            "oslo", "admin", target="bern", topic="sys.shell", body=f"cat {path}"
        )
        assert "refused" in str(answer["error"]), answer
        assert path.read_text().splitlines()[-1] not in json.dumps(answer)
    refused(oslo.made, "coordinator", "admin:sys.shell from oslo: nothing is forwarded")


@pytest.mark.parametrize("job", ["startup", "../bern-store", "store"])
def test_a_site_deletes_nothing_at_another(oslo: Scene, job: str) -> None:
    answer = oslo.inside.ask(
        "oslo", "admin", target="bern", topic="train.delete_run", headers={"job_id": job}
    )
    assert "refused" in str(answer["error"]), answer
    refused(oslo.made, "coordinator", "admin:train.delete_run from oslo: nothing is forwarded")
    oslo.whole()


def test_a_site_stops_no_other(oslo: Scene) -> None:
    for topic in ("train.shutdown", "train.restart", "train.abort"):
        answer = oslo.inside.ask("oslo", "admin", target="bern", topic=topic)
        assert "refused" in str(answer["error"]), answer
    for target in ("bern", "server"):
        for topic in ("stop", "stop_cell", "change_root"):
            answer = oslo.inside.ask(
                "oslo", "request", target=target, channel="_net_manager", topic=topic
            )
            assert "refused" in str(answer["error"]), answer
    refused(oslo.made, "coordinator", "_net_manager:stop from oslo")
    oslo.whole()


def envelope(target: str, method: str) -> dict[str, Any]:
    """The headers with which NVFlare calls a published method of a site's end of the run."""
    return {
        "collab__protocol_version": 1,
        "collab__target_name": f"{target.partition('.')[0]}.client",
        "collab__method_name": method,
    }


def call(inside: Inside, process: str, target: str, method: str, **named: Any) -> dict[str, Any]:
    """Call a published method of a site's end of the run."""
    return inside.ask(
        process, "stream", target=target, channel="collab", topic="call",
        headers=envelope(target, method), payload={"kwargs": named},
    )  # fmt: skip


def test_a_site_is_given_no_answer_of_another(oslo: Scene) -> None:
    target = oslo.inside.name("bern.job")
    nothing = {"base64": ""}
    for number in range(1, 13):
        answer = call(
            oslo.inside, "oslo.job", target, "handle", number=number, action="fit",
            moment=[0, 0, 1], header=nothing, block=nothing,
        )  # fmt: skip
        assert "refused" in str(answer["error"]), answer
    refused(oslo.made, "coordinator", "sm__STREAM/collab:call from oslo.")


@pytest.mark.parametrize("topic", [deny.ACK, deny.ERROR])
def test_a_site_acknowledges_and_ends_no_stream_to_another(oslo: Scene, topic: str) -> None:
    """NVFlare finds a stream by its number alone, and numbers are consecutive."""
    target = oslo.inside.name("server.job")
    answer = oslo.inside.ask("oslo.job", "guess", target=target, topic=topic, seconds=8)
    assert answer.get("sent", 0) > 100, answer
    name = oslo.inside.name("oslo.job")
    refused(oslo.made, "coordinator", f"{deny.STREAM}:{topic} from {name}: the stream goes to")


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        ({"cn__origin": "bern"}, "'oslo' claims to be 'bern'"),
        ({"cn__origin": "server"}, "'oslo' claims to be 'server'"),
        ({"cn__origin": "bern", "__token__": "5ba7a1a3"}, "'oslo' claims to be 'bern'"),
        ({"client_name": "bern"}, "'oslo' has a token of 'bern'"),
        ({"client_name": "server", "__token__": "server"}, "'oslo' has a token of 'server'"),
        ({"__token__": "8c1f7b5e-9a8f-4d09-9d3e-5ba7a1a3c9f1"}, "its token is unknown"),
    ],
)
def test_the_server_binds_names_and_tokens_to_certificates(
    oslo: Scene, forge: dict[str, str], words: str
) -> None:
    oslo.inside.ask(
        "oslo", "request", target="server", channel="task", topic="report_job_failure",
        payload={}, forge=forge, seconds=1,
    )  # fmt: skip
    refused(oslo.made, "coordinator", words)


def test_a_token_that_the_server_itself_has_signed_opens_nothing(oslo: Scene) -> None:
    """Its messages carry one that is in no table of clients, and sites see it."""
    for origin, words in (("bern", "'oslo' claims to be 'bern'"), ("oslo", "a token of 'server")):
        answer = oslo.inside.ask(
            "oslo", "request", target="server", channel="task", topic="quit", payload={},
            replay="server", forge={"cn__origin": origin}, seconds=1,
        )  # fmt: skip
        assert "raised" not in answer, answer
        refused(oslo.made, "coordinator", f"task:quit from {origin}: ")
        refused(oslo.made, "coordinator", words)


def test_an_answer_that_no_run_has_is_refused_before_it_takes_memory(oslo: Scene) -> None:
    """The network of the run has a few thousand weights; a message of 200 MB is no answer."""
    target, size = oslo.inside.name("server.job"), 200_000_000
    before = resident(oslo.made, "coordinator")
    answer = oslo.inside.ask(
        "oslo.job", "stream", target=target, channel="server_command", topic="submit_update",
        size=size, seconds=20,
    )  # fmt: skip
    assert "larger than" in str(answer["error"]), answer
    name = oslo.inside.name("oslo.job")
    refused(oslo.made, "coordinator", f"from {name}: a message of {size} bytes is larger than")
    assert f"refused a message from oslo: a message of {size}" in notices(oslo.made)
    assert resident(oslo.made, "coordinator") - before < size / 10


def notices(made: Federation) -> str:
    """What the coordinator's processes have told `serve`."""
    return (made.kit("coordinator") / "notices.jsonl").read_text()


def test_a_connection_without_a_certificate_is_refused(oslo: Scene) -> None:
    text = (oslo.made.folder / "project.toml").read_text()
    port = int(text.split("port = ")[1].split("\n")[0])
    context = ssl.create_default_context(cafile=str(oslo.key.with_name("rootCA.pem")))

    def greet() -> None:
        with (
            socket.create_connection(("localhost", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.settimeout(5)
            secure.recv(1)

    with pytest.raises(OSError, match=r"(?i)certificate required|handshake|reset"):
        greet()


@pytest.mark.parametrize("process", deny.PROCESSES)
def test_every_handler_that_is_registered_is_classified(oslo: Scene, process: deny.Process) -> None:
    """A release of NVFlare that adds a handler fails here, not at a site."""
    names = {"client": "bern", "client_job": "bern.job", "server": "server"}
    answer = oslo.inside.ask(names.get(process, "server.job"), "handlers")
    assert "raised" not in answer, answer
    registered = [tuple(one) for one in answer["handlers"]]
    assert len(registered) > 25, registered
    unknown = [one for one in registered if not deny.classified(process, *one)]
    assert unknown == []


def test_the_run_beside_a_hostile_site_is_as_in_one_process(oslo: Scene) -> None:
    oslo.whole()
    oslo.ended_as_in_one_process()


# A hostile coordinator: NVFlare's unmodified server. Only the sites' own filters count.


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two honest sites whose coordinator does an honest run, and sends what it likes beside it."""
    for one in scene(tmp_path_factory.mktemp("hostile"), ("basel", "bern")):
        one.join("basel", "bern")
        one.serving = hostile_coordinator(
            one.made, one.inside, "run.toml", "--out", "run", "--quiet"
        )
        wait_for("the first round", one.begun, 240)
        assert one.serving.poll() is None, one.serving.communicate()
        yield one


COMMANDS = sorted(
    topic for channel, topic in deny.REFUSED_HANDLERS if channel == "admin"
)  # fmt: skip


@pytest.mark.parametrize("header", ["admin", "own"])
def test_a_coordinator_reads_no_file_of_a_site(hostile: Scene, header: str) -> None:
    """Neither with the header that NVFlare's server writes nor with that of the command."""
    topic = "admin" if header == "admin" else "sys.shell"
    for path in (hostile.secret, hostile.key):
        answer = hostile.inside.ask(
            "server", "admin", target="bern", topic="sys.shell", topic_header=topic,
            body=f"cat {path}",
        )  # fmt: skip
        assert "refused" in json.dumps(answer), answer
        assert path.read_text().splitlines()[-1] not in json.dumps(answer)
    refused(hostile.made, "bern", "sys.shell from server: no run needs it")


@pytest.mark.parametrize("topic", COMMANDS)
def test_a_coordinator_gives_no_command_that_a_run_does_not_need(
    hostile: Scene, topic: str
) -> None:
    headers = {"job_id": "startup"} if topic == "train.delete_run" else {}
    answer = hostile.inside.ask(
        "server", "admin", target="bern", topic=topic, topic_header="admin", headers=headers
    )
    assert "refused: no run needs it" in json.dumps(answer), answer
    refused(hostile.made, "bern", f"{topic} from server")
    hostile.whole()


@pytest.mark.parametrize("topic", ["stop", "stop_cell", "change_root", "config_vars"])
def test_a_coordinator_commands_no_cell(hostile: Scene, topic: str) -> None:
    for target in ("bern", hostile.inside.name("bern.job")):
        answer = hostile.inside.ask(
            "server", "request", target=target, channel="_net_manager", topic=topic
        )
        assert "refused" in str(answer["error"]), answer
    refused(hostile.made, "bern", f"_net_manager:{topic} from server")
    hostile.whole()


def zipped(*files: tuple[str, str]) -> str:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files:
            archive.writestr(name, text)
    return base64.b64encode(content.getvalue()).decode()


JOB = "0e6b87c5-fb83-4a5d-b303-9ed80a6e2e97"
OTHER = {**site_config(), "components": [{"id": "x", "path": "subprocess.Popen", "args": {}}]}


@pytest.mark.parametrize(
    ("job", "files", "words"),
    [
        (JOB, (deny.CONFIG, json.dumps(OTHER)), "a job that names other classes"),
        (JOB, ("custom/sitecustomize.py", "import os"), "a job with the files"),
        (JOB, ("../../startup/client.key", ""), "a job with the files"),
        (JOB, ("config/log_config.json", "{}"), "a job with the files"),
        ("startup", (deny.CONFIG, json.dumps(site_config())), "no job's"),
        ("../bern-store", (deny.CONFIG, json.dumps(site_config())), "no job's"),
    ],
)
def test_a_coordinator_deploys_nothing_but_our_job(
    hostile: Scene, job: str, files: tuple[str, str], words: str
) -> None:
    own = (deny.CONFIG, json.dumps(site_config()))
    content = (files,) if files[0] == deny.CONFIG else (own, files)
    answer = hostile.inside.ask(
        "server", "admin", target="bern", topic="train.deploy", topic_header="admin",
        zip=zipped(*content), headers={"job_id": job, "app_name": "x", "job_meta": {"name": "x"}},
    )  # fmt: skip
    assert f"refused: {'its job has a name that is ' if words == 'no job' else ''}" in json.dumps(
        answer
    ), answer
    refused(hostile.made, "bern", words)
    assert not (hostile.made.kit("bern") / JOB).exists()
    hostile.whole()


def test_only_the_jobs_own_server_calls_a_site(hostile: Scene) -> None:
    """NVFlare's parent process is not the job's; a name in a header does not make it that."""
    target = hostile.inside.name("bern.job")
    answer = call(hostile.inside, "server", target, "ping")
    assert "refused" in str(answer["error"]), answer
    refused(hostile.made, "bern", "sm__STREAM/collab:call from server: 'server' may not send it")


def test_a_coordinator_ends_no_job_in_the_name_of_its_parent(hostile: Scene) -> None:
    """The site's own process ends its jobs; its name in a header of the server's does not."""
    target = hostile.inside.name("bern.job")
    pid = hostile.made.job_process("bern")
    hostile.inside.ask(
        "server", "request", target=target, channel="client_command", topic="abort", payload="",
        forge={"cn__origin": "bern"}, seconds=2,
    )  # fmt: skip
    refused(hostile.made, "bern", "client_command:abort from bern: 'server' claims to be 'bern'")
    assert hostile.made.job_process("bern") == pid
    hostile.whole()


@pytest.mark.parametrize("folder", ["kits/bern", "nowhere"])
def test_a_coordinator_learns_of_no_folder_by_an_object_that_it_sends(
    hostile: Scene, folder: str
) -> None:
    """NVFlare makes some objects by looking at the disk, and sends the error back."""
    made = "nvflare.apis.utils.decomposers.flare_decomposers.WorkspaceDecomposer"
    workspace = {
        "__fobs_type__": "nvflare.apis.workspace.Workspace", "__fobs_dc__": made,
        "__fobs_data__": [str(hostile.made.folder / folder), "bern", "config"],
    }  # fmt: skip
    target = hostile.inside.name("bern.job")
    answer = call(hostile.inside, "server.job", target, "ping", object=workspace)
    assert str(answer["error"]).endswith("refused: an object that no run needs"), answer
    refused(hostile.made, "bern", "an object of type nvflare.apis.workspace.Workspace")


def test_a_call_that_is_none_gets_fixed_words(hostile: Scene) -> None:
    """NVFlare's reply has a traceback with paths of the site."""
    target = hostile.inside.name("bern.job")
    for method, named in (("ping", {"object": 1}), ("_told", {}), ("handle", {"number": 1})):
        answer = call(hostile.inside, "server.job", target, method, **named)
        assert answer["body"] == {"error": "not a call that is served here; the log has more"}


def resident(made: Federation, site: str) -> int:
    """The most bytes that a site's job process has ever had in memory."""
    status = Path(f"/proc/{made.job_process(site)}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def test_a_question_that_is_too_large_is_refused_before_it_takes_memory(hostile: Scene) -> None:
    """A hundred times what the contract allows; the site's process does not grow by a tenth."""
    target, size = hostile.inside.name("bern.job"), 100 * QUESTION
    before = resident(hostile.made, "bern")
    answer = hostile.inside.ask(
        "server.job", "stream", target=target, channel="collab", topic="call", size=size,
        seconds=20, headers=envelope(target, "handle"),
    )  # fmt: skip
    assert "larger than" in str(answer["error"]), answer
    refused(hostile.made, "bern", f"a message of {size} bytes is larger than")
    time.sleep(1)
    assert resident(hostile.made, "bern") - before < size / 10


def test_the_run_of_a_hostile_coordinator_is_as_in_one_process(hostile: Scene) -> None:
    hostile.whole()
    hostile.ended_as_in_one_process()
    assert SECRET not in said(hostile.made, "coordinator")
