"""Rows from a generator that is trained without data, and the loss that distils on them.

Zhang et al., TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation, ICCV 2023.
The anchors follow Tran et al., Text-Enhanced Data-free Approach for Federated Class-Incremental
Learning (LANDER), CVPR 2024, with drawn directions in place of embeddings of the classes' names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from atoll.core.messages import Tensors
from atoll.core.rng import Stream, below, normals
from atoll.core.rows import Rows
from atoll.learning.distill import divergences
from atoll.learning.models import MLP, NORMALISING, Architecture, draw_linear, outputs

__all__ = [
    "HIDDEN", "Synthesis", "anchor_directions", "draw_generator", "drawn_rows", "fits",
    "hidden_logits",
    "outlying", "rehearsed", "trained_generator",
]  # fmt: skip

HIDDEN: Final = -1e4  # in place of the teacher's logit of a class that it does not teach
TEMPERATURE: Final = 2.0
RADIUS: Final = 0.5  # squared distance of directions within which a row is near its anchor


@dataclass(frozen=True)
class Synthesis:
    """How a generator is trained."""

    latent: int  # noise columns
    width: int  # of the hidden layer
    steps: int
    batch: int
    rate: float
    adversarial: float  # weight of the disagreement between teacher and student
    statistics: float  # weight of the distance to batch norm statistics
    anchors: float  # weight of the distance to anchors


def anchor_directions(classes: int, width: int) -> Tensor:
    """A direction for each class, the same everywhere: (classes, width), length 1, none below 0.

    Half of the columns of each are 0, so that directions differ although features are not negative.
    """
    draws = Stream.of("target", "anchors").numpy()
    values = abs(draws.normal(size=(classes, width))) * (draws.random((classes, width)) < 0.5)
    return F.normalize(torch.from_numpy(values + 1e-6).float(), dim=-1)


def outlying(features: Tensor, anchors: Tensor, y: Tensor) -> Tensor:
    """How far the direction of each row is outside the radius around its anchor."""
    distance = (F.normalize(features, dim=-1) - anchors[y]).square().sum(-1)
    return (distance - RADIUS).clamp(min=0)


def draw_generator(inputs: int, classes: int, options: Synthesis, stream: Stream) -> Tensors:
    """First weights: noise and a class go in, a row comes out."""
    first = draw_linear(options.width, options.latent + classes, stream.child("hidden"))
    last = draw_linear(inputs, options.width, stream.child("row"))
    names = ("hidden_weight", "hidden_bias", "row_weight", "row_bias")
    return dict(zip(names, (*first, *last), strict=True))


def fits(generator: Mapping[str, Tensor], inputs: int, classes: int, options: Synthesis) -> bool:
    """Whether a generator has the form that these options give it."""
    shapes = {
        "hidden_weight": (options.width, options.latent + classes), "hidden_bias": (options.width,),
        "row_weight": (inputs, options.width), "row_bias": (inputs,),
    }  # fmt: skip
    return {name: tuple(tensor.shape) for name, tensor in generator.items()} == shapes


def _generated(
    weights: Mapping[str, Tensor], noise: Tensor, one_hot: Tensor, limit: float
) -> Tensor:
    """Rows with values between -limit and limit: (rows, inputs)."""
    inputs = torch.cat([noise, one_hot], -1)
    hidden = torch.relu(F.linear(inputs, weights["hidden_weight"], weights["hidden_bias"]))
    raw = F.linear(hidden, weights["row_weight"], weights["row_bias"])
    return limit * torch.tanh(raw / limit)


def _draw(
    seen: Tensor, rows: int, latent: int, stream: Stream, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Noise, and classes among those that are seen."""
    kinds = seen.nonzero().flatten()
    keys = [torch.tensor(stream.child(name).key, device=seen.device) for name in ("noise", "class")]
    return normals(keys[0], (rows, latent)).to(dtype), kinds[below(len(kinds), keys[1], rows)]


@torch.no_grad()
def drawn_rows(
    generator: Tensors, seen: Tensor, rows: int, shape: tuple[int, ...], stream: Stream
) -> Tensor:
    """Rows of a generator, of all seen classes alike: (rows, *shape)."""
    latent = generator["hidden_weight"].shape[1] - len(seen)
    noise, y = _draw(seen, rows, latent, stream, generator["hidden_weight"].dtype)
    one_hot = F.one_hot(y, len(seen)).to(noise.dtype)
    return _generated(generator, noise, one_hot, limit_of(shape)).view(rows, *shape)


def limit_of(shape: tuple[int, ...]) -> float:
    """The largest value of a row: pixels lie between -1 and 1, columns have deviation 1."""
    return 1.0 if len(shape) == 3 else 4.0


def hidden_logits(logits: Tensor, seen: Tensor) -> Tensor:
    """Logits of seen classes alone."""
    return torch.where(seen, logits, HIDDEN)


class _BatchNorms:
    """How far the inputs of batch norm layers are from the statistics that they learned."""

    def __init__(self, model: nn.Module) -> None:
        self.distances: list[Tensor] = []
        layers = [layer for layer in model.modules() if isinstance(layer, NORMALISING)]
        self.handles = [layer.register_forward_pre_hook(self._look) for layer in layers]

    def _look(self, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        variance, mean = torch.var_mean(inputs[0].transpose(0, 1).flatten(1), 1)
        apart = (mean - layer.running_mean).norm() + (variance - layer.running_var).norm()
        self.distances.append(apart)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def total(self) -> Tensor | float:
        """The sum over layers of the last pass."""
        total = sum(self.distances)
        self.distances.clear()
        return total


@dataclass(frozen=True)
class _Pair:
    """Teacher, student, and what the teacher knows."""

    teacher: nn.Module
    student: nn.Module
    seen: Tensor  # (classes,) truth values
    shape: tuple[int, ...]  # of a row

    def rows(self, generator: Tensors, options: Synthesis, stream: Stream) -> tuple[Tensor, Tensor]:
        """A batch of the generator, with gradient, and its classes."""
        noise, y = _draw(
            self.seen, options.batch, options.latent, stream, generator["hidden_weight"].dtype
        )
        one_hot = F.one_hot(y, len(self.seen)).to(noise.dtype)
        return _generated(generator, noise, one_hot, limit_of(self.shape)).view(-1, *self.shape), y

    def logits(self, model: nn.Module, x: Tensor) -> Tensor:
        return hidden_logits(model(x), self.seen)


def trained_generator(
    teacher: nn.Module,
    student: nn.Module,
    seen: Tensor,
    shape: tuple[int, ...],
    options: Synthesis,
    stream: Stream,
) -> Tensors:
    """A generator of rows on which the teacher is confident and the student is not.

    Each step moves the generator by CE(T(x), y) - w KL(T(x) || S(x)) + batch norm statistics, with
    w = 1 where teacher and student name different classes, then the student by KL(T(x) || S(x)).
    """
    pair = _Pair(teacher.eval().requires_grad_(False), student.train(), seen, shape)
    weights = draw_generator(math.prod(shape), len(seen), options, stream)
    dtype = next(teacher.parameters()).dtype
    generator = {n: w.to(seen.device, dtype).requires_grad_() for n, w in weights.items()}
    norms = _BatchNorms(teacher)
    first, second = (
        torch.optim.Adam(list(moved), options.rate)
        for moved in (generator.values(), student.parameters())
    )
    for step in range(options.steps):
        x, y = pair.rows(generator, options, stream.child("step", step))
        _descend(first, _generator_loss(pair, norms, x, y, options))
        rows = x.detach()
        taught, learned = (pair.logits(model, rows) for model in (teacher, student))
        norms.total()
        _descend(second, divergences(taught, learned, TEMPERATURE).mean())
    norms.remove()
    return {name: weight.detach() for name, weight in generator.items()}


def _generator_loss(
    pair: _Pair, norms: _BatchNorms, x: Tensor, y: Tensor, options: Synthesis
) -> Tensor:
    """The loss of the generator."""
    taught = pair.logits(pair.teacher, x)
    loss = F.cross_entropy(taught, y) + options.statistics * norms.total()
    guessed = pair.logits(pair.student, x)
    differs = (taught.argmax(-1) != guessed.argmax(-1)).to(taught.dtype)
    loss = loss - options.adversarial * (differs * divergences(taught, guessed)).mean()
    if options.anchors:
        assert isinstance(pair.teacher, MLP)  # others are refused before
        weights = dict(pair.teacher.named_parameters())
        features = outputs(weights, x.flatten(1), pair.teacher.depth)[-2]
        anchors = anchor_directions(len(pair.seen), features.shape[-1]).to(features)
        loss = loss + options.anchors * outlying(features, anchors, y).mean()
    return loss


def _descend(mover: torch.optim.Optimizer, loss: Tensor) -> None:
    mover.zero_grad()
    loss.backward()
    mover.step()


def rehearsed(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Cross-entropy of real rows plus strength T^2 KL(teacher || student) of synthetic ones.

    `batch.own` has the teacher's logits of a synthetic row, HIDDEN for classes that it does not
    teach and in all columns of a real row. Both are means over their rows in the batch. With
    constant/anchors among the weights, real rows are pulled to the anchors of their classes.
    """
    own = {name: weight for name, weight in weights.items() if "/" not in name}
    hidden, student = _hidden_and_logits(network, own, weights, batch)
    synthetic = (batch.own > HIDDEN / 2).any(-1).to(student.dtype)
    share = torch.ones_like(synthetic) if batch.share is None else batch.share
    apart = divergences(batch.own, student, TEMPERATURE)
    flat = F.cross_entropy(student.flatten(0, -2), batch.y.flatten(), reduction="none")
    real = share * (1 - synthetic)
    loss = _mean(flat.view(apart.shape), real)
    loss = loss + weights["constant/strength"] * TEMPERATURE**2 * _mean(apart, share * synthetic)
    if hidden is None:
        return loss
    one_hot = F.one_hot(batch.y, student.shape[-1]).to(student.dtype)
    goals = one_hot @ weights["constant/anchors"]
    distance = (F.normalize(hidden, dim=-1) - goals).square().sum(-1)
    return loss + weights["constant/bound"] * _mean((distance - RADIUS).clamp(min=0), real)


def _hidden_and_logits(
    network: Architecture, own: Tensors, weights: Mapping[str, Tensor], batch: Rows
) -> tuple[Tensor | None, Tensor]:
    """The last hidden layer, where anchors need it, and the logits."""
    model = network.model
    if "constant/anchors" in weights and isinstance(model, MLP):
        layers = outputs(own, batch.x.flatten(-model.axes), model.depth)
        return layers[-2], layers[-1]
    return None, network(own, batch.x)


def _mean(each: Tensor, part: Tensor) -> Tensor:
    """The mean over the rows of a part; 0 where it has none."""
    count = part.sum(-1)
    return (each * part).sum(-1) / torch.where(count > 0, count, 1)
