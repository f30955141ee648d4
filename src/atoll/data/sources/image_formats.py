"""Readers of the formats in which image sets are published.

An `.npz` without pickles holds x_train, y_train, x_test and y_test, images uint8 as N x H x W or
N x H x W x 3. IDX files, the CIFAR binaries, the Matlab files of SVHN and the text of USPS are read
as published.
"""

import gzip
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.data.sources.fetch import reading

__all__ = ["Parts", "read_parts"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Parts:
    """Images and labels of the two parts of a set, and where each image comes from if known."""

    x_train: Array  # (rows, channels, height, width) uint8
    y_train: Array
    x_test: Array
    y_test: Array
    group: Array | None = None  # train rows first
    groups: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # empty where the files do not say


def read_parts(paths: list[Path]) -> Parts:
    """Read the training and test part, in the format that the names of the files imply."""
    if paths[0].suffix == ".npz":
        return _npz(paths[0])
    if paths[0].name.startswith("cifar-"):
        return _cifar(paths[0], labels=2 if "100" in paths[0].name else 1)
    pairs = {".mat": _matlab, ".gz": _zip_code}
    if paths[0].suffix == ".mat" or paths[0].name.startswith("zip."):
        (x_train, y_train), (x_test, y_test) = (pairs[path.suffix](path) for path in paths)
        return Parts(x_train, y_train, x_test, y_test)
    arrays = [_idx(path) for path in paths]
    return Parts(arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3])


def _npz(path: Path) -> Parts:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        domains, classes = (
            tuple(arrays[key].tolist()) if key in arrays else ()
            for key in ("domain_names", "class_names")
        )
        return Parts(
            _channels_first(arrays["x_train"]),
            arrays["y_train"],
            _channels_first(arrays["x_test"]),
            arrays["y_test"],
            np.concatenate([arrays["d_train"], arrays["d_test"]]) if domains else None,
            domains,
            classes,
        )


def _channels_first(x: Array) -> Array:
    """N x H x W or N x H x W x C becomes N x C x H x W."""
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _idx(path: Path) -> Array:
    """The array in a gzipped IDX file: two zeros, 8 for bytes, the dimensions, sizes, content."""
    with reading(path):
        content = gzip.decompress(path.read_bytes())
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        if zeros != 0 or kind != 8:
            raise ValueError("not an IDX file of bytes")
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _cifar(path: Path, labels: int) -> Parts:
    """A binary CIFAR archive: a record is its labels (the fine one last) and 3,072 bytes."""
    with tarfile.open(path, "r:gz") as archive:
        blobs = {
            Path(member.name).name: np.frombuffer(stream.read(), dtype=np.uint8)
            for member in archive
            if member.name.endswith(".bin") and (stream := archive.extractfile(member)) is not None
        }
    sides: list[Array] = []
    for test in (False, True):
        names = [name for name in sorted(blobs) if name.startswith("test") is test]
        records = np.concatenate([blobs[name] for name in names]).reshape(-1, labels + 3_072)
        sides += [records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]]
    return Parts(sides[0], sides[1], sides[2], sides[3])


def _matlab(path: Path) -> tuple[Array, Array]:
    """SVHN as Matlab has it: X is (height, width, channels, rows), y has 10 for the digit 0."""
    from scipy.io import loadmat  # noqa: PLC0415 (few runs need it)

    with reading(path):
        arrays = loadmat(str(path), variable_names=("X", "y"))
        x, y = arrays["X"], arrays["y"].ravel().astype(np.int64)
        return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def _zip_code(path: Path) -> tuple[Array, Array]:
    """USPS as text: the digit, then 256 numbers from -1 to 1, separated by blanks."""
    with reading(path):
        lines = [line.split() for line in gzip.decompress(path.read_bytes()).splitlines()]
        table = np.array(lines, dtype=np.float64)
        x = np.round((table[:, 1:] + 1) * 127.5).astype(np.uint8)
        return x.reshape(-1, 1, 16, 16), table[:, 0].astype(np.int64)
