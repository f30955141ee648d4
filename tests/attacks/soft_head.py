"""Rows out of a network with one hidden layer, through the head: a class that no row has.

The coordinator adds a class to the plan that the site does not have. The gradient of its unit in
the head is the mean of the hidden outputs of all rows, each weighed by the probability of that
class. A long weight vector and a low bias make these probabilities fall so steeply that one row
outweighs all others, and so small that Adam's step depends on the size of the gradient. The other
classes move the first layer as always, so its update shows nothing. The first layer is known, and
the row is the solution of linear equations, as in `later_layers`.

    OMP_NUM_THREADS=1 python3 -m tests.attacks.soft_head

It is a known gap (docs/network.md): the number that it prints are rows that come out.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import Tensors, pack, unpack
from atoll.core.options import build
from atoll.data.own.agreement import Agree, Agreed, Offer, Offered, common, planned
from atoll.data.own.tables import TableOptions
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract, written
from atoll.runs.config import RunConfig, to_toml

from .later_layers import row_of_unit
from .row_recovery import HONEST, Coordinator, matched, run_config, site, towards

FLAT: dict[str, Any] = {**HONEST, "epochs": 2, "rounds": 200}
GROWTH = 12.0  # of the first layer: sharper differences between rows
STEEP = 6.0  # norm of the head's unit for the class that no row has
BIAS = 4.0  # of that class, below zero
MOVE = 0.49  # of a tensor's norm in a round; the contract allows 0.5
REACHED = 8  # rounds until the first layer and the head have their size
DEPTH = 16.0  # how far below the other classes the class is for the foremost row, to begin with
EVERY = 9  # rounds after which another direction is chosen
FITS = 5e-3  # relative residual up to which a solution counts as a row
DRAWS = 3000  # made-up rows that stand for the site's


def open_with_a_class(coordinator: Coordinator, run: str, config: RunConfig) -> bool:
    """Prepare a run whose plan has one class more than the site."""
    coordinator.config, text = config, to_toml(config)
    given = {key: value for key, value in config.data.items() if key != "name"}
    options = build(TableOptions, given, "attack")
    gate, client = coordinator.gate, "basel"
    offers = {client: unpack(gate.offer(run, text, client, pack(Offer(run))), Offered, client)}
    reply = unpack(gate.agree(pack(Agree(common(offers, options)))), Agreed, client)
    plan = planned(run, offers, {client: reply}, options)
    plan = replace(plan, classes=type(plan.classes)([*plan.classes, "zzz"]))
    gate.prepare(run, text, client, (client,), json.dumps(asdict(plan)))
    return True


def crafted(first: Tensors, seed: int, depth: float) -> Tensors:
    """A direction in which one row is foremost, behind a bias that keeps the class improbable."""
    draws = np.random.default_rng(seed)
    goal = {name: tensor.clone() for name, tensor in first.items()}
    goal["weight0"], goal["bias0"] = first["weight0"] * GROWTH, first["bias0"] * GROWTH
    columns = first["weight0"].shape[1]
    made_up = torch.from_numpy(draws.normal(size=(DRAWS, columns))).float()
    hidden = torch.relu(made_up @ goal["weight0"].T + goal["bias0"])
    way = hidden[draws.integers(DRAWS)] - hidden.mean(0)
    spread = torch.cov(hidden.T) + 1e-3 * torch.eye(hidden.shape[1])
    level = torch.linalg.solve(spread, hidden.mean(0))
    level = level / (hidden @ level).mean()  # about 1 for every row, in place of a bias
    unit = STEEP * way / way.norm()
    foremost = torch.quantile(hidden @ unit, 1 - 1 / 50)
    goal["weight1"] = first["weight1"] * 0.3
    goal["weight1"][-1] = unit - (foremost + depth - BIAS) * level
    goal["bias1"] = first["bias1"].clone()
    goal["bias1"][-1] = -BIAS
    return goal


def attack(coordinator: Coordinator, seed: int = 3) -> list[Tensor]:
    """One run; candidates for rows that were read off its updates."""
    first = now = coordinator.first
    rate, rows, depth = float(coordinator.config.method["rate"]), list[Tensor](), DEPTH
    for number in range(coordinator.config.rounds):
        if number > REACHED and (number - REACHED) % EVERY == 0:
            seed, depth = seed + 1, DEPTH
        wanted = towards(now, crafted(first, seed, depth), MOVE, {}) if number else now
        back = coordinator.fit(wanted, number)
        if back is None:
            continue
        now, moved = wanted, (back["weight1"][-1] - wanted["weight1"][-1]).double()
        row = row_of_unit(now, moved, rate, FITS)
        if row is not None:
            rows.append(torch.from_numpy(row))
        steps = float(moved.abs().max()) / rate / 2  # 1: Adam's step does not tell the size
        if number >= REACHED and (number - REACHED) % EVERY > 2:
            depth += 5.0 if steps > 0.9 else -5.0 if steps < 0.01 else 0.7
    return rows


def recovered(folder: Path, changes: Mapping[str, Any], terms: Contract) -> tuple[int, list[str]]:
    """Rows that come out to 0.1 %, and refusals."""
    config = run_config({**FLAT, **changes})
    coordinator = Coordinator(site(folder, written(terms)))
    open_with_a_class(coordinator, "attack", config)
    rows = attack(coordinator)
    candidates = torch.stack(rows) if rows else torch.zeros(0, 6)
    return matched(candidates, coordinator.rows()), coordinator.refusals


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        terms = drafted_contract(run_config(FLAT))
        found, refusals = recovered(Path(home), {}, terms)
        sys.stdout.write(f"drafted: {found} of 50 rows to 0.1 %, {len(refusals)} refusals\n")
        sys.stdout.write("\n".join(refusals[:5]) + "\n")
