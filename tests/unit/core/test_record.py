"""A run's folder: written whole or not at all, cut to its checkpoint, refused when damaged."""

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.core.record import (
    Event,
    Exclusion,
    Message,
    Record,
    Round,
    Score,
    Snapshot,
    Stage,
    disk_errors,
    locked,
    read_events,
    read_snapshots,
    write_whole,
)

EVENTS: list[Event] = [
    Message(0, 0, "server", "a", "fit", "Weights", (("w", "float32", (2, 3)),), 2, 48, 200),
    Message(0, 0, "a", "server", "fit", "Fitted", (), 1, 0, 20),
    Message(0, 0, "a", "server", "fit", "Fitted", (("b", "int64", ()),), 1, 8, 20),
    Exclusion(0, 0, "a", "fit", "its 'weights' are 9 times as large"),
    Round(0, 0, {"loss": 0.1 + 0.2}),
    Score(0, 0, "klinik-süd", 1, "own", "test", 7, 3, 1 / 3),
    Stage(0, 1),
]
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "server/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a/count": np.array(3, dtype=np.int64),
    "a/none": np.zeros((0, 2)),
}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.create(tmp_path / "run", "seed = 1\n", {"torch": "2"})


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_message_is_written_as_json_writes_its_fields(record: Record) -> None:
    odd = Message(1, 2, 'klinik "süd"', "a\\b", "fit", "W", (("é", "int8", (1, 2)),), 3, 4, 5)
    record.add([odd])
    plain = json.dumps({"event": "message", **vars(odd)}, separators=(",", ":"))
    assert (record.folder / "events.jsonl").read_text() == f"{plain}\n"
    assert read_events(record.folder) == [odd]


def test_accuracy_is_hits_per_row() -> None:
    assert Score(0, 0, "a", 0, "", "test", 8, 2, 0.1).accuracy == 0.25
    assert Score(0, 0, "a", 0, "", "test", 0, 0, 0.0).accuracy == 0.0


def test_a_new_folder_has_its_config_and_its_facts(record: Record) -> None:
    assert (record.folder / "config.toml").read_text() == "seed = 1\n"
    assert '"torch": "2"' in (record.folder / "facts.json").read_text()
    assert read_events(record.folder) == []


def test_events_are_read_as_they_were_written(record: Record) -> None:
    record.add(EVENTS[:2])
    record.add([])
    record.add(EVENTS[2:])
    read = read_events(record.folder)
    assert read == EVENTS
    assert hash(read[0]) == hash(EVENTS[0])  # tuples all the way down


def test_a_note_that_is_not_finite_is_null_in_the_file_and_not_a_number_when_read(
    record: Record,
) -> None:
    record.add([Round(0, 0, {"loss": math.inf, "rate": math.nan, "fine": 1.5})])
    (line,) = (record.folder / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["notes"] == {"loss": None, "rate": None, "fine": 1.5}
    (event,) = read_events(record.folder)
    assert isinstance(event, Round)
    assert [math.isnan(value) for value in event.notes.values()] == [True, True, False]


def test_a_last_line_that_was_cut_off_is_left_out(record: Record) -> None:
    record.add(EVENTS)
    path = record.folder / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert read_events(record.folder) == EVENTS[:-1]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"null", b'{"event":"other"}', b'{"stage":0}', b'{"event":"stage","stage":0}'],
)
def test_a_damaged_line_is_a_users_error_that_names_the_file(record: Record, line: bytes) -> None:
    record.add(EVENTS)
    with (record.folder / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError) as caught:
        read_events(record.folder)
    assert caught.value.where.endswith("events.jsonl")


def test_a_folder_without_events_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_events(tmp_path)
    assert caught.value.where == str(tmp_path / "events.jsonl")


def test_seconds_stand_apart_from_events(record: Record) -> None:
    record.time(round=1.5)
    assert read_events(record.folder) == []
    assert (record.folder / "times.jsonl").read_text() == '{"round": 1.5}\n'


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old and long")
    write_whole(path, b"new")
    assert files(tmp_path) == {"file": b"new"}


def test_a_full_disk_leaves_the_old_file_and_no_half_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        write_whole(path, b"new")
    assert caught.value.what == "the disk is full"
    assert caught.value.where == str(path)
    assert caught.value.exit_code == 2
    assert files(tmp_path) == {"file": b"old"}


def test_a_full_disk_at_a_checkpoint_leaves_the_last_one(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.add(EVENTS[:3])
    record.checkpoint(TENSORS, {"stage": 0, "round": 1})
    record.add(EVENTS[3:])
    calls: list[int] = []

    def full_at_third(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:  # after events and times
            full(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_at_third)
        with pytest.raises(UserError, match="disk is full"):
            record.checkpoint({}, {"stage": 9, "round": 9})
    resumed = record.resume()
    assert resumed is not None
    assert resumed[1] == {"stage": 0, "round": 1}
    assert read_events(record.folder) == EVENTS[:3]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "disk is full"), (errno.EACCES, "denied")],
)
def test_what_the_disk_refuses_is_a_users_error(number: int, words: str) -> None:
    with pytest.raises(UserError) as caught, disk_errors(Path("there")):
        raise OSError(number, os.strerror(number))
    assert words in caught.value.what
    assert caught.value.where == "there"
    assert caught.value.remedy


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        Record.create(tmp_path / "file" / "run", "", {})


@pytest.mark.parametrize("stranger", ["thesis.tex", "config.toml", "checkpoint.safetensors"])
def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, stranger: str) -> None:
    (tmp_path / stranger).write_text("mine")
    with pytest.raises(UserError) as caught:
        Record.create(tmp_path, "seed = 1", {})
    assert "not empty" in caught.value.what
    assert files(tmp_path) == {stranger: b"mine"}


@pytest.mark.parametrize("writes", range(9))
def test_a_creation_that_was_cut_off_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    calls: list[int] = []

    def killed(handle: int) -> None:
        if len(calls) == writes:
            raise KeyboardInterrupt
        calls.append(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # nothing tidies up
        with contextlib.suppress(KeyboardInterrupt):
            Record.create(tmp_path / "run", "seed = 1", {})
    if not (tmp_path / "run" / "config.toml").exists():
        Record.create(tmp_path / "run", "seed = 1", {})
    assert Record(tmp_path / "run").resume() is None
    assert (tmp_path / "run" / "config.toml").read_text() == "seed = 1"


def test_without_a_checkpoint_a_run_begins_again_with_no_events(record: Record) -> None:
    record.add(EVENTS)
    record.time(round=1.0)
    assert record.resume() is None
    assert read_events(record.folder) == []
    assert (record.folder / "times.jsonl").read_bytes() == b""


def test_resuming_gives_what_was_saved_and_cuts_events_to_that_moment(record: Record) -> None:
    record.add(EVENTS[:2])
    record.time(round=1.0)
    record.checkpoint(TENSORS, {"stage": 0, "round": 4})
    before = files(record.folder)
    record.add(EVENTS[2:])
    record.time(round=2.0)
    with (record.folder / "events.jsonl").open("ab") as file:
        file.write(b'{"half a li')
    resumed = Record(record.folder).resume()
    assert resumed is not None
    tensors, progress = resumed
    assert progress == {"stage": 0, "round": 4}
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name], array)
    assert files(record.folder) == before


def test_a_checkpoint_keeps_every_bit_of_views_and_odd_numbers(record: Record) -> None:
    base = np.array([[np.nan, -0.0, np.inf], [1e-45, 2, 3]], dtype=np.float32)
    saved = {"turned": base.T, "steps": base[:, ::2], "truth": np.array([True, False])}
    record.checkpoint(saved, {})
    resumed = record.resume()
    assert resumed is not None
    assert {n: a.tobytes() for n, a in resumed[0].items()} == {
        n: a.tobytes() for n, a in saved.items()
    }


def test_the_last_checkpoint_counts(record: Record) -> None:
    record.checkpoint(TENSORS, {"round": 1})
    record.checkpoint({}, {"round": 2})
    assert record.resume() == ({}, {"round": 2})


def damage(record: Record, change: Callable[[bytearray], Any]) -> None:
    path = record.folder / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(bytes(content))


def assert_damaged(record: Record) -> None:
    with pytest.raises(UserError) as caught:
        record.resume()
    assert caught.value.where.endswith("checkpoint.safetensors")
    assert caught.value.exit_code == 2
    assert "damaged" in caught.value.what


def test_a_checkpoint_with_any_bit_flipped_is_a_users_error(record: Record) -> None:
    record.add(EVENTS)
    record.checkpoint(TENSORS, {"stage": 0, "round": 4})
    before = (record.folder / "events.jsonl").read_bytes()
    size = (record.folder / "checkpoint.safetensors").stat().st_size
    for place in range(size):
        for bit in (place % 8, (place + 5) % 8):

            def flip(content: bytearray, place: int = place, bit: int = bit) -> None:
                content[place] ^= 1 << bit

            damage(record, flip)
            assert_damaged(record)
            damage(record, flip)
    assert (record.folder / "events.jsonl").read_bytes() == before
    assert record.resume() is not None  # flipped back


def test_a_truncated_checkpoint_is_a_users_error(record: Record) -> None:
    record.checkpoint(TENSORS, {"stage": 0, "round": 4})
    whole = (record.folder / "checkpoint.safetensors").read_bytes()
    for length in range(len(whole)):
        (record.folder / "checkpoint.safetensors").write_bytes(whole[:length])
        assert_damaged(record)


def test_a_checkpoint_of_another_program_is_a_users_error(record: Record) -> None:
    (record.folder / "checkpoint.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{}      ")
    assert_damaged(record)


def test_a_record_that_is_shorter_than_its_checkpoint_says_is_a_users_error(record: Record) -> None:
    record.add(EVENTS)
    record.checkpoint(TENSORS, {})
    path = record.folder / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        record.resume()
    assert "shorter" in caught.value.what
    assert caught.value.where == str(path)


def test_records_need_no_torch() -> None:
    program = "import sys, atoll.core.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_snapshots_come_back_and_are_cut_with_the_rest(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "run", "", {})
    first = Snapshot(0, "a", "attention", ("x",), ("y", "z"), ((1.0, 0.5),))
    record.write_snapshots([first])
    record.checkpoint({}, {"stage": 1})
    record.write_snapshots(
        [Snapshot(1, "a", "attention", ("x",), ("y", "z"), ((float("nan"), 2.0),))]
    )
    later = read_snapshots(record.folder)
    assert later[0] == first
    assert math.isnan(later[1].values[0][0])
    record.resume()
    assert read_snapshots(record.folder) == [first]


def test_a_lock_lets_one_in_at_a_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also where the file goes while others wait for it."""
    inside, most = 0, list[int]()

    def enter() -> None:
        nonlocal inside
        for _ in range(20):
            with locked(tmp_path / "new" / ".lock"):
                inside += 1
                time.sleep(0.0005)
                most.append(inside)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 120
    assert not any((tmp_path / "new").iterdir())


def test_a_record_that_is_open_is_refused_to_others_until_it_is_closed(tmp_path: Path) -> None:
    record = Record.create(tmp_path / "run", "seed = 1", {})
    before = files(record.folder)
    for open_again in (
        lambda: Record.create(tmp_path / "run", "seed = 2", {}),
        lambda: Record.reopen(tmp_path / "run"),
    ):
        with pytest.raises(UserError) as caught:
            open_again()
        assert caught.value.what == "another process is writing this run"
    assert files(record.folder) == before
    record.close()
    with Record.reopen(tmp_path / "run") as again:
        again.add(EVENTS)
    assert ".lock" not in files(tmp_path / "run")
    assert read_events(tmp_path / "run") == EVENTS


def test_what_a_killed_writer_left_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    Record.create(tmp_path / "run", "seed = 1", {}).close()
    before = files(tmp_path / "run")
    (tmp_path / "run" / ".checkpoint.safetensors.7-01234567.part").write_bytes(b"half")
    Record.reopen(tmp_path / "run").close()
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("stranger", "remedy"),
    [("thesis.tex", "no run is in this one"), ("config.toml", "--resume to go on")],
)
def test_a_folder_in_use_is_refused_with_what_can_be_done(
    tmp_path: Path, stranger: str, remedy: str
) -> None:
    (tmp_path / stranger).write_text("mine")
    with pytest.raises(UserError) as caught:
        Record.create(tmp_path, "seed = 1", {})
    assert remedy in caught.value.remedy


def test_a_new_record_makes_the_folders_above_it_and_clears_what_a_killed_one_left(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "deep" / "run"
    with Record.create(folder, "seed = 1", {}):
        assert (folder / "config.toml").read_text() == "seed = 1"
    other = tmp_path / "other"
    other.mkdir()
    (other / ".facts.json.12-0a1b2c3d.part").write_text("half")
    with Record.create(other, "seed = 1", {}):
        assert not list(other.glob("*.part"))
        assert not list(other.glob(".*.part"))
