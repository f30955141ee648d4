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
from typing import Any, Literal

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
    alphas = torch.stack([weights[f"now/alpha/conv{size}"] for size in KERNELS], -2)
    biases = torch.stack([weights[f"now/foreign_bias/conv{size}"] for size in KERNELS], -3)
    alpha = alphas[..., None, :, :, None]  # (..., 1, sizes, slots, 1)
    extreme = torch.where(alpha >= 0, kept[..., 0, :, :, :], kept[..., 1, :, :, :])
    g = torch.addcmul(biases.unsqueeze(-4), alpha, extreme).flatten(-2)
    found = []
    for place, size in enumerate(KERNELS):
        theta = composed(weights, f"align{size}", plan)
        found.append(linear(g[..., place, :], theta, weights[f"now/bias/align{size}"]))
    return torch.relu(torch.cat(found, -1))


def dropped(z: Tensor, key: Tensor, numbers: Tensor, rate: float) -> Tensor:
    """Dropout by a hash of (key, number of the row, unit): the same one by one and in a stack."""
    rows = hashes(key.unsqueeze(-1), numbers.long())
    units = torch.arange(z.shape[-1], device=z.device)
    draw = (hashes(rows.unsqueeze(-1), units) >> 40).to(z.dtype) / (1 << 24)  # in [-0.5, 0.5)
    return torch.where(draw + 0.5 >= rate, z / (1 - rate), 0)


def logits(weights: Named, batch: Rows, plan: Plan, noise: bool = False) -> Tensor:
    """What the network says of texts; the first of `own` is the row's number, then features."""
    convs = [f"conv{size}" for size in KERNELS]
    filters = [composed(weights, layer, plan) for layer in convs]
    said = highest(plan.words, batch.x, filters, batch.bounds)
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


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """A value for each member, beside tensors with more axes behind."""
    return values.view(*values.shape, *[1] * (like.dim() - values.dim()))


class _Shrunk(torch.autograd.Function):
    """one * sum of absolute values + two / 2 * sum of squares; few passes over large weights."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, one: float, two: float, axes: int) -> Tensor:
        ctx.save_for_backward(values)
        ctx.one, ctx.two = one, two
        flat = values.flatten(axes)
        total: Tensor = torch.linalg.vector_norm(flat, 2, -1) ** 2 * (two / 2)
        return total.add_(torch.linalg.vector_norm(flat, 1, -1), alpha=one) if one else total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (values,) = ctx.saved_tensors
        if not ctx.one:
            return values * _spread(slope * ctx.two, values), None, None, None
        found = values.sgn().mul_(_spread(slope * ctx.one, values))
        return found.addcmul_(values, _spread(slope * ctx.two, values)), None, None, None


class _Held(torch.autograd.Function):
    """two / 2 * squared distance of the weights of past tasks to where they are to be held."""

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, mask: Tensor, past: Tensor, target: Tensor, two: float
    ) -> Tensor:
        gate, axes = _gate(mask, past), mask.dim() - 2  # in front of tasks and outputs
        moved = (base.unsqueeze(axes) * gate).add_(past).sub_(target)  # restored() - target
        ctx.save_for_backward(moved, gate, base, mask)
        ctx.two, ctx.axes = two, axes
        total: Tensor = torch.linalg.vector_norm(moved.flatten(axes), 2, -1) ** 2 * (two / 2)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        moved, gate, base, mask = ctx.saved_tensors
        of_past = moved * _spread(slope * ctx.two, moved)
        of_base = (of_past * gate).sum(ctx.axes)
        of_mask = None
        if ctx.needs_input_grad[1]:
            inner = (of_past * base.unsqueeze(ctx.axes)).flatten(mask.dim()).sum(-1)
            of_mask = inner * torch.sigmoid(mask) * torch.sigmoid(-mask)
        return of_base, of_mask, of_past, None, None


def penalty(weights: Named, plan: Plan, axes: int = 0) -> Tensor:
    """All terms of the objective but cross-entropy; `axes` in front are members of a stack."""

    def pulled(name: str, one: float, two: float) -> None:
        if one or two:
            terms.append(_Shrunk.apply(weights[name], one, two, axes))

    terms: list[Tensor] = [weights[f"now/mask/{plan.layers[0]}"].flatten(axes).sum(-1) * 0]
    for layer in plan.layers:
        pulled(f"now/adaptive/{layer}", plan.lambda1, plan.decay)
        pulled(f"now/mask/{layer}", 0.0, plan.decay)
        if plan.lambda_m:
            gate = torch.sigmoid(weights[f"now/mask/{layer}"])
            terms.append(plan.lambda_m * gate.flatten(axes).sum(-1))
        if plan.first:
            pulled(f"base/{layer}", 0.0, plan.decay)
        if f"past/adaptive/{layer}" in weights:
            pulled(f"past/adaptive/{layer}", plan.lambda1, 0.0)
            past = [weights[f"past/{kind}/{layer}"] for kind in ("mask", "adaptive", "target")]
            terms.append(_Held.apply(weights[f"base/{layer}"], *past, plan.lambda2))
    for layer in plan.private:
        sparse = layer in plan.sparse_private
        pulled(f"now/dense/{layer}", plan.lambda1 if sparse else 0.0, plan.decay)
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
