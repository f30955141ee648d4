"""Arithmetic on pictures as bytes: other sizes, other numbers of channels, generated shifts."""

from typing import Any

import numpy as np

__all__ = ["fitted", "noisy", "patches", "patterns", "rotated", "thick"]

Array = np.ndarray[Any, Any]  # (rows, channels, height, width) uint8
CHUNK = 4096  # rows that are scaled at a time


def _torch() -> tuple[Any, Any]:
    """PyTorch and its functions, imported at first use: reports import this package without it."""
    import torch  # noqa: PLC0415

    return torch, torch.nn.functional


def _bytes(values: Any) -> Array:
    torch, _ = _torch()
    pixels: Array = values.round().clamp(0, 255).to(torch.uint8).numpy()
    return pixels


def fitted(x: Array, shape: tuple[int, ...]) -> Array:
    """Pictures of this shape (channels, height, width): scaled, grey repeated, colours averaged."""
    channels, size = shape[0], (shape[1], shape[2])
    if x.shape[1] != channels and channels == 1:
        x = np.round(x.mean(1, keepdims=True)).astype(np.uint8)
    if x.shape[2:] != size:
        torch, functional = _torch()
        parts = [torch.from_numpy(x[i : i + CHUNK]).float() for i in range(0, len(x), CHUNK)]
        kwargs: Any = {"mode": "bilinear", "align_corners": False, "antialias": True}
        x = np.concatenate([_bytes(functional.interpolate(part, size, **kwargs)) for part in parts])
    return x if x.shape[1] == channels else x.repeat(channels // x.shape[1], axis=1)


def rotated(x: Array, degrees: float) -> Array:
    """Pictures turned by one angle; what comes in from outside is black."""
    torch, functional = _torch()
    angle = np.deg2rad(degrees)
    turn = [[np.cos(angle), -np.sin(angle), 0.0], [np.sin(angle), np.cos(angle), 0.0]]
    theta = torch.tensor(turn, dtype=torch.float32).expand(len(x), 2, 3)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return _bytes(functional.grid_sample(torch.from_numpy(x).float(), grid, align_corners=False))


def thick(x: Array) -> Array:
    """Pictures whose bright strokes are one pixel wider on every side."""
    torch, functional = _torch()
    return _bytes(functional.max_pool2d(torch.from_numpy(x).float(), 3, 1, 1))


def noisy(x: Array, deviation: float, generator: np.random.Generator) -> Array:
    """Pictures with normal noise on every pixel."""
    torch, _ = _torch()
    return _bytes(torch.from_numpy(x + deviation * generator.normal(size=x.shape)))


def patterns(shape: tuple[int, ...], rows: int, generator: np.random.Generator) -> Array:
    """Made-up pictures: smooth random spots with a little noise."""
    torch, functional = _torch()
    coarse = torch.from_numpy(generator.uniform(0, 255, (rows, shape[0], 3, 3)))
    smooth = functional.interpolate(
        coarse, (shape[1], shape[2]), mode="bilinear", align_corners=True
    )
    smooth = (smooth - 127.5) * torch.from_numpy(generator.uniform(0.5, 2, (rows, 1, 1, 1))) + 127.5
    return _bytes(smooth + 20 * torch.from_numpy(generator.normal(size=(rows, *shape))))


def patches(photo: Array, rows: int, size: int, generator: np.random.Generator) -> Array:
    """Squares cut at random places and scales out of one photo (channels, height, width)."""
    squares = []
    for _ in range(rows):
        side = int(generator.integers(size, 6 * size))
        top = int(generator.integers(photo.shape[1] - side + 1))
        left = int(generator.integers(photo.shape[2] - side + 1))
        square = photo[None, :, top : top + side, left : left + side]
        squares.append(fitted(np.ascontiguousarray(square), (photo.shape[0], size, size)))
    return np.concatenate(squares)
