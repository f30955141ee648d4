"""A ledger as Markdown."""

from collections.abc import Sequence

from atoll.reproduce.claims import Judged
from atoll.reproduce.ledger import Cell, Ledger, counted, needed

__all__ = ["as_markdown", "false_verdicts", "verdict_of"]

FAMILIES = {
    "paper": "The paper's claims",
    "expectation": "Expectations of our specification",
    "order": "Order of two methods, cell by cell",
    "study": "Studies beside the paper",
}


def as_markdown(ledger: Ledger) -> str:
    """The ledger as tables."""
    lines = [f"## {ledger.title}", "", *_rule(ledger), ""]
    for table in dict.fromkeys(cell.table for cell in ledger.cells):
        lines += [f"### {table}", "", *_table([c for c in ledger.cells if c.table == table]), ""]
    judged = ledger.judged()
    for family, title in FAMILIES.items():
        rows = [one for one in judged if one.claim.family == family]
        if rows:
            lines += [f"### {title}", "", *_claims(rows), ""]
    if ledger.origins:
        lines += ["### What measured it", "", *_origins(ledger), ""]
    return "\n".join(lines)


def false_verdicts(cells: Sequence[Cell]) -> float:
    """How many false verdicts chance alone gives at most: 5 % of the cells that are judged."""
    return 0.05 * sum(
        c.verdict in ("reproduced", "refuted", "undecided") and bool(c.ours) for c in cells
    )


def _rule(ledger: Ledger) -> list[str]:
    """The rule, and how many cells have which verdict."""
    printed = [cell for cell in ledger.cells if cell.theirs is not None]
    counts = counted([cell.verdict for cell in printed])
    listed = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    rule = ledger.rule
    return [
        f"{len(printed)} cells with a printed number: {listed}. By chance alone at most "
        f"{false_verdicts(printed):.1f} of the judged ones have a false verdict.",
        "",
        "Reproduced: the 90 % interval of ours minus the paper's lies inside the margin. "
        "Refuted: the 95 % interval lies outside it. Otherwise undecided. On a stand-in or a part "
        "of the data: undecidable here, whatever the difference is. Intervals use t quantiles. "
        f"Unit of replication: {rule.unit}. Margin: {rule.margin:g} plus the printed deviation; "
        f"the paper prints {rule.deviation}. `±` is the deviation over all runs; n counts units.",
        "",
        "Claims are tests on paired units. Holm's method adjusts p-values of the paper's claims "
        "and of our expectations for their number. Orders of single cells and studies are not "
        "adjusted: by chance alone at most 5 % of them have a false verdict.",
    ]


def verdict_of(cell: Cell) -> str:
    """The verdict with its reason."""
    reason = cell.reason
    if cell.verdict == "undecidable here" and cell.difference is not None and len(cell.units) > 1:
        reason += f"; on these data: {cell.here}"
    return f"{cell.verdict} ({reason})" if reason else cell.verdict


def _table(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "| row | method | paper | ours | n | difference, 90 % interval | margin | verdict | note |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        theirs = "-" if cell.theirs is None else f"{cell.theirs:.4f}"
        if cell.their_spread is not None:
            theirs += f" ± {cell.their_spread:.4f}"
        ours = f"{cell.mean:.4f} ± {cell.spread:.4f}" if cell.ours else "-"
        count = str(len(cell.units)) if cell.ours else "-"
        margin = "-" if cell.difference is None else f"{cell.margin:.4f}"
        parts = (cell.row, cell.column, theirs, ours, count, _difference(cell), margin,
                 verdict_of(cell), cell.note)  # fmt: skip
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _difference(cell: Cell) -> str:
    if cell.difference is None:
        return "-"
    if len(cell.units) < 2:
        return f"{cell.difference:+.4f}"
    low, high = cell.difference_interval(0.90)
    return f"{cell.difference:+.4f} ({low:+.4f} to {high:+.4f})"


def _claims(judged: Sequence[Judged]) -> list[str]:
    lines = ["| claim | stated in | verdict | p, Holm | evidence |", "|---|---|---|---|---|"]
    for one in judged:
        p = f"{one.adjusted:.2g}" if one.claim.is_tested else "-"
        parts = (one.claim.text, one.claim.source, _claim_verdict(one), p, one.evidence)
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _claim_verdict(one: Judged) -> str:
    if one.verdict == "undecidable here":
        note = f"; on these data: {one.here}" if one.claim.is_tested else ""
        return f"undecidable here ({one.claim.obstacle}{note})"
    if one.verdict == "undecided" and not one.claim.is_tested:
        return "undecided (not measured)" if one.claim.missing else "undecided (one run)"
    if one.verdict == "undecided":
        return f"undecided ({needed(one.runs)})"
    return f"**{one.verdict}**" if one.verdict == "refuted" else one.verdict


def _origins(ledger: Ledger) -> list[str]:
    """The settings by what measured them."""
    groups: dict[str, list[str]] = {}
    for setting, origin in ledger.origins.items():
        groups.setdefault(origin, []).append(setting)
    lines = ["| commit, machine, precision | settings |", "|---|---|"]
    return lines + [f"| {origin} | {'; '.join(names)} |" for origin, names in groups.items()]
