"""Terms by which a server rehearses old classes from their prototypes, without old rows.

PASS (Zhu et al., CVPR 2021), FedSpace (Shenaj et al., CVPR workshops 2023) and FedProK (Gao et
al., 2024) as section h of V-LETO's specification carries them over to split networks.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import Stream

__all__ = ["contrast", "noisy", "picked", "radius", "translated", "turned"]


def noisy(prototypes: Tensor, size: float, stream: Stream) -> Tensor:
    """Prototypes with Gaussian noise of this size."""
    drawn = stream.numpy().standard_normal(tuple(prototypes.shape))
    return prototypes + size * torch.from_numpy(drawn).to(prototypes)


def picked(old: Tensor, count: int, stream: Stream) -> Tensor:
    """Old classes, each with equal chance, as often as asked."""
    places = stream.numpy().integers(len(old), size=count)
    return old[torch.from_numpy(places).to(old.device)]


def radius(embeddings: Tensor, y: Tensor, means: Tensor) -> float:
    """PASS: the root of the mean variance of an embedding's coordinate within its class."""
    spread, kinds = (embeddings - means[y]).double() ** 2, y.unique()
    within = [spread[y == kind].sum(1).mean() for kind in kinds]  # trace of the covariance
    return float((torch.stack(within).mean() / embeddings.shape[1]).sqrt())


def contrast(rows: Tensor, y: Tensor, current: Tensor) -> Tensor:
    """FedSpace: supervised contrast on the sphere, anchors of current classes, temperature 1."""
    unit = F.normalize(rows, dim=-1)
    near = unit @ unit.T
    near = near.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), -torch.inf)
    logs = torch.log_softmax(near, -1)
    same = (y[:, None] == y[None, :]).fill_diagonal_(False)
    anchors = torch.isin(y, current) & same.any(1)
    if not anchors.any():
        return rows.sum() * 0  # no pair to compare
    pulled = torch.where(same, logs, torch.zeros_like(logs)).sum(1) / same.sum(1).clamp(min=1)
    return -pulled[anchors].mean()


def translated(embeddings: Tensor, away: Tensor, towards: Tensor) -> Tensor:
    """FedProK: embeddings moved from their class to another; no gradient runs back."""
    return (embeddings + towards - away).detach()


def turned(x: Tensor) -> Tensor:
    """Images with each part turned by 180 degrees, which a client can do with its part alone."""
    return torch.flip(x, (-2, -1))
