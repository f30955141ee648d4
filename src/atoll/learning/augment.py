"""Identical random augmentation of public images at every participant, from a shared stream."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream

__all__ = ["strongly", "varied"]

ANGLE = 15.0  # maximum degrees
EDGE = 8  # a crop shifts by an eighth of the side: 4 of 32 pixels


def varied(x: Tensor, stream: Stream) -> Tensor:
    """Images randomly shifted, flipped and rotated; pixels from outside are black."""
    draws, (rows, _, height, width) = stream.numpy(), x.shape
    most = (height // EDGE, width // EDGE)
    moves = [torch.from_numpy(draws.integers(-m, m + 1, rows)).to(x.device) for m in most]
    mirrored = torch.from_numpy(draws.random(rows) < 0.5).to(x.device)
    angles = draws.uniform(-ANGLE, ANGLE, rows)
    x = _moved(x, *moves)
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    return _turned(x, angles)


def strongly(x: Tensor, stream: Stream) -> Tensor:
    """Like `varied`, with a quarter of each image covered and its contrast changed."""
    x, draws = varied(x, stream), stream.child("strong").numpy()
    rows, _, height, width = x.shape
    factor = torch.from_numpy(draws.uniform(0.5, 1.5, (rows, 1, 1, 1))).to(x)
    x = ((x - 0.5) * factor + 0.5).clamp(0, 1)
    top, left = draws.integers(0, height, rows), draws.integers(0, width, rows)
    down, right = np.arange(height), np.arange(width)
    tall = np.abs(down[None] - top[:, None]) < height // 4
    wide = np.abs(right[None] - left[:, None]) < width // 4
    covered = torch.from_numpy(tall[:, None, :, None] & wide[:, None, None, :]).to(x.device)
    return torch.where(covered, x.new_tensor(0.5), x)


def _moved(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    rows, channels, height, width = x.shape
    where = torch.arange(height, device=x.device)[None] + down[:, None]
    inside = (where >= 0) & (where < height)
    index = where.clamp(0, height - 1)[:, None, :, None].expand(rows, channels, height, width)
    x = x.gather(2, index) * inside[:, None, :, None]
    where = torch.arange(width, device=x.device)[None] + right[:, None]
    inside = (where >= 0) & (where < width)
    index = where.clamp(0, width - 1)[:, None, None, :].expand(rows, channels, height, width)
    return x.gather(3, index) * inside[:, None, None, :]


def _turned(x: Tensor, degrees: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Tensor:
    angle = np.deg2rad(degrees)
    zero = np.zeros_like(angle)
    rows = [[np.cos(angle), -np.sin(angle), zero], [np.sin(angle), np.cos(angle), zero]]
    theta = torch.from_numpy(np.array(rows).transpose(2, 0, 1).copy()).to(x)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", align_corners=False)
