"""What methods share whose clients train one shared model and whose server averages weights.

A client has `site`, `tested` (the network in the mode of tests) and these functions as its own:
`check`, `final_model`, `predict`. A server whose whole state is the shared model has
`server_state` and `server_restore` as its `state` and `restore`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from torch import Tensor

from atoll.core.annotations import RowCount, Update
from atoll.core.federation import Moment, shares
from atoll.core.messages import Check, Checked, Tensors
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import Optimiser, Phase, in_chunks, scored
from atoll.learning.models import Architecture, shared
from atoll.learning.weights import copied, mean, placed

__all__ = [
    "Fitted",
    "Trainer",
    "Weighting",
    "averaged",
    "check",
    "final_model",
    "local_training",
    "predict",
    "server_restore",
    "server_state",
]

Weighting = Literal["equal", "rows"]


@dataclass(frozen=True)
class Fitted:
    """A client's weights after local training."""

    weights: Annotated[Tensors, Update(of="weights")]
    loss: float  # the mean over the rows of an epoch
    rows: Annotated[int, RowCount()]  # training rows of the stage


class Trainer(Protocol):
    """A client that trains the shared model."""

    site: Site
    tested: Architecture


def local_training(
    site: Site, loss: Callable[..., Tensor], optimiser: Optimiser
) -> tuple[Phase, Architecture]:
    """A phase that moves all weights by `loss(network, weights, batch)`; the network in tests."""
    moves = tuple(name for name, _ in site.outline().named_parameters())
    phase = Phase("loss", moves, partial(loss, shared(site.outline())), optimiser)
    return phase, shared(site.outline(training=False))


def check(self: Trainer, request: Check, moment: Moment) -> Checked:
    """Test the shared weights on a task."""
    weights, rows = placed(request.weights, self.site.device), self.site.test(request.task)
    outputs = in_chunks(partial(predict, self, weights), rows)
    return scored({"": outputs}, rows.y, self.site.target.deviation)


def final_model(self: Any, shared: Tensors, variant: str, task: int) -> Tensors:
    """The shared model."""
    return shared


def predict(self: Trainer, model: Tensors, rows: Rows) -> Tensor:
    """The logits of a final model."""
    return self.tested(model, rows.x)


def averaged(replies: Mapping[str, Fitted], weighting: Weighting) -> tuple[Tensors, float]:
    """The mean of weights, each client alike or by its rows, and the mean loss."""
    rows = shares({id: reply.rows for id, reply in replies.items()})
    weights = [reply.weights for reply in replies.values()]
    loss = sum(reply.loss for reply in replies.values()) / len(replies)
    return mean(weights, rows if weighting == "rows" else None), loss


def server_state(self: Any) -> Tensors:
    """The shared weights."""
    weights: Tensors = self.weights
    return weights


def server_restore(self: Any, state: Tensors) -> None:
    """Continue with saved weights."""
    self.weights = copied(state)
