"""Records without digests, as older releases wrote them: damage still ends in a user error."""

import json
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.record import Record, Score
from atoll.report import page
from atoll.runs.predict.model import Predictor
from atoll.runs.result import Run, write_result

CONFIG = 'name = "a"\nseed = 0\n[method]\nname = "fedavg"\n'
FACTS = {
    "atoll": "0", "stages": 1, "tasks": ["all"], "known_at": [0], "clients": ["a", "b"],
    "headline": "", "data": {"name": "wine", "title": "wine", "classes": 3},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has ended, in the format before there were digests."""
    with Record.create(tmp_path / "run", CONFIG, FACTS) as record:
        record.add([Score(0, 0, client, 0, "", "test", 8, 4, 0.5) for client in ("a", "b")])
        record.time(stage=0, round=0, seconds=1.0)
    write_result(tmp_path / "run")
    (tmp_path / "run" / "digests.json").unlink()
    facts = {key: value for key, value in FACTS.items() if key != "format"}
    (tmp_path / "run" / "facts.json").write_text(json.dumps(facts))
    return tmp_path / "run"


def test_the_record_is_sound_before_it_is_damaged(folder: Path) -> None:
    run = Run(folder)
    assert run.accuracy == 0.5
    assert run.seconds == 1.0
    assert run.table()


@pytest.mark.parametrize("name", ["facts.json", "config.toml", "recipe.json", "memory.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"=", b"3"])
def test_a_file_that_cannot_be_parsed_is_named(folder: Path, name: str, content: bytes) -> None:
    if name == "config.toml" and content != b"\xff\xfe":
        content = b"= {"
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        getattr(Run(folder), Path(name).stem)
    assert caught.value.where == str(folder / name)


@pytest.mark.parametrize("key", ["stages", "tasks", "known_at", "clients", "data"])
def test_a_key_that_was_changed_in_the_facts_is_their_damage(folder: Path, key: str) -> None:
    path = folder / "facts.json"
    path.write_text(path.read_text().replace(f'"{key}"', '"kye"'))
    with pytest.raises(UserError) as caught:
        Run(folder).table()
    assert caught.value.where == str(path)


@pytest.mark.parametrize("content", ["", CONFIG[:20]])
def test_an_empty_or_cut_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.toml").write_text(content)
    with pytest.raises(UserError) as caught:
        page.write([folder], folder / "page.html")
    assert caught.value.where == str(folder / "config.toml")


@pytest.mark.parametrize(
    ("before", "after"), [('"task":0', '"task":7'), ('"client":"b"', '"client":"z"'),
                          ('"stage":0', '"stage":1')],
)  # fmt: skip
def test_an_event_of_something_that_the_run_does_not_have_is_damage(
    folder: Path, before: str, after: str
) -> None:
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(UserError) as caught:
        Run(folder).table()
    assert caught.value.where == str(path)


def test_no_model_is_chosen_from_a_record_without_scores(folder: Path) -> None:
    (folder / "events.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="no scores in the record"):
        _ = Predictor(folder, "a", "").chosen
