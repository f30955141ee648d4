"""Answers spoilt on purpose, to rehearse what must be refused; the site itself asks for it."""

import dataclasses
import os
import time

import torch
from safetensors.torch import load, save

from atoll.core.messages import Packet

__all__ = ["spoilt"]


def spoilt(packet: Packet) -> Packet:
    """The packet as it is; or spoilt where ATOLL_REHEARSAL says how."""
    how, _, amount = os.environ.get("ATOLL_REHEARSAL", "").partition("=")
    if not how:
        return packet
    if how == "slow":
        time.sleep(float(amount))
        return packet
    tensors = load(packet.block)
    floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    if not floats:
        return packet
    name = min(floats)
    if how == "nan":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    elif how == "shape":
        tensors[name] = tensors[name].flatten()[:1].repeat(3)
    elif how == "large":
        tensors[name] = torch.cat([tensors[name]] * 10)
    elif how == "unknown":
        tensors["slipped in"] = torch.zeros(1)
    return dataclasses.replace(packet, block=save(tensors))
