"""The coordinator's connection to its own NVFlare server, and how NVFlare's processes start."""

import logging
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.drivers import tcp_driver
from nvflare.fuel.f3.drivers.net_utils import ssl_required

from atoll.engines.network import GUARD
from atoll.engines.network.addresses import encode_host, local_addresses
from atoll.engines.network.tls import checked
from atoll.engines.network.wire import connecting

__all__ = ["ENVIRONMENT", "Session", "command"]

log = logging.getLogger("atoll.session")

# Without these, a timer thread of every reply lives for a minute.
ENVIRONMENT = {"NVFLARE_STREAMING_RETRY_TIMEOUT": "2", "NVFLARE_STREAMING_RETRY_WAIT": "0.5"}


def command(kind: str, kit: Path, name: str) -> list[str]:
    """The command that starts NVFlare's process of a server or a site behind its filter."""
    own = [f"uid={name}"] if kind == "client" else []
    return [
        *(sys.executable, "-u", "-m", GUARD, kind, "-m", str(kit), "-s", f"fed_{kind}.json"),
        *("--set", "secure_train=true", *own, "org=atoll", "config_folder=config"),
    ]


class Session:
    """The coordinator's connection to its own server: lists sites, submits jobs, reports states."""

    def __init__(self, admin: str, kit: Path, server: str) -> None:
        """`server`: the public name in certificates; the connection stays on this machine."""
        self.admin, self.kit = admin, kit
        connecting({encode_host(server): local_addresses(server)})
        self._session: Any = None
        tcp_driver.get_ssl_context = checked(ssl_required, log.warning)
        logging.getLogger().addHandler(logging.NullHandler())  # it would print its retries
        logging.getLogger().setLevel(logging.CRITICAL)

    def connect(self) -> bool:
        """Whether the server is reachable."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session  # noqa: PLC0415

        self.close()
        quiet = StringIO()
        try:
            with redirect_stdout(quiet):
                self._session = new_secure_session(self.admin, str(self.kit), timeout=2.0)
        except Exception:  # whatever the error, the server is not reachable yet
            return False
        return True

    def sites(self) -> dict[str, float] | None:
        """The connected sites with their last contact; None: no server."""
        info = self._do(lambda session: session.get_system_info())
        if info is None:
            return None
        return {one.name: float(one.last_connect_time) for one in info.client_info}

    def submit(self, job: Path) -> str:
        """Submit a job; returns its id, empty if there is no server."""
        return str(self._do(lambda session: session.submit_job(str(job))) or "")

    def state(self, job: str) -> str | None:
        """The state of a job in NVFlare's terms; None: no server."""
        meta = self._do(lambda session: session.get_job_meta(job))
        return None if meta is None else str(meta.get("status", ""))

    def abort(self, job: str) -> None:
        """End a job."""
        self._do(lambda session: session.abort_job(job))

    def ban(self, site: str) -> None:
        """Make the server ignore a site from now on."""
        self._do(lambda session: session.disable_client(site))

    def _do(self, work: Callable[[Any], Any]) -> Any:
        quiet = StringIO()
        if self._session is None and not self.connect():
            return None
        try:
            with redirect_stdout(quiet):
                return work(self._session)
        except Exception:  # the next call reconnects
            self.close()
            return None

    def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            with suppress(Exception), redirect_stdout(StringIO()):
                self._session.close()
            self._session = None
