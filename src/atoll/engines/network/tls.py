"""TLS checks at both ends: who the peer is, and whether its certificate has the right purpose.

NVFlare looks at no host name, and takes a certificate that does not say what it is for. The
contexts here do: a site takes a coordinator whose certificate is for servers and names the host
that was called, a coordinator takes clients alone. Refusals are logged.
"""

import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["PASSPHRASE", "checked", "client_context", "passphrase", "server_context"]

PASSPHRASE = "ATOLL_PASSPHRASE"  # the variable with the passphrase of a private key
HANDSHAKE_SECONDS = 10.0  # seconds for a connection to complete its handshake


def passphrase() -> str:
    """The passphrase of this party's private key, from its environment; empty if there is none."""
    return os.environ.get(PASSPHRASE, "")


class _Socket(ssl.SSLSocket):
    """A connection that ends if the peer's certificate has the wrong purpose.

    A server greets when a connection is first used, by the thread that looks after it: somebody who
    connects and says nothing holds up nobody else.
    """

    greeted = False

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Read after the handshake."""
        self._greet()
        return super().read(len, buffer)

    def write(self, data: Any) -> int:
        """Write after the handshake."""
        self._greet()
        return super().write(data)

    def getpeercert(self, binary_form: bool = False) -> Any:
        """The certificate of the other side."""
        self._greet()
        return super().getpeercert(binary_form)

    def _greet(self) -> None:
        if not self.greeted:
            self.do_handshake()

    def do_handshake(self, block: bool = False) -> None:
        """Complete the handshake within some seconds, then check the certificate's purpose."""
        own, before = self.context, self.gettimeout()
        assert isinstance(own, _Context)
        try:
            self.settimeout(HANDSHAKE_SECONDS)
            super().do_handshake(block)
            self.settimeout(before)
            _look(super().getpeercert(binary_form=True), own.purpose)
            self.greeted = True
        except OSError as error:
            words = getattr(error, "verify_message", "") or getattr(error, "reason", "")
            own.tell(f"refused a TLS connection with {_address(self)}: {words or error}")
            raise


class _Context(ssl.SSLContext):
    """How connections are made: with which host they are, and what the other side must be."""

    purpose = ""  # what the other side's certificate must be for
    host = ""  # that was called; empty at the end that is called
    tell: Callable[[str], None] = staticmethod(lambda line: None)

    def wrap_socket(
        self, sock: socket.socket, server_side: bool = False, *rest: Any, **kwargs: Any
    ) -> Any:
        """A connection to the one host that this is for; NVFlare does not say which."""
        kwargs["server_hostname"] = None if server_side else self.host
        if server_side:
            kwargs["do_handshake_on_connect"] = False
        return super().wrap_socket(sock, server_side, *rest, **kwargs)


def _look(content: bytes | None, purpose: str) -> None:
    from cryptography import x509  # noqa: PLC0415 - comes with NVFlare

    from atoll.engines.network.certificates import purposes_of  # noqa: PLC0415

    purposes = purposes_of(x509.load_der_x509_certificate(content)) if content else set()
    if purpose not in purposes:
        actual = (
            f"is for a {'or a '.join(sorted(purposes))}"
            if purposes
            else "does not say what it is for"
        )
        error = ssl.SSLCertVerificationError(1, f"the certificate {actual}")
        error.verify_code, error.verify_message = (
            26,
            f"the certificate {actual}, not for a {purpose}",
        )
        raise error


def _address(connection: ssl.SSLSocket) -> str:
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return "somebody"


def _context(protocol: int, authority: str, pair: tuple[str, str], password: str) -> _Context:
    context = _Context(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = _Socket
    context.load_verify_locations(authority)
    context.load_cert_chain(*pair, password=password)  # without one OpenSSL would ask the terminal
    return context


def client_context(
    authority: str, pair: tuple[str, str], host: str, tell: Callable[[str], None], password: str
) -> ssl.SSLContext:
    """For connections to a coordinator at a host, with a site's certificate and key."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, authority, pair, password)
    context.check_hostname = True
    context.host, context.purpose, context.tell = host, "server", tell
    return context


def server_context(
    authority: str, pair: tuple[str, str], tell: Callable[[str], None], password: str
) -> ssl.SSLContext:
    """For connections of sites to the coordinator."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, authority, pair, password)
    context.purpose, context.tell = "client", tell
    return context


def checked(
    required: Callable[[dict[str, Any]], bool], tell: Callable[[str], None]
) -> Callable[[dict[str, Any], bool], Any]:
    """In place of NVFlare's function that makes contexts; a job's process has none with its own."""

    def create_context(params: dict[str, Any], ssl_server: bool) -> Any:
        if not required(params):
            params["implemented_conn_sec"] = "clear"
            return None
        if str(params.get("connection_security", "mtls")).lower() != "mtls":
            raise ssl.SSLError("only connections with certificates on both sides are made")
        authority = _named(params, "ca_cert")
        if ssl_server:
            pair = (_named(params, "server_cert"), _named(params, "server_key"))
            return server_context(authority, pair, tell, passphrase())
        pair = (_named(params, "client_cert"), _named(params, "client_key"))
        return client_context(authority, pair, _named(params, "host"), tell, passphrase())

    return create_context


def _named(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not value:
        raise ssl.SSLError(f"no {key} for a connection with TLS")
    return str(value)
