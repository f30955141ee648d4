"""The live report says how each run stands."""

import socket
from pathlib import Path

import pytest

from atoll.core.errors import InterruptedRunError
from atoll.core.storage import LOCK, FolderLock
from atoll.engines.local import local_engine
from atoll.report import watch
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute


def test_a_run_that_was_stopped_is_not_shown_as_running(tmp_path: Path) -> None:
    changes = {"data": "wine", "rounds": 3, "clients": 2, "epochs": 1, "widths": [4]}
    config = resolve(change(read("fedavg"), changes), "test")
    with pytest.raises(InterruptedRunError):
        execute(config, tmp_path, local_engine, stopping=lambda: True)
    stopped = f"{tmp_path}: round 1/3 (stopped; continue with --resume)"
    assert watch._state(tmp_path) == stopped
    before = list(watch._stamps([tmp_path]))
    with FolderLock(tmp_path):
        assert watch._state(tmp_path) == f"{tmp_path}: round 1/3"
        assert list(watch._stamps([tmp_path])) != before  # so that the page is made anew
    (tmp_path / LOCK).write_text("process 999999999 on " + socket.gethostname() + ", x")
    assert watch._state(tmp_path) == stopped  # it was killed, and its lock file is still there
    (tmp_path / LOCK).write_text("process 1 on another-machine, x")
    assert watch._state(tmp_path) == f"{tmp_path}: round 1/3"
    execute(config, tmp_path, local_engine, resume=True)
    assert watch._state(tmp_path) == f"{tmp_path}: ended after 3 rounds"
