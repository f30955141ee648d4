"""Public data: images that all participants have, in one order, without labels."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.core.errors import UserError
from atoll.core.options import AtLeastOne
from atoll.core.rng import Stream
from atoll.core.rows import Public
from atoll.data.dataset import Dataset
from atoll.data.own.images import unlabelled
from atoll.data.pictures import fitted, patterns
from atoll.data.scaling import Scale, colours

__all__ = ["PublicOptions", "public"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PublicOptions:
    """The images that all participants have."""

    name: str = "patterns"  # a data set of images, its labels dropped; patterns: made up
    rows: AtLeastOne = 5000  # how many, drawn once for each seed from those that are not for tests
    images: str = ""  # instead: a folder, npz or Parquet file of your own, the same at all parts


def public(
    options: PublicOptions,
    like: Dataset,
    scale: Scale,
    seed: int,
    load: Callable[[str], Dataset],
) -> Public:
    """The images in the shape of those of `like`; no label is ever read.

    `load` loads a data set by its name.
    """
    if like.kind != "image":
        remedy = "choose a data set of images; see atoll list data"
        raise UserError("public data are images and the data are not", "public", remedy)
    shape, stream = tuple(like.x.shape[1:]), Stream.of(seed, "public")
    if options.images or options.name != "patterns":
        images, pool = _candidates(options, shape, load)
        if options.rows > len(pool):
            what = f"'{options.images or options.name}' has {len(pool)} images to draw from"
            raise UserError(f"{what}, not {options.rows}", "public.rows", "ask for fewer")
        x = fitted(images[stream.numpy().permutation(pool)[: options.rows]], shape)
    else:
        x = patterns(shape, options.rows, stream.numpy())
    digest = hashlib.sha256(f"{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
    mean, deviation = colours(scale, shape[0], options.name)
    values = torch.from_numpy(np.ascontiguousarray(x)).float() / 255
    return Public(values, torch.tensor(mean), torch.tensor(deviation), digest.hexdigest())


def _candidates(
    options: PublicOptions, shape: tuple[int, ...], load: Callable[[str], Dataset]
) -> tuple[Array, Array]:
    """Images, and the numbers of those that may be drawn."""
    if options.images:
        x = unlabelled(Path(options.images), (shape[0], shape[1], shape[2]))
        return x, np.arange(len(x))
    source = load(options.name)
    if source.kind != "image":
        raise UserError(f"'{options.name}' has no images", "public.name", "choose another")
    pool = np.arange(len(source)) if source.test is None else np.flatnonzero(~source.test)
    return source.x, pool
