"""FedAvg: clients train the shared model on the common columns, the server takes the mean.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
With penalty = "proximal" this is FedProx: Li et al., Federated Optimization in Heterogeneous
Networks, 2020. The penalties "ewc", "si" and "lwf" act against forgetting (learning/penalties.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from atoll.core.errors import UserError
from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Check, Checked, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegative, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.families import averaging
from atoll.families.averaging import Fitted, Weighting
from atoll.jobs.train import Optimiser, Phase, TrainJob, in_chunks, scored
from atoll.learning.models import shared
from atoll.learning.penalties import Past, Penalty
from atoll.learning.weights import copied, placed


@dataclass(frozen=True)
class Options:
    """The options of `fedavg`."""

    rate: Positive = 0.001  # learning rate of local training
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # fresh in every round
    penalty: Penalty = "none"  # proximal: stay near the shared model (FedProx); others: of the past
    strength: NotNegative = 0.01  # weight of the penalty (mu in FedProx)
    weighting: Weighting = "equal"  # weight of each client in the mean
    cohort: NotNegativeInt = 0  # clients sampled per round; 0: all
    tester: Literal["all", "first"] = "all"  # first: one client tests for all; for shared test rows


class Client:
    """Trains the shared model; what its penalty remembers of earlier stages outlives a message."""

    final_model, predict = averaging.final_model, averaging.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        if site.regression and options.penalty == "lwf":
            what = "lwf distils the logits of classes, and the label is a number"
            raise UserError(what, "method.penalty", "use none, proximal, ewc or si")
        self.network = shared(site.outline())
        self.tested = shared(site.outline(training=False))
        self.moves = tuple(name for name, _ in site.outline().named_parameters())
        self.past = Past(options.penalty, options.strength, self.tested)

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train the shared weights on the rows of the stage."""
        options, rows = self.options, self.site.train(moment.stage)
        weights = placed(request.weights, self.site.device)
        self.site.probe("others", moment, partial(self._checked, weights))
        self.past.begin(weights, moment.stage)
        loss, constants, batches = self.past.terms(weights, rows)
        optimiser = Optimiser(options.optimiser, options.rate)
        phase = Phase("loss", self.moves, partial(loss, self.network), optimiser)
        stream = self.site.stream("fit", moment)
        result = yield TrainJob(
            constants, {}, (phase,), batches, options.batch, options.epochs, stream
        )
        fitted = {name: result.weights[name] for name in request.weights}
        self.past.end(weights, fitted, rows, moment.last)
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
        outputs = in_chunks(lambda part: self.tested(own, part.x), rows)
        return scored({"": outputs}, rows.y, self.site.target.deviation)

    def state(self) -> Tensors:
        return self.past.state()

    def restore(self, state: Tensors) -> None:
        self.past.restore(state)


class Server:
    """Holds the shared model."""

    state, restore = averaging.server_state, averaging.server_restore

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.weights: Tensors = copied(site.model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the model out, take the mean of what comes back."""
        requests = dict.fromkeys(self._cohort(clients, moment), Weights(self.weights))
        replies = clients.ask(Client.fit, requests)
        self.weights, loss = averaging.averaged(replies, self.options.weighting)
        return {"loss": loss}

    def _cohort(self, clients: Clients, moment: Moment) -> list[str]:
        if not self.options.cohort:
            return sorted(clients.ids)
        order = self.site.stream("cohort", moment).permutation(len(clients.ids))
        present = set(clients.present)
        cohort = [clients.ids[i] for i in order.tolist() if clients.ids[i] in present]
        return sorted(cohort[: self.options.cohort])

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """The shared model on every client's test rows."""
        if self.options.tester == "first":
            clients = replace(clients, ids=clients.present[:1])
        return scores(clients, Client.check, self.weights, moment)


METHOD = Method(
    Options,
    Server,
    Client,
    quorum=True,
    regression=True,
    weighted=True,
    concurrency=lambda options, clients: min(options.cohort or clients, clients),
    first=lambda server: {"shared": server.weights},
)
