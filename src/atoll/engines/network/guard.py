"""Runs NVFlare's four processes, each with the default-deny table of `deny` in front of it.

`python -m atoll.engines.network.guard PROCESS ...` starts one of them with NVFlare's own
arguments. The filter is installed before the first cell exists, and thus before the first
connection. NVFlare starts jobs as fresh processes; the launcher starts this module for them too.
"""

import importlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.app_common.job_launcher.process_launcher import ProcessJobLauncher
from nvflare.collab.runtime import dispatch
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.credential_manager import CredentialManager
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Header
from nvflare.fuel.f3.cellnet.defs import MessageType, ReturnCode, ReturnReason
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers import net_utils, socket_conn, tcp_driver
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.fuel.f3.sfm.conn_manager import ConnManager, NullConnection
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import StreamDataType, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError
from nvflare.fuel.utils.fobs import fobs
from nvflare.private.admin_defs import error_reply
from nvflare.private.defs import CellMessageHeaderKeys, RequestHeader, TrainingTopic
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.utils import identity_utils

from atoll.engines.network import standing, wire
from atoll.engines.network.certificates import read_key
from atoll.engines.network.deny import (
    ACK,
    DATA,
    ERROR,
    JOB,
    PROCESSES,
    REPLIES,
    STREAM,
    TYPES,
    Process,
    Route,
    admin_refusal,
    app_refusal,
    refusal,
)
from atoll.engines.network.job import site_config
from atoll.engines.network.limits import FRAME_BYTES, message_bytes
from atoll.engines.network.listed import Listed
from atoll.engines.network.notices import Notices, readable
from atoll.engines.network.presence import Presence, answer_beside, certificate_name
from atoll.engines.network.process import ENDS, STANDING, running
from atoll.engines.network.tls import checked, passphrase

__all__ = ["main"]

MODULE = "atoll.engines.network.guard"
MODULES = {
    "client": "nvflare.private.fed.app.client.client_train",
    "client_job": "nvflare.private.fed.app.client.worker_process",
    "server": "nvflare.private.fed.app.server.server_train",
    "server_job": "nvflare.private.fed.app.server.runner_process",
}
# A site that the server does not know, or no longer knows, can send these with any signed token.
WITHOUT_TOKEN = {("task", "challenge"), ("task", "register"), ("task", "heart_beat"),
                 ("cellnet.channel", "bye")}  # fmt: skip
SECOND_HEADER = (
    "atoll_second"  # reply header: the address of a second connection under the site's name
)
HEART_BEAT = ("task", "heart_beat")
ENTRANCE = {("task", "challenge"), ("task", "register"), HEART_BEAT}  # all else needs a token
AGAIN_SECONDS = 1.0  # seconds after which the same refusal is logged again
MOST_LINES = 1000  # maximum number of different refusals remembered for this
KEPT_JOBS = 20  # number of job folders that remain in a site's kit
MOST_JOBS = 4  # processes of jobs at once; those of lost jobs take some seconds to end
log = logging.getLogger("atoll.guard")


def _text(message: Message, key: str) -> str:
    value = message.get_header(key)
    return value if isinstance(value, str) else "" if value is None else repr(value)[:80]


@dataclass
class Guard:
    """The filter of one process."""

    process: Process
    folder: Path  # the party's kit
    limit: int = 0  # maximum bytes of one message; 0: the limit of the process
    server: Any = None  # NVFlare's server, if this is its process
    presence: Presence = field(init=False)
    notices: Notices = field(init=False)
    _large: set[str] = field(default_factory=set)  # senders that have sent too much
    _outside: str = ""  # why the server refuses this site, if it does
    _lines: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.notices = Notices(self.folder)
        self.presence = Presence(Listed(self.folder / "sites.json"), self.notices)

    def install(self) -> None:
        """Install the filter in front of every message handler."""
        net_utils.get_ssl_context = checked(net_utils.ssl_required, self._say)
        tcp_driver.get_ssl_context = net_utils.get_ssl_context
        self._wrap(tcp_driver.TcpStreamServer, "handle_error", _no_traceback)
        identity_utils.load_private_key_file = _read_key_file
        self._wrap(CredentialManager, "get_local_key", lambda original, own: _open(own.local_key))
        if self.process == "server":
            self._wrap(ConnManager, "update_endpoint", self.presence.greeted)
            self._wrap(FederatedServer, "client_heartbeat", self._heart_beat)
        self._wrap(CoreCell, "process_message", self._process_message)
        self._wrap(FedAdminAgent, "_dispatch_request", self._dispatch)
        self._wrap(FederatedServer, "__init__", self._remember_server)
        self._wrap(ProcessJobLauncher, "launch_job", self._launch)
        self._wrap(RxTask, "process_chunk", self._process_chunk)
        self._wrap(socket_conn.SocketConnection, "read_frame", self._read_frame)
        self._wrap(fobs.Packer, "unpack", self._unpack)
        dispatch._error_reply = partial(_fixed_words, dispatch._error_reply)
        socket_conn.MAX_FRAME_SIZE = FRAME_BYTES

    @staticmethod
    def _wrap(owner: type, name: str, work: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *arguments: Any, **kwargs: Any) -> Any:
            return work(original, self, *arguments, **kwargs)

        wrapped.__name__ = wrapped.__qualname__ = name
        setattr(owner, name, wrapped)

    def _process_message(
        self, original: Any, cell: Any, endpoint: Any, connection: Any, app_id: int, message: Any
    ) -> None:
        """Accept a message of a connection, or refuse it before decoding anything."""
        try:
            route = _route(cell, endpoint, connection, message)
            reason = refusal(self.process, route) or self._absent(route, connection, message)
            reason = reason or self._stranger(route, message) or _foreign_stream(route, message)
            large = "" if reason else self._oversize(route, message)
        except Exception as error:  # the sender controls the headers, including their types
            log.warning("refused a message: %s", type(error).__name__)
            return
        message.remove_header(Header.CONN_URL)  # a request to connect elsewhere
        message.remove_header(StreamHeaderKey.ERROR_TYPE)  # one kind of it ends the server's job
        if large:
            self._name(route.origin, large)
        reason = reason or large
        if not reason:
            self._hear(route, message)
            original(cell, endpoint, connection, app_id, message)
            return
        self._say(f"refused {route.words} from {route.origin[:80]}: {reason}")
        if route.kind == MessageType.REQ and (self.process != "server" or route.honest):
            _answer(cell, endpoint, connection, route, message, reason)

    def _absent(self, route: Route, connection: Any, message: Message) -> str:
        """Why the server refuses a site: it is not listed, or another connection has its name."""
        if self.process != "server" or route.local:
            return ""
        reason = self.presence.refusal(route, connection, self._known(route, message))
        if not reason and route.certificate and "@" not in route.certificate:
            self.presence.seen(route, connection)
        return reason

    def _hear(self, route: Route, message: Message) -> None:
        """Log what the server's replies reveal about this site."""
        if self.process != "client" or route.kind not in REPLIES or route.origin != "server":
            return
        error, other = _text(message, Header.ERROR), _text(message, SECOND_HEADER)
        if other:
            line = f"the coordinator refused a second connection under this site's name: {other}"
            self._say(line)
            self.notices.write("second", line)
        if route.key in ENTRANCE and error.startswith("refused: "):
            self._outside = readable(error.removeprefix("refused: "))
            self._say(f"the coordinator refuses this site: {self._outside}")
            self.notices.write("refused", self._outside)
        elif route.key == HEART_BEAT and not error and self._outside != "taken":
            self._outside = "taken"
            self.notices.write("taken", "the coordinator takes this site")

    def _heart_beat(self, original: Any, server: Any, request: Message) -> Message:
        """NVFlare's reply to a heartbeat, with the address of a refused second connection."""
        reply = cast("Message", original(server, request))
        other = self.presence.second(_text(request, CellMessageHeaderKeys.CLIENT_NAME))
        if other and reply is not None:
            reply.set_header(SECOND_HEADER, other)
        return reply

    def _known(self, route: Route, message: Message) -> bool:
        """Whether a message has the token of the site whose certificate it came with."""
        token = message.get_header(CellMessageHeaderKeys.TOKEN)
        client = self.server.client_manager.clients.get(token) if self.server else None
        return client is not None and client.name == route.certificate

    def _stranger(self, route: Route, message: Message) -> str:
        """Why the server rejects a site's token: no registered site has it."""
        if self.process != "server" or not route.certificate or "@" in route.certificate:
            return ""
        if self.server is None or route.key in WITHOUT_TOKEN:
            return ""
        return "" if self._known(route, message) else "its token is unknown"

    def _oversize(self, route: Route, message: Message) -> str:
        if route.topic != DATA:
            return ""
        size, most = message.get_header(StreamHeaderKey.SIZE, 0), self._most
        if isinstance(size, int) and size <= most:
            return ""
        return f"a message of {size!r:.20} bytes is larger than {most:,}"

    @property
    def _most(self) -> int:
        return self.limit or message_bytes(self.process)

    def _process_chunk(self, original: Any, task: Any, message: Message) -> Any:
        """Count the bytes in all unfinished streams of a sender, whatever size they announce."""
        task.atoll_bytes = getattr(task, "atoll_bytes", 0) + len(message.payload or b"")
        sender, most = task.origin.partition(".")[0], self._most
        with RxTask.map_lock:
            active = [t for t in RxTask.rx_task_map.values() if not (t.completed or t.failed)]
        own = [one for one in active if one.origin.partition(".")[0] == sender]
        pending = sum(getattr(one, "atoll_bytes", 0) for one in own)
        if task.atoll_bytes <= most and pending <= 2 * most:
            return original(task, message)
        if not task.failed:
            reason = f"more than {most:,} bytes"
            self._name(task.origin, reason)
            self._say(f"refused {task.channel}:{task.topic} from {task.origin[:80]}: {reason}")
            task.stop(StreamError(f"refused: {reason}"))
            task.chunks.clear()
            task.out_seq_chunks.clear()
        return False

    def _name(self, origin: str, reason: str) -> None:
        """Report to `serve` who sends the coordinator's job too much, once per sender."""
        sender = origin.partition(".")[0]
        if self.process == "server_job" and sender not in self._large:
            self._large.add(sender)
            self.notices.write("large", f"refused a message from {sender}: {reason}")

    def _read_frame(self, original: Any, connection: Any) -> Any:
        try:
            return original(connection)
        except CommError as error:
            if error.code == CommError.BAD_DATA:
                self._say(f"refused a frame from {connection.name}: {error}")
            raise

    def _unpack(self, original: Any, packer: Any, value: Any) -> Any:
        """Decode an object of a type that a run needs; NVFlare itself decodes many more types."""
        kind = value.get(fobs.FOBS_TYPE, "tuple") if type(value) is dict else "tuple"
        if not isinstance(kind, str) or kind not in TYPES:
            self._say(f"refused an object of type {str(kind)[:80]}: no run needs it")
            raise ValueError("refused: an object that no run needs")
        return original(packer, value)

    def _dispatch(self, original: Any, agent: Any, request: Message) -> Message:
        """Execute a command that a run needs; refuse all others, and foreign jobs."""
        command, own = request.payload, agent.cell.get_fqcn()
        sender, topic = _text(request, Header.ORIGIN), str(getattr(command, "topic", ""))
        job = command.get_header(RequestHeader.JOB_ID) if hasattr(command, "get_header") else ""
        reason = admin_refusal(topic, sender, own, job)
        if not reason and topic == TrainingTopic.DEPLOY:
            reason = app_refusal(command.body, site_config())
            _forget_jobs(self.folder)
        if not reason:
            return cast("Message", original(agent, request))
        self._say(f"refused {topic[:80]} from {sender[:80]}: {reason}")
        return new_cell_message({}, error_reply(f"refused: {reason}"))

    def _remember_server(self, original: Any, server: Any, *arguments: Any, **kwargs: Any) -> None:
        original(server, *arguments, **kwargs)
        self.server = server

    def _launch(self, original: Any, launcher: Any, job_meta: Any, fl_ctx: Any) -> Any:
        """Start a job's process with a filter of its own; a site has few of them at once."""
        arguments = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
        child = "client_job" if self.process == "client" else "server_job"
        arguments[JobProcessArgs.EXE_MODULE] = ("-m", f"{MODULE} {child}")
        with self._starting:  # a started process has its command line in /proc
            few = len(running(str(self.folder), "client_job")) < MOST_JOBS
            if few or self.process != "client":
                return original(launcher, job_meta, fl_ctx)
        self._say(f"refused a job: {MOST_JOBS} are running here")
        raise RuntimeError("too many jobs at once")

    def _say(self, line: str) -> None:
        """Log one line; repeats the same line only after a while."""
        now = time.monotonic()
        with self._lock:
            if now - self._lines.get(line, -AGAIN_SECONDS) < AGAIN_SECONDS:
                return
            if len(self._lines) >= MOST_LINES:
                self._lines.clear()
            self._lines[line] = now
        log.warning("%s", line.encode("unicode_escape").decode())


def _route(cell: Any, endpoint: Any, connection: Any, message: Message) -> Route:
    return Route(
        own=cell.my_info.fqcn,
        peer=endpoint.name,
        certificate=certificate_name(connection),
        kind=_text(message, Header.MSG_TYPE),
        channel=_text(message, Header.CHANNEL),
        topic=_text(message, Header.TOPIC),
        origin=_text(message, Header.ORIGIN),
        destination=_text(message, Header.DESTINATION),
        stream=(_text(message, StreamHeaderKey.CHANNEL), _text(message, StreamHeaderKey.TOPIC)),
        claimed=_text(message, CellMessageHeaderKeys.CLIENT_NAME),
        local=isinstance(connection, NullConnection),
    )


def _fixed_words(original: Any, error: str, logger: Any, **details: Any) -> Message:
    """The reply to a call that fails before our code has it: NVFlare's has a traceback of here."""
    logger.error(error)
    return cast("Message", original("not a call that is served here; the log has more", logger))


def _forget_jobs(kit: Path) -> None:
    """Remove the folders of old jobs, which NVFlare never deletes."""
    folders = [path for path in kit.iterdir() if path.is_dir() and JOB.fullmatch(path.name)]
    folders.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in folders[:-KEPT_JOBS]:
        shutil.rmtree(path, ignore_errors=True)


def _no_traceback(original: Any, server: Any, request: Any, address: Any) -> None:
    """Suppress the traceback of a failed connection, which is already logged."""
    log.debug("a connection ended with an error", exc_info=True)


def _open(content: bytes) -> Any:
    return read_key(content, "the private key", passphrase())


def _read_key_file(path: str) -> Any:
    """A private key for NVFlare's signatures; NVFlare does not support passphrases."""
    return _open(Path(path).read_bytes())


def _foreign_stream(route: Route, message: Message) -> str:
    """Why an acknowledgement or error of an outgoing stream is refused: it has another receiver.

    NVFlare finds a stream by its number only, and numbers can be guessed. Only the receiver of a
    stream may acknowledge or end it; the server itself may report that a receiver is unreachable.
    """
    if route.channel != STREAM or route.topic not in (ACK, ERROR) or route.destination != route.own:
        return ""
    if route.topic == ERROR and route.origin == "server":
        return ""
    number = message.get_header(StreamHeaderKey.STREAM_ID)
    with ByteStreamer.map_lock:
        task = ByteStreamer.tx_task_map.get(number) if isinstance(number, int) else None
    if task is None or task.target == route.origin:
        return ""
    return "the stream goes to another receiver"


def _answer(
    cell: Any, endpoint: Any, connection: Any, route: Route, message: Message, reason: str
) -> None:
    """Reply to the sender of a refused request, if it waits for an answer."""
    words = f"refused: {reason}"
    if (route.channel, route.topic) == (STREAM, DATA) and not hasattr(connection, "atoll_beside"):
        headers = {
            StreamHeaderKey.STREAM_ID: message.get_header(StreamHeaderKey.STREAM_ID),
            StreamHeaderKey.DATA_TYPE: StreamDataType.ERROR,
            StreamHeaderKey.ERROR_MSG: words,
            StreamHeaderKey.ERROR_TYPE: StreamError.__name__,
            StreamHeaderKey.CHANNEL: route.stream[0],
            StreamHeaderKey.TOPIC: route.stream[1],
            StreamHeaderKey.FAILED_DESTINATION: route.destination,
            StreamHeaderKey.STREAM_REQ_ID: message.get_header(StreamHeaderKey.STREAM_REQ_ID),
        }
        cell.fire_and_forget(STREAM, ERROR, route.origin, Message(headers), optional=True)
    elif message.get_header(Header.REPLY_EXPECTED):
        reply = make_reply(ReturnCode.AUTHENTICATION_ERROR, error=words)
        reply.add_headers({
            Header.CHANNEL: route.channel, Header.TOPIC: route.topic,
            Header.ORIGINAL_HEADERS: message.headers, Header.FROM_CELL: cell.my_info.fqcn,
            Header.TO_CELL: endpoint.name, Header.ORIGIN: cell.my_info.fqcn,
            Header.DESTINATION: route.origin, Header.MSG_TYPE: MessageType.RETURN,
            Header.REQ_ID: [message.get_header(Header.REQ_ID, "")],
            Header.ROUTE: [(cell.my_info.fqcn, time.time())],
            Header.RETURN_REASON: ReturnReason.INTERCEPT,
        })  # fmt: skip
        if not answer_beside(connection, reply):
            cell._send_reply(reply, endpoint)


def main() -> None:
    """Start the process that the first argument names, behind its filter."""
    process = cast("Process", sys.argv.pop(1))
    if process not in PROCESSES:
        raise SystemExit(f"no process '{process}'")
    app = importlib.import_module(MODULES[process])
    if not process.endswith("job"):
        app.version_check()
    arguments = app.parse_arguments()
    folder = arguments.workspace
    Guard(process, Path(folder)).install()
    wire.install()
    if process == "client":
        standing.watch_server(Path(folder) / STANDING)
    if process == "server":
        standing.watch_jobs(Path(folder) / "work" / ENDS)
    if process.endswith("job"):
        folder = os.path.join(folder, arguments.job_id)  # noqa: PTH118 - as NVFlare has it
    sys.exit(MainProcessMonitor.run(main_func=app.main, run_dir=folder, args=arguments))


if __name__ == "__main__":
    main()
