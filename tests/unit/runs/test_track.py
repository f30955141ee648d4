"""Trackers: what they are told, and that none of them can stop a run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.core.record import Message, Round, Score
from atoll.runs import track
from atoll.runs.config import RunConfig

EVENTS = (
    Round(0, 1, {"loss": 0.5}),
    Message(0, 1, "server", "a", "fit", "Fit", (), 1, 10, 30),
    Message(0, 1, "a", "server", "fit", "Fitted", (), 1, 10, 20),
    Score(0, 1, "a", 0, "", "test", 10, 8, 0.8),
    Score(0, 1, "b", 0, "", "test", 10, 6, 0.6),
)
TINY = ["data=wine", "clients=2", "widths=[4]", "engine.mode=loop", "rounds=3", "score_every=1"]


def run(*more: str) -> int:
    from atoll import cli  # noqa: PLC0415

    changes = [word for item in TINY for word in ("--set", item)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["atoll", "run", "fedavg", *changes, "--quiet", *more])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def test_a_round_becomes_numbers_with_names() -> None:
    assert track.values(EVENTS) == {
        "round/loss": 0.5, "accuracy/all sites": pytest.approx(0.7), "accuracy/a": 0.8,
        "accuracy/b": 0.6, "bytes/up": 20.0, "bytes/down": 30.0,
    }  # fmt: skip


class Broken:
    """A tracker that fails when it is told, or at once."""

    def __init__(self, config: RunConfig, folder: Path, at: str) -> None:
        self.at = at
        self._maybe("begin")

    def _maybe(self, now: str) -> None:
        if self.at == now:
            raise ConnectionError(f"no network at {now}")

    def log(self, values: Any, step: int) -> None:
        self._maybe("log")

    def close(self) -> None:
        self._maybe("close")


@pytest.mark.parametrize("at", ["begin", "log", "close"])
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = ("json", lambda config, folder: Broken(config, folder, at))
    monkeypatch.setattr(track, "TRACKERS", {"broken": broken})
    assert run("--out", str(tmp_path / "run"), "--track", "broken") == 0
    said = capfd.readouterr().err
    assert said.count("broken failed and is left out: ConnectionError: no network") == 1
    assert run("--out", str(tmp_path / "plain")) == 0
    one, other = ((tmp_path / n / "events.jsonl").read_bytes() for n in ("run", "plain"))
    assert one == other


def test_what_is_unknown_or_not_installed_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="unknown tracker 'tensorbord'") as error:
        track.checked(["tensorbord"])
    assert "tensorboard" in error.value.remedy
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert run("--out", str(tmp_path / "run"), "--track", "trackio") == 2
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra track: tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415
        EventAccumulator,
    )

    assert run("--out", str(tmp_path / "run"), "--track", "tensorboard") == 0
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("round/loss")] == [0, 1, 2]
    assert "accuracy/site-0" in found.Tags()["scalars"]


def test_mlflow_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra track: mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert run("--out", str(tmp_path / "run"), "--track", "mlflow") == 0
    client = mlflow.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    home = client.get_experiment_by_name("atoll").experiment_id
    (made,) = client.search_runs([home])
    history = client.get_metric_history(made.info.run_id, "round/loss")
    assert [entry.step for entry in history] == [0, 1, 2]
    assert made.data.params["method.name"] == "fedavg"
    assert made.info.status == "FINISHED"


def test_trackio_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs the extra track: trackio")
    assert run("--out", str(tmp_path / "run"), "--track", "trackio") == 0
    assert any((tmp_path / "trackio").iterdir())
