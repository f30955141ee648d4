"""Which test executes which lines of the modules under mutation, and how long it takes.

Each file of tests is run in a forked process, large ones in several, as many at once as there are
workers. A test that fails or is skipped, say for a missing package, has no reach: it could not
tell a mutant from the original.
"""

import json
import math
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from .forks import SOURCE, Task, all_at_once

__all__ = ["measure", "passing"]

SHARD = 8.0  # seconds of traced tests in one process
Tests = dict[str, dict[str, Any]]  # by id: the seconds, and by module the lines


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


class Tracing:
    """Runs one shard of the tests and traces each of them by itself."""

    def __init__(self, shard: int, shards: int, files: frozenset[str]) -> None:
        self.shard, self.shards, self.files = shard, shards, files
        self.tests: Tests = {}
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep this shard's tests."""
        items[:] = items[self.shard :: self.shards]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        """Trace set-up, call and teardown of one test."""
        tracer, start = Tracer(self.files), time.process_time()
        threading.settrace(tracer.enter)
        sys.settrace(tracer.enter)
        yield
        sys.settrace(None)
        threading.settrace(None)
        lines: dict[str, list[int]] = {}
        for file, line in sorted(tracer.lines):
            lines.setdefault(str(Path(file).relative_to(SOURCE)), []).append(line)
        seconds = round(time.process_time() - start, 3)
        self.tests[item.nodeid] = {"seconds": seconds, "lines": lines}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that does not pass."""
        if not report.passed:
            self.failed.add(report.nodeid)

    def result(self) -> Tests:
        """The tests that passed."""
        return {id: test for id, test in self.tests.items() if id not in self.failed}


class Passing:
    """Notes which tests pass."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of set-up, call or teardown."""
        (self.passed if report.passed else self.failed).add(report.nodeid)

    def result(self) -> list[str]:
        """The tests of which no part failed or was skipped."""
        return sorted(self.passed - self.failed)


def measure(places: Mapping[str, float], workers: int) -> dict[str, Tests]:
    """The reach of the tests of each place, given about how many seconds it takes."""
    targets = tomllib.loads(Path(__file__).with_name("targets.toml").read_text())
    files = frozenset(str(SOURCE / name) for name in (*targets["modules"], *targets["named"]))
    found: dict[str, Tests] = {place: {} for place in places}
    with tempfile.TemporaryDirectory(prefix="atoll-reach-") as folder:
        tasks: list[Task] = []
        for place in sorted(places, key=lambda place: -places[place]):
            shards = 1 + int(places[place] // SHARD)
            for shard in range(shards):
                plugin = Tracing(shard, shards, files)
                path = Path(folder) / f"{len(tasks)}.json"
                tasks.append(Task([place], plugin, path, plugin.result))
        for task in all_at_once(tasks, workers):
            if task.path.exists():  # a file that cannot be imported here has no tests
                found[task.tests[0]].update(json.loads(task.path.read_text()))
    return found


def passing(tests: Mapping[str, float], workers: int) -> set[str]:
    """Those of some tests, given their seconds, that pass on this machine."""
    groups: list[list[str]] = []
    spent = math.inf
    for id in sorted(tests):
        if spent > SHARD:
            groups.append([])
            spent = 0.0
        groups[-1].append(id)
        spent += tests[id]
    found: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="atoll-reach-") as folder:
        tasks: list[Task] = []
        for number, group in enumerate(groups):
            plugin = Passing()
            path = Path(folder) / f"{number}.json"
            tasks.append(Task(group, plugin, path, plugin.result))
        for task in all_at_once(tasks, workers):
            found |= set(json.loads(task.path.read_text()) if task.path.exists() else ())
    return found
