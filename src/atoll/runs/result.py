"""The results of a run, read from its record: scores, metrics, a table."""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from atoll import methods
from atoll.core.errors import UserError
from atoll.core.integrity import Extent, Integrity, damaged, digest, read_json, write_digests
from atoll.core.record import (
    Event,
    Exclusion,
    Score,
    Snapshot,
    read_events,
    read_integrity,
    read_snapshots,
    read_times,
    write_whole,
)
from atoll.core.storage import disk_errors
from atoll.metrics import scores as metrics
from atoll.metrics.answer import Metric, metric_of
from atoll.runs.convert import convert_config

__all__ = [
    "ANSWER",
    "Run",
    "absent_run",
    "event_digests",
    "left_out",
    "plain",
    "read_answer",
    "runs_in",
    "shown_metrics",
    "table",
    "text_table",
    "title",
    "variant_means",
    "withheld_sites",
    "write_result",
]

ANSWER = "answer.json"
MOST_REASONS = 3  # why a client was excluded, in one sentence
SERVER = "server"  # models that may have scores too if sites have columns of the same rows


@dataclass(frozen=True)
class Run:
    """A run, read from its record; raises an error if a file has changed since it was written.

    Its metrics cover all sites, including sites that an answer withholds.
    """

    folder: Path

    @cached_property
    def integrity(self) -> Integrity:
        """Lengths and digests of the record's files; checked before reading any of them."""
        return read_integrity(self.folder)

    @cached_property
    def events(self) -> list[Event]:
        """All events, in order."""
        events = read_events(self.folder, self.integrity)
        _check_events(events, self.facts, self.folder / "events.jsonl")
        return events

    @cached_property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots of clients and server at the end of each stage."""
        return read_snapshots(self.folder, self.integrity)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, with the current names of options."""
        return self._parsed("config.toml", self._read_config)

    def _read_config(self, text: str) -> dict[str, Any]:
        version = self.facts.get("format", 1)
        if type(version) is not int:
            raise damaged(self.folder / "facts.json")
        return convert_config(tomllib.loads(text), version, str(self.folder))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Versions, machine, data."""
        return self._parsed("facts.json", json.loads)

    @cached_property
    def memory(self) -> dict[str, Any]:
        """The memory plan of a large run and its measured peak; empty for small runs."""
        return self._parsed("memory.json", json.loads, optional=True)

    @cached_property
    def refuted(self) -> list[str]:
        """Descriptions of checks in which a fast path and the loop gave different results.

        The runs of a sweep share one engine, which stores its choices in the sweep's folder.
        """
        several = (self.folder.parent / "sweep.json").exists()
        owner = Run(self.folder.parent) if several else self
        choices = owner._parsed("engine.json", json.loads, optional=True)
        entries = [choice for choice in choices.values() if isinstance(choice, dict)]
        return [str(entry["refuted"]) for entry in entries if entry.get("refuted")]

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe that converts own files to model inputs; empty if a run has no own files."""
        return self._parsed("recipe.json", json.loads, optional=True)

    @cached_property
    def answer(self) -> dict[str, Any]:
        """Whether joining helps, from `answer.json`; empty if it was not computed."""
        return read_answer(self.folder, [self]) or {}

    def _parsed(
        self, name: str, parse: Callable[[str], Any], optional: bool = False
    ) -> dict[str, Any]:
        path = self.folder / name
        content = self.integrity.read(path, optional)
        if content is None:
            return {}
        try:
            body = parse(content.decode())
        except ValueError as error:
            raise damaged(path) from error
        if not isinstance(body, dict):
            raise damaged(path)
        return _Table(_checked(body, path), path)

    @property
    def exclusions(self) -> list[str]:
        """For each client with excluded answers, a sentence with the reason."""
        by_client: dict[str, list[Exclusion]] = {}
        for event in self.events:
            if isinstance(event, Exclusion):
                by_client.setdefault(event.client, []).append(event)
        return [_excluded(client, events) for client, events in sorted(by_client.items())]

    def read(self) -> None:
        """Read the record now; its content stays available after the folder is deleted."""
        for name in ("events", "snapshots", "config", "facts", "recipe", "refuted", "seconds"):
            getattr(self, name)

    @property
    def scores(self) -> list[Score]:
        """All test scores of all clients."""
        return [event for event in self.events if isinstance(event, Score)]

    @property
    def variants(self) -> list[str]:
        """The models that the method reports, in the method's order."""
        names = metrics.variants(self.events)
        order = self.config["method"].get("variants", [])
        return sorted(names, key=lambda v: (order.index(v) if v in order else -1, v))

    @property
    def headline(self) -> str:
        """The variant that represents the method."""
        variant = self.facts.get("headline")
        if variant is None:  # a record of an older release
            variant = methods.load(self.config["method"]["name"]).headline
        if variant in self.variants or not self.variants:
            return str(variant)
        return self.variants[-1]

    @property
    def regression(self) -> bool:
        """Whether the label is a number."""
        return bool(self.facts["data"].get("task") == "regression")

    @property
    def metric(self) -> Metric:
        """The metric that compares models: that of the config, else in regression mae."""
        chosen: Metric = self.config.get("report", {}).get("metric", "accuracy")
        return metric_of(chosen, self.regression)

    @property
    def score_name(self) -> str:
        """The name of the run's scores: accuracy, or R2 in regression."""
        return "R2" if self.regression else "accuracy"

    @property
    def accuracy(self) -> float:
        """Final test accuracy of the headline variant, or R2: mean over clients and tasks."""
        return self.metrics[self.headline]["final_accuracy"]

    @cached_property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Every metric of every variant."""
        return self.summaries(self.events)

    def summaries(self, events: Sequence[Event]) -> dict[str, dict[str, float]]:
        """Every metric of every variant with scores in some events of the run."""
        known_at = self.facts["known_at"]
        chance = 0.0 if self.regression else 1 / self.facts["data"]["classes"]
        tested = metrics.variants(events)
        return {
            v: metrics.summary(events, v, known_at, chance) for v in self.variants if v in tested
        }

    @cached_property
    def seconds(self) -> float:
        """The duration of all rounds including tests; a resumed run counts each round once."""
        return sum(self.times)

    @cached_property
    def times(self) -> list[float]:
        """The seconds of each round."""
        return read_times(self.folder, self.integrity)

    def table(self) -> str:
        """The metrics as a text table."""
        return text_table([self])


def table(
    runs: Sequence[Run], answer: Mapping[str, Any] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table over seeds: one row per variant, with mean and deviation.

    If an answer uses another metric than accuracy, its scores come first: means over sites.
    No mean includes sites that the answer withholds.
    """
    if not runs:
        raise UserError("no run to show", "table", "give at least one run")
    stages = int(runs[0].facts["stages"])
    columns = {"accuracy": "final_accuracy", "macro-F1": "macro_f1", "worst client": "worst_client"}
    if runs[0].regression:
        columns = {"R2": "r2", "MSE": "mse", "MAE": "mae", "worst client (R2)": "worst_client"}
    if stages > 1:
        columns["forgetting"] = "forgetting_best_last"
    if runs[0].config.get("scenario", {}).get("split") == "domains":
        columns |= {"own domain": "intra_accuracy", "other domains": "inter_accuracy"}
    summaries = [shown_metrics(run, withheld_sites(answer)) for run in runs]
    rows, primary = [], variant_means(answer)
    for variant in runs[0].variants:
        cells = [variant or runs[0].config["method"]["name"]]
        if primary:
            cells.append(_cell([primary.get(variant, math.nan)]))
        for name in columns.values():
            cells.append(_cell([one[variant][name] for one in summaries if variant in one]))
        rows.append(cells)
    first = [str(answer["metric"])] if answer and primary else []
    return [f"{len(runs)} seed{'s' * (len(runs) > 1)}", *first, *columns], rows


def withheld_sites(answer: Mapping[str, Any] | None) -> Mapping[str, str]:
    """The sites that an answer withholds, with the reason; empty without an answer."""
    withheld: Mapping[str, str] = (answer or {}).get("withheld", {})
    return withheld


def shown_metrics(run: Run, withheld: Collection[str]) -> dict[str, dict[str, float]]:
    """Every metric of every variant, without the test results of withheld sites."""
    if not withheld:
        return run.metrics
    events = [e for e in run.events if not (isinstance(e, Score) and e.client in withheld)]
    return run.summaries(events)


def left_out(runs: Sequence[Run], withheld: Collection[str]) -> str:
    """A sentence with the number of tested sites that no mean includes; empty if all are included.

    If sites have columns of the same rows, the server is tested for all of them and is included.
    """
    tested = {score.client for run in runs for score in run.scores}
    count = len(tested & set(withheld))
    if not count:
        return ""
    return f"Means leave out {count} of {len(tested)} sites, whose results are withheld."


def variant_means(answer: Mapping[str, Any] | None) -> dict[str, float]:
    """The mean over sites of each variant's score; empty if the metric is accuracy."""
    by_site = list((answer or {}).get("variants", {}).values())
    means = {}
    for name in by_site[0] if by_site else ():
        values = [one[name] for one in by_site if one.get(name) is not None]
        means[name] = sum(values) / len(values) if values else math.nan
    return means


def text_table(runs: Sequence[Run], answer: Mapping[str, Any] | None = None) -> str:
    """The metrics over seeds as lines of text under a title; with an answer as in `table`."""
    header, rows = table(runs, answer)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [title(runs[0])]
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    sentence = left_out(runs, withheld_sites(answer))
    return "\n".join([*lines, sentence] if sentence else lines)


def title(run: Run) -> str:
    """The method of a run and its data."""
    return f"{run.config['method']['name']} on {run.facts['data']['title']}"


def _cell(values: Sequence[float]) -> str:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "not known"  # e.g. forgetting of a model tested on one task only
    mean, deviation = metrics.spread(values)
    return f"{mean:.4f} ± {deviation:.4f}" if len(values) > 1 else f"{mean:.4f}"


def write_result(folder: Path, extents: Mapping[str, Extent] | None = None) -> Run:
    """Write result.json, the primary result with its metrics, after digests.json.

    `extents` are lengths and digests of what this process wrote; otherwise computed from the files.
    """
    run = Run(folder)
    definitions = dict(metrics.DEFINITIONS) | (dict(metrics.REGRESSION) if run.regression else {})
    body: dict[str, Any] = {"definitions": definitions, "variants": {}}
    for variant in run.variants:
        primary = metrics.primary(run.events, variant)
        body["variants"][variant] = {
            "clients": list(primary.clients),
            "tasks": [run.facts["tasks"][task] for task in primary.tasks],
            "stages": list(primary.stages),
            "accuracy": _listed(primary.accuracy),  # client x task x stage
            "metrics": plain(run.metrics[variant]),
        }
    content = json.dumps(body, indent=1).encode() + b"\n"
    write_digests(folder, {**(extents or {}), "result.json": Extent.of(content)})
    write_whole(folder / "result.json", content)
    return run


def read_answer(folder: Path, runs: Sequence[Run]) -> dict[str, Any] | None:
    """The answer in a folder; None if there is none, or if it belongs to other or earlier runs."""
    path = folder / ANSWER
    if not path.exists():
        return None
    own, body = read_json(path, lambda body: (body.pop("digest"), dict(body)))
    if own != digest(json.dumps(body, sort_keys=True).encode()):
        raise damaged(path, "remove it and compute it again with atoll answer")
    return body if body.get("runs") == event_digests(runs) else None


def event_digests(runs: Sequence[Run]) -> dict[str, str]:
    """The digest of each run's events by folder name; an answer identifies its runs with them."""
    digests = {}
    for run in runs:
        extent = run.integrity.files.get("events.jsonl")
        digests[run.folder.name] = extent.digest if extent else ""
    return digests


class _Table(dict[str, Any]):
    """A table of a record's file; a missing key raises a user error, as the file is damaged."""

    def __init__(self, values: Any = (), path: Path = Path()) -> None:
        super().__init__(values)
        self.path = path

    def __missing__(self, key: str) -> NoReturn:
        raise damaged(self.path)


def _checked(value: Any, path: Path) -> Any:
    """The values of a file; missing keys in its tables raise user errors."""
    if isinstance(value, dict):
        return _Table({key: _checked(item, path) for key, item in value.items()}, path)
    return [_checked(item, path) for item in value] if isinstance(value, list) else value


def _check_events(events: Sequence[Event], facts: Mapping[str, Any], path: Path) -> None:
    """Refuse events of stages, tasks or clients that are not part of the run."""
    try:
        stages, tasks = int(facts["stages"]), len(facts["tasks"])
        clients = {SERVER, *facts["clients"]}
    except (ValueError, TypeError) as error:
        raise damaged(path.with_name("facts.json")) from error
    for event in events:
        inside = event.stage < stages
        if isinstance(event, Score):
            inside = inside and event.task < tasks and event.client in clients
        if not inside:
            raise damaged(path)


def plain(value: Any) -> Any:
    """The value as plain JSON; NaN becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return _number(value) if isinstance(value, float) else value


def _listed(array: Any) -> Any:
    return [_listed(part) for part in array] if getattr(array, "ndim", 0) else _number(float(array))


def _number(value: float) -> float | None:
    """A number as JSON, which has no NaN: an untested cell becomes null."""
    return float(value) if math.isfinite(value) else None


def _excluded(client: str, events: Sequence[Exclusion]) -> str:
    """Who was excluded, how often, and why: the most frequent reasons with their counts."""
    rounds = len({(event.stage, event.round) for event in events})
    actions = ", ".join(dict.fromkeys(event.action for event in events))
    count = f"{rounds} round{'s' if rounds > 1 else ''}"
    reasons = Counter(event.reason for event in events)
    common = reasons.most_common(MOST_REASONS)
    words = [f"{reason} ({times} of {len(events)})" for reason, times in common]
    words = list(reasons) if len(reasons) == 1 else words
    more = len(reasons) - len(words)
    further = [f"{more} further reason{'s' if more > 1 else ''}"] if more else []
    return f"{client} was left out of {count} ({actions}): {'; '.join([*words, *further])}"


def runs_in(folder: Path) -> list[Path]:
    """The folders with a run: this one, else its subfolders."""
    with disk_errors(folder):
        if (folder / "config.toml").exists():
            return [folder]
        return sorted(path.parent for path in folder.glob("*/config.toml"))


def absent_run(folder: Path) -> UserError:
    """The error for a folder without a run; names the runs in its subfolders."""
    below = [path.name for path in runs_in(folder)]
    if below:
        what = f"this folder holds {len(below)} runs: {', '.join(below[:5])}"
        return UserError(what, str(folder), f"give one of them, for example {folder / below[0]}")
    return UserError("no run in this folder", str(folder), "give the folder of a run")
