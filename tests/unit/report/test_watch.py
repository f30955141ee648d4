"""The live report says how each run stands."""

import json
import socket
from pathlib import Path

import pytest

from atoll.core.errors import InterruptedRunError, UserError
from atoll.core.record import FAILURE, Record, Round, Score
from atoll.core.storage import LOCK, FolderLock
from atoll.engines.local import local_engine
from atoll.report import watch
from atoll.report.progress import progress
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.loop import Progress
from tests.unit.report.records import record

CHANGES = {"data": "wine", "rounds": 3, "clients": 2, "epochs": 1, "widths": [4]}


def state(folder: Path) -> tuple[str, str]:
    now = progress(folder)
    return now.state, now.words


def test_a_run_that_was_stopped_is_not_shown_as_running(tmp_path: Path) -> None:
    config = resolve(change(read("fedavg"), CHANGES), "test")
    with pytest.raises(InterruptedRunError):
        execute(config, tmp_path, local_engine, stopping=lambda: True)
    stopped = ("stopped", "round 1 of 3; continue with --resume")
    assert state(tmp_path) == stopped
    before = list(watch._stamps([tmp_path]))
    with FolderLock(tmp_path):
        assert state(tmp_path) == ("running", "round 1 of 3")
        assert list(watch._stamps([tmp_path])) != before  # so that the page is made anew
    (tmp_path / LOCK).write_text("process 999999999 on " + socket.gethostname() + ", x")
    assert state(tmp_path) == ("failed", "its process was killed; continue with --resume")
    (tmp_path / LOCK).write_text("process 1 on another-machine, x")
    assert state(tmp_path) == ("running", "round 1 of 3")
    execute(config, tmp_path, local_engine, resume=True)
    assert state(tmp_path) == ("finished", "3 rounds")


def test_a_run_that_failed_says_why_until_it_goes_on(tmp_path: Path) -> None:
    config = resolve(change(read("fedavg"), CHANGES), "test")

    def fail(now: Progress) -> None:
        raise UserError("the disk is full", "here", "free some space")

    with pytest.raises(UserError):
        execute(config, tmp_path, local_engine, watch=fail)
    expected = "the disk is full (here): free some space; fix it, then continue with --resume"
    assert state(tmp_path) == ("failed", expected)
    execute(config, tmp_path, local_engine, resume=True)
    assert not (tmp_path / FAILURE).exists()
    assert state(tmp_path) == ("finished", "3 rounds")


def test_progress_has_share_time_bytes_and_a_sparkline_per_site(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 6}}, stages=2, ended=False)
    config = folder / "config.toml"
    config.write_text("rounds = 4\n" + config.read_text())
    with FolderLock(folder):
        Record(folder).add([Round(1, 1, {}), Score(1, 1, "a", 0, "", "test", 10, 9, 0.5)])
        now = progress(folder)
    # stage 1 of 2 is finished, and 2 of 4 rounds of the second: 6 of 8
    assert (now.state, now.percent, now.rounds) == ("running", 75.0, 3)
    assert now.words == "stage 2 of 2, round 2 of 4"
    assert now.left == "at most 3 s left"  # 2 rounds of 1.5 s
    assert now.bytes == "4.0 KB"
    assert [(spark.name, spark.last) for spark in now.sparks] == [("a", "90.0 %"), ("b", "45.0 %")]
    # site a: 80 %, then the mean of 50 and 80 %, then 90 %; 23 - 22 * (80 - 65) / (90 - 65) = 9.8
    assert now.sparks[0].points == "0.0,9.8 50.0,23.0 100.0,1.0"


def test_the_page_speaks_in_the_present_and_has_no_empty_section(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 6}})
    (folder / "events.jsonl").write_text("")
    config = folder / "config.toml"
    config.write_text("rounds = 4\n" + config.read_text())
    seen = watch.Watch([folder])
    with FolderLock(folder):
        assert seen.look()
    assert "fedavg has not ended: it runs on made" in seen.html
    assert "the first round is running" in seen.html
    assert "<b>1 running</b>" in seen.html
    assert 'id="learned"' not in seen.html
    assert 'href="#learned"' not in seen.html
    assert 'class="sparks"' not in seen.html
    assert "live" not in seen.html.split('id="live"')[1].split("</div>")[0]
    assert seen.look()  # the lock is gone
    assert "<b>1 stopped</b>" in seen.html


def test_a_damaged_failure_file_is_still_a_failure(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "fedavg", 0, {"": {"a": 8, "b": 6}}, ended=False)
    config = folder / "config.toml"
    config.write_text("rounds = 4\n" + config.read_text())
    (folder / FAILURE).write_text(json.dumps(["?"]))
    assert state(folder)[0] == "failed"
    assert state(folder)[1].startswith("the reason is not known")
