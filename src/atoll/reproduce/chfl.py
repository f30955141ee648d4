"""CHFL's tables and figures: what to run, what the paper prints, and the verdicts.

For each setting the mean validation accuracy of Common chooses the rate of column one. Then 3
feature splits x 5 seeds run as one stack, in which Local chooses its own rate and every client its
own mu on its own validation rows. Test rows are read once, at the end. A study changes one option
of a setting and takes the setting's rate, so that its runs can be paired with the setting's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.record import Round
from atoll.methods import load
from atoll.reproduce.chfl_claims import RATIOS, claims, series, study_claims
from atoll.reproduce.claims import Claim
from atoll.reproduce.figures import ratio_figure, strength_figure
from atoll.reproduce.ledger import Cell, Ledger, means_and_spreads
from atoll.reproduce.margins import RULES
from atoll.reproduce.measured import Measurement
from atoll.reproduce.paper import Measured, Missing, Paper, Say, Stopwatch, facts_of
from atoll.reproduce.sweeps import swept
from atoll.runs.config import change, read
from atoll.runs.loop import Progress
from atoll.runs.result import Run

__all__ = ["METHODS", "PAPER", "RATES", "STUDIES", "Plan", "Setting"]

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
NO_DATA = ("aloi", "helena")  # we had no file of these
METHODS = {
    "Common": "common",
    "Local": "local",
    "CHFL mu=0": "mu=0",
    "CHFL mu>0": "mu>0",
    "Concatenation": "concat",
}


@dataclass(frozen=True)
class Setting:
    """A data set dealt in one way, and the changes to the method for a study."""

    name: str
    data: str
    clients: int
    ratio: float
    changes: tuple[tuple[str, Any], ...] = ()
    of: str = ""  # for a study: the setting that it changes

    def values(self) -> dict[str, Any]:
        """The run's values."""
        return change(
            read("chfl"),
            {"data": self.data, "clients": self.clients, "ratio": self.ratio, **dict(self.changes)},
        )


def _covertype(clients: int, ratio: float) -> Setting:
    return Setting(f"covertype K={clients} {ratio:.0%}", "covertype", clients, ratio)


SETTINGS = (
    _covertype(5, 0.3),
    _covertype(2, 0.3),
    _covertype(10, 0.3),
    _covertype(5, 0.1),
    _covertype(5, 0.2),
    _covertype(5, 0.4),
    _covertype(5, 0.5),
    Setting("jannis K=5 30%", "jannis", 5, 0.3),
    Setting("sensorless K=5 30%", "sensorless", 5, 0.3),
    Setting("helena K=5 30%", "helena", 5, 0.3),
    Setting("aloi K=5 30%", "aloi", 5, 0.3),
)

STUDIES = tuple(
    replace(
        _covertype(clients, 0.3),
        name=f"covertype K={clients} 30%, {name}",
        changes=((key, value),),
        of=f"covertype K={clients} 30%",
    )
    for clients in (5, 10)
    for name, key, value in (
        ("laterals read the round's start", "lateral_source", "round_start"),
        ("U begins at zero", "u_init", "zeros"),
        ("column two at a third of the rate", "rate_unique", "third"),
        ("column two with decay 0.001", "decay_unique", 0.001),
        ("last round instead of the best", "select", "last"),
    )
)

# Mean and deviation as printed, by table and setting, in the order of METHODS.
PRINTED: dict[str, dict[str, tuple[tuple[float, float] | None, ...]]] = {
    "Table II": means_and_spreads("""
        covertype K=5 30%  | 0.6218±0.1086 0.6407±0.0594 0.6744±0.0731 0.6843±0.0661 0.6637±0.0709
        sensorless K=5 30% | 0.9762±0.0024 0.9526±0.0046 0.9855±0.0017 0.9863±0.0020 -
        aloi K=5 30%       | 0.7352±0.0366 0.7093±0.0165 0.7927±0.0196 0.7954±0.0197 -
        helena K=5 30%     | 0.2604±0.0147 0.2732±0.0100 0.2868±0.0086 0.2902±0.0088 -
        jannis K=5 30%     | 0.6449±0.0184 0.6341±0.0090 0.6551±0.0128 0.6572±0.0111 0.6528±0.0111
    """),
    "Table III": means_and_spreads("""
        covertype K=2 30%  | 0.6420±0.1098 0.7649±0.0144 0.7475±0.0356 0.7748±0.0224 -
        covertype K=5 30%  | 0.6218±0.1086 0.6407±0.0594 0.6744±0.0731 0.6843±0.0661 -
        covertype K=10 30% | 0.6014±0.1112 0.5628±0.0854 0.6290±0.0921 0.6291±0.0914 -
    """),
    "Figure 4": {f"covertype K=5 {ratio}%": (None,) * 5 for ratio in RATIOS},
    "Table IV": means_and_spreads("""
        helena maximum | 0.2717±0.0062 0.2811±0.0340 0.2867±0.0047 0.2916±0.0039 -
        helena median  | 0.2797±0.0168 0.2926±0.0080 0.2999±0.0104 0.3049±0.0091 -
        helena minimum | 0.1793±0.0133 0.2476±0.0019 0.2695±0.0016 0.2710±0.0013 -
    """),
}


@dataclass(frozen=True)
class Plan:
    """How much is run, and where."""

    folder: Path
    device: str = "auto"
    feature_seeds: tuple[int, ...] = (0, 1, 2)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seeds: tuple[int, ...] = (0, 1)
    rounds: int = 100
    rates: tuple[float, ...] = RATES
    tf32: bool = False
    changes: tuple[tuple[str, Any], ...] = ()  # to every setting: a miniature

    @staticmethod
    def quick(folder: Path, device: str) -> "Plan":
        """A miniature: a tenth of the rows to learn from, one run, two sizes of mu."""
        small = {"scenario.train": 0.1, "scenario.valid": 0.1, "method.mu": [0.01, 0.1]}
        changes = tuple(sorted(small.items()))
        return Plan(folder, device, (0,), (0,), (0,), 5, (1e-3, 3e-3), changes=changes)


def _identity(setting: Setting, plan: Plan) -> list[Any]:
    values = change(setting.values(), {**dict(plan.changes), "rounds": plan.rounds})
    return [values, plan.feature_seeds, plan.seeds, plan.rates]


def _execute(
    settings: Sequence[Setting], plan: Plan, say: Say
) -> Iterator[tuple[Setting, Measurement]]:
    for setting in settings:
        yield setting, _measured(setting, plan, say)


def _measured(setting: Setting, plan: Plan, say: Say) -> Measurement:
    """Choose the rate, then run all feature splits and seeds as one sweep."""
    options = {
        "engine.device": plan.device, "engine.packing": False, "engine.tf32": plan.tf32,
        "checkpoints": False, "rounds": plan.rounds,
    }  # fmt: skip
    values = change(setting.values(), {**dict(plan.changes), **options})
    whole = Stopwatch(say, f"{setting.name}, main", _tens)
    base = next((s for s in SETTINGS if s.name == setting.of), None)
    before = PAPER.complete(base, plan) if base else None
    rate, tuned = (
        (before["rate"], before["tuned"]) if before else _tuned(setting, values, plan, say)
    )
    say(f"{setting.name}: rate {rate:g}, {len(plan.feature_seeds) * len(plan.seeds)} runs")
    full = {**values, "method": _method(values, plan, rate)}
    if setting.of:  # studies are of column two and its laterals; Local takes long
        full["method"]["variants"] = [v for v in load("chfl").options().variants if v != "local"]
        del full["method"]["rate_local"]
    axes = {"scenario.feature_seed": plan.feature_seeds, "seed": plan.seeds}
    runs = swept(full, axes, plan.folder, whole)
    return {
        "rate": rate,
        "tuned": tuned,
        "facts": facts_of(runs[0]),
        "engine": runs[0].config["engine"],
        "tuning_seeds": list(plan.tuning_seeds),
        "seconds": whole.seconds,
        "runs": [_brief(run) for run in runs],
    }


def _tens(progress: Progress) -> tuple[int, ...]:
    return (progress.round // 10,)


def _method(values: dict[str, Any], plan: Plan, rate: float) -> dict[str, Any]:
    """The options of the main runs; a rate that is not known yet is left out."""
    chosen = {"each_mu": True, "rate_local": list(plan.rates), **values["method"]}
    third = chosen.get("rate_unique") == "third"
    if third:
        chosen["rate_unique"] = (rate or 1e-3) / 3
    return {**chosen, "rate": rate} if rate else chosen


def _tuned(
    setting: Setting, values: dict[str, Any], plan: Plan, say: Say
) -> tuple[float, dict[str, float]]:
    """The rate with the best mean validation accuracy of Common."""
    light = {**values, "method": {"name": "chfl", "variants": ["common"]}}
    axes = {
        "method.rate": plan.rates,
        "scenario.feature_seed": plan.feature_seeds,
        "seed": plan.tuning_seeds,
    }
    runs = swept(light, axes, plan.folder, Stopwatch(say, f"{setting.name}, tuning", _tens))
    best: dict[float, list[float]] = {}
    for run in runs:
        notes = [event.notes for event in run.events if isinstance(event, Round)]
        valid = max(note.get("valid common", -1.0) for note in notes)
        best.setdefault(run.config["method"]["rate"], []).append(valid)
    means = {rate: float(np.mean(accuracies)) for rate, accuracies in best.items()}
    return max(means, key=lambda rate: means[rate]), {f"{r:g}": m for r, m in means.items()}


def _brief(run: Run) -> dict[str, Any]:
    """What the ledger needs of a run."""
    notes = [event.notes for event in run.events if isinstance(event, Round)]
    valid = {
        k.removeprefix("valid "): max(n.get(k, -1.0) for n in notes)
        for k in notes[-1]
        if k.startswith("valid ")
    }
    return {
        "feature_seed": run.config["scenario"]["feature_seed"],
        "seed": run.config["seed"],
        "rounds": len(notes),
        "valid": valid,
        "accuracy": {v: run.metrics[v]["final_accuracy"] for v in run.variants},
    }


def values_of(measurement: Measurement, variant: str) -> list[float]:
    """The accuracies of a variant, run by run."""
    return [run["accuracy"][variant] for run in measurement["runs"]]


def _ledger(measured: Measured, missing: Missing) -> Ledger:
    """The cells of every table for which there is something to say."""
    cells = []
    for table, rows in PRINTED.items():
        for row, theirs in rows.items():
            cells += _row(table, row, theirs, measured.get(row), missing)
    facts = {name: measurement["facts"] for name, measurement in measured.items()}
    return Ledger("CHFL", facts, tuple(cells), tuple(_claims(measured)), RULES["chfl"])


def _row(
    table: str,
    row: str,
    numbers: Sequence[tuple[float, float] | None],
    one: Measurement | None,
    missing: Missing,
) -> list[Cell]:
    cells = []
    for (column, variant), printed in zip(METHODS.items(), numbers, strict=True):
        if printed is None and table != "Figure 4" and column == "Concatenation":
            continue
        theirs, spread = printed or (None, None)
        cell = Cell(table, row, column, theirs, spread, setting=row)
        cells.append(_measured_cell(cell, one, variant) if one else _open(cell, missing))
    return cells


def _open(cell: Cell, missing: Missing) -> Cell:
    """A cell that was not measured, and what measures it."""
    data = cell.row.partition(" ")[0]
    note = missing.get(cell.row, "not measured: atoll has no setting for this row")
    if data not in NO_DATA:
        return replace(cell, note=note)
    get = f"no data: get '{data}' (see atoll list data), then run "
    return replace(cell, note=note.replace("not run yet: ", get), obstacle=f"no data: {data}")


def _measured_cell(cell: Cell, one: Measurement, variant: str) -> Cell:
    data = one["facts"]["data"]
    partial = f"partial: {data['partial']}" if data["partial"] else ""
    return replace(
        cell,
        ours=tuple(values_of(one, variant)),
        splits=tuple(series(one, variant).values()),
        command=f"atoll reproduce chfl --only '{cell.row}'",
        config=one["config"],
        data=data["fingerprint"][:12],
        note="TF32" if one["engine"].get("tf32") else "",
        obstacle=partial,
    )


def _claims(measured: Measured) -> Iterator[Claim]:
    """The paper's claims, and what studies change, on paired feature splits."""
    yield from claims(measured)
    for study in STUDIES:
        if study.name in measured and study.of in measured:
            yield from study_claims(study.name, measured[study.name], measured[study.of])


def _figures(measured: Measured) -> dict[str, bytes]:
    """Figure 4 and the map of mu, for what is there."""
    ratios = [(r, f"covertype K=5 {r}%") for r in RATIOS]
    sites = [(f"{k} clients", f"covertype K={k} 30%") for k in (2, 5, 10)]
    figures = {}
    if all(name in measured for _, name in ratios):
        figures["figure4.svg"] = ratio_figure([(r, measured[name]) for r, name in ratios])
    panels = [
        ("covertype, 30 % common", [(label, measured[n]) for label, n in sites if n in measured]),
        ("covertype, 5 clients", [(f"{r} %", measured[n]) for r, n in ratios if n in measured]),
    ]
    panels = [(title, lines) for title, lines in panels if lines]
    if panels:
        figures["mu.svg"] = strength_figure(panels)
    studied = [(f"{k} clients", f"covertype K={k} 30%") for k in (5, 10)]
    panels = [
        (title, [("as it is", measured[base]), *_studies(measured, base)])
        for title, base in studied
        if base in measured and _studies(measured, base)
    ]
    if panels:
        figures["studies.svg"] = strength_figure(panels)
    return figures


def _studies(measured: Measured, base: str) -> list[tuple[str, Measurement]]:
    """What was measured of the studies of a setting, by what they change."""
    names = [s.name for s in STUDIES if s.of == base and s.name in measured]
    return [(name.partition(", ")[2], measured[name]) for name in names]


TABLES = {"2": "Table II", "3": "Table III", "4": "Table IV", "figure4": "Figure 4"}
PAPER = Paper(
    name="chfl",
    settings=SETTINGS,
    studies=STUDIES,
    plan=Plan,
    quick=Plan.quick,
    tables={key: [s for s in SETTINGS if s.name in PRINTED[name]] for key, name in TABLES.items()},
    identity=_identity,
    execute=_execute,
    ledger=_ledger,
    figures=_figures,
    miniature=SETTINGS[:1],
)
