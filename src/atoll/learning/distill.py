"""Learning from what others say of a row: cross-correlation of logits, divergences, distances.

Letters follow sections b and d of the FCCL specification: Z are logits (rows, classes), M their
cross-correlation matrix, q and p the softmax of student and teacher. What teachers say of the rows
of a batch stands beside them, in `own`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rows import Rows
from atoll.learning.losses import cross_entropy
from atoll.learning.models import Architecture

__all__ = [
    "DISTANCES",
    "correlation",
    "correlation_loss",
    "divergence",
    "mutual_loss",
    "said",
    "taught_loss",
]

CHUNK = {"cpu": 512, "cuda": 2048}  # rows of a picture network in one pass without gradient
LEAST = 1e-8  # a column of logits with a smaller norm is constant
ROUNDINGS = 16  # of a mean over rows: at most 4.5 were seen, over up to 100,000 equal ones


def correlation(z: Tensor, target: Tensor) -> Tensor:
    """M[u, v]: Pearson's correlation over the batch of column u of z with column v of the target.

    A column that is constant, to the precision of its type, has correlation 0 with all.
    """
    return _unit_columns(z).mT @ _unit_columns(target)


def _unit_columns(z: Tensor) -> Tensor:
    centred = z - z.mean(-2, keepdim=True)
    norm = centred.norm(dim=-2, keepdim=True)
    rounding = ROUNDINGS * torch.finfo(z.dtype).eps * z.detach().norm(dim=-2, keepdim=True)
    moving = norm > rounding.clamp(min=LEAST)
    return torch.where(moving, centred, 0) / torch.where(moving, norm, 1)


def correlation_loss(m: Tensor, strength: float, target: float = -1.0) -> Tensor:
    """L_col: the diagonal is pushed to 1, everything else, `strength` times as hard, to target."""
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    away = ((m - target) ** 2).sum((-2, -1)) - ((diagonal - target) ** 2).sum(-1)
    return ((1 - diagonal) ** 2).sum(-1) + strength * away


def divergence(
    teacher: Tensor, student: Tensor, share: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """KL(softmax(teacher) || softmax(student)), summed over classes, the mean over rows."""
    log_p, log_q = (F.log_softmax(z / temperature, -1) for z in (teacher, student))
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    return each.mean(-1) if share is None else (each * share).sum(-1) / share.sum(-1)


# What a student loses on a public batch, given its logits and those it should have.
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda z, target: (z - target).abs().mean(),
    "mse": lambda z, target: ((z - target) ** 2).mean(),
    "kl": lambda z, target: divergence(target, z),
}


def taught_loss(
    weights: Mapping[str, Tensor],
    batch: Rows,
    *,
    network: Architecture,
    truth: float = 1.0,
    strengths: tuple[float, ...] = (),
    temperature: float = 1.0,
) -> Tensor:
    """L_loc: truth * L_ce + the divergence from each teacher, times its strength.

    `batch.own` has the logits of the teachers side by side; where all strengths are 0 there is no
    teacher, and the loss is the plain one bit for bit.
    """
    z = network(weights, batch.x)
    loss = cross_entropy(z, batch)
    if truth != 1.0:
        loss = truth * loss
    classes = z.shape[-1]
    for number, strength in enumerate(strengths):
        if strength:
            teacher = batch.own[..., number * classes : (number + 1) * classes]
            loss = loss + strength * divergence(teacher, z, batch.share, temperature)
    return loss


def mutual_loss(
    weights: Mapping[str, Tensor],
    batch: Rows,
    *,
    own: Architecture,
    shared: Architecture,
    truths: tuple[float, float],
) -> Tensor:
    """L_i + L_phi of FML: two networks, `own` and `shared`, each by the labels and by the other.

    Each is truth * CE(q, y) + (1 - truth) * KL(partner || q) with the partner's output held fixed,
    so no gradient runs from one network into the other.
    """
    both = [own(_below("own", weights), batch.x), shared(_below("shared", weights), batch.x)]
    losses = [
        truth * cross_entropy(z, batch) + (1 - truth) * divergence(partner.detach(), z, batch.share)
        for truth, z, partner in zip(truths, both, both[::-1], strict=True)
    ]
    return losses[0] + losses[1]


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {n[len(start) :]: tensor for n, tensor in weights.items() if n.startswith(start)}


@torch.no_grad()
def said(network: Architecture, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The logits for many rows, a bounded number at a time.

    cuDNN does not try its ways here: test sets differ in size, and each size would be tried.
    """
    tried, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        parts = x.split(CHUNK.get(x.device.type, 512))
        return torch.cat([network(weights, part) for part in parts])
    finally:
        torch.backends.cudnn.benchmark = tried
