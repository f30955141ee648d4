"""NVFlare's TCP connections over IPv4 and IPv6, and to a server on the same machine.

NVFlare only creates IPv4 sockets. This module replaces them with sockets of both kinds; the
protocol and TLS remain NVFlare's.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from nvflare.fuel.f3.drivers import tcp_driver
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.private.fed.server import fed_server

from atoll.engines.network.addresses import bind_address, decode_host, is_loopback, open_connection

__all__ = ["connecting", "install"]


class _Listener(tcp_driver.TcpStreamServer):  # type: ignore[misc]
    """NVFlare's listener, at an address of either kind; at all addresses of both for no host."""

    def __init__(self, driver: Any, connector: Any) -> None:
        params = connector.params
        self.address_family, address = bind_address(params[DriverParams.HOST.value])
        self._place = (address, int(params[DriverParams.PORT.value]))
        super().__init__(driver, connector)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.server_address = self._place
        super().server_bind()


def _secured(plain: socket.socket, params: dict[str, Any], name: str) -> tuple[Any, bool]:
    """The connection as NVFlare's settings have it: with TLS, for the host's own name, or without.

    The name is the public one even where the address is another.
    """
    try:
        context = tcp_driver.get_ssl_context(params, ssl_server=False)  # by then our own
        return (
            (context.wrap_socket(plain, server_hostname=name), True) if context else (plain, False)
        )
    except BaseException:
        plain.close()
        raise


def connecting(elsewhere: Mapping[str, Sequence[str]] | None = None) -> None:
    """Let NVFlare connect over IPv6 too; `elsewhere` has the addresses to use for a host."""
    addresses = dict(elsewhere or {})

    def connect(driver: Any, connector: Any) -> None:
        """Like NVFlare's function, except for the socket."""
        driver.connector, params = connector, connector.params
        host, port = params[DriverParams.HOST.value], int(params[DriverParams.PORT.value])
        sock, secure = _secured(open_connection(addresses.get(host, (host,)), port), params, host)
        connection = SocketConnection(sock, connector, secure)
        driver.add_connection(connection)
        connection.read_loop()
        driver.close_connection(connection)

    tcp_driver.TcpDriver.connect = connect


def install() -> None:
    """Let NVFlare connect and listen over IPv6 too; once, before its first connection."""
    connecting()
    tcp_driver.TcpStreamServer = _Listener
    normal, loopback = fed_server._normalize_loopback_host, fed_server._is_loopback_host

    def normalised(host: str) -> str:
        return host if _named(host) else str(normal(host))

    def looped(host: str) -> bool:
        return _named(host) or bool(loopback(host))

    fed_server._normalize_loopback_host, fed_server._is_loopback_host = normalised, looped


def _named(host: str) -> bool:
    """Whether NVFlare's server is to listen at an IPv6 loopback address alone."""
    return decode_host(host) != host and is_loopback(host)
