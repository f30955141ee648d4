"""Converts records to tables: scores in percent, differences in percentage points."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from atoll.core.record import Score
from atoll.metrics import scores as metrics
from atoll.metrics.answer import ERRORS
from atoll.report.units import DASH, SHARE, size, unit_of
from atoll.runs.result import Run, absent_run, runs_in

__all__ = [
    "ALONE",
    "Cell",
    "Group",
    "Pair",
    "Table",
    "comparable",
    "differences",
    "forgets",
    "forgetting",
    "gather",
    "holdings",
    "names_of",
    "number",
    "over_sites",
    "results",
    "sites",
    "traffic",
]

ALONE = "alone"  # the method without exchange between sites
LOCAL = ("local", "solo")  # variants that each site trains alone
UNPAIRED = "unpaired: kernels were chosen by timing; set engine.deterministic = true"
MOST_OPTIONS = 3  # maximum number of options in a label
MOST_LETTERS = 30  # maximum characters of a value in a label
FORGETTING = ("forgetting_best_last", "forgetting_first_last", "forgetting_diagonal_last")


@dataclass(frozen=True)
class Cell:
    """The content of a table cell, and its sort key."""

    text: str
    value: float | None = None  # None: sorted by text

    @property
    def key(self) -> str:
        """The sort key of the page; empty for NaN."""
        if self.value is None:
            return self.text
        return f"{self.value:.9g}" if math.isfinite(self.value) else ""


@dataclass(frozen=True)
class Table:
    """A table with a sentence that explains it."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[Run, ...]
    withheld: Mapping[str, str] = field(default_factory=dict)  # site without results -> reason
    left_out: str = ""  # the number of sites excluded from means, in words

    @property
    def over_sites(self) -> str:
        """The units averaged in a mean over sites."""
        return "sites that are not withheld" if self.withheld else "sites"

    @property
    def withheld_note(self) -> str:
        """Why sites have a dash instead of results; empty if all have results."""
        if not self.withheld:
            return ""
        sites = [f"{site} ({reason})" for site, reason in self.withheld.items()]
        return f" Withheld, shown as a dash and in no mean: {names_of(sites)}."

    @property
    def first(self) -> Run:
        """A representative run for common properties."""
        return self.runs[0]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.first.config["method"]["name"])

    @cached_property
    def accuracy(self) -> dict[tuple[int, str], dict[str, float]]:
        """By seed and variant each client's accuracy after the last stage."""
        accuracies = {}
        for run in self.runs:
            for variant in run.variants:
                result = metrics.primary(run.events, variant, run.facts["known_at"])
                accuracies[int(run.config["seed"]), variant] = metrics.client_accuracy(result)
        return accuracies

    def title(self, variant: str) -> str:
        """The title of a model."""
        return f"{self.label}: {variant}" if variant else self.label


@dataclass(frozen=True)
class Pair:
    """A model and its reference, by seed and client."""

    name: str
    against: str
    differences: dict[int, dict[str, float]]  # seed -> client -> accuracy minus the other's
    unpaired: bool = False  # equal training before any exchange may have given other bits in each

    @property
    def seeds(self) -> list[float]:
        """The mean over clients for each seed."""
        means = [_mean(clients.values()) for _, clients in sorted(self.differences.items())]
        return [value for value in means if math.isfinite(value)]

    @property
    def clients(self) -> dict[str, float]:
        """The mean over seeds for each client."""
        names = sorted({name for clients in self.differences.values() for name in clients})
        return {
            name: _mean(c[name] for c in self.differences.values() if name in c) for name in names
        }


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def gather(folders: Sequence[Path]) -> list[Group]:
    """The runs in these folders, or in their subfolders for several seeds, grouped by config."""
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        homes = runs_in(folder)
        if not homes:
            raise absent_run(folder)
        for run in map(Run, homes):
            config = {k: v for k, v in run.config.items() if k not in ("seed", "engine")}
            groups.setdefault(json.dumps(config, sort_keys=True), []).append(run)
    ordered = [sorted(runs, key=lambda run: int(run.config["seed"])) for runs in groups.values()]
    return [
        Group(label, tuple(runs)) for label, runs in zip(_labels(ordered), ordered, strict=True)
    ]


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The method if it is unique, else the config's name, options that differ, or the folder."""
    keys = _differing([runs[0].config for runs in groups])
    ways: tuple[Callable[[Run], str], ...] = (
        lambda run: str(run.config["method"]["name"]),
        lambda run: f"{run.config['method']['name']} on {run.facts['data']['name']}",
        lambda run: str(run.config["name"]),
        lambda run: f"{run.config['method']['name']} {_options(run.config, keys)}",
        lambda run: str(run.folder),
    )
    for way in ways:
        names = [way(runs[0]) for runs in groups]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options in which some configs differ; empty if too many for a label."""
    flat = [_flat(config) for config in configs]
    keys = [key for key in flat[0] if len({one.get(key, "") for one in flat}) > 1]
    longest = max((len(one.get(key, "")) for one in flat for key in keys), default=0)
    return keys if len(keys) <= MOST_OPTIONS and longest <= MOST_LETTERS else []


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """The options of a method, its network, its data and its split, with their values as JSON."""
    values = {"rounds": json.dumps(config.get("rounds"))}
    for table in ("method", "model", "data", "scenario"):
        for name, value in config.get(table, {}).items():
            values[f"{table}.{name}"] = json.dumps(value)
    return values


def _options(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Some options as in a call: `rate=0.1, mu=[0.01]`."""
    flat = _flat(config)
    return ", ".join(f"{key.rpartition('.')[2]}={flat.get(key, DASH)}" for key in keys)


def number(values: Sequence[float], signed: bool = False) -> Cell:
    """The mean of some shares in percent, with their spread if there are several."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Cell(DASH, math.nan)
    mean, deviation = metrics.spread(finite)
    text = SHARE.signed(mean) if signed else SHARE.bare(mean)
    return Cell(f"{text} ± {SHARE.bare(deviation)}" if len(finite) > 1 else text, mean)


def results(
    groups: Sequence[Group], primary: Mapping[str, Mapping[str, float]] | None = None
) -> Table:
    """One row per model: mean and spread over seeds.

    `primary` has by metric, for each model by its title, the score that the run is judged by.
    """
    primary = primary or {}
    columns = {
        "accuracy, %": "final_accuracy", "macro-F1, %": "macro_f1", "worst site, %": "worst_client",
    }  # fmt: skip
    if groups[0].first.regression:
        columns = {"R2, %": "r2", "MSE": "mse", "MAE": "mae", "worst site, R2 in %": "worst_client"}
    if any(map(forgets, groups)):
        columns |= {
            "average over stages, %": "average_accuracy",
            "forgetting, points": FORGETTING[0],
        }
    rows = []
    for group in groups:
        for variant in group.first.variants:
            summaries = [run.metrics[variant] for run in group.runs if variant in run.metrics]
            numbers = [_metric(group, summaries, name) for name in columns.values()]
            chosen = [one.get(group.title(variant), math.nan) for one in primary.values()]
            first = [Cell(unit_of(m).bare(v), v) for m, v in zip(primary, chosen, strict=True)]
            headline = " (headline)" if variant and variant == group.first.headline else ""
            name = Cell(f"{group.title(variant)}{headline}")
            rows.append((name, *first, *numbers, Cell(str(len(summaries)), len(summaries))))
    caption = (
        f"Scores of every model on the test rows, the mean over {over_sites(groups)}. With several "
        "seeds: the mean over seeds ± the population standard deviation."
    )
    for sentence in dict.fromkeys(group.left_out for group in groups if group.left_out):
        caption += f" {sentence}"
    if primary:
        caption += " The first columns have the metric that a run is judged by."
    heads = [f"{metric}{',' * bool(unit_of(metric).value_name)}{unit_of(metric).value_name}"
             for metric in primary]  # fmt: skip
    return Table(caption, ("model", *heads, *columns, "seeds"), tuple(rows))


def over_sites(groups: Sequence[Group]) -> str:
    """The units of a mean over sites, in a table of several groups."""
    return max((group.over_sites for group in groups), key=len)


def forgets(group: Group) -> bool:
    """Whether a task was learned before the last tested stage; else forgetting is undefined."""
    last = max((score.stage for score in group.first.scores), default=0)
    return any(int(stage) < last for stage in group.first.facts["known_at"])


def _metric(group: Group, summaries: Sequence[Mapping[str, float]], name: str) -> Cell:
    """One metric over seeds; a dash if it is undefined."""
    if name in (*FORGETTING, "backward_transfer") and not forgets(group):
        return Cell(DASH, math.nan)
    if name in ERRORS:
        mean, deviation = metrics.spread(summary[name] for summary in summaries)
        spread = f" ± {deviation:.4g}" if len(summaries) > 1 else ""
        return Cell(f"{mean:.4g}{spread}", mean)
    return number([summary[name] for summary in summaries])


def _pair(one: tuple[Group, str], other: tuple[Group, str]) -> Pair:
    """Two models, paired by seed and client if both have a number."""
    (a, first), (b, second) = one, other
    differences = {}
    for seed, variant in a.accuracy:
        if variant == first and (seed, second) in b.accuracy:
            accuracies, others = a.accuracy[seed, first], b.accuracy[seed, second]
            differences[seed] = {c: accuracies[c] - others[c] for c in accuracies if c in others}
    return Pair(
        a.title(first), b.title(second), differences, a is not b and (_timed(a) or _timed(b))
    )


def _timed(group: Group) -> bool:
    """Whether some run of a group chose its kernels by timing on a GPU."""
    return any(
        str(run.facts.get("device", "")).startswith("cuda")
        and not run.config.get("engine", {}).get("deterministic", False)
        for run in group.runs
    )


def comparable(a: Group, b: Group) -> bool:
    """Whether two groups have the same data and split."""
    keys = ("scenario", "scale")
    same = all(a.first.config.get(key) == b.first.config.get(key) for key in keys)
    ours, theirs = a.first.facts["data"], b.first.facts["data"]
    return same and bool(ours["fingerprint"] == theirs["fingerprint"])


def _local(group: Group) -> str:
    """The model that each site of a group trains alone, if there is one."""
    return next((variant for variant in LOCAL if variant in group.first.variants), "")


def differences(groups: Sequence[Group]) -> Table | None:
    """Paired differences in accuracy: all models of a run against one, then run by run."""
    pairs: list[Pair] = []
    for group in groups:
        base = _local(group) or group.first.headline
        tested = _tested(group, base)
        models = [v for v in group.first.variants if v != base and _tested(group, v) == tested]
        pairs += [_pair((group, variant), (group, base)) for variant in models]
    for a, b in combinations(groups, 2):
        if comparable(a, b) and a.first.variants and b.first.variants:
            pairs.append(_pair((a, a.first.headline), (b, b.first.headline)))
    rows = tuple(_difference(pair) for pair in pairs if pair.differences)
    if not rows:
        return None
    score = groups[0].first.score_name
    caption = (
        f"{score[:1].upper()}{score[1:]} of the first minus {score} of the second, on the same "
        "sites, rows and seeds. "
        f"± is the population standard deviation over seeds of the mean over {over_sites(groups)}. "
        "The last column counts pairs (site and seed) in which the first is better, equal, worse; "
        "sites that share a model or test rows are no independent pairs. This table describes; it "
        "tests nothing."
    )
    if any(pair.unpaired for pair in pairs):
        caption += f" Marked rows are {UNPAIRED}."
    header = (
        "first", "second", "difference, points", "smallest at a site", "largest at a site",
        "better/equal/worse",
    )  # fmt: skip
    return Table(caption, header, rows)


def _tested(group: Group, variant: str) -> dict[tuple[str, int], int]:
    """The number of test rows of each site at the end, by task."""
    scores = [e for e in group.first.events if isinstance(e, Score) and e.variant == variant]
    last = max((score.stage for score in scores), default=0)
    return {(s.client, s.task): s.rows for s in scores if s.stage == last}


def _difference(pair: Pair) -> tuple[Cell, ...]:
    clients = pair.clients
    every = [
        d for by_client in pair.differences.values() for d in by_client.values() if math.isfinite(d)
    ]
    counts = [sum(d > 0 for d in every), sum(d == 0 for d in every), sum(d < 0 for d in every)]
    return (
        Cell(f"{pair.name} (unpaired)" if pair.unpaired else pair.name),
        Cell(pair.against),
        number(pair.seeds, signed=True),
        number([min(clients.values(), default=math.nan)], signed=True),
        number([max(clients.values(), default=math.nan)], signed=True),
        Cell("/".join(map(str, counts)), counts[0]),
    )


def sites(group: Group) -> Table:
    """Accuracy by site and model, the mean over seeds."""
    variants = group.first.variants
    clients = sorted({*group.withheld, *(c for one in group.accuracy.values() for c in one)})
    rows = []
    for client in clients:
        cells = [Cell(client)]
        for variant in variants:
            every = [a for (_, v), a in group.accuracy.items() if v == variant]
            cells.append(number([a.get(client, math.nan) for a in every]))
        rows.append(tuple(cells))
    header = ("site", *(f"{v or group.method}, %" for v in variants))
    score = group.first.score_name
    caption = (
        f"{score[:1].upper()}{score[1:]} on each site's test rows after the last stage, over the "
        f"tasks known then.{group.withheld_note}"
    )
    return Table(caption, header, tuple(rows))


def forgetting(groups: Sequence[Group]) -> Table | None:
    """Forgetting by each of its definitions, if there were several stages."""
    staged = [group for group in groups if forgets(group)]
    if not staged:
        return None
    rows = []
    for group in staged:
        for variant in group.first.variants:
            summaries = [run.metrics[variant] for run in group.runs if variant in run.metrics]
            keys = (*FORGETTING, "backward_transfer")
            numbers = [number([m[key] for m in summaries]) for key in keys]
            rows.append((Cell(group.title(variant)), *numbers))
    names = ("best to last", "first to last", "when learned to last", "backward transfer")
    header = ("model", *(f"{name}, points" for name in names))
    words = [f"{name.capitalize()}: {metrics.DEFINITIONS[key]}" for name, key in zip(
        names, (*FORGETTING, "backward_transfer"), strict=True)]  # fmt: skip
    caption = ". ".join(words) + "."
    if any(group.withheld for group in staged):
        caption += " Clients are the sites that are not withheld."
    return Table(caption, header, tuple(rows))


def holdings(group: Group) -> Table | None:
    """Rows, classes and columns of each site."""
    facts = group.first.facts.get("holdings")
    if not facts:
        return None
    rows: list[tuple[Cell, ...]] = []
    own: list[Cell] = []
    for id, site in sorted(facts["sites"].items()):
        counts = [sum(site["train"]), sum(site["valid"]), sum(site["test"])]
        counts += [] if group.first.regression else [max(site["classes"])]
        columns = [int(facts["common"]), int(site["own"])]
        cells = [Cell(f"{count:,}", count) for count in counts + columns]
        rows.append((Cell(id), *cells))
        own.append(Cell(names_of(site["own_names"])))
    classes = () if group.first.regression else ("classes at most in a stage",)
    header: tuple[str, ...] = (
        "site", "training rows", "validation rows", "test rows", *classes,
        "common columns", "own columns",
    )  # fmt: skip
    if any(cell.text for cell in own):
        header += ("names of own columns",)
        rows = [(*row, cell) for row, cell in zip(rows, own, strict=True)]
    common = names_of(facts["common_names"])
    caption = "Columns as the networks read them; text columns count once for each level."
    if common:
        caption += f" Common: {common}."
    return Table(caption, header, tuple(rows))


def names_of(names: Sequence[str], most: int = 12) -> str:
    """Names in a list; only the first ones if there are many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def traffic(groups: Sequence[Group]) -> Table:
    """Messages, bytes and seconds, the mean over seeds."""
    rows = []
    for group in groups:
        summaries = [
            {
                "messages": sum(metrics.messages(run.events).values()),
                "up": sum(metrics.bytes_up(run.events).values()),
                "down": sum(metrics.bytes_down(run.events).values()),
                **_seconds(run),
            }
            for run in group.runs
        ]
        mean = {key: _mean(summary[key] for summary in summaries) for key in summaries[0]}
        rows.append(
            (
                Cell(group.label),
                Cell(f"{mean['messages']:,.0f}", mean["messages"]),
                Cell(size(mean["up"]), mean["up"]),
                Cell(size(mean["down"]), mean["down"]),
                Cell(f"{mean['rounds']:.0f}", mean["rounds"]),
                Cell(f"{mean['seconds']:.1f} s", mean["seconds"]),
            )
        )
    header = ("run", "messages", "from sites", "to sites", "rounds", "time in rounds")
    caption = (
        "All sites together, tests included; the mean over seeds. Bytes are those of the packed "
        "messages. Time is that of the machine the run was made on."
    )
    return Table(caption, header, tuple(rows))


def _seconds(run: Run) -> dict[str, float]:
    return {"rounds": len(run.times), "seconds": run.seconds}
