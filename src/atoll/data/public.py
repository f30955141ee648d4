"""Public data: images that every part has, in one order, without labels."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from atoll import data
from atoll.core.errors import UserError
from atoll.core.options import AtLeastOne
from atoll.core.rng import Stream
from atoll.core.rows import Public
from atoll.data.dataset import Dataset
from atoll.data.pictures import fitted, patterns
from atoll.data.site import Scale, colours

__all__ = ["PublicOptions", "public"]


@dataclass(frozen=True)
class PublicOptions:
    """Which images all parts have in common."""

    name: str = "patterns"  # a data set of images, its labels dropped; patterns: made up
    rows: AtLeastOne = 5000  # how many, drawn once for each seed from those that are not for tests


def public(options: PublicOptions, like: Dataset, scale: Scale, seed: int) -> Public:
    """The images in the shape of the private ones; no label is ever read."""
    if like.kind != "image":
        remedy = "choose a data set of images; see atoll list data"
        raise UserError("public data are images and the data are not", "public", remedy)
    shape, stream = tuple(like.x.shape[1:]), Stream.of(seed, "public")
    if options.name == "patterns":
        x = patterns(shape, options.rows, stream.numpy())
    else:
        source = data.load(options.name)
        if source.kind != "image":
            raise UserError(f"'{options.name}' has no images", "public.name", "choose another")
        pool = np.arange(len(source)) if source.test is None else np.flatnonzero(~source.test)
        if options.rows > len(pool):
            what = f"'{options.name}' has {len(pool)} images to draw from, not {options.rows}"
            raise UserError(what, "public.rows", "ask for fewer")
        x = fitted(source.x[stream.numpy().permutation(pool)[: options.rows]], shape)
    digest = hashlib.sha256(f"{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
    mean, deviation = colours(scale, shape[0], options.name)
    values = torch.from_numpy(np.ascontiguousarray(x)).float() / 255
    return Public(values, torch.tensor(mean), torch.tensor(deviation), digest.hexdigest())
