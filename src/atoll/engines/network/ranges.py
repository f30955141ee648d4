"""Limits of options at a site: ranges and choices, by method.

A contract names options as a config does (`method.rate`, `model.widths`, `seed`). A limit is one
value, `{ one_of = [...] }`, or `{ least = ..., most = ... }`; of a list every item is compared.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from atoll import methods
from atoll.core.errors import UserError
from atoll.core.options import nearest
from atoll.data import splits
from atoll.data.public import PublicOptions
from atoll.learning.models import ModelOptions
from atoll.metrics.answer import Metric, metric_of
from atoll.runs.config import RunConfig, resolve

__all__ = [
    "COORDINATORS",
    "DEFAULTS",
    "METRIC",
    "SIZES",
    "check_limits",
    "drafted",
    "inside",
    "known",
    "metric_violation",
    "violation",
    "words",
]  # fmt: skip

Limit = Any  # a value, or a table with least, most or one_of
Limits = Mapping[str, Limit]

# The limits of options that a contract does not name.
DEFAULTS: Limits = {
    "dtype": {"one_of": ["float32"]},
    "scale": {"one_of": ["local", "global", "imagenet"]},
    "rounds": {"least": 1, "most": 200},
    "seed": {"least": 0, "most": 99},
    "scenario.train": {"least": 0.2, "most": 1.0},
    "model.widths": {"least": 1, "most": 1024},
    "method.optimiser": {"one_of": ["adam"]},
    "method.rate": {"least": 0.0, "most": 0.1},
    "method.rate_unique": {"least": 0.0, "most": 0.1},
    "method.rate_local": {"least": 0.0, "most": 0.1},
    "method.batch": {"least": 8, "most": 1024},
    "method.epochs": {"least": 1, "most": 50},
    "method.epochs_each": {"least": 1, "most": 50},
    "method.pretrain_epochs": {"least": 0, "most": 100},
    "engine.threads": {"least": 0, "most": 64},
    "report.metric": {"one_of": ["accuracy", "auroc", "balanced accuracy"]},
}
# The limits if a contract names no option of a method; other options keep their default.
SIZES: Limits = {
    "method.public_epochs": {"least": 1, "most": 50},
    "method.width": {"least": 1, "most": 4096},
    "method.floor": {"least": 10, "most": 1_000_000},
    "method.projection": {"least": 0, "most": 0},
    "method.bits": {"least": 1, "most": 20},
    "method.synthetic": {"least": 1, "most": 10_000},
    "method.latent": {"least": 1, "most": 1024},
    "method.least_cluster": {"least": 2, "most": 1_000_000},
    "public.rows": {"least": 1, "most": 50_000},
    "scenario.clients": {"least": 1, "most": 10_000},
    "data.rows": {"least": 1, "most": 100_000},  # of made-up data, which are made at the site
    "data.patients": {"least": 1, "most": 100_000},
    "data.columns": {"least": 1, "most": 1000},
    "data.classes": {"least": 1, "most": 1000},
    "data.domains": {"least": 1, "most": 20},
    "data.size": {"least": 1, "most": 64},
    "data.length": {"least": 1, "most": 1000},
    "data.vocabulary": {"least": 1, "most": 100_000},
}
METRIC = "report.metric"  # checked at a comparison, and before runs that select models by it
PLAIN = ("seed", "rounds", "scale", "dtype", "models", "score_every", "attribution", "class_weight")
TABLES = ("scenario", "model", "public", "method")
OWN_DATA = ("files", "keep", "most_levels")  # of `data`: only the site's own file may set these
# Of `data` with own files: what any run may set. They disclose no more; all others change how a
# site reads its file, and are for the site's own file or its contract to name.
ANY_RUN = ("name", "ignore", "levels", "order")
MOST_ITEMS = 100  # for a list limited by a range, or unlimited
ENGINE = ("device", "threads")  # of `engine`: what a site uses of a run's
# Options without effect at a site, or with a separate term: `replacements` and `answer`.
COORDINATORS = (
    *("name", "checkpoints", "checkpoint_seconds", "looks", "robust", "replace", "report"),
)
EDGES = ("least", "most")


def values_of(config: RunConfig) -> dict[str, Any]:
    """The options of a run that a contract may limit, by their full names."""
    values: dict[str, Any] = {name: getattr(config, name) for name in PLAIN}
    for table in TABLES:
        values |= {f"{table}.{name}": value for name, value in getattr(config, table).items()}
    values.pop("method.name", None)
    values.pop("model.weights", None)  # a hash that a site compares with that of its own network
    values |= {f"engine.{name}": config.engine[name] for name in ENGINE}
    values |= {f"data.{name}": v for name, v in config.data.items() if name not in OWN_DATA}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def usual(config: RunConfig) -> dict[str, Any]:
    """The same options with their defaults, for the same method, data and split.

    `scenario.split` is the split of a run that names none.
    """
    plain = {"method": {"name": config.method["name"]}, "data": config.data}
    usual = resolve(plain, "the method's defaults")
    chosen = resolve({**plain, "scenario": {"split": config.split}}, "the method's defaults")
    values = values_of(chosen) | {"scenario.split": usual.split}
    return {name: value for name, value in values.items() if not name.startswith("data.")}


def limits_of(options: Mapping[str, Limits], config: RunConfig) -> dict[str, Limit]:
    """All limits of a run: those of the contract, the default ones, else the option's default.

    A contract that names no option of a method leaves the others free, but for those that say how
    own files are read.
    """
    own = options.get(str(config.method["name"]), {})
    pinned = usual(config) if own else {}
    values = values_of(config)
    rest = {name: {"one_of": [pinned[name]]} for name in values if name in pinned}
    sizes = {} if own else {n: v for n, v in SIZES.items() if n in values}
    unnamed = [name for name in values if name not in pinned] if own else _reading(config)
    rest |= {name: {"one_of": []} for name in unnamed}
    return {**rest, **sizes, **{n: v for n, v in DEFAULTS.items() if n in values}, **own}


def _reading(config: RunConfig) -> list[str]:
    """The options of a run that define how a site reads its own file."""
    options = config.data if "files" in config.data else {}
    return [f"data.{name}" for name in options if name not in (*OWN_DATA, *ANY_RUN)]


def violation(
    options: Mapping[str, Limits], config: RunConfig, trusted: Collection[str] = ()
) -> str:
    """The option of a run that exceeds its limit; empty if none does.

    `trusted`: full names of options that the site itself has set.
    """
    limits, values = limits_of(options, config), values_of(config)
    for name in sorted(values.keys() - set(trusted)):
        value, limit = values[name], limits.get(name)
        if value is None:
            continue
        if limit is not None and not _within(value, limit):
            return f"option '{name}' = {_shown(value)}: the contract allows {words(limit)}"
        if isinstance(value, list) and len(value) > MOST_ITEMS and not _listed(name, limit):
            count = f"{len(value):,} items"
            return f"option '{name}' has {count}; {MOST_ITEMS} are allowed, or a list by name"
    if not methods.load(str(config.method["name"])).selects:
        return ""
    # the default stands for an error where the label is a number, which only the data tell
    as_number = metric_of(config.report_options().metric, regression=True)
    allowed = not metric_violation(options, config, as_number)
    return "" if allowed else metric_violation(options, config)


def metric_violation(
    options: Mapping[str, Limits], config: RunConfig, metric: Metric | None = None
) -> str:
    """Why models may not be compared by the metric of the run; empty if they may."""
    limits = {**DEFAULTS, **options.get(str(config.method["name"]), {})}
    metric, limit = metric or config.report_options().metric, limits[METRIC]
    if _within(metric, limit):
        return ""
    return f"option '{METRIC}' = {_shown(metric)}: the contract allows {words(limit)}"


def _listed(name: str, limit: Limit) -> bool:
    """Whether an option may be a long list: names of columns, and what a contract spells out."""
    spelled = not isinstance(limit, Mapping) or "one_of" in limit
    return name.startswith("data.") or (limit is not None and spelled)


def _within(value: Any, limit: Limit) -> bool:
    if not isinstance(limit, Mapping):
        return bool(value == limit)
    if "one_of" in limit:
        return value in limit["one_of"]
    items = value if isinstance(value, list) else [value]
    low, high = limit.get("least", -float("inf")), limit.get("most", float("inf"))
    return all(isinstance(item, int | float) and low <= item <= high for item in items)


def inside(limit: Limit, usual: Limit) -> bool:
    """Whether a limit is at most as wide as the default limit."""
    if not isinstance(limit, Mapping):
        return _within(limit, usual)
    if "one_of" in limit:
        return all(_within(value, usual) for value in limit["one_of"])
    least, most = limit.get("least", 0), limit.get("most", float("inf"))
    return "one_of" not in usual and bool(least >= usual["least"] and most <= usual["most"])


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def words(limit: Limit) -> str:
    """A limit in words."""
    if not isinstance(limit, Mapping):
        return f"{_shown(limit)} only"
    if "one_of" in limit:
        none = "no such option unless it, or the site's own file, names it"
        return f"{' or '.join(map(_shown, limit['one_of'])) or none}"
    return " and ".join(f"at {edge} {_shown(limit[edge])}" for edge in EDGES if edge in limit)


def check_limits(options: Mapping[str, Any], allowed: tuple[str, ...], plugins: bool) -> None:
    """Refuse limits of unknown methods and options, and malformed limits.

    With `plugins`, a split outside atoll may have options of its own.
    """
    free = ("data.", "scenario.") if plugins else ("data.",)
    for method, limits in options.items():
        where = f"[contract.options.{method}]"
        if method not in allowed:
            what = f"limits for '{method}', which the contract does not allow"
            raise UserError(what, where, nearest(method, allowed))
        if not isinstance(limits, Mapping):
            raise UserError("limits that are not a table", where, 'write "method.rate" = 0.01')
        names = known(method)
        for name, limit in limits.items():
            if name not in names and not str(name).startswith(free):
                raise UserError(f"unknown option '{name}'", where, nearest(name, names))
            _check_limit(limit, f"{where} {name}")


def known(method: str) -> set[str]:
    """The full names of all options of a run with this method."""
    kinds = {
        "model": ModelOptions, "public": PublicOptions, "method": methods.load(method).options,
    }  # fmt: skip
    names = {f"{t}.{f.name}" for t, kind in kinds.items() for f in dataclasses.fields(kind)}
    names |= {f"engine.{name}" for name in ENGINE}
    names |= {METRIC, *(name for name in SIZES if name.startswith("data."))}
    return names | set(PLAIN) | {f"scenario.{name}" for name in splits.option_names()}


def _check_limit(limit: Limit, where: str) -> None:
    if not isinstance(limit, Mapping):
        return
    edges = set(limit) <= set(EDGES) and all(type(v) in (int, float) for v in limit.values())
    choices = set(limit) == {"one_of"} and isinstance(limit["one_of"], list)
    if not limit or not (edges or choices):
        remedy = "write a value, { one_of = [...] }, or { least = ..., most = ... }"
        raise UserError("not a limit", where, remedy)


def drafted(config: RunConfig) -> dict[str, Limit]:
    """Limits that allow this run, with fewer rounds too, and no other options."""
    values, plain = values_of(config), usual(config)
    chosen = {n: v for n, v in values.items() if n in DEFAULTS or v != plain.get(n)}
    tables = {n: {"one_of": [v]} for n, v in chosen.items() if isinstance(v, Mapping)}
    regression = config.data.get("task") == "regression"
    chosen[METRIC] = metric_of(config.report_options().metric, regression)
    return {**chosen, **tables, "rounds": {"least": 1, "most": config.rounds}}
