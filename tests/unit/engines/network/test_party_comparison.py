"""The answer where parties hold columns: the coordinator compares, within each site's contract."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll import engines
from atoll.core.errors import SiteLostError
from atoll.core.messages import Packet
from atoll.core.record import Message, read_events
from atoll.engines.local import local_engine
from atoll.engines.network import egress
from atoll.engines.network.collection import collect, reason_for_none
from atoll.engines.network.contract import RefusedError
from atoll.engines.network.party_comparison import APART, AWAY, REFUSED
from atoll.runs import loop
from atoll.runs.answer import write_answer, write_assembled
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute, prepare
from atoll.runs.loop import go
from atoll.runs.parts import parts
from atoll.runs.result import Run, write_result
from atoll.testing.network import GatedEngine, drafted_terms

PARTIES = ("site-0", "site-1")


def config(method: str = "splitnn", **changes: Any) -> RunConfig:
    values = {
        "data": {"name": "synthetic-table", "rows": 120}, "rounds": 3, "clients": 2, "width": 4,
        "rate": 0.05, "batch": 32, "engine.mode": "loop", "threads": 1, "report.pooled": False,
    }  # fmt: skip
    return resolve(change({"method": {"name": method}}, values | changes), "test")


class Gates(GatedEngine):
    """Parties behind the gates of their sites, in this process."""

    away: tuple[str, ...] = ()
    lost = ""  # who is lost while it trains alone

    @property
    def present(self) -> list[str]:
        return [id for id in sorted(self.gates) if id not in self.away]

    def willing(self, id: str) -> bool:
        return self.gates[id].terms.answer

    def alone(self, id: str) -> None:
        if id == self.lost:
            raise SiteLostError(id, "silent for 30 s")
        self.gates[id].alone()

    def compare(self, request: Packet) -> dict[str, Packet | str]:
        raise AssertionError("parties are not asked")


def gated(
    run: RunConfig, folder: Path, away: str = "", lost: str = "", **terms: Any
) -> tuple[Gates, dict[str, Any]]:
    """A run through gates, and the answer at its end."""
    made, record = prepare(run, folder / "run", resume=False)
    contract = drafted_terms(run) | {"answer": True} | terms
    sites = Gates(made, folder / "stores", contract)
    with record:
        go(made, sites, record, lambda progress: None, lambda: False)
        sites.away, sites.lost = (away,) if away else (), lost
        body = collect(sites, made, folder / "run", record)
        write_result(folder / "run", record.extents)
    return sites, write_assembled(folder / "run", body)


def without_runs(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what tells runs apart, and without simple models."""
    plain = {key: value for key, value in body.items() if key not in ("runs", "digest", "notes")}
    for entry in plain["sites"].values():
        entry["joined_over_logistic"], entry["remarks"] = None, []
        for name in ("logistic regression", "ridge regression", "gradient boosting"):
            if name in entry["scores"]:
                entry["scores"][name] = None
    return plain


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("splitnn", {}),
        ("vleto", {"scenario.mode": "columns"}),
        ("splitnn", {"data.task": "regression"}),
    ],
)
def test_the_answer_is_that_of_one_process_without_simple_models(
    method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = config(method, **changes)
    _, there = gated(run, tmp_path)
    execute(run, tmp_path / "local", local_engine)
    here = write_answer([tmp_path / "local"], engines.load)
    linear = "ridge regression" if "data.task" in changes else "logistic regression"
    assert f"no {linear}: {APART}" in there["notes"]
    assert set(there["sites"]) == set(PARTIES)
    assert without_runs(there) == without_runs(here)
    assert Run(tmp_path / "run").answer == there


def test_the_ledger_and_the_log_of_a_site_have_the_bytes(tmp_path: Path) -> None:
    sites, _ = gated(config(), tmp_path)
    lines = [e for e in read_events(tmp_path / "run") if isinstance(e, Message)]
    compared = [line for line in lines if line.action == "compare"]
    assert {line.kind for line in compared} == {"Learn", "Embed", "Embedded"}
    run_lines = [line for line in lines if line.action != "compare"]
    for id in PARTIES:
        log = list(egress.lines(tmp_path / "stores" / id / "egress.jsonl"))
        (begun,) = [line for line in log if line.action == "compare"]
        left = sum(line.bytes for line in log if line.action in ("embed", "learn"))
        entered = sum(line.bytes for line in [*compared, *run_lines] if line.sender == id)
        assert entered == left
        assert begun.bytes > 0
        spent = sites.gates[id].egress.spent("synthetic-table")
        assert (spent.rounds, spent.comparisons) == (6, 1)  # three more rounds, alone


def test_only_parties_that_allow_it_train_alone(tmp_path: Path) -> None:
    _, body = gated(config(), tmp_path, answer=False)
    assert body["withheld"] == dict.fromkeys(PARTIES, REFUSED)
    assert body["overall"]["gain"] is None


def test_a_party_that_is_away_or_lost_stops_nobody(tmp_path: Path) -> None:
    _, body = gated(config(), tmp_path / "lost", lost="site-1")
    assert body["withheld"] == {"site-1": "silent for 30 s"}
    assert set(body["sites"]) == {"site-0"}
    _, body = gated(config(), tmp_path / "away", away="site-0")
    assert body["withheld"] == {"site-0": AWAY}


def test_a_party_whose_model_alone_diverges_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, training = Gates.alone, [""]

    def alone(self: Gates, id: str) -> None:
        training.append(id)
        begin(self, id)

    def implausible(state: object) -> str:
        return "a weight is not finite" if training[-1] == "site-0" else ""

    monkeypatch.setattr(Gates, "alone", alone)
    monkeypatch.setattr(loop, "implausible_state", implausible)
    _, body = gated(config(), tmp_path)
    assert set(body["sites"]) == {"site-1"}
    assert list(body["withheld"]) == ["site-0"]
    assert "was not saved: a weight is not finite" in body["withheld"]["site-0"]
    assert Run(tmp_path / "run").answer == body


def test_a_party_trains_alone_once_in_a_run_and_within_its_budgets(tmp_path: Path) -> None:
    sites, _ = gated(config(), tmp_path)
    gate = sites.gates["site-0"]
    with pytest.raises(RefusedError, match="a second comparison of one run"):
        gate.alone()
    gate = Gates(parts(config()), tmp_path / "again", drafted_terms(config())).gates["site-0"]
    for terms, words in (
        ({"answer": False}, "an answer is not in the contract"),
        ({"answer": True, "rounds_in_all": 2}, "more than 2 rounds on this data"),
        ({"answer": True, "comparisons_in_all": 0}, "more than 0 comparisons on this data"),
    ):
        gate.terms = replace(gate.terms, **terms)
        with pytest.raises(RefusedError, match=words):
            gate.alone()


def test_a_site_with_whole_rows_compares_by_itself(tmp_path: Path) -> None:
    values = {"data": "breast-cancer", "clients": 2, "rounds": 1, "widths": [4], "threads": 1}
    run = resolve(change({"method": "fedavg"}, values), "test")
    terms = drafted_terms(run) | {"answer": True}
    gate = Gates(parts(run), tmp_path, terms).gates["site-0"]
    with pytest.raises(RefusedError, match="each compares by itself"):
        gate.alone()
    assert reason_for_none(parts(config()), 1) == ""


def test_gradients_and_requests_are_all_that_a_party_is_sent(tmp_path: Path) -> None:
    """No label and no column of another party crosses for the answer."""
    _, body = gated(config(), tmp_path)
    for line in read_events(tmp_path / "run"):
        if isinstance(line, Message) and line.action == "compare" and line.sender == "server":
            assert {name for name, _, _ in line.tensors} <= {"gradient"}
    assert body["sites"]["site-0"]["verdict"]["text"]
