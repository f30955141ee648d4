"""A known gap: rows come out of the second hidden layer, and the words of a contract say so."""

from pathlib import Path

import pytest

from atoll.cli.network import _say_later_layers
from atoll.engines.network.contract import Contract
from atoll.engines.network.drafts import drafted_contract
from atoll.engines.network.explain import LATER_LAYERS, explained, later_layers

from .later_layers import DEEP, recovered
from .row_recovery import HONEST, run_config


def test_rows_come_out_of_the_second_layer(tmp_path: Path) -> None:
    """Whoever closes the gap changes this to 0, and the words about it."""
    rows, refusals = recovered(tmp_path, {"rounds": 20})
    assert rows > 0
    assert refusals == 0


def test_a_contract_of_two_hidden_layers_is_explained() -> None:
    deep, flat = (drafted_contract(run_config(changes)) for changes in (DEEP, HONEST))
    assert f"- {LATER_LAYERS}" in explained(deep)
    assert not later_layers(flat)
    assert later_layers(Contract(methods=("chfl",), actions=("fit",)))  # no limit on widths
    assert not later_layers(Contract(methods=("fedmd",), actions=("align",)))  # no updates


@pytest.mark.parametrize(("widths", "warns"), [([32, 16], True), ([32], False)])
def test_the_command_that_drafts_contracts_warns(
    widths: list[int], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_later_layers(run_config({**HONEST, "widths": widths}))
    assert ("second and later hidden layers" in capsys.readouterr().out) is warns
