"""Run the tests under emulated CPUs: what they find must not depend on the CPU.

    python -m tests.numerics.run                     the marked tests under three settings
    python -m tests.numerics.run --all               under all six
    python -m tests.numerics.run --all --suite       everything that `make test` runs
    python -m tests.numerics.run --only oldest -- tests/golden -k fccl

`--write` puts the results into the tables of docs/numerics.md.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from .settings import QUICK, SETTINGS, environment, obstacle, vendor_library

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"
PROBE = Path(__file__).with_name("probe.py")
MARKED = "numerics and not process and not browser and not gpu"
SHOWN = 20  # failing tests that are named for each setting


@dataclass(frozen=True)
class Outcome:
    """What the tests gave under one setting."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    digest: str  # of the arithmetic: settings with equal ones test the same thing
    failures: tuple[str, ...] = ()


def cpu() -> tuple[str, frozenset[str]]:
    """The model and the features of this machine's CPU, as Linux tells them."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine(), frozenset(flags[1].split() if flags else ())


def counted(path: Path, seconds: float, digest: str) -> Outcome:
    """The counts of a JUnit file; a run that left none counts as one failure."""
    if not path.exists():
        return Outcome(0, 1, 0, seconds, digest, ("pytest ended before it wrote its results",))
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    wrong = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = [case for case in cases if {part.tag for part in case} == {"skipped"}]
    names = tuple(f"{case.get('classname')}::{case.get('name')}" for case in wrong)
    passed = len(cases) - len(wrong) - len(skipped)
    return Outcome(passed, len(wrong), len(skipped), seconds, digest, names)


def measure(own: dict[str, str], arguments: list[str]) -> Outcome:
    """Run pytest in a process with this environment."""
    probe = subprocess.run(
        [sys.executable, str(PROBE)], env=own, cwd=ROOT, capture_output=True, text=True, check=True
    )
    digest = " ".join(part[:4] for part in json.loads(probe.stdout).values())
    with tempfile.TemporaryDirectory(prefix="atoll-numerics-") as folder:
        results, start = Path(folder) / "results.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junitxml={results}", *arguments],
            env=own,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        outcome = counted(results, time.monotonic() - start, digest)
    if done.returncode not in (0, 1) or outcome.failed:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    if done.returncode and not outcome.failed:
        return Outcome(0, 1, 0, outcome.seconds, digest, (f"pytest ended with {done.returncode}",))
    return outcome


def arguments_of(options: argparse.Namespace) -> list[str]:
    """What pytest is called with."""
    chosen = [] if options.suite else ["-m", MARKED]
    return ["-n", str(options.workers), *chosen, *options.tests]


def line(name: str, outcome: Outcome) -> str:
    """One setting in one line."""
    counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    return f"{name:<13} {counts}, {outcome.seconds:.0f} s, arithmetic {outcome.digest}"


def run(names: Iterable[str], arguments: list[str]) -> dict[str, Outcome]:
    """Measure settings one after another and print each as it ends."""
    outcomes: dict[str, Outcome] = {}
    flags = cpu()[1]
    with tempfile.TemporaryDirectory(prefix="atoll-vendor-") as folder:
        for name in names:
            setting = SETTINGS[name]
            library = vendor_library(setting.vendor, Path(folder)) if setting.vendor else None
            if reason := obstacle(setting, flags, library):
                print(f"{name:<13} not run: {reason}", flush=True)
                continue
            outcomes[name] = measure(environment(setting, library), arguments)
            print(line(name, outcomes[name]), flush=True)
            twins = [n for n, o in outcomes.items() if o.digest == outcomes[name].digest]
            if len(twins) > 1:
                print(f"    the same arithmetic as {twins[0]}", flush=True)
            for failure in outcomes[name].failures[:SHOWN]:
                print(f"    FAILED {failure}", flush=True)
    return outcomes


def table(text: str, scope: str, outcomes: dict[str, Outcome], where: str) -> str:
    """The page with the rows of these settings in the table of a scope replaced, or added."""
    begin, end = f"<!-- {scope}: begin -->\n", f"<!-- {scope}: end -->"
    head, rest = text.split(begin)
    body, tail = rest.split(end)
    rows = {line.split(" |")[0]: line for line in body.splitlines()}
    for name, outcome in outcomes.items():
        values = (outcome.passed, outcome.failed, outcome.skipped, round(outcome.seconds))
        rows[f"| `{name}`"] = f"| `{name}` | {' | '.join(map(str, values))} | {where} |"
    return head + begin + "".join(f"{line}\n" for line in rows.values()) + end + tail


def main() -> int:
    """Run what the command line asks for; 1 where a test failed or no setting could be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="all settings, not only three")
    parser.add_argument("--only", choices=SETTINGS, action="append", help="this setting")
    parser.add_argument("--suite", action="store_true", help="every test, not only marked ones")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    parser.add_argument("--write", action="store_true", help=f"results into {PAGE.name}")
    parser.add_argument("tests", nargs="*", help="what else pytest is called with, after --")
    options = parser.parse_args()
    names = options.only or (SETTINGS if options.all else QUICK)
    outcomes = run(names, arguments_of(options))
    if options.write:
        where = f"{cpu()[0]}, {datetime.now(UTC):%Y-%m-%d}"
        scope = "suite" if options.suite else "marked"
        PAGE.write_text(table(PAGE.read_text(), scope, outcomes, where))
    passed, failed = (sum(getattr(o, k) for o in outcomes.values()) for k in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed under {len(outcomes)} of {len(list(names))} settings")
    return int(failed > 0 or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
