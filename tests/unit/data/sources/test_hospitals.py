"""Four made-up hospitals: sizes, years, columns and shifts are as they are described."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import data
from atoll.core.errors import UserError
from atoll.data import splits
from atoll.data.dataset import Dataset, Layout
from atoll.data.sources import hospitals as source
from atoll.engines.local import local_engine
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.predict import tables
from atoll.runs.predict.model import Predictor

Array = np.ndarray[Any, Any]


@pytest.fixture
def hospitals() -> Dataset:
    return data.load("hospitals")


def layout(dataset: Dataset) -> Layout:
    assert dataset.layout is not None
    return dataset.layout


def at(dataset: Dataset, site: str, year: int) -> Array:
    """The rows of a site in a year, counted from 0."""
    return np.flatnonzero(
        (dataset.group == dataset.groups.index(site)) & (layout(dataset).stage == year)
    )


def test_sites_have_their_sizes_in_both_years(hospitals: Dataset) -> None:
    sizes = {"basel": 3_200, "bern": 2_133, "chur": 1_067, "davos": 400}
    for year in (0, 1):
        assert {site: len(at(hospitals, site, year)) for site in hospitals.groups} == sizes


def test_the_third_diagnosis_is_only_in_year_two(hospitals: Dataset) -> None:
    for site in hospitals.groups:
        first, second = (hospitals.y[at(hospitals, site, year)] for year in (0, 1))
        assert np.unique(first).tolist() == [0, 1]
        assert np.unique(second).tolist() == [0, 1, 2]


def test_shares_of_diagnoses_are_those_of_the_site(hospitals: Dataset) -> None:
    for site in source.HOSPITALS:
        for year in (0, 1):
            y = hospitals.y[at(hospitals, site.name, year)]
            shares = np.bincount(y, minlength=3) / len(y)
            mix = source._case_mix(site, year)
            expected = np.array([mix[name] for name in hospitals.classes])
            assert sum(mix.values()) == pytest.approx(1)
            assert np.all(np.abs(shares - expected) < 4 * np.sqrt(0.25 / len(y)))


def test_shares_of_presentations_add_up() -> None:
    for diagnosis in source.DIAGNOSES:
        shares = [one.share for one in source.PRESENTATIONS if one.diagnosis == diagnosis]
        assert sum(shares) == pytest.approx(1)
    assert all(len(one.means) == len(source.MEASUREMENTS) for one in source.PRESENTATIONS)


def test_two_columns_are_measured_at_some_sites_only(hospitals: Dataset) -> None:
    held = layout(hospitals).held
    common = {hospitals.columns[i] for i in np.flatnonzero(held.all(0))}
    own = {}
    for number, site in enumerate(hospitals.groups):
        names = {hospitals.columns[i] for i in np.flatnonzero(held[number])}
        own[site] = names - common
        absent = hospitals.x[hospitals.group == number][:, ~held[number]]
        assert not absent.any()
    assert len(common) == 10
    assert own == {
        "basel": {"st elevation", "ejection fraction"},
        "bern": {"st elevation"},
        "chur": {"ejection fraction"},
        "davos": set(),
    }


def test_sites_are_shifted_against_each_other(hospitals: Dataset) -> None:
    def mean(site: str, column: str) -> float:
        """Of patients with an infarction: what differs is not the case mix."""
        rows = np.concatenate([at(hospitals, site, 0), at(hospitals, site, 1)])
        ill = rows[hospitals.y[rows] == hospitals.classes.index("infarction")]
        return float(hospitals.x[ill, hospitals.columns.index(column)].mean())

    for column, site, shift, tolerance in (
        ("age", "davos", -8, 3), ("oxygen saturation", "davos", -3, 0.6),
        ("age", "chur", 6, 2), ("log troponin", "chur", 0.3, 0.12),
    ):  # fmt: skip
        assert abs(mean(site, column) - mean("basel", column) - shift) < tolerance


def test_equal_seeds_give_equal_patients(hospitals: Dataset) -> None:
    assert data.load("hospitals").fingerprint == hospitals.fingerprint
    assert data.load("hospitals", seed=1).fingerprint != hospitals.fingerprint
    assert len(data.load("hospitals", patients=80)) == 2 * (80 + 53 + 27 + 10)


def test_its_split_deals_sites_years_and_own_columns() -> None:
    dataset = data.load("hospitals", patients=80)
    options = splits.load("files").options(train=0.5, valid=0.2)
    scenario = splits.split(dataset, options, seed=0)
    assert scenario.clients == ("basel", "bern", "chur", "davos")
    assert scenario.tasks == ("year 1", "year 2")
    assert len(scenario.common) == 10
    assert [len(held.train) for held in scenario.holdings["davos"]] == [5, 5]
    assert [len(scenario.holdings[id][0].own) for id in scenario.clients] == [2, 1, 1, 0]
    with pytest.raises(UserError, match="'hospitals' cannot be dealt out by split = 'rows'"):
        splits.split(dataset, splits.load("rows").options(), 0)


def test_a_run_predicts_patients_of_a_file(tmp_path: Path) -> None:
    values = {"data": {"name": "hospitals", "patients": 160}, "rounds": 1, "epochs": 1}
    values |= {"train": 0.5, "valid": 0.2, "attribution": False}
    execute(resolve(change(read("demo"), values), "test"), tmp_path / "run", local_engine)
    dataset = data.load("hospitals", patients=160)
    file = tmp_path / "patients.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*dataset.columns, "diagnosis"])
        for row in at(dataset, "chur", 1)[:7]:
            writer.writerow([*dataset.x[row].tolist(), dataset.classes[dataset.y[row]]])
    predicted = tables.predict(
        Predictor(tmp_path / "run", "chur", "", ""), file, tmp_path / "predictions.csv"
    )
    assert predicted.rows == predicted.judged == 7
