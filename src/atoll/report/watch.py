"""A live report of running runs, served to this machine alone; it reads the record, nothing else.

A run knows nothing of it and never waits for it. The page is the report itself, rendered again when
a record grows, is cut by a resume, or appears; a server-sent event informs the browser.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from atoll.core.errors import UserError
from atoll.core.record import Round
from atoll.core.storage import LOCK, FolderLock
from atoll.report import page, tables
from atoll.runs.result import Run, runs_in

__all__ = ["HOST", "Watch", "serve"]

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # a page of another name may not read this one through the browser
FILES = ("config.toml", "facts.json", "events.jsonl", "times.jsonl", "looks.jsonl", "result.json")
BEAT = 15.0  # seconds after which a silent line is shown to be alive


@dataclass
class Watch:
    """Some folders, the page made of them last, and those who wait for the next one."""

    folders: Sequence[Path]
    pause: float = 0.5  # seconds between looks at the folders, at least
    version: str = ""  # of the page; another one after the watch was started again
    html: str = ""
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    _stamp: tuple[Any, ...] | None = None

    def look(self) -> bool:
        """Make the page anew if a record has changed; whether it was."""
        homes = [home for folder in self.folders for home in runs_in(folder)]
        stamp = tuple(_stamps(homes))
        if stamp == self._stamp:
            return False
        try:
            html = page.page(tables.gather(homes)) if homes else self._waiting()
            kind = "report" if homes else "waiting"
            self._stamp = stamp
        except UserError as error:  # a damaged file: it stays so until it changes
            words = f"The record cannot be read: {error.what} ({error.where}); {error.remedy}."
            html, kind, self._stamp = self._waiting(words), "waiting", stamp
        except Exception:  # a resume may be cutting the record just now: the next look will see
            if self.html:
                return False
            html, kind = self._waiting("The record cannot be read just now."), "waiting"
        with self.changed:
            self.version = f"{time.time_ns():x}"
            states = [_state(home) for home in homes]
            self.html = _live(html, self.version, kind, states)
            self.changed.notify_all()
        return True

    def _waiting(self, words: str = "") -> str:
        names = ", ".join(str(folder) for folder in self.folders)
        words = words or f"{names} holds no run yet. This page fills itself when a run begins."
        return _template("waiting.html").render(words=words)

    def keep_looking(self) -> None:
        """Look again and again; a page that takes long to make is made less often."""
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
    """What changes with the records: sizes and times of their files, and whether one is written."""
    for home in homes:
        for name in FILES:
            with contextlib.suppress(OSError):
                status = (home / name).stat()
                yield str(home), name, status.st_size, status.st_mtime_ns
        yield str(home), LOCK, int(FolderLock.has_writer(home)), 0


def _template(name: str) -> Template:
    source = (files("atoll") / "report" / name).read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(source)


def _live(html: str, version: str, kind: str, states: Sequence[str]) -> str:
    """The report with a line that says how the runs stand, and what keeps it fresh."""
    body = html.replace("<body>", f'<body data-version="{version}" data-kind="{kind}">', 1)
    end = body.rindex("</body>")
    return f"{body[:end]}{_template('live.html').render(states=states)}{body[end:]}"


def _state(home: Path) -> str:
    """How far a run is, in words."""
    run = Run(home)
    try:
        rounds, stages = int(run.config["rounds"]), int(run.facts["stages"])
        past = [event for event in run.events if isinstance(event, Round)]
    except (UserError, KeyError):
        return f"{home}: cannot be read just now"
    if (home / "result.json").exists():
        return f"{home}: ended after {len(past)} rounds"
    place = "no round yet"
    if past:
        stage = f"stage {past[-1].stage + 1}/{stages}, " if stages > 1 else ""
        place = f"{stage}round {past[-1].round + 1}/{rounds}"
    stopped = "" if FolderLock.has_writer(home) else " (stopped; continue with --resume)"
    return f"{home}: {place}{stopped}"


class _Handler(BaseHTTPRequestHandler):
    """Answers two addresses, to this machine."""

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
            return  # the reader has gone

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request."""


def serve(watch: Watch, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `ready` is told its address."""
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
