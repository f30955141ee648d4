"""`make mutants`: which small faults do the tests notice?

Tries all mutants of the named functions and a seeded sample of each module, each in a process of
its own, until the budget is spent; the next call goes on from there. Then writes docs/mutants.md.
"""

import argparse
import json
import os
import time
import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from .choice import (
    CACHE,
    ROOT,
    MeasuredTest,
    all_mutants,
    chosen,
    digest_of,
    measured,
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
        """Keep an outcome, and that an earlier one was a survivor."""
        before = self.entries.get(mutant.digest, {})
        late = before.get("survived before") or before.get("status") in {"survived", "unreached"}
        single = entry["status"] == "killed" and "::" in entry["killer"]
        seen = digest_of(entry["killer"]) if single else _digest(tests)
        self.write(mutant.digest, {**entry, "tests": seen, "survived before": late})

    def write(self, key: str, entry: Entry) -> None:
        """Add a line to the cache."""
        self.entries[key] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:  # short lines: two workers may write at once
            file.write(json.dumps({key: entry}) + "\n")


def _digest(tests: Sequence[MeasuredTest]) -> str:
    text = "\n".join(f"{test.id} {digest_of(test.id)}" for test in tests)
    return sha256(text.encode()).hexdigest()[:16]


def attempt(mutant: Mutant, tests: Sequence[MeasuredTest]) -> Entry:
    """Run the tests against a mutant."""
    if not tests:
        return {"status": "unreached", "killer": "", "seconds": 0.0}
    limit = 20 + 4 * sum(test.seconds for test in tests)
    return vars(run(mutant.file, mutant.source, [test.id for test in tests], limit)).copy()


def control(mutant: Mutant, tests: Sequence[MeasuredTest], results: Results) -> None:
    """The same tests pass on the module without the fault; tried once for each state of it."""
    source = (ROOT / "src" / "atoll" / mutant.file).read_text()
    key = f"control {mutant.file} {sha256(source.encode()).hexdigest()[:16]}"
    if tests and key not in results.entries:
        outcome = run(mutant.file, source, [test.id for test in tests], 600)
        if outcome.status != "survived":
            raise SystemExit(f"{mutant.file} fails without any fault: {outcome}")
        results.write(key, vars(outcome))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--budget", type=float, default=60.0, help="minutes; 0: the page alone")
    parser.add_argument("--workers", type=int, default=1, help="processes at once")
    parser.add_argument("--part", choices=("named", "sample", "all"), default="all")
    parser.add_argument("--only", default="", help="mutants whose key contains this")
    parser.add_argument("--no-page", action="store_true", help="leave docs/mutants.md alone")
    return parser.parse_args()


def main() -> None:
    """Try mutants until the budget is spent."""
    asked = arguments()
    targets = tomllib.loads((HERE / "targets.toml").read_text())
    named_in: dict[str, list[str]] = targets["named"]
    population = all_mutants(sorted({*targets["modules"], *named_in}))
    drawn = sample({file: population[file] for file in targets["modules"]})
    named = [m for file, names in named_in.items() for m in population[file] if m.function in names]
    parts = {"named": named, "sample": drawn, "all": [*named, *drawn]}
    wanted = {m.key: m for m in parts[asked.part] if asked.only in m.key}
    tests, results = measured(targets["tests"]), Results(RESULTS)
    is_named = {mutant.key for mutant in named}
    plan = {k: chosen(m, tests, NAMED if k in is_named else USUAL) for k, m in wanted.items()}
    todo = [m for k, m in wanted.items() if results.known(m, plan[k]) is None]
    print(f"{len(wanted)} mutants, {len(todo)} to try", flush=True)
    if asked.budget:
        try_all(todo, plan, results, asked.budget, asked.workers)
    results = Results(RESULTS)  # with what other workers found
    if not asked.no_page:
        is_drawn = {mutant.key for mutant in drawn}
        found = [
            Result(m, results.entries.get(m.digest), k in is_named, k in is_drawn)
            for k, m in {m.key: m for m in [*named, *drawn]}.items()
        ]
        sizes = {file: len(population[file]) for file in population}
        reasons = tomllib.loads((HERE / "justified.toml").read_text())
        (ROOT / "docs" / "mutants.md").write_text(page(found, sizes, reasons))


def try_all(
    todo: Sequence[Mutant], plan: Plan, results: Results, budget: float, workers: int = 1
) -> None:
    """Try mutants until the budget is spent, by as many processes as there are workers."""
    end, others = time.monotonic() + 60 * budget, []
    if todo:
        warm()
    for number in range(1, workers):
        others.append(os.fork())
        if not others[-1]:
            work(todo[number::workers], plan, results, end)
            os._exit(0)
    work(todo[::workers], plan, results, end)
    for worker in others:
        _, status = os.waitpid(worker, 0)
        if status:
            raise SystemExit("a worker failed: see above")


def work(todo: Sequence[Mutant], plan: Plan, results: Results, end: float) -> None:
    """Try mutants one after another; says at the end how many were not tried."""
    for number, mutant in enumerate(todo):
        if time.monotonic() > end:
            print(f"the budget is spent: {len(todo) - number} mutants were not tried")
            return
        tests = plan[mutant.key]
        control(mutant, tests, results)
        entry = attempt(mutant, tests)
        results.add(mutant, tests, entry)
        status = f"{entry['seconds']:5.1f} s {entry['status']:9}"
        print(f"{number + 1}/{len(todo)} {status} {mutant.key}", flush=True)
        if entry["status"] in {"survived", "unreached"}:
            print(f"    line {mutant.lines[0]}: {mutant.change}", flush=True)


if __name__ == "__main__":
    main()
