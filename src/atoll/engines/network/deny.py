"""The default-deny table: which messages each of NVFlare's four processes accepts.

This module knows names and headers, but not NVFlare's classes, so it can be tested separately.
`guard` applies it and drops a message unless a row of the table allows it for the process, the
sender and the route. Names of senders in headers are claims: only the connection proves them.
"""

import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "ACK",
    "DATA",
    "ERROR",
    "JOB",
    "PROCESSES",
    "REFUSED_HANDLERS",
    "REPLIES",
    "SERVER_TOPICS",
    "STREAM",
    "TYPES",
    "Process",
    "Route",
    "admin_refusal",
    "app_refusal",
    "classified",
    "refusal",
]

Process = Literal["client", "client_job", "server", "server_job"]
PROCESSES: tuple[Process, ...] = ("client", "client_job", "server", "server_job")
SERVER = "server"  # cell of the coordinator's server
ADMIN = "_admin_"  # prefix of the names of NVFlare's command sessions
STREAM = "sm__STREAM"
DATA, ACK, ERROR = "sm__DATA", "sm__ACK", "sm__ERROR"
JOB = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
BYE = ("cellnet.channel", "bye")
REPLIES = ("reply", "return")
# The files of a job at a site: one configuration, and the signatures that NVFlare adds.
CONFIG = "config/config_fed_client.json"
APP_FILES = {CONFIG} | {
    f"{folder}.__nvfl_{name}"
    for folder in ("", "config/")
    for name in ("sig.json", "submitter.crt")
}
MOST_APP_BYTES = 1 << 16  # of one of them

# Requests of a site's main process to the server, also for the job processes it has started.
SERVER_TOPICS = frozenset({
    "scheduler.check_resource", "scheduler.cancel_resource", "train.deploy", "train.start_job",
    "train.abort",
})  # fmt: skip
CHILD_TOPICS = frozenset({"train.notify_job_status"})

Senders = frozenset[str]
# Requests that a process accepts: (channel, topic) and the allowed senders, named as in `_sender`.
# A topic of a stream is STREAM/channel/topic, as in its frames.
_LIFE = frozenset({"__job_heartbeat__", "__sync_runner__", "__task_check__"})
HANDLERS: Mapping[Process, Mapping[tuple[str, str], Senders]] = {
    "client": {
        ("admin", "admin"): frozenset({"server"}),
        ("admin", "train.notify_job_status"): frozenset({"child"}),
        BYE: frozenset({"server", "child"}),
    },
    "client_job": {
        ("client_command", "abort"): frozenset({"parent"}),
        ("aux_communication", "__end_run__"): frozenset({"server job"}),
        (STREAM, ACK): frozenset({"server job"}),
        (STREAM, ERROR): frozenset({"server job", "server"}),
        (f"{STREAM}/aux_communication", "__end_run__"): frozenset({"server job"}),
        (f"{STREAM}/collab", "call"): frozenset({"server job"}),
        (f"{STREAM}/return_only", "server_command:get_task"): frozenset({"server job"}),
        (f"{STREAM}/return_only", "server_command:submit_update"): frozenset({"server job"}),
        **{
            (f"{STREAM}/return_only", f"aux_communication:{topic}"): frozenset({"server job"})
            for topic in _LIFE
        },
        BYE: frozenset({"server", "parent"}),
    },
    "server": {
        ("task", "challenge"): frozenset({"site", "admin"}),
        ("task", "register"): frozenset({"site", "admin"}),
        ("task", "heart_beat"): frozenset({"site"}),
        ("task", "quit"): frozenset({"site"}),
        ("task", "report_job_failure"): frozenset({"site"}),
        ("server_parent_listener", "get_clients"): frozenset({"child"}),
        ("server_parent_listener", "heartbeat"): frozenset({"child"}),
        ("server_parent_listener", "update_run_status"): frozenset({"child"}),
        (STREAM, ACK): frozenset({"admin", "child"}),
        (STREAM, ERROR): frozenset({"admin", "child"}),
        (f"{STREAM}/return_only", "server_command:abort"): frozenset({"child"}),
        (f"{STREAM}/return_only", "server_command:handle_dead_job"): frozenset({"child"}),
        (f"{STREAM}/hci_channel", "command"): frozenset({"admin"}),
        (f"{STREAM}/aux_communication", "ObjectStreamer.Request"): frozenset({"admin"}),
        (f"{STREAM}/aux_communication", "ObjectStreamer.Abort"): frozenset({"admin"}),
        BYE: frozenset({"site", "site job", "admin", "child"}),
    },
    "server_job": {
        ("server_command", "abort"): frozenset({"server"}),
        ("server_command", "handle_dead_job"): frozenset({"server"}),
        (f"{STREAM}/server_command", "abort"): frozenset({"server"}),
        (f"{STREAM}/server_command", "handle_dead_job"): frozenset({"server"}),
        (STREAM, ACK): frozenset({"site job", "server"}),
        (STREAM, ERROR): frozenset({"site job", "server"}),
        (f"{STREAM}/server_command", "get_task"): frozenset({"site job"}),
        (f"{STREAM}/server_command", "submit_update"): frozenset({"site job"}),
        (f"{STREAM}/return_only", "collab:call"): frozenset({"site job"}),
        **{(f"{STREAM}/aux_communication", topic): frozenset({"site job"}) for topic in _LIFE},
        BYE: frozenset({"server"}),
    },
}

# The cells that a process connects to; the coordinator's server checks certificates.
NEIGHBOURS: Mapping[Process, Senders] = {
    "client": frozenset({"server", "child"}),
    "client_job": frozenset({"server", "parent"}),
    "server_job": frozenset({"server"}),
}

_NET_AGENT = (
    "bulk_item", "bulk_test", "cells", "change_root", "comm_config", "config_vars", "conns",
    "echo", "heartbeat", "list_pools", "msg_stats", "peers", "process_info", "route",
    "show_pool", "speed", "start_route", "stop", "stop_cell", "stress", "url_use",
)  # fmt: skip
# Handlers that NVFlare registers and that no message reaches in a process without a row for them
# above. They are listed so that new handlers of an NVFlare release are noticed: no table has them.
REFUSED_HANDLERS: frozenset[tuple[str, str]] = frozenset({
    *(("_net_manager", topic) for topic in _NET_AGENT),
    ("cellnet.channel", "bulk"),
    ("aux_communication", "*"),
    *(("aux_communication", topic) for topic in (
        "ObjectStreamer.Abort", "ObjectStreamer.Request", "RM.RELIABLE_REPLY",
        "RM.RELIABLE_REQUEST", "__do_task__", "__end_run__", "fed.event", *_LIFE,
    )),
    ("return_only", "*"),
    ("collab", "call"),
    (STREAM, DATA),
    (STREAM, ACK),
    (STREAM, ERROR),
    ("credential_manager", "key_exchange"),
    ("download_service__", "download_service__download"),
    ("download_service__", "download_service__source_failure"),
    *(("admin", topic) for topic in (
        "info.reset_errors", "info.show_errors", "info.show_stats", "sys.configure_site_log",
        "resource_manager.report_resources", "sys.info", "sys.report_env", "sys.report_version",
        "sys.shell", "train.abort_task", "train.check_status", "train.configure_job_log",
        "train.delete_run", "train.get_scopes", "train.restart", "train.shutdown",
    )),
    *(("client_command", topic) for topic in (
        "abort_task", "check_status", "configure_job_log", "reset_errors", "show_errors",
        "show_stats", "shutdown",
    )),
    *(("server_command", topic) for topic in (
        "app_command", "configure_job_log", "get_errors", "get_run_info", "get_task", "heartbeat",
        "reset_errors", "server_state", "show_stats", "shutdown", "submit_update",
    )),
})  # fmt: skip


# Types of objects allowed in a message besides plain values: those of honest runs, and plain
# containers. NVFlare can create others from the content: one accesses a folder of its choice.
TYPES = frozenset({
    "tuple", "set", "collections.OrderedDict", "datetime.datetime",
    "nvflare.apis.client.Client", "nvflare.apis.fl_context.FLContext",
    "nvflare.apis.job_def.JobMetaKey", "nvflare.apis.shareable.Shareable",
    "nvflare.private.admin_defs.Message",
})  # fmt: skip


def classified(process: Process, channel: str, topic: str) -> bool:
    """Whether a registered handler is in one of the two tables; `*` matches all its topics."""
    rows = {(key[0].removeprefix(f"{STREAM}/"), key[1]) for key in HANDLERS[process]}
    handlers = rows | REFUSED_HANDLERS
    if process == "client":
        handlers |= {("admin", name) for name in SERVER_TOPICS | CHILD_TOPICS}
    if topic == "*":
        return channel in {key[0] for key in rows} or (channel, topic) in REFUSED_HANDLERS
    return (channel, topic) in handlers


@dataclass(frozen=True)
class Route:
    """The source and destination of a message, from its headers and its connection."""

    own: str  # name of the process's own cell
    peer: str  # cell at the other end of the connection
    certificate: str  # common name that TLS has verified; empty within one machine
    kind: str  # req, reply, return
    channel: str
    topic: str
    origin: str  # origin in the header
    destination: str  # destination in the header
    stream: tuple[str, str] = ("", "")  # channel and topic of the stream of a frame
    claimed: str = ""  # client name in the header that belongs to the token
    local: bool = False  # whether the process sends the message to itself

    @property
    def key(self) -> tuple[str, str]:
        """The row of the table that a request needs."""
        if (self.channel, self.topic) == (STREAM, DATA):
            return f"{STREAM}/{self.stream[0]}", self.stream[1]
        return self.channel, self.topic

    @property
    def honest(self) -> bool:
        """Whether the peer is the origin, so that the answer goes to nobody else."""
        return _root(self.origin) == _root(self.peer)

    @property
    def words(self) -> str:
        """Describe the message for a log line."""
        channel, topic = self.key
        return f"{channel}:{topic}"[:160]


def refusal(process: Process, route: Route) -> str:
    """Why a message is refused; empty if the table allows it."""
    if route.local:
        return ""
    arrived = _arriving if route.destination == route.own else _forwarding
    reason = _unproven(process, route) or arrived(process, route)
    if reason or process.startswith(SERVER):
        return reason
    return _forged(_sender(route.own, route.peer), route)


def _arriving(process: Process, route: Route) -> str:
    """Why a message addressed to this process is refused."""
    sender = _sender(route.own, route.origin)
    if route.kind in REPLIES:
        return "" if sender else f"a reply from '{route.origin[:80]}'"
    allowed = HANDLERS[process].get(route.key)
    if route.kind != "req" or allowed is None:
        return "no run needs it"
    return "" if sender in allowed else f"'{route.origin[:80]}' may not send it"


def _unproven(process: Process, route: Route) -> str:
    """Why the connection does not prove the headers."""
    if process == SERVER:
        return _unproven_at_server(route)
    peer = _sender(route.own, route.peer)
    if peer not in NEIGHBOURS[process]:
        return f"it came through '{route.peer[:80]}'"
    if peer == "server" and process != "server_job" and not route.certificate:
        return "it came from a server without a certificate"
    if peer != "server" and route.certificate:  # no TLS within one machine
        return f"'{route.peer[:80]}' came over TLS"
    return _forged("child", route) if peer == "child" else ""


def _forged(peer: str, route: Route) -> str:
    """Why the peer of a site's connection cannot speak for the claimed origin."""
    forged = {
        "server": _root(route.origin) != SERVER,
        "child": route.origin != route.peer,
        "parent": _root(route.origin) not in (SERVER, route.peer),  # it forwards the server's
    }
    return f"'{route.peer[:80]}' claims to be '{route.origin[:80]}'" if forged[peer] else ""


def _unproven_at_server(route: Route) -> str:
    """The same at the coordinator's server: a site has the name in its certificate."""
    name, proven = route.peer, route.certificate
    if not proven:
        own_child = _sender(route.own, name) == "child" and route.origin == name
        return "" if own_child else f"'{name[:80]}' has no certificate"
    if name.startswith(ADMIN):
        trusted = "@" in proven and route.origin == name
        return "" if trusted else f"'{proven[:80]}' gives no commands"
    if _root(route.origin) != proven or _root(name) != proven:
        return f"'{proven[:80]}' claims to be '{route.origin[:80]}'"
    if name not in (route.origin, proven):  # only a site's own process speaks for its jobs
        return f"'{name[:80]}' claims to be '{route.origin[:80]}'"
    if route.claimed and route.claimed != proven:
        return f"'{proven[:80]}' has a token of '{route.claimed[:80]}'"
    return ""


def _forwarding(process: Process, route: Route) -> str:
    """Why a message to another cell is not forwarded: only jobs may talk to their own server's."""
    reason = f"nothing is forwarded from '{route.origin[:80]}' to '{route.destination[:80]}'"
    roots = {_root(route.origin), _root(route.destination)}
    jobs = {_job(route.origin), _job(route.destination)}
    if process.endswith("job") or SERVER not in roots or len(roots) != 2:
        return reason
    if _root(route.own) not in roots or len(jobs) != 1 or "" in jobs:
        return reason
    to_server = _root(route.destination) == SERVER
    end: Process = "server_job" if to_server else "client_job"
    sender = "site job" if to_server else "server job"
    allowed = route.kind in REPLIES or sender in HANDLERS[end].get(route.key, frozenset())
    return "" if allowed else reason


def _root(name: str) -> str:
    return name.partition(".")[0]


def _job(name: str) -> str:
    job = name.partition(".")[2]
    return job if JOB.fullmatch(job) else ""


def _sender(own: str, name: str) -> str:
    """The role of the cell `name` for the cell `own`; empty if it is unknown."""
    job = _job(name)
    if name == own or ("." in name and not job):
        return ""
    if _job(own):  # a job's process knows its parent, its server and the other processes of its job
        if job:
            kind = "server job" if _root(name) == SERVER else "site job"
            return kind if job == _job(own) else ""
        return {_root(own): "parent", SERVER: "server"}.get(name, "")
    if job and _root(name) == own:
        return "child"
    at_server = {True: "admin", False: "site job" if job else "site"}[name.startswith(ADMIN)]
    at_site = {SERVER: "server job" if job else "server"}.get(_root(name), "")
    return at_server if own == SERVER else at_site


def admin_refusal(topic: str, sender: str, own: str, job: object) -> str:
    """Why a command to a site's main process is refused; empty if it is allowed."""
    allowed = {"server": SERVER_TOPICS, "child": CHILD_TOPICS}.get(_sender(own, sender))
    if allowed is None:
        return f"'{sender[:80]}' gives no commands here"
    if topic not in allowed:
        return "no run needs it"
    if job is not None and not JOB.fullmatch(str(job)):
        return "its job has a name that is no job's"
    return ""


def app_refusal(content: object, config: Mapping[str, Any]) -> str:
    """Why the files of a job are refused: only one configuration and its signatures are allowed."""
    if not isinstance(content, bytes | bytearray | memoryview):
        return "a job that is not made of bytes"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as files:
            listed = [one for one in files.infolist() if not one.is_dir()]
            names = sorted(one.filename for one in listed)
            if CONFIG not in names or len(set(names)) < len(names) or set(names) - APP_FILES:
                return f"a job with the files {', '.join(names)[:160]}"
            if max(one.file_size for one in listed) > MOST_APP_BYTES:
                return "a job with a file that is too large"
            body = json.loads(files.read(CONFIG))
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError) as error:
        return f"a job that cannot be read: {type(error).__name__}"
    return "" if body == config else "a job that names other classes or options"
