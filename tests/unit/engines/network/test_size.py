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
from atoll.engines.network.ranges import drafted, violation
from atoll.engines.network.size import HEADROOM, OTHER_BYTES, answer_bytes, parameters
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.runs.result import Run

TERMS = {"methods": ["fedavg"], "actions": ["check", "fit"]}


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
    wide = {**TERMS, "options": {"fedavg": drafted(run)}}  # else its width alone is refused
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


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"data": {"name": "synthetic-table", "rows": 10**9}}, "data.rows"),
        ({"data": {"name": "synthetic-table", "columns": 10**6}}, "data.columns"),
        ({"data": {"name": "synthetic-table", "classes": 10**6}}, "data.classes"),
        ({"data": {"name": "synthetic-images", "domains": 10**4}}, "data.domains"),
        ({"data": {"name": "photo-patches", "size": 10**4}}, "data.size"),
        ({"data": {"name": "synthetic-text", "length": 10**6}}, "data.length"),
        ({"data": {"name": "synthetic-text", "vocabulary": 10**8}}, "data.vocabulary"),
        ({"data": {"name": "hospitals", "patients": 10**9}}, "data.patients"),
        ({"data": "wine", "scenario": {"clients": 10**9}}, "scenario.clients"),
    ],
)
def test_made_up_data_that_do_not_fit_into_memory_are_refused_before_they_are_made(
    changes: dict[str, Any], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contract that names no options of a method leaves most of them to the coordinator."""

    def loaded(config: RunConfig) -> None:
        raise AssertionError("it loads data")

    monkeypatch.setattr("atoll.engines.network.policy.parts", loaded)
    gate = Gate(SiteFile(store=str(tmp_path), contract=TERMS))
    run = resolve({"method": {"name": "fedavg"}, **changes}, "test")
    with pytest.raises(RefusedError, match=f"option '{option}' = 1"):
        gate.prepare("run-1", to_toml(run), "site-0")
    (line,) = lines(tmp_path / "egress.jsonl")
    assert f"option '{option}'" in line.words


def test_many_public_images_are_refused_before_they_are_made() -> None:
    public = {"method": {"name": "fedmd"}, "data": {"name": "synthetic-images"}}
    run = resolve({**public, "public": {"rows": 10**9}}, "test")
    assert violation({}, run).startswith("option 'public.rows' = 1000000000")
    assert violation({}, resolve(public, "test")) == ""


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
