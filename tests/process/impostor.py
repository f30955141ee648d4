"""A stolen kit on a connection under a name of its own choice, for tests.

`python -m tests.process.impostor KIT PORT NAME ORIGIN [GREETING]` connects with the kit's
certificate under NAME, writes ORIGIN into the headers of its messages, and tries to register as the
site of NAME. With GREETING that is the name it gives when it connects. It prints the token that it
gets, or why it gets none.
"""

import json
import sys
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.private.fed.authenticator import Authenticator


def greet_as(name: str) -> None:
    """Give another name than the cell's own in the first frame of every connection."""
    original = SfmConnection.send_handshake

    def send_handshake(connection: Any, kind: int) -> None:
        own, connection.local_endpoint = connection.local_endpoint, Endpoint(name)
        original(connection, kind)
        connection.local_endpoint = own

    SfmConnection.send_handshake = send_handshake


def main(kit: str, port: str, name: str, origin: str, greeting: str = "") -> None:
    """Try to register."""
    if greeting:
        greet_as(greeting)
    startup, site = Path(kit) / "startup", name.partition(".")[0]
    files = {"ca_cert": "rootCA.pem", "client_cert": "client.crt", "client_key": "client.key"}
    paths = {key: str(startup / file) for key, file in files.items()}
    cell = Cell(
        fqcn=name, root_url=f"tcp://localhost:{port}", secure=True, credentials=paths,
        auth_identity=site, auth_identity_map={"server": "localhost"},
    )  # fmt: skip

    def forge(message: Any) -> None:
        message.headers["cn__origin"] = origin

    def take(core: Any, endpoint: Any, connection: Any, app: int, message: Any) -> None:
        """Replies go to the forged name; they are meant for this process."""
        if message.headers.get("cn__destination") == origin:
            message.headers["cn__destination"] = name
        original(core, endpoint, connection, app, message)

    original, CoreCell.process_message = CoreCell.process_message, take
    cell.core_cell.add_outgoing_request_filter("*", "*", forge)
    cell.start()
    project = json.loads((startup / "fed_client.json").read_text())["servers"][0]["name"]
    try:
        token = Authenticator(
            *(cell, project, site, "regular", "localhost", True),
            *(paths["ca_cert"], paths["client_key"], paths["client_cert"]),
            *(5.0, 1.0, 6.0 if greeting else 15.0),
        ).authenticate(FLContext(), Signal())[0]
        sys.stdout.write(f"registered with the token {token}\n")
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.flush()
    cell.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
