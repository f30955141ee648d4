"""Names that are not a network's own are constants of a loss, for every kind of network."""

import pytest
import torch
from torch import nn

from atoll.core.rng import Stream
from atoll.learning.models import MLP, Architecture

NETWORKS = {
    "mlp": lambda: MLP((3,), [4], 2, Stream.of(0)),
    "another": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_constants_of_a_loss_do_not_reach_the_network(name: str) -> None:
    model = NETWORKS[name]()
    network, x = Architecture(model), torch.ones(5, 3)
    weights = {key: value.detach() for key, value in model.state_dict().items()}
    constants = {f"server/{key}": value for key, value in weights.items()}
    assert torch.equal(network({**weights, **constants}, x), network(weights, x))
    several = {key: torch.stack([value, 2 * value]) for key, value in weights.items()}
    shift = {"shift": torch.zeros(7)}  # no axis of members
    both = torch.stack([x, x])
    assert torch.equal(network({**several, **shift}, both), network(several, both))
