"""CHFL's tables and figures: what to run, what the paper says, and what came out.

For each setting the rate of column one is chosen by the mean validation accuracy of Common; then
3 feature splits x 5 seeds run as one stack, in which Local chooses its own rate and every client
its own mu on its own validation rows. Test rows are read once, at the end. A setting that has
been run is a small file in the output folder and is not run again. A study changes one option of a
setting: it takes the setting's rate, so that its runs can be paired with the setting's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.record import Round
from atoll.methods import load
from atoll.reproduce.figures import ratio_figure, strength_figure
from atoll.reproduce.ledger import Cell, Claim, Ledger, paired
from atoll.reproduce.measured import fingerprint, keep, kept, others, swept
from atoll.runs.config import change, read
from atoll.runs.result import Run

__all__ = [
    "QUICK",
    "SETTINGS",
    "STUDIES",
    "Plan",
    "Setting",
    "chosen",
    "figures",
    "known",
    "ledger",
    "measure",
    "replaced",
]

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
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
QUICK = SETTINGS[:1]  # of a miniature

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

# Table II, III: mean and deviation as printed, by setting, in the order of METHODS.
PAPER: dict[str, dict[str, tuple[tuple[float, float] | None, ...]]] = {
    "Table II": {
        "covertype K=5 30%": (
            (0.6218, 0.1086),
            (0.6407, 0.0594),
            (0.6744, 0.0731),
            (0.6843, 0.0661),
            (0.6637, 0.0709),
        ),
        "sensorless K=5 30%": (
            (0.9762, 0.0024),
            (0.9526, 0.0046),
            (0.9855, 0.0017),
            (0.9863, 0.0020),
            None,
        ),
        "aloi K=5 30%": (
            (0.7352, 0.0366),
            (0.7093, 0.0165),
            (0.7927, 0.0196),
            (0.7954, 0.0197),
            None,
        ),
        "helena K=5 30%": (
            (0.2604, 0.0147),
            (0.2732, 0.0100),
            (0.2868, 0.0086),
            (0.2902, 0.0088),
            None,
        ),
        "jannis K=5 30%": (
            (0.6449, 0.0184),
            (0.6341, 0.0090),
            (0.6551, 0.0128),
            (0.6572, 0.0111),
            (0.6528, 0.0111),
        ),
    },
    "Table III": {
        "covertype K=2 30%": (
            (0.6420, 0.1098),
            (0.7649, 0.0144),
            (0.7475, 0.0356),
            (0.7748, 0.0224),
            None,
        ),
        "covertype K=5 30%": (
            (0.6218, 0.1086),
            (0.6407, 0.0594),
            (0.6744, 0.0731),
            (0.6843, 0.0661),
            None,
        ),
        "covertype K=10 30%": (
            (0.6014, 0.1112),
            (0.5628, 0.0854),
            (0.6290, 0.0921),
            (0.6291, 0.0914),
            None,
        ),
    },
    "Figure 4": {f"covertype K=5 {ratio}%": (None,) * 5 for ratio in (10, 20, 30, 40, 50)},
    "Table IV": {
        "helena maximum": (
            (0.2717, 0.0062),
            (0.2811, 0.0340),
            (0.2867, 0.0047),
            (0.2916, 0.0039),
            None,
        ),
        "helena median": (
            (0.2797, 0.0168),
            (0.2926, 0.0080),
            (0.2999, 0.0104),
            (0.3049, 0.0091),
            None,
        ),
        "helena minimum": (
            (0.1793, 0.0133),
            (0.2476, 0.0019),
            (0.2695, 0.0016),
            (0.2710, 0.0013),
            None,
        ),
    },
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
        """A miniature for a look: a tenth of the rows to learn from, one run, two sizes of mu."""
        small = {"scenario.train": 0.1, "scenario.valid": 0.1, "method.mu": [0.01, 0.1]}
        changes = tuple(sorted(small.items()))
        return Plan(folder, device, (0,), (0,), (0,), 5, (1e-3, 3e-3), changes=changes)


def measure(
    setting: Setting, plan: Plan, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Run a setting, or read what was measured before with the same config."""
    values = change(
        setting.values(),
        {
            **dict(plan.changes),
            "rounds": plan.rounds,
            "engine.device": plan.device,
            "engine.packing": False,
            "engine.tf32": plan.tf32,
            "checkpoints": False,
        },
    )
    wanted = _wanted(setting, plan)
    found = known(setting, plan)
    if found is not None:
        return found
    began = time.monotonic()
    base = next((s for s in SETTINGS if s.name == setting.of), None)
    before = known(base, plan) if base else None
    rate, tuned = (
        (before["rate"], before["tuned"]) if before else _tuned(setting, values, plan, say)
    )
    say(f"{setting.name}: rate {rate:g}, {len(plan.feature_seeds) * len(plan.seeds)} runs")
    full = {**values, "method": _method(values, plan, rate)}
    if setting.of:  # they are of column two and its laterals; Local takes long
        full["method"]["variants"] = [v for v in load("chfl").options().variants if v != "local"]
        del full["method"]["rate_local"]
    axes = {"scenario.feature_seed": plan.feature_seeds, "seed": plan.seeds}
    runs = _swept(full, axes, plan, f"{setting.name}, main", say)
    found = {
        "setting": setting.name,
        "config": wanted,
        "rate": rate,
        "tuned": tuned,
        "facts": {k: runs[0].facts[k] for k in ("atoll", "packages", "device", "data")},
        "engine": runs[0].config["engine"],
        "tuning_seeds": list(plan.tuning_seeds),
        "seconds": time.monotonic() - began,
        "runs": [_brief(run) for run in runs],
    }
    keep(plan.folder, setting.name, found)
    return found


def _wanted(setting: Setting, plan: Plan) -> str:
    """What a measurement must have been made of to count for this plan."""
    values = change(setting.values(), {**dict(plan.changes), "rounds": plan.rounds})
    return fingerprint([values, plan.feature_seeds, plan.seeds, plan.rates])


def known(setting: Setting, plan: Plan) -> dict[str, Any] | None:
    """What was measured before of the same."""
    return kept(plan.folder, setting.name, _wanted(setting, plan))


def replaced(setting: Setting, plan: Plan) -> list[Path]:
    """The files of other measurements that measuring this would replace."""
    return others(plan.folder, [setting.name], _wanted(setting, plan))


def _method(values: dict[str, Any], plan: Plan, rate: float) -> dict[str, Any]:
    """The options of the main runs; a rate that is not known yet is left out."""
    chosen = {"each_mu": True, "rate_local": list(plan.rates), **values["method"]}
    third = chosen.get("rate_unique") == "third"
    if third:
        chosen["rate_unique"] = (rate or 1e-3) / 3
    return {**chosen, "rate": rate} if rate else chosen


def _tuned(
    setting: Setting, values: dict[str, Any], plan: Plan, say: Callable[[str], None]
) -> tuple[float, dict[str, float]]:
    """The rate with the best mean validation accuracy of Common."""
    light = {**values, "method": {"name": "chfl", "variants": ["common"]}}
    axes = {
        "method.rate": plan.rates,
        "scenario.feature_seed": plan.feature_seeds,
        "seed": plan.tuning_seeds,
    }
    runs = _swept(light, axes, plan, f"{setting.name}, tuning", say)
    best: dict[float, list[float]] = {}
    for run in runs:
        notes = [event.notes for event in run.events if isinstance(event, Round)]
        valid = max(note.get("valid common", -1.0) for note in notes)
        best.setdefault(run.config["method"]["rate"], []).append(valid)
    means = {rate: float(np.mean(found)) for rate, found in best.items()}
    return max(means, key=lambda rate: means[rate]), {f"{r:g}": m for r, m in means.items()}


def _swept(
    values: dict[str, Any], axes: dict[str, Any], plan: Plan, name: str, say: Callable[[str], None]
) -> list[Run]:
    began, told = time.monotonic(), [0]

    def watch(progress: Any) -> None:
        if progress.round >= told[0] + 10:
            told[0] = progress.round
            say(f"{name}: round {progress.round}, {time.monotonic() - began:.0f} s")

    return swept(values, axes, plan.folder, watch)


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


def values_of(found: dict[str, Any], variant: str) -> list[float]:
    """The accuracies of a variant, run by run."""
    return [run["accuracy"][variant] for run in found["runs"]]


def _splits(found: dict[str, Any], variant: str) -> tuple[float, ...]:
    seeds = sorted({run["feature_seed"] for run in found["runs"]})
    return tuple(
        float(np.mean([r["accuracy"][variant] for r in found["runs"] if r["feature_seed"] == seed]))
        for seed in seeds
    )


def ledger(measured: dict[str, dict[str, Any]], missing: dict[str, str]) -> Ledger:
    """The cells of every table for which there is something to say."""
    cells = []
    for table, rows in PAPER.items():
        for row, theirs in rows.items():
            cells += _row(table, row, theirs, measured.get(row), missing)
    facts = {name: found["facts"] for name, found in measured.items()}
    return Ledger("CHFL", facts, tuple(cells), tuple(_claims(measured)))


def _row(
    table: str,
    row: str,
    theirs: Sequence[tuple[float, float] | None],
    found: dict[str, Any] | None,
    missing: dict[str, str],
) -> list[Cell]:
    cells = []
    for (column, variant), printed in zip(METHODS.items(), theirs, strict=True):
        if printed is None and table != "Figure 4" and column == "Concatenation":
            continue
        mean, spread = printed or (None, None)
        if found is None:
            note = missing.get(row, "the data are not here: see docs/data.md")
            cells.append(Cell(table, row, column, mean, spread, note=note))
            continue
        partial = found["facts"]["data"]["partial"]
        cells.append(
            Cell(
                table,
                row,
                column,
                mean,
                spread,
                tuple(values_of(found, variant)),
                _splits(found, variant),
                f"atoll reproduce chfl --only '{row}'",
                found["config"],
                found["facts"]["data"]["fingerprint"][:12],
                f"partial: {partial}" if partial else "",
                _ordered(found, theirs),
            )
        )
    return cells


def _ordered(found: dict[str, Any], theirs: Sequence[tuple[float, float] | None]) -> bool:
    """Whether our means rank the methods as the paper's do."""
    printed = [
        (pair[0], variant) for pair, variant in zip(theirs, METHODS.values(), strict=True) if pair
    ]
    ours = [(float(np.mean(values_of(found, variant))), variant) for _, variant in printed]
    return [v for _, v in sorted(printed)] == [v for _, v in sorted(ours)]


def _claims(measured: dict[str, dict[str, Any]]) -> list[Claim]:
    """The paper's claims that covertype can speak to, and what studies change, on paired runs."""
    found = []
    for clients in (5, 2, 10):
        name = f"covertype K={clients} 30%"
        if name in measured:
            found += _claims_of(name, measured[name], clients)
    ratios = [f"covertype K=5 {ratio}%" for ratio in (10, 20, 30, 40, 50)]
    if all(name in measured for name in ratios):
        common = [float(np.mean(values_of(measured[name], "common"))) for name in ratios]
        listed = ", ".join(f"{value:.4f}" for value in common)
        rising = all(a < b for a, b in pairwise(common))
        found.append(Claim("Common rises with the ratio (10 to 50 %)", rising, listed))
    for study in STUDIES:
        if study.name in measured and study.of in measured:
            one, other = measured[study.name], measured[study.of]
            found += [
                _paired(f"{study.name}: {v} above that without", (one, v), (other, v))
                for v in ("mu=0", "mu>0", "auto")
            ]
    return found


def _claims_of(name: str, one: dict[str, Any], clients: int) -> list[Claim]:
    better = max(("common", "local"), key=lambda v: float(np.mean(values_of(one, v))))
    pairs = [("mu>0", "mu=0"), ("mu=0", better), ("mu>0", better)]
    if clients != 5:
        pairs = [("mu>0", v) for v in ("mu=0", "common", "local")]
    else:
        pairs.append(("mu=0", "concat"))
    return [_paired(f"{name}: {a} above {b}", (one, a), (one, b)) for a, b in pairs]


def _paired(text: str, one: tuple[dict[str, Any], str], other: tuple[dict[str, Any], str]) -> Claim:
    """Two variants, of the same setting or of two, run by run and split by split."""
    splits = [run["feature_seed"] for run in one[0]["runs"]]
    return paired(text, values_of(*one), values_of(*other), splits)


def figures(measured: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    """Figure 4 and the map of mu, for what is there."""
    ratios = [(r, f"covertype K=5 {r}%") for r in (10, 20, 30, 40, 50)]
    sites = [(f"{k} clients", f"covertype K={k} 30%") for k in (2, 5, 10)]
    found = {}
    if all(name in measured for _, name in ratios):
        found["figure4.svg"] = ratio_figure([(r, measured[name]) for r, name in ratios])
    panels = [
        ("covertype, 30 % common", [(label, measured[n]) for label, n in sites if n in measured]),
        ("covertype, 5 clients", [(f"{r} %", measured[n]) for r, n in ratios if n in measured]),
    ]
    panels = [(title, lines) for title, lines in panels if lines]
    if panels:
        found["mu.svg"] = strength_figure(panels)
    studied = [(f"{k} clients", f"covertype K={k} 30%") for k in (5, 10)]
    panels = [
        (title, [("as it is", measured[base]), *_studies(measured, base)])
        for title, base in studied
        if base in measured and _studies(measured, base)
    ]
    if panels:
        found["studies.svg"] = strength_figure(panels)
    return found


def _studies(measured: dict[str, dict[str, Any]], base: str) -> list[tuple[str, dict[str, Any]]]:
    """What was measured of the studies of a setting, by what they change."""
    found = [s.name for s in STUDIES if s.of == base and s.name in measured]
    return [(name.partition(", ")[2], measured[name]) for name in found]


def chosen(only: str, table: str) -> list[Setting]:
    """The settings that a command asks for."""
    if only:
        found = [s for s in (*SETTINGS, *STUDIES) if s.name == only]
        if not found:
            known = "; ".join(s.name for s in SETTINGS)
            raise UserError(f"no setting '{only}'", "--only", f"known: {known}")
        return found
    if table:
        wanted = {"2": "Table II", "3": "Table III", "4": "Table IV", "figure4": "Figure 4"}
        if table not in wanted:
            raise UserError(f"no table '{table}'", "--table", "use 2, 3, 4 or figure4")
        return [s for s in SETTINGS if s.name in PAPER[wanted[table]]]
    return list(SETTINGS)
