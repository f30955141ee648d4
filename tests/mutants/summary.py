"""The page docs/mutants.md: what was tried, what survived, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from .operators import Mutant

__all__ = ["Result", "page", "wilson"]

Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Result:
    """A mutant and what became of it; `entry` is None where it was not tried."""

    mutant: Mutant
    entry: Mapping[str, Any] | None
    named: bool
    drawn: bool

    @property
    def status(self) -> str:
        """killed, timeout, survived, unreached, or not tried."""
        return str(self.entry["status"]) if self.entry else "not tried"

    @property
    def survives(self) -> bool:
        """Whether no test noticed it."""
        return self.status in {"survived", "unreached"}


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = Z * sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def table(results: Sequence[Result], sizes: Mapping[str, int] | None) -> list[str]:
    """One line for each module and one for all; `sizes`: how many mutants a module has in all."""
    head = "| module | mutants | tried | killed | timeouts | survived | score | 95 % |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    files = sorted({result.mutant.file for result in results})
    for file in (*files, "all"):
        own = [r for r in results if file in {"all", r.mutant.file}]
        count = len(own) if sizes is None else sum(sizes[f] for f in files if file in {"all", f})
        tried = [r for r in own if r.entry]
        dead = [r for r in tried if not r.survives]
        timeouts = sum(r.status == "timeout" for r in dead)
        low, high = wilson(len(dead), len(tried))
        score = f"{100 * len(dead) / len(tried):.1f} %" if tried else "-"
        cells = (count, len(tried), len(dead) - timeouts, timeouts, len(tried) - len(dead))
        numbers = " | ".join(str(cell) for cell in cells)
        lines.append(f"| {file} | {numbers} | {score} | {100 * low:.1f} to {100 * high:.1f} |")
    return lines


def survivors(results: Sequence[Result], reasons: Mapping[str, str]) -> list[str]:
    """A line for each mutant that no test noticed, with the reason why it may stay."""
    lines = []
    for result in sorted(results, key=lambda r: r.mutant.key):
        mutant = result.mutant
        if result.survives:
            why = reasons.get(mutant.key, "**open**")
            reach = " No chosen test runs it." if result.status == "unreached" else ""
            lines.append(f"- {mutant.key}: {mutant.change}. {why}{reach}")
    return lines or ["None."]


def headline(results: Sequence[Result], reasons: Mapping[str, str]) -> str:
    """The score in a sentence, and how many survivors are justified."""
    tried = [r for r in results if r.entry]
    alive = [r for r in tried if r.survives]
    low, high = wilson(len(tried) - len(alive), len(tried))
    share = (len(tried) - len(alive)) / max(1, len(tried))
    known = [reasons[r.mutant.key] for r in alive if r.mutant.key in reasons]
    equivalent = sum(reason.startswith("Equivalent") for reason in known)
    text = f"{len(tried)} tried, {100 * share:.1f} % noticed ({100 * low:.1f} to {100 * high:.1f})."
    kinds = f"{equivalent} equivalent, {len(known) - equivalent} justified, "
    return f"{text} Of {len(alive)} survivors: {kinds}{len(alive) - len(known)} open."


def page(
    results: Sequence[Result],
    sizes: Mapping[str, int],
    reasons: Mapping[str, str],
    where: Mapping[str, str],
) -> str:
    """The whole page; `where`: the commits of the measurement, and the machine of each."""
    drawn, named = [r for r in results if r.drawn], [r for r in results if r.named]
    guarded = [r for r in results if r.named or r.mutant.file.startswith("methods/")]
    others = [r for r in results if r not in guarded]
    waiting = sum(r.entry is None for r in results)
    return "\n".join(
        [
            "# Mutants",
            "",
            "`make mutants` puts small faults into the code, one at a time, and runs the tests",
            "against each: a fault that no test notices is a survivor. `tests/mutants` has the",
            "operators, the modules and the named functions. Timeouts count as killed. Against one",
            "mutant only the cheapest tests that run its lines are run, so the whole suite may",
            "kill more. A survivor is equivalent if no test can notice it. A result is kept while",
            "the function and the test that noticed the fault are unchanged. The command writes",
            "this page.",
            "",
            *(f"- Measured at commit {commit} on {machine}." for commit, machine in where.items()),
            "",
            f"Not tried: {waiting} of {len(results)}." if waiting else "All of them were tried.",
            "",
            "## The sample",
            "",
            headline(drawn, reasons),
            "",
            "Tests were written for survivors of this sample, so its score no longer estimates",
            "that of all mutants. Before, at commit e54fc2e, it was 87.9 % of 647 (85.2 to 90.2).",
            "",
            *table(
                drawn, {f: n for f, n in sizes.items() if any(r.mutant.file == f for r in drawn)}
            ),
            "",
            "## Selection, aggregation, masking and comparison: all mutants of the named functions",
            "",
            headline(named, reasons),
            "",
            *table(named, None),
            "",
            "## Survivors in methods and in the named functions",
            "",
            *survivors(guarded, reasons),
            "",
            "## Other survivors of the sample",
            "",
            *survivors(others, reasons),
            "",
        ]
    )
