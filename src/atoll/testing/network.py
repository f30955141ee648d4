"""Rules about runs between sites: their record is that of a run in one process."""

import importlib.util
import random
import socket
import tomllib
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll import methods
from atoll.core.federation import Moment, actions
from atoll.core.messages import Packet, Tensors
from atoll.core.record import Snapshot
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.drafts import drafted_file
from atoll.engines.network.policy import Gate
from atoll.engines.network.sums import sends_sums
from atoll.runs.config import RunConfig, to_toml
from atoll.runs.execute import prepare
from atoll.runs.loop import go
from atoll.runs.parts import Parts, parts
from atoll.testing.rules import ConformanceError, require
from atoll.testing.samples import Case, run

__all__ = [
    "GatedEngine",
    "drafted_terms",
    "network_equals_local",
    "policies_let_it_pass",
    "run_through_gates",
]


class GatedEngine:
    """An engine whose clients live behind the policies of sites, in one process."""

    at_least = 0

    def __init__(self, parts: Parts, folder: Path, contract: Mapping[str, Any]) -> None:
        self.number = 0
        self.gates = {}
        config = to_toml(parts.config)
        for id in parts.scenario.clients:
            gate = Gate(SiteFile(store=str(folder / id), contract=dict(contract)))
            gate.prepare("run-1", config, id)
            self.gates[id] = gate

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        """Ask the clients through their gates."""
        self.number += 1
        return {
            id: self.gates[id].handle(self.number, action, moment, packet)
            for id, packet in packets.items()
        }

    def states(self, place: str) -> dict[str, Tensors]:
        """Let all sites save their clients."""
        for gate in self.gates.values():
            gate.keep(place)
        return {}

    def restore(self, states: Mapping[str, Tensors], place: str) -> None:
        """Let all sites restore their clients."""
        for gate in self.gates.values():
            gate.restore(place)

    def snapshots(self, moment: Moment) -> list[Snapshot]:
        """None."""
        return []


def least_terms(name: str) -> dict[str, Any]:
    """A contract that allows a method and its actions, and has defaults otherwise."""
    return {"methods": [name], "actions": sorted(actions(methods.load(name).client))}


def drafted_terms(config: RunConfig) -> dict[str, Any]:
    """The contract that `atoll network init --run` drafts for a run."""
    contract: dict[str, Any] = tomllib.loads(drafted_file(config))["contract"]
    return contract


def run_through_gates(config: RunConfig, folder: Path, contract: Mapping[str, Any]) -> bytes:
    """The events of a run whose clients live behind policies with this contract."""
    run_parts, record = prepare(config, folder / "run", resume=False)
    engine = GatedEngine(run_parts, folder / "stores", contract)
    go(run_parts, engine, record, lambda progress: None, lambda: False)
    return (folder / "run" / "events.jsonl").read_bytes()


def _config(case: Case) -> RunConfig:
    """Two rounds with three clients, where the split lets one choose."""
    clients = {"clients": 3} if "clients" in case.options_of_split() else {}
    return case.config(rounds=2, threads=1, **clients)


def policies_let_it_pass(case: Case, folder: Path) -> None:
    """(d) The policies of sites let an honest run pass, and its record is that of one process."""
    config = _config(case)
    local = run(config, folder / "local")
    contracts = {"drafted": drafted_terms(config)}
    if not (contracts["drafted"]["plugins"] or contracts["drafted"]["networks"]):
        deep = {"unchecked_networks": contracts["drafted"]["unchecked_networks"]}  # or of images
        contracts["default"] = {**least_terms(case.name), **deep}
    sums = {"sums": "allow"} if sends_sums(case.name) else {}  # of few rows: these are samples
    for kind, terms in contracts.items():
        try:
            events = run_through_gates(config, folder / kind, {**terms, **sums})
        except RefusedError as error:
            if kind == "default" and case.changes:
                continue  # options of the case may need a contract of their own
            raise ConformanceError(
                f"{case}: under a {kind} contract a site refuses this honest run: {error}; mark the"
                " weights that sites share (atoll.core.annotations), and declare them with `first`"
            ) from error
        require(case, events == local, f"under a {kind} contract the run has another record")


def network_equals_local(case: Case, folder: Path) -> None:
    """(d) A run over NVFlare and mutual TLS, a process for each site, has the same record."""
    if importlib.util.find_spec("nvflare") is None:
        raise unittest.SkipTest("needs NVFlare: pip install 'atoll[nvflare]'")
    from atoll.engines.network.rehearsal import rehearse_once  # noqa: PLC0415 - needs NVFlare

    config = _config(case)
    item = rehearse_once(config, parts(config).scenario.clients, _free_port(), folder / "network")
    holds = item.passed and "bit for bit" in item.words
    require(case, holds, f"between processes: {item.words}")


def _free_port() -> int:
    """A port below those that systems take for connections that go out."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port
