"""Named random streams: a draw depends on the names alone, not on earlier draws.

Permutations come from a counter: row i gets the 64-bit hash of (key, i), and the order of the
hashes is the order of the rows. The hash is whole-number arithmetic, so every device gives the
same order, and the orders of many clients can be drawn in one call. Noise and choices inside a
training step come from the same hash of a key that is a tensor, so that they need no host.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Stream", "below", "hashes", "normals", "permutations", "uniforms"]

Device = torch.device  # Stream has a method named torch


def _key(*names: str | int) -> int:
    """A signed 64-bit number that depends on every name and on their order."""
    text = "\x1f".join([_part(name) for name in names])
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )


def _part(name: str | int) -> str:
    if not isinstance(name, str):
        return f"int:{int(name)}"  # a whole number of numpy is the same name as Python's
    return "str:" + name.replace("\\", "\\\\").replace("\x1f", "\\x1f")  # no name ends early


@dataclass(frozen=True)
class Stream:
    """A place in the tree of names; its draws are functions of that place."""

    key: int

    @staticmethod
    def of(*names: str | int) -> "Stream":
        """The stream with these names, the seed first."""
        return Stream(_key(*names))

    def child(self, *names: str | int) -> "Stream":
        """The stream below this one with these further names."""
        return Stream(_key(self.key, *names))

    def numpy(self) -> np.random.Generator:
        """A numpy generator (counter-based) for first weights, splits and generated data."""
        return np.random.Generator(np.random.Philox(key=self.key & 0xFFFF_FFFF_FFFF_FFFF))

    def permutation(self, count: int, device: Device | None = None) -> Tensor:
        """The numbers 0..count-1 in this stream's order."""
        return permutations(torch.tensor([self.key], device=device), count)[0]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


# The multipliers of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit numbers.
_STEP, _FIRST, _SECOND = (
    _signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shift(bits: Tensor, count: int) -> Tensor:
    """A right shift that fills with zeros (torch's own copies the sign)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def hashes(keys: Tensor, numbers: Tensor) -> Tensor:
    """64 bits for each key and number, with broadcast shapes; equal on every device."""
    bits = keys + (numbers + 1) * _STEP
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def permutations(keys: Tensor, count: int) -> Tensor:
    """For each key one order of 0..count-1: (keys,) -> (keys, count), equal on every device."""
    index = torch.arange(count, device=keys.device, dtype=torch.int64)
    return torch.argsort(hashes(keys[:, None], index), dim=1, stable=True)


def uniforms(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers above 0 and below 1 in double precision, from one key: () -> shape."""
    numbers = torch.arange(math.prod(shape), device=key.device, dtype=torch.int64)
    return ((_shift(hashes(key, numbers), 11) + 0.5) * 2.0**-53).view(shape)


def normals(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers of the standard normal distribution in double precision (Box and Muller)."""
    length, angle = uniforms(key, (2, *shape))
    normal: Tensor = (-2 * length.log()).sqrt() * (2 * math.pi * angle).cos()
    return normal


def below(limit: int, key: Tensor, count: int) -> Tensor:
    """Whole numbers from 0 to limit - 1, each with equal chance."""
    numbers = torch.arange(count, device=key.device, dtype=torch.int64)
    return _shift(hashes(key, numbers), 1) % limit
