"""Renders the page of a benchmark in Markdown from its measurements."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from atoll.benchmark.compare import (
    SITUATIONS,
    Line,
    choose,
    gains,
    judged,
    lines,
    uses_budget,
    verdicts,
)
from atoll.benchmark.measure import Ledger
from atoll.benchmark.protocol import BASE, BOUNDS, CONTENDERS, TABLES, Plan, Table, budget
from atoll.metrics.statistics import Comparison

__all__ = ["page"]

TITLES = {
    "bytes": "Equal bytes",
    "steps": "Equal local steps",
    "memory": "Equal memory at a site",
}
INTRODUCTION = """# Methods against forgetting, compared

Classes arrive by stage, the rows of each stage are dealt to sites by Dirichlet shares, and all
classes are tested in the end. `atoll bench fcl` tunes every method on validation streams alone,
with as many trials for each, measures it with several seeds, and holds bytes, local steps or
memory equal. This page is written by the same command from the files beside it.
"""
CHOICES = """## Which method for which situation

The highest mean accuracy of the methods that a situation allows, at equal cost. It holds for the
data sets and the network below, not in general. The last column has the methods whose difference
to it is not significant at 5 % (Holm over the row).
"""
ORDERS = """## Published orders

At own cost: as many rounds for each. The papers use other data and networks, so this says whether
an order carries over to these. Adjusted for the number of orders of a data set (Holm).
"""
READING = """## How to read the tables

- **accuracy**: after the last stage, the mean over stages of the accuracy on their test rows; mean
  and standard deviation over seeds. All methods of a seed have the same rows.
- **to fedavg**: the paired difference with its 95 % interval (t over seeds), for this difference
  alone. **p, Holm**: the p-value adjusted for all differences of the table, so an interval can
  exclude 0 where the adjusted p-value is above 0.05. **verdict**: `above` or `below` where it is
  below 0.05, `within 2 points` where the interval is, else `cannot tell`.
- **MB**: what crosses in training, both ways, all sites; tests are left out. **steps**: gradient
  steps of all sites. **KB at a site**: what a site keeps of earlier stages: exemplars,
  importances, a copy of the network, sums. **s**: wall time of a run, which shares its computation
  with others.
- **equal**: whether a method is held to the budget of the table. Otherwise it stands at its own
  cost, because it needs less of this resource, none, or a fixed amount.
- `lowrank` and `lorm` (its closed form) adapt a network that is drawn at random. The papers adapt
  pretrained ones, so their place here says nothing about those.
- Bounds: `pooled` trains on all rows of all stages at once, `pooled-stages` has all rows of a
  stage in one place, `alone-stages` shares nothing.

Hyper-parameters are chosen once, at own cost, by the mean accuracy on held-out training rows of
streams with other seeds; test rows are not used. Trials are points of a Halton sequence on a log
scale between the limits below. Every gradient method uses Adam. The digits have no fixed test rows:
there, rows that one seed tunes on may be test rows of another.
"""
COMMAND = """## The command

<!-- not run: takes minutes -->
```sh
COMMANDS
```

`--minutes 9` stops in time, and the next call goes on. `--render` writes the page of what is
measured. `--quick` is a miniature on digits for a CPU.
"""


def page(ledgers: Sequence[Ledger], figure: str) -> str:
    """Render the whole page; `figure` is the address of the figure."""
    image = f"![Accuracy over stages, forgetting over bytes]({figure})\n"
    parts = [INTRODUCTION, _choices(ledgers), image]
    parts += [_data_set(ledger) for ledger in ledgers]
    parts += [_orders(ledgers), READING, _ranges(), _command(ledgers)]
    return "\n".join(parts)


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


def _choices(ledgers: Sequence[Ledger]) -> str:
    """The recommended method for each situation."""
    pairs = [(choice, ledger.data) for ledger in ledgers for choice in choose(ledger)]
    pairs.sort(key=lambda pair: SITUATIONS.index(pair[0].situation))
    rows = []
    for choice, data in pairs:
        best, alike = choice.best, ", ".join(f"`{name}`" for name in choice.alike)
        cells = [
            choice.situation.text, data, f"`{best.name}`", f"{best.mean:.3f}",
            _number(best.forgetting), f"{best.bytes / 1e6:.1f}", f"{best.memory / 1e3:,.0f}",
            alike or "-",
        ]  # fmt: skip
        rows.append(cells)
    header = ["situation", "data", "highest", "accuracy", "forgetting", "MB", "KB at a site",
              "not separable from it"]  # fmt: skip
    return f"{CHOICES}\n{_grid(header, rows)}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _data_set(ledger: Ledger) -> str:
    """The tables of a data set."""
    plan = ledger.plan
    text = (
        f"## {ledger.data}\n\n{plan.stages} stages, {plan.clients} sites, Dirichlet"
        f" {plan.alpha:g}; {plan.rounds} rounds a stage, local epochs: {plan.epochs}, batches of"
        f" {plan.batch}, an MLP with hidden layers {list(plan.widths)}; {plan.seeds} seeds. Trials"
        f" of each method: {plan.trials}, each on validation streams: {plan.streams}.\n"
    )
    return "\n".join([text, *(_table(ledger, table) for table in TABLES), _tuned(ledger)])


def _table(ledger: Ledger, table: Table) -> str:
    """One table: bounds first, then contenders by accuracy."""
    by_name = lines(ledger, table)
    base = by_name.get(BASE)
    contenders = [line for name, line in by_name.items() if name not in BOUNDS]
    contenders.sort(key=lambda line: -line.mean)
    others = [line for line in contenders if base and line is not base]
    comparisons = gains(others, base) if base else []
    triples = zip(others, comparisons, verdicts(comparisons), strict=True)
    compared = {line.name: (comparison, *pair) for line, comparison, pair in triples}
    header = ["method", "accuracy", "to fedavg", "p, Holm", "verdict", "forgetting", "MB",
              "steps", "KB at a site", "s", "equal"]  # fmt: skip
    rows = [_row(by_name[name], None, "bound") for name in BOUNDS if name in by_name]
    for line in contenders:
        equal = "yes" if base and uses_budget(line, table, ledger, base) else "own cost"
        rows.append(_row(line, compared.get(line.name), equal))
    return f"### {TITLES[table]}\n\n{_budget(ledger, table)}\n\n{_grid(header, rows)}"


def _budget(ledger: Ledger, table: Table) -> str:
    limit = budget(table, ledger.plan, ledger.sizes)
    if table == "steps":
        return "At most the gradient steps of `fedavg`; rounds are fewer where an epoch is longer."
    if table == "bytes":
        return (
            f"At most {limit / 1e6:.1f} MB of tensors, those of `fedavg`: fewer rounds or features."
            " The column has headers of messages too."
        )
    return f"At most {limit / 1e3:,.0f} KB, those of `ewc`: as many exemplars or features as fit."


def _row(line: Line, compared: tuple[Comparison, str, float] | None, equal: str) -> list[str]:
    gain, word, p = "-", "-", "-"
    if compared:
        gain = f"{compared[0].gain:+.3f} ({compared[0].low:+.3f} to {compared[0].high:+.3f})"
        word, p = compared[1], f"{compared[2]:.2g}"
    deviation = "" if math.isnan(line.deviation) else f" ± {line.deviation:.3f}"
    return [
        f"`{line.name}`", f"{line.mean:.3f}{deviation}", gain, p, word, _number(line.forgetting),
        f"{line.bytes / 1e6:.1f}", f"{line.steps:,.0f}", f"{line.memory / 1e3:,.0f}",
        f"{line.seconds:.1f}", equal,
    ]  # fmt: skip


def _tuned(ledger: Ledger) -> str:
    """The options chosen by tuning."""
    rows = []
    for name in lines(ledger, None):
        accuracy, options = ledger.tuned(name)
        chosen = ", ".join(f"{option} {value:g}" for option, value in options.items())
        trials = [run for key, run in ledger.runs.items() if key.startswith(f"tuning/{name}/")]
        failed = sum("failed" in run for run in trials)
        rows.append([f"`{name}`", chosen, f"{accuracy:.3f}", str(failed or "-")])
    header = ["method", "chosen", "accuracy on validation streams", "failed runs"]
    return f"### Tuned\n\n{_grid(header, rows)}"


def _orders(ledgers: Sequence[Ledger]) -> str:
    """The published orders and their verdicts."""
    rows = [
        [ledger.data, one.claim.text, f"{one.adjusted:.2g}", one.verdict, one.evidence]
        for ledger in ledgers
        for one in judged(ledger)
    ]
    header = ["data", "order", "p, Holm", "verdict", "difference of accuracy"]
    return f"{ORDERS}\n{_grid(header, rows)}"


def _ranges() -> str:
    rows = []
    for name, contender in CONTENDERS.items():
        ranges = [f"{o} {low:g} to {high:g}" for o, (low, high) in contender.ranges.items()]
        rows.append([f"`{name}`", ", ".join(ranges)])
    return _grid(["method", "tuned between"], rows)


def _own_command(ledger: Ledger) -> str:
    """The command that measures a data set, with the changed options of its plan."""
    values, usual = asdict(ledger.plan), asdict(Plan())
    changes = {name: value for name, value in values.items() if value != usual[name]}
    changes.pop("contenders", None)
    words = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    quoted = "".join(f" --set {shlex.quote(word)}" for word in words)
    return f"atoll bench fcl --out docs/benchmark{quoted}"


def _command(ledgers: Sequence[Ledger]) -> str:
    """How and where it was measured."""
    commands = dict.fromkeys(_own_command(ledger) for ledger in ledgers)
    rows = []
    for ledger in ledgers:
        minutes = sum(batch["wall_seconds"] for batch in ledger.batches) / 60
        machines = sorted({batch["machine"] for batch in ledger.batches})
        commits = sorted({batch["commit"] or batch["source"] for batch in ledger.batches})
        where = [", ".join(machines), ", ".join(commits)]
        rows.append([ledger.data, str(len(ledger.runs)), f"{minutes:.1f}", *where])
    command = COMMAND.replace("COMMANDS", "\n".join(commands))
    return f"{command}\n{_grid(['data', 'runs', 'minutes', 'machine', 'commit'], rows)}"
