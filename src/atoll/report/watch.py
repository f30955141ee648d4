"""Serves a live report of running runs on this machine; reads only the record.

A run does not know about it and never waits for it. The page is the report itself, rendered again
a record grows, is cut by a resume, or appears; a server-sent event informs the browser.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from atoll.core.errors import UserError
from atoll.core.record import FAILURE
from atoll.core.storage import LOCK, FolderLock
from atoll.report import page, tables
from atoll.report.progress import STATES, Progress, progress
from atoll.runs.result import runs_in

__all__ = ["HOST", "Watch", "serve"]

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # other sites' pages may not read this one through the browser
FILES = (
    "config.toml", "facts.json", "events.jsonl", "times.jsonl", "looks.jsonl", "result.json",
    "answer.json", FAILURE,
)  # fmt: skip
MAIN = '<main id="main" tabindex="-1">'  # start of the content of a page
BEAT = 15.0  # seconds of silence after which a line shows that the connection is alive


@dataclass
class Watch:
    """The watched folders, their last page, and clients waiting for the next one."""

    folders: Sequence[Path]
    pause: float = 0.5  # minimum seconds between checks of the folders
    version: str = ""  # version of the page; differs after a restart
    html: str = ""
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    _stamp: tuple[Any, ...] | None = None

    def look(self) -> bool:
        """Render the page again if a record has changed; returns whether it was rendered."""
        homes = [home for folder in self.folders for home in runs_in(folder)]
        stamp = tuple(_stamps(homes))
        if stamp == self._stamp:
            return False
        try:
            html = page.page(tables.gather(homes)) if homes else self._waiting()
            kind = "report" if homes else "waiting"
            self._stamp = stamp
        except UserError as error:  # a damaged file: unchanged until it is written again
            words = f"The record cannot be read: {error.what} ({error.where}); {error.remedy}."
            html, kind, self._stamp = self._waiting(words), "waiting", stamp
        except Exception:  # a resume may be truncating the record: the next check will see
            if self.html:
                return False
            html, kind = self._waiting("The record cannot be read just now."), "waiting"
        with self.changed:
            self.version = f"{time.time_ns():x}"
            runs = [progress(home) for home in homes]
            self.html = _live(html, self.version, kind, runs)
            self.changed.notify_all()
        return True

    def _waiting(self, words: str = "") -> str:
        names = ", ".join(str(folder) for folder in self.folders)
        words = words or f"{names} holds no run yet. This page fills itself when a run begins."
        style = Markup(page.style_sheet())
        return _template("waiting.html").render(words=words, style=style)

    def keep_looking(self) -> None:
        """Check repeatedly; a page that takes long to render is rendered less often."""
        while not self.ended:
            began = time.monotonic()
            self.look()
            time.sleep(max(self.pause, 2 * (time.monotonic() - began)))

    def news(self, beat: float = BEAT) -> Iterator[str]:
        """Server-sent events: the version of the page now, and of every later one."""
        last = ""
        while not self.ended:
            with self.changed:
                if self.version == last:
                    self.changed.wait(beat)
                now = self.version
            yield f"data: {now}\n\n" if now != last else ": still here\n\n"
            last = now


def _stamps(homes: Sequence[Path]) -> Iterator[tuple[str, str, int, int]]:
    """The sizes and times of the records' files, and whether one is being written."""
    for home in homes:
        for name in FILES:
            with contextlib.suppress(OSError):
                status = (home / name).stat()
                yield str(home), name, status.st_size, status.st_mtime_ns
        yield str(home), LOCK, int(FolderLock.has_writer(home)), 0


def _template(name: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(page.resource(name))


def _live(html: str, version: str, kind: str, runs: Sequence[Progress]) -> str:
    """The report with the progress of the runs on top, and a script that updates it."""
    body = html.replace("<body>", f'<body data-version="{version}" data-kind="{kind}">', 1)
    if runs:
        panel = _template("progress.html").render(runs=runs)
        body = body.replace(MAIN, MAIN + panel, 1)
    end = body.rindex("</body>")
    return f"{body[:end]}{_template('live.html').render(summary=_summary(runs))}{body[end:]}"


def _summary(runs: Sequence[Progress]) -> str:
    """The number of runs in each state."""
    states = [run.state for run in runs]
    counts = [f"{states.count(state)} {state}" for state in STATES if state in states]
    return ", ".join(counts) or "waiting for a run"


class _Handler(BaseHTTPRequestHandler):
    """Serves two addresses to this machine."""

    watch: Watch
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The page, or news of it."""
        name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if name not in NAMES:
            self._send(HTTPStatus.FORBIDDEN, "this page is for this machine alone", "text/plain")
        elif self.path == "/":
            self._send(HTTPStatus.OK, self.watch.html, "text/html")
        elif self.path == "/events":
            self._tell()
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is nothing here", "text/plain")

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def _tell(self) -> None:
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            for line in self.watch.news():
                self.wfile.write(line.encode())
                self.wfile.flush()
        except OSError:
            return  # the client has disconnected

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request."""


def serve(watch: Watch, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `ready` receives its address."""
    handler = type("Handler", (_Handler,), {"watch": watch})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"cannot listen at port {port}: {reason.lower()}"
        raise UserError(what, "atoll watch", "give another with --port, or 0 for any") from error
    server.daemon_threads = True
    watch.look()
    threading.Thread(target=watch.keep_looking, daemon=True).start()
    ready(f"http://{HOST}:{server.server_port}/")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        return
    finally:
        watch.ended = True
        server.server_close()
