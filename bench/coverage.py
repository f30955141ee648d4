"""Coverage and power of the intervals that verdicts use, in many simulated prediction sets.

Run from the repository's root: `python -m bench.coverage [--sets 5000] [--parts power needed
metric sites seeds] [--write]`. It prints one table after another. `--write` renews these parts of
`bench/results/coverage.json`, and `docs/coverage.md` from the whole file;
`tests/properties/test_coverage.py` checks every number of the file against its bar.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.properties.simulations import (
    METRICS,
    announced_power,
    coverage,
    needed_power,
    overall_coverage,
    power,
    seeds_coverage,
    shared_coverage,
)

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "bench" / "results" / "coverage.json"
PAGE = HERE / "docs" / "coverage.md"
ROWS, SIZES = (30, 100, 400), (1, 4)
LEAST, MOST, LARGE = 0.935, 0.97, 400  # the most holds from so many test rows
HEAD = """# Coverage of intervals

How often 95 % intervals of `atoll.metrics.statistics` cover the true gain, in simulated prediction
sets without training, and how often a gain is found. `tests/properties/test_coverage.py` runs the
same simulations with fewer sets. The bar: at least 93.5 %, and at most 97 % at 400 rows; a gain of
five points on 400 rows with 10 % discordant rows is found in at least 80 %; the announced number of
rows has a power of 75 to 85 %, for every metric. A test checks every number, in
`bench/results/coverage.json`.

<!-- not run: takes minutes -->
```sh
python -m bench.coverage --write
```
"""


@dataclass(frozen=True)
class Cell:
    """A measured share, and the bar for it."""

    share: float | None  # None: nothing is released
    least: float = LEAST
    most: float = 1.0

    def __str__(self) -> str:
        return "withheld" if self.share is None else f"{100 * self.share:.1f} %"


@dataclass(frozen=True)
class Table:
    """Measured shares with their names; a row begins with as many names as the header allows."""

    title: str
    header: list[str]
    rows: list[list[str | Cell]]

    def markdown(self, sets: int) -> str:
        """The table of a page."""
        head = [f"## {self.title}, {sets:,} sets", "", "| " + " | ".join(self.header) + " |"]
        lines = [*head, "|---" * len(self.header) + "|"]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def covered(share: float | None, rows: int) -> Cell:
    """A cell whose bar depends on the number of rows."""
    return Cell(share, LEAST, MOST if rows >= LARGE else 1.0)


def by_metric(sets: int) -> Table:
    rows: list[list[str | Cell]] = []
    for metric in METRICS:
        cells: list[str | Cell] = [metric]
        for count in ROWS:
            for size in SIZES:
                result = coverage(metric, count, size, sets)
                cells.append(covered(result.share if result.sets else None, count))
        rows.append(cells)
    header = [f"{count} rows" + ", groups of 4" * (size > 1) for count in ROWS for size in SIZES]
    return Table("One site", ["metric", *header], rows)


def by_sites(sets: int) -> Table:
    rows: list[list[str | Cell]] = []
    for counts in ((30,) * 4, (100,) * 4, (400,) * 4, (400, 100, 40)):
        share = overall_coverage(counts, sets)
        rows.append([words(counts), "of its own", covered(share, max(counts))])
    for counts in ((100,) * 4, (400,) * 4, (400, 100, 40)):
        share = overall_coverage(counts, sets, size=4)
        rows.append([words(counts), "of its own, in groups of 4", covered(share, max(counts))])
    for count in ROWS:
        share = shared_coverage(count, 4, sets)
        rows.append([words((count,) * 4), "the same for all", covered(share, count)])
    title = "The mean over sites, accuracy"
    return Table(title, ["test rows", "each site has rows", "coverage"], rows)


def words(counts: tuple[int, ...]) -> str:
    """Numbers of rows with commas."""
    return ", ".join(map(str, counts))


def by_seeds(sets: int) -> Table:
    rows: list[list[str | Cell]] = []
    for seeds in (2, 3, 5, 10):
        cells: list[str | Cell] = [str(seeds)]
        cells += [covered(seeds_coverage(seeds, n, sets), n) for n in ROWS]
        cells += [covered(seeds_coverage(seeds, n, sets, size=4), n) for n in ROWS[1:]]
        rows.append(cells)
    header = [f"{count} rows" for count in ROWS]
    header += [f"{count} rows, groups of 4" for count in ROWS[1:]]
    return Table("Rows and seeds, accuracy", ["seeds", *header], rows)


def by_power(sets: int) -> Table:
    rows: list[list[str | Cell]] = [["400", "10 %", "5", Cell(power(400, 0.1, 0.05, sets), 0.8)]]
    for discordant in (0.02, 0.03, 0.05, 0.1, 0.2):
        count, share = announced_power(discordant, 0.02, sets)
        name = f"{count:,} (announced)"
        rows.append([name, f"{100 * discordant:g} %", "2", Cell(share, 0.75, 0.85)])
    title = "Gains in accuracy that are found"
    return Table(title, ["test rows", "discordant", "gain in points", "found"], rows)


def by_needed(sets: int) -> Table:
    rows: list[list[str | Cell]] = []
    cases = [(1, 1, "one site"), (4, 1, "one site, groups of 4"), (1, 4, "the mean over 4 sites")]
    for metric in METRICS:
        for size, sites, name in cases:
            if sites == 1 or metric == "accuracy":
                count, share = needed_power(metric, size, sets, sites)
                rows.append([metric, name, f"{count:,}", Cell(share, 0.75, 0.85)])
    title = "The announced number of test rows, where the gain is the margin"
    return Table(title, ["metric", "where", "announced", "found"], rows)


PARTS = {
    "power": by_power,
    "needed": by_needed,
    "metric": by_metric,
    "sites": by_sites,
    "seeds": by_seeds,
}


def read_results() -> dict[str, Any]:
    """The committed results."""
    body: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return body


def page(results: dict[str, Any]) -> str:
    """The page of documentation, from the results."""
    pieces = [HEAD]
    for name in PARTS:
        if name in results:
            part = results[name]
            rows = [[Cell(**c) if isinstance(c, dict) else c for c in row] for row in part["rows"]]
            pieces.append(Table(part["title"], part["header"], rows).markdown(part["sets"]))
    return "\n".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=5000)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--write", action="store_true", help="renew results and page")
    options = parser.parse_args()
    for name in options.parts:
        table = PARTS[name](options.sets)
        print(table.markdown(options.sets), flush=True)
        if options.write:  # after each part: the others may take minutes
            results = read_results() | {name: {"sets": options.sets, **asdict(table)}}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
