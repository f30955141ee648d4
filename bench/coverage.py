"""Coverage and power of the intervals that verdicts use, in many simulated prediction sets.

Run from the repository's root: `python -m bench.coverage [--sets 5000] [--out docs/coverage.md]`.
It prints one table after another, and writes them below the first heading of a page.
"""

import argparse
from pathlib import Path

from tests.properties.simulations import (
    METRICS,
    announced_power,
    coverage,
    overall_coverage,
    power,
    seeds_coverage,
    shared_coverage,
)

ROWS, SIZES = (30, 100, 400), (1, 4)
HEAD = """# Coverage of intervals

How often 95 % intervals of `atoll.metrics.statistics` cover the true gain, in simulated prediction
sets without training, and how often a gain is found. `tests/properties/test_coverage.py` runs the
same simulations with fewer sets. The bar: at least 93.5 %, and at most 97 % at 400 rows; a gain of
five points on 400 rows with 10 % discordant rows is found in at least 80 %; the announced number of
rows has a power of 75 to 85 %.

<!-- not run: takes minutes -->
```sh
python -m bench.coverage --out docs/coverage.md
```
"""


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [f"## {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def by_metric(sets: int) -> str:
    rows = []
    for metric in METRICS:
        cells = []
        for count in ROWS:
            for size in SIZES:
                result = coverage(metric, count, size, sets)
                cells.append(percent(result.share) if result.sets else "withheld")
        rows.append([metric, *cells])
    header = [f"{count} rows" + ", groups of 4" * (size > 1) for count in ROWS for size in SIZES]
    return table(f"One site, {sets:,} sets a cell", ["metric", *header], rows)


def by_sites(sets: int) -> str:
    rows = []
    for counts in ((30,) * 4, (100,) * 4, (400,) * 4, (400, 100, 40)):
        share = overall_coverage(counts, sets)
        rows.append([", ".join(map(str, counts)), "of its own", percent(share)])
    for counts in ((100,) * 4, (400,) * 4, (400, 100, 40)):
        share = overall_coverage(counts, sets, size=4)
        rows.append([", ".join(map(str, counts)), "of its own, in groups of 4", percent(share)])
    for count in ROWS:
        share = shared_coverage(count, 4, sets)
        rows.append([", ".join([str(count)] * 4), "the same for all", percent(share)])
    title = f"The mean over sites, accuracy, {sets:,} sets"
    return table(title, ["test rows", "each site has rows", "coverage"], rows)


def by_seeds(sets: int) -> str:
    rows = []
    for seeds in (2, 3, 5, 10):
        alone = [percent(seeds_coverage(seeds, n, sets)) for n in ROWS]
        grouped = [percent(seeds_coverage(seeds, n, sets, size=4)) for n in ROWS[1:]]
        rows.append([str(seeds), *alone, *grouped])
    title = f"Rows and seeds, accuracy, {sets:,} sets"
    header = [f"{count} rows" for count in ROWS]
    header += [f"{count} rows, groups of 4" for count in ROWS[1:]]
    return table(title, ["seeds", *header], rows)


def by_power(sets: int) -> str:
    rows = [["400", "10 %", "5", percent(power(400, 0.1, 0.05, sets))]]
    for discordant in (0.02, 0.03, 0.05, 0.1, 0.2):
        count, share = announced_power(discordant, 0.02, sets)
        rows.append([f"{count:,} (announced)", f"{100 * discordant:g} %", "2", percent(share)])
    title = f"Gains in accuracy that are found, {sets:,} sets"
    return table(title, ["test rows", "discordant", "gain in points", "found"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pieces = [HEAD]
    for part in (by_power, by_metric, by_sites, by_seeds):
        pieces.append(part(options.sets))
        print(pieces[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(pieces))


if __name__ == "__main__":
    main()
