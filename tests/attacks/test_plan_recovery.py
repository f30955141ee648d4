"""Plan recovery: no name and no row comes out of a plan that a coordinator makes up.

The control: where the site's own file discloses every column, names and rows come out of the honest
plan, so the script can find them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.messages import pack
from atoll.data.own.agreement import Agree, Offer
from atoll.engines.network.contract import RefusedError, read_site
from atoll.engines.network.egress import lines
from atoll.engines.network.policy import Gate
from atoll.runs.config import to_toml

from .plan_recovery import (
    CLIENT,
    CLIENTS,
    COLUMNS,
    PLANS,
    RUN,
    Loot,
    as_text,
    attack,
    contracts,
    crafted,
    run_config,
    site,
    talk,
)

each_contract = pytest.mark.parametrize("contract", ["default", "drafted"])
each_plan = pytest.mark.parametrize("kind", [kind for kind in PLANS if kind != "honest"])
TELLING = {"keep": [*COLUMNS], "categorical": [*COLUMNS], "most_levels": 100}


def log(folder: Path) -> list[str]:
    return [line.words for line in lines(folder / "store" / "egress.jsonl")]


@each_contract
@each_plan
def test_a_made_up_plan_gives_no_name_and_no_row(contract: str, kind: str, tmp_path: Path) -> None:
    gate, rows = site(tmp_path, contracts()[contract])
    loot = attack(gate, rows, kind)
    assert loot == Loot(refusal=loot.refusal)
    assert "column" in loot.refusal
    assert log(tmp_path)[-1] == f"refused 'prepare': {loot.refusal}"


@each_contract
def test_the_honest_plan_trains_and_shows_no_name(contract: str, tmp_path: Path) -> None:
    assert attack(*site(tmp_path, contracts()[contract]), "honest") == Loot()


def test_names_and_rows_come_out_where_the_sites_own_file_discloses_them(tmp_path: Path) -> None:
    """With `columns` lowered too: as text, no column has many values."""
    terms = replace(contracts()["default"], columns=1)
    gate, rows = site(tmp_path, terms, **TELLING)
    loot = attack(gate, rows, "honest", most_levels=100)
    assert loot.names == 36  # of 36 training rows
    assert loot.rows >= 15


@pytest.mark.parametrize("name", sorted(TELLING))
@each_contract
def test_a_run_cannot_make_a_site_disclose_more(contract: str, name: str, tmp_path: Path) -> None:
    """What changes how the site reads its file is refused; what would disclose more is ignored."""
    gate, rows = site(tmp_path, contracts()[contract])
    if name == "categorical":
        with pytest.raises(RefusedError, match=r"data\.categorical"):
            attack(gate, rows, "honest", **{name: TELLING[name]})
    else:
        assert attack(gate, rows, "honest", **{name: TELLING[name]}) == Loot()
        assert attack(gate, rows, "names", **{name: TELLING[name]}).refusal


@each_contract
def test_a_plan_without_an_agreement_is_refused(contract: str, tmp_path: Path) -> None:
    """A refused `agree` leaves nothing to build a plan on, and no other run's agreement counts."""
    gate, _ = site(tmp_path, contracts()[contract])
    config = to_toml(run_config())
    offered, honest = talk(gate, run_config())
    with pytest.raises(RefusedError, match="agreed to no columns for this run"):
        gate.prepare("other", config, CLIENT, CLIENTS, as_text(honest))
    gate.offer("third", config, CLIENT, pack(Offer(RUN)))
    with pytest.raises(RefusedError, match="does not disclose so much"):
        gate.agree(pack(Agree([*offered.columns])))
    for plan in (honest, crafted(offered)):
        with pytest.raises(RefusedError, match="agreed to no columns for this run"):
            gate.prepare("third", config, CLIENT, CLIENTS, as_text(plan))
    with pytest.raises(RefusedError, match="not of the agreed form"):
        gate.prepare(RUN, config, CLIENT, CLIENTS, "")


@each_contract
def test_an_agreement_outlives_the_process_and_takes_no_other_plan(
    contract: str, tmp_path: Path
) -> None:
    gate, _ = site(tmp_path, contracts()[contract])
    config = to_toml(run_config())
    offered, honest = talk(gate, run_config())
    again = Gate(read_site(tmp_path / "site.toml"))
    assert again.prepare(RUN, config, CLIENT, CLIENTS, as_text(honest))
    with pytest.raises(RefusedError, match="column 1 of the plan"):
        Gate(read_site(tmp_path / "site.toml")).prepare(
            RUN, config, CLIENT, CLIENTS, as_text(crafted(offered))
        )


def test_an_agreement_is_for_its_config_its_client_and_its_table(tmp_path: Path) -> None:
    gate, _ = site(tmp_path, contracts()["default"])
    config = to_toml(run_config())
    _, honest = talk(gate, run_config())
    plan = as_text(honest)
    with pytest.raises(RefusedError, match="another config or client"):
        gate.prepare(RUN, to_toml(run_config(ignore=["age"])), CLIENT, CLIENTS, plan)
    with pytest.raises(RefusedError, match="another config or client"):
        gate.prepare(RUN, config, "bern", CLIENTS, plan)
    table = tmp_path / "basel.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(RefusedError, match="has changed since"):
        gate.prepare(RUN, config, CLIENT, CLIENTS, plan)


def test_what_the_owner_takes_back_holds_for_old_agreements(tmp_path: Path) -> None:
    """A site's file that discloses less than when it agreed: the agreement counts no more."""
    terms = contracts()["default"]
    gate, _ = site(tmp_path, terms, **TELLING)
    config = run_config(most_levels=100)
    _, telling = talk(gate, config)
    assert any(len(column.levels) == 60 for column in telling.columns)
    gate, _ = site(tmp_path, terms)
    with pytest.raises(RefusedError, match="does not disclose so much"):
        gate.prepare(RUN, to_toml(config), CLIENT, CLIENTS, as_text(telling))
