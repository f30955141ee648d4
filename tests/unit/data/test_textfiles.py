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
from atoll.data.splits import ScenarioOptions, scenario
from atoll.engines.local import execute
from atoll.runs.config import resolve

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


def test_a_client_for_each_file_and_a_task_for_each_stage(tmp_path: Path) -> None:
    files = [write(tmp_path / name, rows(start=i)) for i, name in enumerate(("a.csv", "b.jsonl"))]
    made = data.load("", files=files, **HOW)
    found = scenario(made, ScenarioOptions(split="tasks"), 0)
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
    train = scenario(made, ScenarioOptions(split="tasks"), 0).holdings["site-0"][0].train
    assert "rare" in {made.classes[label] for label in made.y[train]}


def test_own_files_are_learned_from(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", rows()) for name in "ab"]
    values = {
        "data": {"files": files, **HOW, "length": 8},
        "model": {"vectors": "random-8", "widths": [8]},
        "rounds": 2,
        "method": {"name": "fedseit", "rate": 0.02, "epochs": 10, "transfer": "sit"},
    }
    execute(resolve(values, "test"), tmp_path / "run")
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
    broken = tmp_path / "c.parquet"
    broken.write_text("no")
    assert "cannot be read" in wrong(broken).what


def test_a_text_that_is_missing_is_an_empty_one(tmp_path: Path) -> None:
    found = [*rows(4), {"body": None, "topic": "ship", "month": 9}]
    made = data.load("", files=[write(tmp_path / "a.jsonl", found)], **HOW)
    assert not made.x[4].any()


def test_a_client_without_rows_for_a_stage_is_named(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.jsonl", rows(20))]
    made = data.load("", files=files, **HOW)
    with pytest.raises(UserError, match="'site-1' has no rows for stage '10'"):
        scenario(made, ScenarioOptions(split="tasks"), 0)
