"""Honest runs within bounds end as they do in one process; tests/conformance has all methods."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import methods
from atoll.core.messages import pack, unpack
from atoll.core.record import read_checkpoint
from atoll.engines.local import local_engine
from atoll.engines.network.requests import Compare
from atoll.learning.weights import without
from atoll.metrics.release import Release
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute, prepare
from atoll.runs.loop import go
from atoll.runs.result import Run
from atoll.testing.network import GatedEngine, drafted_terms, run_through_gates

DATA: dict[str, dict[str, Any]] = {
    "tasks": {"name": "synthetic-text"},
    "domains": {"name": "synthetic-images", "domains": 3, "rows": 600},
}


def small(name: str, **further: Any) -> RunConfig:
    """The run of the conformance suite, with three clients."""
    split = methods.load(name).split
    values: dict[str, Any] = {
        "name": name, "rounds": 2, "data": DATA.get(split, {"name": "synthetic-table"}),
        "method": {"name": name}, "model": {} if split == "parties" else {"widths": [16, 8]},
        "engine": {"mode": "loop", "threads": 1}, "checkpoint_seconds": 0,
    }  # fmt: skip
    values |= {} if split == "domains" else {"scenario": {"clients": 3}}
    return resolve(change(values, further), "test")


def in_one_process(config: RunConfig, folder: Path) -> bytes:
    execute(config, folder / "here", local_engine)
    return (folder / "here" / "events.jsonl").read_bytes()


@pytest.mark.parametrize(
    "name", [name for name in methods.names() if methods.load(name).split != "parties"]
)
def test_the_model_of_an_honest_run_is_compared(name: str, tmp_path: Path) -> None:
    """Its weights are within the bounds at every site that allows a comparison."""
    config = small(name)
    made, record = prepare(config, tmp_path / "there", resume=False)
    further = {"answer": True, "sums": "allow"}  # `analytic` has fewer rows than features here
    engine = GatedEngine(made, tmp_path / "stores", {**drafted_terms(config), **further})
    go(made, engine, record, lambda p: None, lambda: False)
    arrays = read_checkpoint(tmp_path / "there")[0]
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    headline = Run(tmp_path / "there").headline
    request = pack(Compare(headline, without("server", state)))
    for id, gate in engine.gates.items():
        reply = unpack(gate.compare(request), Release, id)
        assert reply.scores or reply.reason


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedavg", {"optimiser": "sgd", "rate": 0.05, "rounds": 6}),
        ("fedavg", {"rate": 0.01, "rounds": 6}),
        ("fedavg", {"cohort": 2, "rounds": 6}),
        ("chfl", {"common_opt_state": "keep", "rounds": 4}),
        ("fedmd", {"average": True, "data.rows": 300}),
        ("fml", {"average": True, "data.rows": 300}),
    ],
)
def test_other_options_pass_a_contract_drafted_for_them(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = small(name, **changes)
    assert run_through_gates(config, tmp_path, drafted_terms(config)) == in_one_process(
        config, tmp_path
    )


@pytest.mark.process
@pytest.mark.long
def test_a_long_run_whose_bias_begins_small_passes(tmp_path: Path) -> None:
    """In 400 rounds the first bias moves 49 times its first norm, which is 0.066."""
    values = {
        "rounds": 400, "seed": 57, "data": "breast-cancer", "scenario.clients": 2,
        "model.widths": [4], "rate": 0.02, "epochs": 2, "score_every": 400,
    }  # fmt: skip
    config = small("fedavg", **values)
    assert run_through_gates(config, tmp_path, {**drafted_terms(config), "drift": 40.0})
