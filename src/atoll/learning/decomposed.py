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
    lambda2                     weight of the penalty on changes of past tasks, constant
    noise                       key of the dropout of an epoch

Layers of the text CNN are conv3, conv4, conv5 (banks of filters), align3, align4, align5 and merge
(projections), those of LeNet conv1, conv2, full1, full2; and head. A stack of clients has one more
axis in front of everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rng import hashes
from atoll.core.rows import Rows
from atoll.kernels.batched_layers import Sizes, convolve
from atoll.kernels.penalty import drift, usable
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
]

Named = Mapping[str, Tensor]
KEEPING = Sizes((1, 1), (2, 2), (1, 1), 1)  # a convolution of 5 x 5 that keeps the size


@dataclass(frozen=True)
class Plan:
    """The structure of the network and its penalties; the same for all clients of a run."""

    words: Words | None  # none: rows are images, and the network is LeNet
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
    """Copy without the entries that are no larger than the threshold."""
    return torch.where(adaptive.abs() > threshold, adaptive, 0)


def _gate(mask: Tensor, like: Tensor) -> Tensor:
    """sigmoid(m), one value per output, broadcast over the other axes."""
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
    """Responses of foreign filters to each text: the largest, then the smallest values over time.

    foreign: for each window size (slots, filters, D, size); gives (rows, 2 x sizes x slots x
    filters). Texts and foreign filters are constant, so once for a task is enough.
    """
    by_size = extremes(words, x, [bank.flatten(0, 1) for bank in foreign])
    by_side = torch.stack([values.unflatten(-1, (2, -1)) for values in by_size], -2)
    return by_side.flatten(-3)


def _foreign(weights: Named, batch: Rows, plan: Plan) -> Tensor:
    """Eq. 2 and 3 from the extremes kept with the rows: alpha * max if alpha >= 0, else * min.

    Without projections that align them (J12), the foreign features are used unchanged.
    """
    slots, filters = weights["now/foreign_bias/conv3"].shape[-2:]
    extreme_values = batch.own[..., 1:].unflatten(-1, (2, len(KERNELS), slots, filters))
    alphas = torch.stack([weights[f"now/alpha/conv{size}"] for size in KERNELS], -2)
    biases = torch.stack([weights[f"now/foreign_bias/conv{size}"] for size in KERNELS], -3)
    alpha = alphas[..., None, :, :, None]  # (..., 1, sizes, slots, 1)
    extreme = torch.where(
        alpha >= 0, extreme_values[..., 0, :, :, :], extreme_values[..., 1, :, :, :]
    )
    g = torch.addcmul(biases.unsqueeze(-4), alpha, extreme).flatten(-2)
    if "align3" not in plan.layers + plan.private:
        return g.flatten(-2)
    aligned = []
    for place, size in enumerate(KERNELS):
        theta = composed(weights, f"align{size}", plan)
        aligned.append(linear(g[..., place, :], theta, weights[f"now/bias/align{size}"]))
    return torch.relu(torch.cat(aligned, -1))


def dropped(z: Tensor, key: Tensor, numbers: Tensor, rate: float) -> Tensor:
    """Dropout by a hash of (key, row number, unit): identical for single networks and stacks."""
    rows = hashes(key.unsqueeze(-1), numbers.long())
    units = torch.arange(z.shape[-1], device=z.device)
    draw = (hashes(rows.unsqueeze(-1), units) >> 40).to(z.dtype) / (1 << 24)  # in [-0.5, 0.5)
    return torch.where(draw + 0.5 >= rate, z / (1 - rate), 0)


def _of_texts(weights: Named, batch: Rows, plan: Plan) -> Tensor:
    """Responses of a client's own filters to texts: (..., rows, sizes x filters)."""
    assert plan.words is not None  # else rows are images
    convs = [f"conv{size}" for size in KERNELS]
    filters = [composed(weights, layer, plan) for layer in convs]
    responses = highest(plan.words, batch.x, filters, batch.bounds)
    biases = [weights[f"now/bias/{layer}"].unsqueeze(-2) for layer in convs]
    return torch.cat([torch.relu(s + b) for s, b in zip(responses, biases, strict=True)], -1)


def _of_images(weights: Named, x: Tensor, plan: Plan) -> Tensor:
    """LeNet's features of images: (..., rows, 500)."""
    for layer in ("conv1", "conv2"):
        theta, bias = composed(weights, layer, plan), weights[f"now/bias/{layer}"]
        lead = x.shape[:-3]
        response = (
            convolve(x, theta, bias, KEEPING) if len(lead) > 1 else F.conv2d(x, theta, bias, 1, 2)
        )
        halved = F.max_pool2d(torch.relu(response).flatten(0, len(lead) - 1), 2)
        x = halved.unflatten(0, lead)
    z = x.flatten(-3)
    for layer in ("full1", "full2"):
        z = torch.relu(linear(z, composed(weights, layer, plan), weights[f"now/bias/{layer}"]))
    return z


def logits(weights: Named, batch: Rows, plan: Plan, noise: bool = False) -> Tensor:
    """The logits of rows; the first column of `own` is the row's number, then features."""
    z = (
        _of_images(weights, batch.x, plan)
        if plan.words is None
        else _of_texts(weights, batch, plan)
    )
    if plan.combine == "banks":
        z = torch.cat([z, _foreign(weights, batch, plan)], -1)
    if noise and plan.dropout:
        z = dropped(z, weights["noise"], batch.own[..., 0], plan.dropout)
    if "merge" in plan.layers + plan.private:
        bias = weights["now/bias/merge"]
        z = torch.relu(linear(z, composed(weights, "merge", plan), bias))
    return linear(z, weights["now/dense/head"], weights["now/bias/head"])


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """A value per member, expanded to tensors with more trailing axes."""
    return values.view(*values.shape, *[1] * (like.dim() - values.dim()))


@dataclass(frozen=True)
class _Pull:
    """one * sum of absolute values + two / 2 * sum of squares of the tensor at this place."""

    place: int
    one: float
    two: float


@dataclass(frozen=True)
class _Hold:
    """lambda2 / 2 * squared distance of past weights to their targets: the places of the tensors.

    And one * sum of absolute values of the adaptive parts among them.
    """

    base: int
    mask: int
    past: int
    target: int
    one: float


Terms = tuple[_Pull | _Hold, ...]


class _Penalties(torch.autograd.Function):
    """All penalties, with few passes over large weights and few small kernels.

    The first tensor is lambda2: members of a stack may have one each. The forward pass computes the
    gradients of past weights too, while their values are in the cache.
    """

    @staticmethod
    def forward(ctx: Any, terms: Terms, axes: int, *tensors: Tensor) -> Tensor:
        sizes: dict[float | None, list[Tensor]] = {}  # sums by what they are multiplied with
        gradients: dict[int, Tensor] = {}
        for term in terms:
            if isinstance(term, _Pull):
                values = tensors[term.place]
                if term.one:
                    sizes.setdefault(term.one, []).append(_norm(values, 1, axes))
                if term.two:
                    sizes.setdefault(term.two / 2, []).append(_norm(values, 2, axes).square_())
                continue
            places = (term.base, term.mask, term.past, term.target)
            needed = ctx.needs_input_grad[2 + term.mask]
            value = _drift([tensors[i] for i in places], tensors[0], term.one, axes, needed)
            sizes.setdefault(None, []).extend(value.squares)
            sizes.setdefault(term.one, []).extend(value.absolutes)
            gradients |= {term.base: value.of_base, term.past: value.of_past}
            gradients |= {} if value.of_mask is None else {term.mask: value.of_mask}
        ctx.save_for_backward(*tensors)
        ctx.terms, ctx.gradients = terms, gradients
        totals = [
            torch.stack(sums).sum(0) * (tensors[0] / 2 if weight is None else weight)
            for weight, sums in sizes.items()
            if sums
        ]
        return torch.stack(totals).sum(0)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        tensors, pulls = ctx.saved_tensors, [t for t in ctx.terms if isinstance(t, _Pull)]
        weights = {weight for pull in pulls for weight in (pull.one, pull.two) if weight}
        slopes = {weight: slope * weight for weight in weights}
        gradients, ctx.gradients = (
            ctx.gradients,
            None,
        )  # they are scaled in place, so backward runs once
        for gradient in gradients.values():
            gradient.mul_(_spread(slope, gradient))
        for pull in pulls:
            values = tensors[pull.place]
            if pull.one:
                gradients[pull.place] = values.sgn().mul_(_spread(slopes[pull.one], values))
            if pull.two and pull.place in gradients:
                gradients[pull.place].addcmul_(values, _spread(slopes[pull.two], values))
            elif pull.two:
                gradients[pull.place] = values * _spread(slopes[pull.two], values)
        return None, None, *(gradients.get(place) for place in range(len(tensors)))


def _norm(values: Tensor, kind: int, axes: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values.flatten(axes), kind, -1)
    return norm


class _Value(NamedTuple):
    """Sums of squares and of absolute values, with their gradients."""

    squares: list[Tensor]
    absolutes: list[Tensor]
    of_base: Tensor
    of_past: Tensor
    of_mask: Tensor | None


def _drift(
    parts: Sequence[Tensor], strength: Tensor, one: float, axes: int, needed: bool
) -> _Value:
    """Parts: base, masks, adaptive parts and targets; `needed`: masks are trained too.

    A single client goes task by task, so that values stay in the cache; a stack has few large
    operations instead, on CUDA a single one. The distance is rounded as in `restored`: right
    after the snapshot it is exactly 0, of which Adam takes no sign.
    """
    base, mask, past, target = parts
    if axes == 1 and not needed and usable(parts):
        far, near, of_base, of_past = drift(base, torch.sigmoid(mask), past, target, strength, one)
        return _Value([far], [near], of_base, of_past, None)
    gate, of_past, of_mask = _gate(mask, past), torch.empty_like(past), torch.empty_like(mask)
    of_base = torch.zeros_like(base)
    squares, absolutes = list[Tensor](), list[Tensor]()
    count = 1 if axes == 0 else past.shape[axes]
    for first in range(0, past.shape[axes], count):
        now, gates, adaptive, wants, masks = (
            t.narrow(axes, first, count) for t in (of_past, gate, past, target, of_mask)
        )
        torch.mul(base.unsqueeze(axes), gates, out=now).add_(adaptive).sub_(wants)
        squares.append(_size(now, now, 2, axes))
        now.mul_(_spread(strength, now))
        if count == 1:
            of_base.addcmul_(gates.squeeze(axes), now.squeeze(axes))
        else:
            of_base = _weighed(gates, now, axes)
        if needed:
            inner = (now * base.unsqueeze(axes)).flatten(mask.dim()).sum(-1)
            masks.copy_(inner * (gates * (1 - gates)).view(inner.shape))
        if one:
            signs = adaptive.sgn()
            absolutes.append(_size(signs, adaptive, 1, axes))
            now.add_(signs, alpha=one)
    return _Value(squares, absolutes, of_base, of_past, of_mask if needed else None)


def _size(signs: Tensor, values: Tensor, kind: int, axes: int) -> Tensor:
    """The sum of absolute values or of squares; a product is faster on a CPU than a norm."""
    if axes == 0:
        return torch.dot(signs.flatten(), values.flatten())
    return _norm(values, kind, axes) ** kind


def _weighed(gate: Tensor, moved: Tensor, axes: int) -> Tensor:
    """The sum over tasks of gate times change, one product for each output: as the base."""
    by_output = moved.movedim(axes, axes + 1)  # (..., outputs, tasks, ...)
    shares = gate.view(gate.shape[: axes + 2]).movedim(axes, axes + 1).unsqueeze(-2)
    sums = torch.matmul(shares, by_output.flatten(axes + 2)).squeeze(-2)
    gradient: Tensor = sums.view(*by_output.shape[: axes + 1], *by_output.shape[axes + 2 :])
    return gradient


def penalty(weights: Named, plan: Plan, axes: int = 0) -> Tensor:
    """All terms of the objective except cross-entropy; leading `axes` are members of a stack."""
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
            names = (
                f"base/{layer}",
                *(f"past/{k}/{layer}" for k in ("mask", "adaptive", "target")),
            )
            base, mask, past, target = map(place, names)
            terms.append(_Hold(base, mask, past, target, plan.lambda1))
    for layer in plan.private:
        sparse = layer in plan.sparse_private
        pull(f"now/dense/{layer}", plan.lambda1 if sparse else 0.0, plan.decay)
    masks = [weights[f"now/mask/{layer}"] for layer in plan.layers]
    gates = [torch.sigmoid(mask).flatten(axes).sum(-1) for mask in masks if plan.lambda_m]
    nothing = masks[0].flatten(axes).sum(-1) * 0
    pulled = _Penalties.apply(tuple(terms), axes, *tensors.values()) if terms else nothing
    return pulled + plan.lambda_m * torch.stack(gates).sum(0) if gates else pulled


def objective(weights: Named, batch: Rows, *, plan: Plan) -> Tensor:
    """The objective of a client: cross-entropy and all penalties."""
    loss = cross_entropy(logits(weights, batch, plan, noise=True), batch)
    return loss + penalty(weights, plan, loss.dim())


def row_losses(weights: Named, batch: Rows, *, plan: Plan) -> Tensor:
    """The cross-entropy of each row, without dropout: (..., rows)."""
    scores = logits(weights, batch, plan)
    each = F.cross_entropy(scores.flatten(0, -2), batch.y.flatten(), reduction="none")
    return each.view(scores.shape[:-1])
