"""The local engine: who is asked, what is kept, where a run's folder is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.errors import ClientFailedError, InterruptedRunError, UserError
from atoll.core.federation import Moment
from atoll.core.messages import Check, Empty, Weights, pack
from atoll.core.record import read_events
from atoll.engines.local import LocalEngine, local_engine
from atoll.runs.config import RunConfig, change, resolve
from atoll.runs.execute import execute
from atoll.runs.folders import fresh_folder, last_folder, recorded
from atoll.runs.loop import Progress
from atoll.runs.parts import Parts, parts

FIRST = Moment(0, 0, 2)


def config(method: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "data": "wine", "rounds": 2, "clients": 3, "widths": [4], "epochs": 1,
        "engine.mode": "loop", "checkpoint_seconds": 0,
    }  # fmt: skip
    return resolve(change({"method": method}, {**values, **changes}), "test")


@pytest.fixture
def alone() -> Parts:
    return parts(config("alone"))


def test_a_client_is_built_when_it_is_first_asked(alone: Parts) -> None:
    engine = LocalEngine(alone)
    assert engine.states() == {}
    engine.carry("fit", FIRST, {"site-1": pack(Empty())})
    assert list(engine.states()) == ["site-1"]


def test_a_client_lives_on_between_messages(alone: Parts) -> None:
    engine = LocalEngine(alone)
    engine.carry("fit", FIRST, {"site-0": pack(Empty())})
    once = {n: t.clone() for n, t in engine.states()["site-0"].items()}
    engine.carry("fit", Moment(0, 1, 2), {"site-0": pack(Empty())})
    twice = engine.states()["site-0"]
    assert any(not torch.equal(once[name], twice[name]) for name in once)


def test_a_client_given_its_state_back_answers_as_it_would_have(alone: Parts) -> None:
    first, second = LocalEngine(alone), LocalEngine(alone)
    first.carry("fit", FIRST, {"site-0": pack(Empty())})
    second.restore(first.states())
    later = Moment(0, 1, 2)
    answers = [e.carry("fit", later, {"site-0": pack(Empty())}) for e in (first, second)]
    assert answers[0] == answers[1]
    for name, tensor in first.states()["site-0"].items():
        assert torch.equal(second.states()["site-0"][name], tensor)


def test_a_state_given_back_is_copied(alone: Parts) -> None:
    first, second = LocalEngine(alone), LocalEngine(alone)
    first.carry("fit", FIRST, {"site-0": pack(Empty())})
    kept = {n: t.clone() for n, t in first.states()["site-0"].items()}
    second.restore(first.states())
    second.carry("fit", Moment(0, 1, 2), {"site-0": pack(Empty())})
    for name, tensor in first.states()["site-0"].items():
        assert torch.equal(kept[name], tensor)


def test_every_client_that_was_asked_answers(alone: Parts) -> None:
    packets = {id: pack(Empty()) for id in ("site-0", "site-2")}
    assert sorted(LocalEngine(alone).carry("fit", FIRST, packets)) == ["site-0", "site-2"]


def test_what_a_client_raises_is_told_with_its_name_and_action() -> None:
    engine = LocalEngine(parts(config("fedavg")))
    with pytest.raises(ClientFailedError, match="client site-1 failed in check: ") as caught:
        engine.carry("check", FIRST, {"site-1": pack(Check(0, {"other": torch.zeros(2)}))})
    assert caught.value.__cause__ is not None


def run_on_images(sizes: list[int], folder: Path) -> None:
    """Four sites with so many images of 8 x 8, of which the last blocks of a ResNet leave 1 x 1."""
    changes = {
        "data": "digits-shifted", "public": "digits-public", "public.rows": 64, "split": "domains",
        "sizes": sizes, "models": ["resnet10"] * 4, "batch": 8, "rounds": 1, "epochs": 1,
        "engine.mode": "loop", "pretrain_epochs": 1,
    }  # fmt: skip
    execute(resolve(change({"method": "fml"}, changes), "test"), folder, local_engine)


def test_batch_norm_trains_where_the_last_batch_has_one_row(tmp_path: Path) -> None:
    run_on_images([17, 9, 8, 8], tmp_path / "run")
    assert (tmp_path / "run" / "result.json").exists()


def test_a_job_that_fails_is_reported_with_its_client(tmp_path: Path) -> None:
    """One row has no spread, so batch norm raises."""
    message = r"client site-2 failed in \w+: ValueError: Expected more than 1 value per channel"
    with pytest.raises(ClientFailedError, match=message):
        run_on_images([17, 9, 1, 8], tmp_path / "run")


def test_a_message_of_another_kind_is_refused() -> None:
    engine = LocalEngine(parts(config("fedavg")))
    with pytest.raises(ClientFailedError, match="site-0 failed in fit"):
        engine.carry("fit", FIRST, {"site-0": pack(Check(0, {}))})
    with pytest.raises(ClientFailedError, match=r"failed in evaluate.*not an action"):
        engine.carry("evaluate", FIRST, {"site-0": pack(Weights({}))})


def test_whoever_watches_is_told_of_every_round(tmp_path: Path) -> None:
    told: list[Progress] = []
    execute(config("fedavg", rounds=3), tmp_path / "run", local_engine, watch=told.append)
    assert [(p.stage, p.stages, p.round, p.rounds) for p in told] == [
        (0, 1, 0, 3), (0, 1, 1, 3), (0, 1, 2, 3),
    ]  # fmt: skip
    assert [event for p in told for event in p.events] == read_events(tmp_path / "run")


def test_a_run_that_is_asked_to_stop_saves_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        execute(config("fedavg"), tmp_path / "run", local_engine, stopping=lambda: True)
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    execute(config("fedavg"), tmp_path / "run", local_engine, resume=True)
    assert (tmp_path / "run" / "result.json").exists()


def test_a_run_that_is_asked_to_stop_after_its_last_round_is_done(tmp_path: Path) -> None:
    execute(config("fedavg", rounds=1), tmp_path / "run", local_engine, stopping=lambda: True)
    assert (tmp_path / "run" / "result.json").exists()


def test_a_mistake_is_found_before_anything_is_written(tmp_path: Path) -> None:
    for changes in ({"clients": 999}, {"data": "whine"}, {"device": "tpu"}):
        with pytest.raises(UserError):
            execute(config("fedavg", **changes), tmp_path / "run", local_engine)
    assert list(tmp_path.iterdir()) == []


def test_the_config_of_a_folder_is_the_one_it_was_made_with(tmp_path: Path) -> None:
    given = config("fedavg", seed=7, rounds=1)
    execute(given, tmp_path / "run", local_engine)
    assert recorded(tmp_path / "run") == given


def test_folders_are_counted_up_and_the_newest_is_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fresh_folder("chfl") as first, fresh_folder("chfl") as second:
        assert [first, second] == [Path("runs/chfl-1"), Path("runs/chfl-2")]
        assert first.is_dir()
    assert not first.exists()  # nothing was written in it
    for name in ("chfl-2", "chfl-10", "chfl-x", "chfl-demo-11", "other-30"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    with fresh_folder("chfl") as folder:
        assert folder == Path("runs/chfl-11")
        assert last_folder("chfl") == Path("runs/chfl-10")  # the new one has nothing in it yet
        (folder / "config.toml").touch()
    assert last_folder("chfl") == Path("runs/chfl-11")
    with pytest.raises(UserError, match="no run of 'fedavg'"):
        last_folder("fedavg")
