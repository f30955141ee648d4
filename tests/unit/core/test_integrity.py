"""Digests of a run's files: a change is told, growth is not, older records can be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.core.integrity import Extent, Rolling, read_digests, write_digests
from atoll.core.record import (
    Record,
    Round,
    Score,
    Snapshot,
    read_events,
    read_integrity,
    read_snapshots,
    read_times,
    write_whole,
)

FACTS: dict[str, Any] = {"stages": 1, "tasks": ["all"], "clients": ["a"]}
ROUNDS = [Round(0, number, {"loss": 0.125 * number}) for number in range(6)]
Change = Callable[[bytes], bytes]
CHANGES: dict[str, Change] = {
    "a digit": lambda content: content.replace(b"0", b"7", 1),
    "a line dropped": lambda content: content.partition(b"\n")[2],
    "a line twice": lambda content: content.partition(b"\n")[0] + b"\n" + content,
    "a byte": lambda content: b"\xff" + content[1:],
    "empty": lambda content: b"",
}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A run with a checkpoint, and a round after it."""
    record = Record.create(tmp_path / "run", "seed = 1\n", FACTS)
    record.add(ROUNDS[:5])
    for number in range(2):
        record.write_snapshots([Snapshot(0, "a", f"attention {number}", ("x",), ("y",), ((1.0,),))])
        record.time(stage=0, round=number, seconds=1.5)
    record.checkpoint({"w": np.zeros(2)}, {"stage": 0, "round": 1})
    record.add(ROUNDS[5:])
    record.time(stage=0, round=1, seconds=2.5)
    return record


def end(record: Record) -> None:
    """Let the run end."""
    record.checkpoint({"w": np.zeros(2)}, {"stage": 1, "round": 0})
    content = b"{}\n"
    write_digests(record.folder, {**record.extents, "result.json": Extent.of(content)})
    write_whole(record.folder / "result.json", content)


def change(path: Path, how: Change) -> None:
    path.write_bytes(how(path.read_bytes()))


def test_a_rolling_digest_is_that_of_the_whole() -> None:
    rolling = Rolling(b"one ")
    rolling.update(b"two ")
    first = rolling.extent
    rolling.update(b"three")
    assert first == Extent.of(b"one two ")
    assert rolling.extent == Extent.of(b"one two three")


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["events.jsonl", "times.jsonl", "looks.jsonl"])
def test_a_change_before_the_checkpoint_is_told_by_whoever_reads_or_goes_on(
    record: Record, name: str, how: str
) -> None:
    path = record.folder / name
    change(path, CHANGES[how])
    readers = {
        "events.jsonl": read_events,
        "times.jsonl": read_times,
        "looks.jsonl": read_snapshots,
    }
    with pytest.raises(UserError) as caught:
        readers[name](record.folder)
    assert caught.value.where == str(path)
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        Record(record.folder).resume()
    assert caught.value.where == str(path)
    assert path.read_bytes() == before  # nothing was cut


def test_what_came_after_the_checkpoint_is_read_as_it_is_and_cut_when_the_run_goes_on(
    record: Record,
) -> None:
    assert read_events(record.folder) == ROUNDS
    change(record.folder / "events.jsonl", lambda content: content[:-20] + b"garbage")
    assert read_events(record.folder) == ROUNDS[:5]
    again = Record(record.folder)
    assert again.resume() is not None
    again.add(ROUNDS[5:])
    again.checkpoint({}, {"stage": 1, "round": 0})
    assert read_events(record.folder) == ROUNDS


@pytest.mark.parametrize("name", ["config.toml", "facts.json"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_file_that_is_written_once_is_told_when_the_run_goes_on(
    record: Record, name: str, how: str
) -> None:
    record.close()
    path = record.folder / name
    change(path, CHANGES[how] if how != "a digit" else lambda content: content + b" ")
    with pytest.raises(UserError) as caught:
        Record.reopen(record.folder)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("name", ["events.jsonl", "times.jsonl", "looks.jsonl", "facts.json"])
def test_in_a_run_that_has_ended_nothing_may_be_longer_either(record: Record, name: str) -> None:
    end(record)
    assert read_events(record.folder) == ROUNDS
    assert Record(record.folder).ended(checkpoints=True)
    change(record.folder / name, lambda content: content + b"\n")
    with pytest.raises(UserError) as caught:
        Record(record.folder).ended(checkpoints=True)
    assert caught.value.where.endswith(name)


def test_a_file_of_an_ended_run_that_is_gone_is_told(record: Record) -> None:
    end(record)
    (record.folder / "looks.jsonl").unlink()
    with pytest.raises(UserError) as caught:
        read_snapshots(record.folder)
    assert caught.value.what == "a file of the record is missing"


def test_digests_that_are_gone_or_changed_are_told(record: Record) -> None:
    end(record)
    path = record.folder / "digests.json"
    whole = path.read_bytes()
    body = json.loads(whole)
    for wrong in (
        whole.replace(b"events", b"elents"), whole[:-9], b"", b"\xff", b"[]",
        json.dumps({**body, "files": {}}).encode(),
        json.dumps({key: body[key] for key in ("files", "format")}).encode(),
    ):  # fmt: skip
        path.write_bytes(wrong)
        with pytest.raises(UserError) as caught:
            read_digests(record.folder)
        assert caught.value.where == str(path)
    path.unlink()
    with pytest.raises(UserError) as caught:
        read_events(record.folder)
    assert caught.value.where == str(path)


def test_a_record_of_an_older_release_is_read_without_digests(record: Record) -> None:
    end(record)
    (record.folder / "digests.json").unlink()
    facts = record.folder / "facts.json"
    facts.write_text(json.dumps(FACTS))
    assert read_integrity(record.folder).files == {}
    assert read_events(record.folder) == ROUNDS


def test_a_run_in_another_state_is_not_ended(record: Record) -> None:
    assert not record.ended(checkpoints=True)
    end(record)
    assert record.ended(checkpoints=True)
    (record.folder / "checkpoint.safetensors").unlink()
    assert not record.ended(checkpoints=True)
    assert record.ended(checkpoints=False)
    assert record.resume() is None  # it begins again, and is not at its end any more
    assert not (record.folder / "result.json").exists()
    assert not (record.folder / "digests.json").exists()


def test_lines_of_another_process_stop_a_run_at_its_next_checkpoint(record: Record) -> None:
    Record(record.folder).add(ROUNDS[:1])
    with pytest.raises(UserError) as caught:
        record.checkpoint({}, {"stage": 0, "round": 2})
    assert caught.value.what == "another process has written this file"
    assert caught.value.where.endswith("events.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"round","stage":0,"round":"1","notes":{}}',
        b'{"event":"round","stage":-1,"round":1,"notes":{}}',
        b'{"event":"round","stage":0,"round":1,"notes":{"loss":"x"}}',
        b'{"event":"stage","stage":true,"rounds":1}',
        b'{"event":"score","stage":0,"round":1,"client":3,"task":0,"variant":"","part":"test",'
        b'"rows":1,"correct":1,"macro_f1":1.0}',
        b'{"event":"message","stage":0,"round":0,"sender":"a","receiver":"b","action":"c",'
        b'"kind":"d","tensors":[["a","b",["x"]]],"count":1,"payload":1,"bytes":1}',
        b"\xff\xfe",
    ],
)
def test_values_of_another_type_are_a_damaged_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UserError, match="a line of the record is damaged"):
        read_events(tmp_path)


@pytest.mark.parametrize("line", [b"3", b"[]", b"{", b"\xff", b'{"stage":0}', b'{"seconds":"x"}'])
@pytest.mark.parametrize("name", ["looks", "times"])
def test_a_broken_line_of_snapshots_or_times_is_a_users_error(
    tmp_path: Path, name: str, line: bytes
) -> None:
    (tmp_path / f"{name}.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UserError, match="a line of the record is damaged"):
        (read_snapshots if name == "looks" else read_times)(tmp_path)


def test_a_score_is_read_as_it_was(record: Record) -> None:
    score = Score(0, 1, "a", 0, "", "test", 4, 2, 1)
    record.add([score])
    assert read_events(record.folder)[-1] == score


def test_digests_hold_in_whatever_order_their_names_are_written(record: Record) -> None:
    end(record)
    path = record.folder / "digests.json"
    body = json.loads(path.read_text())
    before = read_digests(record.folder)
    turned = {name: body[name] for name in reversed(list(body))}
    turned["files"] = {name: body["files"][name] for name in reversed(list(body["files"]))}
    path.write_text(json.dumps(turned))
    assert read_digests(record.folder) == before
