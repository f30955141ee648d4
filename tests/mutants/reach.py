"""Which test executes which lines of the modules under mutation, and how long it takes.

A pytest plugin: `pytest -p tests.mutants.reach` writes one JSON file to the path in
ATOLL_REACH: for each test its seconds and, for each module, the lines that ran.
"""

import json
import os
import sys
import threading
import time
import tomllib
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from .forks import warm

SOURCE = str(Path(__file__).resolve().parents[2] / "src" / "atoll") + os.sep


class Tracer:
    """Records the executed lines of the modules under mutation."""

    def __init__(self, files: frozenset[str]) -> None:
        self.files = files
        self.lines: set[tuple[str, int]] = set()

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        """Follow a call into one of the files; leave every other one alone."""
        if frame.f_code.co_filename not in self.files:
            return None
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.step

    def step(self, frame: FrameType, event: str, argument: object) -> Any:
        """Record one line."""
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.step


class Reach:
    """Traces each test by itself, and writes what it has after each file of tests."""

    def __init__(self, path: Path, files: frozenset[str]) -> None:
        self.path, self.files = path, files
        self.current = ""
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        """Trace set-up, call and teardown of one test."""
        if self.current != (file := item.nodeid.split("::")[0]):
            self.write()
            self.current = file
        tracer, start = Tracer(self.files), time.process_time()
        threading.settrace(tracer.enter)
        sys.settrace(tracer.enter)
        yield
        sys.settrace(None)
        threading.settrace(None)
        lines: dict[str, list[int]] = {}
        for file, line in sorted(tracer.lines):
            lines.setdefault(file.removeprefix(SOURCE), []).append(line)
        seconds = round(time.process_time() - start, 3)
        self.tests.setdefault(item.nodeid, {}).update(seconds=seconds, lines=lines)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Forget a test that does not pass: it could not tell a mutant from the original."""
        if not report.passed:
            self.tests.setdefault(report.nodeid, {})["failed"] = True

    def pytest_sessionfinish(self) -> None:
        """Write the last file's too."""
        self.write()

    def write(self) -> None:
        """Write what was measured so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.tests))


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin's state; what tests import first is no cost of the first test."""
    warm()
    targets = tomllib.loads(Path(__file__).with_name("targets.toml").read_text())
    files = frozenset(SOURCE + name for name in (*targets["modules"], *targets["named"]))
    config.pluginmanager.register(Reach(Path(os.environ["ATOLL_REACH"]), files))
