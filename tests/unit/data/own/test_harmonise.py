"""Rules that bring files to the same names, words and units, from [data] to predictions."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from atoll import data
from atoll.cli.data import inspect_command
from atoll.core.errors import UserError
from atoll.data import splits
from atoll.data.own import tables
from atoll.data.own.agreement import Agreed, Common, Offered, OwnTable, Plan, planned
from atoll.data.own.agreement import _hash as hash_name
from atoll.data.own.harmonise import DateRule, Rules, Unit, harmonise
from atoll.data.own.profiles import TableOptions
from atoll.data.splits import split
from atoll.engines.local import local_engine
from atoll.runs.config import resolve, to_toml
from atoll.runs.execute import execute
from atoll.runs.predict import standalone
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.tables import predict


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, header: str, rows: list[str]) -> str:
    Path(name).write_text("\n".join([header, *rows]) + "\n")
    return name


def batch(**columns: list[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, pa.string()) for name, values in columns.items()}
    )


def load(*files: str, **options: Any) -> data.Dataset:
    return data.load("", files=list(files), label="outcome", **options)


def test_names_become_one_column_and_options_may_use_the_old_ones() -> None:
    write("a.csv", "Age,CP,outcome", [f"{i},{i % 3},{'xy'[i % 2]}" for i in range(8)])
    write("b.csv", "age,cp,outcome", [f"{i},{i % 3},{'xy'[i % 2]}" for i in range(8)])
    rename = {"Age": "age", "CP": "cp"}
    dataset = load("a.csv", "b.csv", rename=rename, categorical=["CP"])
    assert dataset.columns == ("age", "cp=0", "cp=1", "cp=2")
    assert dataset.layout is not None
    assert dataset.layout.held.all()
    ignored = load("a.csv", "b.csv", rename=rename, ignore=["CP"])
    assert ignored.columns == ("age",)


def test_a_site_may_have_rules_of_its_own() -> None:
    write("a.csv", "chol,outcome", ["5,x", "-9,y", "6,x"])
    write("b.csv", "serum,outcome", ["200,x", "0,1", "240,x"])
    dataset = load(
        "a.csv", "b.csv",
        missing={"chol": ["-9"]},
        sites={
            "a": {"units": {"chol": {"factor": 40.0, "offset": 1.0}}},
            "b": {"rename": {"serum": "chol"}, "missing": {"chol": ["0"]}, "labels": {"1": "y"}},
        },
    )  # fmt: skip
    assert dataset.columns == ("chol", "chol missing")
    np.testing.assert_array_equal(dataset.x[:, 0], [201, np.nan, 241, 200, np.nan, 240])
    assert dataset.classes == ("x", "y")
    assert dataset.y.tolist() == [0, 1, 0, 0, 1, 0]


def test_rules_of_a_site_go_first_though_those_of_all_name_the_column_twice() -> None:
    write("a.csv", "Sex,outcome", ["F,x", "M,y", "f,x"])
    write("b.csv", "sex,outcome", ["1,x", "2,y", "1,x"])
    words = {"F": "f", "M": "m"}
    dataset = load(
        "a.csv", "b.csv",
        rename={"Sex": "sex"},
        values={"sex": words, "Sex": words},
        sites={"b": {"values": {"sex": {"1": "f", "2": "m"}}}},
    )  # fmt: skip
    assert dataset.columns == ("sex=f", "sex=m")
    assert dataset.x[:, 0].tolist() == [1, 0, 1, 1, 0, 1]


def test_rules_by_site_hold_for_the_rows_of_a_site_column() -> None:
    rows = ["a,1,x", "b,10,y", "a,2,y", "b,20,x"]
    write("all.csv", "place,w,outcome", rows)
    dataset = load("all.csv", site="place", sites={"b": {"units": {"w": {"factor": 0.1}}}})
    np.testing.assert_allclose(dataset.x[:, 0], [1, 1, 2, 2])


def test_values_change_as_the_rules_say() -> None:
    rules = Rules(
        labels={"1": "yes", "Yes": "yes", "0": "no"},
        values={"smoker": {"1": "yes", "Y": "yes", "0": "no"}},
        units={"share": Unit(factor=0.01, suffix="%")},
        missing={"chol": ("999", "-9")},
        dates={
            "seen": DateRule("day first", since="born"),
            "born": DateRule("%d.%m.%Y"),
            "left": DateRule("month first", since="2024-01-01"),
        },
    )
    rows = batch(
        chol=["999", "999.0", "-9", "99", None],
        smoker=["1", "1.0", "Y", "0", None],
        share=["45%", "50 %", "45", "high", None],
        seen=["02.01.2024", "2/1/2024", "2024-01-02", "31.02.2024", None],
        born=["01.01.2024", "01.01.2024", "01.01.2024", "01.01.2024", "01.01.2024"],
        left=["01/03/2024", "01/03/24", "1/3/2024", "?", None],
        y=["1", "1.0", "Yes", "0", "no"],
    )
    assert harmonise(rows, rules, "y").to_pydict() == {
        "chol": [None, None, None, "99", None],
        "smoker": ["yes", "yes", "yes", "no", None],
        "share": ["0.45", "0.5", "0.45", "high", None],
        "seen": ["1", "1", "1", "31.02.2024", None],
        "born": ["2024-01-01"] * 5,
        "left": ["2", "2", "2", "?", None],
        "y": ["yes", "yes", "yes", "no", "no"],
    }


@pytest.mark.parametrize(
    ("format", "text", "usual"),
    [
        ("%d.%m.%Y %H:%M", "02.01.2024 7:05", "2024-01-02T07:05:00"),
        ("%d.%m.%Y %H:%M", "02.01.2024", "02.01.2024"),  # another form stays as it is
        ("month first", "01/02/2024 07:28 PM", "2024-01-02T19:28:00"),
        ("%d%b%Y", "02JAN2024", "2024-01-02"),
        ("%Y%m%d", "20240102", "2024-01-02"),
        ("%Y-%m-%dT%H:%M:%S%z", "2024-01-02T23:30:00+01:00", "2024-01-02T23:30:00"),
    ],
)
def test_dates_of_every_format_become_usual_ones(format: str, text: str, usual: str) -> None:
    rules = Rules(dates={"seen": DateRule(format)})
    assert harmonise(batch(seen=[text]), rules, "y").to_pydict() == {"seen": [usual]}
    assert standalone.usual_date(text, format) == usual


def test_values_of_a_column_may_be_swapped() -> None:
    write("a.csv", "sex,outcome", [f"{number % 3},{'xy'[number % 2]}" for number in range(30)])
    before = load("a.csv", categorical=["sex"])
    after = load("a.csv", categorical=["sex"], values={"sex": {"1": "2", "2": "1"}})
    places = [before.columns.index(f"sex={level}") for level in (0, 2, 1)]
    assert after.x.sum(0).tolist() == [10, 10, 10]
    assert np.array_equal(after.x, before.x[:, places])


def test_stages_come_in_the_order_that_is_given() -> None:
    rows = [f"{i % 7},{'January' if i % 2 else 'February'},{'xy'[i // 2 % 2]}" for i in range(20)]
    write("a.csv", "age,month,outcome", rows)
    dataset = load("a.csv", stage="month", order=["January", "February"])
    assert dataset.layout is not None
    assert dataset.layout.stages == ("January", "February")
    assert dataset.layout.stage.tolist() == [1, 0] * 10
    with pytest.raises(UserError, match="order does not list the stage 'February'"):
        load("a.csv", stage="month", order=["January"])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"rename": {"agee": "age"}}, "no site has a column 'agee'"),
        ({"rename": {"age": "sex"}}, "rename makes one column of age and sex"),
        ({"rename": {"age": "b", "b": "c"}}, "turns 'age' into 'b', and 'b' into another"),
        ({"values": {"agee": {"x": "y"}}}, "no site has a column 'agee'"),
        ({"labels": {"x": "y", "y": "z"}}, "labels turns 'x' into 'y'"),
        ({"units": {"agee": {"factor": 2.0}}}, "no site has a column 'agee'"),
        ({"units": {"age": {"times": 2.0}}}, "option 'units' cannot be"),
        ({"dates": {"age": {"format": "DD.MM.YYYY"}}}, "'DD.MM.YYYY' is no format"),
        ({"dates": {"age": {"since": "1.1.2024"}}}, "'1.1.2024' is no date"),
        ({"dates": {"age": {"since": "born"}}}, "no site has a column 'born'"),
        ({"sites": {"z": {}}}, "no site 'z'"),
        ({"group": "patient"}, "no site has a column 'patient'"),
        ({"id": "mrn"}, "no site has a column 'mrn'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: dict[str, Any], what: str) -> None:
    write("a.csv", "age,sex,outcome", [f"{i},{'fm'[i % 2]},{'xy'[i % 2]}" for i in range(8)])
    with pytest.raises(UserError, match=what):
        tables.survey(files=["a.csv"], label="outcome", **options)


@pytest.mark.parametrize(
    ("one", "other", "mapped"),
    [
        (("0", "1"), ("no", "yes"), {"0": "no", "1": "yes"}),
        (("yes", "no"), ("Yes", "No"), None),
        (("ill", "well"), ("Ill", "well"), None),
        (("true", "false"), ("pos", "neg"), None),
    ],
)
def test_a_run_refuses_labels_that_look_like_spellings_until_they_are_mapped(
    one: tuple[str, str], other: tuple[str, str], mapped: dict[str, str] | None
) -> None:
    for name, classes in (("a.csv", one), ("b.csv", other)):
        write(name, "age,outcome", [f"{i},{classes[i % 2]}" for i in range(12)])
    tables.survey(files=["a.csv", "b.csv"], label="outcome")  # inspect can look at it
    with pytest.raises(UserError, match="look like the same class") as error:
        load("a.csv", "b.csv")
    assert "labels = {" in error.value.remedy
    assert len(load("a.csv", "b.csv", labels="as-is").classes) > 2
    if mapped:
        assert load("a.csv", "b.csv", labels=mapped).classes == ("no", "yes")


@pytest.mark.parametrize("classes", [("a", "b"), ("1", "2"), ("m", "n"), ("0", "1", "2")])
def test_labels_that_differ_otherwise_are_trained_on(classes: tuple[str, ...]) -> None:
    write("a.csv", "age,outcome", [f"{i},{classes[i % 2]}" for i in range(12)])
    write("b.csv", "age,outcome", [f"{i},{classes[-1 - i % 2]}" for i in range(12)])
    assert len(load("a.csv", "b.csv").classes) == len(classes)


def grouped_file(name: str, people: int = 20, visits: int = 3) -> str:
    rows = [
        f"{person}{'xyz'[visit]},{person},{40 + (person * 7 + visit) % 30},{'xy'[person % 2]}"
        for visit in range(visits)
        for person in range(people)
    ]
    return write(name, "visit,patient,age,outcome", rows)


def test_rows_of_one_group_stay_in_one_part_and_classes_stay_in_proportion() -> None:
    grouped_file("a.csv")
    dataset = load("a.csv", group="patient", id="visit")
    assert dataset.columns == ("age",)
    scenario = split(dataset, splits.load("files").options(), seed=0)
    held, tested = scenario.holdings["a"][0], scenario.tests["a"][0]
    assert dataset.layout is not None
    assert dataset.people is not None
    parts = [{*dataset.people[rows]} for rows in (held.train, held.valid, tested)]
    assert [len(part) for part in parts] == [12, 4, 4]
    assert len(set.union(*parts)) == 20
    assert [dataset.y[rows].mean() for rows in (held.train, held.valid, tested)] == [0.5] * 3


def test_a_prediction_harmonises_as_the_run_did_and_carries_the_id() -> None:
    rows = [f"p{i},{i},{i % 7},{'ill' if i > 20 else 'well'}" for i in range(40)]
    write("a.csv", "case,Age,w,outcome", rows)
    write("b.csv", "mrn,age,w,outcome", [r.replace("ill", "1").replace("well", "0") for r in rows])
    options = {
        "files": ["a.csv", "b.csv"], "label": "outcome", "id": "case",
        "rename": {"Age": "age"}, "labels": {"1": "ill", "0": "well"},
        "sites": {"b": {"id": "mrn", "units": {"w": {"factor": 2.0}}}},
    }  # fmt: skip
    values = {
        "name": "own", "rounds": 1, "data": options, "model": {"widths": [4]},
        "engine": {"mode": "loop"}, "method": {"name": "alone", "epochs": 1},
    }  # fmt: skip
    config = resolve(values, "own")
    assert "labels" in to_toml(config)
    execute(config, Path("run"), local_engine)
    result = predict(Predictor(Path("run"), "b"), Path("b.csv"), Path("p.csv"))
    assert (result.rows, result.judged, result.foreign) == (40, 40, 0)
    with Path("p.csv").open() as file:
        header, first, *_ = csv.reader(file)
    assert header[:3] == ["row", "mrn", "prediction"]
    assert first[:2] == ["1", "p0"]
    assert result.absent == ()


def test_levels_that_the_run_read_are_not_called_new_though_they_have_no_column() -> None:
    rows = [f"{i},w{i % 9},{'xy'[i % 2]}" for i in range(90)]
    write("a.csv", "age,word,outcome", rows)
    values = {
        "name": "own", "rounds": 1, "model": {"widths": [4]}, "engine": {"mode": "loop"},
        "data": {"files": ["a.csv"], "label": "outcome", "most_levels": 3},
        "method": {"name": "alone", "epochs": 1},
    }  # fmt: skip
    execute(resolve(values, "own"), Path("run"), local_engine)
    predictor = Predictor(Path("run"), "a")
    assert predict(predictor, Path("a.csv"), Path("p.csv")).unseen == {}
    write("new.csv", "age,word,outcome", ["1,w0,x", "2,other,y"])
    assert predict(predictor, Path("new.csv"), Path("p.csv")).unseen == {"word": 1}


def test_a_site_of_a_network_harmonises_and_deals_as_one_machine_does() -> None:
    grouped_file("a.csv")
    text = grouped_file("b.csv")
    Path(text).write_text(Path(text).read_text().replace("age", "Age").replace(",x", ",0"))
    options = {
        "label": "outcome", "group": "patient", "id": "visit",
        "sites": {"b": {"rename": {"Age": "age"}, "labels": {"0": "x"}}},
    }  # fmt: skip
    whole = data.load("", files=["a.csv", "b.csv"], **options)
    plan = Plan("k", (Common(hash_name("age", "k"), "number", (), False),), (), ("x", "y"), ())
    at_home = OwnTable("b", files=["b.csv"], **options).dataset(plan)
    here = split(at_home, splits.load("files").options(), 3)
    there = split(whole, splits.load("files").options(), 3)
    np.testing.assert_array_equal(at_home.x, whole.x[60:])
    np.testing.assert_array_equal(here.tests["b"][0] + 60, there.tests["b"][0])
    np.testing.assert_array_equal(here.holdings["b"][0].train + 60, there.holdings["b"][0].train)


def test_sites_of_a_network_do_not_train_while_labels_disagree() -> None:
    column = {"h": "number"}
    offers = {"a": Offered(column, ["0", "1"], []), "b": Offered(column, ["no", "yes"], [])}
    agreed = dict.fromkeys(offers, Agreed({"h": False}, {}))
    with pytest.raises(UserError, match="look like the same class"):
        planned("k", offers, agreed, TableOptions())
    assert planned("k", offers, agreed, TableOptions(labels="as-is")).classes[0] == "0"


def test_a_column_that_a_site_ignores_stays_ignored_under_another_name() -> None:
    write("a.csv", "name,age,outcome", [f"n{i % 3},{i % 7},{'xy'[i % 2]}" for i in range(12)])
    options = {"label": "outcome", "ignore": ["name"]}
    for rules in (
        {"rename": {"name": "harmless"}},
        {"sites": {"a": {"rename": {"name": "harmless"}}}},
    ):
        table = OwnTable("a", files=["a.csv"], **options, **rules)
        assert list(table.kinds) == ["age"]


def test_inspect_counts_the_rows_of_people_as_they_are_dealt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grouped_file("a.csv")
    Path("run.toml").write_text(
        'method = "alone"\ndata = { files = ["a.csv"], label = "outcome", group = "patient" }\n'
    )
    inspect_command("run.toml", ["data.id=visit"])
    printed = capsys.readouterr().out
    assert "group: rows stay in one split; no input" in printed
    assert printed.splitlines()[-1].split() == ["a", "36", "12", "12", "1", "0"]
