"""Hosts as NVFlare names them, and the ways to them."""

import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.engines.network import addresses
from atoll.engines.network.kits import read_project


@pytest.mark.parametrize("host", ["::1", "2001:db8::", "fe80::1:2", "::ffff:192.0.2.7"])
def test_an_ipv6_address_has_a_name_without_colons_and_comes_back(host: str) -> None:
    name = addresses.encode_host(host)
    assert ":" not in name
    assert len(name) < 64  # as long as a certificate's name may be
    assert addresses.encode_host(addresses.decode_host(name)) == name
    assert socket.inet_pton(socket.AF_INET6, addresses.decode_host(name)) == socket.inet_pton(
        socket.AF_INET6, host
    )


@pytest.mark.parametrize("host", ["localhost", "192.0.2.7", "fl.example.org", "x.ipv6-literal.net"])
def test_other_hosts_are_named_as_they_are(host: str) -> None:
    assert addresses.encode_host(host) == host
    assert addresses.decode_host(host) == host


@pytest.mark.parametrize(
    "server", ["[::1]", "fl.example.org:8102", "fe80::1%eth0", "", "a b", "-x", "1::2::3", "ä.ch"]
)
def test_a_server_that_is_no_host_is_said_when_the_project_is_read(
    server: str, tmp_path: Path
) -> None:
    path = tmp_path / "project.toml"
    path.write_text(f'sites = ["basel"]\nserver = "{server}"\n')
    with pytest.raises(UserError, match="is not a host") as caught:
        read_project(path)
    assert caught.value.remedy.startswith("write a name, or an address without port")


@pytest.mark.parametrize("server", ["::1", "2001:db8::7", "192.0.2.7", "fl-1.example.org", "x"])
def test_a_server_may_be_a_name_or_an_address(server: str, tmp_path: Path) -> None:
    path = tmp_path / "project.toml"
    path.write_text(f'sites = ["basel"]\nserver = "{server}"\n')
    assert read_project(path).server == server


def test_the_coordinator_reaches_its_own_server_without_the_public_name() -> None:
    for server in ("fl.example.org", "192.0.2.7", "2001:db8::7", "localhost"):
        assert addresses.local_addresses(server) == ("127.0.0.1", "::1")
    assert addresses.local_addresses("::1") == ("::1",)
    assert addresses.local_addresses("127.0.0.2") == ("127.0.0.2",)


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with addresses.open_connection(["127.0.0.2", "127.0.0.1"], port) as found:
            assert found.getpeername() == ("127.0.0.1", port)
            assert found.gettimeout() is None
    with pytest.raises(ConnectionRefusedError):
        addresses.open_connection(["127.0.0.1"], port)


@pytest.mark.parametrize("where", ["127.0.0.1", "::1"])
def test_a_port_is_taken_whichever_kind_of_address_somebody_listens_at(where: str) -> None:
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    try:
        taken = socket.create_server((where, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        assert addresses.is_taken("fl.example.org", port)
        assert addresses.is_taken(where, port)
    assert not addresses.is_taken("fl.example.org", port)


def test_a_machine_without_ipv6_listens_over_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert addresses.bind_address("") == (socket.AF_INET, "")
    assert addresses.bind_address("127.0.0.1") == (socket.AF_INET, "127.0.0.1")


def test_a_proxy_that_is_not_used_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in addresses.PROXIES:
        monkeypatch.delenv(name, raising=False)
    assert addresses.proxies() == ""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    assert addresses.proxies() == "HTTPS_PROXY"


def test_sockets_of_both_kinds_listen_where_there_are_both() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert addresses.bind_address("") == (socket.AF_INET6, "::")
    found: tuple[Any, str] = addresses.bind_address(addresses.encode_host("::1"))
    assert found == (socket.AF_INET6, "::1")
