"""The coordinator's address: its spelling in NVFlare's files, and connections to it.

NVFlare splits host and port at a colon and supports only IPv4. Its files therefore have a name
without colons for an IPv6 address, which is decoded when a socket is opened.
"""

import os
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = [
    "bind_address",
    "decode_host",
    "encode_host",
    "is_host",
    "is_loopback",
    "is_taken",
    "local_addresses",
    "open_connection",
    "proxies",
]

LITERAL = ".ipv6-literal.net"  # after Windows, where an address within a path is named like this
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
NAME = re.compile(rf"({LABEL}\.)*{LABEL}")
DIAL_SECONDS = 20.0  # timeout in seconds for each address of a host
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_host(host: str) -> bool:
    """Whether this is a host name or an address; link-local addresses (%) are not accepted."""
    if ":" in host:
        return _address(host) is not None and "%" not in host
    return len(host) < 254 and NAME.fullmatch(host) is not None


def encode_host(host: str) -> str:
    """A host as NVFlare's files and certificates name it, without colons."""
    address = _address(host)
    if not isinstance(address, IPv6Address):
        return host
    return address.exploded.replace(":", "-") + LITERAL


def decode_host(host: str) -> str:
    """The name or address that `encode_host` encoded."""
    if not host.endswith(LITERAL):
        return host
    address = _address(host.removesuffix(LITERAL).replace("-", ":"))
    return host if address is None else str(address)


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address."""
    address = _address(decode_host(host))
    return address is not None and address.is_loopback


def local_addresses(server: str) -> tuple[str, ...]:
    """The addresses at which the coordinator's machine reaches its server, best first.

    On that machine the public name may not resolve, or may resolve to a router in front of it.
    """
    return (server,) if is_loopback(server) else ("127.0.0.1", "::1")


def open_connection(
    hosts: Iterable[str], port: int, seconds: float = DIAL_SECONDS
) -> socket.socket:
    """Connect to the first of these hosts that accepts, over IPv4 or IPv6."""
    refused: OSError = ConnectionRefusedError("no address")
    for host in hosts:
        try:
            connection = socket.create_connection((decode_host(host), port), timeout=seconds)
        except OSError as error:
            refused = error
        else:
            connection.settimeout(None)
            return connection
    raise refused


def bind_address(host: str) -> tuple[socket.AddressFamily, str]:
    """The address family and address to listen on; all addresses if `host` is empty."""
    if not host:
        both = socket.has_dualstack_ipv6()
        return (socket.AF_INET6, "::") if both else (socket.AF_INET, "")
    address = _address(decode_host(host))
    return (socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET), decode_host(
        host
    )


def is_taken(server: str, port: int) -> bool:
    """Whether another program listens on the server's port."""
    family, address = bind_address(server if is_loopback(server) else "")
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((address, port))
        except OSError:
            return True
    return False


def proxies() -> str:
    """The environment variable that sets a proxy (atoll uses none); empty if none does."""
    return next((name for name in PROXIES if os.environ.get(name)), "")
