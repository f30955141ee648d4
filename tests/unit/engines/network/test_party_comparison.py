"""The answer where parties hold columns: the coordinator compares, within each site's contract."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll import engines
from atoll.core.errors import InterruptedRunError, SiteLostError
from atoll.core.federation import Moment
from atoll.core.messages import Packet, pack
from atoll.core.record import Message, read_events
from atoll.engines.local import local_engine
from atoll.engines.network import egress
from atoll.engines.network.collection import collect, reason_for_none
from atoll.engines.network.contract import RefusedError
from atoll.engines.network.party_comparison import APART, AWAY, REFUSED, STOPPED
from atoll.engines.network.requests import Finish
from atoll.families.vertical import Embed
from atoll.runs import loop
from atoll.runs.answer import write_answer, write_assembled
from atoll.runs.config import RunConfig, change, resolve, to_toml
from atoll.runs.execute import execute, prepare
from atoll.runs.facts import facts
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
    exchanges = 0  # that it has alone before
    spoilt = ""  # whose answers cannot be read after the run
    training = ""

    @property
    def present(self) -> list[str]:
        return [id for id in sorted(self.gates) if id not in self.away]

    def willing(self, id: str) -> bool:
        return self.gates[id].terms.answer

    def alone(self, id: str) -> None:
        self.training = id
        if id != self.lost or self.exchanges:
            self.gates[id].alone()
            return
        raise SiteLostError(id, "silent for 30 s")

    def carry(
        self, action: str, moment: Moment, packets: Mapping[str, Packet]
    ) -> Mapping[str, Packet]:
        if self.lost and self.training == self.lost:
            if not self.exchanges:
                raise SiteLostError(self.lost, "silent for 30 s")
            self.exchanges -= 1
        there = {id: packet for id, packet in packets.items() if id not in self.away}
        replies = dict(super().carry(action, moment, there))
        if self.spoilt in replies:
            reply = replies[self.spoilt]
            replies[self.spoilt] = replace(reply, block=bytes(len(reply.block)))
        return replies

    def compare(self, request: Packet) -> dict[str, Packet | str]:
        raise AssertionError("parties are not asked")


def gated(
    run: RunConfig,
    folder: Path,
    faults: Mapping[str, Any] | None = None,
    stopping: Callable[[], bool] = lambda: False,
    comparing: Callable[[str], None] = lambda id: None,
    **terms: Any,
) -> tuple[Gates, dict[str, Any]]:
    """A run through gates, and the answer at its end; `faults` are those after the rounds."""
    made, record = prepare(run, folder / "run", resume=False)
    contract = drafted_terms(run) | {"answer": True} | terms
    sites = Gates(made, folder / "stores", contract)
    with record:
        go(made, sites, record, lambda progress: None, lambda: False)
        vars(sites).update(faults or {})
        body = collect(sites, made, folder / "run", record, stopping, comparing)
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


def compared(folder: Path) -> list[Message]:
    """The lines of the comparison in the ledger of a run."""
    lines = [e for e in read_events(folder / "run") if isinstance(e, Message)]
    return [line for line in lines if line.action == "compare"]


def entered_and_left(folder: Path, id: str) -> tuple[int, int]:
    """The bytes of a party in the ledger of the run, and in the log of the site."""
    lines = [e for e in read_events(folder / "run") if isinstance(e, Message)]
    log = egress.lines(folder / "stores" / id / "egress.jsonl")
    left = sum(line.bytes for line in log if line.action in ("embed", "learn"))
    return sum(line.bytes for line in lines if line.sender == id), left


def test_the_ledger_and_the_log_of_a_site_have_the_bytes(tmp_path: Path) -> None:
    sites, _ = gated(config(), tmp_path)
    assert {line.kind for line in compared(tmp_path)} == {"Learn", "Embed", "Embedded"}
    for id in PARTIES:
        log = list(egress.lines(tmp_path / "stores" / id / "egress.jsonl"))
        (begun,) = [line for line in log if line.action == "compare"]
        entered, left = entered_and_left(tmp_path, id)
        assert entered == left
        assert begun.bytes > 0
        spent = sites.gates[id].egress.spent("synthetic-table")
        assert (spent.rounds, spent.comparisons) == (6, 1)  # three more rounds, alone


def test_only_parties_that_allow_it_train_alone(tmp_path: Path) -> None:
    _, body = gated(config(), tmp_path, answer=False)
    assert body["withheld"] == dict.fromkeys(PARTIES, REFUSED)
    assert body["overall"]["gain"] is None
    assert not compared(tmp_path)  # no embedding crosses where nobody is compared


def test_a_party_that_is_lost_stops_nobody_and_is_in_the_ledger(tmp_path: Path) -> None:
    for exchanges in (0, 5):
        folder = tmp_path / str(exchanges)
        _, body = gated(config(), folder, {"lost": "site-1", "exchanges": exchanges})
        assert body["withheld"] == {"site-1": "silent for 30 s"}
        assert set(body["sites"]) == {"site-0"}
        for id in PARTIES:
            entered, left = entered_and_left(folder, id)
            assert entered == left


def test_the_joined_model_needs_all_parties_and_names_who_fails(tmp_path: Path) -> None:
    _, body = gated(config(), tmp_path / "away", {"away": ("site-0",)})
    assert body["withheld"] == {
        "site-0": AWAY,
        "site-1": "the joined model needs site-0: the site was away",
    }
    assert not compared(tmp_path / "away")
    _, body = gated(config(), tmp_path / "spoilt", {"spoilt": "site-1"})
    assert list(body["withheld"]) == list(PARTIES)
    for words in body["withheld"].values():
        assert words.startswith("the joined model needs site-1: ")
    for id in PARTIES:
        entered, left = entered_and_left(tmp_path / "spoilt", id)
        assert entered == left


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


def test_beginning_alone_is_repeated_until_the_first_answer(tmp_path: Path) -> None:
    """A coordinator that lost the reply asks again, and no second comparison is spent."""
    run = config(rounds=1)
    made, record = prepare(run, tmp_path / "run", resume=False)
    sites = Gates(made, tmp_path, drafted_terms(run) | {"answer": True})
    with record:
        go(made, sites, record, lambda progress: None, lambda: False)
    gate = sites.gates["site-0"]
    gate.terms = replace(gate.terms, comparisons_in_all=1)
    assert gate.alone() == gate.alone()
    log = list(egress.lines(tmp_path / "site-0" / "egress.jsonl"))
    first, again = [line for line in log if line.action == "compare"]
    assert "answered again" not in first.words
    assert "answered again" in again.words
    assert gate.egress.spent("synthetic-table").comparisons == 1
    sites.carry("embed", Moment(0, 0, 1), {"site-0": pack(Embed("test", 0, 0, 0, 1))})
    with pytest.raises(RefusedError, match="a second comparison of one run"):
        gate.alone()
    with suppress(RefusedError):
        gate.restore("0-0")  # does not take back that it has answered
    with pytest.raises(RefusedError, match="a second comparison of one run"):
        gate.alone()
    gate.prepare("run-1", to_toml(run), "site-0")
    with pytest.raises(RefusedError, match="a second comparison of one run"):
        gate.alone()


def test_a_party_trains_alone_at_the_end_of_a_run_and_saves_nothing_then(tmp_path: Path) -> None:
    run = config(rounds=2)
    made, record = prepare(run, tmp_path / "run", resume=False)
    sites = Gates(made, tmp_path, drafted_terms(run) | {"answer": True})
    gate = sites.gates["site-0"]
    with pytest.raises(RefusedError, match="the run is not at its end"):
        gate.alone()
    with record:
        go(made, sites, record, lambda progress: None, lambda: False)
    gate.keep("0-2")
    kept = {path.name: path.read_bytes() for path in gate._home.iterdir() if path.is_file()}
    gate.alone()
    about = pack(Finish.of({}, "", json.dumps(facts(made))))
    for work in (
        lambda: gate.keep("0-2"),
        lambda: gate.restore("0-2"),
        lambda: gate.finish(about),
        lambda: gate.snapshot(Moment(0, 1, 2)),
    ):
        with pytest.raises(RefusedError, match="trains alone to compare"):
            work()
    now = {path.name: path.read_bytes() for path in gate._home.iterdir() if path.is_file()}
    assert now == kept


def test_a_coordinator_that_is_stopped_compares_who_is_done(tmp_path: Path) -> None:
    comparing = list[str]()
    sites, body = gated(
        config(),
        tmp_path,
        stopping=lambda: comparing[-1:] == ["site-1"],
        comparing=comparing.append,
    )
    assert comparing == ["site-0", "site-1"]
    assert set(body["sites"]) == {"site-0"}
    assert body["withheld"] == {"site-1": STOPPED}
    spent = [sites.gates[id].egress.spent("synthetic-table").rounds for id in PARTIES]
    assert spent == [6, 4]  # a round is completed
    assert Run(tmp_path / "run").answer == body
    with pytest.raises(InterruptedRunError):  # nothing has crossed: a resumed run compares
        gated(config(), tmp_path / "before", stopping=lambda: True)
    assert not compared(tmp_path / "before")
    log = egress.lines(tmp_path / "before" / "stores" / "site-0" / "egress.jsonl")
    assert "compare" not in {line.action for line in log}


def test_a_site_with_whole_rows_compares_by_itself(tmp_path: Path) -> None:
    values = {"data": "breast-cancer", "clients": 2, "rounds": 1, "widths": [4], "threads": 1}
    run = resolve(change({"method": "fedavg"}, values), "test")
    terms = drafted_terms(run) | {"answer": True}
    gate = Gates(parts(run), tmp_path, terms).gates["site-0"]
    with pytest.raises(RefusedError, match="each compares by itself"):
        gate.alone()
    assert reason_for_none(parts(config()), 1) == ""


def test_gradients_and_requests_are_all_that_a_party_is_sent(tmp_path: Path) -> None:
    """No label as such and no column of another party crosses for the answer."""
    _, body = gated(config(), tmp_path)
    for line in read_events(tmp_path / "run"):
        if isinstance(line, Message) and line.action == "compare" and line.sender == "server":
            assert {name for name, _, _ in line.tensors} <= {"gradient"}
    assert body["sites"]["site-0"]["verdict"]["text"]
