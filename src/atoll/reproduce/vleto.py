"""V-LETO's tables and figures: what to run, and what the paper prints.

All methods have one setting (section f of the specification): plain gradient steps of 0.01, batches
of 128, ten passes a stage, three seeds, all training rows, the official test rows. No test row
chooses anything. A method whose loss becomes NaN runs again with a smaller rate, the first
of RATES at which it stays finite, and the ledger names that rate. Settings of one form run as one
sweep.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import BadMessageError, UserError
from atoll.core.record import Round, Score
from atoll.reproduce.figures import sensitivity_figure
from atoll.reproduce.ledger import Cell, Ledger
from atoll.reproduce.margins import RULES
from atoll.reproduce.measured import Measurement, fingerprint
from atoll.reproduce.paper import Measured, Missing, Paper, Say, Stopwatch, facts_of
from atoll.reproduce.sweeps import swept_together
from atoll.reproduce.vleto_claims import after, average, by_stage, claims
from atoll.reproduce.vleto_tables import (
    ABLATED,
    AVERAGES,
    FINE,
    FROZEN,
    IMPOSSIBLE,
    LAMBDAS,
    PRINTED,
    STAGES,
    TABLE_3,
    THRESHOLDS,
    WEIGHED,
    sweep_name,
)
from atoll.runs.config import change, read
from atoll.runs.result import Run

__all__ = ["PAPER", "SETTINGS", "STUDIES", "Plan", "Setting"]

RATES = (0.01, 0.003, 0.001, 0.0003)  # tried in this order, until the loss stays finite
DATA = {"MNIST": "mnist", "FMNIST": "fashion-mnist", "CIFAR-10": "cifar10", "CINIC-10": "cinic10"}
PIXELS: dict[str, tuple[list[float], list[float]]] = {
    "MNIST": ([0.1307], [0.3081]),
    "FMNIST": ([0.1307], [0.3081]),
    "CIFAR-10": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "CINIC-10": ([0.4789, 0.4723, 0.4305], [0.2421, 0.2383, 0.2587]),
}
CIL: dict[str, Any] = {}  # the preset: classes 0-3, 2-5, 4-7, 6-9 in four stages
FIL = {"scenario.mode": "columns", "scenario.window": 0, "scenario.stages": 1}
JOINT = {"scenario.mode": "none", "scenario.window": 0, "scenario.stages": 1}
SPLIT = {"method.name": "splitnn"}
ORACLE = "atoll.reproduce.faults.vleto:label_oracle"  # the published test, which reads labels
# name -> changes to the preset; the first six are the paper's Table 1
METHODS: dict[str, dict[str, Any]] = {
    "Standalone": {**SPLIT, "method.fresh": True},
    "PyVertical": SPLIT,
    "Pass+VFL": {**SPLIT, "method.replay": "pass"},
    "FedSpace+VFL": {**SPLIT, "method.replay": "fedspace"},
    "FedProK+VFL": {**SPLIT, "method.replay": "fedprok"},
    "V-LETO": {},
}
FOLLOWS: dict[str, Any] = {"gamma": 1.0, "drift": "vector"}  # prototypes move with the drift


@dataclass(frozen=True)
class Setting:
    """A method on a data set, classes or columns by stage."""

    name: str
    data: str  # as the paper calls it
    changes: tuple[tuple[str, Any], ...]

    def values(self) -> dict[str, Any]:
        """The run's values."""
        changes, preset = dict(self.changes), read("vleto")
        name = changes.pop("method.name", "vleto")
        mean, deviation = PIXELS[self.data]
        method = {"name": name, "network": "lenet3", "pixel_mean": mean, "pixel_std": deviation}
        return change({**preset, "data": {"name": DATA[self.data]}, "method": method}, changes)


def _setting(data: str, what: str, changes: dict[str, Any]) -> Setting:
    return Setting(f"{data} {what}", data, tuple(sorted(changes.items())))


def _classes(data: str, name: str, **changes: Any) -> Setting:
    method = METHODS.get(name, {})
    own = {f"method.{key}": value for key, value in changes.items()}
    return _setting(data, f"CIL {name}", {**CIL, **method, **own})


def _columns(data: str, name: str, **changes: Any) -> Setting:
    method = METHODS.get(name, {})
    own = {f"method.{key}": value for key, value in changes.items()}
    return _setting(data, f"FIL {name}", {**FIL, **method, **own})


def _of(data: str) -> Iterator[Setting]:
    """Table 1 on one data set, and what the claims need beside it."""
    for name in METHODS:
        yield _classes(data, name)
    for name in METHODS:
        yield _columns(data, name)
    yield _setting(data, "FIL Joint", {**JOINT, **SPLIT})
    yield _columns(data, "P2", protocol="P2")


def _ablations(data: str) -> Iterator[Setting]:
    yield _classes(data, "w/o L_A", lambda_a=0.0)
    yield _classes(data, "w/o LMO", lmo_rule="off")
    yield _classes(data, "w/o L_CE", lambda_ce=0.0)
    yield _columns(data, "w/o L_F", lambda_f=0.0)
    yield _columns(data, "w/o L_CE", lambda_ce=0.0)
    yield _columns(data, "sum at the test", fil_eval="sum")
    yield _setting(data, "FIL label_oracle", {**FIL, "replace": ORACLE})


def _sensitivity() -> Iterator[Setting]:
    """Tables 4 and 5 and Figure 4, on FMNIST; the middle of each is V-LETO itself."""
    for weight in LAMBDAS:
        if weight != 0.5:
            pair = {"lambda_ce": round(1 - weight, 1)}
            yield _classes("FMNIST", f"lambda_A {weight}", lambda_a=weight, **pair)
    for k0, alpha in THRESHOLDS:
        if k0 != 15:
            yield _classes("FMNIST", f"k0 {k0}", k0=float(k0), alpha=float(alpha))
    for weight in LAMBDAS:
        if weight != 0.5:
            pair = {"lambda_ce": round(1 - weight, 1)}
            yield _columns("FMNIST", f"lambda_F {weight}", lambda_f=weight, **pair)


SETTINGS: tuple[Setting, ...] = (
    *_of("FMNIST"),
    *_of("MNIST"),
    *_ablations("FMNIST"),
    *_ablations("MNIST"),
    *_sensitivity(),
    *_of("CIFAR-10"),
    *_of("CINIC-10"),
)
# Files of PASS from before its stacked computation was corrected, by the fingerprint of their runs
SUPERSEDED = ("56b0a3252a96", "30b5d0ce6fe1")  # MNIST and CIFAR-10, classes by stage
PRINTED_RATE = 0.001  # which the paper prints; its published code and the specification use 0.01
SLOW = 0.0003  # at which PASS does not collapse to one class


def _at_rates(data: str) -> Iterator[Setting]:
    """PASS at smaller rates than the first finite one, and the paper's printed rate."""
    for name, rate in (
        ("Pass+VFL", SLOW),
        ("Pass+VFL", PRINTED_RATE),
        ("PyVertical", PRINTED_RATE),
        ("V-LETO", PRINTED_RATE),
    ):
        fixed = {**METHODS[name], "method.rate": rate}
        yield _setting(data, f"CIL {name}, rate {rate}", {**CIL, **fixed})
        yield _setting(data, f"FIL {name}, rate {rate}", {**FIL, **fixed})


# What the paper does not print: a threshold that does something, prototypes that follow the drift,
# other rates
STUDIES: tuple[Setting, ...] = tuple(
    setting
    for data in ("FMNIST", "MNIST")
    for setting in (
        _classes(data, "quantile 0.9", lmo_rule="quantile", rho=0.9),
        _classes(data, "quantile 0.5", lmo_rule="quantile", rho=0.5),
        _classes(data, "quantile 0.9, drift", lmo_rule="quantile", rho=0.9, **FOLLOWS),
        _classes(data, "quantile 0.5, drift", lmo_rule="quantile", rho=0.5, **FOLLOWS),
        _classes(data, "w/o LMO, drift", lmo_rule="off", **FOLLOWS),
        _classes(data, "gamma 0.1", gamma=0.1),
        _classes(data, "gamma 1", gamma=1.0),
        _classes(data, "code rule", lmo_rule="code"),
        *_at_rates(data),
        _columns(data, "newest at the test", fil_eval="current"),
        _columns(data, "P2 w/o L_F", protocol="P2", lambda_f=0.0),
        _columns(data, "P2 w/o LMO", protocol="P2", lmo_rule="off"),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How much is run, and where."""

    folder: Path
    device: str = "auto"
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 10
    tf32: bool = False
    changes: tuple[tuple[str, Any], ...] = ()  # to every setting: a miniature
    rates: tuple[float, ...] = RATES

    @staticmethod
    def quick(folder: Path, device: str) -> "Plan":
        """A miniature: 1,200 rows, one linear layer for each strip, one seed.

        Steps are five times as long, since there are so few of them.
        """
        small = {"scenario.train": 0.02, "scenario.valid": 0.98, "method.network": "dense",
                 "method.batch": 32}  # fmt: skip
        rates = (0.05, *RATES)
        return Plan(folder, device, (0,), 4, changes=tuple(sorted(small.items())), rates=rates)


def _values(setting: Setting, plan: Plan) -> dict[str, Any]:
    return change(setting.values(), {**dict(plan.changes), "rounds": plan.rounds})


def _form(setting: Setting) -> Hashable:
    """Settings of equal form have steps that are mostly of one form."""
    changes = dict(setting.changes)
    kind, replay = setting.name.split()[1], "method.replay" in changes
    return setting.data, kind, changes.get("method.name"), replay


def _identity(setting: Setting, plan: Plan) -> list[Any]:
    return [_values(setting, plan), plan.seeds, plan.rates]


def _execute(
    settings: Sequence[Setting], plan: Plan, say: Say
) -> Iterator[tuple[Setting, Measurement]]:
    """Run settings as one sweep; each takes the first rate at which no seed diverges."""
    waiting = list(settings)
    for rate in plan.rates:
        measured = _measured_at(rate, waiting, plan, say)
        yield from (
            (setting, measured[setting.name]) for setting in waiting if setting.name in measured
        )
        waiting = [setting for setting in waiting if setting.name not in measured]
        if not waiting:
            return
    what = f"the loss of {waiting[0].name} is no longer finite at rate {plan.rates[-1]:g}"
    raise UserError(what, "method.rate", "choose a smaller rate")


def _measured_at(
    rate: float, settings: Sequence[Setting], plan: Plan, say: Say
) -> dict[str, Measurement]:
    """Measure settings at one rate; those whose loss becomes NaN at it are left out."""
    engine = {"engine.device": plan.device, "engine.packing": False, "engine.tf32": plan.tf32,
           "checkpoints": False, "looks": False, "method.rate": rate}  # fmt: skip
    own = [{k: v for k, v in s.changes if k == "method.rate"} for s in settings]
    several = [
        change(_values(s, plan), {**engine, **o}) for s, o in zip(settings, own, strict=True)
    ]
    name = f"{settings[0].name} and {len(settings) - 1} more"
    watch = Stopwatch(say, name, lambda progress: (progress.stage, progress.round // 5))
    runs, lost = swept_together(several, {"seed": plan.seeds}, plan.folder, watch, _is_lost)
    seconds = watch.seconds / len(settings)
    for number in sorted(lost):
        say(f"{settings[number].name}: the loss is no number at rate {rate:g}")
    measured = {}
    for setting, seeds in zip(settings, runs, strict=True):
        if seeds:
            measured[setting.name] = {**_summary(plan, seeds), "seconds": seconds}
            say(f"{setting.name}: {seconds:.1f} s, rate {measured[setting.name]['rate']:g}")
    return measured


def _is_lost(error: BaseException) -> bool:
    """Whether training diverged: a loss or a message has numbers that are not finite."""
    if isinstance(error, BadMessageError):
        return "not finite" in str(error)
    return isinstance(error, UserError) and "no longer finite" in str(error)


def _summary(plan: Plan, runs: Sequence[Run]) -> Measurement:
    return {
        "rate": runs[0].config["method"]["rate"],
        "rates": list(plan.rates),
        "miniature": bool(plan.changes),
        "facts": facts_of(runs[0]),
        "engine": runs[0].config["engine"],
        "runs": [_brief(run) for run in runs],
    }


def _brief(run: Run) -> dict[str, Any]:
    """What the ledger needs of a run: accuracies by task and stage, and the frozen shares."""
    tasks, union, frozen = dict[str, float](), dict[str, float](), dict[str, float]()
    for event in run.events:
        if isinstance(event, Score) and event.variant == "union":
            union[str(event.stage + 1)] = event.accuracy
        elif isinstance(event, Score):
            tasks[f"{event.task + 1}|{event.stage + 1}"] = event.accuracy
        elif isinstance(event, Round):
            shares = [v for k, v in event.notes.items() if k.startswith("frozen ")]
            if shares:
                frozen[str(event.stage + 1)] = float(np.mean(shares))
    return {"seed": run.config["seed"], "tasks": tasks, "union": union, "frozen": frozen}


# The ledger


def _ledger(measured: Measured, missing: Missing) -> Ledger:
    """The cells of every table for which there is something to say."""
    cells = [
        *_table_1(measured, missing),
        *_fine("Table 2 (FMNIST, CIL)", {f"CIL {n}": t for n, t in ABLATED.items()}, measured),
        *_table_3(measured),
        *_fine("Table 4 (FMNIST, CIL)", _placed("lambda_A", WEIGHED), measured),
        *_fine("Table 5 (FMNIST, CIL)", _placed("k0", FROZEN), measured),
        *_others(measured),
    ]  # fmt: skip
    facts = {name: one["facts"] for name, one in measured.items()}
    valid = {name: one for name, one in measured.items() if not _invalid(one)}
    return Ledger("V-LETO", facts, tuple(cells), tuple(claims(valid)), RULES["vleto"])


def _placed(option: str, rows: dict[Any, str]) -> dict[str, str]:
    return {sweep_name(option, value): printed for value, printed in rows.items()}


def _invalid(one: Measurement) -> str:
    """Why a measurement does not count."""
    return "measured before PASS was corrected" if fingerprint(one["runs"]) in SUPERSEDED else ""


def _cell(
    where: tuple[str, str, str],  # table, row, column
    printed: float | None,
    ours: Sequence[float],
    name: str,
    one: Measurement | None,
) -> Cell:
    theirs = None if printed is None else printed / 100
    command = f"atoll reproduce vleto --only '{name}'"
    notes = ["the printed number would need more than 100 % on two classes: about 0.604"]
    notes = notes if printed == IMPOSSIBLE else []
    if one is None:
        notes.append(f"not run yet: {command}")
        return Cell(*where, theirs, None, command=command, note="; ".join(notes), setting=name)
    data = one["facts"]["data"]
    obstacles = [f"partial: {data['partial']}"] if data["partial"] else []
    obstacles += ["a miniature"] * one["miniature"]
    return Cell(
        *where, theirs, None, tuple(ours), command=command, config=one["config"], setting=name,
        data=data["fingerprint"][:12], note="; ".join([*_notes(where, name, one), *notes]),
        obstacle="; ".join(obstacles), invalid=_invalid(one),
    )  # fmt: skip


def _notes(where: tuple[str, str, str], name: str, one: Measurement) -> list[str]:
    """The notes on a measured cell."""
    rate, first = one["rate"], one.get("rates", RATES)[0]
    at_rate = f"rate {rate:g}" in where[1]  # a study of that rate
    notes = [f"rate {rate:g}: at larger ones the loss is no number"] * (
        rate != first and not at_rate
    )
    notes += ["reads the test labels"] * name.endswith("label_oracle")
    if name.endswith("FIL V-LETO") or where[0].startswith("Table 3"):
        notes.append("the published test reads labels, ours does not")
    notes.append("TF32" if one["engine"].get("tf32") else "float32")
    return notes


def _table_1(measured: Measured, missing: Missing) -> Iterator[Cell]:
    for kind, place in (("CIL", 0), ("FIL", 1)):
        for data, printed in PRINTED.items():
            rows = {method: numbers[place] for method, numbers in printed.items()}
            for row, theirs in {**rows, **({"Joint": (), "P2": ()} if place else {})}.items():
                name, table = f"{data} {kind} {row}", f"Table 1, {kind}, {data}"
                if name in measured or theirs:
                    cells = _row_1(table, name, row, theirs, measured.get(name))
                    yield from (
                        replace(cell, note=missing[name]) if name in missing else cell
                        for cell in cells
                    )


def _row_1(
    table: str, name: str, row: str, theirs: Sequence[float], one: Measurement | None
) -> Iterator[Cell]:
    stages = 1 if row == "Joint" else STAGES
    for stage in range(1, stages + 1):
        printed = theirs[stage - 1] if stage <= len(theirs) else None
        if one is None and printed is None:
            continue
        column = "all strips" if row == "Joint" else f"Task {stage}"
        ours = after(one, None, stage) if one else ()
        yield _cell((table, row, column), printed, ours, name, one)
    if " CIL " in name:
        yield _average(table, name, row, theirs, one)


def _average(
    table: str, name: str, row: str, theirs: Sequence[float], one: Measurement | None
) -> Cell:
    """The column AVG; the paper's is computed from its row, and a note says where it differs."""
    rows = [60.43 if value == IMPOSSIBLE else value for value in theirs]  # J8
    mean = float(np.mean(rows)) if rows else None
    cell = _cell((table, row, "AVG"), mean, average(one) if one else (), name, one)
    data = name.partition(" ")[0]
    if mean is None or row not in PRINTED[data]:
        return cell
    printed = AVERAGES[data][list(PRINTED[data]).index(row)]
    if IMPOSSIBLE in theirs:
        note = f"the paper prints {printed:.2f}, which fits 60.43 for the impossible {IMPOSSIBLE}"
    elif abs(printed - mean) > 0.011:
        note = f"the paper prints {printed:.2f}; its row has the mean {mean:.2f}, which counts here"
    else:
        return cell
    return replace(cell, note="; ".join(filter(None, (note, cell.note))))


def _fine(table: str, rows: dict[str, str], measured: Measured) -> Iterator[Cell]:
    """Tables whose columns are each task after each stage, and all so far."""
    for name, printed in rows.items():
        full, row = f"FMNIST {name}", name.removeprefix("CIL ")
        one = measured.get(full)
        for (task, stage), value in zip(FINE, map(float, printed.split()), strict=True):
            column = f"after {stage}: {'all' if task is None else f'task {task}'}"
            ours = after(one, task, stage) if one else ()
            yield _cell((table, row, column), value, ours, full, one)


def _table_3(measured: Measured) -> Iterator[Cell]:
    """FIL ablations; what is printed as 'w/o LMO' is, by the code, the sum at the test."""
    table, summed = "Table 3 (FMNIST, FIL)", "sum at the test"
    for row, printed in TABLE_3.items():
        name = f"FMNIST FIL {summed if row == 'w/o LMO' else row}"
        label = f"{row} ({summed})" if row == "w/o LMO" else row
        one = measured.get(name)
        for stage, value in enumerate(printed, 1):
            ours = after(one, None, stage) if one else ()
            yield _cell((table, label, f"Task {stage}"), value, ours, name, one)


def _others(measured: Measured) -> Iterator[Cell]:
    """What the paper has no number for: Figure 4, the label-reading test, and our studies."""
    names = [s.name for s in STUDIES]
    names += [s.name for data in ("FMNIST", "MNIST") for s in _ablations(data)]
    names += [f"FMNIST {sweep_name('lambda_F', weight)}" for weight in LAMBDAS]
    for name in names:
        if name in measured:
            table = (
                "Figure 4"
                if "lambda_F" in name or name == "FMNIST FIL V-LETO"
                else "Beside the paper"
            )
            yield from _row_1(table, name, name, (), measured[name])


def _figures(measured: Measured) -> dict[str, bytes]:
    """Figure 4 and the sensitivity of Tables 4 and 5, for what is there."""
    axes = {
        "lambda_A (CIL)": [(w, sweep_name("lambda_A", w)) for w in LAMBDAS],
        "k0 (CIL)": [(float(k), sweep_name("k0", k)) for k, _ in THRESHOLDS],
        "lambda_F (FIL)": [(w, sweep_name("lambda_F", w)) for w in LAMBDAS],
    }
    panels = []
    for title, places in axes.items():
        complete = [(x, measured[f"FMNIST {n}"]) for x, n in places if f"FMNIST {n}" in measured]
        if len(complete) > 1:
            panels.append((title, [(x, by_stage(one)) for x, one in complete]))
    return {"figure4.svg": sensitivity_figure(panels)} if panels else {}


TABLES = {
    "1": [s.name for data in DATA for s in _of(data)],
    "2": [f"FMNIST CIL {row}" for row in ABLATED],
    "3": ["FMNIST FIL V-LETO", "FMNIST FIL w/o L_CE", "FMNIST FIL w/o L_F",
          "FMNIST FIL sum at the test"],
    "4": [f"FMNIST {sweep_name('lambda_A', w)}" for w in LAMBDAS],
    "5": [f"FMNIST {sweep_name('k0', k)}" for k, _ in THRESHOLDS],
    "figure4": [f"FMNIST {sweep_name('lambda_F', w)}" for w in LAMBDAS],
}  # fmt: skip
PAPER = Paper(
    name="vleto",
    settings=SETTINGS,
    studies=STUDIES,
    plan=Plan,
    quick=Plan.quick,
    tables={
        table: [s for s in (*SETTINGS, *STUDIES) if s.name in names]
        for table, names in TABLES.items()
    },
    identity=_identity,
    execute=_execute,
    ledger=_ledger,
    figures=_figures,
    form=_form,
    miniature=(*_of("FMNIST"), *_ablations("FMNIST")),
)
