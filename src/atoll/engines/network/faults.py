"""Corrupts a site's answers on its own request, to rehearse refusals.

It can also copy answers to a separate folder, to inspect what leaves.
"""

import dataclasses
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load, save

from atoll.core.messages import Packet

__all__ = ["spoilt"]


def _said() -> tuple[str, str]:
    """How to corrupt answers: ATOLL_REHEARSAL, or the content of the file it names."""
    setting = os.environ.get("ATOLL_REHEARSAL", "")
    if setting.startswith("@"):
        setting = Path(setting[1:]).read_text().strip()
    kind, _, amount = setting.partition("=")
    return kind, amount


def _copied(packet: Packet, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{len(list(folder.iterdir())):06d}"
    (folder / name).write_bytes(packet.header + packet.block)


def spoilt(packet: Packet) -> Packet:
    """The packet, corrupted if this site rehearses that fault."""
    kind, amount = _said()
    if kind == "slow":
        time.sleep(float(amount))
    if kind == "copy":
        _copied(packet, Path(amount))
    if kind in ("", "slow", "copy"):
        return packet
    if kind == "unreadable":
        return dataclasses.replace(packet, block=b"these are no tensors")
    tensors = load(packet.block)
    name = min((n for n, tensor in tensors.items() if tensor.is_floating_point()), default="")
    if not name:
        return packet
    if kind == "times":  # a false answer with the right shapes: finite numbers, far too large
        grown = {n: t * float(amount) for n, t in tensors.items() if t.is_floating_point()}
        return dataclasses.replace(packet, block=save(tensors | grown))
    one = tensors[name]
    changes = {
        "nan": {name: torch.full_like(one, float("nan"))},
        "value": {name: torch.full_like(one, float(amount or 0))},
        "shape": {name: one.flatten()[:1].repeat(3)},
        "large": {name: torch.cat([one] * 10)},
        "unknown": {"slipped in": torch.zeros(1)},
    }
    return dataclasses.replace(packet, block=save(tensors | changes[kind]))
