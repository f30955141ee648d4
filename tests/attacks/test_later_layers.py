"""Rows come out of the second hidden layer where a contract allows such networks; else none."""

from pathlib import Path
from typing import Any

import pytest

from atoll.cli.network import _say_unchecked
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract, written
from atoll.engines.network.egress import lines
from atoll.engines.network.explain import LOOSE_TERMS, UNCHECKED, explained, warnings

from .later_layers import ACTIONS, DEEP, recovered
from .row_recovery import HONEST, Coordinator, run_config, site

DEFAULT = Contract(methods=("fedavg",), actions=ACTIONS)


@pytest.mark.parametrize("drafted", [False, True])
def test_nothing_by_the_second_layer_under_a_default_contract(
    drafted: bool, tmp_path: Path
) -> None:
    """Nor under one that is drafted for a run with one hidden layer."""
    terms = drafted_contract(run_config(HONEST)) if drafted else DEFAULT
    rows, refusals = recovered(tmp_path, {"rounds": 20}, terms)
    assert (rows, len(refusals)) == (0, 1)
    assert ("the contract allows 5 only" if drafted else "mlp with 2 hidden layers") in refusals[0]


def test_the_refusal_comes_before_training_and_names_the_line_that_allows_it(
    tmp_path: Path,
) -> None:
    coordinator = Coordinator(site(tmp_path, written(DEFAULT)))
    assert not coordinator.open("attack", run_config(DEEP))
    assert coordinator.gate._client is None
    (line,) = lines(tmp_path / "store" / "egress.jsonl")
    assert "single rows in an mlp with 2 hidden layers; the contract allows it with" in line.words
    assert 'unchecked_networks = "allow"' in line.words
    assert not line.bytes


def test_rows_come_out_of_the_second_layer_where_the_contract_allows_it(tmp_path: Path) -> None:
    rows, refusals = recovered(tmp_path, {"rounds": 20})
    assert rows > 0
    assert refusals == []


def test_a_contract_that_allows_it_says_so_and_the_default_does_not() -> None:
    deep, flat = (drafted_contract(run_config(changes)) for changes in (DEEP, HONEST))
    assert f"- {UNCHECKED}" in explained(deep)
    assert warnings(deep) == [f"unchecked_networks = allow: {LOOSE_TERMS['unchecked_networks']}"]
    assert "read whole training rows off updates" in written(deep)
    for terms in (flat, DEFAULT):
        assert terms.unchecked_networks == "refuse"
        assert UNCHECKED not in " ".join(explained(terms))
        assert "read whole training rows off updates" not in written(terms)


@pytest.mark.parametrize(("widths", "warns"), [([32, 16], True), ([32], False)])
def test_the_command_that_drafts_contracts_warns(
    widths: list[int], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_unchecked(run_config({**HONEST, "widths": widths}))
    said: Any = capsys.readouterr().out
    assert ("no check looks for single rows in an mlp with 2 hidden layers" in said) is warns
