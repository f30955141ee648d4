"""The size of a run's network is known from its config, and bounded by the contract."""

from pathlib import Path
from typing import Any

import pytest

from atoll import methods
from atoll.core.federation import SERVER
from atoll.core.record import Message
from atoll.engines.local import local_engine
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.egress import lines
from atoll.engines.network.policy import Gate
from atoll.engines.network.ranges import drafted
from atoll.engines.network.size import HEADROOM, OTHER_BYTES, answer_bytes, parameters
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.runs.result import Run

TERMS: dict[str, Any] = {"methods": ["fedavg"], "actions": ["check", "fit"]}


def config(method: str = "fedavg", **changes: object) -> RunConfig:
    return resolve(change({"method": method, "data": "wine"}, changes), "test")


def test_the_size_is_that_of_the_network() -> None:
    run = config(widths=[7, 5])
    made = parts(run)
    model = made.site(made.scenario.clients[0]).model()
    inputs, classes = made.dataset.x.shape[1], len(made.dataset.classes)
    assert parameters(run, inputs, classes) == sum(p.numel() for p in model.parameters())


def test_a_lower_bound_needs_no_data() -> None:
    assert parameters(config(widths=[20_000, 20_000])) > 400_000_000
    assert parameters(config("splitnn", width=10**9)) >= 10**9


def test_a_network_that_is_too_large_is_refused_before_data_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(config: RunConfig) -> None:
        raise AssertionError("it loads data")

    monkeypatch.setattr("atoll.engines.network.policy.parts", loaded)
    run = config(widths=[20_000, 20_000])
    wide = {**TERMS, "unchecked_networks": "allow"}  # else it is refused for its depth
    wide["options"] = {"fedavg": drafted(run)}  # else its width alone is refused
    gate = Gate(SiteFile(store=str(tmp_path), contract=wide))
    with pytest.raises(RefusedError, match="a network of 400,080,001 parameters; 50,000,000 are"):
        gate.prepare("run-1", to_toml(run), "site-0")
    (line,) = lines(tmp_path / "egress.jsonl")
    assert "a network of 400,080,001 parameters" in line.words


def test_the_contract_says_how_large_a_network_may_be(tmp_path: Path) -> None:
    run = to_toml(config(widths=[7], clients=3))
    small = Gate(SiteFile(store=str(tmp_path / "a"), contract={**TERMS, "parameters": 100}))
    with pytest.raises(RefusedError, match="100 are allowed"):
        small.prepare("run-1", run, "site-0")
    enough = Gate(SiteFile(store=str(tmp_path / "b"), contract={**TERMS, "parameters": 122}))
    assert enough.prepare("run-1", run, "site-0")


DATA: dict[str, dict[str, Any]] = {
    "tasks": {"name": "synthetic-text"},
    "domains": {"name": "synthetic-images", "domains": 3, "rows": 600},
}


@pytest.mark.parametrize("name", methods.names())
def test_no_answer_of_a_run_is_larger_than_the_coordinator_expects(
    name: str, tmp_path: Path
) -> None:
    split = methods.load(name).split
    values: dict[str, Any] = {
        "rounds": 1, "data": DATA.get(split, {"name": "synthetic-table"}), "method": {"name": name},
        "model": {} if split == "parties" else {"widths": [16, 8]},
        "engine": {"mode": "loop", "threads": 1},
    }  # fmt: skip
    run = resolve(values, "test")
    execute(run, tmp_path / "run", local_engine)
    ledger = [e for e in Run(tmp_path / "run").events if isinstance(e, Message)]
    answers = [e.payload / e.count for e in ledger if e.receiver == SERVER]
    tensors = (answer_bytes(parts(run)) - OTHER_BYTES) / HEADROOM
    assert answers
    assert max(answers) <= tensors
    assert tensors < 16_000_000  # and not what a message can have at all
