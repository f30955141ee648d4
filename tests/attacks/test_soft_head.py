"""A known gap: rows come out of the head of a network with one hidden layer, and words say so."""

from pathlib import Path

from atoll.engines.network.drafts import drafted_contract
from atoll.engines.network.explain import explained, warnings

from .row_recovery import run_config
from .soft_head import FLAT, recovered


def test_rows_come_out_of_the_head_through_a_class_that_no_row_has(tmp_path: Path) -> None:
    """Whoever closes the gap changes this to 0, and the words about it."""
    terms = drafted_contract(run_config(FLAT))
    rows, refusals = recovered(tmp_path, {}, terms)
    assert rows > 0
    assert refusals == []


def test_every_contract_says_that_the_head_gives_rows_away() -> None:
    terms = drafted_contract(run_config(FLAT))
    assert warnings(terms) == []
    assert any("off the head" in line for line in explained(terms))
