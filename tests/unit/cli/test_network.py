"""The screens of `serve` and `join` in a log: once, then changes alone."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli import network
from atoll.cli.network import Changes, _interrupted
from atoll.core.errors import EXIT_INTERRUPTED, UserError
from atoll.engines.network.coordinator import Terms


def test_waiting_is_said_once_and_then_only_what_changes() -> None:
    now = [100.0]
    log = Changes(lambda: now[0])
    waiting = "waiting for 1 of 2: basel {}, last seen {} s ago, 0 bytes to it, 0 from it"
    assert log.changed([waiting.format("away", 3)])
    for seconds in range(4, 300):
        now[0] += 1
        assert not log.changed([waiting.format("away", seconds)])
    assert log.changed([waiting.format("connected", 0)])


def test_a_site_that_works_shows_progress_from_time_to_time() -> None:
    now = [100.0]
    log = Changes(lambda: now[0])
    line = "basel  connected to localhost:8102  run x-1 (fedavg)  {}  {:,} bytes have left"
    assert log.changed([line.format("idle for 0 s", 0)])
    now[0] += 1
    assert not log.changed([line.format("working on fit", 0)])
    now[0] += 20
    assert log.changed([line.format("working on fit", 1200)])
    now[0] += 20
    assert not log.changed([line.format("working on fit", 2400)])
    assert log.changed(["basel  the coordinator has revoked this site"])


def test_rounds_are_shown_some_seconds_apart() -> None:
    now = [100.0]
    log = Changes(lambda: now[0])
    line = "stage 1/1 round {}/9 done: basel working on fit, last seen 0 s ago, 5 bytes to it"
    assert [log.changed([line.format(n)]) for n in (1, 2)] == [True, False]
    now[0] += 11
    assert log.changed([line.format(3)])


def test_state_is_saved_only_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    error = _interrupted(tmp_path)
    assert (error.what, error.remedy) == (
        "interrupted before the first checkpoint: nothing was saved", "start it again",
    )  # fmt: skip
    (tmp_path / "config.toml").write_text("")
    assert _interrupted(tmp_path).remedy == "start it anew with --resume"
    (tmp_path / "checkpoint.safetensors").write_bytes(b"")
    error = _interrupted(tmp_path)
    assert (error.what, error.exit_code) == ("interrupted; the state is saved", EXIT_INTERRUPTED)


@pytest.mark.parametrize(("arguments", "asks"), [([], True), (["--no-answer"], False)])
def test_serve_asks_whether_joining_helps_unless_it_is_told_not_to(
    arguments: list[str], asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `serve` passes on; the coordinator is stopped before it does anything."""
    terms = []

    def stop(kit: object, todo: object, chosen: Terms, *others: object) -> None:
        terms.append(chosen)
        raise UserError("stopped", "the test", "none")

    monkeypatch.setattr("atoll.engines.network.coordinator.serve", stop)
    monkeypatch.setattr("atoll.engines.network.kits.Kit.check", lambda kit: "")
    run = tmp_path / "run.toml"
    run.write_text('data = "wine"\nmethod = "fedavg"\n')
    app = typer.Typer()
    network.register(app)
    out = ["--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["serve", str(tmp_path), str(run), *out, *arguments])
    assert isinstance(result.exception, UserError)
    assert [one.answer for one in terms] == [asks]
