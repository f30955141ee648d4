"""Rows out of the second hidden layer, where no check looks at single rows: a stranger's attack.

The coordinator keeps the first layer as the site derives it and moves the later ones in allowed
steps to where about one row activates a unit of the second layer. The update of such a unit is a
multiple of the first layer's output for that row, and the first layer is known, so the row is the
solution of linear equations. Two class rows of the head that are nearly equal make gradients as
small as Adam's epsilon, where a step still depends on their size and not on their sign alone.
A few units that all rows activate keep the first layer's update from showing a row.

    OMP_NUM_THREADS=1 python3 -m tests.attacks.later_layers

A contract refuses such networks by default, and drafts allow them where their run needs it.
"""

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.messages import Tensors
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract, written

from .row_recovery import HONEST, Coordinator, matched, run_config, site, towards

Numbers = NDArray[np.float64]
BETAS = 0.9, 0.999  # of Adam
DEEP: dict[str, Any] = {**HONEST, "widths": [64, 32], "epochs": 2}
ACTIONS = ("fit", "check", "offer", "agree")
ALWAYS_ON = 6  # units of the second layer that all rows activate
APART = 4e-6  # between the two class rows of the head
MOVE = 0.49  # of a tensor's norm in a round; the contract allows 0.5
EVERY = 4  # rounds after which other units are chosen
FITS = 5e-4  # relative residual up to which a solution counts as a row
OTHER = 0.02  # relative distance from which two solutions are two rows
DRAWS = 3000  # made-up rows that stand for the site's


def second_step(ratio: float) -> tuple[float, float]:
    """Adam's second step for the ratio of its gradient to the first: its size, and 1 / sqrt(v)."""
    one, two = BETAS
    mean = one * (1 - one) + (1 - one) * ratio
    root = np.sqrt((two * (1 - two) + (1 - two) * ratio**2) / (1 - two**2))
    return float(mean / (1 - one**2) / root), float(1 / root)


def row_if(weight: Numbers, bias: Numbers, moved: Numbers, ratio: float) -> tuple[float, Numbers]:
    """The row that explains the moves of a unit's weights, if the gradients have this ratio.

    `moved` is in learning rates. Returns the relative residual first; infinity if nothing fits.
    """
    size, root = second_step(ratio)
    first = moved - size
    for _ in range(6):  # the first step s = g / (g + epsilon), by fixed-point iteration
        first = np.clip(first, 1e-6, 1 - 1e-9)
        first = moved - size / (1 + root * (1 - first) / first)
    if first.min() <= 0 or first.max() >= 1:
        return np.inf, np.zeros(0)
    gradient = first / (1 - first)
    equations = np.hstack([weight, -gradient[:, None]])
    solution, *_ = np.linalg.lstsq(equations, -bias, rcond=None)
    rest = np.linalg.norm(equations @ solution + bias)
    relative = float(rest / np.linalg.norm(gradient * solution[-1]))
    return relative, np.asarray(solution[:-1], np.float64)


def row_of_unit(sent: Tensors, moved: Tensor, rate: float, fits: float = FITS) -> Numbers | None:
    """The row behind the update of one unit of the second layer; None if there is no such row."""
    active = moved.abs() > 1e-9
    signs = moved[active].sign()
    if int(active.sum()) < sent["weight0"].shape[1] + 5 or not bool((signs == signs[0]).all()):
        return None
    weight, bias = sent["weight0"][active].double().numpy(), sent["bias0"][active].double().numpy()
    steps = (moved[active].abs() / rate).numpy()

    def search(powers: Iterable[float]) -> tuple[float, float, Numbers]:
        tried = [(*row_if(weight, bias, steps, 10**power), power) for power in powers]
        rest, row, power = min(tried, key=lambda one: one[0])
        return rest, power, row

    rest, power, row = search(np.linspace(-1, 6, 120))
    width = 0.06
    for _ in range(4):
        if not np.isfinite(rest):
            return None
        rest, power, row = search(np.linspace(power - width, power + width, 40))
        width /= 15
    return row if rest < fits else None


def crafted(
    now: Tensors, first: Tensors, draws: np.random.Generator, rows: list[Tensor]
) -> Tensors:
    """Second layer and head of which each unit is activated by about one row not yet read."""

    def features(x: Tensor) -> Tensor:
        return torch.relu(x @ now["weight0"].double().T + now["bias0"].double())

    columns = now["weight0"].shape[1]
    made_up = features(torch.from_numpy(draws.normal(size=(DRAWS, columns))))
    read = features(torch.stack(rows)) if rows else made_up[:0]
    spread = torch.cov(made_up.T) + 1e-4 * torch.eye(made_up.shape[1])
    whiten, centre = torch.linalg.inv(spread), made_up.mean(0)
    left = max(6, 50 - len(rows))
    weights, biases = [], []
    for unit, norm in enumerate(first["weight1"].double().norm(dim=1)):
        share = 0.01 if unit < ALWAYS_ON else 1 - 0.8 / left
        for attempt in range(25):
            way = torch.from_numpy(draws.normal(size=made_up.shape[1]))
            if attempt % 3:
                way = whiten @ (made_up[draws.integers(DRAWS)] - centre)
            way = way / way.norm() * norm
            threshold = torch.quantile(made_up @ way, share)
            new = not len(read) or float((read @ way).max()) < float(threshold) - 0.02
            if unit < ALWAYS_ON or new:
                break
        weights.append(way)
        biases.append(-threshold)
    goal = {name: tensor.clone() for name, tensor in now.items()}
    goal["weight1"], goal["bias1"] = torch.stack(weights).float(), torch.stack(biases).float()
    head = first["weight2"].double().mean(0)
    head = torch.where(head.abs() < 0.03, torch.full_like(head, 0.03), head)
    goal["weight2"] = torch.stack([head + APART, head]).float()
    goal["bias2"] = torch.full_like(now["bias2"], float(first["bias2"].mean()))
    return goal


def attack(coordinator: Coordinator, seed: int = 3) -> list[Tensor]:
    """One run; the rows that were read off its updates."""
    config, draws = coordinator.config, np.random.default_rng(seed)
    first = now = coordinator.first
    rows: list[Tensor] = []
    for number in range(config.rounds):
        if number:
            if (number - 1) % EVERY == 0:
                goal = crafted(now, first, draws, rows)
            now = towards(now, goal, MOVE, {})
        back = coordinator.fit(now, number)
        if back is not None:
            rows += _new_rows(now, back, float(config.method["rate"]), rows)
    return rows


def _new_rows(sent: Tensors, back: Tensors, rate: float, rows: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    moved = back["weight1"].double() - sent["weight1"].double()
    for unit in range(ALWAYS_ON, len(moved)):
        solution = row_of_unit(sent, moved[unit], rate)
        if solution is not None:
            row = torch.from_numpy(solution)
            known = [*rows, *found]
            if all(float((row - one).norm() / one.norm()) > OTHER for one in known):
                found.append(row)
    return found


def recovered(
    folder: Path, changes: Mapping[str, Any] | None = None, terms: Contract | None = None
) -> tuple[int, list[str]]:
    """Rows that come out to 0.1 %, and refusals; the contract is drafted for the run by default."""
    config = run_config({**DEEP, **(changes or {})})
    coordinator = Coordinator(site(folder, written(terms or drafted_contract(config))))
    if not coordinator.open("attack", config):
        return 0, coordinator.refusals
    rows = attack(coordinator)
    candidates = torch.stack(rows) if rows else torch.zeros(0, 6)
    return matched(candidates, coordinator.rows()), coordinator.refusals


if __name__ == "__main__":
    default = Contract(methods=("fedavg",), actions=ACTIONS)
    for name, terms in (("default", default), ("drafted for this network", None)):
        with tempfile.TemporaryDirectory() as home:
            rows, refusals = recovered(Path(home), terms=terms)
        sys.stdout.write(f"{name}: {rows} of 50 rows to 0.1 %, {len(refusals)} refusals\n")
