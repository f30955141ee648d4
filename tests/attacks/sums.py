"""Rows out of sums over rows: the Gram matrices of `analytic` and `fot`.

The Gram matrix of few rows has their span: a row is found by a search for inputs whose features
lie in it. Where a coordinator chooses the network (`fot`), units that few rows reach give their
rows one by one, whatever the number of rows.
"""

import torch
from torch import Tensor

from atoll.core.federation import Moment
from atoll.core.messages import Tensors, Weights, unpack
from atoll.learning import ridge
from atoll.methods import analytic, fot

from .row_recovery import Coordinator, matched

STARTS, STEPS = 1000, 300  # of the search
PURE = 1e-3  # relative distance at which the products of a unit are those of one row
RATES = {0: 0.05, STEPS // 2: 0.01, 3 * STEPS // 4: 0.001}


def recovered_by_span(coordinator: Coordinator) -> int:
    """How many rows a search finds by the sums of `analytic`; 0 where the site refuses."""
    reply = coordinator.ask("add", Moment(0, 0, 1), analytic.Ask(()))
    if reply is None:
        return 0
    sums, options = unpack(reply, analytic.Sums, "basel").sums, coordinator.config.options()
    gram = ridge.square(ridge.from_fixed(sums["gram"], options.bits), len(sums["cross"]))
    values, vectors = torch.linalg.eigh(gram)
    outside = vectors[:, values < 1e-2]  # what no row's features have a part in
    columns = coordinator.rows().shape[1]
    frozen = {n: t.double() for n, t in coordinator.gate._client.frozen.items()}
    return matched(_searched(frozen, outside, columns), coordinator.rows())


def _searched(frozen: Tensors, outside: Tensor, columns: int) -> Tensor:
    """Inputs whose features have almost no part outside of the span."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(STARTS, columns, generator=draws, dtype=torch.float64).requires_grad_()
    descent = torch.optim.Adam([x], RATES[0])
    for step in range(STEPS):
        descent.param_groups[0]["lr"] = RATES.get(step, descent.param_groups[0]["lr"])
        features = ridge.with_constant(ridge.random_features(frozen, x, 0.0))
        descent.zero_grad()
        (features @ outside).square().sum().backward()
        descent.step()
    return x.detach()


def staircase(like: Tensors) -> Tensors:
    """A unit for each column that all rows reach; the others have one direction and stepped biases.

    The higher steps are reached by few rows, the highest by one.
    """
    units, columns = like["weight0"].shape
    draws = torch.Generator().manual_seed(1)
    drawn = torch.randn(columns, generator=draws).to(like["weight0"])
    direction = drawn / drawn.norm()
    made = {name: tensor.clone() for name, tensor in like.items()}
    made["weight0"] = direction.expand(units, columns).clone()
    made["weight0"][:columns] = torch.eye(columns, dtype=direction.dtype)
    made["bias0"][:columns] = 10.0
    made["bias0"][columns:] = -torch.linspace(4.0, -4.0, units - columns)
    return made


def recovered_by_units(coordinator: Coordinator, weights: Tensors, moment: Moment) -> int:
    """How many rows come out of the products of units, one by one from the highest step."""
    reply = coordinator.ask("activations", moment, Weights(weights))
    if reply is None:
        return 0
    gram = unpack(reply, fot.Activations, "basel").grams["1"].double()
    weight, bias = weights["weight0"].double(), weights["bias0"].double()
    columns, rows = weight.shape[1], list[Tensor]()
    for unit in range(columns, len(weight)):
        line, own = gram[unit].clone(), float(gram[unit, unit])
        for row in rows:
            hidden = torch.cat([torch.relu(weight @ row + bias), torch.ones(1).double()])
            line -= hidden[unit] * hidden
            own -= float(hidden[unit]) ** 2
        height = float(line[-1])
        if height > PURE and abs(own - height**2) <= PURE * height**2:
            rows.append(line[:columns] / height - 10.0)
    found = torch.stack(rows) if rows else torch.zeros(0, columns)
    return matched(found, coordinator.rows())
