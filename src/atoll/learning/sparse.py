"""Tensors that are mostly zero, in fewer bytes: whichever of two codings is the smaller."""

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import Tensors

__all__ = ["coded", "decoded"]


def coded(flat: Tensor) -> Tensors:
    """The nonzero values, and where they stand: 4 bytes each, or one bit for every place."""
    places = flat.nonzero().flatten()
    values = flat[places]
    if 4 * len(places) <= len(flat) / 8:
        return {"values": values, "places": places.to(torch.int32)}
    bits = np.packbits((flat != 0).cpu().numpy())
    return {"values": values, "bits": torch.from_numpy(bits)}


def decoded(code: Tensors, count: int) -> Tensor:
    """The tensor of so many places; a code that does not fit it is a ValueError."""
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
