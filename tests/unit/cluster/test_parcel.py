"""Records as bytes, errors as text: what a driver gets is what the node had, or is refused."""

import json
from pathlib import Path

import pytest

from atoll.cluster.collector import GO, REPLACED, STOP, Collector
from atoll.cluster.failures import NodeError, as_text, from_text
from atoll.cluster.parcel import pack, unpack
from atoll.core.errors import BadMessageError, ClientFailedError, UserError


def record(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_parcel_has_the_files_of_a_record_and_no_others(tmp_path: Path) -> None:
    sent = record(
        tmp_path / "a", config_toml=b"x = 1\n", events_jsonl=b"{}\n\n", result_json=b"\x00\n",
        checkpoint_safetensors=bytes(range(256)), notes_txt=b"private",
    )  # fmt: skip
    (sent / ".lock").write_bytes(b"process 1")
    unpack(pack(sent), tmp_path / "b")
    expected = contents(sent)
    del expected[".lock"], expected["notes.txt"]
    assert contents(tmp_path / "b") == expected


def test_nothing_is_an_empty_parcel(tmp_path: Path) -> None:
    unpack(b"", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "parcel",
    [
        b'{"../x": 1}\n1',
        b'{"notes.txt": 1}\n1',
        b'{"result.json": 2}\n1',
        b'{"result.json": 1}\n12',
    ],
)
def test_what_is_no_record_is_refused(parcel: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the record of a run"):
        unpack(parcel, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_an_older_attempt_is_refused_and_the_newer_one_is_not(tmp_path: Path) -> None:
    collector = Collector(str(tmp_path))
    parcel = pack(record(tmp_path / "a", events_jsonl=b"old\n"))
    assert collector.begin("3", "old", "here") == GO
    assert collector.put("3", "old", "p", parcel) == GO
    assert collector.begin("3", "new", "there") == GO
    newer = pack(record(tmp_path / "b", events_jsonl=b"new\n"))
    assert collector.put("3", "new", "p", newer) == GO
    assert collector.put("3", "old", "p", parcel) == REPLACED
    assert collector.report("3", "old", "1", "2") == REPLACED
    assert (tmp_path / "p" / "events.jsonl").read_bytes() == b"new\n"
    assert json.loads(collector.states())["3"]["attempts"] == 2


def test_a_point_that_has_ended_is_not_written_again(tmp_path: Path) -> None:
    collector = Collector(str(tmp_path))
    record(tmp_path / "p", result_json=b"first", config_toml=b"")
    other = pack(record(tmp_path / "other", result_json=b"second"))
    collector.begin("0", "a", "here")
    assert collector.put("0", "a", "p", other) == GO
    assert (tmp_path / "p" / "result.json").read_bytes() == b"first"
    assert b"first" in collector.fetch("p")


def test_a_restarted_collector_goes_on_and_stops_when_asked(tmp_path: Path) -> None:
    collector = Collector(str(tmp_path))
    assert collector.report("0", "a", "1", "4") == GO
    collector.stop()
    assert collector.report("0", "a", "2", "4") == STOP
    assert collector.begin("1", "b", "here") == STOP
    assert json.loads(collector.states())["0"]["rounds"] == 2


def test_a_point_outside_the_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.\./x"):
        Collector(str(tmp_path)).fetch("../x")


@pytest.mark.parametrize(
    "error",
    [
        UserError("what", "where", "remedy", 3),
        ClientFailedError("bern", "train", "no luck"),
        BadMessageError("bern", "not finite"),
    ],
)
def test_errors_come_back_as_they_were(error: Exception) -> None:
    back = from_text(as_text(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)


def test_an_error_of_another_kind_has_its_traceback() -> None:
    try:
        raise KeyError("rate")
    except KeyError as error:
        back = from_text(as_text(error))
    assert isinstance(back, NodeError)
    assert str(back) == "KeyError: 'rate'"
    assert "test_parcel.py" in back.__notes__[0]
