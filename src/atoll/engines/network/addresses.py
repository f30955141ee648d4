"""Where the coordinator is: how NVFlare's files name it, and how it is reached.

NVFlare parts a host from its port at a colon and knows IPv4 alone. An IPv6 address therefore has a
name without colons in NVFlare's files, which becomes an address again where a socket is made.
"""

import os
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

__all__ = [
    "bound_to",
    "dialled",
    "is_host",
    "is_loopback",
    "meant",
    "proxies",
    "spelled",
    "taken",
    "way_in",
]

LITERAL = ".ipv6-literal.net"  # after Windows, where an address within a path is named like this
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
NAME = re.compile(rf"({LABEL}\.)*{LABEL}")
DIAL_SECONDS = 20.0  # for each address of a host
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_host(host: str) -> bool:
    """Whether this is a host name or an address; one of a single link (%) is not: sites differ."""
    if ":" in host:
        return _address(host) is not None and "%" not in host
    return len(host) < 254 and NAME.fullmatch(host) is not None


def spelled(host: str) -> str:
    """A host as NVFlare's files and certificates name it, without colons."""
    found = _address(host)
    if not isinstance(found, IPv6Address):
        return host
    return found.exploded.replace(":", "-") + LITERAL


def meant(host: str) -> str:
    """The name or address that was spelled like this."""
    if not host.endswith(LITERAL):
        return host
    found = _address(host.removesuffix(LITERAL).replace("-", ":"))
    return host if found is None else str(found)


def is_loopback(host: str) -> bool:
    """Whether this is an address that reaches its own machine alone."""
    found = _address(meant(host))
    return found is not None and found.is_loopback


def way_in(server: str) -> tuple[str, ...]:
    """The addresses at which the coordinator's machine reaches its own server, best first.

    The public name may have no meaning there, or the one of a router in front of it.
    """
    return (server,) if is_loopback(server) else ("127.0.0.1", "::1")


def dialled(hosts: Iterable[str], port: int, seconds: float = DIAL_SECONDS) -> socket.socket:
    """A connection to the first of these hosts that can be had, over IPv4 or IPv6."""
    refused: OSError = ConnectionRefusedError("no address")
    for host in hosts:
        try:
            found = socket.create_connection((meant(host), port), timeout=seconds)
        except OSError as error:
            refused = error
        else:
            found.settimeout(None)
            return found
    raise refused


def bound_to(host: str) -> tuple[socket.AddressFamily, str]:
    """The kind of socket that listens at a host, and its address; all addresses for no host."""
    if not host:
        both = socket.has_dualstack_ipv6()
        return (socket.AF_INET6, "::") if both else (socket.AF_INET, "")
    found = _address(meant(host))
    return (socket.AF_INET6 if isinstance(found, IPv6Address) else socket.AF_INET), meant(host)


def taken(server: str, port: int) -> bool:
    """Whether something else listens where the server would."""
    family, address = bound_to(server if is_loopback(server) else "")
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
    """The variable that names a proxy here, which is not used; empty where none does."""
    return next((name for name in PROXIES if os.environ.get(name)), "")
