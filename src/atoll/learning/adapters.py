"""Low-rank adapters: a frozen weight W acts as W + up down, with up (out, rank), down (rank, in).

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. All matrices of a network
except the last have adapters; the last one and what follows it, the output layer, is trained fully.
A convolution is a matrix of its filters. Adapters of several clients merge in closed form:
Salami et al., Closed-form Merging of Parameter-efficient Modules for Federated Continual Learning,
ICLR 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.messages import Tensors
from atoll.core.rng import Stream
from atoll.core.rows import Rows
from atoll.learning.losses import label_loss
from atoll.learning.models import MLP, Architecture, draw_linear, outputs
from atoll.learning.weights import without

__all__ = [
    "HIDDEN", "Layer", "adapted_layers", "class_mask", "draw_adapters", "first_past",
    "input_squares", "masked_loss", "merge_down", "merge_up", "merged", "output_layer",
]  # fmt: skip

HIDDEN: Final = -1e4  # logit offset of classes that the loss excludes
RIDGE: Final = 1e-6  # relative to the mean eigenvalue of a linear system
LIMIT: Final = 10.0  # maximum squared inputs of a site, relative to the median site


def adapted_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the matrices with adapters: all except the last."""
    return _matrices(model)[:-1]


def output_layer(model: nn.Module) -> tuple[str, ...]:
    """The names of the last matrix and of the parameters after it."""
    names = [name for name, _ in model.named_parameters()]
    return tuple(names[names.index(_matrices(model)[-1]) :])


def _matrices(model: nn.Module) -> tuple[str, ...]:
    names = tuple(name for name, weight in model.named_parameters() if weight.dim() > 1)
    if not names:
        what = "a network without a matrix has nothing to adapt"
        raise UserError(what, "model.name", "choose another network")
    return names


def draw_adapters(model: nn.Module, rank: int, stream: Stream) -> Tensors:
    """Initial adapters, which do not change the output: `down` is random, `up` is 0."""
    adapters = {}
    for name in adapted_layers(model):
        weight = model.get_parameter(name)
        inputs = weight[0].numel()
        size = min(rank, len(weight), inputs)
        (down,) = draw_linear(size, inputs, stream.child(name), bias=False)
        adapters[f"down/{name}"] = down.to(weight.device, weight.dtype)
        adapters[f"up/{name}"] = weight.new_zeros((len(weight), size))
    return adapters


def merged(base: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Tensors:
    """The weights of the network: frozen weights plus adapters, with the trained output layer.

    Names without a slash in `trained` belong to the output layer.
    """
    weights = dict(base)
    for name, up in without("up", trained).items():
        change = up @ trained[f"down/{name}"]
        weights[name] = base[name] + change.view(base[name].shape)
    weights |= {name: weight for name, weight in trained.items() if "/" not in name}
    return weights


def class_mask(y: Tensor, classes: int) -> Tensor:
    """Logit offsets: 0 for the classes among the labels, HIDDEN for others."""
    present = torch.bincount(y, minlength=classes) > 0
    return torch.zeros(classes, device=y.device).masked_fill(~present, HIDDEN)


def masked_loss(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """The label loss under adapters, with constant/mask added to the logits.

    The weights contain the frozen ones as base/NAME.
    """
    logits = network(merged(without("base", weights), weights), batch.x)
    return label_loss(logits + weights["constant/mask"].unsqueeze(-2), batch)


# Merging in closed form


def first_past(model: nn.Module) -> Tensors:
    """For each layer of an MLP, zeros for past changes and past squared inputs."""
    require_mlp(model)
    past: Tensors = {}
    for name in adapted_layers(model):
        change = torch.zeros_like(model.get_parameter(name), dtype=torch.float64).detach()
        past |= {f"change/{name}": change, f"squares/{name}": change[0].clone()}
    return past


@dataclass(frozen=True)
class Layer:
    """One factor of a layer's adapters as trained by the sites, and the other factor.

    The merged adapters have the outputs of each site's own on the inputs of that site, in least
    squares. Inputs enter by their squares, as if different inputs were uncorrelated: squares
    reveal less than a Gram matrix.
    """

    trained: Sequence[Tensor]  # by site: `up` (out, rank), or `down` (rank, in)
    shared: Tensor  # the other factor, which no site trains
    squares: Sequence[Tensor]  # (in,), by site: squared inputs, with the weight of the site
    past_change: Tensor  # (out, in): up down at the end of the stage before
    past_squares: Tensor  # (in,): sums of all stages before

    @property
    def total(self) -> Tensor:
        """The squared inputs summed over sites and stages."""
        return torch.stack(list(self.squares)).sum(0) + self.past_squares


def weighted_squares(squares: Sequence[Tensor], by_site: Sequence[float]) -> list[Tensor]:
    """Mean squared inputs, weighted by site.

    Squared inputs determine a site's weight, so their sum is at most LIMIT times the median.
    """
    totals = torch.stack([square.sum() for square in squares])
    positive = totals[totals > 0]
    limit = LIMIT * positive.median() if len(positive) else totals.new_ones(())
    factors = (limit / totals.clamp(min=torch.finfo(totals.dtype).tiny)).clamp(max=1)
    whole = sum(by_site) / len(by_site)
    shares = [weight / whole for weight in by_site]
    return [one * f * share for one, f, share in zip(squares, factors, shares, strict=True)]


def merge_up(layer: Layer) -> Tensor:
    """Merge the `up` of all sites, which share `down`."""
    down = layer.shared
    system = (down * layer.total) @ down.T
    target = (layer.past_change * layer.past_squares) @ down.T
    for up, squares in zip(layer.trained, layer.squares, strict=True):
        target = target + up @ ((down * squares) @ down.T)
    mean = torch.stack(list(layer.trained)).mean(0)
    # contiguous like a restored checkpoint: products round by layout
    return _solved(system, target.T, mean.T).T.contiguous()


def merge_down(layer: Layer) -> Tensor:
    """Merge the `down` of all sites, which share `up`."""
    up, mean = layer.shared, torch.stack(list(layer.trained)).mean(0)
    past = _solved(up.T @ up, up.T @ layer.past_change, mean)
    target = past * layer.past_squares
    for down, squares in zip(layer.trained, layer.squares, strict=True):
        target = target + down * squares
    total = layer.total
    share = target / total.clamp(min=torch.finfo(total.dtype).tiny)
    return torch.where(total > 0, share, mean).contiguous()


def _solved(system: Tensor, target: Tensor, prior: Tensor) -> Tensor:
    """Solve a linear system, regularised towards the prior in undetermined directions."""
    ridge = RIDGE * system.diagonal().mean() + torch.finfo(system.dtype).tiny
    identity = torch.eye(len(system), dtype=system.dtype, device=system.device)
    solution: Tensor = torch.linalg.solve(system + ridge * identity, target + ridge * prior)
    return solution


def require_mlp(model: nn.Module) -> MLP:
    """Require an MLP, whose layer inputs are known; raises an error for other networks."""
    if not isinstance(model, MLP):
        what = "only the layers of an MLP have a closed form here"
        raise UserError(what, "model.name", "use 'mlp', or merging = \"mean\"")
    return model


def input_squares(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensors:
    """For each layer with adapters, the mean squared inputs over rows, in double precision."""
    mlp = require_mlp(model)
    flat = x.flatten(-mlp.axes)
    hidden = [flat, *outputs(weights, flat, mlp.depth)[:-1]]
    names = adapted_layers(model)
    rows = max(1, len(x))
    return {name: hidden[i].double().square().sum(0) / rows for i, name in enumerate(names)}
