"""The connections of the coordinator's server: listed sites, one connection each.

NVFlare closes the first connection of a name when a second one arrives, so a copied kit would
disconnect its owner. Here the second one waits, and its messages decide: a message with
the token of the registered site proves that the site has reconnected, and the new connection
replaces the old one. Everything else is refused while the first is alive, and both are notified.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import encode_payload
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint, EndpointState
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.constants import HandshakeKeys
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint

from atoll.engines.network.certificates import fingerprint
from atoll.engines.network.deny import Route
from atoll.engines.network.listed import Listed
from atoll.engines.network.notices import Notices

__all__ = ["Presence", "answer_beside", "certificate_name"]

SECOND = "a site of this name is connected already"
AGAIN_SECONDS = 600.0  # seconds after which the same notice is written again
ALIVE_SECONDS = 25.0  # seconds since the last sign of life; sites send one every ten seconds


def certificate_name(connection: Any) -> str:
    """The common name that TLS has verified for the peer; empty if there is none."""
    properties = connection.get_conn_properties() if connection else {}
    name = properties.get(DriverParams.PEER_CN.value)
    return "" if name in (None, "N/A") else str(name)


def _address(connection: Any) -> str:
    properties = connection.get_conn_properties() if connection else {}
    return str(properties.get(DriverParams.PEER_ADDR.value, "")).rpartition(":")[0][:60]


@dataclass(frozen=True)
class _Beside:
    """A second connection of a name: it waits and receives no messages of the first."""

    manager: Any
    connection: Any  # NVFlare's wrapper of the connection
    data: dict[str, Any]  # its handshake message

    @property
    def first(self) -> Any:
        """The existing connection with the same name while it is alive; then None."""
        return _alive(self.manager, str(self.data[HandshakeKeys.ENDPOINT_NAME]), self.connection)


def _alive(manager: Any, name: str, other: Any) -> Any:
    endpoint = manager.sfm_endpoints.get(name)
    for one in list(endpoint.connections) if endpoint else []:
        active = time.time() - one.last_activity < ALIVE_SECONDS
        if one is not other and active and not getattr(one.conn, "closing", False):
            return one
    return None


@dataclass
class Presence:
    """The server's record of connections."""

    listed: Listed
    notices: Notices
    _second: dict[str, str] = field(default_factory=dict)  # by site: an address to tell it of
    _keys: set[tuple[str, bytes]] = field(default_factory=set)  # that were shown
    _noted: dict[tuple[str, str], float] = field(default_factory=dict)  # when it was last due
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def greeted(
        self, original: Callable[..., Any], manager: Any, connection: Any, data: dict[str, Any]
    ) -> Any:
        """Register a new connection, or let it wait beside the one with its name."""
        name = FQCN.normalize(str(data.get(HandshakeKeys.ENDPOINT_NAME, "")))
        owner = name.partition(".")[0]
        proven = certificate_name(connection.conn)
        if proven != owner or _alive(manager, name, connection) is None:
            return original(manager, connection, data)
        endpoint = Endpoint(name)
        endpoint.state = EndpointState.DISCONNECTED  # that it goes again is no news of the first
        connection.conn.atoll_beside = _Beside(
            manager, connection, {**data, HandshakeKeys.ENDPOINT_NAME: name}
        )
        connection.conn.atoll_original = original
        connection.sfm_endpoint = SfmEndpoint(endpoint)
        return None

    def refusal(self, route: Route, connection: Any, has_token: bool) -> str:
        """Why a message of a site is refused; `has_token` tells whether it has the site's token."""
        if not route.certificate or "@" in route.certificate:
            return ""
        reason = self.listed.refusal(route.certificate)
        if reason:
            self._note("refused", f"refused {route.certificate[:80]}: {reason}")
            return reason
        with self._lock:
            beside = getattr(connection, "atoll_beside", None)
            if beside is None:
                return ""
            if has_token or beside.first is None:
                del connection.atoll_beside
                connection.atoll_original(beside.manager, beside.connection, dict(beside.data))
                return ""
        address = _address(connection)
        if route.peer == route.certificate and self._due("site", f"{route.peer} {address}"):
            with self._lock:
                self._second[route.certificate] = address
        self._note("second", f"refused a second connection of {route.certificate} from {address}")
        return SECOND

    def seen(self, route: Route, connection: Any) -> None:
        """Show the key of a connected site, once."""
        if route.peer != route.certificate or not hasattr(connection, "sock"):
            return
        content = connection.sock.getpeercert(True)
        with self._lock:
            if not content or (route.certificate, content) in self._keys:
                return
            self._keys.add((route.certificate, content))
        key = fingerprint(x509.load_der_x509_certificate(content).public_key())
        self.notices.write("key", f"{route.certificate} has the key {key}")

    def second(self, name: str) -> str:
        """From where a second connection of a site came that it has not been told of."""
        with self._lock:
            return self._second.pop(name, "")

    def _note(self, kind: str, words: str) -> None:
        """Write a notice unless the same one was written recently."""
        if self._due(kind, words):
            self.notices.write(kind, words)

    def _due(self, kind: str, words: str) -> bool:
        """Whether the same words were not due recently; marks them as due now."""
        now = time.monotonic()
        with self._lock:
            due = now - self._noted.get((kind, words), -AGAIN_SECONDS) >= AGAIN_SECONDS
            if due:
                self._noted[kind, words] = now
        return due


def answer_beside(connection: Any, reply: Message) -> bool:
    """Answer a waiting connection directly, not over the first connection."""
    beside = getattr(connection, "atoll_beside", None)
    if beside is None:
        return False
    encode_payload(reply)
    beside.connection.send_data(CoreCell.APP_ID, 1, reply.headers, reply.payload)
    return True
