"""The user's own texts: files of all kinds, tasks by a column, and what is wrong with a file."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from atoll import data
from atoll.core.errors import EXIT_DATA_MISSING, UserError
from atoll.core.record import Score, read_events
from atoll.data.own import tables
from atoll.data.splits import split, streams
from atoll.engines.local import local_engine
from atoll.runs.config import resolve
from atoll.runs.execute import execute

HOW = {"text": "body", "label": "topic", "stage": "month"}


def rows(count: int = 40, start: int = 0) -> list[dict[str, Any]]:
    """Texts about ships and about grain, in two months that sort as numbers."""
    about = [("ship", "the harbour Ship"), ("grain", "wheat, corn")]
    return [
        {"body": f"{about[i % 2][1]} {i + start}", "topic": about[i % 2][0], "month": 9 + i // 20}
        for i in range(count)
    ]


def write(path: Path, found: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(found), path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_file_of_each_kind_is_read(kind: str, tmp_path: Path) -> None:
    made = data.load("", files=[write(tmp_path / f"a.{kind}", rows())], **HOW)
    assert made.classes == ("grain", "ship")
    assert made.stages == ("9", "10")
    assert made.y[:4].tolist() == [1, 0, 1, 0]
    assert [made.words[token] for token in made.x[0] if token] == ["the", "harbour", "ship", "0"]


@pytest.mark.parametrize(
    ("sign", "encoding", "said"),
    [
        (";", "latin-1", {}),
        ("\t", "utf-16", {}),
        ("|", "utf-8-sig", {}),
        (";", "iso8859-5", {"delimiter": ";", "encoding": "iso8859-5"}),
    ],
)
def test_how_a_csv_file_is_written_is_found_out_or_said(
    sign: str, encoding: str, said: dict[str, str], tmp_path: Path
) -> None:
    word = "\u0431\u044b\u043b" if said else "caf\xe9"
    lines = [sign.join(HEAD.decode().strip().split(",")), f'"{word}, {sign} x"{sign}ship{sign}9']
    (tmp_path / "a.csv").write_text("\n".join([*lines, ""]), encoding=encoding)
    made = data.load("", files=[str(tmp_path / "a.csv")], **HOW, **said)
    first = [made.words[token] for token in made.x[0] if token]
    assert first[0] == word
    assert (made.classes, made.stages) == (("ship",), ("9",))
    assert "the file is not ascii" in wrong(tmp_path / "a.csv", encoding="ascii").what


def test_a_tab_parts_columns_where_the_name_of_a_file_says_so(tmp_path: Path) -> None:
    lines = ["body\ttopic\tmonth\ta, b, c, d", "words\tship\t9\t1"]
    (tmp_path / "a.tsv").write_text("\n".join([*lines, ""]))
    assert data.load("", files=[str(tmp_path / "a.tsv")], **HOW).classes == ("ship",)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_an_encoding_that_does_not_fit_late_in_a_file_is_said(
    encoding: str, tmp_path: Path
) -> None:
    lines = HEAD + b"plain words,ship,9\n" * 10_000 + b"caf\xe9,ship,9\n"
    (tmp_path / "a.csv").write_bytes(lines)
    error = wrong(tmp_path / "a.csv", encoding=encoding)
    assert (error.what, error.exit_code) == (f"the file is not {encoding}", EXIT_DATA_MISSING)


def test_a_client_for_each_file_and_a_task_for_each_stage(tmp_path: Path) -> None:
    files = [write(tmp_path / name, rows(start=i)) for i, name in enumerate(("a.csv", "b.jsonl"))]
    made = data.load("", files=files, **HOW)
    found = split(made, streams.Options(), 0)
    assert found.clients == ("site-0", "site-1")
    assert found.tasks == ("9", "10")
    seen: list[int] = []
    for number, id in enumerate(found.clients):
        for stage in range(2):
            held, test = found.holdings[id][stage], found.tests[id][stage]
            assert (len(held.train), len(held.valid), len(test)) == (12, 4, 4)
            mine = np.concatenate([held.train, held.valid, test])
            assert made.group is not None
            assert made.stage is not None
            assert set(made.group[mine]) == {number}
            assert set(made.stage[mine]) == {stage}
            seen += mine.tolist()
    assert sorted(seen) == list(range(80))


def test_a_class_with_one_row_is_trained(tmp_path: Path) -> None:
    found = [*rows(20), {"body": "alone", "topic": "rare", "month": 9}]
    made = data.load("", files=[write(tmp_path / "a.jsonl", found)], **HOW)
    train = split(made, streams.Options(), 0).holdings["site-0"][0].train
    assert "rare" in {made.classes[label] for label in made.y[train]}


def test_own_files_are_learned_from(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", rows()) for name in "ab"]
    values = {
        "data": {"files": files, **HOW, "length": 8},
        "model": {"vectors": "random-8", "widths": [8]},
        "rounds": 2,
        "method": {"name": "fedseit", "rate": 0.02, "epochs": 10, "transfer": "sit"},
    }
    execute(resolve(values, "test"), tmp_path / "run", local_engine)
    last = [e for e in read_events(tmp_path / "run") if isinstance(e, Score) and e.stage == 1]
    assert len(last) == 4
    assert sum(score.correct for score in last) >= 12  # of 16; two classes


def wrong(path: Path, **changes: Any) -> UserError:
    with pytest.raises(UserError) as refusal:
        data.load("", **{"files": [str(path)], **HOW, **changes})
    return refusal.value


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    good = tmp_path / "a.jsonl"
    write(good, rows())
    assert "did you mean 'body'" in wrong(good, text="bdy").remedy
    assert "column 'month' is no text" in wrong(good, text="month").what
    assert wrong(tmp_path / "none.csv").exit_code == EXIT_DATA_MISSING
    assert ".parquet" in wrong(tmp_path / "a.xlsx").remedy
    assert "no files" in wrong(good, files=[]).what
    holes = tmp_path / "b.jsonl"
    write(holes, [*rows(2), {"body": "x", "topic": None, "month": 9}])
    assert "row 3 has no 'topic'" in wrong(holes).what


HEAD = b"body,topic,month\n"
BAD: list[tuple[str, bytes, str]] = [
    ("a.csv", b"", "a file without rows"),
    ("a.csv", b"\n\n", "a file without rows"),
    ("a.csv", HEAD, "a file without rows"),
    ("a.jsonl", b"\n", "a file without rows"),
    ("a.csv", HEAD + b"fine,ship,9\n\nsecret,and,more,9\n", "row 2 has 4 cells, the header has 3"),
    ("a.csv", HEAD + b"secret\0,ship,9\n", "not a text file"),
    ("a.csv", b"b\xf6dy,topic,month\nsecret,ship,9\n", "no column 'body'"),
    ("a.csv", b"body,body,topic,month\na,b,ship,9\n", "the column 'body' is there twice"),
    ("a.csv", HEAD + b"1,ship,9\n2.5,ship,9\n", "column 'body' is no text"),
    (
        "a.jsonl",
        b'{"body": "fine", "topic": "a", "month": 9}\n{"body": "secret\n',
        "line 2 is no JSON",
    ),
    ("a.jsonl", b'["secret"]\n', "line 1 is no JSON object"),
    ("a.jsonl", b'{"body": "secr\xe9t"}\n', "line 1 is not UTF-8"),
    ("a.parquet", b"secret", "not a Parquet file that can be read"),
]


@pytest.mark.parametrize(("name", "content", "what"), BAD)
def test_ones_own_file_is_to_be_mended_and_its_content_is_not_told(
    name: str, content: bytes, what: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    found = wrong(tmp_path / name)
    assert what in found.what
    assert found.where == str(tmp_path / name)
    assert "delete" not in found.remedy
    assert "secr" not in str(found)


def labelled(path: Path, pairs: list[tuple[Any, Any]]) -> str:
    return write(path, [{"body": "word", "topic": y, "month": when} for y, when in pairs])


def test_stages_are_in_the_order_of_numbers_and_meet_across_files(tmp_path: Path) -> None:
    files = [
        labelled(tmp_path / "a.csv", [(1, i) for i in (10, 2, 1, 12, 11)]),
        labelled(tmp_path / "b.parquet", [(1.0, float(i)) for i in (1, 2, 10, 11, 12)]),
        labelled(tmp_path / "c.jsonl", [("1", str(i)) for i in (1, 2, 10, 11)] + [(1.0, 12)]),
    ]
    made = data.load("", files=files, **HOW)
    assert made.stages == ("1", "2", "10", "11", "12")
    assert made.classes == ("1",)
    assert made.stage is not None
    assert made.stage.tolist() == [2, 1, 0, 4, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_true_is_one_label_in_files_of_all_kinds(tmp_path: Path) -> None:
    pairs: list[tuple[Any, Any]] = [(True, 1), (False, 1)]
    files = [labelled(tmp_path / f"a.{kind}", pairs) for kind in ("csv", "parquet", "jsonl")]
    files.append(labelled(tmp_path / "b.csv", [("true", 1), (" false", 1)]))
    assert data.load("", files=files, **HOW).classes == ("False", "True")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", ["topic", "month"])
def test_an_empty_label_or_stage_is_refused_with_file_and_row(
    kind: str, column: str, tmp_path: Path
) -> None:
    good = write(tmp_path / f"good.{kind}", rows())
    for number, void in enumerate(["", "  ", None]):
        path = tmp_path / f"{number}.{kind}"
        write(
            path,
            [{**row, "month": "9"} for row in rows(2)]
            + [{**rows(1)[0], "month": "9", column: void}],
        )
        found = wrong(path, files=[good, str(path)])
        assert found.what == f"row 3 has no '{column}'"
        assert found.where == str(path)


def test_a_word_for_nothing_is_one_among_numbers_and_a_name_among_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    labelled(path, [(0, 1), (1, 1), ("NA", 1)])
    assert wrong(path).what == "row 3 has no 'topic'"
    labelled(path, [("ship", 1), ("None", 1)])
    assert data.load("", files=[str(path)], **HOW).classes == ("None", "ship")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("value", [["a"], {"a": 1}])
def test_a_label_is_no_list(kind: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    for column, pair in (("topic", (value, 1)), ("month", ("ship", value))):
        labelled(path, [pair])
        assert wrong(path).what == f"row 1 has no single value in '{column}'"


def test_texts_with_line_breaks_may_fill_more_than_a_megabyte(tmp_path: Path) -> None:
    note = "Seen today.\n" + "word, " * 120
    found = [{"body": f"{note}{i}", "topic": "ab"[i % 2], "month": 9} for i in range(2000)]
    path = write(tmp_path / "a.csv", found)
    assert Path(path).stat().st_size > 1_400_000
    made = data.load("", files=[path], **HOW)
    assert len(made) == 2000
    assert made.classes == ("a", "b")


@pytest.mark.parametrize("name", ["a.CSV", "a.tsv", "a.pq", "a.JSONL"])
def test_the_endings_of_tables_are_known_for_texts_too(name: str, tmp_path: Path) -> None:
    kind = {"a.CSV": "csv", "a.tsv": "csv", "a.pq": "parquet", "a.JSONL": "jsonl"}[name]
    path = Path(
        write(
            tmp_path / f"first.{kind}",
            [{**r, "body": f"\u00e9t\u00e9 {r['month']}"} for r in rows()],
        )
    )
    content = path.read_bytes().replace(b",", b"\t") if name == "a.tsv" else path.read_bytes()
    (tmp_path / name).write_bytes(content)
    made = data.load("", files=[str(tmp_path / name)], **HOW)
    assert made.classes == ("grain", "ship")
    assert "\u00e9t\u00e9" in made.words


def test_a_text_that_is_missing_is_an_empty_one(tmp_path: Path) -> None:
    found = [*rows(4), {"body": None, "topic": "ship", "month": 9}]
    made = data.load("", files=[write(tmp_path / "a.jsonl", found)], **HOW)
    assert not made.x[4].any()


def test_a_client_without_rows_for_a_stage_is_named(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.jsonl", rows(20))]
    made = data.load("", files=files, **HOW)
    with pytest.raises(UserError, match="'site-1' has no rows for stage '10'"):
        split(made, streams.Options(), 0)


def test_one_file_is_not_two_clients(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows())
    for other in (path, str(tmp_path / "b" / ".." / "a.jsonl")):
        found = wrong(Path(path), files=[path, other])
        assert found.what == f"two clients have the file '{path}'"


def test_texts_without_the_name_of_their_column_are_not_read_as_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows())
    for files in ([path], {"a": [path]}):
        with pytest.raises(UserError, match="a JSON file is no table") as refusal:
            data.load("", files=files, label="topic")
        assert "text = 'body'" in refusal.value.remedy
        assert "harbour" not in str(refusal.value)
        assert refusal.value.exit_code == EXIT_DATA_MISSING
    with pytest.raises(UserError, match="a JSON file is no table"):
        tables.survey(files=[path], label="topic")
    with pytest.raises(UserError):
        data.load("", files=3, label="topic")
