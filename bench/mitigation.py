"""What clipping, noise and rounding hide in a split network, and what they cost in accuracy.

    OMP_NUM_THREADS=1 python bench/mitigation.py [WIDTH] [SEEDS]

The demo `demo-vertical` on the CPU with embeddings so wide, and the gradients that one client was
really sent in the first stage written down. Clip and noise are in parts of the mean length of a
row's gradient in the first round of the run without either. Attacks are those of
atoll.audits.leakage: with three known rows of each class the labels of all others are guessed,
from the first round alone and from all ten; a linear map from embeddings to columns is fitted on
two thirds of the rows. And a stronger one: half of the labels are known, and a linear map from the
gradients of all rounds to labels is fitted on them. docs/methods/vleto.md has the table that this
prints.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.audits.leakage import labels_from_gradients
from atoll.core.federation import SERVER, Moment
from atoll.core.messages import Packet, unpack
from atoll.core.record import Record, Score, read_events, read_snapshots
from atoll.engines.local import LocalEngine
from atoll.families.vertical import Learn
from atoll.learning.split import Batches
from atoll.runs.config import change, read, resolve, to_toml
from atoll.runs.facts import facts
from atoll.runs.loop import go
from atoll.runs.parts import parts

CURIOUS = "site-0"
SETTINGS: list[tuple[str, float, float, int]] = [  # name, clip, noise, digits
    ("as it is", 0, 0, 0),
    ("clip 1", 1, 0, 0),
    ("clip 1, noise 0.03", 1, 0.03, 0),
    ("clip 1, noise 0.1", 1, 0.1, 0),
    ("clip 1, noise 0.3", 1, 0.3, 0),
    ("clip 1, noise 1", 1, 1, 0),
    ("clip 1, noise 3", 1, 3, 0),
    ("clip 0.0001: clients do not learn", 0.0001, 0, 0),
    ("digits = 2", 0, 0, 2),
    ("digits = 1", 0, 0, 1),
]


def sent(seed: int, folder: Path, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Run the demo; by round of the first stage the gradient of each row, and the rows' labels."""
    config = resolve(
        change(read("demo-vertical"), {"seed": seed, "engine.mode": "loop", **options}), "bench"
    )
    made = parts(config)
    engine, y = LocalEngine(made), made.site(SERVER).train(0).y
    carried, rounds = engine.carry, list[Tensor]()

    def listening(action: str, moment: Moment, packets: Mapping[str, Packet]) -> Any:
        if action == "learn" and moment.stage == 0:
            request = unpack(packets[CURIOUS], Learn, SERVER)
            if request.step == 0:
                rounds.append(torch.zeros((len(y), config.options().width)))
            else:
                batches = Batches(len(y), config.options().batch, request.seed)
                rounds[-1][batches.at(request.step - 1, y.device)] = request.gradient
        return carried(action, moment, packets)

    engine.carry = listening  # type: ignore[method-assign]
    record = Record.create(folder, to_toml(config), facts(made))
    go(made, engine, record, lambda progress: None, lambda: False)
    return rounds, y


def guessed(gradients: Tensor, y: Tensor) -> float:
    """The share of labels that is guessed with three known rows of each class."""
    known = torch.cat([torch.nonzero(y == kind).flatten()[:3] for kind in y.unique()])
    return labels_from_gradients(gradients, y, known)


def fitted(gradients: Tensor, y: Tensor) -> float:
    """The share of labels that a linear map guesses that is fitted on every other row."""
    g = gradients.double() / gradients.double().std()
    g = torch.cat([g, g.new_ones((len(g), 1))], 1)
    known, others = torch.arange(0, len(y), 2), torch.arange(1, len(y), 2)
    kinds = torch.nn.functional.one_hot(y).double()
    ridge = g.shape[1] * torch.eye(g.shape[1], dtype=torch.float64)
    found = torch.linalg.solve(g[known].T @ g[known] + ridge, g[known].T @ kinds[known])
    return float(((g[others] @ found).argmax(1) == y[others]).double().mean())


def measured(seed: int, **options: Any) -> dict[str, float]:
    """One run: what is guessed, and how well it learns."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        rounds, y = sent(seed, folder, **options)
        scores = [e for e in read_events(folder) if isinstance(e, Score) and e.variant == "union"]
        last = [one for one in read_snapshots(folder) if one.stage == scores[-1].stage]
    columns = [one.values[0][0] for one in last if one.name == "columns from embeddings"]
    (labels,) = [one.values[0][0] for one in last if one.name == "labels from gradients"]
    return {
        "first round": guessed(rounds[0], y),
        "all rounds": guessed(torch.cat(rounds, 1), y),
        "half known": fitted(torch.cat(rounds, 1), y),
        "after the last stage": labels,
        "columns": statistics.mean(columns),
        "accuracy": scores[-1].accuracy,
    }


def main(width: int, seeds: int) -> None:
    """Print a row for each setting."""
    with tempfile.TemporaryDirectory() as home:
        rounds, y = sent(0, Path(home) / "run", width=width)
    size = float(rounds[0].norm(dim=1).mean())
    kinds = len(y.unique())
    print(f"a row's gradient is {size:.5f} long on average; chance is {100 / kinds:.0f} %\n")
    heads = ("first round", "all rounds", "half known", "after the last stage", "columns",
             "accuracy")  # fmt: skip
    print("| | " + " | ".join(heads) + " |\n" + "|---" * (1 + len(heads)) + "|")
    for name, clip, noise, digits in SETTINGS:
        options = {"clip": clip * size, "noise": noise * size, "digits": digits, "width": width}
        found = [measured(seed, **options) for seed in range(seeds)]
        cells = []
        for head in heads:
            values = [100 * one[head] for one in found]
            spread = statistics.stdev(values) if seeds > 1 else 0.0
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [50, 3][len(given) :]))
