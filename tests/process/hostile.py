"""Hostile parties for tests: NVFlare's own processes, without our filter, with somebody's kit."""

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .federation import Federation, wait_for

INSIDE = Path(__file__).with_name("inside")
# `atoll serve` with the server that NVFlare itself starts, as someone would who has changed atoll.
UNGUARDED = """
import sys
from atoll.engines.network import session


def command(kind, kit, name):
    module = f"nvflare.private.fed.app.{kind}.{kind}_train"
    return [sys.executable, "-u", "-m", module, "-m", str(kit), "-s", f"fed_{kind}.json", "--set",
            "secure_train=true", "org=atoll", "config_folder=config"]


session.command = command
from atoll.cli import main

main()
"""


@dataclass
class Inside:
    """Asks the processes of a federation to send messages, each from its own cell."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH", "")]))
        return {"PYTHONPATH": path, "ATOLL_INSIDE": str(self.folder)}

    def name(self, process: str) -> str:
        """The name of the cell of `oslo`, or of its job's process, `oslo.job`."""
        path = self.folder / process / "name"
        wait_for(f"the process {process}", path.exists)
        return path.read_text()

    def ask(self, process: str, do: str, seconds: float = 8, **further: Any) -> dict[str, Any]:
        """What came of a message that a process has sent."""
        self.name(process)
        path = self.folder / process / f"{uuid.uuid4().hex}.ask"
        part = path.with_suffix(".draft")
        part.write_text(json.dumps({"do": do, "seconds": seconds, **further}))
        part.rename(path)
        reply = path.with_suffix(".answer")
        wait_for(f"an answer of {process}", reply.exists, 3 * seconds + 30)
        return dict(json.loads(reply.read_text()))


def hostile_site(made: Federation, inside: Inside, site: str) -> subprocess.Popen[bytes]:
    """NVFlare's unmodified client with a site's real kit; its jobs are unmodified as well."""
    kit = made.kit(site)
    command = [
        *(sys.executable, "-u", "-m", "nvflare.private.fed.app.client.client_train"),
        *("-m", str(kit), "-s", "fed_client.json", "--set", "secure_train=true", f"uid={site}"),
        *("org=atoll", "config_folder=config"),
    ]
    own = {"ATOLL_SITE": str(kit / "site.toml"), "OMP_NUM_THREADS": "1", **inside.environment}
    with (kit / "nvflare.log").open("ab") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
        )
    inside.processes.append(process)
    return process


def hostile_coordinator(made: Federation, inside: Inside, *arguments: str) -> subprocess.Popen[str]:
    """`atoll serve` around NVFlare's unmodified server, with the coordinator's real kit."""
    process = subprocess.Popen(
        [sys.executable, "-c", UNGUARDED, "serve", "kits/coordinator", *arguments],
        cwd=made.folder, env=made._environment(**inside.environment), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    made.started.append(process)
    return process


def said(made: Federation, party: str) -> str:
    """The log of NVFlare's processes at a party."""
    path = made.kit(party) / "nvflare.log"
    return path.read_text(errors="replace") if path.exists() else ""


def refused(made: Federation, party: str, words: str, seconds: float = 10) -> str:
    """The line of a party's log that has a refusal with these words."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for line in said(made, party).splitlines():
            if "refused" in line and words in line:
                return line
        time.sleep(0.1)
    raise AssertionError(
        f"{party} has refused nothing with '{words}':\n{said(made, party)[-3000:]}"
    )
