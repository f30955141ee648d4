"""The state of NVFlare's processes, for the screens of `serve` and `join`.

TLS alone says nothing of a site that is revoked: its connection opens, and the server refuses what
comes over it. So a site's process writes down what the server answered last. The server's process
writes down whose end of a job was over first.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey, ReturnCode
from nvflare.private.defs import JobFailureMsgKey
from nvflare.private.fed.server.fed_server import FederatedServer

from atoll.core.errors import printable

__all__ = ["watch_jobs", "watch_server"]

# Codes of NVFlare's own: the server did not answer. It has refused nothing.
SILENT = (ReturnCode.TIMEOUT, ReturnCode.TARGET_UNREACHABLE, ReturnCode.COMM_ERROR, "no answer")
ASKED = (CellChannelTopic.Challenge, CellChannelTopic.Register, CellChannelTopic.HEART_BEAT)


def _write(path: Path, body: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    with suppress(OSError):
        part.write_text(json.dumps(body))
        part.replace(path)


def watch_server(path: Path) -> None:
    """Write down, at a site, what the server answers: whether the site is admitted, and when."""
    original: Callable[..., Any] = CoreCell.send_request

    def send_request(cell: Any, channel: str, topic: str, *args: Any, **kwargs: Any) -> Any:
        reply = original(cell, channel, topic, *args, **kwargs)
        if channel == CellChannel.SERVER_MAIN and topic in ASKED:
            code = reply.get_header(MessageHeaderKey.RETURN_CODE) if reply else "no answer"
            words = (reply.get_header(MessageHeaderKey.ERROR) if reply else "") or code
            silent = code in SILENT
            refused = "" if silent or code == ReturnCode.OK else printable(str(words))[:200]
            if refused or silent or topic != CellChannelTopic.Challenge:
                _write(path, {"time": time.time(), "refused": refused, "silent": silent})
        return reply

    CoreCell.send_request = send_request


def watch_jobs(path: Path) -> None:
    """Write down, at the server, which site's end of a job was over, and with which code."""
    original: Callable[..., Any] = FederatedServer.process_job_failure
    lock, ends = threading.Lock(), dict[str, list[Any]]()

    def process_job_failure(server: Any, request: Any) -> Any:
        failure = request.payload if isinstance(request.payload, dict) else {}
        site = printable(str(request.get_header(MessageHeaderKey.ORIGIN)))[:80]
        job, code = (failure.get(key) for key in (JobFailureMsgKey.JOB_ID, JobFailureMsgKey.CODE))
        with lock:
            ends.setdefault(str(job), []).append([site, code])
            _write(path, ends)
        return original(server, request)

    FederatedServer.process_job_failure = process_job_failure
