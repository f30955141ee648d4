"""Tables in memory run as files do."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import atoll
from atoll.core.errors import UserError
from atoll.data.own.frames import with_files


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Frame:
    """What pandas and polars have in common: a stream of Arrow data."""

    def __init__(self, **columns: list[Any]) -> None:
        self.table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


def frame(shift: int) -> Frame:
    rows = range(120)
    return Frame(
        age=[(7 * i + shift) % 31 + 0.5 for i in rows], outcome=["xy"[i % 2] for i in rows]
    )


def test_a_run_on_frames_is_the_run_on_their_files() -> None:
    small: dict[str, Any] = {"rounds": 1, "widths": [4], "epochs": 1, "engine": {"mode": "loop"}}
    data = {"files": {"basel": frame(0), "bern": frame(3)}, "label": "outcome"}
    run = atoll.run("fedavg", out="frames", data=data, **small)
    assert sorted({score.client for score in run.scores}) == ["basel", "bern"]
    files = sorted(str(path) for path in Path("runs/tables").glob("*/*.parquet"))
    assert [Path(file).stem for file in files] == ["basel", "bern"]
    again = atoll.run("fedavg", out="files", data={"files": files, "label": "outcome"}, **small)
    assert again.accuracy == run.accuracy
    assert with_files(data, Path("runs/tables"))["files"] == files  # equal tables, equal files


def test_files_stay_files_and_other_things_are_refused() -> None:
    for files in (["a.csv"], {"basel": ["1.csv", "2.csv"]}):
        assert with_files({"files": files}, Path("t")) == {"files": files}
    with pytest.raises(UserError, match="the table of 'basel' has the type int"):
        with_files({"files": {"basel": 3}}, Path("t"))
