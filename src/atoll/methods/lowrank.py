"""Low-rank adapters on a frozen network: sites train and send adapters and the output layer.

Adapters after Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. With
merging = "closed" the server merges them as in Salami et al., Closed-form Merging of
Parameter-efficient Modules for Federated Continual Learning (LoRM), ICLR 2025.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.annotations import RowCount, Update
from atoll.core.errors import BadMessageError
from atoll.core.federation import Clients, Moment, Working, no_restore, no_state, scores, shares
from atoll.core.messages import Check, Checked, Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, Positive
from atoll.core.record import Score
from atoll.data.site import Site
from atoll.families import averaging
from atoll.families.averaging import Weighting
from atoll.jobs.train import Optimiser, Phase, TrainJob, in_chunks, scored
from atoll.learning import adapters
from atoll.learning.models import shared
from atoll.learning.weights import copied, mean, placed, prefixed, without


@dataclass(frozen=True)
class Options:
    """The options of `lowrank`."""

    rank: AtLeastOne = 4  # rank of the adapters; at most the size of a layer
    merging: Literal["mean", "closed"] = "mean"  # closed: LoRM's closed form, for MLPs
    softmax: Literal["all", "present"] = "present"  # classes in the loss: all, or the site's own
    floor: AtLeastOne = 10  # closed: training rows below which a site sends no squares of inputs
    rate: Positive = 0.001  # learning rate of local training
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # fresh in every round
    weighting: Weighting = "equal"  # weight of each client in a mean


@dataclass(frozen=True)
class Fitted:
    """A client's adapters and output layer after local training."""

    weights: Annotated[Tensors, Update(of="weights")]
    squares: Tensors  # closed: by layer, mean squared inputs; zeros below the floor
    loss: float  # the mean over the rows of an epoch
    rows: Annotated[int, RowCount()]  # training rows of the stage


def factors(options: Options, moment: Moment) -> tuple[str, ...]:
    """The factors that a round trains; a closed form exists where sites share the other one."""
    if options.merging == "mean":
        return ("up", "down")
    return ("down",) if moment.round % 2 else ("up",)


class Client:
    """Trains adapters of a network that stays as it is; nothing outlives a message."""

    predict = averaging.predict
    state, restore = no_state, no_restore  # nothing outlives a message

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        self.outline = site.outline(training=False)  # frozen: no statistics of batches, no dropout
        self.tested = shared(self.outline)
        self.base: Tensors = copied(site.model().state_dict())
        self.loss = partial(adapters.masked_loss, self.tested)

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train the adapters and the output layer on the rows of the stage."""
        options, rows = self.options, self.site.train(moment.stage)
        weights = placed(request.weights, self.site.device)
        moves = tuple(
            name for name in weights if "/" not in name or name.startswith(factors(options, moment))
        )
        optimiser = Optimiser(options.optimiser, options.rate)
        count = len(self.site.classes)
        y = rows.y if options.softmax == "present" else torch.arange(count)
        mask = adapters.class_mask(y, count).to(self.site.device, self.site.dtype)
        constants = prefixed("base", self.base) | {"constant/mask": mask}
        result = yield TrainJob(
            *(weights | constants, {}, (Phase("loss", moves, self.loss, optimiser),), rows),
            options.batch,
            options.epochs,
            self.site.stream("fit", moment),
        )
        trained = {name: result.weights[name] for name in weights}
        return Fitted(trained, self._squares(trained, rows.x), result.losses["loss"], len(rows))

    @torch.no_grad()
    def _squares(self, trained: Tensors, x: Tensor) -> Tensors:
        """The squared inputs of the layers under the site's own adapters."""
        if self.options.merging == "mean":
            return {}
        weights = adapters.merged(self.base, trained)
        squares = adapters.input_squares(self.outline, weights, x)
        if len(x) < self.options.floor:
            return {name: torch.zeros_like(values) for name, values in squares.items()}
        return squares

    def check(self, request: Check, moment: Moment) -> Checked:
        """Test the network with the shared adapters on a task."""
        weights = adapters.merged(self.base, placed(request.weights, self.site.device))
        rows = self.site.test(request.task)
        return scored({"": in_chunks(partial(averaging.predict, self, weights), rows)}, rows.y)

    def final_model(self, shared: Tensors, variant: str, task: int) -> Tensors:
        """The weights of the whole network."""
        trained = placed(without("weights", shared), self.site.device)
        return copied(adapters.merged(self.base, trained))


class Server:
    """Holds the shared adapters, and for the closed form what they were at the end of stages."""

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        model = site.model()
        output = {name: model.get_parameter(name) for name in adapters.output_layer(model)}
        initial = adapters.draw_adapters(model, options.rank, site.stream("adapters"))
        self.weights: Tensors = copied(initial | output)
        self.layers = adapters.adapted_layers(model)
        closed = options.merging == "closed"
        self.past: Tensors = adapters.first_past(model) if closed else {}

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the adapters, merge what comes back."""
        replies = clients.ask_all(Client.fit, Weights(self.weights), admit=self._admit)
        rows = shares({id: reply.rows for id, reply in replies.items()})
        by_rows = rows if self.options.weighting == "rows" else None
        before = self.weights
        self.weights = mean([reply.weights for reply in replies.values()], by_rows)
        if self.options.merging == "closed":
            self._merge(list(replies.values()), by_rows or [1.0] * len(rows), before, moment)
        return {"loss": sum(reply.loss for reply in replies.values()) / len(replies)}

    def _merge(
        self, replies: list[Fitted], by_rows: list[float], before: Tensors, moment: Moment
    ) -> None:
        """Replace the mean of the trained factor by its closed form; the other one stays."""
        (factor,) = factors(self.options, moment)
        frozen = "down" if factor == "up" else "up"
        merge = adapters.merge_up if factor == "up" else adapters.merge_down
        device = next(iter(self.weights.values())).device
        past, before = placed(self.past, device), placed(before, device)
        for name in self.layers:
            squares = [reply.squares[name] for reply in replies]
            layer = adapters.Layer(
                [reply.weights[f"{factor}/{name}"].double() for reply in replies],
                before[f"{frozen}/{name}"].double(),
                adapters.weighted_squares(squares, by_rows),
                past[f"change/{name}"],
                past[f"squares/{name}"],
            )
            key = f"{factor}/{name}"
            self.weights[key] = merge(layer).to(self.weights[key].dtype)
            self.weights[f"{frozen}/{name}"] = before[f"{frozen}/{name}"]
            if moment.last:
                change = self.weights[f"up/{name}"] @ self.weights[f"down/{name}"]
                self.past |= {f"change/{name}": change.double(), f"squares/{name}": layer.total}

    def _admit(self, id: str, reply: Fitted) -> None:
        """Refuse squares of other layers, and negative ones."""
        closed = self.options.merging == "closed"
        sizes = {n: (self.weights[f"down/{n}"].shape[1],) for n in self.layers if closed}
        if {name: tuple(values.shape) for name, values in reply.squares.items()} != sizes:
            raise BadMessageError(id, "squared inputs of another network")
        if any(bool((values < 0).any()) for values in reply.squares.values()):
            raise BadMessageError(id, "squared inputs below 0")

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Test the shared adapters on every client's test rows."""
        return scores(clients, Client.check, self.weights, moment)

    def state(self) -> Tensors:
        return prefixed("weights", self.weights) | prefixed("past", self.past)

    def restore(self, state: Tensors) -> None:
        self.weights = copied(without("weights", state))
        self.past = copied(without("past", state))


METHOD = Method(
    Options,
    Server,
    Client,
    quorum=True,
    weighted=True,
    first=lambda server: {"shared": server.weights},
    whole=lambda site, weights: adapters.merged(copied(site.model().state_dict()), weights),
)
