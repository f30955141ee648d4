"""The comparison as an oracle: its budget, the bounds on weights and the metric leave few labels.

The control: under a loosened contract labels and values come out, so the script can find them.
"""

from pathlib import Path

import pytest

from atoll.engines.network.egress import lines
from atoll.engines.network.explain import explained, warnings

from .comparison_oracle import CONTRACTS, CREPT, attack
from .row_recovery import run_config

slow = (pytest.mark.process, pytest.mark.long)
LIMIT = "more than 5 comparisons on this data are not in the contract"


def refusals(folder: Path) -> set[str]:
    """What the site's log says that it refused."""
    log = lines(folder / "store" / "egress.jsonl")
    return {line.words for line in log if line.words.startswith("refused")}


@pytest.mark.parametrize("contract", ["default", "drafted"])
def test_nothing_is_compared_unless_the_owner_says_so(contract: str, tmp_path: Path) -> None:
    read, oracle = attack(tmp_path, contract, "labels", "at once")
    assert (read, oracle.releases) == (0, 0)
    assert "refused 'compare': an answer is not in the contract" in refusals(tmp_path)


@pytest.mark.parametrize("what", ["labels", "bisect"])
@pytest.mark.parametrize("contract", ["default, answer", "drafted, answer"])
def test_crafted_weights_are_not_compared(contract: str, what: str, tmp_path: Path) -> None:
    """Neither at once nor after an honest round: they are too far from what was trained with."""
    read, oracle = attack(tmp_path, contract, what, "at once")
    assert (read, oracle.releases) == (0, 0)
    assert any(words.startswith("refused 'compare': weights") for words in refusals(tmp_path))


@pytest.mark.parametrize(
    ("contract", "what", "most"),
    [
        pytest.param("default, answer", "labels", 4),
        pytest.param("drafted, answer, any rounds", "labels", 4, marks=slow),
        pytest.param("default, answer", "bisect", 0, marks=slow),
        pytest.param("drafted, answer, any rounds", "bisect", 0),
    ],
)
def test_many_runs_have_five_comparisons_together(
    contract: str, what: str, most: int, tmp_path: Path
) -> None:
    """The budget is of the data: another name for a run, or another config, begins no new one."""
    read, oracle = attack(tmp_path, contract, what, "small moves")
    assert read <= most
    assert oracle.releases == 5
    assert f"refused 'compare': {LIMIT}" in refusals(tmp_path)


@pytest.mark.parametrize("what", ["bisect", pytest.param("labels", marks=slow)])
def test_the_rounds_of_a_draft_suffice_for_two_comparisons(what: str, tmp_path: Path) -> None:
    """A steered model costs a run, so the draft's budget of rounds ends the attack earlier."""
    read, oracle = attack(tmp_path, "drafted, answer", what, "small moves")
    assert read <= 1
    assert oracle.releases == 2
    assert "refused 'compare': more than 225 rounds on this data are not in the contract" in (
        refusals(tmp_path)
    )


@pytest.mark.parametrize("contract", ["default, answer", "drafted, answer"])
def test_no_metric_of_probabilities_is_released(contract: str, tmp_path: Path) -> None:
    read, oracle = attack(tmp_path, contract, "probabilities", "at once")
    assert (read, oracle.releases) == (0, 0)
    assert any("'report.metric' = \"brier score\"" in words for words in refusals(tmp_path))


@pytest.mark.parametrize(
    ("what", "least"),
    [("labels", 7), pytest.param("bisect", 1, marks=slow), ("probabilities", 5)],
)
def test_rows_come_out_of_a_loosened_contract(what: str, least: int, tmp_path: Path) -> None:
    read, _ = attack(tmp_path, "loosened", what, "at once")
    assert read >= least
    terms = CONTRACTS["loosened"](run_config(CREPT))
    warned = " ".join(warnings(terms))
    for name in ("answer = true", "comparisons_in_all = 100", "report.metric"):
        assert name in warned


@pytest.mark.parametrize("contract", ["default", "drafted"])
def test_what_counts_of_hits_tell_is_in_the_words_of_the_contract(
    contract: str, tmp_path: Path
) -> None:
    """No bound keeps this from happening, so the contract says that it can."""
    read, _ = attack(tmp_path, contract, "labels", "test counts")
    assert read == 7  # of 7 labels
    words = "\n".join(explained(CONTRACTS[contract](run_config(CREPT))))
    assert "read the label of a test row whose columns it knows" in words
