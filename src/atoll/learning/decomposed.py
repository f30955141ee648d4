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
    lambda2                     how strongly the weights of past tasks are held, constant
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


@dataclass(frozen=True)
class _Pull:
    """one * sum of absolute values + two / 2 * sum of squares of the tensor at this place."""

    place: int
    one: float
    two: float


@dataclass(frozen=True)
class _Hold:
    """lambda2 / 2 * squared distance of past weights to where they are to be held: their places."""

    base: int
    mask: int
    past: int
    target: int


Terms = tuple[_Pull | _Hold, ...]


class _Penalties(torch.autograd.Function):
    """All penalties in as few passes over large weights, and as few small kernels, as can be.

    The first tensor is lambda2: members of a stack may have one each.
    """

    @staticmethod
    def forward(ctx: Any, terms: Terms, axes: int, *tensors: Tensor) -> Tensor:
        sizes: dict[tuple[int, float | Tensor], list[Tensor]] = {}  # norms by kind and weight
        moved = []
        for term in terms:
            if isinstance(term, _Hold):
                parts = (tensors[i] for i in (term.base, term.mask, term.past, term.target))
                moved.append(_moved(*parts))
                sizes.setdefault((2, tensors[0]), []).append(_norm(moved[-1], 2, axes))
                continue
            for kind, weight in ((1, term.one), (2, term.two)):
                if weight:
                    norm = _norm(tensors[term.place], kind, axes)
                    sizes.setdefault((kind, weight), []).append(norm)
        ctx.save_for_backward(*tensors, *moved)
        ctx.terms, ctx.axes, ctx.count = terms, axes, len(tensors)
        totals = [
            torch.stack(norms).sum(0) * weight
            if kind == 1
            else torch.stack(norms).square_().sum(0) * (weight / 2)
            for (kind, weight), norms in sizes.items()
        ]
        return torch.stack(totals).sum(0)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        tensors, moved = ctx.saved_tensors[: ctx.count], list(ctx.saved_tensors[ctx.count :])
        pulls = [term for term in ctx.terms if isinstance(term, _Pull)]
        slopes: dict[float | None, Tensor] = {
            weight: slope * weight for pull in pulls for weight in (pull.one, pull.two) if weight
        }
        slopes[None] = slope * tensors[0]
        found: dict[int, Tensor] = {}

        def add(place: int, direction: Tensor, weight: float | None) -> None:
            spread = _spread(slopes[weight], direction)
            if place in found:
                found[place].addcmul_(direction, spread)
            else:
                found[place] = direction * spread

        for term in ctx.terms:
            if isinstance(term, _Hold):
                gate = _gate(tensors[term.mask], tensors[term.past])
                by_task = moved.pop(0)
                add(term.past, by_task, None)
                add(term.base, _weighed(gate, by_task, ctx.axes), None)
                if ctx.needs_input_grad[2 + term.mask]:
                    inner = by_task * tensors[term.base].unsqueeze(ctx.axes)
                    gate = gate.view(tensors[term.mask].shape)
                    add(term.mask, inner.flatten(gate.dim()).sum(-1) * gate * (1 - gate), None)
                continue
            if term.one:
                found[term.place] = tensors[term.place].sgn()
                found[term.place].mul_(_spread(slopes[term.one], tensors[term.place]))
            if term.two:
                add(term.place, tensors[term.place], term.two)
        return None, None, *(found.get(place) for place in range(ctx.count))


def _norm(values: Tensor, kind: int, axes: int) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(values.flatten(axes), kind, -1)
    return found


def _moved(base: Tensor, mask: Tensor, past: Tensor, target: Tensor) -> Tensor:
    """How far the weights of past tasks are from where they are to be held.

    Rounded as in `restored`: right after the snapshot it is exactly 0, of which Adam takes no sign.
    """
    return (base.unsqueeze(mask.dim() - 2) * _gate(mask, past)).add_(past).sub_(target)


def _weighed(gate: Tensor, moved: Tensor, axes: int) -> Tensor:
    """The sum over tasks of gate times change, one product for each output: as the base."""
    by_output = moved.movedim(axes, axes + 1)  # (..., outputs, tasks, ...)
    shares = gate.view(gate.shape[: axes + 2]).movedim(axes, axes + 1).unsqueeze(-2)
    sums = torch.matmul(shares, by_output.flatten(axes + 2)).squeeze(-2)
    found: Tensor = sums.view(*by_output.shape[: axes + 1], *by_output.shape[axes + 2 :])
    return found


def penalty(weights: Named, plan: Plan, axes: int = 0) -> Tensor:
    """All terms of the objective but cross-entropy; `axes` in front are members of a stack."""
    tensors = {"lambda2": weights["lambda2"]}

    def place(name: str) -> int:
        tensors[name] = weights[name]
        return list(tensors).index(name)

    def pull(name: str, one: float, two: float) -> None:
        if one or two:
            terms.append(_Pull(place(name), one, two))

    terms: list[_Pull | _Hold] = []
    for layer in plan.layers:
        pull(f"now/adaptive/{layer}", plan.lambda1, plan.decay)
        pull(f"now/mask/{layer}", 0.0, plan.decay)
        if plan.first:
            pull(f"base/{layer}", 0.0, plan.decay)
        if f"past/adaptive/{layer}" in weights:
            pull(f"past/adaptive/{layer}", plan.lambda1, 0.0)
            past = [place(f"past/{kind}/{layer}") for kind in ("mask", "adaptive", "target")]
            terms.append(_Hold(place(f"base/{layer}"), *past))
    for layer in plan.private:
        sparse = layer in plan.sparse_private
        pull(f"now/dense/{layer}", plan.lambda1 if sparse else 0.0, plan.decay)
    masks = [weights[f"now/mask/{layer}"] for layer in plan.layers]
    gates = [torch.sigmoid(mask).flatten(axes).sum(-1) for mask in masks if plan.lambda_m]
    nothing = masks[0].flatten(axes).sum(-1) * 0
    pulled = _Penalties.apply(tuple(terms), axes, *tensors.values()) if terms else nothing
    return pulled + plan.lambda_m * torch.stack(gates).sum(0) if gates else pulled


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
