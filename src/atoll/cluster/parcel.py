"""Packs a run's folder into bytes, for nodes without the driver's disk. Uses no pickle."""

import json
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.integrity import GROWING
from atoll.core.record import CHECKPOINT, NAMES
from atoll.core.storage import disk_errors, write_whole

__all__ = ["pack", "unpack"]

RESULT = "result.json"  # marks the end of a run; written last


def pack(folder: Path) -> bytes:
    """Pack the files of a run; reads the checkpoint first, so growing files include its state."""
    contents = {}
    for name in (CHECKPOINT, *(name for name in NAMES if name != CHECKPOINT)):
        path = folder / name
        if path.exists():
            with disk_errors(path):
                contents[name] = path.read_bytes()
    head = json.dumps({name: len(content) for name, content in contents.items()})
    return b"\n".join([head.encode(), b"".join(contents.values())])


def unpack(parcel: bytes, folder: Path) -> None:
    """Write each file of a parcel atomically, the checkpoint after the lines it depends on."""
    contents = _contents(parcel, folder)
    if not contents:
        return
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    late = (CHECKPOINT, RESULT)
    order = [*(name for name in contents if name in GROWING)]
    order += [name for name in contents if name not in (*GROWING, *late)]
    order += [name for name in late if name in contents]
    for name in order:
        write_whole(folder / name, contents[name])


def _contents(parcel: bytes, folder: Path) -> dict[str, bytes]:
    """The files of a parcel; refuses names that are not in a record, and wrong lengths."""
    head, _, body = parcel.partition(b"\n")
    lengths = json.loads(head) if head else {}
    if not set(lengths) <= set(NAMES) or sum(lengths.values()) != len(body):
        what = "what a node sent is not the record of a run"
        raise UserError(what, str(folder), "check that all nodes have the same atoll")
    contents, start = {}, 0
    for name, length in lengths.items():
        contents[name] = body[start : start + length]
        start += length
    return contents
