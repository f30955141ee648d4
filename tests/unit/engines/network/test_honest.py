"""Honest runs within bounds: all methods through gates end as they do in one process."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll import methods
from atoll.core.federation import Moment, actions
from atoll.core.messages import Packet, Tensors
from atoll.core.record import Snapshot
from atoll.engines.local import local_engine
from atoll.engines.network.contract import SiteFile
from atoll.engines.network.drafts import drafted_file
from atoll.engines.network.policy import Gate
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute, prepare
from atoll.runs.loop import go
from atoll.runs.parts import Parts

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


class Gates:
    """An engine whose clients are behind gates, as between real sites but in one process."""

    at_least = 0

    def __init__(self, parts: Parts, folder: Path, contract: Mapping[str, Any]) -> None:
        self.number, config = 0, to_toml(parts.config)
        self.gates = {}
        for id in parts.scenario.clients:
            gate = Gate(SiteFile(store=str(folder / id), contract=dict(contract)))
            gate.prepare("run-1", config, id)
            self.gates[id] = gate

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Ask the gates."""
        self.number += 1
        return {
            id: self.gates[id].handle(self.number, action, moment, packet)
            for id, packet in packets.items()
        }

    def states(self, place: str) -> dict[str, Tensors]:
        """Let all gates keep their clients."""
        for gate in self.gates.values():
            gate.keep(place)
        return {}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Let all gates go back."""
        for gate in self.gates.values():
            assert gate.restore(place)

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """Nothing is looked at here."""
        return []


def empty(name: str) -> dict[str, Any]:
    """A contract that says no more than it must."""
    return {"methods": [name], "actions": sorted(actions(methods.load(name).client))}


def drafted(config: RunConfig) -> dict[str, Any]:
    """The contract that `atoll network init --run` drafts."""
    found: dict[str, Any] = tomllib.loads(drafted_file(config))["contract"]
    return found


def through_gates(config: RunConfig, folder: Path, contract: Mapping[str, Any]) -> bytes:
    made, record = prepare(config, folder / "there", resume=False)
    go(made, Gates(made, folder / "stores", contract), record, lambda p: None, lambda: False)
    return (folder / "there" / "events.jsonl").read_bytes()


def in_one_process(config: RunConfig, folder: Path) -> bytes:
    execute(config, folder / "here", local_engine)
    return (folder / "here" / "events.jsonl").read_bytes()


@pytest.mark.parametrize("name", methods.names())
def test_a_run_under_default_contracts_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    config = small(name)
    here = in_one_process(config, tmp_path)
    for kind, terms in (("empty", empty(name)), ("drafted", drafted(config))):
        assert through_gates(config, tmp_path / kind, terms) == here


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
    assert through_gates(config, tmp_path, drafted(config)) == in_one_process(config, tmp_path)


@pytest.mark.process
@pytest.mark.long
def test_a_long_run_whose_bias_begins_small_passes(tmp_path: Path) -> None:
    """In 400 rounds the first bias moves 49 times its first norm, which is 0.066."""
    values = {
        "rounds": 400, "seed": 57, "data": "breast-cancer", "scenario.clients": 2,
        "model.widths": [4], "rate": 0.02, "epochs": 2, "score_every": 400,
    }  # fmt: skip
    config = small("fedavg", **values)
    assert through_gates(config, tmp_path, {**drafted(config), "drift": 40.0})
