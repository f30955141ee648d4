"""`make mutants`: which small faults do the tests notice?

Tries all mutants of the named functions and then a seeded sample of each module, each in a process
of its own, until the budget is spent; the next call goes on from there. Then writes
docs/mutants.md. All that is known is in the folder .mutants, which may move between machines.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from .choice import (
    CACHE,
    ROOT,
    MeasuredTest,
    Reach,
    all_mutants,
    chosen,
    digest_of,
    machine,
    sample,
)
from .forks import run, warm
from .operators import Mutant
from .summary import Result, page

HERE = Path(__file__).parent
# CPU seconds of tests, while traced, against one mutant of the sample and of a named function
USUAL, NAMED = 4.0, 10.0
RESULTS = CACHE / "results.jsonl"
Entry = dict[str, Any]
Plan = dict[str, list[MeasuredTest]]  # which tests are run against a mutant, by its key


class Results:
    """What was found before, by the mutant's digest: one line each, of several the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            self.entries.update(json.loads(line))

    def known(self, mutant: Mutant, tests: Sequence[MeasuredTest]) -> Entry | None:
        """An outcome that still holds: its killer, or all tests that it survived, are unchanged."""
        entry = self.entries.get(mutant.digest)
        if entry is None:
            return None
        if entry["status"] == "killed" and "::" in entry["killer"]:
            return entry if digest_of(entry["killer"]) == entry["tests"] else None
        return entry if entry["tests"] == _digest(tests) else None

    def add(self, mutant: Mutant, tests: Sequence[MeasuredTest], entry: Entry) -> None:
        """Keep an outcome, with a hash of the tests that it depends on."""
        single = entry["status"] == "killed" and "::" in entry["killer"]
        seen = digest_of(entry["killer"]) if single else _digest(tests)
        self.write(mutant.digest, {**entry, "tests": seen})

    def write(self, key: str, entry: Entry) -> None:
        """Add a line to the cache."""
        self.entries[key] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # short lines: two workers may write at once
            file.write(json.dumps({key: entry}) + "\n")


def _digest(tests: Sequence[MeasuredTest]) -> str:
    text = "\n".join(f"{test.id} {digest_of(test.id)}" for test in tests)
    return sha256(text.encode()).hexdigest()[:16]


def attempt(mutant: Mutant, tests: Sequence[MeasuredTest], end: float) -> Entry | None:
    """Run the tests against a mutant; None where the budget is spent before they end."""
    if not tests:
        return {"status": "unreached", "killer": "", "seconds": 0.0}
    limit = 20 + 4 * sum(test.seconds for test in tests)
    outcome = run(mutant.file, mutant.source, [test.id for test in tests], limit, end)
    return None if outcome is None else vars(outcome).copy()


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--budget", type=float, default=60.0, help="minutes; 0: the page alone")
    parser.add_argument("--workers", type=int, default=1, help="processes at once")
    parser.add_argument("--part", choices=("named", "sample", "all"), default="all")
    parser.add_argument("--only", default="", help="mutants whose key contains this")
    parser.add_argument("--commit", default="", help="of this code, where git cannot tell")
    parser.add_argument("--no-page", action="store_true", help="leave docs/mutants.md alone")
    return parser.parse_args()


def main() -> None:
    """Try mutants until the budget is spent."""
    asked = arguments()
    end = time.monotonic() + 60 * asked.budget
    targets = tomllib.loads((HERE / "targets.toml").read_text())
    named_in: dict[str, list[str]] = targets["named"]
    population = all_mutants(sorted({*targets["modules"], *named_in}))
    drawn = sample({file: population[file] for file in targets["modules"]})
    named = [m for file, names in named_in.items() for m in population[file] if m.function in names]
    parts = {"named": named, "sample": drawn, "all": [*named, *drawn]}
    wanted = {m.key: m for m in parts[asked.part] if asked.only in m.key}
    is_named = {mutant.key for mutant in named}
    if asked.budget:
        reach, results = Reach(targets["tests"], asked.workers), Results(RESULTS)
        tests = reach.tests({m.file for m in wanted.values()})
        plan = {k: chosen(m, tests, NAMED if k in is_named else USUAL) for k, m in wanted.items()}
        passing = reach.passing([test for tests in plan.values() for test in tests])
        plan = {k: [test for test in tests if test.id in passing] for k, tests in plan.items()}
        todo = [m for k, m in wanted.items() if results.known(m, plan[k]) is None]
        print(f"{len(wanted)} mutants, {len(todo)} to try", flush=True)
        results.write(f"commit {asked.commit or commit()}", {"machine": machine()})
        try_all(todo, plan, results, end, asked.workers)
    if not asked.no_page:
        results = Results(RESULTS)  # with what all workers found
        is_drawn = {mutant.key for mutant in drawn}
        found = [
            Result(m, results.entries.get(m.digest), k in is_named, k in is_drawn)
            for k, m in {m.key: m for m in [*named, *drawn]}.items()
        ]
        sizes = {file: len(population[file]) for file in population}
        reasons = tomllib.loads((HERE / "justified.toml").read_text())
        entries = results.entries.items()
        where = {k[7:]: e["machine"] for k, e in entries if k.startswith("commit ")}
        (ROOT / "docs" / "mutants.md").write_text(page(found, sizes, reasons, where))


class Queue:
    """Numbers from 0 on, each given to one of several processes, until the moment `end`."""

    def __init__(self, count: int, end: float) -> None:
        self.count, self.end = count, end
        self.next = multiprocessing.Value("i", 0)

    def __iter__(self) -> Iterator[int]:
        """The numbers that this process takes."""
        while time.monotonic() < self.end:
            with self.next.get_lock():
                number = self.next.value
                self.next.value += 1
            if number >= self.count:
                return
            yield number


def try_all(todo: Sequence[Mutant], plan: Plan, results: Results, end: float, workers: int) -> None:
    """Try mutants until the budget is spent, by as many processes as there are workers."""
    queue, others = Queue(len(todo), end), []
    if todo:
        warm()
    for _ in range(1, workers):
        others.append(os.fork())
        if not others[-1]:
            work(queue, todo, plan, results)
            os._exit(0)
    work(queue, todo, plan, results)
    for worker in others:
        _, status = os.waitpid(worker, 0)
        if status:
            raise SystemExit("a worker failed: see above")
    left = len({m.digest for m in todo} - Results(RESULTS).entries.keys())
    print(f"{left} mutants have not been tried yet", flush=True)


def work(queue: Queue, todo: Sequence[Mutant], plan: Plan, results: Results) -> None:
    """Try mutants one after another."""
    for number in queue:
        mutant = todo[number]
        tests = plan[mutant.key]
        entry = attempt(mutant, tests, queue.end)
        if entry is None:
            return
        results.add(mutant, tests, entry)
        status = f"{entry['seconds']:5.1f} s {entry['status']:9}"
        print(f"{number + 1}/{len(todo)} {status} {mutant.key}", flush=True)
        if entry["status"] in {"survived", "unreached"}:
            print(f"    line {mutant.lines[0]}: {mutant.change}", flush=True)


if __name__ == "__main__":
    main()
