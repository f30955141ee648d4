"""What the messages of a split network tell the curious, and what coarser messages change."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.audits.leakage import labels_from_gradients, reconstruction
from atoll.core.federation import SERVER, Clients, Moment, answer
from atoll.core.messages import Packet, unpack
from atoll.core.rng import Stream, normals
from atoll.engines.local import LocalEngine
from atoll.families.vertical import Learn, Learned
from atoll.jobs.split_round import draws
from atoll.learning.split import Batches
from atoll.methods import vleto
from atoll.runs.config import change, resolve
from atoll.runs.parts import Parts, parts

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits"},
    "scenario": {"split": "parties", "clients": 4, "cut": "quadrants", "train": 0.4},
    "method": {"name": "vleto", "rate": 0.1, "batch": 32},
}
CHANCE = 0.1


class Curious:
    """An engine that writes down what site-0 is sent and sends in the first round."""

    def __init__(self, made: Parts) -> None:
        self.clients = {id: made.client(id) for id in made.scenario.clients}
        self.gradients: list[Tensor] = []
        self.embeddings: list[Tensor] = []
        self.seed = 0
        self.measured: vleto.Measure | None = None

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        answers = {id: answer(self.clients[id], action, moment, p) for id, p in packets.items()}
        if action == "learn" and moment.first:
            request = unpack(packets["site-0"], Learn, SERVER)
            self.seed = request.seed
            self.gradients.append(request.gradient)
            self.embeddings.append(unpack(answers["site-0"], Learned, "site-0").embedding)
        if action == "measure":
            self.measured = unpack(packets["site-0"], vleto.Measure, SERVER)
        return answers


def heard(**options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, embeddings, labels and columns of the rows of one round, as site-0 met them."""
    made = parts(resolve(change(SMALL, options), "test"))
    engine, server, moment = Curious(made), made.server(), Moment(0, 0, 2)
    server.round(Clients(made.scenario.clients, engine, moment), moment)
    y, x = made.site(SERVER).train(0).y, made.site("site-0").train(0).x
    batches = Batches(len(y), 32, engine.seed)
    order = torch.cat([batches.at(step, y.device) for step in range(len(batches))])
    return torch.cat(engine.gradients), torch.cat(engine.embeddings), y[order], x[order]


def guessed(gradients: Tensor, y: Tensor) -> float:
    """With three known rows of each class, of the second half of the round."""
    gradients, y = gradients[len(y) // 2 :], y[len(y) // 2 :]
    known = torch.cat([torch.nonzero(y == kind).flatten()[:3] for kind in y.unique()])
    return labels_from_gradients(gradients, y, known)


def test_gradients_tell_labels_and_noise_makes_it_harder() -> None:
    """Documented, not prevented: plain gradients give most labels away."""
    gradients, _, y, _ = heard()
    plain = guessed(gradients, y)
    size = float(gradients.norm(dim=1).mean())
    gradients, _, y, _ = heard(noise=size, clip=size)
    assert plain > 5 * CHANCE
    assert guessed(gradients, y) < 3 * CHANCE


def measured(**options: Any) -> tuple[Tensor, Tensor]:
    """The gradients that site-0 is sent for its Fisher diagonal, and the labels of their rows."""
    made = parts(resolve(change(SMALL, options), "test"))
    engine, server = Curious(made), made.server()
    for number in range(2):
        moment = Moment(0, number, 2)
        server.round(Clients(made.scenario.clients, engine, moment), moment)
    assert engine.measured is not None
    y, gradients = made.site(SERVER).train(0).y, engine.measured.gradient
    order = Batches(len(y), len(y), engine.measured.seed).at(0, y.device)
    return gradients, y[order[: len(gradients)]]


def test_gradients_for_the_fisher_diagonal_are_as_noisy_as_those_of_the_steps() -> None:
    gradients, y = measured()
    size = float(gradients.norm(dim=1).mean()) / 32  # of a step: a batch has 32 rows
    assert guessed(gradients, y) > 5 * CHANCE
    noisy, y = measured(noise=size, clip=size)
    assert guessed(noisy, y) < 3 * CHANCE
    clipped, y = measured(clip=size)
    assert float(clipped.norm(dim=1).max()) <= 32 * size * 1.0001


def test_who_knows_the_seed_takes_the_noise_off_unless_it_is_secret() -> None:
    """Documented: the noise of a run that can be repeated hides nothing from its clients."""
    first, _, _, _ = heard()
    size = float(first.norm(dim=1).mean())

    def without_noise(**options: Any) -> float:
        gradients, _, y, _ = heard(noise=size, clip=size, **options)
        stream = Stream.of(0, SERVER, "step", 0, 0)  # the run's seed is in every client's config
        drawn = [
            normals(draws(torch.tensor(stream.child(step).key), 3), tuple(part.shape))
            for step, part in enumerate(gradients.split(32))
        ]
        return guessed(gradients - size * torch.cat(drawn), y)

    assert without_noise() > 5 * CHANCE
    assert without_noise(secret=True) < 3 * CHANCE


def test_embeddings_tell_columns_and_fewer_digits_hardly_help() -> None:
    _, embeddings, _, x = heard()
    plain = reconstruction(embeddings, x, 400)
    drawn = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
    assert plain > 0.5
    assert reconstruction(drawn, x, 400) < 0.05
    _, embeddings, _, x = heard(digits=1)
    assert 0.3 < reconstruction(embeddings, x, 400) <= plain + 0.01


def test_prototypes_tell_the_mean_columns_of_a_class() -> None:
    """Documented, not prevented: who had the prototypes would know what a class looks like."""
    made = parts(resolve(SMALL, "test"))
    engine, server = LocalEngine(made), made.server()
    for number in range(2):
        moment = Moment(0, number, 2)
        server.round(Clients(made.scenario.clients, engine, moment), moment)
    y, ids = made.site(SERVER).train(0).y, made.scenario.clients
    rows = {id: made.site(id).train(0).x for id in ids}
    joint = torch.stack([engine._client(id).learner.half.embed(rows[id]) for id in ids]).sum(0)
    x = torch.cat([rows[id].flatten(1) for id in ids], 1)
    means = torch.stack([x[y == kind].mean(0) for kind in range(10)])
    # the map is fitted on 400 rows that the attacker knows, and judged on the ten class means
    both = torch.cat([joint[:400], server.means]), torch.cat([x[:400], means])
    assert reconstruction(*both, 400) > 0.5
    drawn = torch.randn(server.means.shape, generator=torch.Generator().manual_seed(0))
    scale = joint.std()
    assert reconstruction(torch.cat([joint[:400], drawn * scale]), both[1], 400) < 0


def test_the_attacks_by_hand() -> None:
    gradients = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.1], [0.1, 5.0]])
    y, known = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1])
    assert labels_from_gradients(gradients, y, known) == 1
    assert labels_from_gradients(gradients, 1 - y[[0, 1, 3, 2]], known) == 0
    e = torch.linspace(-1, 1, 40).view(20, 2)
    assert reconstruction(e, 3 * e + 1, 10, ridge=1e-12) == pytest.approx(1, abs=1e-6)
