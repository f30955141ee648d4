"""Plan recovery: a coordinator that reads names and rows out of a plan of its own making.

A plan says what becomes of the columns of sites' own tables. Here every column, also the one with
the patients' names, becomes text with levels that the coordinator chooses: a list of names, every
number at the precision of the file. The first layer's weights of a level move only if a training
row has it, and levels of one row move alike. As a script it prints what comes out under the
contracts of the tests:

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.attacks.plan_recovery
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll import methods
from atoll.core.federation import Moment
from atoll.core.messages import Tensors, Weights, pack, unpack
from atoll.core.options import build
from atoll.data.own.agreement import (
    Agree,
    Agreed,
    Common,
    Offer,
    Offered,
    Plan,
    common,
    elsewhere,
    planned,
)
from atoll.data.own.tables import TableOptions
from atoll.engines.network.contract import Contract, RefusedError, read_site
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.policy import Gate
from atoll.families import averaging
from atoll.runs.config import RunConfig, resolve, to_toml
from atoll.runs.parts import Parts

RUN = "run"
CLIENT = "basel"
CLIENTS = ("basel", "bern", "geneva")
FIRST = ("Anna", "Beat", "Carla", "David", "Eva", "Felix", "Greta", "Hans", "Ines", "Jonas")
LAST = ("Meier", "Keller", "Weber", "Huber", "Frei", "Graf", "Roth", "Suter", "Moser", "Kunz")
NAMES = tuple(sorted(f"{first} {last}" for first, last in itertools.product(FIRST, LAST)))
GRIDS = {
    "age": (15, 100), "pressure": (60, 200), "weight": (20, 130), "height": (120, 220),
    "pulse": (30, 140),
}  # fmt: skip
COLUMNS = ("patient", *GRIDS, "smoker")  # as the file has them
DEFAULT = Contract(methods=("fedavg",), actions=("fit", "check", "offer", "agree"))


def table(path: Path) -> list[list[str]]:
    """A table of 60 people; its rows."""
    draws = np.random.default_rng(11)
    who = draws.permutation(len(NAMES))
    rows = []
    for number in range(60):
        ill = number % 2
        around = (50 + 8 * ill, 120 + 15 * ill, 70 + 3 * ill, 172, 75)
        values = [f"{draws.normal(mean, 9):.1f}" for mean in around]
        smoker, label = ("no", "yes")[draws.integers(2)], ("well", "sick")[ill]
        rows.append([NAMES[who[number]], *values, smoker, label])
    path.write_text("\n".join(",".join(row) for row in [[*COLUMNS, "label"], *rows]) + "\n")
    return rows


def run_config(**data: Any) -> RunConfig:
    """An honest run on own tables."""
    given = {"files": [f"{client}.csv" for client in CLIENTS], "label": "label", **data}
    values = {
        "rounds": 4, "data": given, "model": {"widths": [8]},
        "method": {"name": "fedavg", "epochs": 2}, "engine": {"mode": "loop", "threads": 1},
    }  # fmt: skip
    return resolve(values, "attack")


def site(folder: Path, contract: Contract, **data: Any) -> tuple[Gate, list[list[str]]]:
    """A site with a table of people, and its rows; `data`: what else its own file says."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = table(folder / "basel.csv")
    said = {"files": ["basel.csv"], "label": "label", **data}
    own = ", ".join(f"{name} = {json.dumps(value)}" for name, value in said.items())
    head = f'store = "store"\ndata = {{ {own} }}\n'
    (folder / "site.toml").write_text(head + written(contract))
    return Gate(read_site(folder / "site.toml")), rows


def as_text(plan: Plan) -> str:
    """A plan as it travels."""
    return json.dumps(asdict(plan))


def talk(gate: Gate, config: RunConfig, columns: list[str] | None = None) -> tuple[Offered, Plan]:
    """Offer and agree with one site, as an honest coordinator does; the honest plan."""
    given = {key: value for key, value in config.data.items() if key != "name"}
    options = build(TableOptions, given, "attack")
    offer = gate.offer(RUN, to_toml(config), CLIENT, pack(Offer(RUN)))
    offered = unpack(offer, Offered, CLIENT)
    asked = common({CLIENT: offered}, options) if columns is None else columns
    agreed = unpack(gate.agree(pack(Agree(asked))), Agreed, CLIENT)
    return offered, planned(RUN, {CLIENT: offered}, {CLIENT: agreed}, options)


def crafted(offered: Offered) -> Plan:
    """Every column as text, with all that could be in it as levels."""
    grids = [np.arange(low, high, 0.1) for low, high in GRIDS.values()]
    levels = [NAMES, *(tuple(f"{v:.1f}" for v in grid) for grid in grids), ("no", "yes")]
    pairs = zip(offered.columns, levels, strict=True)
    columns = [Common(hashed, "text", words, False) for hashed, words in pairs]
    return Plan(RUN, tuple(columns), (), ("sick", "well"), ())


def names_only(offered: Offered, honest: Plan) -> Plan:
    """The honest plan with the patients' names as one more column."""
    hashed = next(iter(offered.columns))
    added = Common(hashed, "text", NAMES, False)
    return replace(honest, columns=(*honest.columns, added), left_out=())


def numbers_only(offered: Offered, honest: Plan) -> Plan:
    """The honest plan with every number as text."""
    by_hash = {column.hash: column for column in crafted(offered).columns}
    columns = tuple(by_hash[column.hash] for column in honest.columns)
    return replace(honest, columns=columns)


PLANS: Mapping[str, Callable[[Offered, Plan], Plan]] = {
    "honest": lambda offered, honest: honest,
    "all columns": lambda offered, honest: crafted(offered),
    "names": names_only,
    "numbers": numbers_only,
}


@dataclass(frozen=True)
class Loot:
    """What a coordinator has read: names that are in the training rows, and whole rows."""

    names: int = 0
    cells: int = 0  # that are in the table as read, in the row of their name
    rows: int = 0
    refusal: str = ""


def attack(gate: Gate, rows: list[list[str]], kind: str, **data: Any) -> Loot:
    """One `fit` with a crafted plan; what comes out of its update."""
    config = run_config(**data)
    offered, honest = talk(gate, config)
    plan = PLANS[kind](offered, honest)
    made = Parts(config, *elsewhere(plan, CLIENTS, config.data["files"]))
    method: Any = methods.load("fedavg")
    sent: Tensors = next(iter(method.first(made.server()).values()))
    try:
        gate.prepare(RUN, to_toml(config), CLIENT, CLIENTS, as_text(plan))
        reply = gate.handle(1, "fit", Moment(0, 0, 4), pack(Weights(sent)), RUN)
    except RefusedError as error:
        return Loot(refusal=str(error))
    back = unpack(reply, averaging.Fitted, CLIENT).weights
    return read_off(plan, offered, sent, back, rows)


def read_off(
    plan: Plan, offered: Offered, sent: Tensors, back: Tensors, rows: list[list[str]]
) -> Loot:
    """Names and rows of an update: levels that moved, linked by how they moved."""
    change = (back["weight0"] - sent["weight0"]).double()
    moved: dict[str, dict[str, torch.Tensor]] = {}
    start, called = 0, dict(zip(offered.columns, COLUMNS, strict=True))
    for column in plan.columns:
        places = {level: change[:, start + n] for n, level in enumerate(column.levels)}
        moved[called[column.hash]] = {k: v for k, v in places.items() if v.abs().max() > 0}
        start += column.width
    true = {row[0]: row[1:] for row in rows}
    names = [name for name in moved.get("patient", {}) if name in true]
    cells = whole = 0
    for name in names:
        vector, right = moved["patient"][name], 0
        for place, grid in enumerate(GRIDS):
            guesses = moved.get(grid, {})
            near = min(guesses, key=lambda g: float((guesses[g] - vector).abs().max()), default="")
            right += near == true[name][place]
        cells, whole = cells + right, whole + (right == len(GRIDS))
    values = [{row[1 + n] for row in rows} for n in range(len(GRIDS))]
    loose = [len(v & moved.get(c, {}).keys()) for c, v in zip(GRIDS, values, strict=True)]
    return Loot(len(names), max(cells, *loose), whole)


def contracts() -> dict[str, Contract]:
    """The contracts of the tests: default terms, and a draft for the honest run."""
    return {"default": DEFAULT, "drafted": drafted_contract(run_config())}


def main() -> None:
    """Print what comes out, for every contract and plan."""
    for name, contract in contracts().items():
        for kind in PLANS:
            with tempfile.TemporaryDirectory() as folder:
                loot = attack(*site(Path(folder), contract), kind)
                sys.stdout.write(f"{name}, {kind}: {loot}\n")


if __name__ == "__main__":
    main()
