"""What `atoll bench fcl` runs: contenders, trials, and settings of equal cost.

All contenders of a seed have the same rows, and gradient methods the same network and batches. A
contender that needs more of a resource than `fedavg` has fewer rounds, features or exemplars in
the table that holds this resource equal; one that needs less, or none, stands there at its own
cost.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from scipy.stats import qmc

from atoll.core.options import AtLeastOne, Fraction, NotNegativeInt, Positive

__all__ = [
    "BASE", "BOUNDS", "CONTENDERS", "QUICK", "TABLES", "Contender", "Plan", "Sizes", "Table",
    "budget", "settings", "stored_bytes", "trial_options", "values",
]  # fmt: skip

Options = dict[str, Any]  # by dotted name, below the method where there is no dot
Table = Literal["bytes", "steps", "memory"]
TABLES: Final[tuple[Table, ...]] = ("bytes", "steps", "memory")
BASE: Final = "fedavg"  # budgets and differences are those to it
BOUNDS: Final = ("pooled", "pooled-stages", "alone-stages")
FIRST_STREAM: Final = 1000  # seed of the first validation stream; measured seeds begin at 0
FLOAT: Final = 4  # bytes
DOUBLE: Final = 8


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    data: tuple[str, ...] = ("mnist", "fashion-mnist")  # data sets
    contenders: tuple[str, ...] = ()  # some of them, by name; empty: all
    seeds: AtLeastOne = 5  # measured runs of a setting: seeds 0, 1, ...
    trials: AtLeastOne = 6  # settings that each contender is tuned over
    streams: AtLeastOne = 2  # validation streams of each trial
    clients: AtLeastOne = 5  # number of sites
    stages: AtLeastOne = 5  # number of stages
    alpha: Positive = 0.1  # Dirichlet concentration
    train: Fraction = 0.9  # share of rows to train on while tuning; measured runs add `valid`
    valid: Fraction = 0.1  # share of rows to tune on
    rounds: AtLeastOne = 10  # of a stage
    epochs: AtLeastOne = 1  # of a round
    batch: AtLeastOne = 64  # batch size
    widths: tuple[AtLeastOne, ...] = (256,)  # hidden layers
    features: AtLeastOne = 2000  # random features of `analytic`
    rank: AtLeastOne = 8  # of the adapters of `lowrank`
    memory: NotNegativeInt = 200  # exemplars of a site
    generator_steps: AtLeastOne = 200  # training steps of the generator of `target`, at the server


QUICK: Final = Plan(
    data=("digits-table",), seeds=2, trials=2, streams=1, alpha=0.5, train=0.6, valid=0.2, rounds=3,
    batch=32, widths=(32,), features=100, memory=20, generator_steps=10,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What costs depend on beside the plan."""

    inputs: int  # numbers of a row
    classes: int

    def weights(self, plan: Plan) -> int:
        """Bytes of the network."""
        layers = pairwise((self.inputs, *plan.widths, self.classes))
        return FLOAT * sum((below + 1) * above for below, above in layers)

    @property
    def row(self) -> int:
        """Bytes of a row with its label."""
        return FLOAT * (self.inputs + 1)


Change = Callable[[Plan, Sizes], Options]
Stored = Callable[[Plan, Sizes, Options], int]


def _nothing(plan: Plan, sizes: Sizes, options: Options) -> int:
    return 0


def _networks(count: int) -> Stored:
    """Bytes of this many copies of the network, or of numbers for each weight."""
    return lambda plan, sizes, options: count * sizes.weights(plan)


@dataclass(frozen=True)
class Contender:
    """A method with options, what is tuned, and what equal cost means for it."""

    options: Options
    ranges: Mapping[str, tuple[float, float]]  # tuned options, between these on a log scale
    stored: Stored = _nothing  # bytes that a site keeps of earlier stages
    equal: Mapping[Table, Change] = field(default_factory=dict)


# Budgets


def budget(table: Table, plan: Plan, sizes: Sizes) -> float:
    """What a contender may use: bytes that cross, steps (in those of fedavg), bytes at a site."""
    if table == "bytes":
        return 2 * sizes.weights(plan) * plan.clients * plan.stages * plan.rounds
    return 1.0 if table == "steps" else 2 * sizes.weights(plan)  # two: as ewc


def _sums(features: int, classes: int) -> int:
    """Bytes of the triangle of a Gram matrix and of a cross matrix, with the constant."""
    width = features + 1
    return DOUBLE * (width * (width + 1) // 2 + width * classes)


def _most_features(bytes_of: Callable[[int], int], limit: float) -> int:
    """The most features that cost no more than the limit, by bisection; at least one."""
    low, high = 1, 2
    while bytes_of(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle) <= limit else (low, middle)
    return low


def _analytic_bytes(plan: Plan, sizes: Sizes) -> Options:
    """Sums go up once a stage; the classifier comes down."""
    exchanges = plan.clients * plan.stages
    limit = budget("bytes", plan, sizes) / exchanges
    return {
        "width": _most_features(
            lambda f: _sums(f, sizes.classes) + DOUBLE * (f + 1) * sizes.classes, limit
        )
    }


def _analytic_memory(plan: Plan, sizes: Sizes) -> Options:
    limit = budget("memory", plan, sizes)
    return {"width": _most_features(lambda f: _sums(f, sizes.classes), limit)}


def _replay_steps(plan: Plan, sizes: Sizes) -> Options:
    """Half of the rows of an epoch are exemplars after the first stage."""
    passes = plan.stages + (plan.stages - 1)
    return {"rounds": max(1, plan.rounds * plan.stages // passes)}


def _replay_memory(plan: Plan, sizes: Sizes) -> Options:
    return {"memory": int(budget("memory", plan, sizes)) // sizes.row}


def _fot_bytes(plan: Plan, sizes: Sizes) -> Options:
    """Before each stage but the first, weights go down and a Gram matrix of each layer up."""
    inputs = (sizes.inputs, *plan.widths)
    exchange = sizes.weights(plan) + FLOAT * sum((width + 1) ** 2 for width in inputs)
    extra = (plan.stages - 1) * exchange / (2 * sizes.weights(plan) * plan.stages)
    return {"rounds": max(1, math.floor(plan.rounds - extra))}


GENERATOR: Final = {"latent": 64, "width": 256, "synthetic": 1000}


def _generator_bytes(sizes: Sizes) -> int:
    first = (GENERATOR["latent"] + sizes.classes + 1) * GENERATOR["width"]
    return FLOAT * (first + (GENERATOR["width"] + 1) * sizes.inputs)


def _target_bytes(plan: Plan, sizes: Sizes) -> Options:
    """The generator goes down before each stage but the first."""
    extra = (plan.stages - 1) * _generator_bytes(sizes) / (2 * sizes.weights(plan) * plan.stages)
    return {"rounds": max(1, math.floor(plan.rounds - extra))}


def _target_steps(plan: Plan, sizes: Sizes) -> Options:
    """As for exemplars; each synthetic row is used at least once, so there are as many of them."""
    return {**_replay_steps(plan, sizes), "synthetic": max(1, plan.memory)}


def _target_memory(plan: Plan, sizes: Sizes) -> Options:
    """Synthetic rows fill the part of the budget that the teacher leaves."""
    left = int(budget("memory", plan, sizes)) - sizes.weights(plan)
    return {"synthetic": max(1, left // sizes.row)}


def _target_stored(plan: Plan, sizes: Sizes, options: Options) -> int:
    """The teacher and the synthetic rows of a stage."""
    rows: int = options.get("synthetic", GENERATOR["synthetic"])
    return sizes.weights(plan) + rows * sizes.row


def _adapters(closed: bool) -> Change:
    """The largest rank whose adapters cost no more than the network: both ways, in each round."""

    def change(plan: Plan, sizes: Sizes) -> Options:
        layers = list(pairwise((sizes.inputs, *plan.widths)))
        top = FLOAT * (plan.widths[-1] + 1) * sizes.classes
        squares = DOUBLE * sum(below for below, _ in layers) if closed else 0

        def cost(rank: int) -> int:
            factors = sum(min(rank, *layer) * sum(layer) for layer in layers)
            return 2 * (FLOAT * factors + top) + squares

        highest = max(min(layer) for layer in layers)
        ranks = range(1, highest + 1)
        fitting = [rank for rank in ranks if cost(rank) <= 2 * sizes.weights(plan)]
        return {"rank": max(fitting, default=1)}

    return change


# Contenders

RATE: Final = {"rate": (3e-4, 1e-2)}
ONE_SITE: Final = {"scenario.clients": 1, "scenario.rows": "even"}


def _exemplars(choice: str) -> Contender:
    return Contender(
        {"name": "replay", "weighting": "rows", "choice": choice},
        RATE,
        lambda plan, sizes, options: options.get("memory", plan.memory) * sizes.row,
        {"steps": _replay_steps, "memory": _replay_memory},
    )


def _low_rank(merging: str) -> Contender:
    return Contender(
        {"name": "lowrank", "weighting": "rows", "merging": merging},
        RATE,
        equal={"bytes": _adapters(merging == "closed")},
    )


CONTENDERS: Final[Mapping[str, Contender]] = {
    "pooled": Contender({"name": "fedavg", **ONE_SITE, "scenario.stages": 1}, RATE),
    "pooled-stages": Contender({"name": "fedavg", **ONE_SITE}, RATE),
    "alone-stages": Contender({"name": "alone", "columns": "common"}, RATE),
    "fedavg": Contender({"name": "fedavg", "weighting": "rows"}, RATE),
    "fedprox": Contender(
        {"name": "fedavg", "weighting": "rows", "penalty": "proximal"},
        RATE | {"strength": (1e-3, 1.0)},
    ),
    "ewc": Contender(
        {"name": "fedavg", "weighting": "rows", "penalty": "ewc"},
        RATE | {"strength": (10.0, 1e5)},
        _networks(2),
    ),
    "si": Contender(
        {"name": "fedavg", "weighting": "rows", "penalty": "si"},
        RATE | {"strength": (1e-2, 1e2)},
        _networks(3),
    ),
    "lwf": Contender(
        {"name": "fedavg", "weighting": "rows", "penalty": "lwf"},
        RATE | {"strength": (0.1, 10.0)},
        _networks(1),
    ),
    "replay": _exemplars("random"),
    "herding": _exemplars("herding"),
    "target": Contender(
        {"name": "target", "weighting": "rows"},
        RATE | {"strength": (0.1, 10.0)},
        _target_stored,
        {"bytes": _target_bytes, "steps": _target_steps, "memory": _target_memory},
    ),
    "fot": Contender(
        {"name": "fot", "weighting": "rows"},
        RATE | {"energy": (0.7, 0.99)},
        equal={"bytes": _fot_bytes},
    ),
    "lowrank": _low_rank("mean"),
    "lorm": _low_rank("closed"),
    "analytic": Contender(
        {"name": "analytic"},
        {"strength": (1e-2, 1e3)},
        lambda plan, sizes, options: _sums(options.get("width", plan.features), sizes.classes),
        {"bytes": _analytic_bytes, "memory": _analytic_memory},
    ),
}


def settings(name: str, plan: Plan, sizes: Sizes) -> dict[str, Options]:
    """What differs in each table, beside "own": the contender at its own cost.

    A table without an entry shows the runs at own cost.
    """
    labels: dict[str, Options] = {"own": {}}
    for table, change in CONTENDERS[name].equal.items():
        labels[table] = change(plan, sizes)
    return labels


def stored_bytes(name: str, plan: Plan, sizes: Sizes, options: Options) -> int:
    """Bytes that a site keeps of earlier stages."""
    return CONTENDERS[name].stored(plan, sizes, options)


def trial_options(name: str, plan: Plan) -> list[Options]:
    """The settings that a contender is tuned over: points of a Halton sequence, log scale."""
    ranges = CONTENDERS[name].ranges
    draws = qmc.Halton(len(ranges), scramble=False).random(plan.trials + 1)[1:]  # the first is 0
    return [
        {
            option: float(f"{low * (high / low) ** float(place):.3g}")
            for (option, (low, high)), place in zip(ranges.items(), draw, strict=True)
        }
        for draw in draws
    ]


def values(name: str, data: str, plan: Plan, options: Options, tuning: bool, number: int) -> Any:
    """The config of a run, all but its device; `number` counts seeds, or validation streams."""
    seed = FIRST_STREAM + number if tuning else number
    shares = (plan.train, plan.valid) if tuning else (min(1.0, plan.train + plan.valid), 0.0)
    config: dict[str, Any] = {
        "name": f"fcl-{name}", "seed": seed, "rounds": plan.rounds, "data": {"name": data},
        "scenario": {
            "split": "classes", "stages": plan.stages, "clients": plan.clients,
            "rows": "dirichlet", "alpha": plan.alpha, "train": shares[0], "valid": shares[1],
            "tests": "valid" if tuning else "shared",
        },
        "model": {"widths": list(plan.widths)}, "robust": {"rule": "none"},
        "checkpoints": False, "looks": False,
    }  # fmt: skip
    method = _method_options(CONTENDERS[name].options["name"], plan, seed)
    for key, value in {**CONTENDERS[name].options, **options}.items():
        table, _, inner = key.rpartition(".")
        if key == "rounds":
            config["rounds"] = value
        elif table:
            config[table][inner] = value
        else:
            method[key] = value
    config["method"] = method
    if method["name"] == "analytic":
        config["rounds"] = 1
    return config


def _method_options(method: str, plan: Plan, seed: int) -> Options:
    """What all contenders of a method have."""
    if method == "analytic":
        return {"width": plan.features, "projection": seed}
    further = {
        "replay": {"memory": plan.memory},
        "lowrank": {"rank": plan.rank},
        "target": {"steps": plan.generator_steps, **GENERATOR},
    }
    return {"epochs": plan.epochs, "batch": plan.batch, **further.get(method, {})}
