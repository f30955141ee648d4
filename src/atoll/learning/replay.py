"""Terms by which a server replays old classes from their prototypes, without old rows.

PASS (Zhu et al., CVPR 2021), FedSpace (Shenaj et al., CVPR workshops 2023) and FedProK (Gao et
al., 2024) as section h of V-LETO's specification carries them over to split networks.
"""

import torch
from torch import Tensor

from atoll.core.rng import below, normals

__all__ = ["contrast", "noisy", "picked", "radius", "translated", "turned", "updated"]

NEW = 0.1  # FedSpace: weight of a new prototype in the running mean


def noisy(prototypes: Tensor, size: float | Tensor, key: Tensor) -> Tensor:
    """Prototypes with Gaussian noise of this size, drawn from the key."""
    return prototypes + size * normals(key, tuple(prototypes.shape)).to(prototypes.dtype)


def picked(old: Tensor, count: int, key: Tensor) -> Tensor:
    """Old classes drawn uniformly, as many as requested."""
    return old[below(len(old), key, count)]


def radius(embeddings: Tensor, y: Tensor, means: Tensor) -> float:
    """PASS: the root of the mean variance of an embedding's coordinate within its class."""
    spread, kinds = (embeddings - means[y]).double() ** 2, y.unique()
    within = [spread[y == kind].sum(1).mean() for kind in kinds]  # trace of the covariance
    return float((torch.stack(within).mean() / embeddings.shape[1]).sqrt())


def contrast(rows: Tensor, y: Tensor, current: int) -> Tensor:
    """FedSpace: supervised contrast on the sphere, temperature 1.

    The first `current` rows are the batch; anchors are all rows of the classes that it has.
    """
    unit = _directions(rows)
    near, same = unit @ unit.T, y[:, None] == y[None, :]
    anchors = same[:, :current].any(1)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    logs, same = torch.log_softmax(near.masked_fill(itself, -torch.inf), -1), same & ~itself
    anchors = anchors & same.any(1)
    pulled = torch.where(same, logs, 0).sum(1) / same.sum(1).clamp(min=1)
    # no pair to compare: 0
    return -torch.where(anchors, pulled, 0).sum() / anchors.sum().clamp(min=1)


def _directions(rows: Tensor) -> Tensor:
    """Rows normalised to length 1; a zero row stays zero and gets no gradient."""
    length = rows.norm(dim=-1, keepdim=True)
    nonzero = length > 0
    return torch.where(nonzero, rows, 0) / torch.where(nonzero, length, 1)


def translated(embeddings: Tensor, away: Tensor, towards: Tensor) -> Tensor:
    """FedProK: embeddings moved from their class to another, without gradient."""
    return (embeddings + towards - away).detach()


def turned(x: Tensor) -> Tensor:
    """Images with each part rotated by 180 degrees, which a client can do with its part alone."""
    return torch.flip(x, (-2, -1))


def updated(rule: str, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """Prototypes at the end of a stage, from those before and the class means, each with counts.

    PASS never changes a prototype, FedProK weighs by rows, FedSpace takes a running mean.
    """
    (means, counts), (fresh, arrived) = old, new
    mixed = means
    if rule == "fedprok":
        both = (counts + arrived)[:, None]  # of a known class at least 1
        mixed = (counts[:, None] * means + arrived[:, None] * fresh) / both
    elif rule == "fedspace":
        running = (1 - NEW) * means + NEW * fresh
        mixed = torch.where((arrived > 0)[:, None], running, means)
    return torch.where((counts > 0)[:, None], mixed, fresh).to(fresh)
