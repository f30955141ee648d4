"""Losses: pure functions of weights and a batch, one number for each member of a stack or bank.

Bind the further arguments of a loss with functools.partial, so that the losses of two clients
compare as equal. What differs between clients (an anchor, a strength) is among the weights.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from atoll.core.rows import Rows
from atoll.learning.models import Architecture
from atoll.learning.weights import without

__all__ = ["cross_entropy", "label_loss", "plain", "proximal", "squared_error"]


def label_loss(outputs: Tensor, batch: Rows) -> Tensor:
    """Cross-entropy, or the squared error of numbers: (..., rows, outputs) -> (...)."""
    number = batch.y.is_floating_point()
    return squared_error(outputs, batch) if number else cross_entropy(outputs, batch)


def squared_error(outputs: Tensor, batch: Rows) -> Tensor:
    """The mean over rows; outputs (..., rows, 1) -> (...), with an axis for each member."""
    values, y = outputs[..., 0], batch.y
    while y.dim() < values.dim():
        y = y.unsqueeze(-2)
    return _mean_over_rows((values - y) ** 2, batch.share)


def cross_entropy(logits: Tensor, batch: Rows) -> Tensor:
    """The mean over rows; logits (..., rows, classes) -> (...), with an axis for each member."""
    y, members = batch.y, logits.shape[:-2]
    if not members and batch.share is None:
        return F.cross_entropy(logits, y)
    while y.dim() < logits.dim() - 1:
        y = y.unsqueeze(-2)
    flat = F.cross_entropy(
        logits.flatten(0, -2), y.expand(logits.shape[:-1]).flatten(), reduction="none"
    )
    return _mean_over_rows(flat.view(logits.shape[:-1]), batch.share)


def _mean_over_rows(each: Tensor, share: Tensor | None) -> Tensor:
    """The mean of losses (..., rows), by the shares of rows in a padded batch."""
    if share is None:
        return each.mean(-1)
    while share.dim() < each.dim():
        share = share.unsqueeze(-2)
    return (each * share).sum(-1) / share.sum(-1)


def plain(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """The loss of labels on the common inputs."""
    return label_loss(network(weights, batch.x), batch)


def proximal(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """The loss of labels plus strength/2 times the squared distance to the anchor (Li et al. 2020).

    The weights hold the anchor as anchor/NAME and the strength as `strength`.
    """
    anchor = without("anchor", weights)
    own = {name: weights[name] for name in anchor}
    loss = plain(network, own, batch)
    distance = sum(((own[n] - anchor[n]) ** 2).flatten(loss.dim()).sum(-1) for n in anchor)
    return loss + weights["strength"] / 2 * distance
