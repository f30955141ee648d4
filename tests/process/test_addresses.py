"""Where the coordinator is: an IPv6 address, a name of IPv6 alone, one that it does not know."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.network.addresses import PROXIES
from atoll.engines.network.kits import Kit
from atoll.engines.network.site import reachable

from .federation import Federation, federation, wait_for

pytest.importorskip("nvflare", reason="needs the extra nvflare")
pytestmark = pytest.mark.process

SITES = ("basel", "bern")
NAME = "fl.example.invalid"  # nobody resolves it
CONFIG = """\
rounds = 2
data = "wine"
scenario = { clients = 2 }
model = { widths = [8] }
method = { name = "fedavg", epochs = 1 }
engine = { mode = "loop", threads = 1 }
"""
# What a line in the hosts file of a site's machine would do.
HOSTS = f"""
import socket

ask = socket.getaddrinfo
socket.getaddrinfo = lambda host, *a, **k: ask("::1" if host == {NAME!r} else host, *a, **k)
"""


@pytest.fixture
def ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")


def ended(made: Federation, serving: subprocess.Popen[str]) -> None:
    """The run is over, and has gone well."""
    _, said = serving.communicate(timeout=200)
    assert serving.returncode == 0, said[-3000:]
    assert json.loads((made.folder / "run" / "result.json").read_text())


def listening(port: int) -> list[str]:
    """The addresses at which somebody listens at a port, as Linux shows them."""
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[1].endswith(f":{port:04X}"):
                found.append(words[1].partition(":")[0])
    return found


def test_a_federation_at_an_ipv6_address_listens_there_alone_and_runs(
    tmp_path: Path, ipv6: Any
) -> None:
    with federation(tmp_path, SITES, "::1") as made:
        made.allow(["fedavg"], SITES)
        kit = Kit(made.kit("basel"))
        assert (kit.server, kit.check()) == ("::1", "")
        (made.folder / "run.toml").write_text(CONFIG)
        serving = made.serve("run.toml", "--out", "run")
        wait_for("the server", lambda: listening(kit.port))
        assert listening(kit.port) == ["00000000000000000000000001000000"]
        assert reachable(kit) == ""
        made.join(*SITES)
        ended(made, serving)


def test_a_coordinator_need_not_resolve_its_own_name_and_sites_reach_it_over_ipv6(
    tmp_path: Path, ipv6: Any
) -> None:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "sitecustomize.py").write_text(HOSTS)
    with federation(tmp_path / "alps", SITES, NAME) as made:
        made.allow(["fedavg"], SITES)
        (made.folder / "run.toml").write_text(CONFIG)
        made.join(*SITES, PYTHONPATH=str(tmp_path / "hosts"))
        ended(made, made.serve("run.toml", "--out", "run"))


def test_a_site_says_that_no_proxy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Federation(tmp_path)
    made.init(["basel"])
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    kit = Kit(made.kit("basel"))
    assert reachable(kit) == "waiting for the coordinator: connection refused"
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy.example.org")
    assert reachable(kit).endswith("connection refused (ALL_PROXY is set, but no proxy is used)")
