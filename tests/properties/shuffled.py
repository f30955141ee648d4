"""Trained runs on shuffled labels, where nothing can be learned: a verdict would be a mistake."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.engines.local import local_engine
from atoll.metrics.answer import answer
from atoll.runs.alone import train_parts
from atoll.runs.config import resolve
from atoll.runs.outcomes import outcomes
from atoll.runs.parts import parts


def shuffled_answer(seed: int) -> dict[str, Any]:
    """The answer of a small run of four sites whose labels are in random order."""
    values = {
        "name": "shuffled",
        "seed": seed,
        "rounds": 3,
        "data": {"name": "breast-cancer"},
        "method": {"name": "fedavg", "rate": 0.01},
        "scenario": {"split": "rows", "clients": 4, "tests": "own", "train": 0.4, "valid": 0.1},
        "model": {"widths": [8]},
        "engine": {"mode": "loop", "device": "cpu"},
    }
    made = parts(resolve(values, "shuffled"))
    labels = np.random.default_rng([21, seed]).permutation(made.dataset.y)
    made = replace(made, dataset=replace(made.dataset, y=labels))
    with tempfile.TemporaryDirectory() as folder:
        state = train_parts(made, Path(folder), local_engine, lambda: False)
    results = outcomes(made, state, "", local_engine)
    return answer({id: [outcome] for id, outcome in results.items()})


def decides(body: dict[str, Any]) -> bool:
    """Whether any site reads helps or hurts."""
    kinds = {site["verdict"]["kind"] for site in body["sites"].values()}
    return bool(kinds & {"helps", "hurts"})
