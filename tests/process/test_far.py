"""Sites in networks of their own, each with its address; then 50 ms away, 1 packet in 100 lost."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.local import local_engine
from atoll.runs.config import read, resolve
from atoll.runs.execute import execute

from .federation import COMMAND, SITES, Federation

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = [pytest.mark.process, pytest.mark.long]

HOST = "coordinator.test"
PARTIES = ("coordinator", *SITES)
RUN = """\
rounds = 3
data = "wine"
scenario = { clients = 3 }
model = { widths = [8] }
method = { name = "fedavg", epochs = 2 }
engine = { mode = "loop", threads = 1 }
checkpoint_seconds = 0
"""


def do(*words: str) -> bool:
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def space(party: str) -> str:
    return f"atoll-{party}"


@pytest.fixture(params=["plain", "slow and lossy"])
def lines(request: pytest.FixtureRequest) -> Iterator[None]:
    """A network for each party, all on one switch."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs to make networks, which this user may not")
    hub, made = "atoll-hub", list[Path]()
    try:
        built = do("ip", "netns", "add", hub) and do(
            "ip", "-n", hub, "link", "add", "sw", "type", "bridge"
        )
        built = built and do("ip", "-n", hub, "link", "set", "sw", "up")
        for number, party in enumerate(PARTIES):
            hosts = Path("/etc/netns") / space(party) / "hosts"
            hosts.parent.mkdir(parents=True)
            made.append(hosts.parent)
            hosts.write_text(f"127.0.0.1 localhost\n10.77.0.1 {HOST}\n")
            built = built and line(hub, party, f"10.77.0.{number + 1}/24")
        if not built:
            pytest.skip("needs network namespaces, which are not to be had here")
        if request.param != "plain" and not all(worse(site) for site in SITES):
            pytest.skip("needs netem to slow lines down, which this kernel has not")
        yield
    finally:
        for name in (hub, *(space(party) for party in PARTIES)):
            do("ip", "netns", "del", name)
        for folder in made:
            shutil.rmtree(folder)


def line(hub: str, party: str, address: str) -> bool:
    here, end = space(party), f"v-{party[:8]}"
    steps = (
        ("ip", "netns", "add", here),
        ("ip", "-n", here, "link", "add", "eth", "type", "veth", "peer", "name", end, "netns", hub),
        ("ip", "-n", hub, "link", "set", end, "master", "sw", "up"),
        ("ip", "-n", here, "addr", "add", address, "dev", "eth"),
        ("ip", "-n", here, "link", "set", "eth", "up"),
        ("ip", "-n", here, "link", "set", "lo", "up"),
    )
    return all(do(*step) for step in steps)


def worse(site: str) -> bool:
    slow = ("netem", "delay", "50ms", "loss", "1%")
    return do("ip", "netns", "exec", space(site), "tc", "qdisc", "add", "dev", "eth", "root", *slow)


def start(made: Federation, party: str, *arguments: str) -> "subprocess.Popen[str]":
    words = ["ip", "netns", "exec", space(party), str(COMMAND), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=made.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    made.started.append(process)
    return process


def test_a_run_between_networks_ends_as_in_one_process(lines: None, tmp_path: Path) -> None:
    made = Federation(tmp_path)
    text = f'name = "alps"\nserver = "{HOST}"\nport = 8102\nsites = ["basel", "bern", "geneva"]\n'
    (tmp_path / "project.toml").write_text(text)
    (tmp_path / "run.toml").write_text(RUN)
    assert made.call("network", "init", "project.toml", "--run", "run.toml").returncode == 0
    try:
        for site in SITES:
            start(made, site, "join", f"kits/{site}", f"kits/{site}/site.toml", "--quiet")
        serving = start(
            made, "coordinator", "serve", "kits/coordinator", "run.toml", "--out", "far"
        )
        _, said = serving.communicate(timeout=400)
        assert serving.returncode == 0, said[-3000:]
    finally:
        made.close()
    path = str(tmp_path / "run.toml")
    execute(resolve(read(path), path), tmp_path / "near", local_engine)
    near, far = ((tmp_path / name / "events.jsonl").read_bytes() for name in ("near", "far"))
    assert near == far
