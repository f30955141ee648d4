"""FCCL's tables and figures: what to run, what the paper prints, and the verdicts.

A setting is a method on a task with one public set. Nothing is tuned: all values are the paper's or
its code's (sections f and h of the specification). Each seed of a setting is one file. SOLO is the
model before any exchange, which every run reports and all runs of a seed share. Stand-ins: MNIST-M
for SYN, Office-Caltech-10 for Office-Home; SVHN, MNIST-M and CIFAR-100 are parts.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.record import Round, Score
from atoll.data.dataset import Dataset
from atoll.engines.local import local_engine
from atoll.metrics import scores as metrics
from atoll.reproduce.domain_figures import bars, matrices, over_rounds
from atoll.reproduce.fccl_claims import OBSTACLES, claims
from atoll.reproduce.fccl_scores import after, last, means, means_of, series, tested
from atoll.reproduce.ledger import Cell, Ledger
from atoll.reproduce.margins import RULES
from atoll.reproduce.measured import CHECKPOINTS, FilePerSeed, Measurement, workplace, write
from atoll.reproduce.origin import provenance
from atoll.reproduce.paper import Measured, Missing, Paper, Say, facts_of, silent
from atoll.reproduce.sweeps import on_cluster, swept_together
from atoll.runs.config import change, read, resolve
from atoll.runs.execute import execute
from atoll.runs.result import Run

__all__ = [
    "COMPARED", "PAPER", "PRINTED", "SETTINGS", "STUDIES", "Plan", "Setting", "measure_seed",
]  # fmt: skip

# What a method changes in the preset.
METHODS: dict[str, dict[str, Any]] = {
    "FedMD": {"name": "fedmd"},
    "FML": {"name": "fml"},
    "RCFL": {"name": "fedmd", "loss": "rcfl"},
    "FedDF": {"name": "fedmd", "loss": "kl"},
    "FedMatch": {"name": "fedmatch"},
    "FCCL": {"name": "fccl"},
    "FedAvg": {"name": "fedmd", "loss": "none"},
    "FCCL w/o CON": {"name": "fccl", "lambda_loc": 0.0},
    "FCCL w/o COL": {"name": "fccl", "collaborate": False},
    "FCCL inter only": {"name": "fccl", "teachers": "inter"},
    "FCCL intra only": {"name": "fccl", "teachers": "intra"},
    "FCCL off-diagonal 0": {"name": "fccl", "off_diagonal": 0},
}
COMPARED = ("FedMD", "FML", "RCFL", "FedDF", "FedMatch", "FCCL")
CIFAR = "cifar100"  # the public images of the tables
PUBLIC_ONLY = ("public_batch", "public_epochs")  # options that methods without public images lack
DERIVED = "the paper prints no mean: that of its row"
DOMAINS = {"digits": ("M", "U", "SV", "SY"), "office": ("A", "C", "P", "R")}


@dataclass(frozen=True)
class Setting:
    """A method on a task; homogeneous: ResNet-18 everywhere and weights averaged."""

    task: str  # digits or office
    method: str
    public: str = CIFAR
    homogeneous: bool = False

    @property
    def name(self) -> str:
        """What it is called in commands and files."""
        kind = " resnet18" if self.homogeneous else ""
        return f"{self.task}{kind} {self.public} {self.method}"

    def values(self) -> dict[str, Any]:
        """The run's values."""
        values = change(read("fccl" if self.task == "digits" else "fccl-office"), {})
        changes, method = METHODS[self.method], dict(values["method"])
        if changes["name"] == "fml":
            method = {k: v for k, v in method.items() if k not in PUBLIC_ONLY}
            values["model"] = {"name": "resnet10"}  # the shared network
        values["method"] = {**method, **changes}
        values["public"] = {**values["public"], "name": self.public}
        if self.homogeneous:
            values |= {"models": [], "model": {"name": "resnet18"}}
            values["method"]["average"] = True
        return values


SETTINGS = (
    *(Setting("digits", method) for method in ("FCCL", *COMPARED[:-1])),
    Setting("digits", "FCCL w/o CON"),
    *(
        Setting("digits", method, public)
        for public in ("fashion-mnist", "tiny-imagenet")
        for method in ("FCCL", "FCCL w/o CON")
    ),
    *(Setting("office", method) for method in ("FCCL", *COMPARED[:-1])),
    *(Setting("office", m, homogeneous=True) for m in ("FCCL", "FedAvg", *COMPARED[:-1])),
)
STUDIES = tuple(
    Setting("digits", m)
    for m in ("FCCL w/o COL", "FCCL inter only", "FCCL intra only", "FCCL off-diagonal 0")
)

# Tables 1 (inter), 2 (intra) and 3 (homogeneous), in percent: the four domains, inter then intra.
TABLES = {
    ("digits", False): """
        SOLO     15.29 13.91 39.24 34.30   70.20 74.19 74.57 73.60
        FedMD     8.97 12.61 40.89 43.03   77.30 80.05 77.73 87.72
        FML      17.11 16.00 45.19 46.26   80.66 79.75 78.58 88.87
        RCFL     10.21 16.10 48.85 37.96   82.59 81.05 78.79 91.40
        FedDF    13.23 19.29 45.25 43.95   82.95 78.84 78.46 91.30
        FedMatch  9.22 14.76 46.28 36.05   82.69 78.31 79.79 89.23
        FCCL     20.74 20.60 44.68 48.02   88.84 84.42 78.55 91.23
    """,
    ("office", False): """
        SOLO     18.89 19.36 21.97 21.02   65.27 60.50 74.68 54.28
        FedMD    16.85 23.13 28.78 25.01   66.17 60.63 76.35 56.60
        FML      18.97 24.41 29.75 24.91   81.46 65.58 79.82 65.07
        RCFL     15.16 22.01 27.98 23.95   65.13 61.33 76.44 55.78
        FedDF    17.38 21.76 25.17 22.97   66.10 60.44 75.70 55.98
        FedMatch 19.05 25.24 28.73 24.35   81.50 65.40 79.81 65.06
        FCCL     25.55 26.41 30.14 29.41   81.51 65.42 79.84 65.16
    """,
    ("office", True): """
        SOLO     18.89 22.58 22.33 27.26   65.27 61.51 74.84 57.65
        FedAvg   57.85 54.05 55.72 60.18   66.71 60.90 74.29 57.49
        FedMD    61.03 62.41 62.45 62.55   66.50 61.75 73.63 58.10
        FML      39.56 36.94 32.73 42.00   74.87 60.73 77.19 60.71
        RCFL     61.52 59.56 57.56 63.59   67.16 61.39 73.33 58.58
        FedDF    61.10 57.92 62.19 60.41   66.69 60.69 74.12 57.69
        FedMatch 51.60 47.77 42.33 55.35   80.35 65.05 78.99 64.55
        FCCL     64.48 62.33 63.26 64.86   81.38 65.47 79.40 65.19
    """,
}


def _printed() -> dict[tuple[str, bool, str], dict[str, tuple[float, ...]]]:
    """The tables by task, homogeneous or not, and kind of domain: each method's four numbers."""
    tables = {}
    for (task, homogeneous), text in TABLES.items():
        rows = [line.split() for line in text.strip().splitlines()]
        for kind, place in (("inter", 1), ("intra", 5)):
            numbers = {row[0]: tuple(map(float, row[place : place + 4])) for row in rows}
            tables[task, homogeneous, kind] = numbers
    return tables


PRINTED = _printed()
# Figures 7 and 8: means over domains, by public set: (inter, intra).
BY_PUBLIC: dict[str, dict[str, tuple[float, float]]] = {
    "cifar100": {"FCCL": (33.51, 85.76), "FCCL w/o CON": (27.13, 82.07)},
    "tiny-imagenet": {"FCCL": (35.70, 86.09), "FCCL w/o CON": (30.26, 82.21)},
    "fashion-mnist": {"FCCL": (36.82, 85.77), "FCCL w/o CON": (32.42, 83.29)},
}
# Figure 7: FCCL on other domains, by public set and domain; CIFAR-100 is in Table 1.
BY_DOMAIN = {
    "tiny-imagenet": (21.62, 21.12, 47.73, 52.34),
    "fashion-mnist": (21.12, 24.07, 51.97, 50.13),
}


@dataclass(frozen=True)
class Plan:
    """How much is run, and where."""

    folder: Path
    device: str = "auto"
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 40
    tf32: bool = False
    precision: str = "float32"
    layout: str = "channels-last"  # the faster one on a GPU, and the same numbers
    mode: str = "auto"
    streams: bool = False  # the four networks side by side on a GPU
    tune: bool = False
    score_every: int = 10
    tiny: bool = False  # other data and networks: shows that it works, says nothing of the paper

    @staticmethod
    def quick(folder: Path, device: str) -> "Plan":
        """A miniature on embedded digits with small networks: one seed, two rounds."""
        return Plan(folder, device, (0,), 2, score_every=1, tiny=True)

    def values(self, setting: Setting, seed: int) -> dict[str, Any]:
        """The config of one run, engine included."""
        values = setting.values()
        if self.tiny:
            values = _tiny(values)
        changes = {
            "seed": seed,
            "rounds": self.rounds,
            "score_every": self.score_every,
            "checkpoint_seconds": CHECKPOINTS,
            "looks": False,
            "model.precision": self.precision,
            "model.layout": self.layout,
            "engine.device": self.device,
            "engine.packing": False,
            "engine.keep": str(self.folder / "common"),
        }
        changes |= {
            f"engine.{key}": getattr(self, key) for key in ("tf32", "mode", "streams", "tune")
        }
        return change({**values, "name": "fccl-run"}, changes)


def _tiny(values: dict[str, Any]) -> dict[str, Any]:
    """The same methods on four made-up domains of small digits."""
    small = {"pretrain_epochs": 2, "batch": 64, "rate": 0.003}
    if values["method"]["name"] != "fml":
        small |= {"public_batch": 128, "public_epochs": 1}
    method = {k: v for k, v in values["method"].items() if k not in ("epochs_each", "top")}
    models = ["cnn", "cnn-deep", "small-resnet", "small-mobilenet"] if values["models"] else []
    return {
        **{k: v for k, v in values.items() if k not in ("scenario", "scale")},
        "data": {"name": "digits-shifted"},
        "public": {"name": "digits-public", "rows": 256},
        "scenario": {"split": "domains", "train": 1.0, "valid": 0.0},
        "models": models,
        "model": {"name": "cnn"},
        "method": {**method, **small, "epochs": 1},
    }


def measure_seed(
    setting: Setting,
    seed: int,
    plan: Plan,
    say: Say = silent,
    loaded: dict[str, Dataset] | None = None,
) -> Measurement:
    """One run, or what is stored of it; `loaded` is filled with its data, for other runs."""
    config = PAPER.config(setting, plan)
    before = STORAGE.run(setting.name, seed, plan, config)
    if before is not None and before["rounds"] == plan.rounds:
        return before
    values, began = plan.values(setting, seed), time.monotonic()

    def store(run: Run) -> Measurement:
        seconds = max(time.monotonic() - began, run.seconds)  # the latter, if it was resumed
        measurement = {"config": config, "tiny": plan.tiny, **_brief(run), "seconds": seconds}
        measurement["provenance"] = provenance(plan.device, seconds, [setting.name])
        write(plan.folder, STORAGE.name(setting.name, seed), measurement)
        return measurement

    with workplace(plan.folder, values) as folder:

        def watch(progress: Any) -> None:
            if any(isinstance(event, Score) for event in progress.events):
                since = f"{time.monotonic() - began:.0f} s"
                say(f"{setting.name}, seed {seed}: round {progress.round + 1}, {since}")
                store(Run(folder))

        resolved = resolve(values, setting.name)
        execute(resolved, folder, local_engine, resume=True, watch=watch, loaded=loaded)
        return store(Run(folder))


def _execute(
    settings: Sequence[Setting], plan: Plan, say: Say
) -> Iterator[tuple[Setting, Measurement]]:
    for setting in settings:
        if on_cluster():
            yield setting, {"runs": _measure_on_cluster(setting, plan)}
            continue
        loaded: dict[str, Dataset] = {}
        runs = [measure_seed(setting, seed, plan, say, loaded) for seed in plan.seeds]
        yield setting, {"runs": runs}


def _measure_on_cluster(setting: Setting, plan: Plan) -> list[Measurement]:
    """All seeds that are not stored as one sweep on a cluster.

    Those that have ended are stored once the sweep is over, also where another one has failed.
    """
    config = PAPER.config(setting, plan)
    stored = {seed: STORAGE.run(setting.name, seed, plan, config) for seed in plan.seeds}
    missing = [s for s, one in stored.items() if one is None or one["rounds"] != plan.rounds]

    def store(run: Run) -> None:
        body = {"config": config, "tiny": plan.tiny, **_brief(run), "seconds": run.seconds}
        body["provenance"] = provenance(plan.device, run.seconds, [setting.name])
        write(plan.folder, STORAGE.name(setting.name, body["seed"]), body)
        stored[body["seed"]] = body

    if missing:
        values = plan.values(setting, 0)
        swept_together([values], {"seed": missing}, plan.folder, store=store)
    return [one for one in stored.values() if one is not None]


def _identity(setting: Setting, plan: Plan) -> list[Any]:
    """All but engine, precision and rounds: round 10 of 40 is round 10 of 10."""
    return [setting.values(), plan.tiny]


def _brief(run: Run) -> dict[str, Any]:
    """What the ledger needs of a run: accuracy of every client on every domain, and its course.

    It is stored at every test, so an interrupted run leaves its results so far.
    """
    notes = [event.notes for event in run.events if isinstance(event, Round)]
    rounds = sorted({score.round for score in run.scores})
    return {
        "seed": run.config["seed"],
        "rounds": rounds[-1] + 1,
        "headline": run.headline,
        "matrix": {
            str(r + 1): {v: _matrix(run.scores, v, r) for v in run.variants} for r in rounds
        },
        "notes": notes,
        "bytes_up": metrics.bytes_up(run.events),
        "facts": facts_of(run, "public"),
        "engine": {k: v for k, v in run.config["engine"].items() if k != "keep"},
        "model": run.config["model"],
        "round_seconds": run.seconds,
    }


def _matrix(scores: Sequence[Score], variant: str, number: int) -> list[list[float]]:
    """Accuracy by client and domain after a round."""
    chosen = [s for s in scores if s.variant == variant and s.round == number]
    clients = sorted({s.client for s in chosen})
    cells = np.zeros((len(clients), len({s.task for s in chosen})))
    for score in chosen:
        cells[clients.index(score.client), score.task] = score.accuracy
    listed: list[list[float]] = cells.tolist()
    return listed


def _ledger(measured: Measured, missing: Missing) -> Ledger:
    """The cells of every table for which there is something to say."""
    cells: list[Cell] = []
    for (task, homogeneous, kind), rows in PRINTED.items():
        number = 3 if homogeneous else {"inter": 1, "intra": 2}[kind]
        title = f"Table {number}, {kind}-domain, {task}"
        for method, theirs in rows.items():
            cells += _row(title, Setting(task, method, homogeneous=homogeneous), kind, theirs,
                          measured, missing)  # fmt: skip
    cells += [*_public_cells(measured, missing), *_without(measured), *_studied(measured)]
    facts = {name: measurement["runs"][0]["facts"] for name, measurement in measured.items()}

    def find(
        task: str, method: str, public: str = CIFAR, homogeneous: bool = False
    ) -> Measurement | None:
        return measured.get(Setting(task, method, public, homogeneous).name)

    return Ledger("FCCL", facts, tuple(cells), tuple(claims(find)), RULES["fccl"])


def _row(
    title: str,
    setting: Setting,
    kind: str,
    theirs: Sequence[float],
    measured: Measured,
    missing: Missing,
) -> list[Cell]:
    """A method's row: a cell for each domain and their mean."""
    solo = setting.method == "SOLO"
    source = _with_solo(setting, measured) if solo else setting
    one, variant = measured.get(source.name), "solo" if solo else ""
    numbers = [*theirs, float(np.mean(theirs))]
    at = _table_round(setting, measured)
    if one is not None and at not in tested(one):  # it was cut before
        at = after(one)
    cells = []
    for place, column in enumerate((*DOMAINS[setting.task], "AVG")):
        where = (title, setting.method, column)
        ours: Sequence[float] = ()
        if one is not None:
            domain = None if column == "AVG" else place
            ours = list(series(one, kind, at, variant, 0, domain).values())
        cell = _cell(where, numbers[place] / 100, (at, ours), source, measured, missing)
        derived = column == "AVG" and not title.startswith("Table 1")
        cells.append(replace(cell, note=f"{DERIVED}; {cell.note}") if derived else cell)
    return cells


def _cell(
    where: tuple[str, str, str],  # table, row, column
    printed: float | None,
    results: tuple[str, Sequence[float]],  # round, and a value for each seed
    source: Setting,
    measured: Measured,
    missing: Missing,
) -> Cell:
    if source.name not in measured:
        note = missing.get(source.name, f"not run: --only '{source.name}'")
        return Cell(*where, printed, None, note=note, setting=source.name)
    run, (at, ours) = measured[source.name]["runs"][0], results
    note = f"{len(ours)} seed{'s' * (len(ours) > 1)}"
    if where[1] != "SOLO":  # which is trained before the first round
        note += f", {at} rounds"
    if run["model"]["precision"] != "float32":
        note += f"; {run['model']['precision']}"
    obstacle = "a miniature: other data and networks" if run["tiny"] else OBSTACLES[source.task]
    return Cell(
        *(*where, printed, None, tuple(ours)),
        command=f"atoll reproduce fccl --only '{source.name}'",
        config=measured[source.name]["config"],
        data=run["facts"]["data"]["fingerprint"][:12],
        note=note,
        obstacle=obstacle,
        setting=source.name,
    )


def _with_solo(setting: Setting, measured: Measured) -> Setting:
    """A setting that has been run and reports SOLO too: the same model in all of a table."""
    several = [replace(setting, method=method) for method in ("FCCL", "FedAvg", *COMPARED[:-1])]
    complete = [one for one in several if one.name in measured]
    return max(
        complete or several[:1], key=lambda one: len(measured.get(one.name, {"runs": ()})["runs"])
    )


def _table_round(setting: Setting, measured: Measured) -> str:
    """The round that a table is read at: the last one of the rows that went furthest."""
    rows = PRINTED[setting.task, setting.homogeneous, "inter"]
    names = [replace(setting, method=method).name for method in rows]
    return max((after(measured[name]) for name in names if name in measured), key=int, default="0")


def _public_cells(measured: Measured, missing: Missing) -> Iterator[Cell]:
    """Figures 7 and 8: FCCL, with and without its continual part, by public set."""
    names = [Setting("digits", m, public).name for public, rows in BY_PUBLIC.items() for m in rows]
    several = [measured[name] for name in names if name in measured]
    at = after(*several) if several else "0"
    for public, rows in BY_PUBLIC.items():
        for method, pair in rows.items():
            setting = Setting("digits", method, public)
            one = measured.get(setting.name)
            for kind, printed in zip(("inter", "intra"), pair, strict=True):
                title = f"Figures 7 and 8, {kind}-domain, digits, means over domains"
                ours = means(one, kind, "", at) if one else ()
                where = (title, method, public)
                yield _cell(where, printed / 100, (at, ours), setting, measured, missing)
    for public, numbers in BY_DOMAIN.items():
        setting = Setting("digits", "FCCL", public)
        one = measured.get(setting.name)
        for place, printed in enumerate(numbers):
            values = list(series(one, "inter", at, "", 0, place).values()) if one else []
            where = ("Figure 7, inter-domain, digits, by domain", public, DOMAINS["digits"][place])
            yield _cell(where, printed / 100, (at, values), setting, measured, missing)


def _without(measured: Measured) -> Iterator[Cell]:
    """Tables 1 and 2 without MNIST-M: M, U and SV tested on each other; nothing printed beside."""
    for kind in ("inter", "intra"):
        for method in ("SOLO", *COMPARED):
            setting = Setting("digits", method)
            source = _with_solo(setting, measured) if method == "SOLO" else setting
            one = measured.get(source.name)
            if one is None:
                continue
            at, variant = after(one), "solo" if method == "SOLO" else ""
            for place, column in enumerate((*DOMAINS["digits"][:3], "AVG")):
                domain = None if column == "AVG" else place
                values = list(series(one, kind, at, variant, 3, domain).values())
                where = (f"{kind}-domain, digits, without MNIST-M", method, column)
                yield _cell(where, None, (at, values), source, measured, {})


def _studied(measured: Measured) -> Iterator[Cell]:
    """Our studies on the digits, means over domains."""
    for setting in (study for study in STUDIES if study.name in measured):
        one = measured[setting.name]
        at = after(one)
        for kind in ("inter", "intra"):
            where = (f"Studies, {kind}-domain, digits, means over domains", setting.method, "AVG")
            yield _cell(where, None, (at, means(one, kind, "", at)), setting, measured, {})


def _figures(measured: Measured) -> dict[str, bytes]:
    """Figures 6, 7 and 8 and the domain x domain matrices, for what is there."""
    figures: dict[str, bytes] = {}
    for task, names in DOMAINS.items():
        by_method = {m: measured.get(Setting(task, m).name) for m in COMPARED}
        complete = {m: measurement for m, measurement in by_method.items() if measurement}
        furthest = max((int(after(measurement)) for measurement in complete.values()), default=0)
        runs = {
            m: measurement["runs"]
            for m, measurement in complete.items()
            if after(measurement) == str(furthest)
        }
        if "FCCL" in runs:
            lines = {m: [_by_round(run) for run in measurement] for m, measurement in runs.items()}
            figures[f"figure6-{task}.svg"] = over_rounds(lines)
            cells = {"SOLO": [last(run, "solo") for run in runs["FCCL"]]}
            cells |= {m: [last(run, "") for run in measurement] for m, measurement in runs.items()}
            figures[f"matrix-{task}.svg"] = matrices(cells, names)
    by_public = {
        (public, method): measured[Setting("digits", method, public).name]
        for public in BY_PUBLIC
        for method in ("FCCL", "FCCL w/o CON")
        if Setting("digits", method, public).name in measured
    }
    if by_public:
        at = after(*by_public.values())
        groups = {
            k: {p: means(f, k, "", at) for p, f in by_public.items()} for k in ("inter", "intra")
        }
        figures["figure7-8.svg"] = bars(groups)
    return figures


def _by_round(run: dict[str, Any]) -> dict[int, dict[str, float]]:
    return {int(r): means_of(by_model[run["headline"]]) for r, by_model in run["matrix"].items()}


STORAGE = FilePerSeed()
PLAIN = [s for s in SETTINGS if s.method in COMPARED and s.public == CIFAR and not s.homogeneous]
PAPER = Paper(
    name="fccl",
    settings=SETTINGS,
    studies=STUDIES,
    plan=Plan,
    quick=Plan.quick,
    tables={
        "1": PLAIN,
        "2": PLAIN,
        "3": [s for s in SETTINGS if s.homogeneous],
        "figure7": [s for s in SETTINGS if s.task == "digits" and s.method == "FCCL"],
        "figure8": [s for s in SETTINGS if s.task == "digits" and s.method.startswith("FCCL")],
    },
    identity=_identity,
    execute=_execute,
    ledger=_ledger,
    figures=_figures,
    storage=STORAGE,
)
