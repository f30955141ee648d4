"""Rows from an update of two steps, whose last one is on few rows: a stranger's attack.

The coordinator sends the same weights in every round, so only the order of the rows changes, and
it knows that order: it follows from the seed. Adam's second step depends on the ratio of the two
gradients alone. With one row in it the ratio is that row's share of the sum, for every weight of
the first layer: a factor of the row and the column times one of the unit and the column. Many
rounds separate the two, up to one factor for each column, which standardised columns give.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.core.messages import Tensors
from atoll.core.rng import Stream

from .row_recovery import Coordinator

Numbers = NDArray[np.float64]
BETAS = 0.9, 0.999  # of Adam
TURN = 1.1105  # where the second step is longest, by the ratio of the gradients
CLOSE = 0.01  # relative distance at which a value counts as that of the row


def second_step(ratio: Numbers) -> Numbers:
    """Adam's second step relative to the first one, by the ratio of the two gradients."""
    one, two = BETAS
    mean = (one * (1 - one) + (1 - one) * ratio) / (1 - one**2)
    square = (two * (1 - two) + (1 - two) * ratio**2) / (1 - two**2)
    return np.asarray(mean / np.sqrt(square))


def ratios(second: Numbers) -> list[Numbers]:
    """The two ratios of gradients that a second step may come from."""
    low = np.concatenate([-np.logspace(6, -6, 40_001), np.logspace(-6, np.log10(TURN), 20_001)])
    high = np.logspace(np.log10(TURN), 6, 40_001)
    rising, falling = second_step(low), second_step(high)
    order = rising.argsort()
    bounds = {"left": np.nan, "right": np.nan}
    return [
        np.interp(second, rising[order], low[order], **bounds),
        np.interp(-second, -falling, high, **bounds),
    ]


def repeat(coordinator: Coordinator, rounds: int, apart: float = 0.0) -> None:
    """The first weights again and again; `apart`: how far others are from them, by their norm."""
    first, draws = coordinator.first, torch.Generator().manual_seed(1)
    for number in range(rounds):
        if coordinator.fit(_near(first, apart * (number > 0), draws), number) is None:
            return


def _near(weights: Tensors, share: float, draws: torch.Generator) -> Tensors:
    sizes = {name: share * float(t.norm()) / t.numel() ** 0.5 for name, t in weights.items()}
    return {
        name: tensor + size * torch.randn(tensor.shape, generator=draws)
        for (name, tensor), size in zip(weights.items(), sizes.values(), strict=True)
    }


def last_rows(coordinator: Coordinator, number: int, rest: int) -> list[int]:
    """Which rows are in the last step of a round."""
    count = len(coordinator.rows())
    stream = Stream.of(coordinator.config.seed, "basel", "fit", 0, number)
    return [int(n) for n in stream.child("epoch", 0).permutation(count)[-rest:]]


def shares(coordinator: Coordinator, ordered: bool = True) -> Mapping[int, list[Numbers]]:
    """For each row that was last: candidates for its share of the sum, by unit and column.

    Where the order is not known, each round has a row of its own.
    """
    rate, others = float(coordinator.config.method["rate"]), len(coordinator.rows()) - 1
    found: dict[int, list[Numbers]] = {}
    for number, (sent, back) in enumerate(coordinator.pairs):
        moved = [(sent[n] - back[n]).double().numpy() / rate for n in ("weight0", "bias0")]
        second = np.abs(np.concatenate([moved[0], moved[1][:, None]], 1)) - 1
        head = (sent["weight1"][0] - sent["weight1"][1]).double().numpy()
        step = (sent["weight1"] - back["weight1"]).double().sign() * rate
        after = head - (step[0] - step[1]).numpy()
        silent = np.abs(second - second_step(np.zeros(1))).max(1) < 2e-3
        row = last_rows(coordinator, number, 1)[0] if ordered else number
        parts = [q * (head / after)[:, None] / others for q in ratios(second)]
        found[row] = [np.where(silent[:, None], np.nan, z / (1 + z)) for z in parts]
    return found


def mode(values: Numbers, width: float) -> tuple[int, float]:
    """How many values agree on one within a relative width, and that one."""
    kept = values[np.isfinite(values) & (values != 0)]
    best = (0, float("nan"))
    for sign in (-1, 1):
        logs = np.sort(np.log(np.abs(kept[np.sign(kept) == sign])))
        counts = np.searchsorted(logs, logs + width) - np.arange(len(logs))
        if len(logs) and counts.max() > best[0]:
            at = int(counts.argmax())
            best = (int(counts[at]), sign * float(np.exp(np.median(logs[at : at + counts[at]]))))
    return best


def rows_by_shares(found: Mapping[int, list[Numbers]], rows: int) -> Numbers:
    """Rows up to one factor for each column; NaN where nothing agrees."""
    every = np.full((rows, *found[next(iter(found))][0].shape, 2), np.nan)
    for row, parts in found.items():
        every[row] = np.stack(parts, -1)
    units, columns = every.shape[1:3]
    active: NDArray[np.bool_] = np.asarray(np.isfinite(every).any(axis=(2, 3)))
    base = int(active.sum(0).argmax())
    values = np.full((rows, columns), np.nan)
    for column in range(columns):
        factor = np.full(units, np.nan)
        for unit in range(units):
            both = every[active[:, unit] & active[:, base], :, column]
            pairs = both[:, unit, :, None] / both[:, base, None, :]
            votes, one = mode(pairs.ravel(), 6e-3)
            factor[unit] = 1.0 if unit == base else one if votes >= 4 else np.nan
        for row in range(rows):
            _, values[row, column] = mode((every[row, :, column] / factor[:, None]).ravel(), 0.015)
    return np.asarray(values[:, :-1] / values[:, -1:])


def recovered(coordinator: Coordinator) -> int:
    """How many rows come out in all columns, to 1 %; the columns' factors are taken as known."""
    if not coordinator.pairs:
        return 0
    rows = coordinator.rows().double().numpy()
    values = rows_by_shares(shares(coordinator), len(rows))
    factors = np.nanmedian(rows / values, axis=0)
    near = np.abs(values * factors - rows) <= CLOSE * np.linalg.norm(rows, axis=1, keepdims=True)
    return int(near.all(1).sum())


def recovered_without_order(coordinator: Coordinator) -> int:
    """How many rows come out if the attack does not know which row was last in which round."""
    rounds = len(coordinator.pairs)
    rows = coordinator.rows().double().numpy()
    values = rows_by_shares(shares(coordinator, ordered=False), rounds)
    last = [last_rows(coordinator, number, 1)[0] for number in range(rounds)]
    found = values * np.nanmedian(rows[last] / values, axis=0)  # the columns' factors are known
    near = np.abs(found[:, None] - rows) <= CLOSE * np.linalg.norm(rows, axis=1, keepdims=True)
    return int(near.all(2).any(0).sum())
