"""Distillation: cross-correlation of logits, divergence from teachers, and the loss with both.

Letters follow sections b and d of the FCCL specification: Z are logits (rows, classes), M their
cross-correlation matrix, q and p the softmax of student and teacher.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rows import Rows
from atoll.learning.losses import label_loss, squared_error
from atoll.learning.models import Architecture

__all__ = [
    "correlation",
    "correlation_loss",
    "disagreement",
    "distillation_loss",
    "divergence",
    "divergences",
    "logits",
]

CHUNK = {"cpu": 512, "cuda": 2048}  # images per pass without gradient
LEAST = 1e-8  # a column of logits with a smaller norm is constant
ROUNDINGS = 16  # of a mean over rows: at most 4.5 measured, over up to 100,000 equal ones


def correlation(z: Tensor, target: Tensor) -> Tensor:
    """Eq. 1: M[u, v] is Pearson's correlation of column u of z with column v of the target.

    A column that is constant up to rounding has zero correlation with all columns.
    """
    return _unit_columns(z).mT @ _unit_columns(target)


def _unit_columns(z: Tensor) -> Tensor:
    centred = z - z.mean(-2, keepdim=True)
    norm = centred.norm(dim=-2, keepdim=True)
    rounding = ROUNDINGS * torch.finfo(z.dtype).eps * z.detach().norm(dim=-2, keepdim=True)
    moving = norm > rounding.clamp(min=LEAST)
    return torch.where(moving, centred, 0) / torch.where(moving, norm, 1)


def correlation_loss(m: Tensor, strength: float, target: float = -1.0) -> Tensor:
    """Eq. 2: L_col = sum_u (1 - M[u, u])^2 + strength * sum_{u != v} (M[u, v] - target)^2."""
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    off_diagonal = ((m - target) ** 2).sum((-2, -1)) - ((diagonal - target) ** 2).sum(-1)
    return ((1 - diagonal) ** 2).sum(-1) + strength * off_diagonal


def divergences(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of each row."""
    log_p, log_q = (F.log_softmax(z / temperature, -1) for z in (teacher, student))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def divergence(
    teacher: Tensor, student: Tensor, share: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """The mean over rows of KL(softmax(teacher) || softmax(student))."""
    each = divergences(teacher, student, temperature)
    return each.mean(-1) if share is None else (each * share).sum(-1) / share.sum(-1)


def disagreement(teacher: Tensor, student: Tensor, batch: Rows) -> Tensor:
    """The distance of a student from its teacher: KL for classes, squared error for numbers."""
    if batch.y.is_floating_point():
        return squared_error(student, replace(batch, y=teacher[..., 0]))
    return divergence(teacher, student, batch.share)


def distillation_loss(
    weights: Mapping[str, Tensor],
    batch: Rows,
    *,
    network: Architecture,
    truth: float = 1.0,
    strengths: tuple[float, ...] = (),
    temperature: float = 1.0,
) -> Tensor:
    """L_loc = truth * L_label + sum_t strengths[t] * KL(teacher t || student).

    `batch.own` has the logits of the teachers side by side. A teacher of strength 0 is not read, so
    so without any teacher the loss is exactly the label loss.
    """
    z = network(weights, batch.x)
    loss = label_loss(z, batch)
    if truth != 1.0:
        loss = truth * loss
    classes = z.shape[-1]
    for number, strength in enumerate(strengths):
        if strength:
            teacher = batch.own[..., number * classes : (number + 1) * classes]
            loss = loss + strength * divergence(teacher, z, batch.share, temperature)
    return loss


@torch.no_grad()
def logits(network: Architecture, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The logits of many rows in chunks, without gradient.

    Disables cuDNN benchmarking: test sets differ in size, and each size would be benchmarked.
    """
    if torch.compiler.is_compiling():  # a traced graph accepts any number of rows, without chunks
        return network(weights, x)
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        chunks = x.split(CHUNK.get(x.device.type, 512))
        return torch.cat([network(weights, chunk) for chunk in chunks])
    finally:
        torch.backends.cudnn.benchmark = benchmark
