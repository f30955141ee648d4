"""The report's part on domains, from the record of a small run."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.record import read_snapshots
from atoll.engines.local import local_engine
from atoll.report import domains, tables
from atoll.report.page import page
from atoll.runs.config import change, resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts

VALUES = {
    "name": "fccl",
    "rounds": 2,
    "score_every": 1,
    "data": {"name": "synthetic-images", "rows": 200},
    "public": {"name": "patterns", "rows": 64},
    "models": ["cnn", "cnn-deep"],
    "method": {"name": "fccl", "epochs": 1, "pretrain_epochs": 2, "batch": 32, "public_batch": 64},
    "engine": {"mode": "loop"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    execute(resolve(VALUES, "test"), path, local_engine)
    return path


def test_sites_look_at_correlations_and_features_and_send_nothing_of_it(folder: Path) -> None:
    snapshots = read_snapshots(folder)
    assert {(snapshot.part, snapshot.name) for snapshot in snapshots} == {
        (site, name)
        for site in ("site-0", "site-1")
        for name in ("correlation, own test rows", "correlation, public images", "features")
    }
    for snapshot in snapshots:
        values = np.array(snapshot.values)
        assert np.isfinite(values).all()
        if snapshot.name == "features":
            assert len(snapshot.rows) == 40  # all test rows: at most 40 of each domain
            assert {row.split("|")[0] for row in snapshot.rows} == {"domain 0", "domain 1"}
        else:
            assert values.shape == (4, 4)
            assert np.abs(values).max() <= 1.0001
        if snapshot.name == "correlation, own test rows":
            assert values.diagonal() == pytest.approx(np.ones(4), abs=1e-3)
            assert values == pytest.approx(values.T, abs=1e-3)
    events = (folder / "events.jsonl").read_text()
    assert "features" not in events


def test_the_page_has_every_picture_and_its_numbers_are_the_records(folder: Path) -> None:
    (group,) = tables.gather([folder])
    made = domains.section(group, 1)
    assert made is not None
    assert [picture.name for picture in made.pictures] == [
        "domains-1", "rounds-1", "correlation-1-0", "correlation-1-1", "features-1",
    ]  # fmt: skip
    rows = {(row[0].text, row[1].text): row for row in made.tables[0].rows}
    found = group.first.metrics["fccl"]
    assert rows["fccl", "mean"][2].value == pytest.approx(found["intra_accuracy"])
    assert rows["fccl", "mean"][3].value == pytest.approx(found["inter_accuracy"])
    assert ("solo", "site-1 (domain 1)") in rows
    compared = tables.differences([group])
    assert compared is not None
    assert compared.rows[0][1].text.endswith("solo")
    text = page([group])
    assert text == page([group])  # the same record gives the same page
    assert all(picture.title in text for picture in made.pictures)


def test_the_summary_names_the_rows_of_all_domains(folder: Path) -> None:
    """The card is about each site's own domain, so the two accuracies differ."""
    assert "of the test rows of all domains correctly" in page(tables.gather([folder]))


def test_runs_without_domains_or_snapshots_have_less_to_say(tmp_path: Path) -> None:
    plain = change(VALUES, {"rounds": 1, "looks": False, "score_every": 0})
    execute(resolve(plain, "test"), tmp_path / "a", local_engine)
    (group,) = tables.gather([tmp_path / "a"])
    made = domains.section(group, 1)
    assert made is not None
    assert [picture.name for picture in made.pictures] == ["domains-1"]
    table = {"name": "fedavg", "rounds": 1, "method": {"name": "fedavg"}, "model": {"widths": [4]}}
    execute(resolve(table, "test"), tmp_path / "b", local_engine)
    (group,) = tables.gather([tmp_path / "b"])
    assert domains.section(group, 1) is None


@pytest.fixture(scope="module")
def several(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two public sets, one of them without the continual part too; two seeds of one."""
    home = tmp_path_factory.mktemp("several")
    changes: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1},
        "digits": {"public": {"name": "digits", "rows": 64}},
        "without": {"lambda_loc": 0.0},
        "without-digits": {"lambda_loc": 0.0, "public": {"name": "digits", "rows": 64}},
    }
    for name, change_ in changes.items():
        execute(
            resolve(change(VALUES, {**change_, "looks": False}), "test"), home / name, local_engine
        )
    execute(resolve(change(VALUES, {"looks": False}), "test"), home / "plain", local_engine)
    return [home / name for name in ("plain", *changes)]


def bars(picture: str) -> int:
    """Filled rectangles of an axes, its background apart."""
    return len(re.findall(r'<path d="[^"]*" clip-path="[^"]*" style="fill: #', picture))


def test_runs_on_several_public_sets_and_without_parts_become_bars(several: list[Path]) -> None:
    """Figures 7 and 8 of the paper."""
    groups = tables.gather(several)
    assert len(groups) == 4  # two seeds of the first are one group
    made = {picture.name: picture for picture in domains.overall(groups)}
    assert list(made) == ["public-sets-1", "public-sets-2", "ablation"]
    assert made["public-sets-1"].title == "Public sets: fccl"
    # two panels; by site and their mean, a bar for each public set
    assert bars(made["public-sets-1"].svg) == 2 * 3 * 2
    assert bars(made["ablation"].svg) == 2 * 2 * 2
    for words in ("patterns", "digits", "site-0 (domain 0)", "mean"):
        assert words in made["public-sets-1"].svg
    assert "without the continual part" in made["ablation"].svg
    assert "one deviation over seeds" in made["ablation"].words
    assert "One seed" in made["public-sets-2"].words
    text = page(groups)
    assert all(picture.title in text for picture in made.values())


def test_bars_are_as_high_as_the_records_say(several: list[Path]) -> None:
    groups = tables.gather(several)
    plain = next(group for group in groups if len(group.runs) == 2)
    found = domains._ablated(groups)
    for kind, mine in (("intra", found.own), ("inter", found.others)):
        metric = [run.metrics["fccl"][f"{kind}_accuracy"] for run in plain.runs]
        assert mine["patterns", "FCCL"] == pytest.approx(metric)


def test_one_run_and_runs_that_differ_otherwise_have_no_bars(
    folder: Path, several: list[Path]
) -> None:
    assert domains.overall(tables.gather([folder])) == []
    plain, *_, other = several
    assert [p.name for p in domains.overall(tables.gather([plain, other]))] == ["ablation"]


def test_a_site_knows_the_names_of_domains() -> None:
    made = parts(resolve(VALUES, "test"))
    assert made.site("site-0").tasks == ("domain 0", "domain 1")
