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
from atoll.learning.image_nets import NETWORKS
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


@pytest.mark.parametrize("method", ["analytic", "target"])
def test_a_method_with_a_width_of_its_own_has_hidden_layers_too(method: str) -> None:
    assert parameters(config(method, widths=[20_000, 20_000])) > 400_000_000
    assert parameters(config(method, **{"method.width": 10**9})) >= 10**9


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "lenet"])
def test_a_network_with_a_name_has_the_size_that_it_will_have(name: str) -> None:
    """Up to the channels of images and the number of classes, which only the data tell."""
    run = config(data="digits", **{"model.name": name})
    made = parts(run)
    model = made.site(made.scenario.clients[0]).model()
    whole = sum(p.numel() for p in model.parameters())
    assert 0.6 * whole < parameters(run) <= whole
    assert parameters(run, 64, 10) == whole  # digits have one channel


def test_the_largest_network_of_the_sites_counts() -> None:
    data = {"name": "synthetic-images", "domains": 2}
    values = {"method": {"name": "fedmd"}, "data": data, "models": ["cnn", "resnet34"]}
    assert parameters(resolve(values, "test")) > 20_000_000


def test_a_network_for_texts_has_the_size_of_its_filters() -> None:
    data, widths = {"name": "synthetic-text", "rows": 200}, {"widths": [16]}
    run = resolve({"method": {"name": "fedseit"}, "data": data, "model": widths}, "test")
    made = parts(run)
    model = made.site(made.scenario.clients[0]).model()
    assert sum(p.numel() for p in model.parameters()) <= parameters(run, 24, 4) < 60_000
    for wide in ({"widths": [10**6]}, {**widths, "vectors": "random-9000000"}):
        run = resolve({"method": {"name": "fedseit"}, "data": data, "model": wide}, "test")
        assert parameters(run) > 10**9


def test_a_contract_bounds_networks_with_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(config: RunConfig) -> None:
        raise AssertionError("it loads data")

    monkeypatch.setattr("atoll.engines.network.policy.parts", loaded)
    small = {**TERMS, "parameters": 1_000_000, "unchecked_networks": "allow"}
    gate = Gate(SiteFile(store=str(tmp_path), contract=small))
    run = config(data="digits", **{"model.name": "resnet34"})
    with pytest.raises(RefusedError, match=r"a network of 21,\d+,\d+ parameters; 1,000,000 are"):
        gate.prepare("run-1", to_toml(run), "site-0")


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
