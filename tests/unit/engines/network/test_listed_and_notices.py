"""The coordinator's list of sites, and what a process tells the command that started it."""

import json
from pathlib import Path

import pytest

from atoll.engines.network import listed
from atoll.engines.network.listed import Listed
from atoll.engines.network.notices import MOST_BYTES, Notice, Notices, readable


def test_who_is_off_the_list_is_refused_as_soon_as_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed, "LOOK_SECONDS", 0.0)
    path = tmp_path / "sites.json"
    sites = Listed(path)
    assert sites.refusal("bern") == "'bern' is not in the list of sites"  # there is no list
    path.write_text(json.dumps({"sites": ["basel", "bern"]}))
    assert sites.refusal("bern") == ""
    path.write_text(json.dumps({"sites": ["basel"]}))
    assert sites.refusal("bern") == "'bern' is not in the list of sites"
    assert sites.refusal("basel") == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sites": 1}', '{"sites": ["zug"'])
def test_a_damaged_list_lets_nobody_new_in(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listed, "LOOK_SECONDS", 0.0)
    path = tmp_path / "sites.json"
    path.write_text(json.dumps({"sites": ["basel"]}))
    sites = Listed(path)
    assert sites.refusal("basel") == ""
    path.write_text(text)
    assert sites.refusal("basel") == ""
    assert sites.refusal("zug") != ""


def test_notices_are_read_once_and_whole_lines_alone(tmp_path: Path) -> None:
    written, seen = Notices(tmp_path), Notices(tmp_path)
    assert list(seen.new()) == []
    written.write("key", "bern has the key 1a2b")
    with written.path.open("a") as file:
        file.write('{"kind": "second", "wor')
    assert list(seen.new()) == [Notice("key", "bern has the key 1a2b")]
    with written.path.open("a") as file:
        file.write('ds": "x"}\nnothing\n[]\n')
    assert list(seen.new()) == [Notice("second", "x")]
    seen.clear()
    assert list(seen.new()) == []


def test_notices_are_plain_short_and_do_not_fill_the_disk(tmp_path: Path) -> None:
    assert readable("a\n\x1b[2Jb") == "a\\n\\x1b[2Jb"
    notices = Notices(tmp_path)
    for _ in range(4000):
        notices.write("refused", "x" * 10_000)
    assert notices.path.stat().st_size < MOST_BYTES + 1000
