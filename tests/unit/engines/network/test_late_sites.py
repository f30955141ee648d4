"""A site with an own table that was away when the others agreed on columns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ClientFailedError
from atoll.core.messages import Packet
from atoll.engines.network.contract import SiteFile
from atoll.engines.network.egress import lines
from atoll.engines.network.policy import Gate
from atoll.engines.network.replies import answered
from atoll.runs.config import RunConfig, resolve

pytest.importorskip("nvflare", reason="needs the extra nvflare")

from atoll.engines.network.nvflare import _on_own_tables
from atoll.engines.network.remote import Party, Remote

SITES = ("a", "b")


@dataclass
class Near:
    """A site in this process, as the coordinator calls one."""

    gate: Gate

    def __call__(self, timeout: float) -> "Near":
        return self

    def offer(self, run: str, config: str, client: str, header: bytes, block: bytes) -> Any:
        packet = Packet(header, block, 0, 0, ())
        return self._packed("offer", lambda gate: gate.offer(run, config, client, packet))

    def agree(self, header: bytes, block: bytes) -> Any:
        packet = Packet(header, block, 0, 0, ())
        return self._packed("agree", lambda gate: gate.agree(packet))

    def prepare(self, **asked: Any) -> Any:
        return answered(self.gate, "prepare", lambda gate: {"data": gate.prepare(**asked)})

    def _packed(self, action: str, work: Any) -> Any:
        def both(gate: Gate) -> dict[str, Any]:
            reply = work(gate)
            return {"header": reply.header, "block": reply.block}

        return answered(self.gate, action, both)


def near(folder: Path) -> Near:
    folder.mkdir()
    rows = [f"{n % 17}.5,{n % 13}.1,{'AB'[n % 2]},{('ill', 'well')[n % 3 == 0]}" for n in range(40)]
    (folder / "table.csv").write_text("\n".join(["age,size,ward,diagnosis", *rows]) + "\n")
    contract = {"methods": ["fedavg"], "actions": ["offer", "agree", "fit", "check"], "columns": 2}
    data = {"files": [str(folder / "table.csv")], "label": "diagnosis"}
    return Near(Gate(SiteFile(store=str(folder / "store"), data=data, contract=contract)))


def coordinator(sites: dict[str, Near | None]) -> Remote:
    parties = {name: Party(name, name, site) for name, site in sites.items()}
    return Remote(config(), parties, 60.0, 60.0, lambda: None, at_least=1)


def config() -> RunConfig:
    data = {"files": ["a.csv", "b.csv"], "label": "diagnosis"}
    values = {"method": "fedavg", "data": data, "model": {"widths": [8]}}
    return resolve({**values, "engine": {"threads": 1}}, "test")


def actions(folder: Path) -> list[str]:
    return [line.words.partition(":")[0] for line in lines(folder / "store" / "egress.jsonl")]


def test_a_site_that_was_away_agrees_to_the_plan_when_it_comes(tmp_path: Path) -> None:
    sites = {name: near(tmp_path / name) for name in SITES}
    _, record = _on_own_tables(coordinator({**sites, "b": None}), "run", tmp_path / "run")
    record.close()
    before = len(actions(tmp_path / "a"))
    _, record = _on_own_tables(coordinator(dict(sites)), "run", tmp_path / "run")
    record.close()
    assert sites["b"].gate.id == "b"
    told = " ".join(actions(tmp_path / "b"))
    assert "'offer'" in told
    assert "'agree'" in told
    assert len(actions(tmp_path / "a")) == before + 1  # its fingerprint; it has agreed already


def test_without_that_it_takes_no_plan(tmp_path: Path) -> None:
    sites = {name: near(tmp_path / name) for name in SITES}
    plan = coordinator({**sites, "b": None}).agreement("run")
    with pytest.raises(ClientFailedError, match="b failed in prepare: refused there: this site"):
        coordinator(dict(sites)).prepare("run", plan)
