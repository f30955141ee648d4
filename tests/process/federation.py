"""A federation on this machine for tests: real kits, real processes, mutual TLS on loopback."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load

from atoll import methods
from atoll.core.federation import actions
from atoll.engines.network.mirror import append_only

COMMAND = Path(sys.executable).with_name("atoll")
SITES = ("basel", "bern", "geneva")
CLIENTS = ("site-0", "site-1", "site-2")


def free_port() -> int:
    """One below those that the system itself gives away."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port


def wait_for(what: str, true: Callable[[], Any], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def contract(names: Sequence[str], **further: Any) -> str:
    asked = sorted({a for name in names for a in actions(methods.load(name).client)})
    asked += ["offer", "agree"]
    lines = [f"methods = {json.dumps(list(names))}"]
    # Small runs have one step in a round, and small tables few columns
    terms = {"actions": asked, "steps": 1, "columns": 1, **further}
    lines += [f"{key} = {json.dumps(value)}" for key, value in terms.items()]
    return "\n".join(["[contract]", *lines, ""])


@dataclass
class Federation:
    """A folder with a project, its kits, and the commands that run with them."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    joined: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def init(self, sites: Sequence[str] = SITES, server: str = "localhost") -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = ['name = "alps"', f"port = {free_port()}", f"sites = {json.dumps(list(sites))}"]
        lines.append(f"server = {json.dumps(server)}")
        (self.folder / "project.toml").write_text("\n".join(lines) + "\n")
        assert self.call("network", "init", "project.toml").returncode == 0

    def kit(self, name: str) -> Path:
        return self.folder / "kits" / name

    def store(self, site: str) -> Path:
        return self.folder / "kits" / f"{site}-store"

    def rewrite_log(self, site: str, content: bytes) -> None:
        """Change a site's log, as somebody could who may do everything there."""
        path = self.store(site) / "egress.jsonl"
        append_only(path, False)
        path.write_bytes(content)

    def allow(self, names: Sequence[str], sites: Sequence[str] = SITES, **further: Any) -> None:
        for site in sites:
            text = f'store = "../{site}-store"\nengine = {{ threads = 1 }}\n'
            if (self.folder / f"{site}.csv").exists():
                text += f'data = {{ files = ["../../{site}.csv"], label = "outcome" }}\n'
            text += contract(names, **further)
            (self.kit(site) / "site.toml").write_text(text)

    def _environment(self, **further: str) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache")}
        return {**os.environ, **own, **self.environment, **further}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(COMMAND), *arguments], cwd=self.folder, env=self._environment(**environment),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def call(self, *arguments: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        printed, complaint = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(arguments, process.returncode, printed, complaint)

    def join(self, *sites: str, **environment: str) -> None:
        for site in sites or SITES:
            own = (f"kits/{site}", f"kits/{site}/site.toml", "--quiet")
            self.joined[site] = self.start("join", *own, **environment)

    def serve(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("serve", "kits/coordinator", *arguments)

    def leave(self, *sites: str) -> None:
        for site in sites:
            self.joined[site].terminate()
        for site in sites:
            self.joined.pop(site).communicate(timeout=60)

    def job_process(self, name: str) -> int:
        """The process that NVFlare has started for a job with a kit; 0 where there is none."""
        kit = str(self.kit(name))
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if kit in line and any(word in line for word in JOBS):
                return int(folder.name)
        return 0

    def main_process(self, name: str) -> int:
        """NVFlare's own process of a kit."""
        return int((self.kit(name) / "pid").read_text())

    def kept(self, site: str) -> Path:
        """The newest run in a site's store."""
        folders = [p for p in self.store(site).iterdir() if p.is_dir()]
        return max(folders, key=lambda path: path.stat().st_mtime_ns)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command that waits for the end of a round: a second signal ends it at once."""
    process.terminate()
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


JOBS = ("client_job", "server_job")


@contextmanager
def federation(
    folder: Path, sites: Sequence[str] = SITES, server: str = "localhost"
) -> Iterator[Federation]:
    made = Federation(folder)
    made.init(sites, server)
    try:
        yield made
    finally:
        made.close()


def tensors(path: Path, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors of a checkpoint as plain bytes."""
    return {
        name.removeprefix(prefix): (str(array.dtype), array.shape, array.tobytes())
        for name, array in load(path.read_bytes()).items()
        if name.startswith(prefix)
    }
