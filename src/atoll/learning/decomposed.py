"""Weights made of a shared base, a mask and a task's own part; others' parts join in by attention.

Yoon et al., Federated Continual Learning with Weighted Inter-client Transfer, ICML 2021 (FedWeIT);
Chaudhary et al., Federated Continual Learning for Text Classification via Selective Inter-client
Transfer, 2022 (FedSeIT). Names of weights:

    base/LAYER                  shared, (outputs, ...)
    now/mask/LAYER              of the current task, (outputs,); its sigmoid is what counts
    now/adaptive/LAYER          of the current task, as base
    now/alpha/LAYER             attention to each foreign slot, (slots,)
    now/bias/LAYER, now/dense/LAYER, now/foreign_bias/LAYER      private
    past/adaptive|mask|target/LAYER      of tasks before: one more axis in front
    foreign/LAYER               parts of others, constant, (slots, outputs, ...)
    noise                       key of the dropout of an epoch

Layers are conv3, conv4, conv5 (banks of filters), align3, align4, align5 and merge (projections)
and head. A stack of clients has one more axis in front of everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import hashes
from atoll.core.rows import Rows
from atoll.learning.losses import cross_entropy
from atoll.learning.models import linear
from atoll.learning.textcnn import KERNELS, Words, extremes, highest

__all__ = [
    "Plan",
    "composed",
    "dropped",
    "foreign_features",
    "logits",
    "objective",
    "penalty",
    "pruned",
    "restored",
    "row_losses",
    "row_objectives",
]

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How the network is put together and what holds it back; the same for all clients of a run."""

    words: Words
    layers: tuple[str, ...]  # those with base, mask and adaptive part
    private: tuple[str, ...]  # projections that a client has for itself
    combine: Literal["banks", "sum"]  # foreign filters: banks of their own, or added to ours
    dropout: float
    lambda1: float  # pulls adaptive parts to zero
    lambda2: float  # holds the weights of past tasks where they were
    lambda_m: float  # pulls masks to zero
    decay: float
    first: bool  # the first task: the base decays too
    sparse_private: tuple[str, ...] = ()  # private projections that lambda1 pulls too


def pruned(adaptive: Tensor, threshold: float) -> Tensor:
    """Without the entries that are no larger than the threshold."""
    return torch.where(adaptive.abs() > threshold, adaptive, 0)


def _gate(mask: Tensor, like: Tensor) -> Tensor:
    """sigmoid(m), one value for each output, spread over the other axes."""
    return torch.sigmoid(mask).view(*mask.shape, *[1] * (like.dim() - mask.dim()))


def restored(base: Tensor, mask: Tensor, adaptive: Tensor) -> Tensor:
    """Eq. 1: B * sigmoid(m) + A, a mask's one value for each output."""
    return base * _gate(mask, adaptive) + adaptive


def composed(weights: Named, layer: str, plan: Plan) -> Tensor:
    """The weights of a layer: private ones as they are, others by eq. 1 or eq. 4."""
    if layer in plan.private:
        return weights[f"now/dense/{layer}"]
    mask, adaptive = weights[f"now/mask/{layer}"], weights[f"now/adaptive/{layer}"]
    theta = restored(weights[f"base/{layer}"], mask, adaptive)
    if f"foreign/{layer}" not in weights or (plan.combine == "banks" and layer.startswith("conv")):
        return theta
    foreign, alpha = weights[f"foreign/{layer}"], weights[f"now/alpha/{layer}"]
    spread = alpha.view(*alpha.shape, *[1] * (foreign.dim() - alpha.dim()))
    return theta + (spread * foreign).sum(alpha.dim() - 1)


def foreign_features(words: Words, x: Tensor, foreign: Sequence[Tensor]) -> Tensor:
    """What foreign filters find in each text: the largest, then the smallest values over time.

    foreign: for each window size (slots, filters, D, size); gives (rows, 2 x sizes x slots x
    filters). Texts and foreign filters are constant, so once for a task is enough.
    """
    found = extremes(words, x, [bank.flatten(0, 1) for bank in foreign])
    by_side = torch.stack([values.unflatten(-1, (2, -1)) for values in found], -2)
    return by_side.flatten(-3)


def _foreign(weights: Named, batch: Rows, plan: Plan) -> Tensor:
    """Eq. 2 and 3 from the extremes kept with the rows: alpha * max if alpha >= 0, else * min."""
    slots, filters = weights["now/foreign_bias/conv3"].shape[-2:]
    kept = batch.own[..., 1:].unflatten(-1, (2, len(KERNELS), slots, filters))
    found = []
    for place, size in enumerate(KERNELS):
        alpha = weights[f"now/alpha/conv{size}"][..., None, :, None]
        most, least = kept[..., 0, place, :, :], kept[..., 1, place, :, :]
        bias = weights[f"now/foreign_bias/conv{size}"].unsqueeze(-3)
        g = torch.where(alpha >= 0, alpha * most, alpha * least) + bias
        layer = f"align{size}"
        said = linear(g.flatten(-2), composed(weights, layer, plan), weights[f"now/bias/{layer}"])
        found.append(torch.relu(said))
    return torch.cat(found, -1)


def dropped(z: Tensor, key: Tensor, numbers: Tensor, rate: float) -> Tensor:
    """Dropout by a hash of (key, number of the row, unit): the same one by one and in a stack."""
    rows = hashes(key.unsqueeze(-1), numbers.long())
    units = torch.arange(z.shape[-1], device=z.device)
    draw = (hashes(rows.unsqueeze(-1), units) >> 40).to(z.dtype) / (1 << 24)  # in [-0.5, 0.5)
    return torch.where(draw + 0.5 >= rate, z / (1 - rate), 0)


def logits(weights: Named, batch: Rows, plan: Plan, noise: bool = False) -> Tensor:
    """What the network says of texts; the first of `own` is the row's number, then features."""
    convs = [f"conv{size}" for size in KERNELS]
    said = highest(plan.words, batch.x, [composed(weights, layer, plan) for layer in convs])
    biases = [weights[f"now/bias/{layer}"].unsqueeze(-2) for layer in convs]
    z = torch.cat([torch.relu(s + b) for s, b in zip(said, biases, strict=True)], -1)
    if plan.combine == "banks":
        z = torch.cat([z, _foreign(weights, batch, plan)], -1)
    if noise and plan.dropout:
        z = dropped(z, weights["noise"], batch.own[..., 0], plan.dropout)
    if "merge" in plan.layers + plan.private:
        bias = weights["now/bias/merge"]
        z = torch.relu(linear(z, composed(weights, "merge", plan), bias))
    return linear(z, weights["now/dense/head"], weights["now/bias/head"])


def penalty(weights: Named, plan: Plan, axes: int = 0) -> Tensor:
    """All terms of the objective but cross-entropy; `axes` in front are members of a stack."""

    def total(values: Tensor) -> Tensor:
        return values.flatten(axes).sum(-1)

    terms = []
    for layer in plan.layers:
        base, mask = weights[f"base/{layer}"], weights[f"now/mask/{layer}"]
        adaptive = weights[f"now/adaptive/{layer}"]
        terms.append(plan.lambda1 * total(adaptive.abs()))
        terms.append(plan.decay / 2 * (total(adaptive**2) + total(mask**2)))
        terms.append(plan.lambda_m * total(torch.sigmoid(mask)))
        if plan.first:
            terms.append(plan.decay / 2 * total(base**2))
        if f"past/adaptive/{layer}" in weights:
            past = weights[f"past/adaptive/{layer}"]
            now = restored(base.unsqueeze(axes), weights[f"past/mask/{layer}"], past)
            moved = total((now - weights[f"past/target/{layer}"]) ** 2)
            terms.append(plan.lambda1 * total(past.abs()) + plan.lambda2 / 2 * moved)
    for layer in plan.private:
        own = weights[f"now/dense/{layer}"]
        terms.append(plan.decay / 2 * total(own**2))
        if layer in plan.sparse_private:
            terms.append(plan.lambda1 * total(own.abs()))
    return torch.stack(terms).sum(0)


def objective(weights: Named, batch: Rows, *, plan: Plan) -> Tensor:
    """What a client brings down: cross-entropy and all that holds it back."""
    loss = cross_entropy(logits(weights, batch, plan, noise=True), batch)
    return loss + penalty(weights, plan, loss.dim())


def row_losses(weights: Named, batch: Rows, *, plan: Plan) -> Tensor:
    """The cross-entropy of each row, without dropout: (..., rows)."""
    said = logits(weights, batch, plan)
    each = F.cross_entropy(said.flatten(0, -2), batch.y.flatten(), reduction="none")
    return each.view(said.shape[:-1])


def row_objectives(weights: Named, batch: Rows, *, plan: Plan) -> Tensor:
    """The same with the penalty added to every row."""
    each = row_losses(weights, batch, plan=plan)
    return each + penalty(weights, plan, each.dim() - 1).unsqueeze(-1)
