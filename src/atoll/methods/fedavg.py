"""FedAvg: clients train the shared model on the common columns, the server takes the mean.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
With penalty = "proximal" this is FedProx: Li et al., Federated Optimization in Heterogeneous
Networks, 2020.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.annotations import RowCount, Update
from atoll.core.federation import Clients, Moment, Working, scores, shares
from atoll.core.messages import Check, Checked, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.jobs.train import Optimiser, Phase, TrainJob, hits, in_chunks
from atoll.learning.losses import plain, proximal
from atoll.learning.models import shared
from atoll.learning.weights import copied, mean, placed, prefixed


@dataclass(frozen=True)
class Options:
    """The options of `fedavg`."""

    rate: Positive = 0.001  # learning rate of local training
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # fresh in every round
    penalty: Literal["none", "proximal"] = "none"  # proximal: stay near the shared model (FedProx)
    strength: NotNegative = 0.01  # weight of the penalty (mu in FedProx)
    weighting: Literal["equal", "rows"] = "equal"  # weight of each client in the mean
    cohort: NotNegativeInt = 0  # clients sampled per round; 0: all
    tester: Literal["all", "first"] = "all"  # first: one client tests for all; for shared test rows


@dataclass(frozen=True)
class Fitted:
    """What a client made of the shared weights."""

    weights: Annotated[Tensors, Update(of="weights")]
    loss: float  # the mean over the rows
    rows: Annotated[int, RowCount()]


class Client:
    """Trains the shared model; nothing outlives a message."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.network = shared(site.outline())
        self.tested = shared(site.outline(training=False))
        self.moves = tuple(name for name, _ in site.outline().named_parameters())
        loss = plain if options.penalty == "none" else proximal
        how = Optimiser(options.optimiser, options.rate)
        self.phase = Phase("loss", self.moves, partial(loss, self.network), how)

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train the shared weights on the rows of the stage."""
        options, rows = self.options, self.site.train(moment.stage)
        weights = placed(request.weights, self.site.device)
        self.site.probe("others", moment, partial(self._checked, weights))
        if options.penalty == "proximal":
            weights = {**weights, **prefixed("anchor", {n: weights[n] for n in self.moves})}
            weights["strength"] = torch.tensor(options.strength, device=self.site.device)
        stream = self.site.stream("fit", moment)
        result = yield TrainJob(
            weights, {}, (self.phase,), rows, options.batch, options.epochs, stream
        )
        fitted = {name: result.weights[name] for name in request.weights}
        self.site.probe("own", moment, partial(self._checked, fitted))
        return Fitted(fitted, result.losses["loss"], len(rows))

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the shared weights on a task."""
        reply = self._checked(request.weights, request.task)
        self.site.probe("others", moment, lambda task: reply, tasks=[request.task])
        return reply

    def _checked(self, weights: Tensors, task: int) -> Checked:
        own = placed(weights, self.site.device)
        rows = self.site.test(task)
        correct, f1 = hits(in_chunks(lambda part: self.tested(own, part.x), rows), rows.y)
        return Checked(len(rows), {"": correct}, {"": f1})

    def state(self) -> Tensors:
        return {}  # nothing outlives a message

    def restore(self, state: Tensors) -> None:
        pass

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The shared model."""
        return shared

    def predict(self, model: Tensors, rows: Rows) -> Tensor:
        """The logits of a final model."""
        return self.tested(model, rows.x)


class Server:
    """Holds the shared model."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.weights: Tensors = copied(site.model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the model out, take the mean of what comes back."""
        asked = dict.fromkeys(self._cohort(clients, moment), Weights(self.weights))
        answers = clients.ask(Client.fit, asked)
        replies, rows = list(answers.values()), {id: reply.rows for id, reply in answers.items()}
        weights = shares(rows) if self.options.weighting == "rows" else None
        self.weights = mean([reply.weights for reply in replies], weights)
        return {"loss": sum(reply.loss for reply in replies) / len(replies)}

    def _cohort(self, clients: Clients, moment: Moment) -> list[str]:
        if not self.options.cohort:
            return sorted(clients.ids)
        order = self.site.stream("cohort", moment).permutation(len(clients.ids))
        there = set(clients.present)
        drawn = [clients.ids[i] for i in order.tolist() if clients.ids[i] in there]
        return sorted(drawn[: self.options.cohort])

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """The shared model on every client's test rows."""
        if self.options.tester == "first":
            clients = replace(clients, ids=clients.present[:1])
        return scores(clients, Client.check, self.weights, moment)

    def state(self) -> Tensors:
        return self.weights

    def restore(self, state: Tensors) -> None:
        self.weights = copied(state)


METHOD = Method(
    *(Options, Server, Client),
    quorum=True,
    asked=lambda options, clients: min(options.cohort or clients, clients),
    first=lambda server: {"shared": server.weights},
)
