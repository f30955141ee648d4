"""FCCL's ledger says what the runs say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.reproduce import fccl
from atoll.reproduce.claims import Judged
from atoll.reproduce.fccl import PAPER, PRINTED, Plan, Setting
from atoll.reproduce.fccl_scores import after
from atoll.reproduce.ledger import as_json
from atoll.reproduce.measured import file_name, fingerprint, write
from atoll.reproduce.pages import as_markdown
from atoll.runs.config import resolve

INTER = "Table 1, inter-domain, digits"
LEDGER = Path(__file__).parents[3] / "docs" / "reproduction" / "fccl"


def run(seed: int, own: float, others: float, solo: float = 0.1) -> dict[str, Any]:
    """A kept run: each client has one accuracy on its own domain and one on the others."""
    matrix = (np.full((4, 4), others) + np.eye(4) * (own - others)).tolist()
    facts = {"data": {"fingerprint": "abc"}, "atoll": "", "packages": {}, "device": "cpu"}
    note = {"diagonal": 0.5, "off diagonal": -0.05, "loss": 0.0225 + 0.001 * seed}
    return {
        "seed": seed,
        "tiny": False,
        "config": "c",
        "headline": "m",
        "rounds": 40,
        "matrix": {"40": {"m": matrix, "solo": np.full((4, 4), solo).tolist()}},
        "notes": [note, {**note, "diagonal": 0.8 + 0.01 * seed}],
        "facts": facts,
        "model": {"precision": "float32"},
    }


def found(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"config": "c", "runs": list(runs)}


def judged(measured: dict[str, Any]) -> dict[str, Judged]:
    return {one.claim.text: one for one in PAPER.ledger(measured, {}).judged()}


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
    assert cells["Table 1, inter-domain, office", "FCCL", "A"].verdict == "undecided"
    assert inter.obstacle == "MNIST-M stands in for SYN; a part of SVHN"
    assert inter.verdict == "undecidable here"
    assert inter.note == "2 seeds, 40 rounds"
    assert cells["inter-domain, digits, without MNIST-M", "FCCL", "AVG"].verdict == "not printed"
    assert json.loads(json.dumps(as_json(made)))["cells"]
    assert "| FCCL | AVG | 0.3351 |" in as_markdown(made)


def test_claims_compare_the_seeds_that_both_have() -> None:
    fccl_runs = found(run(0, 0.8, 0.40), run(1, 0.82, 0.42), run(2, 0.81, 0.41))
    measured = {
        Setting("digits", "FCCL").name: fccl_runs,
        Setting("digits", "FedMD").name: found(run(1, 0.9, 0.3), run(2, 0.91, 0.3)),
        Setting("digits", "FCCL w/o CON").name: found(run(0, 0.7, 0.45), run(1, 0.7, 0.46)),
    }
    claims = judged(measured)
    above = claims["digits: FCCL above FedMD, inter-domain"]
    assert above.here == "reproduced"
    assert above.claim.parts[0].gains == pytest.approx((0.12, 0.11))  # seeds 1 and 2
    below = claims["digits: FCCL above FedMD, intra-domain"]
    assert below.claim.parts[0].gains == pytest.approx((-0.08, -0.1))
    assert below.here == "undecided"  # two seeds: p = 0.07
    adds = claims["digits, CIFAR-100: the continual part adds to inter-domain accuracy"]
    assert adds.claim.parts[0].gains == pytest.approx((-0.05, -0.04))
    assert adds.verdict == "undecidable here"
    best = claims["digits: FCCL above SOLO and all compared methods, inter-domain"].claim
    assert best.missing == "not measured: FML, RCFL, FedDF, FedMatch"
    assert [part.text for part in best.parts] == ["over SOLO", "over FedMD"]
    assert claims["digits: the diagonal of M on public images grows"].here == "reproduced"
    assert claims["digits: the loss of local updating ends at 0.0225"].here == "reproduced"


def test_without_mnist_m_neither_its_client_nor_its_rows_count() -> None:
    def with_fourth(seed: int, value: float) -> dict[str, Any]:
        one = run(seed, 0.8, 0.4 + 0.01 * seed)
        matrix = one["matrix"]["40"]["m"]
        matrix[3] = [value] * 4
        for row in matrix:
            row[3] = value
        return one

    ours = found(*(with_fourth(seed, 0.0) for seed in range(3)))
    other = found(*(run(seed, 0.8, 0.3 + 0.01 * (seed == 1)) for seed in range(3)))
    claims = judged({Setting("digits", "FCCL").name: ours, Setting("digits", "FML").name: other})
    text = "digits: FCCL above FML, inter-domain"
    assert claims[text].claim.parts[0].mean < 0
    without = claims[f"{text}, without MNIST-M"]
    assert without.claim.parts[0].gains == pytest.approx((0.1, 0.1, 0.12))
    assert without.here == "reproduced"
    assert without.verdict == "undecidable here"


def test_studies_that_were_measured_are_in_the_ledger() -> None:
    study = Setting("digits", "FCCL w/o COL")
    measured = {
        Setting("digits", "FCCL").name: found(run(0, 0.8, 0.40), run(1, 0.82, 0.42)),
        study.name: found(run(0, 0.7, 0.30), run(1, 0.73, 0.31)),
    }
    made = PAPER.ledger(measured, {})
    cells = {c.table: c for c in made.cells if c.setting == study.name}
    assert list(cells) == [f"Studies, {k}-domain, digits, means over domains"
                           for k in ("inter", "intra")]  # fmt: skip
    (claim,) = [c for c in made.claims if c.text == "digits: FCCL above FCCL w/o COL, inter-domain"]
    assert claim.source == "study"
    assert claim.parts[0].gains == pytest.approx((0.1, 0.11))


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
    claims = judged(measured)
    best = "office, all ResNet-18: FCCL above SOLO and all compared methods"
    inter, intra = (claims[f"{best}, {kind}-domain"].claim.parts for kind in ("inter", "intra"))
    assert [part.text for part in inter] == ["over SOLO", "over FedAvg"]
    assert inter[1].gains == pytest.approx((-0.2, -0.2))
    assert intra[1].gains == pytest.approx((0.1, 0.1))
    fashion = claims["digits, Fashion-MNIST: the continual part adds to inter-domain accuracy"]
    assert fashion.evidence == "over w/o CON -0.1000 (one run)"
    assert fashion.here == "undecided"


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
    claims = {c.text: c for c in made.claims}
    part = claims["digits: FCCL above FedMD, inter-domain"].parts[0]
    assert part.gains == pytest.approx((0.1,))
    assert "digits: FCCL above FML, inter-domain" not in claims
    assert after(found(long)) == "40"


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
    assert PAPER.complete(setting, plan) == PAPER.partly(setting, plan)
    both = replace(plan, seeds=(0, 1))
    assert PAPER.complete(setting, both) is None
    part = PAPER.partly(setting, both)
    assert part is not None
    assert len(part["runs"]) == 1
    assert PAPER.complete(setting, replace(plan, rounds=2)) is None
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
