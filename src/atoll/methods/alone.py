"""Alone: every client trains its own model on its own rows, and nothing is shared.

The baseline for federation: a client that does better here gains nothing by taking part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from atoll.core.federation import Clients, Moment, Working, no_restore, no_state, scores
from atoll.core.messages import Check, Checked, Empty, Tensors
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import Optimiser, Phase, TrainJob, in_chunks, scored
from atoll.learning.losses import label_loss
from atoll.learning.models import Architecture, skeleton
from atoll.learning.weights import copied, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `alone`."""

    rate: Positive = 0.001  # learning rate
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # how the weights follow their gradient
    columns: Literal["all", "common"] = "all"  # the columns a client reads


@dataclass(frozen=True)
class Trained:
    """The mean loss of a round."""

    loss: float


def logits(
    weights: Mapping[str, Tensor], rows: Rows, *, network: Architecture, columns: str
) -> Tensor:
    """The logits of rows, from all columns or the common ones."""
    return network(weights, rows.all if columns == "all" else rows.x)


def loss(
    weights: Mapping[str, Tensor], batch: Rows, *, network: Architecture, columns: str
) -> Tensor:
    """The loss of the labels."""
    return label_loss(logits(weights, batch, network=network, columns=columns), batch)


class Client:
    """Trains its own model and keeps it."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        model = site.model(own=options.columns == "all")
        self.kwargs: dict[str, Any] = {"network": skeleton(model, True), "columns": options.columns}
        self.tested: dict[str, Any] = {**self.kwargs, "network": skeleton(model, False)}
        self.moves = tuple(name for name, _ in model.named_parameters())
        self.weights = copied(model.state_dict())
        self.moments: Tensors = {}

    def fit(self, request: Empty, moment: Moment) -> Working[Trained]:
        """Train on the rows of the stage."""
        options = self.options
        optimiser = Optimiser(options.optimiser, options.rate)
        phase = Phase("loss", self.moves, partial(loss, **self.kwargs), optimiser)
        rows, stream = self.site.train(moment.stage), self.site.stream("fit", moment)
        result = yield TrainJob(
            self.weights, self.moments, (phase,), rows, options.batch, options.epochs, stream
        )
        self.weights, self.moments = result.weights, result.moments
        self.site.probe("own", moment, self._checked)
        return Trained(result.losses["loss"])

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test on a task."""
        return self._checked(request.task)

    def _checked(self, task: int) -> Checked:
        rows = self.site.test(task)
        outputs = in_chunks(lambda part: logits(self.weights, part, **self.tested), rows)
        return scored({"": outputs}, rows.y, self.site.target.deviation)

    def state(self) -> Tensors:
        return prefixed("weights", self.weights) | prefixed("moments", self.moments)

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        self.moments = copied(without("moments", state))

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The model of this client."""
        return self.weights

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        return logits(model, rows, **self.kwargs)


class Server:
    """Asks all clients to train; holds no state."""

    state, restore = no_state, no_restore  # nothing outlives a round

    def __init__(self, options: Options, site: Site) -> None:
        pass

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """One round of training everywhere."""
        replies = clients.ask_all(Client.fit, Empty())
        return {"loss": sum(reply.loss for reply in replies.values()) / len(replies)}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Every client on its own test rows."""
        return scores(clients, Client.check, {}, moment)


METHOD = Method(
    Options, Server, Client, split="columns", quorum=True, weighted=True, regression=True
)
