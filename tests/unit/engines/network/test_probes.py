"""A refusal that depends on rows is an answer too: a round has one, and all runs have few."""

from pathlib import Path
from typing import Any

import pytest

from atoll.core.federation import Moment
from atoll.core.messages import Tensors, Weights, pack
from atoll.engines.network import bounds, egress
from atoll.engines.network.contract import RefusedError, SiteFile
from atoll.engines.network.policy import Gate
from atoll.runs.config import change, resolve, to_toml

CONFIG = resolve(
    change(
        {"method": "fedavg"},
        {"data": "wine", "rounds": 6, "clients": 3, "engine.mode": "loop", "threads": 1,
         "widths": [8], "epochs": 2},
    ),
    "test",
)  # fmt: skip


def gate(folder: Path, run: str) -> Gate:
    contract = {"methods": ["fedavg"], "actions": ["fit"]}
    made = Gate(SiteFile(store=str(folder / "store"), contract=contract))
    made.prepare(run, to_toml(CONFIG), "site-1")
    return made


def fit(made: Gate, number: int, round: int, weights: Tensors) -> Any:
    return made.handle(number, "fit", Moment(0, round, 6), pack(Weights(weights)))


def first(made: Gate) -> Tensors:
    return {n: w.clone() for n, w in made._client.site.model().state_dict().items()}


def test_a_round_that_was_answered_is_refused_before_rows_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gate(tmp_path, "run-1")
    weights = first(made)
    fit(made, 1, 0, weights)
    looked: list[int] = []

    def look(*given: Any) -> int:
        looked.append(1)
        return 1

    monkeypatch.setattr(bounds, "singling_units", look)
    for number in range(2, 6):
        with pytest.raises(RefusedError, match="a second update of one round"):
            fit(made, number, 0, weights)
    assert not looked


def test_a_site_trains_no_more_after_ten_refusals_that_depend_on_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "singling_units", lambda *given: 1)
    number = 0
    for run in ("run-1", "run-2"):  # over all runs, and after a new start
        made = gate(tmp_path, run)
        for _ in range(5):
            number += 1
            with pytest.raises(RefusedError, match="single out rows"):
                fit(made, number, 0, first(made))
    monkeypatch.setattr(bounds, "singling_units", lambda *given: 0)
    for run in ("run-2", "run-3"):
        made = gate(tmp_path, run)
        with pytest.raises(RefusedError, match="until a person has looked at its log"):
            fit(made, number + 1, 0, first(made))


def test_refusals_that_depend_on_rows_are_counted_beyond_the_refusals_that_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator fills the log with other refusals first, and starts a job for every probe."""
    monkeypatch.setattr(egress, "MOST_REFUSALS", 20)
    monkeypatch.setattr(bounds, "singling_units", lambda *given: 1)
    made = gate(tmp_path, "run-1")
    for number in range(30):
        with pytest.raises(RefusedError, match="not in the contract"):
            made.handle(number + 1, "check", Moment(0, 0, 6), pack(Weights(first(made))))
    for number in range(10):
        made = gate(tmp_path, f"run-{number}")
        with pytest.raises(RefusedError, match="single out rows"):
            fit(made, 1, 0, first(made))
    made = gate(tmp_path, "run-11")
    with pytest.raises(RefusedError, match="until a person has looked at its log"):
        fit(made, 1, 0, first(made))


def test_a_name_that_a_coordinator_gives_an_action_is_no_refusal_that_depends_on_rows(
    tmp_path: Path,
) -> None:
    """Else ten such names would end the training of all runs at a site."""
    made = gate(tmp_path, "run-1")
    named = (egress.SINGLED, egress.SHOWN, f"x': {egress.SINGLED}", f"x': {egress.SINGLED} 'y")
    for number, action in enumerate(named * 3):
        with pytest.raises(RefusedError, match="is not in the contract"):
            made.handle(number + 1, action, Moment(0, 0, 6), pack(Weights(first(made))))
    assert made.egress.probes == 0
    again = gate(tmp_path, "run-2")  # reads the log
    assert again.egress.probes == 0
    fit(again, 1, 0, first(again))


def test_the_log_says_once_that_further_refusals_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals that depend on rows have lines of their own, and move no limit."""
    monkeypatch.setattr(egress, "MOST_REFUSALS", 3)
    log = egress.EgressLog(tmp_path / "egress.jsonl")
    reasons = ("one", "two", egress.SINGLED, egress.SHOWN, "three", egress.SINGLED, "four", "five")
    for reason in reasons:
        log.refused("run-1", "fit", reason)
        log = egress.EgressLog(tmp_path / "egress.jsonl")
    words = [line.words for line in egress.lines(tmp_path / "egress.jsonl")]
    assert sum("further ones are in nvflare.log" in one for one in words) == 1
    assert (len(words), log.probes) == (7, 3)  # three refusals, and the line that ends them
