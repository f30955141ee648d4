"""A test's hand inside a process of NVFlare: Python imports this file where PYTHONPATH names it.

A thread waits until the process has a cell, then does what files in a folder ask for: send any
message from that cell, with any header, or list what the process has registered.
"""

import base64
import gc
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def cells() -> tuple[Any, Any]:
    """The process's own cell: its core, and the whole with streams."""
    core = sys.modules["nvflare.fuel.f3.cellnet.core_cell"].CoreCell.ALL_CELLS
    own = next(iter(core.values()))
    whole = sys.modules["nvflare.fuel.f3.cellnet.cell"].Cell
    return own, next(x for x in gc.get_objects() if type(x) is whole and x.core_cell is own)


def watching(core: Any) -> None:
    """Remember the tokens that messages of others carry, from the first message on."""
    core.seen = {}

    def remember(message: Any) -> None:
        keys = ("client_name", "__token__", "__token_signature__", "ssid")
        core.seen[message.headers.get("client_name")] = {
            key: message.headers[key] for key in keys if key in message.headers
        }

    core.add_incoming_filter("*", "*", remember)


def forging(core: Any) -> Any:
    """Headers that every request of a thread has, whatever NVFlare has put there before."""
    if not hasattr(core, "forged"):
        core.forged = {}

        def forge(message: Any) -> None:
            message.headers.update(core.forged.get(threading.get_ident(), {}))

        core.add_outgoing_request_filter("*", "*", forge)
    return core.forged


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)[:2000]


def told(reply: Any) -> dict[str, Any]:
    headers = {key.removeprefix("cn__"): plain(value) for key, value in reply.headers.items()}
    body = getattr(reply.payload, "body", reply.payload)
    return {"code": headers.get("return_code"), "error": headers.get("error"), "body": plain(body)}


def admin(asked: dict[str, Any]) -> dict[str, Any]:
    """A command for a site's main process."""
    from nvflare.private.admin_defs import Message  # noqa: PLC0415 - not before the process has it
    from nvflare.private.defs import CellChannel, new_cell_message  # noqa: PLC0415

    core, _ = cells()
    body = base64.b64decode(asked["zip"]) if "zip" in asked else asked.get("body", "")
    command = Message(topic=asked["topic"], body=body)
    command.headers.update(asked.get("headers", {}))
    reply = core.send_request(
        channel=CellChannel.CLIENT_MAIN, topic=asked.get("topic_header", asked["topic"]),
        target=asked["target"], request=new_cell_message({}, command), timeout=asked["seconds"],
    )  # fmt: skip
    return told(reply)


def request(asked: dict[str, Any]) -> dict[str, Any]:
    """Any plain message."""
    from nvflare.private.defs import new_cell_message  # noqa: PLC0415

    message = new_cell_message({}, asked.get("payload"))
    core, _ = cells()
    return told(core.send_request(
        channel=asked["channel"], topic=asked["topic"], target=asked["target"], request=message,
        timeout=asked["seconds"],
    ))  # fmt: skip


def stream(asked: dict[str, Any]) -> dict[str, Any]:
    """Any message that goes as a stream; of bytes where a size is asked for."""
    from nvflare.private.defs import new_cell_message  # noqa: PLC0415

    payload = bytes(asked["size"]) if "size" in asked else asked.get("payload")
    if isinstance(payload, dict):
        payload = {key: read(one) for key, one in payload.items()}
    _, cell = cells()
    return told(cell._send_request(
        channel=asked["channel"], target=asked["target"], topic=asked["topic"],
        request=new_cell_message(asked.get("headers", {}), payload), timeout=asked["seconds"],
    ))  # fmt: skip


def read(value: Any) -> Any:
    """JSON has no bytes: {"base64": ...} stands for them."""
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"])
    return {key: read(one) for key, one in value.items()} if isinstance(value, dict) else value


def guess(asked: dict[str, Any]) -> dict[str, Any]:
    """Acknowledge or end streams of a process to others: their numbers follow those to this one."""
    from nvflare.fuel.f3.message import Message  # noqa: PLC0415
    from nvflare.fuel.f3.streaming.stream_const import (  # noqa: PLC0415
        StreamDataType,
        StreamHeaderKey,
    )

    core, _ = cells()
    streams: dict[str, Any] = {}

    def remember(message: Any) -> None:
        if message.headers.get("cn__topic") == "sm__DATA":
            streams["last"] = dict(message.headers)

    core.add_incoming_filter("sm__STREAM", "*", remember)
    kind = StreamDataType.ERROR if asked["topic"] == "sm__ERROR" else StreamDataType.ACK
    sent, end = 0, time.monotonic() + asked["seconds"]
    while time.monotonic() < end:
        time.sleep(0.001)
        last = streams.get("last", {})
        for ahead in range(1, 9) if last else ():
            headers = {
                StreamHeaderKey.STREAM_ID: last[StreamHeaderKey.STREAM_ID] + ahead,
                StreamHeaderKey.DATA_TYPE: kind,
                StreamHeaderKey.SEQUENCE: 0,
                StreamHeaderKey.OFFSET: 1 << 40,
                StreamHeaderKey.CHANNEL: last[StreamHeaderKey.CHANNEL],
                StreamHeaderKey.TOPIC: last[StreamHeaderKey.TOPIC],
            }
            core.fire_and_forget("sm__STREAM", asked["topic"], asked["target"], Message(headers))
            sent += 1
    return {"sent": sent, "last": plain(streams.get("last"))}


def handlers(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything that this process has registered to take messages, as it is now."""
    core, cell = cells()
    found = [key.rpartition(":")[::2] for key in core.req_reg.reg]
    found += [key.partition(":")[::2] for key in cell.byte_receiver.registry.reg]
    if "admin:*" in core.req_reg.reg:
        agent = sys.modules["nvflare.private.fed.client.admin"].FedAdminAgent
        (one,) = (x for x in gc.get_objects() if type(x) is agent)
        found += [("admin", topic) for topic in one.processors]
    for module, owner, channel in (
        ("nvflare.private.fed.client.admin_commands", "AdminCommands", "client_command"),
        ("nvflare.private.fed.server.server_commands", "ServerCommands", "server_command"),
    ):
        if f"{channel}:*" in core.req_reg.reg:
            commands = getattr(sys.modules[module], owner).commands
            found += [(channel, command.get_command_name()) for command in commands]
    return {"handlers": sorted(set(found)), "name": core.my_info.fqcn}


DO = {
    "admin": admin, "guess": guess, "handlers": handlers, "request": request, "stream": stream,
}  # fmt: skip


def serve(folder: Path) -> None:
    module = "nvflare.fuel.f3.cellnet.core_cell"
    while module not in sys.modules or not getattr(sys.modules[module], "CoreCell", None):
        time.sleep(0.2)
    cell = sys.modules[module].CoreCell
    while not cell.ALL_CELLS:
        time.sleep(0.2)
    name, _, job = next(iter(cell.ALL_CELLS)).partition(".")
    watching(next(iter(cell.ALL_CELLS.values())))
    own = folder / (f"{name}.job" if job else name)
    own.mkdir(parents=True, exist_ok=True)
    (own / "name").write_text(f"{name}.{job}" if job else name)
    while True:
        for path in sorted(own.glob("*.ask")):
            threading.Thread(target=answer, args=(path.rename(path.with_suffix(".taken")),)).start()
        time.sleep(0.05)


def answer(path: Path) -> None:
    asked = json.loads(path.read_text())
    try:
        core = cells()[0]
        forged, replayed = forging(core), asked.get("replay")
        forged[threading.get_ident()] = {**core.seen.get(replayed, {}), **asked.get("forge", {})}
        if replayed and replayed not in core.seen:
            raise LookupError(f"no token of {replayed} was seen: {list(core.seen)}")
        said = DO[asked["do"]]({"seconds": 8, **asked})
    except Exception as error:
        said = {"raised": f"{type(error).__name__}: {error}"}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(said))
    part.rename(path.with_suffix(".answer"))


def forge_plans(kind: str) -> None:
    """A coordinator's job that sends a plan of its own making; tests.attacks has the kinds."""
    module = "atoll.engines.network.remote"
    while not hasattr(sys.modules.get(module), "Remote"):
        time.sleep(0.01)
    from tests.attacks.plan_recovery import PLANS  # noqa: PLC0415 - not before atoll is imported

    honest = sys.modules[module].planned

    def planned(run: str, offers: Any, *further: Any) -> Any:
        plan = honest(run, offers, *further)
        return replace(PLANS[kind](next(iter(offers.values())), plan), key=plan.key)

    vars(sys.modules[module])["planned"] = planned


if "ATOLL_FORGED_PLAN" in os.environ:
    forgery = os.environ["ATOLL_FORGED_PLAN"]
    threading.Thread(target=forge_plans, args=(forgery,), daemon=True).start()
if "ATOLL_INSIDE" in os.environ:
    threading.Thread(target=serve, args=(Path(os.environ["ATOLL_INSIDE"]),), daemon=True).start()
