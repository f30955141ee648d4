"""Encodes sparse tensors in fewer bytes: the smaller of two encodings."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import BadMessageError
from atoll.core.messages import Tensors

__all__ = ["above_share", "coded", "decoded", "mean_of_sent", "trimmed", "widened"]


def coded(flat: Tensor) -> Tensors:
    """The nonzero values and their positions: 4 bytes each, or one bit for every entry."""
    places = flat.nonzero().flatten()
    values = flat[places]
    if 4 * len(places) <= len(flat) / 8:
        return {"values": values, "places": places.to(torch.int32)}
    bits = np.packbits((flat != 0).cpu().numpy())
    return {"values": values, "bits": torch.from_numpy(bits)}


def decoded(code: Tensors, count: int) -> Tensor:
    """Decode a tensor of this size; raises ValueError if the code does not fit."""
    values = code["values"]
    if "bits" in code:
        places = _set_bits(code["bits"], count).to(values.device)
    else:
        places = code["places"].long()
    fits = len(places) == len(values) and (
        not len(places) or (int(places.min()) >= 0 and int(places.max()) < count)
    )
    if not fits or bool((places[1:] <= places[:-1]).any()):
        raise ValueError(f"a code of {len(values)} values that does not fit {count} places")
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_put((places,), values)


def _set_bits(bits: Tensor, count: int) -> Tensor:
    if bits.dtype != torch.uint8 or len(bits) != -(-count // 8):
        raise ValueError(f"{len(bits)} bytes of {bits.dtype} for {count} places")
    return torch.from_numpy(np.flatnonzero(np.unpackbits(bits.cpu().numpy())))


def above_share(sizes: Tensor, share: float) -> Tensor:
    """Which sizes are above the quantile `share`.

    The quantile is one of the sizes: one that lies between two of them may be rounded to the upper.
    """
    return sizes > torch.quantile(sizes, share, interpolation="lower")


def trimmed(name: str, layer: Tensor, mask: Tensor) -> Tensors:
    """The kept filters of a layer, and a bit for each filter."""
    bits = np.packbits(mask.cpu().numpy())
    return {f"{name}/values": layer[mask], f"{name}/bits": torch.from_numpy(bits)}


def widened(name: str, channels: Tensors, like: Tensor, sender: str) -> Tensor:
    """A layer with the received filters, and zeros for the others."""
    count, shape = len(like), like.shape[1:]
    values, bits = channels.get(f"{name}/values"), channels.get(f"{name}/bits")
    if values is None or bits is None or len(bits) != -(-count // 8):
        raise BadMessageError(sender, f"filters of {name} without the bits that identify them")
    mask = torch.from_numpy(np.unpackbits(bits.cpu().numpy())[:count].astype(bool))
    if values.shape != (int(mask.sum()), *shape) or values.dtype != like.dtype:
        raise BadMessageError(sender, f"filters of {name} of shape {tuple(values.shape)}")
    layer = torch.zeros_like(like)
    layer[mask.to(like.device)] = values.to(like.device)
    return layer


def mean_of_sent(layers: Sequence[Tensor]) -> Tensor:
    """The mean over the clients that sent a filter; zero if none did."""
    together = torch.stack(list(layers)).double()
    sent = (together != 0).flatten(2).any(-1).sum(0).clamp(min=1)
    total: Tensor = together.sum(0) / sent.view(-1, *[1] * (together.dim() - 2))
    return total.to(layers[0].dtype)
