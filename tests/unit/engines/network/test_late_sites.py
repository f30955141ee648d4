"""A site with an own table that was away when others agreed, or whose offer stops the others."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import BadMessageError, ClientFailedError, UserError
from atoll.core.messages import Packet, pack, unpack
from atoll.data.own.agreement import Offered
from atoll.engines.network.contract import SiteFile
from atoll.engines.network.egress import lines
from atoll.engines.network.policy import Gate
from atoll.engines.network.replies import reply_of
from atoll.runs.config import RunConfig, resolve
from atoll.runs.parts import Parts

pytest.importorskip("nvflare", reason="needs the extra nvflare")

from atoll.engines.network.nvflare import _on_own_tables
from atoll.engines.network.remote import Party, Remote

SITES = ("a", "b")
ONE = threading.Lock()  # sites have a process each; ast.parse fails in threads (CPython 106905)


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
        with ONE:
            return reply_of(self.gate, "prepare", lambda gate: {"data": gate.prepare(**asked)})

    def ping(self) -> Any:
        return {}

    def _packed(self, action: str, work: Any) -> Any:
        def both(gate: Gate) -> dict[str, Any]:
            reply = work(gate)
            return {"header": reply.header, "block": reply.block}

        with ONE:
            return reply_of(self.gate, action, both)


def near(folder: Path) -> Near:
    folder.mkdir()
    rows = [f"{n % 17}.5,{n % 13}.1,{'AB'[n % 2]},{('ill', 'well')[n % 3 == 0]}" for n in range(40)]
    (folder / "table.csv").write_text("\n".join(["age,size,ward,diagnosis", *rows]) + "\n")
    contract = {"methods": ["fedavg"], "actions": ["offer", "agree", "fit", "check"], "columns": 2}
    data = {"files": [str(folder / "table.csv")], "label": "diagnosis"}
    return Near(Gate(SiteFile(store=str(folder / "store"), data=data, contract=contract)))


def coordinator(sites: dict[str, Near | None], at_least: int = 1) -> Remote:
    parties = {name: Party(name, name, site) for name, site in sites.items()}
    return Remote(config(), parties, 60.0, 60.0, lambda: None, at_least=at_least)


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


# A site whose offer stops the others


@dataclass
class Odd(Near):
    """A site that describes another table than its own and accepts every plan."""

    change: Callable[[Offered], Offered] = lambda offered: offered

    def offer(self, run: str, config: str, client: str, header: bytes, block: bytes) -> Any:
        reply = Near.offer(self, run, config, client, header, block)
        offered = unpack(Packet(reply["header"], reply["block"], 0, 0, ()), Offered, "c")
        packet = pack(self.change(offered))
        return {**reply, "header": packet.header, "block": packet.block}

    def agree(self, header: bytes, block: bytes) -> Any:
        reply = Near.agree(self, header, block)
        return {**reply, "header": b"{}"} if self.change is without_first_and_unreadable else reply

    def prepare(self, **asked: Any) -> Any:
        return {"ok": True, "data": "anything"}


def without_first(offered: Offered) -> Offered:
    first, *_ = offered.columns
    return replace(offered, columns={**offered.columns, first: "left out"})


def without_first_and_unreadable(offered: Offered) -> Offered:
    return without_first(offered)


def without_any(offered: Offered) -> Offered:
    return replace(offered, columns={"0" * 32: "number"})


def of_many_classes(offered: Offered) -> Offered:
    return replace(offered, classes=[*offered.classes, *(f"n{n}" for n in range(1_000))])


def of_many_left_out(offered: Offered) -> Offered:
    many = {f"{number:032x}": "left out" for number in range(30_000)}
    return replace(offered, columns={**offered.columns, **many})


def three(folder: Path, change: Callable[[Offered], Offered], at_least: int = 0) -> Remote:
    """A coordinator of two honest sites and an odd one."""
    honest: dict[str, Near | None] = {name: near(folder / name) for name in SITES}
    return coordinator({**honest, "c": Odd(near(folder / "c").gate, change)}, at_least)


def begin(engine: Remote, folder: Path) -> Parts:
    """The run begins; whatever becomes of it, no site is at work afterwards."""
    try:
        made, record = _on_own_tables(engine, "run", folder / "run")
        record.close()
        return made
    finally:
        engine._pool.shutdown()


def test_who_takes_common_columns_from_all_is_named_where_others_refuse_for_it(
    tmp_path: Path,
) -> None:
    engine = three(tmp_path, without_first)
    with pytest.raises(ClientFailedError) as failed:
        begin(engine, tmp_path)
    assert "1 columns with many values; the contract wants at least 2" in failed.value.reason
    assert failed.value.reason.endswith("; 2 columns are common, and 3 without c")


def test_who_leaves_no_common_column_is_named(tmp_path: Path) -> None:
    engine = three(tmp_path, without_any)
    with pytest.raises(UserError, match="no common column") as failed:
        begin(engine, tmp_path)
    assert failed.value.where == "0 columns are common, and 3 without c"


ABSURD = pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_many_classes, "it offers 1,002 classes"),
        (of_many_left_out, "a header of "),
    ],
    ids=["classes", "columns"],
)


@ABSURD
def test_who_makes_a_plan_that_no_site_takes_is_named(
    change: Callable[[Offered], Offered], reason: str, tmp_path: Path
) -> None:
    engine = three(tmp_path, change)
    with pytest.raises(BadMessageError, match=reason) as refused:
        begin(engine, tmp_path)
    assert refused.value.sender == "c"


@ABSURD
def test_a_run_that_can_do_without_that_site_begins_without_it(
    change: Callable[[Offered], Offered], reason: str, tmp_path: Path
) -> None:
    engine = three(tmp_path, change, at_least=2)
    made = begin(engine, tmp_path)
    assert engine.present == ["a", "b"]
    assert engine.parties["c"].excluded.startswith(f"left out of the run: {reason}")
    assert made.dataset.classes == ("ill", "well")


@ABSURD
def test_no_fewer_sites_begin_than_must_be_there(
    change: Callable[[Offered], Offered], reason: str, tmp_path: Path
) -> None:
    engine = three(tmp_path, change, at_least=3)
    with pytest.raises(BadMessageError, match=reason):
        begin(engine, tmp_path)


def test_sites_agree_anew_without_one_whose_second_answer_cannot_be_read(tmp_path: Path) -> None:
    """They have more columns in common without it than they have described."""
    engine = three(tmp_path, without_first_and_unreadable, at_least=2)
    made = begin(engine, tmp_path)
    assert engine.present == ["a", "b"]
    assert len(made.scenario.common) == 4  # age, size, and two levels of ward
