"""Replay: FedAvg whose clients keep a few rows of earlier stages and train on them too.

Experience replay: Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019. Herding:
Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from atoll.core.federation import Clients, Moment, Working, scores
from atoll.core.messages import Tensors, Weights
from atoll.core.method import Method
from atoll.core.options import AtLeastOne, NotNegativeInt, Positive
from atoll.core.record import Score
from atoll.core.rows import Rows
from atoll.data.site import Site
from atoll.families import averaging
from atoll.families.averaging import Fitted, Weighting
from atoll.jobs.train import Optimiser, TrainJob, in_chunks
from atoll.learning import exemplars
from atoll.learning.losses import plain
from atoll.learning.ridge import frozen_features
from atoll.learning.weights import copied, placed


@dataclass(frozen=True)
class Options:
    """The options of `replay`."""

    memory: NotNegativeInt = 200  # rows of earlier stages that a site keeps at most
    choice: Literal["random", "herding"] = "random"  # herding: rows near the mean of their class
    share: Annotated[float, Field(ge=0, le=0.9)] = 0.5  # of memory rows in an epoch, by repetition
    rate: Positive = 0.001  # learning rate of local training
    batch: AtLeastOne = 64  # batch size; the last, smaller batch is kept
    epochs: AtLeastOne = 5  # local epochs per round
    optimiser: Literal["adam", "sgd"] = "adam"  # fresh in every round
    weighting: Weighting = "equal"  # weight of each client in the mean


class Client:
    """Trains the shared model on the rows of the stage and on its memory."""

    check, final_model, predict = averaging.check, averaging.final_model, averaging.predict

    def __init__(self, options: Options, site: Site) -> None:
        self.options, self.site = options, site
        how = Optimiser(options.optimiser, options.rate)
        self.phase, self.tested = averaging.local_training(site, plain, how)
        self.memory: exemplars.Groups = {}
        self._epoch: tuple[int, Rows] | None = None  # stage, and what its epochs go through

    def fit(self, request: Weights, moment: Moment) -> Working[Fitted]:
        """Train the shared weights; at the end of a stage, choose what to remember of it."""
        options, weights = self.options, placed(request.weights, self.site.device)
        stream = self.site.stream("fit", moment)
        result = yield TrainJob(
            weights,
            {},
            (self.phase,),
            self._rows(moment.stage),
            options.batch,
            options.epochs,
            stream,
        )
        if moment.last:
            self._remember(result.weights, moment)
        rows = len(self.site.train(moment.stage))
        return Fitted(result.weights, result.losses["loss"], rows)

    def _rows(self, stage: int) -> Rows:
        """The rows of a stage and those of the memory, as often as their share asks for."""
        if self._epoch is None or self._epoch[0] != stage:
            rows = self.site.train(stage)
            parts = []
            for (_, before), numbers in self.memory.items():
                index = torch.tensor(numbers, dtype=torch.int64, device=self.site.device)
                parts.append(self.site.train(before).at(index))
            memory = exemplars.joined(parts) if parts else rows.at(slice(0))
            if len(memory) and self.options.share:
                memory = exemplars.repeated(memory, len(rows), self.options.share)
                rows = exemplars.joined([rows, memory])
            self._epoch = stage, rows
        return self._epoch[1]

    def _remember(self, weights: Tensors, moment: Moment) -> None:
        """Choose rows of each class of the stage; all classes and stages have equal parts."""
        rows, groups = self.site.train(moment.stage), dict(self.memory)
        for kind in rows.y.unique().tolist():
            places = (rows.y == kind).nonzero().flatten()
            if self.options.choice == "herding":
                features = in_chunks(
                    lambda part: frozen_features(self.tested, weights, part.x), rows.at(places)
                )
                order = exemplars.herding_order(features, self.options.memory)
            else:
                stream = self.site.stream("memory", moment.stage, kind)
                order = stream.permutation(len(places)).tolist()
            groups[kind, moment.stage] = [int(places[number]) for number in order]
        self.memory = exemplars.shortened(groups, self.options.memory)

    def state(self) -> Tensors:
        return {"memory": exemplars.to_table(self.memory)}

    def restore(self, state: Tensors) -> None:
        self.memory, self._epoch = exemplars.from_table(state["memory"]), None


class Server:
    """Holds the shared model."""

    state, restore = averaging.server_state, averaging.server_restore

    def __init__(self, options: Options, site: Site) -> None:
        self.options = options
        self.weights: Tensors = copied(site.model().state_dict())

    def round(self, clients: Clients, moment: Moment) -> Mapping[str, float]:
        """Send the model out, take the mean of what comes back."""
        replies = clients.ask_all(Client.fit, Weights(self.weights))
        self.weights, loss = averaging.averaged(replies, self.options.weighting)
        return {"loss": loss}

    def evaluate(self, clients: Clients, moment: Moment) -> list[Score]:
        """Test the shared model on every client's test rows."""
        return scores(clients, Client.check, self.weights, moment)


def own_share(options: Options, rows: int, before: int) -> float:
    """The share of distinct own rows in an epoch of a stage, whose memory is repeated."""
    memory = min(options.memory, before)
    if not memory or not options.share:
        return 1.0
    repeated = round(rows * options.share / (1 - options.share))
    return (rows + memory) / (rows + max(memory, repeated))


METHOD = Method(
    Options,
    Server,
    Client,
    quorum=True,
    weighted=True,
    first=lambda server: {"shared": server.weights},
    own_share=own_share,
)
