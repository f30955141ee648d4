"""A real browser that the tests can hold by the hand: keys, sizes, colours, and what it says.

Chromium reads commands from one pipe and answers on another; nothing else is needed for it.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds until a browser that does not answer is given up
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
AXE = "axe-core@4.10.3"  # from npm, at test time
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "atoll-tests"


@pytest.fixture(scope="session")
def browser() -> str:
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"needs a browser, and none of {', '.join(BROWSERS)} is installed")


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, kept in a cache; skipped where npm cannot get it."""
    script = CACHE / AXE / "package" / "axe.min.js"
    if not script.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"needs {AXE}, and npm is not installed")
        script.parent.parent.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", AXE, "--silent", "--pack-destination", str(CACHE)]
        packed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if packed.returncode:
            pytest.skip(f"needs {AXE}, and npm cannot get it: {packed.stderr.strip()[:200]}")
        with tarfile.open(CACHE / packed.stdout.split()[-1]) as archive:
            archive.extract("package/axe.min.js", script.parent.parent, filter="data")
    return script.read_text(encoding="utf-8")


class NavigatedError(Exception):
    """The page went away while it was asked."""


class Tab:
    """One page in a browser."""

    def __init__(self, browser: str, folder: Path) -> None:
        (theirs, self._out), (self._in, answers) = os.pipe(), os.pipe()
        # they become 3 and 4 over there, so they may not be either of them here
        read, write = (fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in (theirs, answers))
        options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        command = [browser, *options.split(), f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(read), str(write), *command],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for pipe in (theirs, answers, read, write):
            os.close(pipe)
        self._rest, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = str(found["sessionId"])
        for name in ("Page", "Runtime", "Log"):
            self.ask(f"{name}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its answer; what the page says in between is kept."""
        self._count += 1
        body: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            body["sessionId"] = self._session
        os.write(self._out, json.dumps(body).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise NavigatedError
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            piece = os.read(self._in, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._rest += piece
        line, self._rest = self._rest.split(b"\0", 1)
        told = dict(json.loads(line))
        if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(told["params"]))
        kind = told.get("params", {}).get("type")
        if told.get("method") == "Runtime.consoleAPICalled" and kind in ("error", "warning"):
            self.complaints.append(json.dumps(told["params"]))
        return told

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def says(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def resolves(self, expression: str) -> Any:
        """The value of a promise in the page."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; a page that is just loading has nothing yet."""
        safe = f"(function () {{ try {{ return {expression}; }} catch (e) {{ return null; }} }})()"
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            with contextlib.suppress(NavigatedError):  # asked while another page was loading
                value = self.says(safe)
                if value:
                    return value
            time.sleep(0.05)
        pytest.fail(f"never came true in the page: {expression}")

    def press(self, key: str) -> None:
        """A key, pressed and let go."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                     windowsVirtualKeyCode=KEYS[key],
                     text=text if kind == "keyDown" else "")  # fmt: skip

    def resize(self, width: int, height: int = 800) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=width < 500)  # fmt: skip

    def scheme(self, name: str) -> None:
        """Light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def offline(self) -> None:
        self.ask("Network.enable")
        self.ask("Network.emulateNetworkConditions", offline=True, latency=0,
                 downloadThroughput=0, uploadThroughput=0)  # fmt: skip

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self.ask("Page.printToPDF")["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture
def tab(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    found = Tab(browser, tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture
def tabs(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Tab]]:
    """As many browsers as are wanted."""
    made: list[Tab] = []

    def more() -> Tab:
        made.append(Tab(browser, tmp_path_factory.mktemp("browser")))
        return made[-1]

    yield more
    for one in made:
        one.close()
