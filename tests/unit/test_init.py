"""`atoll init` always writes a config; a new user goes from messy files to a verdict."""

import importlib.util
import random
import re
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll import cli, data
from atoll.core.errors import UserError
from atoll.data.own import tables
from atoll.runs.config import resolve

Command = Callable[..., tuple[object, str, str]]
ICD = ["250.83", "V27", "414", "428", "786.5", "E909", "401.9"]
HEADER = [
    "patient_nbr", "age", "sex", "chol", "trestbps", "cp", "smoker", "ef", "icd", "seen", "month",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def visits(rows: int, start: int, draw: random.Random) -> list[dict[str, Any]]:
    """Rows of patients who come one to three times."""
    found: list[dict[str, Any]] = []
    number = start
    while len(found) < rows:
        number += draw.randrange(1, 40)
        age, sex = draw.randrange(35, 80), draw.choice("mf")
        for _ in range(draw.choice([1, 1, 2, 3])):
            chol, code = draw.gauss(220, 40), draw.randrange(4)
            risk = (age - 57) / 10 + (chol - 220) / 40 + (code == 3) + draw.gauss(0, 0.6)
            found.append({
                "patient_nbr": number, "age": age, "sex": sex, "chol": round(chol),
                "trestbps": round(draw.gauss(130, 15)), "cp": code, "smoker": draw.randrange(2),
                "ef": draw.randrange(20, 80), "icd": draw.choice(ICD),
                "seen": f"{draw.randrange(1, 29):02}.{draw.randrange(1, 13):02}.2023",
                "month": draw.choice(["February", "January"]),
                "ill": risk > 0.3,
            })  # fmt: skip
    return found[:rows]


def messy_files() -> list[str]:
    """Four sites: each has its own names, labels, units and codes; one is Excel if that is here."""
    draw = random.Random(5)
    basel, bern, lund, zurich = (visits(n, n * 1000, draw) for n in (240, 200, 180, 160))
    for number, row in enumerate(basel):
        row |= {"ef": f"{row['ef']}%", "outcome": "yes" if row["ill"] else "no"}
        row["chol"] = row["chol"] if number % 12 else 0
    for number, row in enumerate(bern):
        row |= {"chol": f"{row['chol'] / 38.67:.2f}", "outcome": int(row["ill"])}
        row["age"] = row["age"] if number % 15 else 999
    for number, row in enumerate(lund):
        row["outcome"] = "Yes" if row["ill"] else "No"
        row["trestbps"] = row["trestbps"] if number % 14 else -9
    lund += lund[5:9]
    for row in zurich:
        row["outcome"] = "yes" if row["ill"] else "no"
    names = {"age": "Age", "chol": "Chol", "trestbps": "trest_bps"}
    files = [
        save("basel", basel, {}), save("bern", bern, names), save("lund", lund, {}),
    ]  # fmt: skip
    return [*files, save_as_excel("zurich", zurich)]


def save(name: str, rows: list[dict[str, Any]], names: dict[str, str]) -> str:
    columns = [*HEADER, "outcome"]
    lines = [",".join(names.get(column, column) for column in columns)]
    lines += [",".join(str(row[column]) for column in columns) for row in rows]
    Path(f"{name}.csv").write_text("\n".join(lines) + "\n")
    return f"{name}.csv"


def save_as_excel(name: str, rows: list[dict[str, Any]]) -> str:
    if importlib.util.find_spec("python_calamine") is None:
        return save(name, rows, {})
    columns = [*HEADER, "outcome"]
    write_workbook(f"{name}.xlsx", [columns, *([row[c] for c in columns] for row in rows)])
    return f"{name}.xlsx"


def write_workbook(name: str, rows: Sequence[Sequence[Any]]) -> None:
    """The smallest Excel file: one sheet, of numbers, words, and true or false."""
    lines = []
    for number, row in enumerate(rows, 1):
        cells = [cell(f"{chr(65 + place)}{number}", value) for place, value in enumerate(row)]
        lines.append(f'<row r="{number}">{"".join(cells)}</row>')
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    sheet = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    with zipfile.ZipFile(name, "w") as book:
        book.writestr(
            "[Content_Types].xml",
            f'''{head}<Types xmlns="{package}/content-types">
<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>
<Override PartName="/xl/workbook.xml" ContentType="{sheet}.sheet.main+xml"/>
<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{sheet}.worksheet+xml"/></Types>''',
        )
        for path, kind, target in (
            ("_rels/.rels", "officeDocument", "xl/workbook.xml"),
            ("xl/_rels/workbook.xml.rels", "worksheet", "worksheets/sheet1.xml"),
        ):
            book.writestr(
                path,
                f'''{head}<Relationships xmlns="{package}/relationships">
<Relationship Id="rId1" Type="{office}/{kind}" Target="{target}"/></Relationships>''',
            )
        book.writestr(
            "xl/workbook.xml",
            f'''{head}<workbook xmlns="{main}" xmlns:r="{office}">
<sheets><sheet name="data" sheetId="1" r:id="rId1"/></sheets></workbook>''',
        )
        body = f'<worksheet xmlns="{main}"><sheetData>{"".join(lines)}</sheetData></worksheet>'
        book.writestr("xl/worksheets/sheet1.xml", head + body)


def cell(place: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f'<c r="{place}" t="b"><v>{int(value)}</v></c>'
    if isinstance(value, int | float):
        return f'<c r="{place}"><v>{value}</v></c>'
    return f'<c r="{place}" t="inlineStr"><is><t>{escape(str(value))}</t></is></c>'


def check_what_became_of_the_mess(values: dict[str, Any]) -> None:
    assert values["group"] == "patient_nbr"
    assert values["order"] == ["January", "February"]
    assert values["missing"].keys() >= {"age", "chol", "trestbps"}
    survey = tables.survey(**values)
    assert survey.classes == ("no", "yes")
    assert {column.where for column in survey.columns} == {"common", "left out"}
    kinds = {column.name: column.kind for column in survey.columns}
    assert kinds == {
        "patient_nbr": "", "age": "number", "sex": "text", "chol": "number", "trestbps": "number",
        "cp": "text", "smoker": "number", "ef": "number", "icd": "text", "seen": "date",
    }  # fmt: skip
    whole = data.load("", **values)
    chol = whole.x[:, whole.columns.index("chol")]
    middles = [float(np.nanmedian(chol[whole.group == site])) for site in range(4)]
    assert max(middles) < 1.2 * min(middles)


def test_a_new_user_goes_from_four_messy_files_to_a_verdict_in_four_commands(
    atoll: Command,
) -> None:
    code, _, told = atoll("init", *messy_files(), "--label", "outcome", "--stage", "month")
    assert code == 0
    text = Path("run.toml").read_text()
    code, _, complaint = atoll("run", "run.toml", "--quiet", "--out", "run")
    assert code == 2
    assert "look like the same class" in complaint
    assert not Path("run/result.json").exists()
    edited, edits = re.subn(r"(?m)^# (?=.*; uncomment if correct$)", "", text)
    assert edits <= 5
    assert f"{edits} suggestions in run.toml are commented out" in told
    Path("run.toml").write_text(edited)
    code, shown, _ = atoll("inspect", "run.toml")
    assert code == 0
    assert "lund has 4 duplicate rows" in shown
    assert "almost alone" not in shown  # smoker is random, and so is no suspect
    check_what_became_of_the_mess(tomllib.loads(edited)["data"])
    small = ("--set", "rounds=1", "--set", "widths=[8]", "--set", "engine.mode=loop")
    code, shown, _ = atoll("run", "run.toml", "--quiet", "--out", "run", *small)
    assert code == 0
    assert "4 clients" in shown
    overall = r"(?m)^(Joining (helps|hurts|makes)|Cannot tell whether joining helps)"
    assert re.search(overall, shown)
    for site in ("basel", "bern", "lund", "zurich"):
        assert re.search(rf"(?m)^  {site}: .*[-+][0-9.]+ points \(.* to .*\), \d+ test rows", shown)
    assert atoll("report", "run")[0] == 0


def test_init_annotates_what_it_cannot_repair(atoll: Command) -> None:
    rows = [f"{40 + i % 9}.5,{'xy'[i % 2]}" for i in range(30)]
    Path("a.csv").write_text("\n".join(["age,outcome", *rows, "41,"]) + "\n")
    code, _, told = atoll("init", "a.csv", "--label", "outcome")
    assert code == 0
    assert "fix this first: no value in the column 'outcome' (a.csv, line 32)" in told
    assert "# Fix this first: no value in the column" in Path("run.toml").read_text()
    assert atoll("inspect", "run.toml")[0] == 3


@pytest.mark.parametrize("values", [["2024-03-31"], ["V27", "414", "428", "401"], ["31.3.2024"]])
def test_init_does_not_stop_at_dates_or_codes(values: list[str], atoll: Command) -> None:
    rows = [f"{40 + i % 9}.5,{values[i % len(values)]},{'xy'[i // 4 % 2]}" for i in range(40)]
    Path("a.csv").write_text("\n".join(["age,code,outcome", *rows]) + "\n")
    assert atoll("init", "a.csv", "--label", "outcome")[::2] == (0, "")
    assert atoll("inspect", "run.toml")[0] == 0


def test_an_excel_file_without_the_library_says_so(
    atoll: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    Path("a.xlsx").write_bytes(b"PK\x03\x04")
    code, _, told = atoll("init", "a.xlsx", "--label", "outcome")
    assert code == 3
    assert "Excel" in told
    assert "pip install 'atoll[excel]'" in told


def test_excel_reads_as_csv_does() -> None:
    pytest.importorskip("python_calamine", reason="needs the extra excel")
    rows: list[list[Any]] = [
        ["n", "w", "b", "outcome"],
        [1, "u", True, 1.0],
        [2.5, None, False, 0.0],
    ]
    write_workbook("a.xlsx", [*rows, *([number, "v", True, number % 2] for number in range(6))])
    lines = ["n,w,b,outcome", "1,u,true,1", "2.5,,false,0"]
    lines += [f"{number},v,true,{number % 2}" for number in range(6)]
    Path("b.csv").write_text("\n".join(lines) + "\n")
    given = {"label": "outcome"}
    one, other = (data.load("", files=[name], **given) for name in ("a.xlsx", "b.csv"))
    assert one.columns == other.columns
    assert (one.x == other.x)[~(one.x != one.x)].all()
    assert one.classes == other.classes == ("0", "1")
    write_workbook("d.xlsx", [*rows, [7, "v", True, None]])
    with pytest.raises(UserError, match="no value in the column") as error:
        tables.survey(files=["d.xlsx"], label="outcome")
    assert error.value.where == "d.xlsx, row 3 below the names of columns"
    Path("c.xlsx").write_bytes(b"no Excel")
    with pytest.raises(UserError, match="not an Excel file"):
        tables.survey(files=["c.xlsx"], label="outcome")


def test_init_writes_configs_for_texts_and_images(atoll: Command) -> None:
    image = pytest.importorskip("PIL.Image")
    for site in "ab":
        words = ["good", "bad", "fine"]
        lines = [f'{{"text": "{words[i % 3]} day", "label": "{"pn"[i % 2]}"}}' for i in range(30)]
        Path(f"{site}.jsonl").write_text("\n".join(lines) + "\n")
        for kind in ("cat", "dog"):
            Path(site, kind).mkdir(parents=True)
            for number in range(10):
                pixels = np.full((8, 8, 3), 20 * number, dtype=np.uint8)
                image.fromarray(pixels).save(Path(site, kind, f"{number}.png"))
    assert atoll("init", "a.jsonl", "b.jsonl", "--label", "label", "-o", "texts.toml")[0] == 0
    code, shown, _ = atoll("inspect", "texts.toml")
    assert code == 0
    assert ["vocabulary", "4", "words"] in [line.split() for line in shown.splitlines()]
    assert ["a.jsonl", "30", "n:", "15,", "p:", "15", "2,", "at", "most", "2", "4"] in [
        line.split() for line in shown.splitlines()
    ]
    assert atoll("init", "a", "b", "-o", "images.toml")[0] == 0
    code, shown, _ = atoll("inspect", "images.toml")
    assert code == 0
    assert "cat: 10, dog: 10  32 x 32, 3 channels" in shown
    assert "a has 8 test rows: each is 12 points of its accuracy" in shown


@pytest.mark.parametrize(
    "data", ['{ images = ["a", "b"] }', '{ files = ["a.jsonl", "b.jsonl"], text = "text" }']
)
def test_alone_runs_on_own_images_and_texts_as_the_report_advises(data: str) -> None:
    values = tomllib.loads(f'method = "alone"\ndata = {data}')
    assert resolve(values, "alone").split == ("domains" if "images" in data else "streams")


def bank_and_shop(order: Sequence[int], label: str = "card") -> None:
    """A bank with a label and codes for missing values, and a shop with other columns."""
    draw, ids = random.Random(1), [f"C{number}" for number in range(120)]
    bank, shop = [f"customer,income,{label}"], ["customer,spent,kind,since"]
    for number, id in enumerate(ids):
        income = "999" if number % 12 == 0 else f"{draw.gauss(0, 1):.2f}"
        bank.append(f"{id},{income},{draw.choice(['Yes', 'No', '1', '0'])}")
    for number in order:
        day = f"{draw.randrange(13, 29)}.{draw.randrange(1, 13):02}.2023"
        shop.append(f"{ids[number].lower()},{draw.gauss(9, 1):.1f} ct,{draw.randrange(4)},{day}")
    Path("bank.csv").write_text("\n".join(bank) + "\n")
    Path("shop.csv").write_text("\n".join(shop) + "\n")


def test_init_writes_a_config_for_parties(atoll: Command) -> None:
    bank_and_shop(range(120))
    code, _, told = atoll("init", "bank.csv", "shop.csv", "--label", "card")
    assert (code, told) == (
        0,
        "2 suggestions in run.toml are commented out: uncomment what is correct\n",
    )
    text = Path("run.toml").read_text()
    written = tomllib.loads(text)
    assert written["method"]["name"] == "vleto"
    assert written["data"] == {
        "parties": ["bank.csv", "shop.csv"], "id": "customer", "assume_aligned": True,
        "label": "card", "missing": {"income": ["999"]}, "categorical": ["kind"],
        "dates": {"since": {"format": "day first"}}, "sites": {"shop": {}},
    }  # fmt: skip
    (labels,) = [line for line in text.splitlines() if line.startswith("# labels")]
    assert tomllib.loads(labels[2:])["labels"] == {"1": "Yes", "0": "No"}
    assert '# units = { spent = { suffix = "ct" } }' in text
    assert atoll("inspect", "run.toml")[0] == 0
    code, _, told = atoll("run", "run.toml", "--quiet")
    assert code == 2
    assert "look like the same class" in told  # a run refuses until the labels are mapped


def test_init_for_parties_names_the_command_that_aligns_them(atoll: Command) -> None:
    pytest.importorskip("private_set_intersection")
    bank_and_shop([*range(119, 29, -1)])
    code, _, told = atoll("init", "bank.csv", "shop.csv", "--label", "card", "--method", "splitnn")
    assert code == 0
    command = "atoll align bank.csv shop.csv --hub bank.csv --id customer --out aligned"
    assert f"run {command}\n" in told
    text = Path("run.toml").read_text()
    assert f"run {command}\n" in text
    values = tomllib.loads(text)["data"]
    assert values["index"] == "aligned"
    assert values["missing"] == {"income": ["999"]}  # found before files are aligned
    assert atoll(*command.split()[1:])[0] == 0
    code, shown, _ = atoll("inspect", "run.toml")
    assert code == 0
    assert "90 of 120 rows of the party with the label" in shown


def test_init_for_parties_with_a_file_for_each_stage(atoll: Command) -> None:
    bank_and_shop(range(120))
    for name in ("bank", "shop"):
        head, *rows = Path(f"{name}.csv").read_text().splitlines()
        for stage, part in enumerate((rows[:60], rows[60:]), 1):
            Path(f"{name}-{stage}.csv").write_text("\n".join([head, *part]) + "\n")
    files = ("bank=bank-1.csv,bank-2.csv", "shop=shop-1.csv,shop-2.csv")
    code, _, _ = atoll("init", *files, "--label", "card")
    assert code == 0
    values = tomllib.loads(Path("run.toml").read_text())["data"]
    assert values["parties"] == [["bank-1.csv", "bank-2.csv"], ["shop-1.csv", "shop-2.csv"]]
    assert values["assume_aligned"] is True
    code, shown, _ = atoll("inspect", "run.toml")
    assert (code, "stages" in shown) == (0, True)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("customer,income", "a table without its label has no column of its own"),
        ("customer,spent,Outcome", "the label has another spelling"),
        ("number,spent,kind", "no ids are shared"),
    ],
)
def test_init_does_not_take_sites_for_parties(header: str, why: str, atoll: Command) -> None:
    for name, names in (("a", "customer,income,outcome"), ("b", header)):
        sign = "D" if why == "no ids are shared" else "C"
        rows = [
            [f"{sign}{i}" if name == "b" else f"C{i}", f"{i % 7}.5", "pq"[i % 2]][
                : len(names.split(","))
            ]
            for i in range(60)
        ]
        Path(f"{name}.csv").write_text("\n".join([names, *map(",".join, rows)]) + "\n")
    assert atoll("init", "a.csv", "b.csv", "--label", "outcome")[0] == 0, why
    values = tomllib.loads(Path("run.toml").read_text())["data"]
    assert values["files"] == ["a.csv", "b.csv"], why


def test_init_takes_the_column_of_ids(atoll: Command) -> None:
    for name in ("a", "b"):
        rows = [f"{name}{i % 9},{i}.5,{'pq'[i % 2]}" for i in range(60)]
        Path(f"{name}.csv").write_text("\n".join(["ward,x,outcome", *rows]) + "\n")
    assert atoll("init", "a.csv", "b.csv", "--label", "outcome", "--id", "ward")[0] == 0
    assert tomllib.loads(Path("run.toml").read_text())["data"]["id"] == "ward"


def test_alone_on_parties_names_methods_that_can(atoll: Command) -> None:
    for name, header in (("a", "id,x,outcome"), ("b", "id,z,w")):
        rows = [f"{i},{i % 7}.5,{'pq'[i % 2] if name == 'a' else i % 5}" for i in range(40)]
        Path(f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    data = '{ parties = ["a.csv", "b.csv"], label = "outcome", assume_aligned = true }'
    Path("run.toml").write_text(f'method = "alone"\ndata = {data}\n')
    code, _, told = atoll("run", "run.toml", "--quiet")
    assert code == 2
    assert "'alone' needs whole rows" in told
    assert "use splitnn or vleto; for one party alone, give its table as data.files" in told
    Path("run.toml").write_text(f'method = "splitnn"\ndata = {data}\n')
    code, shown, _ = atoll("inspect", "run.toml")
    assert code == 0
    assert ["1-b", "z,", "w"] in [line.split() for line in shown.splitlines()]
    assert "40 of 40 rows of the party with the label" in shown


def test_inspect_of_files_that_share_no_column_names_the_file_without_the_label(
    atoll: Command,
) -> None:
    for name, header in (("a", "x,outcome"), ("b", "z,result")):
        rows = [f"{i % 7}.5,{'pq'[i % 2]}" for i in range(30)]
        Path(f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    given = 'files = ["a.csv", "b.csv"]\nlabel = "outcome"'
    Path("run.toml").write_text(f'method = "chfl"\n[data]\n{given}\n')
    code, _, told = atoll("inspect", "run.toml")
    assert code == 3
    assert "no column 'outcome' for the label" in told
    assert "where: b.csv" in told


def test_inspect_shows_which_classes_and_columns_come_when(atoll: Command) -> None:
    lines = ["age,lab,month,outcome"]
    for i in range(90):
        month, label = ("January", "pq"[i % 2]) if i < 45 else ("February", "pqr"[i % 3])
        lines.append(f"{i % 7}.5,{i % 5 if month == 'February' else ''},{month},{label}")
    Path("a.csv").write_text("\n".join(lines) + "\n")
    assert atoll("init", "a.csv", "--label", "outcome", "--stage", "month")[0] == 0
    code, shown, _ = atoll("inspect", "run.toml")
    assert code == 0
    cells = [" ".join(line.split()) for line in shown.splitlines()]
    assert "January 45 p: 23, q: 22 + age" in cells
    assert "February 45 p: 15, q: 15, r: 15 + lab" in cells


def test_init_and_inspect_name_what_mends_files_without_a_common_column(atoll: Command) -> None:
    for name, header in (("a", "Age,Chol,outcome"), ("b", "age,chol,outcome")):
        rows = [f"{40 + i % 37}.5,{180 + i % 41}.5,{'pq'[i % 2]}" for i in range(60)]
        Path(f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    code, _, told = atoll("init", "a.csv", "b.csv", "--label", "outcome")
    assert code == 0
    assert "no common column" in told
    assert "uncommenting the suggestions below solves this: check them first" in told
    code, shown, complaint = atoll("inspect", "run.toml")
    assert code == 3
    assert 'write rename = { Age = "age", Chol = "chol" }' in shown
    assert "no common column" in complaint
    text = Path("run.toml").read_text()
    Path("run.toml").write_text(re.sub(r"(?m)^# (?=.*; uncomment if correct$)", "", text))
    assert atoll("inspect", "run.toml")[0] == 0


@pytest.mark.parametrize("other", ["patient_id", "KundenNr"])
def test_ids_of_parties_may_have_other_names(other: str, atoll: Command) -> None:
    for name, header in (("a", "PatientID,age,outcome"), ("b", f"{other},lab,dose")):
        rows = [f"P{i},{i % 7}.5,{'pq'[i % 2]}" for i in range(60)]
        Path(f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    assert atoll("init", "a.csv", "b.csv", "--label", "outcome")[::2] == (0, "")
    values = tomllib.loads(Path("run.toml").read_text())["data"]
    assert values["parties"] == ["a.csv", "b.csv"]
    assert (values["id"], values["assume_aligned"]) == ("PatientID", True)
    assert values["sites"] == {"b": {"rename": {other: "PatientID"}}}
    code, shown, _ = atoll("inspect", "run.toml")
    assert code == 0
    assert "60 of 60 rows of the party with the label" in shown


def test_ids_with_other_names_are_aligned_by_the_command_that_init_prints(atoll: Command) -> None:
    pytest.importorskip("private_set_intersection")
    for name, header, ids in (
        ("a", "nr,age,outcome", range(60)),
        ("b", "id,lab", range(70, 9, -1)),
    ):
        rows = [f"P{i},{i % 7}.5{',' + 'pq'[i % 2] if name == 'a' else ''}" for i in ids]
        Path(f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    code, _, told = atoll("init", "a.csv", "b.csv", "--label", "outcome", "--id", "id")
    assert code == 0
    command = "atoll align a.csv b.csv --hub a.csv --id nr --id id --out aligned"
    assert f"run {command}\n" in told
    assert atoll(*command.split()[1:])[0] == 0
    code, shown, _ = atoll("inspect", "run.toml")
    assert code == 0
    assert "50 of 60 rows of the party with the label" in shown
    code, _, told = atoll("align", "a.csv", "b.csv", "--hub", "a.csv", *["--id", "nr"] * 3)
    assert (code, "2 files, but 3 columns of ids" in told) == (2, True)


def test_a_folder_of_files_stands_for_them(atoll: Command) -> None:
    Path("notes").mkdir()
    for site in "ab":
        lines = [f'{{"text": "good {i % 3} day", "label": "{"pn"[i % 2]}"}}' for i in range(30)]
        Path("notes", f"{site}.jsonl").write_text("\n".join(lines) + "\n")
    assert atoll("init", "notes", "--label", "label")[0] == 0
    values = tomllib.loads(Path("run.toml").read_text())["data"]
    assert values["files"] == ["notes/a.jsonl", "notes/b.jsonl"]
    assert values["text"] == "text"
    Path("run.toml").unlink()
    other = Path("notes", "b.jsonl").read_text().replace('"text"', '"note"')
    Path("notes", "a.jsonl").write_text(other)
    code, _, told = atoll("init", "notes", "--label", "label")
    assert (code, "name the column of texts with --text" in told) == (0, True)


def test_a_folder_of_tables_may_have_notes_and_hidden_entries(atoll: Command) -> None:
    Path("sites", ".ipynb_checkpoints").mkdir(parents=True)
    rows = [f"{40 + i % 9}.5,{'xy'[i % 2]}" for i in range(40)]
    for name in ("sites/a.csv", "sites/._a.csv", "sites/c.txt"):
        Path(name).write_text("\n".join(["age,outcome", *rows]) + "\n")
    table = pa.table({"age": [40.5 + i % 9 for i in range(40)], "outcome": ["x", "y"] * 20})
    pq.write_table(table, "sites/b.pq")
    assert atoll("init", "sites", "--label", "outcome")[0] == 0
    values = tomllib.loads(Path("run.toml").read_text())["data"]
    assert values["files"] == ["sites/a.csv", "sites/b.pq"]
    for name in ("run.toml", "sites/a.csv", "sites/b.pq"):
        Path(name).unlink()
    assert atoll("init", "sites", "--label", "outcome")[0] == 0
    assert tomllib.loads(Path("run.toml").read_text())["data"]["files"] == ["sites/c.txt"]


def test_init_offers_regression_where_a_few_numbers_are_classes(atoll: Command) -> None:
    rows = [f"{40 + i % 9}.5,{1 + i % 17}" for i in range(80)]
    Path("a.csv").write_text("\n".join(["age,days", *rows]) + "\n")
    assert atoll("init", "a.csv", "--label", "days")[0] == 0
    text = Path("run.toml").read_text()
    why = "label 'days' has 17 distinct numbers, read as classes; set this if they are quantities"
    assert f'# task = "regression"   # {why}; uncomment if correct' in text
    assert "task" not in tomllib.loads(text)["data"]


def test_init_asks_about_a_column_that_predicts_the_label_alone(atoll: Command) -> None:
    draw = random.Random(1)
    lines = ["age,key,seen,stent,outcome"]
    for number in range(120):
        ill = draw.random() < 0.4
        lines.append(f"{draw.gauss(60, 10):.1f},k{number},{number},{int(ill)},{'ny'[ill]}")
    Path("a.csv").write_text("\n".join(lines) + "\n")
    code, _, told = atoll("init", "a.csv", "--label", "outcome")
    assert code == 0
    assert "1 suggestion in run.toml is commented out" in told
    text = Path("run.toml").read_text()
    question = "# predicts the label almost alone: is it known before the outcome? uncomment if not"
    assert f'# "stent",   {question}\n' in text
    config = tomllib.loads(text)["data"]
    assert (config["id"], config["ignore"]) == ("key", ["seen"])
    assert "'stent' at a predicts the label almost alone" in atoll("inspect", "run.toml")[1]
    edited = re.sub(r"(?m)^# (?=.* uncomment if not$)", "", text)
    assert tomllib.loads(edited)["data"]["ignore"] == ["seen", "stent"]

    rows = [",".join(line.split(",")[i] for i in (0, 3, 4)) for line in lines]
    Path("b.csv").write_text("\n".join(rows) + "\n")
    assert atoll("init", "b.csv", "--label", "outcome", "-o", "b.toml")[0] == 0
    assert f'# ignore = ["stent"]   {question}\n' in Path("b.toml").read_text()
