"""Row recovery: a coordinator that reads a site's training rows out of its answers.

It drives a site's gate through the same calls as an honest coordinator. The first layer gets one
direction for all its units and stepped biases, so neighbouring units differ by the rows between
two steps: where that is one row, the ratio of the two differences is the row. The yardstick of
all privacy work: `recovered` counts the training rows that come out to 0.1 %.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.federation import Moment, actions, kinds
from atoll.core.messages import Check, Checked, Packet, Tensors, Weights, pack, unpack
from atoll.core.options import build
from atoll.data.own.agreement import Agree, Agreed, Offer, Offered, common, planned
from atoll.data.own.tables import TableOptions
from atoll.engines.network.contract import RefusedError, read_site
from atoll.engines.network.policy import Gate
from atoll.methods import chfl
from atoll.runs.config import RunConfig, change, resolve, to_toml

TOLERANCE = 1e-3  # relative distance at which a candidate counts as the row
COLUMNS = 6
PAIRED = 512  # units up to which all pairs are tried


def table(path: Path, rows: int, seed: int = 5) -> None:
    """A table of numbers with a label that depends on them."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(rows, COLUMNS))
    label = np.where(x[:, 0] + x[:, 1] > 0.2, "yes", "no")
    lines = [",".join([*(f"c{n}" for n in range(COLUMNS)), "phase", "outcome"])]
    lines += [
        ",".join([*(f"{v:.4f}" for v in row), f"p{n % 2}", y])
        for n, (row, y) in enumerate(zip(x, label, strict=True))
    ]
    path.write_text("\n".join(lines) + "\n")


def site(folder: Path, contract: str, rows: int = 83, stage: str = "") -> Path:
    """A site's file with a table of its own; 60 % of its rows are trained on."""
    staged = f', stage = "{stage}"' if stage else ""
    folder.mkdir(parents=True, exist_ok=True)
    table(folder / "basel.csv", rows)
    path = folder / "site.toml"
    data = f'data = {{ files = ["basel.csv"], label = "outcome"{staged} }}'
    path.write_text(f'store = "store"\n{data}\n{contract}')
    return path


HONEST: dict[str, Any] = {
    "widths": [32], "rate": 0.001, "epochs": 5, "rounds": 40, "engine.mode": "loop", "threads": 1,
    "data.ignore": ["phase"],
}  # fmt: skip
CRAFTED: dict[str, Any] = {
    **HONEST, "widths": [4096], "rate": 1e7, "epochs": 1, "batch": 1_000_000, "optimiser": "sgd",
    "scale": "none", "dtype": "float64",
}  # fmt: skip
STAGED: dict[str, Any] = {**HONEST, "data.ignore": [], "data.stage": "phase"}


def run_config(changes: Mapping[str, Any], method: str = "fedavg") -> RunConfig:
    """A run on own tables, as a coordinator plans it."""
    data = {"files": ["basel.csv"], "label": "outcome"}
    return resolve(change({"method": method, "data": data}, changes), "attack")


@dataclass
class Coordinator:
    """A hostile coordinator with one site; it keeps every answer and every refusal."""

    path: Path  # the site's file
    gate: Gate = field(init=False)
    config: RunConfig = field(init=False)
    number: int = 0
    pairs: list[tuple[Tensors, Tensors]] = field(default_factory=list)  # sent, received
    refusals: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = Gate(read_site(self.path))

    def open(self, run: str, config: RunConfig) -> bool:
        """Agree on columns and prepare a run; whether the site does."""
        self.config, text = config, to_toml(config)
        given = {key: value for key, value in config.data.items() if key != "name"}
        client, options = "basel", build(TableOptions, given, "attack")
        try:
            offer = self.gate.offer(run, text, client, pack(Offer(run)))
            offers = {client: unpack(offer, Offered, client)}
            reply = self.gate.agree(pack(Agree(common(offers, options))))
            agreed = {client: unpack(reply, Agreed, client)}
            plan = json.dumps(asdict(planned(run, offers, agreed, options)))
            self.gate.prepare(run, text, client, (client,), plan)
        except RefusedError as error:
            self.refusals.append(str(error))
            return False
        return True

    def reopen(self, run: str) -> bool:
        """The site's process starts again, and the run is prepared again."""
        self.gate, self.number = Gate(read_site(self.path)), 0
        return self.open(run, self.config)

    def ask(self, action: str, moment: Moment, message: Any) -> Packet | None:
        """One exchange; nothing where the site refuses."""
        self.number += 1
        try:
            return self.gate.handle(self.number, action, moment, pack(message))
        except RefusedError as error:
            self.refusals.append(str(error))
            return None

    def fit(self, weights: Tensors, round: int = 0, stage: int = 0) -> Tensors | None:
        """One round of `fit`; what was sent and what came back are kept."""
        paired = self.config.method["name"] == "chfl"
        message: Any = chfl.Fit(weights, []) if paired else Weights(weights)
        reply = self.ask("fit", Moment(stage, round, self.config.rounds), message)
        if reply is None:
            return None
        kind: Any = kinds(actions(type(self.gate._client))["fit"])[1]
        back: Tensors = unpack(reply, kind, "basel").weights
        self.pairs.append((weights, back))
        return back

    def honest(self, rounds: int, stage: int = 0) -> Tensors:
        """Honest rounds, so that the site has no reason to complain; the weights after them."""
        weights = self.first
        for number in range(rounds):
            back = self.fit(weights, number, stage)
            assert back is not None, self.refusals
            weights = back
        return weights

    @property
    def first(self) -> Tensors:
        """The weights that seed and architecture give: an honest coordinator has them too."""
        model = self.gate._client.site.model()
        return {n: w.detach().clone() for n, w in model.state_dict().items()}

    def rows(self, stage: int = 0) -> Tensor:
        """The training rows as the network reads them: what the attack wants."""
        found: Tensor = self.gate._client.site.train(stage).x
        return found

    def recovered(self, stage: int = 0) -> int:
        """How many training rows come out of all answers so far."""
        rows = self.rows(stage)
        candidates = [torch.zeros(0, rows.shape[1], dtype=torch.float64)]
        rate = float(self.config.method["rate"])
        candidates += [decode(sent, back, rate) for sent, back in self.pairs]
        return matched(torch.cat(candidates), rows)


def craft(like: Tensors, scale: float = 1.0, gain: float = 1e-6, reach: float = 4.0) -> Tensors:
    """One direction for all units of the first layer, stepped biases, a tiny head.

    `scale` shrinks the first layer, `gain` the head, `reach` is where the steps begin and end.
    """
    units, columns = like["weight0"].shape
    draws = np.random.default_rng(1)
    direction = torch.from_numpy(draws.normal(size=columns)).to(like["weight0"])
    direction = scale * direction / direction.norm()
    steps = scale * torch.linspace(-reach, reach, units, dtype=like["bias0"].dtype)
    last = _last(like)
    made = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    made["weight0"] = direction.expand(units, columns).clone()
    made["bias0"] = -steps
    made[f"weight{last}"][0], made[f"weight{last}"][1] = gain, -gain
    return made


def trap(like: Tensors, deviations: float = 2.0) -> Tensors:
    """The same weights with biases so low that few rows reach a unit: only biases move."""
    size = like["weight0"].norm(dim=1)
    return {**like, "bias0": -deviations * size}


def quiet_trap(like: Tensors, deviations: float = 2.0, gain: float = 3e-7) -> Tensors:
    """The same for half of the units, with so small a head that Adam's first step is no sign yet.

    The other half keeps the norms as they were.
    """
    made, half = {**like, "weight1": like["weight1"].clone()}, len(like["bias0"]) // 2
    made["bias0"] = like["bias0"].clone()
    made["bias0"][:half] = trap(like, deviations)["bias0"][:half]
    made["weight1"][0, :half], made["weight1"][1, :half] = gain, -gain
    return made


def _last(like: Tensors) -> int:
    return max(int(name.removeprefix("bias")) for name in like if name.startswith("bias"))


def decode(sent: Tensors, back: Tensors, rate: float) -> Tensor:
    """Candidates for rows, from updates as they are and as one step of Adam made them."""
    order = sent["bias0"].argsort()
    weight = (back["weight0"] - sent["weight0"]).double()[order]
    bias = (back["bias0"] - sent["bias0"]).double()[order]
    undone = [1e-8 * update / (rate - update.abs()) for update in (weight, bias)]
    return torch.cat([_ratios(weight, bias), _ratios(*undone)])


def _ratios(weight: Tensor, bias: Tensor) -> Tensor:
    """The ratio of each unit, and of pairs: of few units of all, of many of neighbours."""
    count = len(bias)
    one, two = torch.triu_indices(count, count, 1)
    if count > PAIRED:
        one, two = torch.arange(count - 1), torch.arange(1, count)
    weights = torch.cat([weight, weight[two] - weight[one]])
    biases = torch.cat([bias, bias[two] - bias[one]])
    found = weights / biases[:, None]
    return found[found.isfinite().all(1)]


def matched(candidates: Tensor, rows: Tensor) -> int:
    """How many rows have a candidate within the tolerance."""
    if not len(candidates):
        return 0
    exact = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(candidates.double(), rows.double(), compute_mode=exact).amin(0)
    return int((distance <= TOLERANCE * rows.double().norm(dim=1)).sum())


def towards(now: Tensors, goal: Tensors, share: float, own: Mapping[str, float]) -> Tensors:
    """Weights a step nearer to a goal: each tensor moves by at most this share of its norm."""
    found = {}
    for name, tensor in now.items():
        way = goal[name] - tensor
        allowed = max(share * float(tensor.norm()), 1.9 * own.get(name, 0.0))
        length = float(way.norm())
        found[name] = goal[name].clone() if length <= allowed else tensor + way * allowed / length
    return found


def creep(coordinator: Coordinator, goal: Tensors, share: float, rounds: int) -> Tensors:
    """Go to crafted weights in small moves; after a refusal in smaller ones."""
    now, own = coordinator.first, dict[str, float]()
    back = coordinator.fit(now, 0)
    for number in range(1, rounds):
        if back is not None:
            own = {n: float((back[n] - now[n]).norm()) for n in now}
        wanted = towards(now, goal, share, own)
        back = coordinator.fit(wanted, number)
        if back is None:
            share, own = share / 2, {}
        else:
            now = wanted
    return now


# Test rows, through the counts of `check`


def spotted(coordinator: Coordinator, moment: Moment, weights: Tensors) -> int | None:
    """The hits of crafted weights on the test rows."""
    reply = coordinator.ask("check", moment, Check(0, weights))
    return None if reply is None else unpack(reply, Checked, "basel").correct.get("", 0)


def band(like: Tensors, low: float, high: float, column: int, above: float) -> Tensors:
    """Says class 0 of rows with the first column in a band and another column above a value."""
    steep, made = 1e5, {n: torch.zeros_like(t) for n, t in like.items()}
    edges = [(0, low), (0, low), (0, high), (0, high), (column, above), (column, above)]
    for unit, (read, edge) in enumerate(edges):
        made["weight0"][unit, read] = steep
        made["bias0"][unit] = -steep * edge - (unit % 2)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    made["weight1"][0, :6] = signs
    made["bias1"][0], made["bias1"][1] = -1.5, 0.0
    return made


def recover_by_tests(coordinator: Coordinator, moment: Moment, most: int = 2) -> int:
    """How many test rows come out of counted hits: one row in a band, then column by column."""
    like, rows = coordinator.first, coordinator.gate._client.site.test(0)
    base = spotted(coordinator, moment, band(like, 90.0, 91.0, 1, -9.0))
    if base is None:
        return 0
    low, found = -4.0, 0
    edges = np.sort(rows.x[:, 0].numpy())  # a real attack bisects for these, too
    for edge in edges[:most]:
        low, high = float(edge) - 1e-4, float(edge) + 1e-4
        values = [_bisect(coordinator, moment, base, (low, high, n)) for n in range(1, COLUMNS)]
        row = torch.tensor([[float(edge), *values]], dtype=torch.float64)
        found += matched(row, rows.x)
    return found


def _bisect(
    coordinator: Coordinator, moment: Moment, base: int, what: tuple[float, float, int]
) -> float:
    low, high, like = -6.0, 6.0, coordinator.first
    while high - low > 1e-4:
        middle = (low + high) / 2
        hits = spotted(coordinator, moment, band(like, what[0], what[1], what[2], middle))
        low, high = (middle, high) if hits != base else (low, middle)
    return (low + high) / 2
