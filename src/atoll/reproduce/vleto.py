"""V-LETO's tables and figures: what to run, what the paper says, and what came out.

All methods have one setting (section f of the specification): plain gradient steps of 0.01, batches
of 128, ten passes a stage, three seeds, all training rows, the official test rows. Nothing is
chosen by test rows. A method whose loss stops being a number is run again with a smaller rate,
the first of RATES at which it stays one, and the ledger says so. The seeds of a setting run as one
stack, with those of other settings of one form. A setting that has been run is a small file in the
output folder and is not run again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import UserError
from atoll.core.record import Round, Score
from atoll.reproduce.figures import sensitivity_figure
from atoll.reproduce.ledger import Cell, Claim, Ledger
from atoll.reproduce.measured import fingerprint, keep, kept, others, swept_together
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
    "measure_together",
    "replaced",
    "together",
]

RATES = (0.01, 0.003, 0.001, 0.0003)  # tried in this order, until the loss stays a number
STAGES = 4
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
LAMBDAS = (0.2, 0.3, 0.5, 0.7, 0.8)
THRESHOLDS = ((5, 1), (10, 2), (15, 3), (20, 4), (25, 5))

# Table 1 as printed, in %: by data and method the four tasks, classes by stage and columns by stage
PRINTED: dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "MNIST": {
        "Standalone": ((99.15, 94.82, 96.66, 93.00), (32.11, 78.28, 79.33, 34.82)),
        "PyVertical": ((99.21, 61.37, 45.42, 36.63), (32.01, 68.61, 77.54, 67.87)),
        "Pass+VFL": ((72.69, 74.57, 69.73, 68.02), (21.97, 52.50, 55.83, 63.27)),
        "FedSpace+VFL": ((74.70, 76.50, 70.80, 67.99), (21.98, 53.77, 67.24, 32.30)),
        "FedProK+VFL": ((74.69, 75.52, 75.72, 69.95), (21.04, 21.95, 45.02, 44.37)),
        "V-LETO": ((99.09, 94.52, 84.14, 71.04), (27.67, 93.33, 95.61, 96.79)),
    },
    "FMNIST": {
        "Standalone": ((95.54, 86.96, 81.83, 90.66), (60.32, 73.55, 74.01, 61.63)),
        "PyVertical": ((96.15, 57.10, 43.01, 37.43), (60.60, 64.57, 68.21, 67.91)),
        "Pass+VFL": ((65.66, 65.56, 61.24, 58.48), (50.11, 62.54, 67.38, 66.30)),
        "FedSpace+VFL": ((67.66, 67.58, 63.26, 61.42), (50.34, 59.07, 58.55, 40.52)),
        "FedProK+VFL": ((74.69, 65.52, 63.72, 59.95), (50.67, 53.13, 21.63, 26.18)),
        "V-LETO": ((94.38, 85.71, 64.04, 69.13), (60.93, 88.68, 95.06, 97.39)),
    },
    "CIFAR-10": {
        "Standalone": ((78.73, 55.41, 44.55, 55.66), (53.40, 59.72, 60.90, 52.43)),
        "PyVertical": ((69.66, 25.92, 20.37, 24.49), (52.19, 60.43, 61.82, 63.09)),
        "Pass+VFL": ((51.43, 45.96, 31.95, 28.71), (50.88, 67.67, 71.69, 65.36)),
        "FedSpace+VFL": ((51.45, 46.06, 31.99, 28.81), (50.40, 51.43, 58.78, 49.72)),
        "FedProK+VFL": ((51.45, 44.30, 32.18, 30.51), (50.21, 46.64, 54.10, 47.24)),
        "V-LETO": ((74.04, 54.29, 42.86, 33.86), (53.31, 85.12, 87.81, 88.34)),
    },
    "CINIC-10": {
        "Standalone": ((80.08, 60.00, 68.35, 84.37), (43.61, 50.86, 50.84, 44.07)),
        "PyVertical": ((79.84, 38.35, 36.20, 33.75), (43.36, 51.68, 53.95, 51.60)),
        "Pass+VFL": ((58.59, 47.08, 31.05, 30.75), (36.35,)),
        "FedSpace+VFL": ((61.32, 44.58, 28.98, 28.50), (46.57,)),
        "FedProK+VFL": ((78.90, 41.66, 29.92, 26.72), (44.86, 42.89, 41.55, 39.51)),
        "V-LETO": ((79.62, 54.50, 40.65, 34.37), (41.75, 82.93, 83.44, 84.97)),
    },
}
# Tables 2, 4 and 5: after task 1; after 2: task 1, 2, all; after 3: ...; after 4: ...
ABLATED = {
    "w/o L_CE": "93.82 63.54 13.59 41.87 93.20 61.95 16.01 57.50 78.59 75.53 39.92 0.00 47.57",
    "w/o L_A": "93.82 41.64 85.62 57.96 0.00 42.26 85.40 44.21 0.00 0.00 46.40 91.87 36.25",
    "w/o LMO": "93.90 43.12 91.32 62.61 0.00 47.42 92.74 42.03 0.00 0.00 47.65 95.93 37.96",
    "V-LETO": "94.38 83.73 83.92 85.71 48.82 62.18 81.17 64.04 46.50 45.70 64.37 86.87 69.13",
}
WEIGHED = {
    0.2: "94.41 84.37 84.78 84.92 40.10 59.07 84.90 62.67 37.98 31.05 59.80 91.59 57.18",
    0.3: "94.37 83.51 84.35 85.19 42.21 59.51 84.10 62.80 38.89 33.05 60.64 91.05 58.14",
    0.5: ABLATED["V-LETO"],
    0.7: "94.41 84.39 81.84 84.10 58.71 62.19 75.06 66.37 45.70 43.22 62.13 85.27 61.03",
    0.8: "94.41 84.77 80.43 83.39 71.45 63.07 68.65 69.86 51.02 47.58 63.59 81.50 62.18",
}
HELD = {
    5: "94.39 83.12 83.98 84.96 47.11 61.07 81.52 63.79 41.13 38.07 62.99 89.61 59.77",
    10: "94.43 83.35 83.82 84.89 47.36 61.40 81.21 63.88 41.02 38.26 63.30 89.43 59.85",
    15: ABLATED["V-LETO"],
    20: "94.39 83.52 83.18 84.87 46.97 60.86 81.09 63.71 40.88 37.91 62.81 89.57 59.68",
    25: "94.39 83.54 83.20 84.90 46.93 60.82 81.15 63.75 40.88 37.97 63.05 89.82 59.76",
}
TABLE_3 = {
    "w/o L_CE": (60.90, 79.99, 89.97, 90.01),
    "w/o L_F": (61.01, 74.83, 71.94, 60.70),
    "w/o LMO": (60.17, 60.26, 64.32, 43.10),
    "V-LETO": (60.93, 88.68, 95.06, 97.39),
}
FINE = [(None, 1)] + [
    (task, stage) for stage in (2, 3, 4) for task in (*range(1, stage + 1), None)
]  # columns of Table 2: a task after a stage, or all so far
IMPOSSIBLE = 69.13  # printed for FMNIST; would need more than 100 % on two classes: about 60.4


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
    yield _columns(data, "label_oracle", fil_eval="label_oracle")


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
QUICK: tuple[Setting, ...] = (*_of("FMNIST"), *_ablations("FMNIST"))  # of a miniature
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
        """A miniature for a look: 1,200 rows, one linear layer for each strip, one seed.

        Steps are five times as long, since there are so few of them.
        """
        small = {"scenario.train": 0.02, "scenario.valid": 0.98, "method.network": "dense",
                 "method.batch": 32}  # fmt: skip
        rates = (0.05, *RATES)
        return Plan(folder, device, (0,), 4, changes=tuple(sorted(small.items())), rates=rates)


def _values(setting: Setting, plan: Plan) -> dict[str, Any]:
    return change(setting.values(), {**dict(plan.changes), "rounds": plan.rounds})


def together(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings that are measured in one sweep: those whose steps are mostly of one form."""
    found: dict[Any, list[Setting]] = {}
    for setting in settings:
        changes = dict(setting.changes)
        replay = "method.replay" in changes
        key = setting.data, setting.name.split()[1], changes.get("method.name"), replay
        found.setdefault(key, []).append(setting)
    return list(found.values())


def measure(
    setting: Setting, plan: Plan, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Run a setting, or read what was measured before with the same config."""
    return measure_together([setting], plan, say)[setting.name]


def measure_together(
    settings: Sequence[Setting], plan: Plan, say: Callable[[str], None] = lambda text: None
) -> dict[str, dict[str, Any]]:
    """Run settings as one sweep; each has the first rate at which no seed's loss is lost."""
    found = {s.name: known(s, plan) for s in settings}
    done = {name: one for name, one in found.items() if one is not None}
    waiting = [s for s in settings if s.name not in done]
    for rate in plan.rates:
        waiting = _measured_at(rate, waiting, plan, done, say)
        if not waiting:
            return done
    what = f"the loss of {waiting[0].name} is no longer a number at rate {plan.rates[-1]:g}"
    raise UserError(what, "method.rate", "choose a smaller rate")


def _measured_at(
    rate: float,
    settings: Sequence[Setting],
    plan: Plan,
    done: dict[str, dict[str, Any]],
    say: Callable[[str], None],
) -> list[Setting]:
    """Measure settings at one rate; those whose loss is no number at it are given back."""
    how = {"engine.device": plan.device, "engine.packing": False, "engine.tf32": plan.tf32,
           "checkpoints": False, "looks": False, "method.rate": rate}  # fmt: skip
    own = [{k: v for k, v in s.changes if k == "method.rate"} for s in settings]
    several = [change(_values(s, plan), {**how, **o}) for s, o in zip(settings, own, strict=True)]
    began, told = time.monotonic(), [(0, -1)]

    def watch(progress: Any) -> None:
        now = (progress.stage, progress.round)
        if now > told[0] and progress.round % 5 == 0:
            told[0] = now
            seconds = time.monotonic() - began
            say(f"{settings[0].name} and {len(settings) - 1} more: stage {progress.stage},"
                f" round {progress.round}, {seconds:.0f} s")  # fmt: skip

    runs, lost = swept_together(several, {"seed": plan.seeds}, plan.folder, watch, _is_lost)
    seconds = (time.monotonic() - began) / len(settings)
    for setting, made in zip(settings, runs, strict=True):
        if made:
            one = _found(setting, plan, made) | {"seconds": seconds}
            keep(plan.folder, setting.name, one)
            done[setting.name] = one
            say(f"{setting.name}: {seconds:.1f} s, rate {one['rate']:g}")
    for number in lost:
        say(f"{settings[number].name}: the loss is no number at rate {rate:g}")
    return [settings[number] for number in sorted(lost)]


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, UserError) and "no longer a number" in str(error)


def _found(setting: Setting, plan: Plan, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "setting": setting.name,
        "config": _wanted(setting, plan),
        "rate": runs[0].config["method"]["rate"],
        "rates": list(plan.rates),
        "miniature": bool(plan.changes),
        "facts": {k: runs[0].facts[k] for k in ("atoll", "packages", "device", "data")},
        "engine": runs[0].config["engine"],
        "runs": [_brief(run) for run in runs],
    }


def _brief(run: Run) -> dict[str, Any]:
    """What the ledger needs of a run: accuracies by task and stage, and what was held back."""
    tasks, union, frozen = dict[str, float](), dict[str, float](), dict[str, float]()
    for event in run.events:
        if isinstance(event, Score) and event.variant == "union":
            union[str(event.stage + 1)] = event.accuracy
        elif isinstance(event, Score):
            tasks[f"{event.task + 1}|{event.stage + 1}"] = event.accuracy
        elif isinstance(event, Round):
            held = [v for k, v in event.notes.items() if k.startswith("frozen ")]
            if held:
                frozen[str(event.stage + 1)] = float(np.mean(held))
    return {"seed": run.config["seed"], "tasks": tasks, "union": union, "frozen": frozen}


def _wanted(setting: Setting, plan: Plan) -> str:
    """What a measurement must have been made of to count for this plan."""
    return fingerprint([_values(setting, plan), plan.seeds, plan.rates])


def known(setting: Setting, plan: Plan) -> dict[str, Any] | None:
    """What was measured before of the same."""
    return kept(plan.folder, setting.name, _wanted(setting, plan))


def replaced(setting: Setting, plan: Plan) -> list[Path]:
    """The files of other measurements that measuring this would replace."""
    return others(plan.folder, [setting.name], _wanted(setting, plan))


# What a measurement says


def after(found: dict[str, Any], task: int | None, stage: int) -> list[float]:
    """For each seed the accuracy on a task after a stage, or on all classes so far (None)."""
    return [_after(run, task, stage) for run in found["runs"]]


def _after(run: dict[str, Any], task: int | None, stage: int) -> float:
    if task is None and str(stage) in run["union"]:
        return float(run["union"][str(stage)])
    tasks = run["tasks"]
    if task is None:  # columns by stage: one task; standalone: its own; joint: one stage
        places = [f"{stage}|{stage}", f"1|{stage}", "1|1"]
        return float(next(tasks[place] for place in places if place in tasks))
    return float(tasks[f"{task}|{stage}"])


def by_stage(found: dict[str, Any]) -> list[float]:
    """The means over seeds, a number for each stage: the columns of Table 1."""
    return [float(np.mean(after(found, None, stage))) for stage in range(1, STAGES + 1)]


def average(found: dict[str, Any]) -> list[float]:
    """For each seed the plain mean over stages."""
    rows = [after(found, None, stage) for stage in range(1, STAGES + 1)]
    return [float(v) for v in np.mean(rows, axis=0)]


# The ledger


def ledger(measured: dict[str, dict[str, Any]], missing: dict[str, str]) -> Ledger:
    """The cells of every table for which there is something to say."""
    cells = [
        *_table_1(measured, missing),
        *_fine("Table 2 (FMNIST, CIL)", {f"CIL {n}": t for n, t in ABLATED.items()}, measured),
        *_table_3(measured),
        *_fine("Table 4 (FMNIST, CIL)", _placed("lambda_A", WEIGHED), measured),
        *_fine("Table 5 (FMNIST, CIL)", _placed("k0", HELD), measured),
        *_others(measured),
    ]  # fmt: skip
    facts = {name: found["facts"] for name, found in measured.items()}
    return Ledger("V-LETO", facts, tuple(cells), tuple(_claims(measured)))


def _place(option: str, value: float) -> str:
    """The setting of a sweep; the middle of each sweep is V-LETO itself."""
    middle = {"lambda_A": 0.5, "lambda_F": 0.5, "k0": 15}[option]
    kind = "FIL" if option == "lambda_F" else "CIL"
    return f"{kind} V-LETO" if value == middle else f"{kind} {option} {value}"


def _placed(option: str, rows: dict[Any, str]) -> dict[str, str]:
    return {_place(option, value): printed for value, printed in rows.items()}


def _cell(
    where: tuple[str, str, str],  # table, row, column
    printed: float | None,
    ours: Sequence[float],
    name: str,
    found: dict[str, Any],
) -> Cell:
    data, rate, first = found["facts"]["data"], found["rate"], found.get("rates", RATES)[0]
    notes = [f"partial: {data['partial']}"] if data["partial"] else []
    asked = f"rate {rate:g}" in where[1]  # a study of that rate
    notes += [f"rate {rate:g}: at larger ones the loss is no number"] * (
        rate != first and not asked
    )
    notes += ["a miniature"] * found["miniature"]
    notes += ["reads the test labels"] * name.endswith("label_oracle")
    if printed == IMPOSSIBLE:
        notes.append("the printed number would need more than 100 % on two classes: about 0.604")
    return Cell(
        *where, None if printed is None else printed / 100, None, tuple(ours),
        command=f"atoll reproduce vleto --only '{name}'", config=found["config"],
        data=data["fingerprint"][:12], note="; ".join(notes),
    )  # fmt: skip


def _table_1(measured: dict[str, dict[str, Any]], missing: dict[str, str]) -> Iterator[Cell]:
    for kind, place in (("CIL", 0), ("FIL", 1)):
        for data, printed in PRINTED.items():
            rows = {method: numbers[place] for method, numbers in printed.items()}
            for row, theirs in {**rows, **({"Joint": (), "P2": ()} if place else {})}.items():
                name, table = f"{data} {kind} {row}", f"Table 1, {kind}, {data}"
                if name in measured:
                    yield from _row_1(table, name, row, theirs, measured[name])
                elif name in missing:
                    yield from _open(table, row, theirs, missing[name])


def _open(table: str, row: str, theirs: Sequence[float], note: str) -> Iterator[Cell]:
    for stage, value in enumerate(theirs, 1):
        yield Cell(table, row, f"Task {stage}", value / 100, None, note=note)


def _row_1(
    table: str, name: str, row: str, theirs: Sequence[float], found: dict[str, Any]
) -> Iterator[Cell]:
    stages = 1 if row == "Joint" else STAGES
    for stage in range(1, stages + 1):
        printed = theirs[stage - 1] if stage <= len(theirs) else None
        column = "all strips" if row == "Joint" else f"Task {stage}"
        yield _cell((table, row, column), printed, after(found, None, stage), name, found)
    if " CIL " in name:
        rows = [60.43 if value == IMPOSSIBLE else value for value in theirs]  # J8
        mean = float(np.mean(rows)) if rows else None
        yield _cell((table, row, "AVG"), mean, average(found), name, found)


def _fine(table: str, rows: dict[str, str], measured: dict[str, dict[str, Any]]) -> Iterator[Cell]:
    """Tables whose columns are each task after each stage, and all so far."""
    for name, printed in rows.items():
        full = f"FMNIST {name}"
        if full not in measured:
            continue
        found, row = measured[full], name.removeprefix("CIL ")
        for (task, stage), value in zip(FINE, map(float, printed.split()), strict=True):
            column = f"after {stage}: {'all' if task is None else f'task {task}'}"
            yield _cell((table, row, column), value, after(found, task, stage), full, found)


def _table_3(measured: dict[str, dict[str, Any]]) -> Iterator[Cell]:
    """FIL ablations; what is printed as 'w/o LMO' is, by the code, the sum at the test."""
    table, summed = "Table 3 (FMNIST, FIL)", "sum at the test"
    for row, printed in TABLE_3.items():
        name = f"FMNIST FIL {summed if row == 'w/o LMO' else row}"
        if name not in measured:
            continue
        found, label = measured[name], f"{row} ({summed})" if row == "w/o LMO" else row
        for stage, value in enumerate(printed, 1):
            where = (table, label, f"Task {stage}")
            yield _cell(where, value, after(found, None, stage), name, found)


def _others(measured: dict[str, dict[str, Any]]) -> Iterator[Cell]:
    """What the paper has no number for: Figure 4, the label-reading test, and our studies."""
    wanted = [s.name for s in STUDIES]
    wanted += [s.name for data in ("FMNIST", "MNIST") for s in _ablations(data)]
    wanted += [f"FMNIST {_place('lambda_F', weight)}" for weight in LAMBDAS]
    for name in wanted:
        if name in measured:
            table = (
                "Figure 4"
                if "lambda_F" in name or name == "FMNIST FIL V-LETO"
                else "Beside the paper"
            )
            yield from _row_1(table, name, name, (), measured[name])


# The eleven expectations of the specification's section i


def _claims(measured: dict[str, dict[str, Any]]) -> list[Claim]:
    found: list[Claim] = []
    for data in ("MNIST", "FMNIST"):
        for check in (_c1, _c2, _c3, _c4, _c5, _c6, _c7, _c8, _c9, _c10, _c11, _oracle, _all_held):
            try:
                found += check(data, measured)
            except KeyError as lacking:
                words = (check.__doc__ or "").strip()
                why = f"not run yet: atoll reproduce vleto --only {lacking}"
                if data != "MNIST" or "FMNIST alone" not in words:
                    found.append(Claim(f"{words} ({data})", None, why, open=True))
    return found


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.1f}" for value in values)


def _c1(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """1 CIL: PyVertical near 4/6, 4/8, 4/10 of the single task, at 0 on classes long unseen."""
    one, alone = of[f"{data} CIL PyVertical"], of[f"{data} CIL Standalone"]
    union, single = by_stage(one), by_stage(alone)
    expected = [single[t] * 4 / (2 * t + 4) for t in (1, 2, 3)]
    near = all(abs(u - e) < 0.05 for u, e in zip(union[1:], expected, strict=True))
    gone = [float(np.mean(after(one, task, stage))) for task, stage in ((1, 3), (1, 4), (2, 4))]
    yield Claim(
        f"1 {data} CIL: PyVertical after tasks 2, 3, 4 is near 4/6, 4/8, 4/10 of the single task "
        "(within 5 points), and at 0 on classes unseen for two tasks",
        near and max(gone) < 0.05,
        f"{_listed(union[1:])} (expected {_listed(expected)}); gone: {_listed(gone)}",
    )


def _c2(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """2 CIL: V-LETO above PyVertical after every task but the first, AVG by 15 points."""
    one, other = of[f"{data} CIL V-LETO"], of[f"{data} CIL PyVertical"]
    gaps = [a - b for a, b in zip(by_stage(one), by_stage(other), strict=True)]
    gain = np.array(average(one)) - np.array(average(other))
    yield Claim(
        f"2 {data} CIL: V-LETO above PyVertical after every task but the first, AVG by 15 points",
        min(gaps[1:]) > 0 and float(gain.mean()) >= 0.15,
        f"gaps {_listed(gaps)}; AVG {100 * gain.mean():+.1f}, by seed {_listed(gain.tolist())}",
    )


def _c3(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """3 CIL: without L_A, and without LMO, it falls back to about PyVertical."""
    base, full = (float(np.mean(average(of[f"{data} CIL {n}"]))) for n in ("PyVertical", "V-LETO"))
    for name in ("w/o L_A", "w/o LMO"):
        mean = float(np.mean(average(of[f"{data} CIL {name}"])))
        text = f"3 {data} CIL: {name} falls back to about PyVertical (AVG within 5 points)"
        evidence = f"{_listed([mean])}, PyVertical {_listed([base])}, V-LETO {_listed([full])}"
        yield Claim(text, abs(mean - base) <= 0.05, evidence)


def _c4(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """4 CIL: raising lambda_A raises old tasks and lowers the current one; FMNIST alone."""
    found = [of[f"{data} {_place('lambda_A', w)}"] for w in LAMBDAS]
    old = [float(np.mean([after(one, t, 4) for t in (1, 2, 3)])) for one in found]
    new = [float(np.mean(after(one, 4, 4))) for one in found]
    yield Claim(
        f"4 {data} CIL: raising lambda_A raises old tasks and lowers the current one, after task 4",
        all(a < b for a, b in pairwise(old)) and all(a > b for a, b in pairwise(new)),
        f"lambda_A {', '.join(map(str, LAMBDAS))}: old {_listed(old)}; current {_listed(new)}",
    )


def _c5(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """5 CIL: k0 and alpha change nothing; FMNIST alone."""
    found = {k: of[f"{data} {_place('k0', k)}"] for k, _ in THRESHOLDS}
    exact = [bool(one["engine"].get("tf32")) for one in found.values()]
    usual = exact.count(True) > exact.count(False)  # what was rounded otherwise cannot be equal
    averages = {k: average(one) for k, one in found.items()}
    same = [a for a, tf32 in zip(averages.values(), exact, strict=True) if tf32 == usual]
    apart = max(abs(a - b) for other in same for a, b in zip(same[0], other, strict=True))
    others = [str(k) for k, tf32 in zip(found, exact, strict=True) if tf32 != usual]
    left = f"; k0 {', '.join(others)} was measured in another precision" if others else ""
    yield Claim(
        f"5 {data} CIL: k0 and alpha change nothing",
        apart < 1e-9,
        f"AVG {_listed([float(np.mean(a)) for a in averages.values()])};"
        f" {len(same)} of them apart by {apart:.1e} at most{left}",
    )


def _c6(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """6 CIL: Standalone above V-LETO."""
    alone, full = by_stage(of[f"{data} CIL Standalone"]), by_stage(of[f"{data} CIL V-LETO"])
    yield Claim(
        f"6 {data} CIL: Standalone above V-LETO after every task but the first (AVG too)",
        all(a > b for a, b in zip(alone[1:], full[1:], strict=True)),
        f"Standalone {_listed(alone)}; V-LETO {_listed(full)}",
    )


def _c7(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """7 FIL: the outer strips alone are weaker than the inner ones."""
    alone = by_stage(of[f"{data} FIL Standalone"])
    yield Claim(
        f"7 {data} FIL: the outer strips alone are weaker than the inner ones",
        max(alone[0], alone[3]) < min(alone[1:3]),
        _listed(alone),
    )


def _c8(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """8 FIL: PyVertical rises, then drops at the weak last strip."""
    rows = by_stage(of[f"{data} FIL PyVertical"])
    text = f"8 {data} FIL: PyVertical rises, then drops at the weak last strip"
    yield Claim(text, rows[0] < rows[1] < rows[2] > rows[3], _listed(rows))


def _c9(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """9 FIL: V-LETO does not drop at the weak last strip and ends above PyVertical."""
    full, base = by_stage(of[f"{data} FIL V-LETO"]), by_stage(of[f"{data} FIL PyVertical"])
    yield Claim(
        f"9 {data} FIL: V-LETO does not drop at the weak last strip and ends above PyVertical",
        full[3] >= full[2] - 0.005 and full[3] > base[3],
        f"V-LETO {_listed(full)}; PyVertical {_listed(base)}",
    )


def _c10(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """10 FIL: P2 rises with every strip and comes near Joint."""
    rows, joint = (
        by_stage(of[f"{data} FIL P2"]),
        float(np.mean(after(of[f"{data} FIL Joint"], None, 1))),
    )
    yield Claim(
        f"10 {data} FIL: P2 rises with every strip and comes near Joint (within 5 points)",
        all(a < b for a, b in pairwise(rows)) and joint - rows[3] < 0.05,
        f"{_listed(rows)}; Joint {_listed([joint])}",
    )


def _c11(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """11 FIL: no honest variant is above Joint (leakage alarm)."""
    joint = float(np.mean(after(of[f"{data} FIL Joint"], None, 1)))
    ends = {
        name.removeprefix(f"{data} FIL "): by_stage(one)[3]
        for name, one in of.items()
        if name.startswith(f"{data} FIL ")
        and not name.endswith(("Joint", "label_oracle", "Standalone"))
    }
    if not ends:
        raise KeyError(f"{data} FIL P2")
    best = max(ends, key=lambda name: ends[name])
    yield Claim(
        f"11 {data} FIL: no honest variant is above Joint by 2 points (leakage alarm)",
        ends[best] <= joint + 0.02,
        f"best of {len(ends)}: {best} {_listed([ends[best]])}; Joint {_listed([joint])}",
    )


def _oracle(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """FIL: the published test, which reads labels, ends above a model with all columns."""
    joint = float(np.mean(after(of[f"{data} FIL Joint"], None, 1)))
    rows = by_stage(of[f"{data} FIL label_oracle"])
    paper = [value / 100 for value in PRINTED[data]["V-LETO"][1]]
    yield Claim(
        f"{data} FIL: the published test, which reads labels, ends above a model with all columns",
        rows[3] > joint,
        f"{_listed(rows)}; Joint {_listed([joint])}; the paper {_listed(paper)}",
    )


def _all_held(data: str, of: dict[str, Any]) -> Iterator[Claim]:
    """CIL: the published threshold holds back every weight from task 2 on."""
    shares = [list(run["frozen"].values()) for run in of[f"{data} CIL V-LETO"]["runs"]]
    yield Claim(
        f"{data} CIL: the published threshold holds back every weight from task 2 on",
        all(share[1:] == [1.0] * (STAGES - 1) for share in shares),
        f"shares by stage: {_listed(shares[0])}",
    )


def figures(measured: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    """Figure 4 and the sensitivity of Tables 4 and 5, for what is there."""
    axes = {
        "lambda_A (CIL)": [(w, _place("lambda_A", w)) for w in LAMBDAS],
        "k0 (CIL)": [(float(k), _place("k0", k)) for k, _ in THRESHOLDS],
        "lambda_F (FIL)": [(w, _place("lambda_F", w)) for w in LAMBDAS],
    }
    panels = []
    for title, places in axes.items():
        there = [(x, measured[f"FMNIST {n}"]) for x, n in places if f"FMNIST {n}" in measured]
        if len(there) > 1:
            panels.append((title, [(x, by_stage(one)) for x, one in there]))
    return {"figure4.svg": sensitivity_figure(panels)} if panels else {}


def chosen(only: str, table: str) -> list[Setting]:
    """The settings that a command asks for."""
    if only:
        found = [s for s in (*SETTINGS, *STUDIES) if s.name == only]
        if not found:
            some = "; ".join(s.name for s in SETTINGS[:6])
            raise UserError(f"no setting '{only}'", "--only", f"for example: {some}")
        return found
    if table:
        names = _tables()
        if table not in names:
            raise UserError(f"no table '{table}'", "--table", f"use {', '.join(names)}")
        return [s for s in (*SETTINGS, *STUDIES) if s.name in names[table]]
    return list(SETTINGS)


def _tables() -> dict[str, list[str]]:
    """What each table is made of."""
    return {
        "1": [s.name for data in DATA for s in _of(data)],
        "2": [f"FMNIST CIL {row}" for row in ABLATED],
        "3": ["FMNIST FIL V-LETO", "FMNIST FIL w/o L_CE", "FMNIST FIL w/o L_F",
              "FMNIST FIL sum at the test"],
        "4": [f"FMNIST {_place('lambda_A', w)}" for w in LAMBDAS],
        "5": [f"FMNIST {_place('k0', k)}" for k, _ in THRESHOLDS],
        "figure4": [f"FMNIST {_place('lambda_F', w)}" for w in LAMBDAS],
    }  # fmt: skip
