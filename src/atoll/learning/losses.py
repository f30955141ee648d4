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

__all__ = ["cross_entropy", "plain", "proximal"]


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
    each = flat.view(logits.shape[:-1])
    if batch.share is None:
        return each.mean(-1)
    share = batch.share
    while share.dim() < each.dim():
        share = share.unsqueeze(-2)
    return (each * share).sum(-1) / share.sum(-1)


def plain(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Cross-entropy on the common inputs."""
    return cross_entropy(network(weights, batch.x), batch)


def proximal(network: Architecture, weights: Mapping[str, Tensor], batch: Rows) -> Tensor:
    """Cross-entropy plus strength/2 times the squared distance to the anchor (Li et al. 2020).

    The weights hold the anchor as anchor/NAME and the strength as `strength`.
    """
    anchor = without("anchor", weights)
    own = {name: weights[name] for name in anchor}
    loss = plain(network, own, batch)
    distance = sum(((own[n] - anchor[n]) ** 2).flatten(loss.dim()).sum(-1) for n in anchor)
    return loss + weights["strength"] / 2 * distance
