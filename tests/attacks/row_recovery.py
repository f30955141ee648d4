"""Row recovery: a coordinator that reads a site's training rows out of its answers.

It drives a site's gate through the same calls as an honest coordinator. The first layer gets one
direction for all its units and stepped biases, so neighbouring units differ by the rows between
two steps: where that is one row, the ratio of the two differences is the row. The yardstick of
all privacy work: `recovered` counts the training rows that come out to 0.1 %.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.federation import Moment
from atoll.core.messages import Packet, Tensors, Weights, pack, unpack
from atoll.data.agree import Agree, Agreed, Offer, Offered, common, planned
from atoll.data.tables import TableOptions
from atoll.engines.network.policy import Gate, read_site
from atoll.methods import fedavg
from atoll.runs.config import change, resolve, to_toml

TOLERANCE = 1e-3  # relative distance at which a candidate counts as the row
COLUMNS = 6


def table(path: Path, rows: int, seed: int = 5) -> None:
    """A table of numbers with a label that depends on them."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(rows, COLUMNS))
    label = np.where(x[:, 0] + x[:, 1] > 0.2, "yes", "no")
    lines = [",".join([*(f"c{n}" for n in range(COLUMNS)), "outcome"])]
    lines += [",".join([*(f"{v:.4f}" for v in row), y]) for row, y in zip(x, label, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def site(folder: Path, contract: str, rows: int = 83) -> Path:
    """A site's file with a table of its own; 60 % of its rows are trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    table(folder / "basel.csv", rows)
    path = folder / "site.toml"
    path.write_text(f'store = "store"\ndata = {{ files = ["basel.csv"] }}\n{contract}')
    return path


HONEST: dict[str, Any] = {
    "widths": [32], "rate": 0.001, "epochs": 5, "rounds": 20, "engine.mode": "loop", "threads": 1,
}  # fmt: skip
CRAFTED: dict[str, Any] = {
    "widths": [4096], "rate": 1e7, "epochs": 1, "batch": 1_000_000, "optimiser": "sgd",
    "scale": "none", "dtype": "float64", "rounds": 20, "engine.mode": "loop", "threads": 1,
}  # fmt: skip


def run_config(changes: Mapping[str, Any], method: str = "fedavg") -> str:
    """A run on own tables, as a coordinator sends it."""
    data = {"files": ["basel.csv"], "label": "outcome"}
    return to_toml(resolve(change({"method": method, "data": data}, changes), "attack"))


@dataclass
class Coordinator:
    """A coordinator with one site; it keeps every answer."""

    gate: Gate
    number: int = 0
    rounds: int = 20
    pairs: list[tuple[Tensors, Tensors]] = field(default_factory=list)  # sent, received

    @classmethod
    def of(cls, path: Path) -> "Coordinator":
        """A coordinator of the site with this file."""
        return cls(Gate(read_site(path)))

    def open(self, run: str, config: str) -> None:
        """Agree on columns and prepare a run; the site may refuse."""
        client, options = "basel", TableOptions(files=("basel.csv",), label="outcome")
        offer = self.gate.offer(run, config, client, pack(Offer(run)))
        offers = {client: unpack(offer, Offered, client)}
        reply = self.gate.agree(pack(Agree(common(offers, options))))
        agreed = {client: unpack(reply, Agreed, client)}
        plan = json.dumps(asdict(planned(run, offers, agreed, options)))
        self.gate.prepare(run, config, client, (client,), plan)

    def ask(self, action: str, moment: Moment, message: Any) -> Packet:
        """One exchange."""
        self.number += 1
        return self.gate.handle(self.number, action, moment, pack(message))

    def fit(self, weights: Tensors, stage: int = 0, round: int = 0) -> Tensors:
        """One round of `fit`; what was sent and what came back are kept."""
        reply = self.ask("fit", Moment(stage, round, self.rounds), Weights(weights))
        back: Tensors = unpack(reply, fedavg.Fitted, "basel").weights
        self.pairs.append((weights, back))
        return back

    @property
    def first(self) -> Tensors:
        """The weights that seed and architecture give: an honest coordinator has them too."""
        model = self.gate._client.site.model()
        return {n: w.detach().clone() for n, w in model.state_dict().items()}

    @property
    def rows(self) -> Tensor:
        """The training rows as the network reads them: what the attack wants."""
        found: Tensor = self.gate._client.site.train(0).x
        return found

    def recovered(self) -> int:
        """How many training rows come out of all answers so far."""
        candidates = [torch.zeros(0, self.rows.shape[1], dtype=torch.float64)]
        candidates += [decode(sent, back) for sent, back in self.pairs]
        return matched(torch.cat(candidates), self.rows)


def craft(like: Tensors, scale: float = 1.0, gain: float = 1e-6, reach: float = 8.0) -> Tensors:
    """One direction for all units of the first layer, stepped biases, a tiny head.

    `scale` shrinks the first layer, `gain` the head, `reach` is where the steps begin and end.
    """
    units, columns = like["weight0"].shape
    draws = np.random.default_rng(1)
    direction = torch.from_numpy(draws.normal(size=columns)).to(like["weight0"])
    direction = scale * direction / direction.norm()
    steps = scale * torch.linspace(-reach, reach, units, dtype=like["bias0"].dtype)
    last = max(int(name.removeprefix("bias")) for name in like if name.startswith("bias"))
    made = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    made["weight0"] = direction.expand(units, columns).clone()
    made["bias0"] = -steps
    made[f"weight{last}"][0], made[f"weight{last}"][1] = gain, -gain
    return made


def decode(sent: Tensors, back: Tensors) -> Tensor:
    """Candidates for rows: the update of each unit, and of neighbours in the order of biases."""
    order = sent["bias0"].argsort()
    weight = (back["weight0"] - sent["weight0"]).double()[order]
    bias = (back["bias0"] - sent["bias0"]).double()[order]
    weights = torch.cat([weight, weight.diff(dim=0)])
    biases = torch.cat([bias, bias.diff(dim=0)])
    found = weights / biases[:, None]
    return found[found.isfinite().all(1)]


def matched(candidates: Tensor, rows: Tensor) -> int:
    """How many rows have a candidate within the tolerance."""
    if not len(candidates):
        return 0
    distance = torch.cdist(candidates.double(), rows.double()).amin(0)
    return int((distance <= TOLERANCE * rows.double().norm(dim=1)).sum())


Attack = Callable[[Coordinator], None]


def crafted_fit(coordinator: Coordinator) -> None:
    """The plain attack: crafted weights in the first round."""
    coordinator.open("crafted", run_config(CRAFTED))
    coordinator.fit(craft(coordinator.first))
