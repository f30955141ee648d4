"""Comparison oracle: a coordinator that reads test rows out of the scores that a site releases.

A site compares the joined model with its own once in a run, and the coordinator names runs. Here it
knows some columns of people who are in the test rows. It crafts a joined model that treats one row
unlike all others, so the released score tells the label of that row (`labels`), on which side of a
threshold another column of it is (`bisect`), or with a score of probabilities the value of that
column itself (`probabilities`). The counts of `check` are tried in the same way. As a script it
prints what comes out under the contracts of the tests:

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.attacks.comparison_oracle
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.federation import Moment
from atoll.core.messages import Tensors, pack, unpack
from atoll.engines.network.contract import Contract, RefusedError
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.ranges import METRIC
from atoll.engines.network.requests import Compare
from atoll.metrics.release import Release
from atoll.runs.config import RunConfig

from .row_recovery import HONEST, Coordinator, run_config, site, spotted, towards

Goal = Callable[[Tensors], Tensors]
TARGETS = 8  # rows whose labels are asked for
STEEP = 5.0
WIDTH = 0.04  # of the interval of the first column around a known row
SLOPE = 0.02  # of a probability's logit in another column
CLOSE = 1e-3  # error at which a value of a column counts as read
CHEAP = {**HONEST, "rounds": 1, "epochs": 2}  # as many runs as a budget of rounds has
CREPT = {**HONEST, "rounds": 45, "epochs": 2}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "at once": CHEAP, "small moves": CREPT, "test counts": CREPT,
}  # fmt: skip
ANSWERING = Contract(methods=("fedavg",), actions=("fit", "check", "offer", "agree"), answer=True)
OPEN: dict[str, Any] = {
    "answer": True, "comparisons_in_all": 100, "initial_weights": "any", "move": 0.0, "drift": 0.0,
    "unit_rows": 1, "shown_rows": "allow",
}  # fmt: skip


def _loosened(honest: RunConfig) -> Contract:
    terms = drafted_contract(honest)
    options = {**terms.options["fedavg"], METRIC: {"one_of": ["accuracy", "brier score"]}}
    return replace(terms, **OPEN, options={"fedavg": options})


CONTRACTS: Mapping[str, Callable[[RunConfig], Contract]] = {  # of the honest config
    "default": lambda honest: replace(ANSWERING, answer=False),
    "drafted": drafted_contract,
    "default, answer": lambda honest: ANSWERING,
    "drafted, answer": lambda honest: replace(drafted_contract(honest), answer=True),
    "drafted, answer, any rounds": lambda honest: replace(
        drafted_contract(honest), answer=True, rounds_in_all=10_000, epochs_in_all=20_000
    ),
    "loosened": _loosened,
}


def nowhere(like: Tensors) -> Tensors:
    """A model that says class 0 of every row."""
    made = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    made["weight0"][5:, 0], made["bias0"][5:] = STEEP, 5.0  # units that both classes read alike:
    made["weight1"][:, 5:] = 1.5  # they change no prediction, and a move is relative to norms
    made["bias1"][0], made["bias1"][1] = 0.5 * STEEP * WIDTH, -0.5 * STEEP * WIDTH
    return made


def around(like: Tensors, row: Tensor) -> Tensors:
    """The same, but class 1 of rows whose first column is near that of a row."""
    made, centre = nowhere(like), float(row[0])
    for unit, edge in enumerate((centre - WIDTH, centre, centre + WIDTH)):
        made["weight0"][unit, 0], made["bias0"][unit] = STEEP, -STEEP * edge
    peak = torch.tensor([1.0, -2.0, 1.0])
    made["weight1"][1, :3], made["weight1"][0, :3] = peak, -peak
    return made


def above(like: Tensors, row: Tensor, column: int, threshold: float) -> Tensors:
    """The same, if another column of the row is above a threshold."""
    made = around(like, row)
    for unit, sign in ((3, 1.0), (4, -1.0)):  # far above or below: outweighs the peak or nothing
        made["weight0"][unit], made["bias0"][unit] = 0.0, 0.0
        made["weight0"][unit, column] = STEEP
        made["bias0"][unit] = -STEEP * threshold + (0.0 if sign > 0 else -1e-3)
    lift = STEEP * WIDTH / 1e-3
    made["weight1"][1, 3:5] = torch.tensor([lift, -lift])
    made["weight1"][0, 3:5] = -made["weight1"][1, 3:5]
    made["bias1"][0] += STEEP * WIDTH
    made["bias1"][1] -= STEEP * WIDTH
    return made


def graded(like: Tensors, row: Tensor, column: int) -> Tensors:
    """Probabilities: the row's grows with another column; those of all others stay."""
    made = around(like, row + 0.5 * WIDTH)
    made["weight0"][:3, column] = SLOPE
    return made


def _kept(wanted: Tensors, first: Tensors) -> Tensors:
    """Weights whose units keep as much of their first norm as the contract wants."""
    weight, begun = wanted["weight0"], 0.12 * first["weight0"].norm(dim=1, keepdim=True)
    norm = weight.norm(dim=1, keepdim=True)
    way = torch.where(norm > 1e-6, weight / norm.clamp(min=1e-6), first["weight0"] / begun * 0.12)
    return {**wanted, "weight0": torch.where(norm < begun, begun * way, weight)}


@dataclass
class Oracle:
    """Asks for the score of one model after another."""

    coordinator: Coordinator
    how: str  # a key of WAYS
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config
    releases: int = 0
    now: Tensors = field(default_factory=dict)  # the weights of the last update
    round: int = 0

    def open(self, name: str) -> bool:
        """Begin a run."""
        return self.coordinator.open(name, run_config({**WAYS[self.how], **self.changes}))

    def score(self, goal: Goal) -> float | None:
        """What a site tells of a model; none where it refuses."""
        told = self._counted(goal) if self.how == "test counts" else self._compared(goal)
        self.releases += told is not None
        return told

    def _compared(self, goal: Goal) -> float | None:
        """The score of a comparison, in a run of its own."""
        one = self.coordinator
        if not self.open(f"attack-{self.releases}"):
            return None
        weights, one.number = goal(one.first), 0
        if self.how == "at once":
            _ = one.fit(weights) or one.fit(one.first)
        else:
            self._steer(one.config.rounds)
            weights = _kept(towards(self.now, weights, 0.45, {}), one.first)
        try:
            reply = one.gate.compare(pack(Compare("", weights)))
        except RefusedError as error:
            one.refusals.append(str(error))
            return None
        return unpack(reply, Release, "basel").scores.get("joined")

    def _counted(self, goal: Goal) -> float | None:
        """The count of one test, in a round of its own."""
        one = self.coordinator
        if not self.round:
            if not self.open("attack"):
                return None
            self._steer(one.config.rounds - TARGETS - 1)
        self.round += 1
        one.fit(self.now, self.round)
        moment = Moment(0, self.round, one.config.rounds)
        return spotted(one, moment, _kept(towards(self.now, goal(self.now), 0.45, {}), one.first))

    def _steer(self, rounds: int) -> None:
        """Go to `nowhere` in small moves.

        On the way no unit is without a row, and then all units are alike: nothing is singled out.
        """
        one, self.round = self.coordinator, rounds - 1
        one.number, now = 0, one.first
        active = {**now, "bias0": torch.full_like(now["bias0"], 3.0)}
        alike = {**active, "weight0": torch.zeros_like(now["weight0"])}
        alike["weight0"][:, 0] = 1.0
        goals = (active, alike, nowhere(now))
        one.fit(now, 0)
        for number in range(1, rounds):
            goal = goals[number * len(goals) // rounds]
            wanted = _kept(towards(now, goal, 0.45, {}), one.first)
            now = wanted if one.fit(wanted, number) is not None else now
        self.now = now


def people(coordinator: Coordinator) -> tuple[Tensor, Tensor]:
    """Rows that the coordinator knows, each alone in its interval; their labels are to be read."""
    rows = coordinator.gate._client.site.test(0)
    gaps = (rows.x[:, None, 0] - rows.x[None, :, 0]).abs() + torch.eye(len(rows)) * 9
    apart = (gaps.amin(1) > 2 * WIDTH) & (rows.x[:, 0].abs() < 1)
    return rows.x[apart][:TARGETS], rows.y[apart][:TARGETS]


def labels(oracle: Oracle) -> int:
    """How many labels of known rows come out: with its peak, one more row or one fewer is right."""
    known, true = _known(oracle)
    base = oracle.score(nowhere)
    if base is None:
        return 0
    right = 0
    for row, label in zip(known, true, strict=True):
        score = oracle.score(partial(around, row=row))
        if score is None:
            break
        right += score != base and int(score > base) == int(label)
    return right


def bisect(oracle: Oracle) -> int:
    """How many values of an unknown column come out of thresholds, for one known row."""
    known, _ = _known(oracle)
    row, low, high = known[0], -4.0, 4.0
    base = oracle.score(nowhere)
    if base is None:
        return 0
    while high - low > CLOSE:
        middle = (low + high) / 2
        score = oracle.score(partial(above, row=row, column=1, threshold=middle))
        if score is None:
            return 0
        low, high = (middle, high) if score != base else (low, middle)
    return int(abs(low - float(row[1])) < CLOSE)


def probabilities(oracle: Oracle) -> int:
    """How many values of an unknown column come out of Brier scores, one release each."""
    known, true = _known(oracle)
    oracle.changes = {METRIC: "brier score"}
    scores = [oracle.score(nowhere)]
    scores += [oracle.score(partial(graded, row=row, column=1)) for row in known]
    base, count = scores[0], len(oracle.coordinator.gate._client.site.test(0))
    if base is None:
        return 0
    found = 0
    for row, label, score in zip(known, true, scores[1:], strict=True):
        if score is not None:
            found += abs(_value(base - score, count, int(label)) - float(row[1])) < CLOSE
    return found


def _value(change: float, count: int, label: int) -> float:
    """The column's value from how much better the Brier score is with `graded`."""
    quiet = _sigmoid(-STEEP * WIDTH)  # the probability of class 1 without a peak
    before = (quiet if label == 0 else 1 - quiet) ** 2
    wrong = math.sqrt(max(before - change * count, 0.0))
    one = wrong if label == 0 else 1 - wrong
    return math.log(one / (1 - one)) / (2 * SLOPE) if 0 < one < 1 else math.inf


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def _known(oracle: Oracle) -> tuple[Tensor, Tensor]:
    if not oracle.open("look"):
        raise AssertionError(oracle.coordinator.refusals)
    return people(oracle.coordinator)


ATTACKS: Mapping[str, Callable[[Oracle], int]] = {
    "labels": labels, "bisect": bisect, "probabilities": probabilities,
}  # fmt: skip


def attack(folder: Path, contract: str, what: str, how: str) -> tuple[int, Oracle]:
    """What comes out of one attack under one contract, and the oracle with its releases."""
    terms = CONTRACTS[contract](run_config(CREPT))
    oracle = Oracle(Coordinator(site(folder, written(terms))), how)
    return ATTACKS[what](oracle), oracle


def main() -> None:
    """Print what comes out, for every contract, attack and way."""
    for contract, what, how in itertools.product(CONTRACTS, ATTACKS, WAYS):
        with tempfile.TemporaryDirectory() as folder:
            read, oracle = attack(Path(folder), contract, what, how)
        words = f"{read} read in {oracle.releases} releases"
        last = oracle.coordinator.refusals[-1:]
        sys.stdout.write(f"{contract}; {what}; {how}: {words} {last}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
