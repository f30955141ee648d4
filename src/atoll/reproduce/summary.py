"""The summary of all ledgers: verdicts, claims and costs, as plain values and as a page.

`atoll reproduce PAPER --render --out FOLDER/PAPER` updates it where FOLDER has one. The page keeps
its own words; what stands between the comments `begin` and `end` is written anew.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from atoll.core.record import write_whole
from atoll.metrics.replication import interval
from atoll.reproduce.alternatives import Comparison, comparisons
from atoll.reproduce.claims import OURS
from atoll.reproduce.ledger import VERDICTS, counted, needed

__all__ = ["PAGE", "PAGES", "SUMMARY", "page", "summarize", "update"]

SUMMARY = "summary.json"
PAGE = "README.md"
PAGES = (PAGE, "pays.md")
PAPERS = ("chfl", "vleto", "fedseit", "fccl")
MOST_EVIDENCE = 120  # characters
RELEASED = "as released"  # ends the titles of tables with the authors' faults, beside the paper's
Plain = dict[str, Any]


def _is_pass(setting: str) -> bool:
    return setting.endswith(" Pass+VFL")


def _is_split(setting: str) -> bool:
    return setting in ("covertype K=2 30%", "covertype K=5 30%", "covertype K=10 30%")


def _is_control(setting: str) -> bool:
    return (
        "released" not in setting
        and "fault" not in setting
        and any(name in setting for name in (" Local ", " FedWeIT-Dense "))
    )


def _always(setting: str) -> bool:
    return True


# What is to be measured, in this order: paper, which settings, runs of each, words
ORDER: tuple[tuple[str, Callable[[str], bool], int, str], ...] = (
    ("vleto", _is_pass, 10, "PASS of V-LETO, 10 seeds"),
    ("chfl", _is_split, 100, "CHFL, 20 feature splits x 5 runs at K = 2, 5, 10"),
    ("fccl", _always, 5, "FCCL, 5 seeds of all settings and studies"),
    ("fedseit", _is_control, 5, "FedSeIT, controls, 5 seeds"),
    ("vleto", _always, 10, "the rest of V-LETO, 10 seeds"),
    ("fedseit", _always, 5, "the rest of FedSeIT, `released` and single faults too, 5 seeds"),
    ("chfl", _always, 45, "the rest of CHFL, 9 feature splits x 5 runs"),
)


def summarize(ledgers: Mapping[str, Plain]) -> Plain:
    """The verdicts of all papers, and what the open ones would take."""
    return {
        "papers": {name: _paper(ledger) for name, ledger in ledgers.items()},
        "costs": _costs(ledgers),
        "pays": [_pays(one) for one in comparisons(ledgers)],
    }


def _pays(one: Comparison) -> Plain:
    """A method beside its best alternative."""
    low, high = interval(one.gains, 0.95)
    return {
        "task": one.task,
        "method": one.method,
        "accuracy": float(np.mean(one.ours)),
        "alternatives": {key: float(np.mean(v)) for key, v in one.alternatives.items()},
        "pooled": one.pooled,
        "gain": float(np.mean(one.gains)),
        "interval_95": [low, high] if len(one.gains) > 1 else None,
        "units": len(one.gains),
        "best": one.best,
        "answer": one.answer,
        "note": one.note,
    }


def _paper(ledger: Plain) -> Plain:
    beside = [cell for cell in ledger["cells"] if cell["theirs"] is not None]
    printed = [cell for cell in beside if not cell["table"].endswith(RELEASED)]
    judged = [c for c in printed if c["ours"] and c["verdict"] != "undecidable here"]
    by_table = {}
    for table in dict.fromkeys(cell["table"] for cell in printed):
        by_table[table] = counted([c["verdict"] for c in printed if c["table"] == table])
    kinds = {"claims": [claim for claim in ledger["claims"] if claim["source"] not in OURS]}
    for kind in OURS:
        kinds[f"{kind}s"] = [claim for claim in ledger["claims"] if claim["source"] == kind]
    keys = ("text", "source", "verdict", "here", "obstacle", "missing", "p_holm", "runs_needed",
            "evidence")  # fmt: skip
    return {
        "title": ledger["title"],
        "rule": ledger["rule"],
        "cells": counted([cell["verdict"] for cell in printed]),
        "cells_as_released": counted(
            [cell["verdict"] for cell in beside if cell["table"].endswith(RELEASED)]
        ),
        "tables": by_table,
        "judged_cells": len(judged),
        "false_by_chance_at_most": round(0.05 * len(judged), 2),
        **{
            f"{kind}_by_verdict": counted([claim["verdict"] for claim in those])
            for kind, those in kinds.items()
        },
        "claims": [{key: claim[key] for key in keys} for claim in kinds["claims"]],
    }


def _costs(ledgers: Mapping[str, Plain]) -> list[Plain]:
    """GPU minutes of what is open, in the order in which it is measured."""
    counted_settings: set[str] = set()
    rows = []
    for paper, belongs, runs, words in ORDER:
        costs = ledgers.get(paper, {}).get("costs", {})
        names = [
            name for name in costs if belongs(name) and f"{paper} {name}" not in counted_settings
        ]
        counted_settings |= {f"{paper} {name}" for name in names}
        if names:
            rows.append(_cost(ledgers[paper], names, runs, words))
    return rows


def _cost(ledger: Plain, names: Sequence[str], runs: int, words: str) -> Plain:
    costs = ledger["costs"]
    each = {name: costs[name]["seconds"] / costs[name]["runs"] for name in names}
    lacking = {
        name: max(0, runs - (costs[name]["runs"] if costs[name]["measured"] else 0))
        for name in names
    }
    seconds = sum(lacking[name] * each[name] for name in names)
    return {
        "what": words,
        "settings": len(names),
        "measured": sum(costs[name]["measured"] for name in names),
        "cells": sum(cell["setting"] in names for cell in ledger["cells"]),
        "seconds_a_run": round(median(each.values()), 1),
        "runs_open": sum(lacking.values()),
        "gpu_minutes": round(seconds / 60, 1),
    }


def page(text: str, summary: Plain) -> str:
    """The page with its generated parts written anew."""
    parts = {
        "costs": _cost_table(summary["costs"]),
        "counts": _count_table(summary["papers"]),
        "pays": _pays_table(summary["pays"]),
        **{name: _claim_lists(paper) for name, paper in summary["papers"].items()},
    }
    for name, lines in parts.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if begin in text and end in text:
            head, _, rest = text.partition(begin)
            _, _, tail = rest.partition(end)
            text = "\n".join([f"{head}{begin}", "", *lines, "", f"{end}{tail}"])
    return text


def _cost_table(rows: Sequence[Plain]) -> list[str]:
    lines = [
        "| in this order | settings, measured | cells | seconds a run | runs open | GPU minutes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        settings = f"{row['settings']}, {row['measured']}"
        parts = (row["what"], settings, row["cells"], row["seconds_a_run"], row["runs_open"],
                 row["gpu_minutes"])  # fmt: skip
        lines.append(f"| {' | '.join(map(str, parts))} |")
    total = sum(row["gpu_minutes"] for row in rows)
    return [*lines, f"| all | | | | | {total:.1f} |"]


def _count_table(papers: Mapping[str, Plain]) -> list[str]:
    lines = [
        f"| | printed cells | {' | '.join(VERDICTS)} | judged | false by chance, at most | claims: "
        f"{' / '.join(VERDICTS)} |",
        f"|---|---|{'---|' * len(VERDICTS)}---|---|---|",
    ]
    for name, paper in papers.items():
        cells = list(paper["cells"].values())
        claims = " / ".join(map(str, paper["claims_by_verdict"].values()))
        link = f"[{paper['title']}]({name}/ledger.md)"
        chance = paper["false_by_chance_at_most"]
        parts = (link, sum(cells), *cells, paper["judged_cells"], chance, claims)
        lines.append(f"| {' | '.join(map(str, parts))} |")
    return lines


def _pays_table(rows: Sequence[Plain]) -> list[str]:
    lines = [
        "| task | method | alternatives | pooled | method minus the best alternative | better? | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        others = ", ".join(f"{name} {value:.3f}" for name, value in row["alternatives"].items())
        pooled = "-" if row["pooled"] is None else f"{row['pooled']:.3f}"
        gain = f"{row['gain']:+.3f}"
        if row["interval_95"]:
            low, high = row["interval_95"]
            gain += f" ({low:+.3f} to {high:+.3f}, n = {row['units']})"
        method = f"{row['method']} {row['accuracy']:.3f}"
        parts = (row["task"], method, others, pooled, f"{row['best']}: {gain}", row["answer"],
                 row["note"])  # fmt: skip
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _claim_lists(paper: Plain) -> list[str]:
    """The claims of a paper by verdict; of undecided ones what they need."""
    lines: list[str] = []
    unit = paper["rule"]["unit"].partition(" (")[0]
    for verdict in VERDICTS:
        those = [claim for claim in paper["claims"] if claim["verdict"] == verdict]
        if verdict == "undecidable here":
            lines += _undecidable(those)
            continue
        lines.append(f"- **{verdict.capitalize()}** ({len(those)}){':' if those else ''}")
        lines += [f"  - {_claim_line(claim, unit)}" for claim in those]
    return lines


def _claim_line(claim: Plain, unit: str) -> str:
    """A claim with its numbers, where they are few."""
    short = f"; {claim['evidence']}" if len(claim["evidence"]) <= MOST_EVIDENCE else ""
    if claim["verdict"] != "undecided":
        return f"{claim['text']} ({claim['source']}{short})"
    lacking = "not measured" if claim["missing"] else needed(claim["runs_needed"], unit)
    return f"{claim['text']}: {lacking}{short}"


def _undecidable(claims: Sequence[Plain]) -> list[str]:
    """Claims on stand-ins and parts: counted, and those on which these data speak."""
    if not claims:
        return ["- **Undecidable here** (0)"]
    lines = [f"- **Undecidable here** ({len(claims)}); on the data that are here:"]
    for verdict in ("reproduced", "refuted"):
        those = [claim for claim in claims if claim["here"] == verdict]
        texts = "; ".join(claim["text"] for claim in those)
        lines.append(f"  - would be {verdict}: {len(those)}{f' ({texts})' if those else ''}")
    return lines


def update(folder: Path) -> None:
    """Write summary and page of all ledgers in a folder anew."""
    files = {name: folder / name / "ledger.json" for name in PAPERS}
    ledgers = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    summary = summarize(ledgers)
    write_whole(folder / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())
    for path in (folder / name for name in PAGES):
        if path.exists():
            write_whole(path, page(path.read_text(), summary).encode())
