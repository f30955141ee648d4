"""The whole row recovery at once: no row under a default contract, with any config."""

from pathlib import Path

import pytest

from .variants import CONTRACTS, VARIANTS, most_rows, trials

slow = (pytest.mark.process, pytest.mark.long)
QUICK = ("first round", "skipped rounds")
HOLDS = {("chfl", "test counts (of 1 row)")}  # chfl tests its own models, whatever is sent


@pytest.mark.parametrize("method", ["fedavg", "chfl"])
@pytest.mark.parametrize(
    "variant", [name if name in QUICK else pytest.param(name, marks=slow) for name in VARIANTS]
)
def test_rows_come_out_of_a_loosened_contract_alone(
    variant: str, method: str, tmp_path: Path
) -> None:
    """`most_rows` also requires that `contract explain` warns wherever a row comes out."""
    most = most_rows(list(trials([variant], list(CONTRACTS), [method])), tmp_path)
    assert most[method, variant, "default"] == 0
    assert most[method, variant, "drafted"] == 0
    assert (most[method, variant, "loosened"] > 0) != ((method, variant) in HOLDS)
