"""FCCL's ledger says what the runs say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.reproduce import fccl
from atoll.reproduce.fccl import PAPER, PRINTED, Plan, Setting
from atoll.reproduce.ledger import as_json, as_markdown
from atoll.reproduce.measured import file_name, fingerprint, write
from atoll.runs.config import resolve

INTER = "Table 1, inter-domain, digits"
LEDGER = Path(__file__).parents[3] / "docs" / "reproduction" / "fccl"


def run(seed: int, own: float, others: float, solo: float = 0.1) -> dict[str, Any]:
    """A kept run: each client has one accuracy on its own domain and one on the others."""
    matrix = (np.full((4, 4), others) + np.eye(4) * (own - others)).tolist()
    facts = {"data": {"fingerprint": "abc"}, "atoll": "", "packages": {}, "device": "cpu"}
    note = {"diagonal": 0.5, "off diagonal": -0.05}
    return {
        "seed": seed,
        "tiny": False,
        "config": "c",
        "headline": "m",
        "rounds": 40,
        "matrix": {"40": {"m": matrix, "solo": np.full((4, 4), solo).tolist()}},
        "notes": [note, {**note, "diagonal": 0.8}],
        "facts": facts,
        "model": {"precision": "float32"},
    }


def found(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"config": "c", "runs": list(runs)}


def test_the_papers_means_are_those_of_its_rows() -> None:
    """Invariant 12: the averages that the paper prints follow from its rows."""
    inter = PRINTED["digits", False, "inter"]
    printed = {"SOLO": 25.68, "FedMD": 26.38, "FML": 31.14, "RCFL": 28.28, "FCCL": 33.51}
    assert {m: round(float(np.mean(inter[m])), 2) for m in printed} == pytest.approx(
        printed, abs=0.011
    )
    office = PRINTED["office", False, "inter"]
    assert float(np.mean(office["FCCL"])) == pytest.approx(27.88, abs=0.011)


@pytest.mark.parametrize("setting", [*fccl.SETTINGS, *fccl.STUDIES], ids=lambda s: s.name)
def test_every_setting_is_a_valid_run(setting: Setting, tmp_path: Path) -> None:
    config = resolve(Plan(tmp_path).values(setting, 1), setting.name)
    assert config.rounds == 40
    assert (config.models == ()) == setting.homogeneous
    assert config.method.get("average", False) == setting.homogeneous
    resolve(Plan.quick(tmp_path, "cpu").values(setting, 0), setting.name)


def test_names_are_told_apart() -> None:
    names = [s.name for s in (*fccl.SETTINGS, *fccl.STUDIES)]
    assert len(set(names)) == len(names)
    files = [file_name(f"{s.name} seed 0") for s in (*fccl.SETTINGS, *fccl.STUDIES)]
    assert len(set(files)) == len(files)


def test_a_cell_is_the_mean_over_clients_of_own_or_other_domains() -> None:
    name = Setting("digits", "FCCL").name
    made = PAPER.ledger({name: found(run(0, 0.8, 0.3), run(1, 0.9, 0.4))}, {})
    cells = {(c.table, c.row, c.column): c for c in made.cells}
    inter = cells["Table 1, inter-domain, digits", "FCCL", "AVG"]
    assert inter.ours == pytest.approx((0.3, 0.4))
    assert inter.theirs == pytest.approx(0.3351)
    assert cells["Table 2, intra-domain, digits", "FCCL", "M"].ours == pytest.approx((0.8, 0.9))
    assert cells["Table 1, inter-domain, digits", "SOLO", "AVG"].ours == pytest.approx((0.1, 0.1))
    assert cells["Table 1, inter-domain, office", "FCCL", "A"].verdict == "open"
    assert "MNIST-M stands in for SYN; 2 seeds, 40 rounds" in inter.note
    assert json.loads(json.dumps(as_json(made)))["cells"]
    assert "| FCCL | AVG | 0.3351 |" in as_markdown(made)


def test_claims_compare_the_seeds_that_both_have() -> None:
    fccl_runs = found(run(0, 0.8, 0.40), run(1, 0.82, 0.42), run(2, 0.81, 0.41))
    measured = {
        Setting("digits", "FCCL").name: fccl_runs,
        Setting("digits", "FedMD").name: found(run(1, 0.9, 0.3), run(2, 0.91, 0.3)),
        Setting("digits", "FCCL w/o CON").name: found(run(0, 0.7, 0.45), run(1, 0.7, 0.46)),
    }
    claims = {c.text: c for c in PAPER.ledger(measured, {}).claims}
    assert claims["digits: FCCL above SOLO, inter-domain"].holds is True
    above = claims["digits: FCCL above FedMD, inter-domain"]
    assert above.holds is True
    assert "2 of 2" in above.evidence
    assert claims["digits: FCCL above FedMD, intra-domain"].holds is False
    assert claims["digits: the continual part adds to inter-domain accuracy"].holds is False
    assert claims["digits: the diagonal of M on public data grows"].holds is True


def test_claims_of_table_3_and_of_other_public_images_have_lines_of_their_own() -> None:
    measured = {
        Setting("office", "FCCL", homogeneous=True).name: found(
            run(0, 0.8, 0.40), run(1, 0.8, 0.4)
        ),
        Setting("office", "FedAvg", homogeneous=True).name: found(
            run(0, 0.7, 0.6), run(1, 0.7, 0.6)
        ),
        Setting("office", "FedMD").name: found(run(0, 0.9, 0.9)),  # another table
        Setting("digits", "FCCL", "fashion-mnist").name: found(run(0, 0.8, 0.40), run(1, 0.8, 0.4)),
        Setting("digits", "FCCL w/o CON", "fashion-mnist").name: found(run(0, 0.7, 0.5)),
    }
    claims = {c.text: c for c in PAPER.ledger(measured, {}).claims}
    assert claims["office, all ResNet-18: FCCL above FedAvg, intra-domain"].holds is True
    assert claims["office, all ResNet-18: FCCL above FedAvg, inter-domain"].holds is False
    fashion = "digits, fashion-mnist: the continual part adds to"
    assert "-0.1000 in the one run" in claims[f"{fashion} inter-domain accuracy"].evidence
    assert not any(text.startswith(("office: ", "digits: ")) for text in claims)


def test_a_row_that_was_cut_says_so_and_is_compared_at_the_last_round_that_both_have() -> None:
    short, long = run(0, 0.5, 0.2), run(0, 0.9, 0.6)
    short["matrix"] = {"10": short["matrix"]["40"]}
    short["rounds"] = 10
    long["matrix"]["10"] = run(0, 0.6, 0.3)["matrix"]["40"]
    other = {**run(0, 0.5, 0.2), "matrix": {"8": short["matrix"]["10"]}, "rounds": 8}
    measured = {
        Setting("digits", "FCCL").name: found(long),
        Setting("digits", "FedMD").name: found(short),
        Setting("digits", "FML").name: found(other),  # never tested when the others were
    }
    made = PAPER.ledger(measured, {})
    cells = {c.row: c for c in made.cells if (c.table, c.column) == (INTER, "AVG")}
    for row, value, rounds in (("FCCL", 0.6, 40), ("FedMD", 0.2, 10), ("FML", 0.2, 8)):
        assert cells[row].ours == pytest.approx((value,))
        assert f"1 seed, {rounds} rounds" in cells[row].note
    claims = {c.text: c.evidence for c in made.claims}
    assert claims["digits: FCCL above FedMD, inter-domain"].startswith("+0.1000")
    assert "digits: FCCL above FML, inter-domain" not in claims
    assert fccl.after(found(long)) == "40"


def test_seeds_that_were_cut_are_left_out_where_others_went_to_their_end(tmp_path: Path) -> None:
    setting, plan = Setting("digits", "FCCL"), Plan(tmp_path)
    wanted = fingerprint([setting.values(), False])
    for seed, rounds in ((0, 40), (1, 10)):
        kept = {**run(seed, 0.5, 0.2), "config": wanted, "rounds": rounds}
        write(tmp_path, f"{setting.name} seed {seed}", kept)
    whole = PAPER.partly(setting, plan)
    assert whole is not None
    assert [one["seed"] for one in whole["runs"]] == [0]
    begun = PAPER.partly(setting, replace(plan, rounds=50))
    assert begun is not None
    assert [one["seed"] for one in begun["runs"]] == [0, 1]


def test_figures_are_drawn_of_what_is_there() -> None:
    measured = {
        Setting("digits", m).name: found(run(0, 0.8, 0.4)) for m in ("FCCL", "FCCL w/o CON")
    }
    drawn = PAPER.figures(measured)
    assert set(drawn) == {"figure6-digits.svg", "matrix-digits.svg", "figure7-8.svg"}
    assert all(b"<svg" in picture for picture in drawn.values())
    assert PAPER.figures({}) == {}


def test_a_run_is_kept_and_a_part_of_the_seeds_is_known_as_such(tmp_path: Path) -> None:
    setting, plan = Setting("digits", "FCCL"), replace(Plan.quick(tmp_path, "cpu"), rounds=1)
    first = fccl.measure_seed(setting, 0, plan)
    assert np.asarray(first["matrix"]["1"]["fccl"]).shape == (4, 4)
    assert set(first["notes"][0]) >= {"diagonal", "off diagonal", "aligned", "loss", "prepared"}
    assert fccl.measure_seed(setting, 0, plan) == first
    assert PAPER.known(setting, plan) == PAPER.partly(setting, plan)
    both = replace(plan, seeds=(0, 1))
    assert PAPER.known(setting, both) is None
    part = PAPER.partly(setting, both)
    assert part is not None
    assert len(part["runs"]) == 1
    assert PAPER.known(setting, replace(plan, rounds=2)) is None
    assert not any((tmp_path / "runs").iterdir())
    assert len(list((tmp_path / "common").iterdir())) == 4  # trained alone, for other methods


def test_a_run_that_was_cut_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fccl, "CHECKPOINTS", 0.0)
    setting, whole = Setting("digits", "FCCL"), Plan.quick(tmp_path / "whole", "cpu")
    plan, told = replace(whole, folder=tmp_path / "cut"), list[str]()

    def cut(text: str) -> None:
        if "round 2" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fccl.measure_seed(setting, 0, plan, cut)
    found = fccl.measure_seed(setting, 0, plan, told.append)
    assert [text.split(": ")[1][:7] for text in told] == ["round 2"]
    assert found["matrix"] == fccl.measure_seed(setting, 0, whole)["matrix"]
    assert not any((tmp_path / "cut" / "runs").iterdir())


def test_unknown_tables_and_settings_are_named() -> None:
    with pytest.raises(UserError, match="no table '7'"):
        PAPER.select("", "7")
    with pytest.raises(UserError, match="no setting 'x'"):
        PAPER.select("x", "")
    assert {s.task for s in PAPER.select("", "3")} == {"office"}
    assert len(PAPER.select("", "1")) == 12


def test_the_ledger_in_the_documents_is_that_of_its_files() -> None:
    plan = Plan(LEDGER)
    found = {s.name: PAPER.partly(s, plan) for s in fccl.SETTINGS}
    measured = {name: one for name, one in found.items() if one is not None}
    seeds = {"FCCL": 3, "FedMD": 3, "FML": 3, "RCFL": 3, "FedDF": 3, "FedMatch": 3}
    wanted = {Setting("digits", m).name: n for m, n in {**seeds, "FCCL w/o CON": 3}.items()}
    wanted = {s.name: 1 for s in fccl.SETTINGS if s.public != "tiny-imagenet"} | wanted
    assert {name: len(one["runs"]) for name, one in measured.items()} == wanted
    missing = {
        name: f"not run yet: atoll reproduce fccl --only '{name}'"
        for name, one in found.items()
        if one is None
    }
    assert as_markdown(PAPER.ledger(measured, missing)) == (LEDGER / "ledger.md").read_text()
