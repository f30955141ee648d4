"""Own tables: what is found in files, what becomes of it, and how bad files are answered."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from atoll import data
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.options import build
from atoll.data import splits
from atoll.data.own import encoding, sheets, tables
from atoll.data.own.suggestions import suggest
from atoll.data.own.survey import read_contents
from atoll.data.splits import split

HEAD = "age,sex,outcome"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, header: str, rows: list[str], encoding: str = "utf-8") -> str:
    Path(name).write_text("\n".join([header, *rows]) + "\n", encoding=encoding)
    return name


def people(name: str, count: int = 12, header: str = HEAD, more: str = "") -> str:
    """A good file: age, sex, both outcomes."""
    rows = [
        f"{40 + i % 7}.5,{'fm'[i % 2]}{more},{'ill' if i % 3 else 'well'}" for i in range(count)
    ]
    return write(name, header, rows)


def look(*files: str, **options: Any) -> tables.Survey:
    return tables.survey(files=list(files), label="outcome", **options)


def told(error: pytest.ExceptionInfo[UserError]) -> tuple[str, str]:
    assert error.value.exit_code == EXIT_DATA_MISSING
    assert error.value.remedy
    return error.value.what, error.value.where


def columns(found: tables.Survey) -> dict[str, str]:
    return {column.name: column.where for column in found.columns}


def findings(found: tables.Survey) -> str:
    return "\n".join(f"{one.what} -> {one.action}" for one in found.findings)


def suggested(*files: str, **options: Any) -> str:
    """What `atoll inspect` suggests."""
    given = build(tables.TableOptions, {"files": list(files), "label": "outcome", **options}, "")
    return "\n".join(f"{one.why} -> {one.text}" for one in suggest(read_contents(given)))


def test_columns_are_common_by_name_and_type_and_own_otherwise() -> None:
    people("a.csv", header="age,sex,lab,outcome", more=",1")
    people("b.csv", header="age,sex,mri,outcome", more=",2")
    found = look("a.csv", "b.csv")
    assert columns(found) == {"age": "common", "sex": "common", "lab": "own", "mri": "own"}
    made = data.load("", files=["a.csv", "b.csv"], label="outcome")
    assert made.columns == ("age", "sex=f", "sex=m", "lab (a)", "mri (b)")
    assert made.layout is not None
    assert made.layout.held.tolist() == [[True] * 4 + [False], [True] * 3 + [False, True]]
    assert made.x[0].tolist() == [40.5, 1, 0, 1, 0]
    assert made.x[13].tolist() == [41.5, 0, 1, 0, 2]
    assert made.classes == ("ill", "well")
    assert made.groups == ("a", "b")


def test_a_missing_value_is_marked_and_a_column_says_so() -> None:
    write("a.csv", HEAD, ["1,f,x", "NA,,y", "3,m,x", "?,f,y", "5,f,x"])
    made = data.load("", files=["a.csv"], label="outcome")
    assert made.columns == ("age", "age missing", "sex=f", "sex=m", "sex missing")
    assert np.isnan(made.x[1, 0])
    assert made.x[1, 1:].tolist() == [1, 0, 0, 1]
    assert made.x[0].tolist() == [1, 0, 1, 0, 0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_encoding_and_delimiter_are_found_out(encoding: str, delimiter: str) -> None:
    rows = [f"{i},{'män' if i % 2 else 'kvinna'},{'sjuk' if i % 3 else 'frisk'}" for i in range(9)]
    lines = [line.replace(",", delimiter) for line in ["ålder,kön,outcome", *rows]]
    write("a.csv", lines[0], lines[1:], encoding)
    made = data.load("", files=["a.csv"], label="outcome")
    assert made.columns == ("ålder", "kön=kvinna", "kön=män")
    assert made.x[:, 0].tolist() == list(range(9))


def test_a_delimiter_is_one_sign_or_the_word_tab() -> None:
    write("a.csv", "age\toutcome", ["1\tx", "2\ty", "3\tx"])
    for sign in ("tab", "\\t", "\t"):
        made = data.load("", files=["a.csv"], label="outcome", delimiter=sign)
        assert made.x[:, 0].tolist() == [1, 2, 3]
    for sign in (";;", "§", '"', "\n"):
        with pytest.raises(UserError, match="cannot separate columns"):
            look("a.csv", delimiter=sign)


def test_a_name_in_quotes_may_go_over_two_lines() -> None:
    write("a.csv", '"age\n(years)","a ""b""",outcome', ["1,2,x", "2,3,y", "3,4,x"])
    made = data.load("", files=["a.csv"], label="outcome")
    assert made.columns == ("age (years)", 'a "b"')
    assert made.x[:, 0].tolist() == [1, 2, 3]
    assert sheets.line_of(sheets.opened(Path("a.csv")), 0) == "a.csv, line 3"
    write("b.csv", 'inches ",outcome', ['1 ",x', '2 ",y', '3 ",x'])
    assert sheets.opened(Path("b.csv")).columns == ('inches "', "outcome")


def test_a_decimal_comma_is_read_where_semicolons_part_columns() -> None:
    write("a.csv", "age;outcome", ["1,5;x", "2,25;y", "3;x"])
    assert data.load("", files=["a.csv"], label="outcome").x[:, 0].tolist() == [1.5, 2.25, 3.0]


def test_parquet_reads_as_csv_does() -> None:
    write(
        "a.csv",
        "n,w,d,b,outcome",
        [
            f"{i}.5,{'uv'[i % 2]},2024-01-0{i + 1},{'true' if i % 2 else 'false'},{i % 2}"
            for i in range(6)
        ],
    )
    table = pa.table({
        "n": [i + 0.5 for i in range(6)],
        "w": pa.array([["u", "v"][i % 2] for i in range(6)]).dictionary_encode(),
        "d": [datetime.date(2024, 1, i + 1) for i in range(6)],
        "b": [bool(i % 2) for i in range(6)],
        "outcome": [float(i % 2) for i in range(6)],
    })  # fmt: skip
    pyarrow.parquet.write_table(table, "b.parquet")
    text = data.load("", files=["a.csv"], label="outcome")
    same = data.load("", files=["b.parquet"], label="outcome")
    assert text.columns == same.columns == ("n", "w=u", "w=v", "d", "b")
    assert text.classes == same.classes == ("0", "1")
    np.testing.assert_array_equal(text.x, same.x)
    assert text.x[0, 3] == (datetime.date(2024, 1, 1) - datetime.date(1970, 1, 1)).days


def test_digits_with_the_type_of_text_stay_text_in_parquet() -> None:
    """Codes; numbers and dates that are written as text are still what they are."""
    zips = ["0412", "1201", None, "0412"]
    table = pa.table({
        "zip": zips, "ward": pa.array(["3", "3", "4", "4"]).dictionary_encode(),
        "count": [3, 3, 4, 4], "lab": ["1.5", "2", "3", "4.25"], "share": ["10", "20", "30", "40"],
        "seen": ["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04"],
        "outcome": ["1", "0", "1", "0"],
    })  # fmt: skip
    pyarrow.parquet.write_table(table, "b.parquet")
    units = {"share": {"factor": 1.0}}
    survey = tables.survey(files=["b.parquet"], label="outcome", units=units)
    kinds = {column.name: column.kind for column in survey.columns}
    assert kinds == {
        "zip": "text", "ward": "text", "count": "number", "lab": "number", "share": "number",
        "seen": "date",
    }  # fmt: skip
    found = data.load("", files=["b.parquet"], label="outcome")
    assert found.columns[:4] == ("zip=0412", "zip=1201", "zip missing", "ward=3")
    assert found.classes == ("0", "1")


def test_a_missing_number_in_parquet_is_missing() -> None:
    table = pa.table({"n": [1.0, float("nan"), None], "outcome": ["x", "y", "x"]})
    pyarrow.parquet.write_table(table, "b.parquet")
    found = data.load("", files=["b.parquet"], label="outcome").x
    assert np.isnan(found[:, 0]).tolist() == [False, True, True]
    assert found[:, 1].tolist() == [0, 1, 1]


def test_one_file_with_a_site_column_has_a_site_for_each_value() -> None:
    rows = [
        f"{i},{i if i % 2 else ''},{'north' if i % 2 else 'south pole'},{'xy'[i % 3 % 2]}"
        for i in range(20)
    ]
    write("all.csv", "age,lab,place,outcome", rows)
    found = look("all.csv", site="place")
    assert [(site.name, site.rows) for site in found.sites] == [("north", 10), ("south-pole", 10)]
    assert columns(found) == {"age": "common", "lab": "own"}
    made = data.load("", files=["all.csv"], label="outcome", site="place")
    dealt = split(made, splits.load("files").options(), 0)
    assert dealt.clients == ("north", "south-pole")
    assert [len(dealt.holdings[id][0].own) for id in dealt.clients] == [1, 0]


def test_a_stage_column_makes_it_continual() -> None:
    rows = [f"{i},{'ab'[i % 2]},{2019 + i // 10},{'xy'[i % 3 % 2]}" for i in range(20)]
    write("all.csv", "age,sex,year,outcome", rows)
    made = data.load("", files=["all.csv"], label="outcome", stage="year")
    dealt = split(made, splits.load("files").options(), 0)
    assert (dealt.stages, dealt.tasks, dealt.known_at) == (2, ("2019", "2020"), (0, 1))
    assert dealt.holdings["all"][0].train.max() < 10 <= dealt.holdings["all"][1].train.min()


def test_local_levels_keep_every_word_at_home() -> None:
    people("a.csv")
    people("b.csv")
    found = look("a.csv", "b.csv", levels="local")
    assert columns(found) == {"age": "common", "sex": "own"}
    assert not any("levels" in line for line in found.crossing)
    assert any("levels" in line for line in look("a.csv", "b.csv").crossing)


def test_suspicions_are_told_with_what_is_done() -> None:
    rows = [
        f"{i + 7},{i * 1000 + 1},{'f' if i % 2 else 'm'},{i % 3 % 2},{i % 3 % 2}" for i in range(30)
    ]
    write("a.csv", "patient_id,weight,sex,after,outcome", rows)
    rows = [f"x{i},{i + 1},{'F' if i % 2 else 'M'},{i % 2},{i % 3 % 2}" for i in range(30)]
    write("b.csv", "patient_id,weight,sex,after,outcome", rows)
    said = findings(look("a.csv", "b.csv"))
    assert "'patient_id' looks like an identifier or free text -> left out" in said
    assert "'weight' is about 935 times" not in said  # it counts rows at b
    assert "'sex' has levels that some sites lack: F, M, f, m; some differ only in case" in said
    leak = "'after' at a predicts the label almost alone: is it known before the outcome? -> kept"
    assert leak in said


@pytest.mark.parametrize(
    ("codes", "shift"),
    [
        ({"a": "0123", "b": "1234", "c": "0123"}, "1 to 4 at b, 0 to 3 at a"),
        ({"a": "01", "b": "12"}, "1, 2 at b, 0, 1 at a"),
        ({"a": "0123", "b": "123"}, ""),
        ({"a": "0", "b": "1"}, ""),
        ({"a": "0123", "b": "0123"}, ""),
        ({"a": "0123", "b": "123x"}, ""),
    ],
)
def test_codes_that_are_shifted_by_one_at_a_site_are_reported(
    codes: dict[str, str], shift: str
) -> None:
    for site, own in codes.items():
        rows = [f"{i}.5,{own[i % len(own)]},{'xy'[i // 4 % 2]}" for i in range(40)]
        write(f"{site}.csv", "age,cp,outcome", rows)
    findings = look(*(f"{site}.csv" for site in codes), categorical=["cp"]).findings
    expected = [f"'cp' has codes that differ by one: {shift}"] if shift else []
    found = [one for one in findings if "differ by one" in one.what]
    assert [one.what for one in found] == expected
    for one in found:
        assert one.action == "one site may count from 1: check, and if so map its codes with values"


@pytest.mark.parametrize("value", ["{}", "2024-03-{:02}", "word{}"])
def test_whether_a_column_has_a_value_may_give_the_label_away(value: str) -> None:
    for name, sparse in (("a.csv", 1), ("b.csv", 1), ("c.csv", 7)):
        rows = []
        for i in range(80):
            after = value.format(1 + i % 11) if i % 2 < sparse and i % sparse == i % 2 else ""
            rows.append(f"{i % 9},{after},{'xy'[i % 2]}")
        write(name, "age,after,outcome", rows)
    found = [finding.what for finding in look("a.csv", "b.csv", "c.csv").findings]
    question = "predicts the label almost alone: is it known before the outcome?"
    assert f"whether 'after' has a value at a, b {question}" in found


def test_a_factor_of_ten_between_sites_is_told() -> None:
    write("a.csv", "w,outcome", [f"{i + 1},{i % 2}" for i in range(10)])
    write("b.csv", "w,outcome", [f"{11 * (i + 1)},{i % 2}" for i in range(10)])
    what = (
        "'w' is about 11 times larger at b than at a: a different unit? -> units = { w = { factor"
    )
    assert what in suggested("a.csv", "b.csv")
    write("b.csv", "w,outcome", [f"{9.7 * (i + 1):.1f},{i % 2}" for i in range(10)])
    assert "units = { w = { factor = 0.1 } }" in suggested("a.csv", "b.csv")  # g/l and g/dl
    write("b.csv", "w,outcome", [f"{7 * (i + 1)},{i % 2}" for i in range(10)])
    assert suggested("a.csv", "b.csv") == ""


def test_a_column_of_two_types_is_own_at_each_site() -> None:
    write("a.csv", "w,v,outcome", [f"{i},1,{i % 2}" for i in range(10)])
    write("b.csv", "w,v,outcome", [f"{i},{'yes' if i % 2 else 'no'},{i % 2}" for i in range(10)])
    found = look("a.csv", "b.csv")
    assert columns(found) == {"w": "common", "v": "own"}
    assert "'v' is number at a, text at b -> an own column at each site; if they" in findings(found)
    (treatment,) = [column.treatment for column in found.columns if column.name == "v"]
    assert treatment == "at a scaled; at b one-hot, 2 levels"


def test_a_site_may_lack_a_class() -> None:
    people("a.csv")
    write("b.csv", HEAD, [f"{i},f,ill" for i in range(9)])
    assert "b has no row of the class well" in findings(look("a.csv", "b.csv"))


def test_pieces_of_any_size_give_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{i * 37 % 101},{'abc'[i % 3]},{'xy'[i % 2]}" for i in range(3_000)]
    write("a.csv", HEAD, rows)
    whole = data.load("", files=["a.csv"], label="outcome")
    monkeypatch.setattr(sheets, "BLOCK", 1_000)  # bytes: many pieces
    sheet = sheets.opened(Path("a.csv"))
    assert sum(1 for _ in sheets.batches(sheet, ())) > 10
    assert data.load("", files=["a.csv"], label="outcome").fingerprint == whole.fingerprint


BAD = {
    "empty": ("", "the file is empty", "a.csv"),
    "header only": (f"{HEAD}\n", "a header and no rows", "a.csv"),
    "duplicate column": ("age,age,outcome\n1,2,x\n", "the column 'age' is there twice", "a.csv"),
    "no name": (",age,outcome\n0,1,x\n", "column 1 has no name", "a.csv"),
    "no label column": ("age,out\n1,x\n", "no column 'outcome' for the label", "a.csv"),
    "no label value": ("age,outcome\n1,x\n2,NaN\n", "no value in the column", "a.csv, line 3"),
    "one class": ("age,outcome\n1,x\n2,x\n", "every row has the same label", "column 'outcome'"),
    "ragged row": ("age,outcome\n1,x\n2,y,z\n", "row 2 has 3 cells, the header has 2", "a.csv"),
    "not text": ("age,outcome\n\0\0,x\n", "not a text file", "a.csv"),
    "too large": ("age,outcome\n1,x\n1e40,y\n", "'1e40' in the column 'age' is", "a.csv, line 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_answered_by_name(case: str) -> None:
    content, what, where = BAD[case]
    Path("a.csv").write_text(content)
    with pytest.raises(UserError) as error:
        look("a.csv")
    said = told(error)
    assert said[0].startswith(what)
    assert said[1] == where


@pytest.mark.parametrize(
    ("name", "content", "kind", "remedy"),
    [
        ("a.csv", b"%PDF-1.4\n1 0 obj\n", "a PDF", "export it as CSV, Parquet or Excel"),
        ("a.pdf", b"%PDF-1.7\n\xe2\xe3\n", "a PDF", "export it as CSV, Parquet or Excel"),
        ("a.txt", b"{\\rtf1\\ansi age}", "an RTF document", "export it as CSV, Parquet or Excel"),
        ("a.xls", b"\n <HTML><table>", "an HTML page", "save it as CSV or Excel (.xlsx)"),
        ("a.csv", b"\xef\xbb\xbf<!doctype html", "an HTML page", "save it as CSV or Excel (.xlsx)"),
        ("a.xls", b'<?xml version="1.0"?>', "an XML file", "save it as CSV or Excel (.xlsx)"),
        ("a.csv", b"PK\x03\x04\0", "a ZIP archive", "unpack it; if it is Excel, name it .xlsx"),
        ("a.csv", b"\x1f\x8b\x08\0", "a gzip file", "unpack it"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_called_what_it_is(
    name: str, content: bytes, kind: str, remedy: str
) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(UserError) as error:
        look(name)
    assert told(error) == (f"this is {kind}, not a table", name)
    assert error.value.remedy == remedy


def test_a_header_may_begin_as_other_kinds_of_files_do() -> None:
    write("a.csv", "%PDF share,PK,outcome", [f"{i},{i % 3},{'xy'[i % 2]}" for i in range(8)])
    assert [column.name for column in look("a.csv").columns] == ["%PDF share", "PK"]


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (",age,outcome\n0,1,x\n",
         "name it, or write the file without an index (pandas: index=False)"),
        ("Heart clinic,,\nage,sex,outcome\n1,m,x\n",
         "the first row has the names of columns: remove what stands above them"),
        ('age,outcome\n1\n', "fix the row; a value that contains the delimiter needs quotes"),
    ],
)  # fmt: skip
def test_a_table_without_a_whole_header_says_what_to_remove(content: str, remedy: str) -> None:
    Path("a.csv").write_text(content)
    with pytest.raises(UserError) as error:
        look("a.csv")
    assert error.value.remedy == remedy
    assert "1 cells" not in error.value.what


def test_text_among_numbers_is_answered_with_file_and_line() -> None:
    rows = [f'{i},"two\nlines",{"xy"[i % 2]}' for i in range(20)]
    rows[15] = "fifteen,z,x"
    write("a.csv", HEAD, rows)
    with pytest.raises(UserError) as error:
        look("a.csv")
    what, where = told(error)
    assert what == "the text 'fifteen' in the column 'age', which has numbers otherwise"
    lines = Path("a.csv").read_text().splitlines()
    assert where == f"a.csv, line {lines.index('fifteen,z,x') + 1}"
    look("a.csv", categorical=["age"])  # what the remedy says
    look("a.csv", missing=["fifteen"])


def test_no_common_column_is_said() -> None:
    write("a.csv", "p,outcome", ["1,x", "2,y"])
    write("b.csv", "q,outcome", ["1,x", "2,y"])
    with pytest.raises(UserError, match="no common column"):
        look("a.csv", "b.csv")


def test_a_label_that_one_site_lacks_is_told_with_its_file() -> None:
    people("a.csv")
    people("b.csv", header="age,sex,outcom")
    with pytest.raises(UserError, match="no column 'outcome'") as error:
        look("a.csv", "b.csv")
    assert told(error)[1] == "b.csv"
    assert "did you mean 'outcom'?" in error.value.remedy


def test_a_label_with_a_word_for_every_row_is_refused() -> None:
    write("a.csv", "age,outcome", [f"1,w{i}" for i in range(60)])
    with pytest.raises(UserError, match="60 different values in 60 rows"):
        look("a.csv")


def test_a_site_with_one_row_is_refused_by_name() -> None:
    people("a.csv")
    write("b.csv", HEAD, ["40,f,ill"])
    made = data.load("", files=["a.csv", "b.csv"], label="outcome")
    with pytest.raises(UserError, match="site 'b' has too few rows: 1"):
        split(made, splits.load("files").options(), 0)


def test_own_tables_are_dealt_out_by_file_alone() -> None:
    made = data.load("", files=[people("a.csv")], label="outcome")
    with pytest.raises(UserError, match="cannot be dealt out by split = 'columns'"):
        split(made, splits.load("columns").options(), 0)
    wine = data.load("wine")
    with pytest.raises(UserError, match="'wine' is not made of files"):
        split(wine, splits.load("files").options(), 0)


def test_dates_of_another_form_are_refused_by_name() -> None:
    write("a.csv", "age,seen,outcome", [f"{i},{i + 1}.3.2024,{'xy'[i % 2]}" for i in range(12)])
    with pytest.raises(UserError, match="'seen' has dates such as"):
        look("a.csv")
    assert columns(look("a.csv", ignore=["seen"])) == {"age": "common", "seen": "left out"}
    write("b.csv", "age,seen,outcome", [f"{i},2024-03-1{i},{'xy'[i % 2]}" for i in range(9)])
    with pytest.raises(UserError, match="'seen' has dates"):
        look("b.csv", dates="refuse")


def test_days_are_counted_from_1970_and_no_day_is_made_up() -> None:
    text = pa.array(["1970-01-02", "1969-12-31T12:00:00Z", "2024-02-31", "9999-12-31", None])
    assert encoding.as_dates(text).to_pylist() == [1.0, -0.5, None, 2932896.0, None]


@pytest.mark.parametrize(
    ("value", "sort"),
    [
        (lambda i: f"{i}.5" if i % 5 else "<0.5", "a number after a sign such as <"),
        (lambda i: f'"{i + 1},234"', "a number with grouped digits"),
        (lambda i: f"{i} mg", "a number with a unit"),
        (lambda i: f"{i}.5" if i % 5 else "low", "a word"),
    ],
)
def test_words_among_numbers_at_one_site_are_said_to_be_the_cause(
    value: Callable[[int], str], sort: str
) -> None:
    rows = [(i % 7, value(i), "xy"[i % 2]) for i in range(60)]
    write("a.csv", "age,lab,outcome", [f"{age},{age}.5,{y}" for age, _, y in rows])
    write("b.csv", "age,lab,outcome", [f"{age},{lab},{y}" for age, lab, y in rows])
    found = look("a.csv", "b.csv")
    assert columns(found)["lab"] == "left out"
    what = f"'lab' has numbers elsewhere and {sort} at b (b.csv, line 2) -> left out; to use it"
    assert what in findings(found)
    assert "identifier" not in findings(found)


def test_classes_that_differ_in_capitals_or_blanks_are_told() -> None:
    people("a.csv")
    write("b.csv", HEAD, [f"{i % 7}.5,{'fm'[i % 2]},{['Ill', 'wel l'][i % 2]}" for i in range(12)])
    told = suggested("a.csv", "b.csv")
    assert "labels that may mean the same class: wel l and well, Ill and ill" in told
    assert 'labels = { "wel l" = "well", Ill = "ill" }' in told
    assert suggested("a.csv") == ""


def test_codes_that_begin_with_0_are_told() -> None:
    write("a.csv", HEAD, [f"0{3012 + i % 5},{'fm'[i % 2]},{'xy'[i % 3 == 0]}" for i in range(12)])
    told = suggested("a.csv")
    assert "few distinct integers, or codes: age" in told
    assert 'categorical = ["age"]' in told
    assert suggested("a.csv", categorical=["age"]) == ""
    people("b.csv")
    assert suggested("b.csv") == ""


def test_numbers_far_from_0_that_hardly_differ_are_told_apart() -> None:
    start = datetime.datetime(2024, 3, 31, 12)
    rows = [
        f"{1_700_000_000 + i % 60},{start + datetime.timedelta(seconds=i % 60)},{'xy'[i % 2]}"
        for i in range(120)
    ]
    write("a.csv", "seen,when,outcome", rows)
    made = data.load("", files=["a.csv"], label="outcome")
    assert made.x[:, 0].tolist() == [i % 60 for i in range(120)]
    assert np.allclose(made.x[:, 1] * encoding.DAY, [i % 60 for i in range(120)], atol=1e-3)
    assert made.layout is not None
    assert made.layout.recipe["blocks"][0]["offset"] == 1_700_000_000
    block = encoding.Block.of(made.layout.recipe["blocks"][0])
    again = encoding.encoded(block, pa.array(["1700000007", None]), comma=False)
    assert again[0, 0] == 7
    assert np.isnan(again[1, 0])


def test_other_numbers_are_taken_as_they_are() -> None:
    assert encoding.offset(2023, 2024) == 0
    assert encoding.offset(5, 5) == 0
    assert encoding.offset(-1e30, 1e30) == 0


def test_nested_parquet_is_refused_by_column() -> None:
    table = pa.table({"n": [1, 2], "list": [[1], [2]], "outcome": ["x", "y"]})
    pyarrow.parquet.write_table(table, "b.parquet")
    with pytest.raises(UserError, match="the column 'list' has the type list"):
        look("b.parquet")
    Path("b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="not a Parquet file"):
        look("b.parquet")


def test_a_file_that_changes_while_it_is_read_is_noticed() -> None:
    people("a.csv", 50)
    sheet = sheets.opened(Path("a.csv"))
    pieces = sheets.batches(sheet, ())
    next(pieces)
    os.utime("a.csv", ns=(0, 0))
    with pytest.raises(UserError, match="changed while it was read"):
        list(pieces)


@pytest.mark.parametrize("files", [["a b.csv", "a-b.csv"], ["server.csv"], ["a.csv", "x/a.csv"]])
def test_two_parts_of_one_name_are_refused(files: list[str]) -> None:
    Path("x").mkdir()
    for name in files:
        people(name)
    with pytest.raises(UserError, match="two parts would be called"):
        look(*files)


def test_a_file_given_twice_is_refused() -> None:
    people("a.csv")
    with pytest.raises(UserError, match="two parts would be called 'a'"):
        look("a.csv", "a.csv")
    for files in ({"x": ["a.csv"], "y": ["./a.csv"]}, {"x": ["a.csv", "a.csv"]}):
        with pytest.raises(UserError, match="the same file is given twice"):
            tables.survey(files=files, label="outcome")


def test_a_file_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(UserError, match="no such file") as error:
        look("nowhere.csv")
    assert told(error)[1] == "nowhere.csv"
    with pytest.raises(UserError, match="not a file"):
        look(".")


def test_options_that_make_no_sense_are_refused() -> None:
    people("a.csv")
    for options, what in (
        ({"files": [], "label": "outcome"}, "no files"),
        ({"files": ["a.csv"]}, "no label"),
        ({"files": ["a.csv", "a.csv"], "label": "outcome", "site": "sex"}, "a site column and"),
        ({"files": ["a.csv"], "label": "outcome", "keep": ["agee"]}, "no site has a column 'agee'"),
        ({"files": ["a.csv"], "label": "outcome", "ignore": ["Sex"]}, "did you mean 'sex'"),
        ({"files": ["a.csv"], "label": "outcome", "ignore": ["outcome"]}, "ignore names the label"),
        ({"files": ["a.csv"], "label": "sex", "site": "sex"}, "'sex' is the label and the site"),
        ({"files": ["a.csv"], "label": "outcome", "delimeter": ";"}, "unknown option"),
    ):
        with pytest.raises(UserError, match=what):
            tables.survey(**options)


def test_codes_that_identify_rows_are_left_out_though_they_are_categorical() -> None:
    header = "age,code,outcome"
    for name in ("a.csv", "b.csv"):
        rows = [f"{40 + i % 7},0{100 + i},{'ill' if i % 3 else 'well'}" for i in range(30)]
        write(name, header, rows)
    survey = look("a.csv", "b.csv", categorical=["code"])
    assert columns(survey)["code"] == "left out"
    assert "'code' looks like an identifier" in findings(survey)


def test_a_cell_that_is_longer_than_a_csv_reader_takes_is_read_or_refused() -> None:
    long = "x" * 200_000
    rows = [f"{i},{i % 2}" for i in range(30)]
    write("a.csv", f"{long},outcome", rows)
    with pytest.raises(UserError, match="the header cannot be read"):
        tables.survey(files=["a.csv"], label="outcome")
    write("b.csv", "n,note,outcome", [f"{i},{long if i == 3 else 'w'},{i % 2}" for i in range(30)])
    assert tables.survey(files=["b.csv"], label="outcome").classes == ("0", "1")
