"""FedSeIT's tables: 5 data sets, 7 methods, 2 strengths of lambda2; profiles, controls, faults.

Nothing is tuned: all settings are the paper's. Settings whose networks have the same shapes run as
one sweep: both strengths of lambda2, and FedSeIT with and without SIT for equal numbers of foreign
parts. The paper's figures stand beside the profile `default` and beside `released`, which behaves
as the authors' code; docs/methods/fedseit.md lists the differences. A setting with a fault has one
of these differences alone and is paired with the same setting without it.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.record import Round, Score
from atoll.metrics import scores as metrics
from atoll.reproduce.claims import Claim, above
from atoll.reproduce.fedseit_claims import claims, orders, relative, series
from atoll.reproduce.figures import course_figure
from atoll.reproduce.ledger import Cell, Ledger, means_and_spreads
from atoll.reproduce.margins import RULES
from atoll.reproduce.measured import CHECKPOINTS, Measurement
from atoll.reproduce.paper import Measured, Missing, Paper, Say, Stopwatch, facts_of
from atoll.reproduce.sweeps import swept_together
from atoll.runs.config import change, read
from atoll.runs.result import Run

__all__ = ["FAULTY", "PAPER", "PRINTED", "SETTINGS", "STUDIES", "Plan", "Setting"]

DATA = {"R8": "reuters8", "TMN": "tmn", "TREC6": "trec6", "TREC50": "trec50", "SUBJ": "subj"}
COLUMNS: dict[str, dict[str, Any]] = {
    "FedWeIT": {"combine": "sum"},
    "FedSeIT": {},
    "SIT K=3": {"transfer": "sit", "keep": 3},
    "SIT K=5": {"transfer": "sit", "keep": 5},
    "FedSeIT+DLS": {"dls": True},
    "DLS, SIT K=3": {"dls": True, "transfer": "sit", "keep": 3},
    "DLS, SIT K=5": {"dls": True, "transfer": "sit", "keep": 5},
}
CONTROLS: dict[str, dict[str, Any]] = {
    "FedWeIT-Dense": {"combine": "sum", "dense": True},
    "Local": {"combine": "none", "average": False},
}
FAULTS_OF = "atoll.reproduce.faults.fedseit"
CLIENTS = 3
STRENGTHS = ("1.0", "0.1")
PROFILES = ("default", "released")
DRAWN = ("R8", "1.0")  # Figure 5 draws these: the accuracy of each task after each round
FAULTS = {  # by fault the methods that have it
    "head": ("FedWeIT", "FedSeIT"),
    "masks": ("FedWeIT", "FedSeIT"),
    "tests": ("FedWeIT", "FedSeIT"),
    "foreign": ("FedSeIT",),
    "projections": ("FedSeIT",),
    "stop": ("FedWeIT", "FedSeIT"),
    "draws": ("FedWeIT", "FedSeIT"),
    "all but tests": ("FedWeIT", "FedSeIT"),  # trained as released, and tested on all rows
}

# TTA in %, mean and deviation as printed, in the order of COLUMNS.
PRINTED = {
    "1.0": means_and_spreads("""
        R8     | 79.1±2.5  90.5±0.6  90.5±0.5  90.6±0.7  83.1±5.0  82.3±5.9  82.4±3.5
        TMN    | 84.2±0.9  88.2±0.2  88.3±0.1  88.6±0.3  84.7±2.4  84.3±1.9  83.6±1.3
        TREC6  | 78.2±1.9  83.6±0.6  83.6±0.5  83.3±0.2  78.2±2.1  78.3±1.5  77.7±1.8
        TREC50 | 85.1±1.1  88.4±2.5  88.5±2.4  88.7±1.9  86.4±1.1  86.3±1.5  85.2±0.2
        SUBJ   | 86.5±0.9  88.5±0.6  88.6±0.6  89.5±0.3  88.9±0.5  89.7±1.7  89.0±0.9
    """),
    "0.1": means_and_spreads("""
        R8     | 68.1±10.4 89.9±0.7  89.9±1.1  89.7±0.8  60.7±14.5 61.9±14.9 65.3±10.6
        TMN    | 80.9±0.6  88.5±0.1  88.4±0.07 88.3±0.7  72.8±9.1  73.3±9.8  71.1±8.5
        TREC6  | 77.1±3.6  84.7±1.1  84.9±1.3  84.7±1.2  78.3±1.6  78.9±1.3  76.8±3.0
        TREC50 | 76.1±0.9  81.2±3.5  81.2±2.9  80.9±2.1  69.8±3.9  69.4±4.7  68.9±1.2
        SUBJ   | 85.6±0.6  89.1±0.4  88.8±0.1  90.4±1.5  88.1±1.3  90.2±1.8  84.2±2.6
    """),
}

# The column Gain %: the method in bold and its printed gain over FedWeIT, relative.
BEST = {
    "1.0": {
        "R8": ("SIT K=5", 14.5), "TMN": ("SIT K=5", 5.2), "TREC6": ("FedSeIT", 6.9),
        "TREC50": ("SIT K=5", 4.2), "SUBJ": ("SIT K=5", 3.5),
    },
    "0.1": {
        "R8": ("FedSeIT", 32.0), "TMN": ("FedSeIT", 9.4), "TREC6": ("SIT K=3", 10.1),
        "TREC50": ("FedSeIT", 6.7), "SUBJ": ("SIT K=5", 5.6),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A data set, a method, a strength of lambda2, a profile, and for a study a single fault."""

    row: str
    column: str
    strength: str
    profile: str = "default"
    fault: str = ""

    @property
    def name(self) -> str:
        """What --only takes."""
        end = "" if self.profile == "default" else f" {self.profile}"
        end += f", fault {self.fault}" if self.fault else ""
        return f"{self.row} {self.column} {self.strength}{end}"

    @property
    def method(self) -> str:
        """The method, and its fault."""
        return f"{self.column} with fault {self.fault}" if self.fault else self.column

    @property
    def form(self) -> Hashable:
        """Settings of equal form have networks of the same shapes, trained in the same way."""
        options = {**COLUMNS, **CONTROLS}[self.column]
        slots = options.get("keep", CLIENTS)
        kwargs = {k: v for k, v in options.items() if k not in ("transfer", "keep")}
        return (self.row, self.profile, self.fault, slots, tuple(sorted(kwargs.items())))

    def values(self) -> dict[str, Any]:
        """The run's values; a task of SUBJ has its two classes."""
        options = {**COLUMNS, **CONTROLS}[self.column]
        more = {f"method.{key}": value for key, value in options.items()}
        more["method.lambda2"] = float(self.strength)
        classes = {"scenario.task_classes": 2} if self.row == "SUBJ" else {}
        scored = {"score_every": 1} if (self.row, self.strength) == DRAWN else {}
        faulty = {"replace": f"{FAULTS_OF}:{self.replacement}"} if self.replacement else {}
        changes = {"data": DATA[self.row], **more, **classes, **scored, **faulty}
        return change(read("fedseit"), changes)

    @property
    def replacement(self) -> str:
        """The faults of the authors' code that it has, by their name in the faults' module."""
        return self.fault.replace(" ", "_") or self.profile.replace("default", "")


SETTINGS = tuple(
    Setting(row, column, strength) for strength in STRENGTHS for row in DATA for column in COLUMNS
)

FAULTY = tuple(
    Setting(row, column, "1.0", fault=fault) for row in ("R8", "TMN")
    for fault, columns in FAULTS.items() for column in columns
)  # fmt: skip

STUDIES = (
    *(Setting(row, column, strength) for strength in STRENGTHS for row in DATA
      for column in CONTROLS),
    *(Setting(row, column, strength, "released") for strength in STRENGTHS for row in DATA
      for column in (*COLUMNS, *CONTROLS)),
    *FAULTY,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How much is run, and where."""

    folder: Path
    device: str = "auto"
    seeds: tuple[int, ...] = (1, 2, 3)
    rounds: int = 10
    epochs: int = 50
    stages: int = 5
    filters: int = 128
    tf32: bool = False

    @staticmethod
    def quick(folder: Path, device: str) -> "Plan":
        """A miniature: one seed, two tasks a client, one round of two epochs."""
        return Plan(folder, device, (1,), 1, 2, 2, 16)

    def sizes(self) -> dict[str, Any]:
        """What of it changes a result beyond rounding; a whole plan leaves the preset as it is."""
        return {
            "rounds": self.rounds, "method.epochs": self.epochs, "scenario.stages": self.stages,
            "model.widths": [self.filters],
        }  # fmt: skip


def _execute(
    settings: Sequence[Setting], plan: Plan, say: Say
) -> Iterator[tuple[Setting, Measurement]]:
    """Run the seeds of all settings as one sweep."""
    changes = {
        "engine.device": plan.device, "engine.packing": False, "engine.tf32": plan.tf32,
        "engine.mode": "stacked" if plan.device == "cuda" else "auto",
        "checkpoint_seconds": CHECKPOINTS, "looks": False,
    }  # fmt: skip
    names = [setting.name for setting in settings]
    watch = Stopwatch(say, ", ".join(names), lambda progress: (progress.stage,))
    several = [change(change(s.values(), plan.sizes()), changes) for s in settings]
    runs, _ = swept_together(several, {"seed": plan.seeds}, plan.folder, watch)
    before = max(run.seconds for own in runs for run in own)  # more, where a run was resumed
    seconds = round(max(watch.seconds, before), 1)
    for setting, own in zip(settings, runs, strict=True):
        yield (
            setting,
            {
                "facts": facts_of(own[0], "vectors"),
                "engine": own[0].config["engine"],
                "seconds": seconds,
                "together": names,  # what these seconds are of
                "runs": [_brief(run) for run in own],
            },
        )


def _identity(setting: Setting, plan: Plan) -> list[Any]:
    return [change(setting.values(), plan.sizes()), plan.seeds]


def _brief(run: Run) -> dict[str, Any]:
    """What the ledger needs of a run: TTA, every task's accuracy at the end, traffic, rounds."""
    rounds = [event for event in run.events if isinstance(event, Round)]
    last = rounds[-1].stage
    final = [s for s in run.scores if s.variant == "own" and s.stage == last]
    by_task = {(s.client, s.task): round(s.accuracy, 6) for s in final}  # the last test counts
    brief: dict[str, Any] = {
        "seed": run.config["seed"],
        "accuracy": float(np.mean(list(by_task.values()))),
        "tasks": {client: [by_task[client, task] for task in range(last + 1)]
                  for client in sorted({client for client, _ in by_task})},
        "forgetting": run.metrics["own"]["forgetting_diagonal_last"],
        "rounds": [1 + max(r.round for r in rounds if r.stage == stage)
                   for stage in range(last + 1)],
        "rates": [_lowest(rounds, stage) for stage in range(last + 1)],
        "nonzero": {name: int(value) for r in rounds if r.stage == last
                    for name, value in r.notes.items() if name.startswith("nonzero ")},
        "bytes_up": max(metrics.bytes_up(run.events).values()),
        "bytes_down": max(metrics.bytes_down(run.events).values()),
    }  # fmt: skip
    if run.config["score_every"]:
        brief["course"] = _course(run.scores)
    return brief


def _lowest(rounds: list[Round], stage: int) -> float:
    """The lowest rate of any client at the end of a task (pitfall 10)."""
    rates = [v for r in rounds if r.stage == stage for n, v in r.notes.items() if n[:5] == "rate "]
    return min(rates)


def _course(scores: list[Score]) -> list[list[float]]:
    """For each task of the last client, its accuracy after each round from its own stage on."""
    client = max(s.client for s in scores)
    own = [s for s in scores if s.client == client and s.variant == "own"]
    tasks = range(1 + max(s.task for s in own))
    return [[round(s.accuracy, 4) for s in own if s.task == task == s.stage] for task in tasks]


def _ledger(measured: Measured, missing: Missing) -> Ledger:
    """Every cell of both tables in both profiles, and the controls and studies that were run."""
    cells = []
    for profile in PROFILES:
        for strength, rows in PRINTED.items():
            for row in rows:
                cells += _row(row, strength, profile, measured, missing)
    for setting in FAULTY:
        if setting.name in measured:
            table = f"lambda2 = {setting.strength}, with one fault of the released code"
            cells.append(_cell(setting, table, None, None, measured))
    facts = {name: measurement["facts"] for name, measurement in measured.items()}
    claims = (*_claims(measured), *_controls(measured), *_effects(measured))
    return Ledger("FedSeIT", facts, tuple(cells), claims, RULES["fedseit"])


def _row(row: str, strength: str, profile: str, measured: Measured, missing: Missing) -> list[Cell]:
    cells = []
    table = f"lambda2 = {strength}" + (", as released" if profile == "released" else "")
    for place, column in enumerate((*COLUMNS, *CONTROLS)):
        setting = Setting(row, column, strength, profile)
        printed = PRINTED[strength][row][place] if column in COLUMNS else None
        theirs, spread = [round(value / 100, 4) for value in printed] if printed else (None, None)
        if setting.name in measured:
            cells.append(_cell(setting, table, theirs, spread, measured))
        elif column in COLUMNS:
            cells.append(_open(setting, table, theirs, spread, missing))
    return [*cells, _gain(row, strength, profile, measured, table)]


def _open(
    setting: Setting, table: str, theirs: float | None, spread: float | None, missing: Missing
) -> Cell:
    """A cell that was not measured, with the command that measures it."""
    command = _command(setting)
    note = missing.get(setting.name, f"not run yet: {command}")
    return Cell(
        table, setting.row, setting.method, theirs, spread, command=command, note=note,
        setting=setting.name,
    )  # fmt: skip


def _cell(
    setting: Setting, table: str, theirs: float | None, spread: float | None, measured: Measured
) -> Cell:
    """What was measured of a setting."""
    one = measured[setting.name]
    return Cell(
        table, setting.row, setting.method, theirs, spread, tuple(_values(one)),
        command=_command(setting), config=one["config"], note=_note(one), setting=setting.name,
        data=one["facts"]["data"]["fingerprint"][:12], obstacle=RULES["fedseit"].differs,
    )  # fmt: skip


def _note(measurement: Measurement) -> str:
    precision = "TF32" if measurement["engine"].get("tf32") else "float32"
    return f"vectors {measurement['facts']['vectors']['name']}; {precision}"


def _gain(row: str, strength: str, profile: str, measured: Measured, table: str) -> Cell:
    """The column Gain %: the best method of the paper's row over FedWeIT, relative."""
    column, printed = BEST[strength][row]
    best = Setting(row, column, strength, profile)
    base = replace(best, column="FedWeIT")
    cell = Cell(table, row, "Gain %", round(printed / 100, 4), None, setting=best.name)
    lacking = [_command(one) for one in (best, base) if one.name not in measured]
    if lacking:
        return replace(cell, note=f"not run yet: {lacking[0]}")
    gains = tuple(relative(measured[best.name], measured[base.name]).values())
    note = f"{column} over FedWeIT, relative; {_note(measured[best.name])}"
    return replace(cell, ours=gains, note=note, obstacle=RULES["fedseit"].differs,
                   command=_command(best), config=measured[best.name]["config"])  # fmt: skip


def _command(setting: Setting) -> str:
    return f"atoll reproduce fedseit --only '{setting.name}'"


def _values(measurement: Measurement) -> list[float]:
    return [run["accuracy"] for run in measurement["runs"]]


def _printed(row: str, column: str, strength: str) -> float:
    pair = PRINTED[strength][row][list(COLUMNS).index(column)]
    assert pair is not None  # FedSeIT's table has no empty cell
    return pair[0]


def _claims(measured: Measured) -> Iterator[Claim]:
    """The paper's claims on paired seeds; those of the profile `released` are a study."""
    for profile in PROFILES:

        def find(row: str, column: str, strength: str, profile: str = profile) -> Any:
            return measured.get(Setting(row, column, strength, profile).name)

        end = "" if profile == "default" else ", as released"
        yield from claims(find, end, "" if profile == "default" else "study")
        yield from orders(find, _printed, end)


def _controls(measured: Measured) -> Iterator[Claim]:
    """FedSeIT against the controls, wherever both were run."""
    for row, strength, control in product(DATA, STRENGTHS, CONTROLS):
        one, other = (Setting(row, c, strength).name for c in ("FedSeIT", control))
        if one in measured and other in measured:
            text = f"{row}, lambda2 = {strength}: FedSeIT above {control}"
            yield _above(text, measured[one], measured[other])


def _above(text: str, one: Measurement, other: Measurement) -> Claim:
    return Claim(text, "study", (above("gain", series(one), series(other)),))


def _effects(measured: Measured) -> Iterator[Claim]:
    """What a fault alone does to a method, and where FedSeIT then stands to FedWeIT."""
    for one in FAULTY:
        others = [replace(one, fault="")]
        if one.column == "FedSeIT":
            fault = one.fault if "FedWeIT" in FAULTS[one.fault] else ""  # else it has no such part
            others.append(replace(one, column="FedWeIT", fault=fault))
        for other in others:
            if one.name in measured and other.name in measured:
                text = f"{one.row}, lambda2 = {one.strength}: {one.method} above {other.method}"
                yield _above(text, measured[one.name], measured[other.name])


def _figures(measured: Measured) -> dict[str, bytes]:
    """Figure 5: the accuracy of the last client's tasks after each round, where it was run."""
    row, strength = DRAWN
    figures = {}
    for profile, name in zip(PROFILES, ("figure5.svg", "figure5-released.svg"), strict=True):
        lines = {}
        for column in ("FedWeIT", "FedSeIT"):
            one = measured.get(Setting(row, column, strength, profile).name)
            if one is not None:
                lines[column] = [run["course"] for run in one["runs"]]
        if len(lines) == 2:
            figures[name] = course_figure(lines)
    return figures


PAPER = Paper(
    name="fedseit",
    settings=SETTINGS,
    studies=STUDIES,
    plan=Plan,
    quick=Plan.quick,
    tables={strength: [s for s in SETTINGS if s.strength == strength] for strength in STRENGTHS},
    identity=_identity,
    execute=_execute,
    ledger=_ledger,
    figures=_figures,
    form=lambda setting: setting.form,
)
