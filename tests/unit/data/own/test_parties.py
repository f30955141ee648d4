"""Own tables of parties with different columns of the same rows."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from atoll import data
from atoll.cli.data import align_command, inspect_command
from atoll.core.errors import UserError
from atoll.core.federation import SERVER
from atoll.core.record import Score, read_events
from atoll.engines.local import local_engine
from atoll.runs.config import resolve
from atoll.runs.execute import execute
from atoll.runs.parts import parts
from atoll.runs.predict.model import Predictor
from atoll.runs.predict.parties import predict

KINDS = ("basic", "gold", "black")


def write(name: str, header: list[str], rows: list[list[Any]]) -> None:
    lines = [",".join(map(str, line)) for line in [header, *rows]]
    Path(name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bank with labels and a column, a phone company and a shop; all know other customers."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = []
    for number in range(240):
        a, b, c = (draw.gauss(0, 1) for _ in range(3))
        card = KINDS[(a + b > 0.3) + (a + b > 0.3 and c > 0)]
        rows.append((f"C{number:03d}", a, b, c, card, 1 + (card == "black")))
    write("bank.csv", ["customer", "income", "card", "year"],
          [[i, f"{a:.3f}", card, year] for i, a, _, _, card, year in rows[:230]])  # fmt: skip
    mixed = draw.sample(rows, len(rows))
    write("phone.csv", ["customer", "minutes", "plan"],
          [[f" {i.lower()} ", f"{b:.3f}" if n % 7 else "", "xy"[n % 2]]
           for n, (i, _, b, *_) in enumerate(mixed) if i != "C007"])  # fmt: skip
    columns = {"customer": [r[0] for r in rows[10:]], "spent": [r[3] for r in rows[10:]]}
    pyarrow.parquet.write_table(pa.table(columns), "shop.parquet")
    return tmp_path


FILES = ("bank.csv", "phone.csv", "shop.parquet")
OWN = {"parties": list(FILES), "label": "card", "id": "customer", "index": "aligned"}


def aligned(*files: str) -> None:
    pytest.importorskip("private_set_intersection", reason="the extra 'psi' is not installed")
    paths = [Path(file) for file in files or FILES]
    align_command(paths, hub=paths[0], column=["customer"], to=Path("aligned"))


def test_rows_that_all_share_stand_side_by_side_in_one_order(tables: Path) -> None:
    aligned()
    found = data.load("", **OWN)
    assert len(found) == 220  # 230 of the bank, without the first ten; C007 is among those
    assert found.groups == ("0-bank", "1-phone", "2-shop")
    assert found.classes == ("basic", "black", "gold")
    assert found.columns == (
        "0-bank: income", "0-bank: year", "1-phone: minutes", "1-phone: minutes missing",
        "1-phone: plan=x", "1-phone: plan=y", "2-shop: spent",
    )  # fmt: skip
    there = ~np.isnan(found.x[:, 2])
    high = found.x[there, 0] + found.x[there, 2] > 0.3  # income + minutes decide about a card
    assert (high == (found.y[there] != 0)).mean() > 0.97  # three digits are left of each
    assert found.x[~there, 3].all()


def test_each_party_has_its_columns_and_the_server_labels_alone(tables: Path) -> None:
    aligned()
    made = parts(resolve({"data": {**OWN, "stage": "year"}, "method": "vleto"}, "test"))
    assert made.scenario.clients == ("0-bank", "1-phone", "2-shop")
    assert made.scenario.tasks == ("1", "2")
    shapes = [tuple(made.site(id).train(0).x.shape[1:]) for id in made.scenario.clients]
    assert shapes == [(1,), (4,), (1,)]
    phone, server = made.site("1-phone").train(0), made.site(SERVER).train(0)
    assert not phone.x.isnan().any()
    assert set(phone.y.tolist()) == {-1}
    assert server.x.shape[1] == 0
    assert set(server.y.tolist()) == {0, 2}  # black comes at stage 2, alone
    assert set(made.site(SERVER).train(1).y.tolist()) == {1}


def test_a_run_learns_from_them_with_rows_classes_or_columns_by_stage(tables: Path) -> None:
    aligned()
    how = {"rate": 0.1, "batch": 16, "width": 12}
    for name, given, scenario in (
        ("rows", {"stage": "year"}, {}),
        ("classes", {}, {"mode": "classes", "stage_classes": [[0, 2], [1, 2]]}),
        ("columns", {}, {"mode": "columns"}),
    ):
        values = {"rounds": 8, "data": {**OWN, **given}, "scenario": scenario,
                  "method": {"name": "vleto", **how}, "engine": {"mode": "loop"}}  # fmt: skip
        execute(resolve(values, "test"), tables / name, local_engine)
        scores = [e for e in read_events(tables / name) if isinstance(e, Score)]
        last = max(score.stage for score in scores)
        assert last == (2 if name == "columns" else 1)
        assert scores[0].accuracy > 0.6, name


@pytest.mark.parametrize("method", ["vleto", "splitnn"])
def test_all_classes_so_far_count_every_test_row_once_also_where_a_class_comes_again(
    method: str, tables: Path
) -> None:
    lines = Path("bank.csv").read_text().splitlines()  # every class in both years
    again = [f"{line[:-1]}{1 + n % 2}" for n, line in enumerate(lines[1:])]
    Path("bank.csv").write_text("\n".join([lines[0], *again]) + "\n")
    aligned()
    values = {"rounds": 1, "data": {**OWN, "stage": "year"}, "engine": {"mode": "loop"},
              "method": {"name": method, "batch": 16, "width": 12}}  # fmt: skip
    execute(resolve(values, "test"), tables / method, local_engine)
    last = [e for e in read_events(tables / method) if isinstance(e, Score) and e.stage == 1]
    tasks = [score for score in last if not score.variant]
    (union,) = [score for score in last if score.variant == "union"]
    assert union.rows == sum(score.rows for score in tasks)
    assert union.correct == sum(score.correct for score in tasks)


def test_a_file_for_each_stage_and_a_column_that_vanishes_or_comes(tables: Path) -> None:
    for stage, part in ((1, slice(1, 111)), (2, slice(111, None))):
        for name in ("bank", "phone"):
            lines = Path(f"{name}.csv").read_text().splitlines()
            kept = sorted(lines[1:], key=lambda line: line.strip().lower())[part]
            Path(f"{name}-{stage}.csv").write_text("\n".join([lines[0], *kept]) + "\n")
    aligned("bank-1.csv", "phone-1.csv")
    aligned("bank-2.csv", "phone-2.csv")
    staged = {**OWN, "parties": [["bank-1.csv", "bank-2.csv"], ["phone-1.csv", "phone-2.csv"]]}
    found = data.load("", **staged)
    assert found.layout is not None
    assert found.layout.stages == ("bank-1", "bank-2")
    assert set(found.layout.stage.tolist()) == {0, 1}
    whole = Path("phone-2.csv").read_text()
    Path("phone-2.csv").write_text("\n".join(x.rsplit(",", 1)[0] for x in whole.splitlines()))
    with pytest.raises(UserError, match=r"'plan' of phone-1.csv is gone.*phone-2.csv.*ignore"):
        data.load("", **staged)
    data.load("", **staged, ignore=["plan"])
    Path("phone-2.csv").write_text(
        whole.replace("plan", "plan,more").replace(",x\n", ",x,1\n").replace(",y\n", ",y,2\n")
    )
    with pytest.raises(UserError, match=r"'more' is not in phone-1.csv.*mode = 'columns'"):
        data.load("", **staged)


def test_other_lengths_orders_and_repeated_ids_are_named(tables: Path) -> None:
    assumed = {k: v for k, v in OWN.items() if k != "index"} | {"assume_aligned": True}
    with pytest.raises(
        UserError,
        match=r"rows, but '.*' has .*leave assume_aligned out.*run atoll align .*--out aligned",
    ):
        data.load("", **assumed)
    lines = Path("bank.csv").read_text().splitlines()
    Path("other.csv").write_text("\n".join([lines[0].replace("card", "kind"), *lines[:0:-1]]))
    with pytest.raises(UserError, match="row 0 has another id"):
        data.load("", **{**assumed, "parties": ["bank.csv", "other.csv"]})
    Path("other.csv").write_text("\n".join([lines[0].replace("card", "kind"), *lines[1:]]))
    assert len(data.load("", **{**assumed, "parties": ["bank.csv", "other.csv"]})) == 230
    Path("bank.csv").write_text("\n".join([*lines, lines[5]]))
    with pytest.raises(UserError, match="1 ids come more than once: 'c004'"):
        aligned()


def test_a_table_that_changed_after_the_alignment_is_refused(tables: Path) -> None:
    aligned()
    lines = Path("phone.csv").read_text().splitlines()
    Path("phone.csv").write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
    with pytest.raises(UserError, match=r"does not fit that of bank.csv.*run atoll align .*--out"):
        data.load("", **OWN)
    Path("phone.csv").write_text("\n".join(lines[:50]) + "\n")
    with pytest.raises(UserError, match=r"do not fit phone.csv, which has 49"):
        data.load("", **OWN)


def test_a_class_that_no_other_party_has_rows_of_is_told_or_dropped(tables: Path) -> None:
    lines = Path("bank.csv").read_text().splitlines()
    Path("bank.csv").write_text("\n".join([*lines, "C900,0.5,platinum,2", "C901,0.1,platinum,2"]))
    aligned()
    with pytest.raises(UserError, match="class 'platinum' has no row that all parties have"):
        data.load("", **OWN)
    assert "platinum" not in data.load("", **OWN, lost="drop").classes


def test_a_class_that_is_new_at_a_stage_and_that_a_party_has_no_rows_of_is_told(
    tables: Path,
) -> None:
    """Black cards come in year 2, and the phone company knows none of these customers."""
    lines = Path("bank.csv").read_text().splitlines()
    black = {line.split(",")[0].lower() for line in lines if ",black," in line}
    known = Path("phone.csv").read_text().splitlines()
    kept = [line for line in known if line.split(",")[0].strip() not in black]
    assert 0 < len(kept) < len(known)
    Path("phone.csv").write_text("\n".join(kept) + "\n")
    aligned()
    staged = {**OWN, "stage": "year"}
    with pytest.raises(UserError, match="class 'black' has no row that all parties have"):
        data.load("", **staged)
    found = data.load("", **staged, lost="drop")
    assert found.classes == ("basic", "gold")
    assert found.layout is not None
    assert found.layout.stages == ("1",)  # nothing is left of year 2


def test_a_stage_whose_file_shares_no_row_with_a_party_is_told_at_the_alignment(
    tables: Path,
) -> None:
    Path("bank-2.csv").write_text("customer,income,card,year\nC900,1.0,black,2\n")
    Path("phone-2.csv").write_text("customer,minutes,plan\nc901,1.0,x\n")
    with pytest.raises(UserError, match="no id is common to all tables"):
        aligned("bank-2.csv", "phone-2.csv")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"label": "gold"}, "no party has a column 'gold'"),
        ({"label": ""}, "no label"),
        ({"parties": ["bank.csv"]}, "fewer than two parties"),
        ({"index": ""}, "not known which rows belong together"),
        ({"index": "nowhere"}, "no index file"),
        ({"id": "nr"}, "no column 'nr' for the ids"),
        ({"stage": "when"}, "no column 'when' for the stage"),
        (
            {"parties": [["bank.csv", "bank.csv"], ["phone.csv"]]},
            "different numbers of files: 2, 1",
        ),
        ({"parties": ["bank.csv", "bank.csv"]}, "the label is in bank.csv and bank.csv"),
    ],
)
def test_mistakes_are_told_before_anything_is_read_twice(
    changes: dict[str, Any], said: str, tables: Path
) -> None:
    with pytest.raises(UserError, match=said):
        data.load("", **{**OWN, **changes})


def test_a_name_that_no_party_has_is_refused(tables: Path) -> None:
    aligned()
    for key in ("ignore", "categorical"):
        with pytest.raises(UserError, match=r"no party has a column 'Plan'.*did you mean 'plan'"):
            data.load("", **OWN, **{key: ["Plan"]})
    with pytest.raises(UserError, match="ignore names the label 'card'"):
        data.load("", **OWN, ignore=["card"])


def changed(name: str, column: str, value: Callable[[int], str]) -> None:
    """Write a column of a file anew, by the number of the row."""
    lines = [line.split(",") for line in Path(name).read_text().splitlines()]
    place = lines[0].index(column)
    for number, line in enumerate(lines[1:]):
        line[place] = value(number)
    Path(name).write_text("\n".join(",".join(line) for line in lines) + "\n")


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ("n.b.", r"'n.b.' in the column 'income', which has numbers.*bank.csv, line 52"),
        ("1e35", r"'1e35' in the column 'income' is too large a number.*bank.csv, line 52"),
        ("1e39", "too large a number"),
    ],
)
def test_what_own_tables_refuse_is_refused_of_a_party(odd: str, what: str, tables: Path) -> None:
    changed("bank.csv", "income", lambda row: odd if row == 50 else f"{row % 9}.5")
    aligned()
    with pytest.raises(UserError, match=what):
        data.load("", **OWN)


def test_an_identifier_of_a_party_is_left_out_and_told(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed("phone.csv", "plan", lambda row: f"note on {row}")
    aligned()
    found = data.load("", **OWN)
    assert not any("plan" in name for name in found.columns)
    assert found.layout is not None
    assert found.layout.findings == (
        ("'plan' of 1-phone looks like an identifier or free text",
         "left out; to use it, write keep = ['plan']"),
    )  # fmt: skip
    kept = data.load("", **OWN, keep=["plan"])
    assert sum("plan=" in name for name in kept.columns) == 50
    data_line = ", ".join(f"{key} = {json.dumps(value)}" for key, value in OWN.items())
    Path("run.toml").write_text(f"method = 'vleto'\ndata = {{ {data_line} }}\n")
    inspect_command("run.toml")
    assert "looks like an identifier" in capsys.readouterr().out
    changed("phone.csv", "minutes", lambda row: "")
    with pytest.raises(UserError, match="no column of 1-phone can be learned from"):
        data.load("", **OWN)


@pytest.mark.parametrize("content", ["", "place\n1\n", "row\n1.5\n", f"row\n{'9' * 200_000}\n"])
def test_an_index_file_of_something_else_is_refused(content: str, tables: Path) -> None:
    Path("aligned").mkdir()
    for file in FILES:
        (Path("aligned") / f"{Path(file).stem}.index.csv").write_text(content)
    with pytest.raises(UserError, match="no index file, or not one of atoll align"):
        data.load("", **OWN)


@pytest.fixture
def quantity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two parties; days are a sum of their columns."""
    monkeypatch.chdir(tmp_path)
    draw, rows = random.Random(1), []
    for number in range(90):
        x, z = draw.gauss(0, 1), draw.gauss(0, 1)
        rows.append((number, f"{x:.3f}", f"{8 + 2 * x + 3 * z:.2f}", f"{z:.3f}"))
    write("a.csv", ["id", "x", "days"], [list(row[:3]) for row in rows])
    write("b.csv", ["id", "z"], [[row[0], row[3]] for row in rows])
    return {"parties": ["a.csv", "b.csv"], "label": "days", "id": "id", "assume_aligned": True}


def test_a_quantity_is_a_number_to_predict(quantity: dict[str, Any]) -> None:
    dataset = data.load("", **quantity)
    assert dataset.regression
    assert dataset.classes == ("days",)
    assert dataset.y[0] == float(Path("a.csv").read_text().splitlines()[1].split(",")[2])
    assert dataset.layout is not None
    ((what, action),) = dataset.layout.findings
    assert what == f"label 'days' has {len(set(dataset.y))} distinct numbers: regression"
    assert action == 'set task = "classification" to treat values as classes'
    chosen = data.load("", **quantity, task="regression")
    assert chosen.layout is not None
    assert not chosen.layout.findings
    with pytest.raises(UserError, match="different values in 90 rows") as error:
        data.load("", **quantity, task="classification")
    assert 'task = "regression"' in error.value.remedy


@pytest.mark.parametrize("method", ["splitnn", "vleto"])
def test_parties_predict_a_number_in_its_unit(
    method: str, quantity: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"name": method, "rate": 0.1, "batch": 16, "width": 8}
    values = {"data": quantity, "method": settings, "rounds": 15, "engine": {"mode": "loop"}}
    execute(resolve(values, "test"), tmp_path / "run", local_engine)
    (score,) = [e for e in read_events(tmp_path / "run") if isinstance(e, Score)]
    assert score.r2 > 0.5
    server = Predictor(tmp_path / "run", SERVER)
    files, out = ["a.csv", "b.csv"], tmp_path / "out.csv"
    result = predict(server, files, out, held_out=True)
    assert out.read_text().splitlines()[0] == "id,prediction"
    assert result.judged == score.rows
    assert result.absolute / result.judged == pytest.approx(score.errors["mae"], rel=1e-3)
