"""Which mutants are tried, and which tests are run against each of them."""

import ast
import functools
import gzip
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .operators import Mutant, mutants
from .reach import measure, passing

__all__ = [
    "CACHE",
    "ROOT",
    "MeasuredTest",
    "Reach",
    "all_mutants",
    "chosen",
    "digest_of",
    "machine",
    "sample",
]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "atoll"
CACHE = ROOT / ".mutants"
REACH = CACHE / "reach.json.gz"
SIZE, LEAST = 610, 4  # mutants in the sample, and of a module at least
MOST_TESTS = 40  # against one mutant
CHEAP = 0.2  # seconds
SEED = "18"


@dataclass(frozen=True)
class MeasuredTest:
    """A test: what it costs, and which lines of which modules it runs."""

    id: str
    seconds: float  # while traced, so more than it takes otherwise
    lines: Mapping[str, frozenset[int]]
    place: str = ""  # with which it was measured

    @property
    def file(self) -> str:
        """The file that holds it."""
        return self.id.split("::")[0]


def all_mutants(files: Iterable[str]) -> dict[str, list[Mutant]]:
    """The mutants of each file."""
    return {file: mutants(file, (SOURCE / file).read_text()) for file in files}


def sample(population: Mapping[str, Sequence[Mutant]]) -> list[Mutant]:
    """A seeded sample in which each module has its share, and at least LEAST.

    Ordered by a hash of seed and key: an edit of a function leaves all others in their places.
    """
    total = sum(len(every) for every in population.values())
    found: list[Mutant] = []
    for every in population.values():
        found += sorted(every, key=_lot)[: max(LEAST, -(-SIZE * len(every) // total))]
    return sorted(found, key=_lot)  # a budget that ends early has tried some of each


def _lot(mutant: Mutant) -> str:
    return sha256(f"{SEED} {mutant.key}".encode()).hexdigest()


def chosen(mutant: Mutant, tests: Sequence[MeasuredTest], limit: float) -> list[MeasuredTest]:
    """The tests that run a mutant's lines, those that are most likely to notice it first.

    Those with its method's name for a parameter, such as a whole run, if they are quick; all cheap
    ones of its module's own files, whatever the limits; other cheap ones of the folder that mirrors
    its package; slower ones of the first two kinds; then all others by cost.
    """
    name = Path(mutant.file).stem
    folder = f"tests/unit/{Path(mutant.file).parent}/"

    def rank(test: MeasuredTest) -> tuple[int, float, str]:
        own = is_own(test, mutant)
        whole = test.id.endswith(f"[{name}]")
        quick = whole and test.seconds < 3 * CHEAP
        cheap, near = test.seconds < CHEAP, test.file.startswith(folder)
        order = (quick, own and cheap, near and cheap, whole, own, True).index(True)
        return order, test.seconds, test.id

    found: list[MeasuredTest] = []
    spent, count = 0.0, 0  # of those with a limit
    for test in sorted((test for test in tests if reaches(test, mutant)), key=rank):
        if not (is_own(test, mutant) and test.seconds < CHEAP):
            spent, count = spent + test.seconds, count + 1
            if found and (spent > limit or count > MOST_TESTS):
                break
        found.append(test)
    return found


def is_own(test: MeasuredTest, mutant: Mutant) -> bool:
    """Whether a test is in a file of the mutant's module."""
    return Path(test.file).name.startswith(f"test_{Path(mutant.file).stem}")


def reaches(test: MeasuredTest, mutant: Mutant) -> bool:
    """Whether a test runs what is changed.

    The fields of a class and constants are run by whoever runs the module, and read by a test in
    a file of the module or with the module's name for a parameter: one of its options, say.
    """
    lines = test.lines.get(mutant.file, frozenset())
    if mutant.inside:
        return not lines.isdisjoint(mutant.lines)
    return bool(lines) or is_own(test, mutant) or test.id.endswith(f"[{Path(mutant.file).stem}]")


class Reach:
    """What is known of the tests of some places, kept in one file.

    A place is a folder, a file or a single test.
    """

    def __init__(self, places: Iterable[str], workers: int) -> None:
        self.workers = workers
        self.files: list[str] = []
        for place in places:
            folder = ROOT / place
            several = sorted(folder.rglob("test_*.py")) if folder.is_dir() else []
            self.files += [str(path.relative_to(ROOT)) for path in several] or [place]
        self.kept: dict[str, Any] = {}
        if REACH.exists():
            self.kept = json.loads(gzip.decompress(REACH.read_bytes()))

    def tests(self, modules: Iterable[str]) -> list[MeasuredTest]:
        """All tests; where a file or one of the modules that it runs was edited, measured anew."""
        sources = {f"src/atoll/{module}" for module in modules}
        stale = [file for file in self.files if _stale(self.kept.get(file), sources)]
        before = {file: _seconds(self.kept.get(file), file) for file in stale}
        for file, tests in measure(before, self.workers).items():
            run = {f"src/atoll/{name}" for entry in tests.values() for name in entry["lines"]}
            paths = sorted({file.split("::")[0], *run})
            digests = {path: _digest(ROOT / path) for path in paths}
            passed = {machine(): dict.fromkeys(tests, True)}
            self.kept[file] = {"digests": digests, "tests": tests, "passed": passed}
        if stale:
            self._write()
        found = []
        for file in self.files:
            for id, entry in self.kept.get(file, {"tests": {}})["tests"].items():
                lines = {name: frozenset(numbers) for name, numbers in entry["lines"].items()}
                found.append(MeasuredTest(id, entry["seconds"], lines, file))
        return found

    def passing(self, tests: Iterable[MeasuredTest]) -> set[str]:
        """Which tests pass on this machine; those measured on another one are run here first."""
        here = {f: e["passed"].setdefault(machine(), {}) for f, e in self.kept.items()}
        every = {test.id: test for test in tests}
        unsure = {id: test.seconds for id, test in every.items() if id not in here[test.place]}
        right = passing(unsure, self.workers)
        for id in unsure:
            here[every[id].place][id] = id in right
        if unsure:
            self._write()
        return {id for id, test in every.items() if here[test.place][id]}

    def _write(self) -> None:
        CACHE.mkdir(exist_ok=True)
        REACH.write_bytes(gzip.compress(json.dumps(self.kept).encode()))


@functools.cache
def machine() -> str:
    """What a test's outcome may depend on, besides the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{processor}, {os.cpu_count()} cores, {versions}"


def _stale(entry: Mapping[str, Any] | None, sources: Set[str]) -> bool:
    """Whether a file of tests runs one of the sources and must be measured, again or at all."""
    if entry is None:
        return True
    digests: dict[str, str] = entry["digests"]
    edited = any(_digest(ROOT / path) != known for path, known in digests.items())
    own = any(_digest(ROOT / p) != known for p, known in digests.items() if p.startswith("tests/"))
    return own or (edited and not sources.isdisjoint(digests))


@functools.cache
def _digest(path: Path) -> str:
    return sha256(path.read_bytes() if path.exists() else b"").hexdigest()[:16]


def _seconds(entry: Mapping[str, Any] | None, place: str) -> float:
    """What a place took before; where it was never run, a guess: golden tests are whole runs."""
    if entry is None:
        return (
            60
            if place.startswith("tests/golden")
            else (ROOT / place.partition("::")[0]).stat().st_size / 1000
        )
    return float(sum(test["seconds"] for test in entry["tests"].values()))


@functools.cache
def _functions(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text() if (ROOT / file).exists() else ""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


def digest_of(test: str) -> str:
    """A hash of a test's own source, which an edit of its neighbours leaves as it is."""
    file, _, name = test.partition("::")
    return sha256(_functions(file).get(name.split("[")[0], "").encode()).hexdigest()[:16]
