"""Which mutants are tried, and which tests are run against each of them."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .operators import Mutant, mutants

__all__ = [
    "CACHE",
    "ROOT",
    "MeasuredTest",
    "all_mutants",
    "chosen",
    "digest_of",
    "measured",
    "sample",
]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "atoll"
CACHE = ROOT / ".mutants"
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

    Those with its method's name for a parameter, such as a whole run, if they are quick; the cheap
    ones of its module's own file; slower ones of both kinds; then all others by cost.
    """
    name = Path(mutant.file).stem

    def rank(test: MeasuredTest) -> tuple[int, float, str]:
        own = Path(test.file).name.startswith(f"test_{name}")
        whole = test.id.endswith(f"[{name}]")
        quick = whole and test.seconds < 3 * CHEAP
        order = (quick, own and test.seconds < CHEAP, whole, own, True).index(True)
        return order, test.seconds, test.id

    found: list[MeasuredTest] = []
    spent = 0.0
    for test in sorted((test for test in tests if reaches(test, mutant)), key=rank):
        spent += test.seconds
        if found and (spent > limit or len(found) == MOST_TESTS):
            break
        found.append(test)
    return found


def reaches(test: MeasuredTest, mutant: Mutant) -> bool:
    """Whether a test runs what is changed; a class's fields are run by whoever runs its module."""
    lines = test.lines.get(mutant.file, frozenset())
    return not lines.isdisjoint(mutant.lines) if mutant.inside else bool(lines)


def measured(places: Iterable[str]) -> list[MeasuredTest]:
    """The reach of all tests; where a file of tests or what it runs was edited, measured anew.

    A place is a folder, a file or a single test.
    """
    files: list[str] = []
    for place in places:
        folder = ROOT / place
        several = sorted(folder.rglob("test_*.py")) if folder.is_dir() else []
        files += [str(path.relative_to(ROOT)) for path in several] or [place]
    stale = [file for file in files if not _fresh(file)]
    if stale:
        _measure(stale)
    tests = []
    for file in files:
        for id, entry in json.loads(_kept(file).read_text())["tests"].items():
            lines = {name: frozenset(numbers) for name, numbers in entry["lines"].items()}
            tests.append(MeasuredTest(id, entry["seconds"], lines))
    return tests


def _kept(file: str) -> Path:
    return CACHE / "reach" / f"{file.replace('/', '-').replace('::', '-')}.json"


def _fresh(file: str) -> bool:
    if not _kept(file).exists():
        return False
    digests: dict[str, str] = json.loads(_kept(file).read_text())["digests"]
    return all(_digest(ROOT / path) == known for path, known in digests.items())


@functools.cache
def _digest(path: Path) -> str:
    return sha256(path.read_bytes() if path.exists() else b"").hexdigest()[:16]


def _measure(files: Sequence[str]) -> None:
    raw = CACHE / "reach.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.reach", *files]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "ATOLL_REACH": str(raw)}, check=False)
    split(json.loads(raw.read_text()), files)


def split(raw: Mapping[str, Any], files: Sequence[str]) -> None:
    """Keep the reach of each file of tests by itself, without tests that failed or were skipped."""
    (CACHE / "reach").mkdir(parents=True, exist_ok=True)
    for file in files:
        mine = {
            id: e for id, e in raw.items() if id == file or id.startswith((f"{file}::", f"{file}["))
        }
        own = {id: entry for id, entry in mine.items() if "failed" not in entry}
        sources = {f"src/atoll/{name}" for entry in own.values() for name in entry["lines"]}
        paths = sorted({file.split("::")[0], *sources})
        digests = {path: _digest(ROOT / path) for path in paths}
        _kept(file).write_text(json.dumps({"digests": digests, "tests": own}))


@functools.cache
def _functions(file: str) -> dict[str, str]:
    tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).exists() else ast.Module([], [])
    return {n.name: ast.unparse(n) for n in tree.body if isinstance(n, ast.FunctionDef)}


def digest_of(test: str) -> str:
    """A hash of a test's own source, which an edit of its neighbours leaves as it is."""
    file, _, name = test.partition("::")
    return sha256(_functions(file).get(name.split("[")[0], "").encode()).hexdigest()[:16]
