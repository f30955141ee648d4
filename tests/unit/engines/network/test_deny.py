"""The default-deny table: what a run needs passes, everything else is refused."""

import io
import json
import zipfile
from typing import Any

import pytest

from atoll.engines.network import deny
from atoll.engines.network.deny import Process, Route, admin_refusal, app_refusal, refusal
from atoll.engines.network.job import site_config

JOB = "9ed80a6e-fb83-4a5d-b303-0e6b87c52e97"
OTHER = "11111111-fb83-4a5d-b303-0e6b87c52e97"
ADMIN = "_admin_4f9c"
PERSON = "coordinator@atoll.local"


def route(
    own: str, peer: str, what: str, origin: str = "", certificate: str = "", **further: Any
) -> Route:
    """A message as a line: kind channel topic, or kind stream/channel topic."""
    kind, channel, topic = what.split(" ")
    stream = ("", "")
    if channel.startswith("stream/"):
        stream, channel, topic = (channel[7:], topic), deny.STREAM, deny.DATA
    return Route(
        own, peer, certificate, kind, channel, topic, origin or peer,
        further.pop("destination", own), stream, **further,
    )  # fmt: skip


# Everything that was seen in an honest run of three sites, and what follows a lost site.
NEEDED: list[tuple[Process, Route]] = [
    ("client", route("basel", "server", "req admin admin", certificate="localhost")),
    ("client", route("basel", "server", "reply task heart_beat", certificate="localhost")),
    ("client", route("basel", "server", "req cellnet.channel bye", certificate="localhost")),
    ("client", route("basel", f"basel.{JOB}", "req admin train.notify_job_status")),
    ("client", route("basel", f"basel.{JOB}", "req cellnet.channel bye")),
    *(
        ("client_job", route(f"basel.{JOB}", "server", what, f"server.{JOB}", "localhost"))
        for what in (
            "req stream/collab call", "req stream/aux_communication __end_run__",
            "req stream/return_only server_command:get_task",
            "req stream/return_only server_command:submit_update",
            "req stream/return_only aux_communication:__sync_runner__",
            "req stream/return_only aux_communication:__task_check__",
            "req stream/return_only aux_communication:__job_heartbeat__",
            "req sm__STREAM sm__ACK", "req sm__STREAM sm__ERROR",
        )
    ),
    ("client_job", route(f"basel.{JOB}", "server", "req sm__STREAM sm__ERROR",
                         certificate="localhost")),
    ("client_job", route(f"basel.{JOB}", "basel", "req stream/collab call", f"server.{JOB}")),
    ("client_job", route(f"basel.{JOB}", "basel", "req client_command abort")),
    ("client_job", route(f"basel.{JOB}", "basel", "reply admin train.notify_job_status")),
    *(
        ("server", route("server", "basel", f"req task {topic}", certificate="basel"))
        for topic in ("challenge", "register", "heart_beat", "quit", "report_job_failure")
    ),
    ("server", route("server", "basel", "reply admin admin", certificate="basel", claimed="basel")),
    *(
        ("server", route("server", f"basel.{JOB}", what, certificate="basel", claimed="basel",
                         destination=f"server.{JOB}"))
        for what in (
            "req stream/aux_communication __job_heartbeat__",
            "req stream/aux_communication __sync_runner__",
            "req stream/aux_communication __task_check__", "req stream/return_only collab:call",
            "req stream/server_command get_task", "req stream/server_command submit_update",
            "req sm__STREAM sm__ACK", "req sm__STREAM sm__ERROR",
        )
    ),
    ("server", route("server", f"basel.{JOB}", "req cellnet.channel bye", certificate="basel")),
    ("server", route("server", "basel", "req stream/server_command get_task", f"basel.{JOB}",
                     "basel", destination=f"server.{JOB}")),
    *(
        ("server", route("server", f"server.{JOB}", what, destination=f"basel.{JOB}"))
        for what in ("req stream/collab call", "req stream/aux_communication __end_run__",
                     "req stream/return_only server_command:get_task", "req sm__STREAM sm__ACK")
    ),
    *(
        ("server", route("server", f"server.{JOB}", f"req server_parent_listener {topic}"))
        for topic in ("get_clients", "heartbeat", "update_run_status")
    ),
    *(
        ("server", route("server", f"server.{JOB}", what))
        for what in ("req stream/return_only server_command:abort", "req sm__STREAM sm__ACK")
    ),
    *(
        ("server", route("server", ADMIN, what, certificate=PERSON))
        for what in ("req task challenge", "req task register", "req stream/hci_channel command",
                     "req stream/aux_communication ObjectStreamer.Request",
                     "req sm__STREAM sm__ACK", "req cellnet.channel bye")
    ),
    *(
        ("server_job", route(f"server.{JOB}", "server", what, f"basel.{JOB}"))
        for what in ("req stream/aux_communication __sync_runner__",
                     "req stream/server_command get_task", "req stream/return_only collab:call",
                     "req sm__STREAM sm__ACK")
    ),
    ("server_job", route(f"server.{JOB}", "server", "req server_command handle_dead_job")),
    ("server_job", route(f"server.{JOB}", "server", "reply server_parent_listener get_clients")),
]  # fmt: skip


@pytest.mark.parametrize(("process", "needed"), NEEDED)
def test_what_a_run_needs_passes(process: Process, needed: Route) -> None:
    assert refusal(process, needed) == ""


ATTACKS: list[tuple[str, Process, Route, str]] = [
    ("shell from the server", "client",
     route("bern", "server", "req admin sys.shell", certificate="localhost"), "no run needs it"),
    ("shell from a site", "client",
     route("bern", "server", "req admin admin", "oslo", "localhost"), "'oslo' may not send it"),
    ("a server without TLS", "client", route("bern", "server", "req admin admin"),
     "it came from a server without a certificate"),
    ("a neighbour on the machine", "client", route("bern", "oslo", "req admin admin"),
     "it came through 'oslo'"),
    ("a child of another job", "client_job",
     route(f"bern.{JOB}", "server", "req stream/collab call", f"server.{OTHER}", "localhost"),
     "may not send it"),
    ("a call from another site", "client_job",
     route(f"bern.{JOB}", "server", "req stream/collab call", f"oslo.{JOB}", "localhost"),
     "may not send it"),
    ("a download", "client_job",
     route(f"bern.{JOB}", "server", "req stream/download_service__ download_service__download",
           f"server.{JOB}", "localhost"), "no run needs it"),
    ("an event", "client_job",
     route(f"bern.{JOB}", "server", "req stream/aux_communication fed.event", f"server.{JOB}",
           "localhost"), "no run needs it"),
    ("a task", "client_job",
     route(f"bern.{JOB}", "server", "req stream/aux_communication __do_task__", f"server.{JOB}",
           "localhost"), "no run needs it"),
    ("bulk", "client", route("bern", "server", "req cellnet.channel bulk", certificate="localhost"),
     "no run needs it"),
    ("another root", "client",
     route("bern", "server", "req _net_manager change_root", certificate="localhost"),
     "no run needs it"),
    ("site to site", "server",
     route("server", "oslo", "req admin sys.shell", certificate="oslo", destination="bern"),
     "nothing is forwarded from 'oslo' to 'bern'"),
    ("a reply to a site", "server",
     route("server", "oslo", "reply admin x", certificate="oslo", destination="bern"),
     "nothing is forwarded from 'oslo' to 'bern'"),
    ("job to job", "server",
     route("server", f"oslo.{JOB}", "req stream/collab call", certificate="oslo",
           destination=f"bern.{JOB}"), "nothing is forwarded"),
    ("to another job's server", "server",
     route("server", f"oslo.{JOB}", "req stream/server_command get_task", certificate="oslo",
           destination=f"server.{OTHER}"), "nothing is forwarded"),
    ("a command to the server's job", "server",
     route("server", f"oslo.{JOB}", "req server_command abort", certificate="oslo",
           destination=f"server.{JOB}"), "nothing is forwarded"),
    ("a forged origin", "server",
     route("server", "oslo", "req task heart_beat", "bern", "oslo"), "'oslo' claims to be 'bern'"),
    ("a second line that speaks for the site", "server",
     route("server", f"oslo.{JOB}", "req task register", "oslo", "oslo"),
     f"'oslo.{JOB}' claims to be 'oslo'"),
    ("a second line that speaks for another job", "server",
     route("server", f"oslo.{JOB}", "req sm__STREAM sm__ACK", f"oslo.{OTHER}", "oslo",
           destination=f"server.{OTHER}"), "claims to be"),
    ("a second line that registers", "server",
     route("server", f"oslo.{JOB}", "req task register", certificate="oslo"), "may not send it"),
    ("a token of another", "server",
     route("server", "oslo", "req task heart_beat", certificate="oslo", claimed="bern"),
     "'oslo' has a token of 'bern'"),
    ("the server's own token", "server",
     route("server", "oslo", "req task heart_beat", certificate="oslo", claimed="server"),
     "'oslo' has a token of 'server'"),
    ("a site as admin", "server",
     route("server", ADMIN, "req stream/hci_channel command", certificate="oslo"),
     "'oslo' gives no commands"),
    ("an admin that speaks to a site", "server",
     route("server", ADMIN, "req admin sys.shell", certificate=PERSON, destination="bern"),
     "nothing is forwarded"),
    ("a local program as a site", "server", route("server", "bern", "req task heart_beat"),
     "'bern' has no certificate"),
    ("a local program as the admin", "server", route("server", ADMIN, "req stream/hci_channel x"),
     "has no certificate"),
    ("a site that calls the server's objects", "server_job",
     route(f"server.{JOB}", "server", "req stream/collab call", f"oslo.{JOB}"), "no run needs it"),
    ("the server as a job's parent", "client_job",
     route(f"bern.{JOB}", "server", "req client_command abort", "bern", "localhost"),
     "'server' claims to be 'bern'"),
    ("a server whose cell is named like a job's parent", "client_job",
     route(f"bern.{JOB}", "bern", "req client_command abort", certificate="localhost"),
     "'bern' came over TLS"),
    ("the server as a site's own job", "client",
     route("bern", "server", "req admin train.notify_job_status", f"bern.{JOB}", "localhost"),
     f"'server' claims to be 'bern.{JOB}'"),
    ("a server whose cell is named like a site's job", "client",
     route("bern", f"bern.{JOB}", "req admin train.notify_job_status", certificate="localhost"),
     f"'bern.{JOB}' came over TLS"),
    ("an unknown kind", "client", route("bern", "server", "push admin admin",
                                        certificate="localhost"), "no run needs it"),
    ("a name with a path", "client",
     route("bern", "bern.../startup", "req admin train.notify_job_status"), "it came through"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("process", "attack", "words"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS]
)
def test_an_attack_is_refused(process: Process, attack: Route, words: str) -> None:
    assert words in refusal(process, attack)


def test_commands_that_a_site_takes() -> None:
    for topic in deny.SERVER_TOPICS:
        assert admin_refusal(topic, "server", "bern", JOB) == ""
        assert admin_refusal(topic, "oslo", "bern", JOB) == "'oslo' gives no commands here"
    assert admin_refusal("train.notify_job_status", f"bern.{JOB}", "bern", JOB) == ""
    for topic in ("sys.shell", "train.delete_run", "train.shutdown", "sys.configure_site_log", ""):
        assert admin_refusal(topic, "server", "bern", None) == "no run needs it"


@pytest.mark.parametrize("job", ["store", "startup", "../other", "", f"{JOB}/..", 7])
def test_a_command_for_a_folder_that_is_no_jobs_is_refused(job: object) -> None:
    words = "its job has a name that is no job's"
    assert admin_refusal("train.deploy", "server", "bern", job) == words


def zipped(*files: tuple[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files:
            archive.writestr(name, text)
    return content.getvalue()


OWN = (deny.CONFIG, json.dumps(site_config()))
CHANGED = json.dumps(
    {**site_config(), "components": [{"id": "x", "path": "os.system", "args": {}}]}
)


def test_a_job_of_ours_is_taken() -> None:
    assert app_refusal(zipped(OWN), site_config()) == ""
    assert app_refusal(zipped(OWN, (".__nvfl_sig.json", "{}")), site_config()) == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (zipped((deny.CONFIG, CHANGED)), "a job that names other classes or options"),
        (zipped(OWN, ("../../../startup/client.key", "")), "a job with the files ../../../startup"),
        (zipped(OWN, ("custom/sitecustomize.py", "")), "a job with the files config/"),
        (zipped(OWN, ("config/log_config.json", "{}")), "a job with the files config/"),
        (zipped(("config/other.json", "{}")), "a job with the files config/other.json"),
        (zipped((deny.CONFIG, "[" + " " * deny.MOST_APP_BYTES + "]")), "a file that is too large"),
        (b"PK", "a job that cannot be read"),
        (None, "a job that is not made of bytes"),
    ],
)
def test_a_foreign_job_is_refused(content: object, words: str) -> None:
    assert words in app_refusal(content, site_config())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_job_that_has_a_file_twice_is_refused() -> None:
    assert "a job with the files" in app_refusal(zipped((deny.CONFIG, "{}"), OWN), site_config())


def test_a_handler_that_is_new_is_not_classified() -> None:
    assert not deny.classified("client", "_net_manager", "a new command")
    assert not deny.classified("client", "new_channel", "*")
    assert deny.classified("client", "_net_manager", "stop")
    assert deny.classified("client_job", "collab", "call")
    assert not deny.classified("client_job", "aux_communication", "a new topic")
    assert deny.classified("client_job", "aux_communication", "fed.event")
    assert not deny.classified("client", "hci_channel", "command")
