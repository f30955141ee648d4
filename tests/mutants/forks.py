"""Tests against one mutant, in a forked process that imports torch and pytest no more.

The parent imports every library that the tests need, and `atoll`. A child forgets the module with
the fault and all that import it, and imports them anew: nothing holds a copy of the original.
"""

import ast
import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

__all__ = ["ROOT", "SOURCE", "Outcome", "Task", "all_at_once", "module_name", "run", "warm"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "atoll"
MEMORY = 16 * 2**30  # bytes of addresses that a child may add: a fault may ask for any size
PATIENCE = 300  # seconds for one task: tests that hang on this machine are of no use here
FLAGS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
FLAGS += ["--assert=plain"]  # nobody reads why an assertion fails
FLAGS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported by the parent


# What torch and atoll import only when it is needed: seconds in every child
LAZY = (
    *("sklearn.cluster", "sklearn.datasets", "sklearn.decomposition", "sklearn.linear_model"),
    *("sklearn.manifold", "sklearn.preprocessing", "matplotlib.pyplot", "pyarrow.parquet"),
    *("numpy.testing", "sympy", "torch._dynamo", "torch.distributed", "torch.func", "torch.onnx"),
)


@dataclass(frozen=True)
class Task:
    """Tests for one process, with a plugin; `result` is written to `path` as JSON at the end."""

    tests: Sequence[str]
    plugin: object
    path: Path
    result: Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a mutant."""

    status: str  # killed, survived, timeout
    killer: str  # the test that failed first, "" where none did
    seconds: float


class Loader(importlib.abc.SourceLoader):
    """Gives one module another source."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        """The original file, for tracebacks and for code that reads its own source."""
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        """The changed source; there is no compiled file."""
        if str(path) != str(self.path):
            raise OSError(path)
        return self.source.encode()


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module, and leaves all others to those that come after."""

    def __init__(self, file: str, source: str) -> None:
        self.name, self.path = module_name(file), SOURCE / file
        self.source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module with the fault, if it is the one that is wanted."""
        if fullname != self.name:
            return None
        loader = Loader(self.path, self.source)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


class Verdict:
    """Notes which test fails first; does not shrink Hypothesis's examples."""

    def __init__(self) -> None:
        self.killer = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """After the conftest has chosen a profile, before any test is decorated."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A fault with which the module cannot be imported."""
        if report.failed and not self.killer:
            self.killer = f"{report.nodeid} (import)"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first failure."""
        if report.failed and not self.killer:
            self.killer = report.nodeid


def module_name(file: str) -> str:
    """The module of a file below src/atoll."""
    parts = ["atoll", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def warm() -> None:
    """Import what the tests import; they use the CPU, and one thread each."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = False  # else every child would compile what it imports
    for name in (*LAZY, *_imports()):
        with contextlib.suppress(ImportError):  # not everybody has NVFlare or an optional package
            importlib.import_module(name)
    gc.freeze()  # else every child would look through all that torch holds


@functools.cache
def _imports() -> dict[str, frozenset[str]]:
    """The modules of `atoll`, and what each of them imports when it is imported."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        names = set[str]()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[module_name(str(path.relative_to(SOURCE)))] = frozenset(names)
    return found


def dependents(module: str) -> set[str]:
    """A module and all that import it, directly or not."""
    found, before = {module}, set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, imports in _imports().items() if imports & found}
    return found


def _forget(module: str) -> None:
    """Take a module and what depends on it out of this process."""
    for name in dependents(module) & sys.modules.keys():
        parent, _, own = name.rpartition(".")
        if hasattr(sys.modules.get(parent), own):
            delattr(sys.modules[parent], own)
        del sys.modules[name]


def all_at_once(tasks: Sequence[Task], workers: int) -> Sequence[Task]:
    """Run each task in a forked process, as many at once as there are workers."""
    if tasks:
        warm()
    running = set[int]()
    for task in tasks:
        if len(running) == workers:
            running.remove(os.wait()[0])
        if not (child := os.fork()):
            _become(task)
        running.add(child)
    for child in running:
        os.waitpid(child, 0)
    return tasks


def _become(task: Task) -> None:
    """Become the test run of a task; never return."""
    try:
        os.chdir(ROOT)
        signal.alarm(PATIENCE)
        _redirect(task.path.with_suffix(".txt"))
        base = task.path.with_suffix("")
        os.environ["TMPDIR"] = tempfile.tempdir = str(task.path.parent)
        flags = [*FLAGS, "--continue-on-collection-errors", f"--basetemp={base}"]
        pytest.main([*flags, *task.tests], [task.plugin])
        task.path.write_text(json.dumps(task.result()))
    finally:
        os._exit(0)


def _redirect(path: Path) -> None:
    """Write what this process prints to a file."""
    output = os.open(path, os.O_RDWR | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)


def run(
    file: str, source: str, tests: Sequence[str], limit: float, end: float = math.inf
) -> Outcome | None:
    """Run tests in order against a module with a fault, until one fails or time is up.

    None where the moment `end` came first: nothing is known of the mutant then.
    """
    folder, start = Path(tempfile.mkdtemp(prefix="atoll-mutant-")), time.monotonic()
    child = os.fork()
    if not child:
        _child(file, source, tests, folder)
    status, ended = 0, False
    while not ended and time.monotonic() < min(start + limit, end):
        pid, status = os.waitpid(child, os.WNOHANG)
        ended = pid == child
        if not ended:
            time.sleep(0.02)
    if not ended:
        with contextlib.suppress(ProcessLookupError):  # it has not begun a group of its own yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    verdict, output = folder / "killer", folder / "output"
    killer = verdict.read_text() if verdict.exists() else ""
    text = output.read_text(errors="replace") if output.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - start, 2)
    if not ended:
        return Outcome("timeout", "", seconds) if start + limit <= end else None
    if status and not killer:  # a crash of the interpreter is the fault's doing, all else is ours
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"no test failed, yet the run did:\n{text[-3000:]}")
        killer = f"signal {os.WTERMSIG(status)}"
    return Outcome("killed" if killer else "survived", killer, seconds)


def _addresses() -> int:
    """Bytes of addresses that this process has mapped; torch for GPUs alone maps many."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _child(file: str, source: str, tests: Sequence[str], folder: Path) -> None:
    """Become a test run; never return."""
    code = 70
    try:
        os.setsid()
        os.chdir(ROOT)
        _redirect(folder / "output")
        most = MEMORY + _addresses()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        _forget(module_name(file))
        sys.meta_path.insert(0, Finder(file, source))
        verdict = Verdict()
        code = int(pytest.main(["-x", *FLAGS, f"--basetemp={folder}/base", *tests], [verdict]))
        (folder / "killer").write_text(verdict.killer)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
