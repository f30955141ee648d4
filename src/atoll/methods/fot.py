"""FOT: the server projects updates out of the subspaces in which earlier stages' activations lie.

Bakman, Yaldiz, Ezzeldin, Avestimehr, Federated Orthogonal Training: Mitigating Global Catastrophic
Forgetting in Continual Federated Learning, ICLR 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from atoll.core.annotations import RowSums
from atoll.core.errors import BadMessageError, UserError
from atoll.core.federation import Clients, Moment, Working, no_restore, no_state, scores
from atoll.core.messages import Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Positive
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.families import averaging
from atoll.families.averaging import Fitted, Weighting
from atoll.jobs.train import Optimiser, TrainJob
from atoll.learning import subspaces
from atoll.learning.losses import plain
from atoll.learning.models import MLP
from atoll.learning.weights import copied, placed, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `fot`."""

    energy: Annotated[float, Field(gt=0, lt=1)] = 0.95  # share of activations that is protected
    floor: AtLeastOne = 10  # training rows of a stage below which a site sends no activations
    rate: Positive = 0.001  # learning rate of local training
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # fresh in every round
    weighting: Weighting = "equal"  # weight of each client in the mean


@dataclass(frozen=True)
class Activations:
    """The activations of the rows of a stage."""

    # by layer, of its inputs and a constant; zeros below the floor
    grams: Annotated[Tensors, RowSums()]


class Client:
    """Trains the shared model; nothing outlives a message."""

    check, predict = averaging.check, averaging.predict
    state, restore = no_state, no_restore  # nothing outlives a message

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        optimiser = Optimiser(options.optimiser, options.rate)
        self.phase, self.tested = averaging.local_training(site, plain, optimiser)

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train the shared weights on the rows of the stage."""
        options, rows = self.options, self.site.train(moment.stage)
        weights = placed(request.weights, self.site.device)
        stream = self.site.stream("fit", moment)
        result = yield TrainJob(
            weights, {}, (self.phase,), rows, options.batch, options.epochs, stream
        )
        return Fitted(result.weights, result.losses["loss"], len(rows))

    @torch.no_grad()
    def activations(self, request: Weights, moment: Moment) -> Activations:
        """The Gram matrices of the inputs of all layers, for the rows of the stage."""
        weights, rows = placed(request.weights, self.site.device), self.site.train(moment.stage)
        grams = subspaces.input_grams(_mlp(self.site), weights, rows.x)
        if len(rows) < self.options.floor:
            grams = {layer: torch.zeros_like(gram) for layer, gram in grams.items()}
        return Activations(grams)

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The shared model."""
        return without("weights", shared)


class Server:
    """Holds the shared model and a basis of the protected subspace of each layer."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        _mlp(site)
        self.weights: Tensors = copied(site.model().state_dict())
        self.bases: Tensors = {}

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Average, and project; after the last round of a stage, protect its subspaces."""
        replies = clients.ask_all(Client.fit, Weights(self.weights))
        weights, loss = averaging.averaged(replies, self.options.weighting)
        before = placed(self.weights, next(iter(weights.values())).device)
        self.weights = subspaces.projected(before, weights, self.bases)
        if moment.last and moment.stage < self.site.stages - 1:
            self._protect(clients)
        columns = sum(basis.shape[1] for basis in self.bases.values())
        widths = sum(len(basis) for basis in self.bases.values())
        return {"loss": loss, "protected": columns / max(1, widths)}

    def _protect(self, clients: Clients) -> None:
        """Enlarge the bases by the activations of all sites."""
        request = Weights(self.weights)
        replies = clients.ask_all(Client.activations, request, admit=self._admit)
        for layer in (str(number) for number in range(_mlp(self.site).depth)):
            gram = torch.stack([reply.grams[layer] for reply in replies.values()]).sum(0)
            basis = self.bases.get(layer, gram.new_zeros((len(gram), 0)))
            self.bases[layer] = subspaces.enlarged(basis, gram, self.options.energy)

    def _admit(self, id: str, reply: Activations) -> None:
        """Refuse Gram matrices of another network."""
        widths = [self.weights[f"weight{n}"].shape[1] + 1 for n in range(_mlp(self.site).depth)]
        shapes = {str(number): (width, width) for number, width in enumerate(widths)}
        if {layer: tuple(gram.shape) for layer, gram in reply.grams.items()} != shapes:
            raise BadMessageError(id, "Gram matrices of another network")

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Test the shared model on every client's test rows."""
        return scores(clients, Client.check, self.weights, moment)

    def state(self) -> Tensors:
        return prefixed("weights", self.weights) | prefixed("bases", self.bases)

    def restore(self, state: Tensors) -> None:
        self.weights, self.bases = (
            copied(without("weights", state)),
            copied(without("bases", state)),
        )


def _mlp(site: Site) -> MLP:
    """The network; raises for one whose layers are unknown here."""
    model = site.outline(training=False)
    if not isinstance(model, MLP):
        raise UserError("'fot' knows the layers of an MLP alone", "model.name", "use 'mlp'")
    return model


def summed(options: Options, site: Site) -> list[tuple[int, int]]:
    """The columns of the widest sums, with a constant, and the rows behind them, by stage."""
    widths = [weight.shape[1] for weight in _mlp(site).parameters() if weight.dim() > 1]
    rows = [len(site.train(stage)) for stage in range(site.stages - 1)]  # the last sends none
    return [(max(widths) + 1, count if count >= options.floor else 0) for count in rows]


METHOD = Method(
    Options,
    Server,
    Client,
    quorum=True,
    weighted=True,
    first=lambda server: {"shared": server.weights},
    summed=summed,
)
