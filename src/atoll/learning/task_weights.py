"""The decomposed weights of a client's tasks: how one begins, ends, and is put together again.

Names of weights are those of `decomposed`. What a finished task leaves has the prefix kept/TASK,
but for its mask and adaptive part, which join those of earlier tasks under past/.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning.decomposed import pruned, restored
from atoll.learning.image_nets import LeNet
from atoll.learning.sparse import decoded
from atoll.learning.textcnn import KERNELS, TextCNN, normal
from atoll.learning.weights import prefixed, without

__all__ = [
    "ALIGNS",
    "Layout",
    "Shape",
    "arranged",
    "attention",
    "begun",
    "first_base",
    "first_draws",
    "foreign_parts",
    "read",
    "renumbered",
    "retired",
    "silenced",
    "weights_of_task",
    "with_base",
    "without_slot",
]

Shape = tuple[int, ...]
ALIGNS = tuple(f"align{size}" for size in KERNELS)  # projections of foreign banks


@dataclass(frozen=True)
class Layout:
    """The layers of a client's network, head aside, and its room for foreign parts."""

    shapes: Mapping[str, Shape]  # by layer
    plain: tuple[str, ...]  # layers of the network itself; the others are projections
    layers: tuple[str, ...]  # layers with base, mask and adaptive part
    width: int  # numbers that stand for a row before the head
    slots: int  # foreign parts (n)
    banks: bool  # foreign filters are banks of their own, not added to ours

    @property
    def private(self) -> tuple[str, ...]:
        """The layers that a client has for itself."""
        return tuple(layer for layer in self.shapes if layer not in self.layers)


def arranged(model: TextCNN | LeNet, slots: int, banks: bool, dense: bool, shared: bool) -> Layout:
    """The layers of a network with its projections, which may be shared as its own layers are.

    Banks of foreign filters need projections that align them and one that merges; without banks
    there may be one dense layer before the head.
    """
    outputs = [shape[0] for shape in model.layers.values()]
    width = sum(outputs) if isinstance(model, TextCNN) else outputs[-1]
    projections: dict[str, Shape] = {}
    if banks:
        filters = model.layers["conv3"][0]
        projections = dict.fromkeys(ALIGNS, (filters, filters * slots))
        projections["merge"] = (width, 2 * width)
    elif dense:
        projections["merge"] = (width, width)
    plain = tuple(model.layers)
    layers = (*plain, *(projections if shared else ()))
    return Layout({**model.layers, **projections}, plain, layers, width, slots, banks)


def first_base(
    layout: Layout, network: Mapping[str, Tensor], stream: Callable[[str], Stream]
) -> Tensors:
    """The base before the first round: the network's own layers, and projections that are drawn."""
    base = {}
    like = next(iter(network.values()))
    for layer in layout.layers:
        shape = layout.shapes[layer]
        if layer in network:
            base[layer] = network[layer].clone()
        else:
            draw = normal(shape, 1 / math.sqrt(math.prod(shape[1:])), stream(layer))
            base[layer] = draw.to(like)
    return base


def first_draws(layout: Layout) -> dict[str, tuple[Shape, float]]:
    """Names, shapes and deviations of the normal draws with which a task begins."""
    draws: dict[str, tuple[Shape, float]] = {}
    for layer in layout.layers:
        outputs = layout.shapes[layer][0]
        draws[f"mask/{layer}"] = ((outputs,), 1 / math.sqrt(outputs))
        draws[f"alpha/{layer}"] = ((layout.slots,), 1 / math.sqrt(layout.slots))
    for layer in layout.plain:
        filters = layout.shapes[layer][0]
        draws[f"bias/{layer}"] = ((filters,), 1 / math.sqrt(filters))
        if layout.banks:
            draws[f"foreign_bias/{layer}"] = ((layout.slots, filters), 1 / math.sqrt(filters))
    for layer in layout.private:
        shape = layout.shapes[layer]
        draws[f"dense/{layer}"] = (shape, 1 / math.sqrt(shape[1]))
    return draws


def begun(
    weights: Tensors,
    layout: Layout,
    start: float,  # share of the base that an adaptive part begins as
    classes: int,
    stream: Callable[[str, Shape], Stream],
) -> Tensors:
    """The weights with those of a new task; a head is drawn within Glorot's bound."""
    like = weights[f"base/{layout.layers[0]}"]
    result = dict(weights)
    for layer in layout.layers:
        result[f"now/adaptive/{layer}"] = start * weights[f"base/{layer}"]
    for name, (sizes, deviation) in first_draws(layout).items():
        result[f"now/{name}"] = normal(sizes, deviation, stream(name, sizes)).to(like)
    outputs = {n: shape[0] for n, shape in layout.shapes.items() if n not in layout.plain}
    shape = (classes, layout.width)
    bound = math.sqrt(6 / sum(shape))
    head = stream("head", shape).numpy().uniform(-1, 1, shape)
    result["now/dense/head"] = torch.from_numpy(head * bound).to(like)
    for layer, count in {**outputs, "head": classes}.items():
        result[f"now/bias/{layer}"] = torch.zeros(count).to(like)
    return result


def retired(weights: Tensors, layers: Sequence[str], task: int) -> Tensors:
    """The weights at the end of a task: every past task is held where it is now.

    This happens with the client's own base, before the next mean base arrives (pitfall 3).
    """
    result = dict(weights)
    for layer in layers:
        for kind in ("mask", "adaptive"):
            name, now = f"past/{kind}/{layer}", result.pop(f"now/{kind}/{layer}")
            before = [result[name]] if name in result else []
            result[name] = torch.cat([*before, now.unsqueeze(0)])
    for layer in layers:
        mask, adaptive = (result[f"past/{kind}/{layer}"] for kind in ("mask", "adaptive"))
        base = result[f"base/{layer}"].unsqueeze(0)
        result[f"past/target/{layer}"] = restored(base, mask, adaptive)
    for name in [n for n in result if n.startswith(("now/", "foreign/"))]:
        result[f"kept/{task}/{name}"] = result.pop(name)
    return result


def with_base(weights: Tensors, layers: Sequence[str], base: Tensors) -> Tensors:
    """The weights with the mean base where it is not zero."""
    result = dict(weights)
    for layer in layers:
        ours, theirs = weights[f"base/{layer}"], base[layer]
        result[f"base/{layer}"] = torch.where(theirs != 0, theirs, ours)
    return result


def weights_of_task(
    weights: Tensors, layers: Sequence[str], task: int, current: int, threshold: float
) -> Tensors:
    """The weights that stand for a task: its own, pruned, with the base as it is now."""
    base = prefixed("base", without("base", weights))
    if task == current:
        own = {n: w for n, w in weights.items() if n.startswith(("now/", "foreign/"))}
    else:
        own = without(f"kept/{task}", weights)
        for kind in ("mask", "adaptive"):
            for layer in layers:
                own[f"now/{kind}/{layer}"] = weights[f"past/{kind}/{layer}"][task]
    for layer in layers:
        name = f"now/adaptive/{layer}"
        own[name] = pruned(own[name], threshold)
    return base | own


def foreign_parts(codes: Sequence[Tensors], layout: Layout, like: Tensor) -> Tensors:
    """The foreign weights of sparse codes, one for each slot; empty slots are zero.

    A code that does not fit the layers raises a ValueError or a KeyError.
    """
    sizes = [math.prod(layout.shapes[layer]) for layer in layout.layers]
    parts = {}
    for layer in layout.layers:
        parts[f"foreign/{layer}"] = like.new_zeros((layout.slots, *layout.shapes[layer]))
    for slot, code in enumerate(codes):
        moved = {name: tensor.to(like.device) for name, tensor in code.items()}
        pieces = decoded(moved, sum(sizes)).split(sizes)
        for layer, piece in zip(layout.layers, pieces, strict=True):
            parts[f"foreign/{layer}"][slot] = piece.view(layout.shapes[layer])
    return parts


def attention(scores: Tensor, layout: Layout, like: Tensor) -> Tensors:
    """The attention to foreign parts that begins with their scores; empty slots have none."""
    alpha = like.new_zeros(layout.slots)
    alpha[: len(scores)] = scores.to(alpha)
    return {f"now/alpha/{layer}": alpha.clone() for layer in layout.layers}


def read(weights: Tensors, unread: Sequence[str]) -> Tensors:
    """The weights that an objective reads, without the foreign parts of the layers `unread`."""
    start = ("base/", "now/", "past/", "foreign/")
    left = {f"foreign/{layer}" for layer in unread}
    return {n: w for n, w in weights.items() if n.startswith(start) and n not in left}


def without_slot(weights: Tensors, slot: int) -> Tensors:
    """The weights with the foreign part of a slot zero."""
    result = dict(weights)
    for name in [name for name in weights if name.startswith("foreign/")]:
        result[name] = weights[name].clone()
        result[name][slot] = 0
    return result


def silenced(rows: Rows, slot: int, slots: int) -> Rows:
    """Rows in which the foreign filters of a slot find nothing; the first of `own` is a number."""
    own = rows.own.clone()
    own[:, 1:].unflatten(1, (2 * len(KERNELS), slots, -1))[:, :, slot] = 0
    return replace(rows, own=own)


def renumbered(y: Tensor, labels: Tensor) -> Tensor:
    """Classes as places among a task's own labels; one that is not among them gets the last + 1.

    A task without any row to learn from has a head of one output, for no class at all.
    """
    if not len(labels):
        return torch.ones_like(y)
    place = torch.searchsorted(labels, y).clamp(max=len(labels) - 1)
    return torch.where(labels[place] == y, place, len(labels))
