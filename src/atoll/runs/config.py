"""The config of a run: a TOML file or a preset with changes, as frozen options."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from atoll import methods
from atoll.core.errors import UserError
from atoll.core.influence import RobustOptions
from atoll.core.integrity import format_of
from atoll.core.options import (
    AtLeastOne,
    NotNegative,
    NotNegativeInt,
    build,
    describe,
    nearest,
)
from atoll.core.storage import read_toml
from atoll.data import splits
from atoll.data.own.profiles import TableOptions
from atoll.data.public import PublicOptions
from atoll.data.scaling import Scale
from atoll.data.sources import kind_of
from atoll.learning.models import ModelOptions
from atoll.metrics.answer import Metric
from atoll.runs.convert import convert_config

__all__ = [
    "EngineOptions",
    "ReportOptions",
    "RunConfig",
    "assignment",
    "change",
    "place",
    "presets",
    "read",
    "resolve",
    "to_toml",
]


@dataclass(frozen=True)
class EngineOptions:
    """How the clients are run."""

    name: Literal["local"] = "local"  # local: all clients in this process
    mode: Literal["auto", "loop", "stacked", "captured"] = (
        "auto"  # loop: client by client; stacked: at once; captured: CUDA graphs; auto: fastest
    )
    streams: bool = False  # captured steps of several clients in parallel: needs more GPU memory
    packing: bool = True  # serialise every message; false: only copy and count it, faster in sweeps
    tf32: bool = False  # TensorFloat-32 on GPUs that have it: faster, less exact
    tune: bool = False  # cuDNN benchmark mode: faster, other last digits
    deterministic: bool = False  # choose kernels by fixed rules, not by timing: slower, equal bits
    verify: Literal["sampled", "off", "always"] = (
        "sampled"  # compare fast paths with the loop: in 1 % of the time, or always
    )
    keep: str = ""  # folder in which runs share training before the first round
    device: str = "auto"  # auto, cpu or cuda
    threads: Annotated[int, Field(ge=0, le=1024)] = 0  # CPU threads of torch; 0: torch's default


@dataclass(frozen=True)
class ReportOptions:
    """What decides whether joining helps; set before a run."""

    margin: Annotated[float, Field(gt=0, le=100)] = (
        2.0  # smallest gain that matters, in points; regression: percent of the label's deviation
    )
    pooled: bool = True  # also train on the rows of all sites together, if they are on one machine
    metric: Metric = "accuracy"  # metric of the comparison; regression: mae unless mse is given


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    name: str = "run"  # name in tables and folders
    seed: NotNegativeInt = 0  # seed of row splits, initial weights and batch order
    rounds: AtLeastOne = 10  # maximum number of rounds per stage
    data: dict[str, Any] = field(default_factory=dict)  # name of the data set, and its options
    class_weight: Literal["none", "balanced"] = (
        "none"  # balanced: weight training rows inversely to the size of their class at the site
    )
    scale: Scale = "global"  # tables: standardise over all sites, per site (local), or not (none)
    scenario: dict[str, Any] = field(default_factory=dict)  # name of the split, and its options
    model: dict[str, Any] = field(default_factory=dict)  # network of the clients
    models: tuple[str, ...] = ()  # one network per client, in order; empty: model for all
    public: dict[str, Any] = field(default_factory=dict)  # unlabelled images that all parties have
    method: dict[str, Any] = field(default_factory=dict)  # name of the method, and its options
    replace: str = ""  # module:function that replaces parts of the method: published faults
    engine: dict[str, Any] = field(default_factory=dict)  # how the clients are run
    robust: dict[str, Any] = field(default_factory=dict)  # treatment of implausible answers
    report: dict[str, Any] = field(default_factory=dict)  # what decides whether joining helps
    dtype: Literal["float32", "float64"] = "float32"  # precision of weights and inputs
    score_every: NotNegativeInt = 0  # rounds between tests; 0: at the end of a stage only
    checkpoints: bool = True  # save checkpoints and models; false: only numbers
    attribution: bool = False  # also test before and after local training, to attribute forgetting
    looks: bool = True  # keep snapshots of each site at the end of a stage, for figures
    checkpoint_seconds: NotNegative = 20.0  # minimum time between checkpoints; 0: after every round

    def options(self) -> Any:
        """The options of the method."""
        name = self.method["name"]
        chosen = {key: value for key, value in self.method.items() if key != "name"}
        for key in chosen.keys() & MOVED.get(name, {}).keys():
            value = chosen.pop(key)
            if value != MOVED[name][key][0]:  # a record includes defaults
                where, remedy = f"[method] {key}", MOVED[name][key][1]
                raise UserError(f"'{name}' has no option '{key}' any more", where, remedy)
        return build(methods.load(name).options, chosen, "[method]")

    @property
    def split(self) -> str:
        """The name of the split."""
        return str(self.scenario["split"])

    def scenario_options(self) -> Any:
        """The options of the split."""
        return splits.options_of(self.scenario, "[scenario]")

    def model_options(self) -> ModelOptions:
        """The options of the network."""
        return build(ModelOptions, self.model, "[model]")

    def public_options(self) -> PublicOptions:
        """The options of the public data."""
        return build(PublicOptions, self.public, "[public]")

    def engine_options(self) -> EngineOptions:
        """The options of the engine."""
        options = build(EngineOptions, self.engine, "[engine]")
        if options.deterministic and options.tune:
            what = "engine.tune chooses kernels by timing, which engine.deterministic rules out"
            raise UserError(what, "[engine]", "set one of the two to false")
        return options

    def robust_options(self) -> RobustOptions:
        """The options that protect against sites with wrong answers."""
        return build(RobustOptions, self.robust, "[robust]")

    def report_options(self) -> ReportOptions:
        """The options that decide whether joining helps."""
        return build(ReportOptions, self.report, "[report]")


# Replaced options by method: their old default, and what to write instead.
MOVED: dict[str, dict[str, tuple[Any, str]]] = {
    "fedseit": {
        "profile": (
            "default",
            "write replace = 'atoll.reproduce.faults.fedseit:released' above all tables",
        ),
        "faults": (
            [],
            "write for example replace = 'atoll.reproduce.faults.fedseit:head' above all tables",
        ),
    },
}
TABLES = ("data", "scenario", "model", "public", "method", "engine", "robust", "report")
NAMED = ("data", "public", "method")  # tables that a bare name can replace


def presets() -> dict[str, Path]:
    """The named runs in the package."""
    folder = Path(str(files("atoll") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read(what: str) -> dict[str, Any]:
    """The values of a TOML file, a preset, or a method's defaults."""
    if what.endswith(".toml"):
        return {"name": _file_name(Path(what).stem), **_parsed(Path(what))}
    if what in presets():
        return {"name": what, **_parsed(presets()[what])}
    if methods.exists(what):
        return {"name": _file_name(what).strip("-."), "method": {"name": what}}
    names = {*presets(), *methods.names()}
    raise UserError(
        f"'{what}' is not a preset, method or .toml file", "command line", nearest(what, names)
    )


def _file_name(words: str) -> str:
    """A name in which every character is valid in a file name."""
    return re.sub(r"[^\w.+=-]+", "-", words)


def _parsed(path: Path) -> dict[str, Any]:
    if path.parent.is_dir() and not path.exists():
        remedy = "check the name; atoll init writes a config for your own tables"
        raise UserError("no such file", str(path), remedy)
    values = read_toml(path)
    of_a_run = path.name == "config.toml" and path.with_name("facts.json").exists()
    return convert_config(values, format_of(path.parent), str(path)) if of_a_run else values


def place(key: str, values: Mapping[str, Any]) -> str:
    """The full key of a short key: `clients` is scenario.clients, `rate` is method.rate."""
    fields = {f.name for f in dataclasses.fields(RunConfig)}
    if "." in key or key in fields:
        return key
    method, names = _method_name(values), _options_by_table(values)
    homes = [table for table, known in names.items() if key in known]
    if len(homes) > 1 and key not in _used_split_options(values):
        homes = [home for home in homes if home != "scenario"]  # not an option of this run's split
    homes = homes or ["method"] * (key in MOVED.get(method, {}))  # this error contains the remedy
    if len(homes) == 1:
        return f"{homes[0]}.{key}"
    if homes:
        both = " or ".join(f"{home}.{key}" for home in homes)
        raise UserError(f"'{key}' could be {both}", "--set", "write it in full")
    raise UserError(f"unknown option '{key}'", "--set", _nearest_option(key, values, False))


def _options_by_table(values: Mapping[str, Any]) -> dict[str, set[str]]:
    """The option names of each table of a config."""
    tables: list[tuple[str, type]] = [
        ("method", methods.load(_method_name(values)).options),
        ("model", ModelOptions), ("engine", EngineOptions), ("robust", RobustOptions),
        ("report", ReportOptions),
    ]  # fmt: skip
    names = {"scenario": splits.option_names() | _split_options(values)}
    return names | {table: {f.name for f in dataclasses.fields(kind)} for table, kind in tables}


def _nearest_option(key: str, values: Mapping[str, Any], in_file: bool) -> str:
    """The remedy for an unknown option: the nearest name, in a file with its table."""
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    homes = {name: name for name in fields}
    own = {field.name: f"data.{field.name}" for field in dataclasses.fields(TableOptions)}
    for table, names in _options_by_table(values).items():
        homes |= {name: f"{table}.{name}" for name in names if name not in homes}
    answer = nearest(key, {*own, *homes, *homes.values()})
    name = answer.removeprefix("did you mean '").removesuffix("'?")
    if name in homes:
        return f"did you mean '{homes[name]}'?" if in_file else answer
    if name in own:
        return f"did you mean '{own[name]}'?"
    return nearest(key, fields) if in_file else nearest(key, {*homes, *homes.values()})


def _split_options(values: Mapping[str, Any]) -> set[str]:
    """The options of the split in the values, if it is a plug-in."""
    scenario = values.get("scenario", {})
    name = str(scenario.get("split", "")) if isinstance(scenario, Mapping) else ""
    foreign = name not in splits.names() and splits.exists(name)
    return splits.option_names(name) if foreign else set()


def _used_split_options(values: Mapping[str, Any]) -> set[str]:
    """The options of the split that these values select; of all splits if it is unknown."""
    scenario, data = values.get("scenario", {}), values.get("data", {})
    data_options = data if isinstance(data, Mapping) else {}
    usual = _default_split(data_options, methods.load(_method_name(values)).split)
    name = str(scenario.get("split", usual)) if isinstance(scenario, Mapping) else usual
    return splits.option_names(name) if splits.exists(name) else splits.option_names()


def _method_name(values: Mapping[str, Any]) -> str:
    method = values.get("method", "fedavg")
    return str(method.get("name", "fedavg")) if isinstance(method, Mapping) else str(method)


def assignment(text: str) -> tuple[str, Any]:
    """Parse key=value with a TOML value; a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"'{text}' is not key=value", "--set", "write for example --set rounds=20")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def change(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to the values; a dotted key changes an entry of a table."""
    changed = {
        k: {"name": v} if k in NAMED and isinstance(v, str) else v for k, v in values.items()
    }
    for key, value in changes.items():
        table, _, name = place(key, changed).partition(".")
        if (table, name) == ("scenario", "split"):
            changed[table] = _remaining_options(changed.get(table, {}), value, changes)
        if name:
            inside = changed.get(table, {})
            if table not in TABLES or not isinstance(inside, dict):
                raise UserError(f"'{table}' is not a table", f"--set {key}", nearest(table, TABLES))
            changed[table] = {**inside, name: value}
        elif table in NAMED and isinstance(value, str):
            changed[table] = {"name": value}
        else:
            changed[table] = value
    return changed


def _remaining_options(scenario: Any, split: Any, changes: Mapping[str, Any]) -> Any:
    """The scenario options that remain when the split changes.

    Drops options that the new split lacks; raises an error if one is among the changes.
    """
    if not isinstance(scenario, dict) or not splits.exists(str(split)):
        return scenario
    chosen = {key.rpartition(".")[2] for key in changes}
    other = splits.option_names() - splits.option_names(split) - chosen
    return {name: value for name, value in scenario.items() if name not in other}


def resolve(values: Mapping[str, Any], where: str) -> RunConfig:
    """Resolve the whole config: check every option and fill in all defaults."""
    for key in values:
        if key not in {field.name for field in dataclasses.fields(RunConfig)}:
            raise UserError(f"unknown option '{key}'", where, _nearest_option(key, values, True))
    config = build(RunConfig, change(dict(values), {}), where)
    if not re.fullmatch(r"[\w.+= -]*\w", config.name):  # it becomes a folder name
        remedy = "use letters, digits and - _ . + =, and end with a letter or digit"
        raise UserError(f"a run cannot be called '{config.name}'", where, remedy)
    if "name" not in config.method:
        raise UserError("no method", where, "add method = { name = 'fedavg' }")
    method = methods.load(str(config.method["name"]))
    scenario = {"split": _default_split(config.data, method.split), **config.scenario}
    parties = config.data.get("parties")
    if isinstance(parties, list) and scenario["split"] == "parties":
        clients = scenario.setdefault("clients", len(parties))
        if clients != len(parties):
            what = f"clients = {clients} for {len(parties)} tables in data.parties"
            raise UserError(what, "[scenario]", "leave clients out")
    own = _default_split(config.data, "") == "files" or "parties" in config.data
    full = dataclasses.replace(
        config,
        data=config.data or {"name": "synthetic-table"},
        scenario=scenario,
        scale="local" if own and "scale" not in values else config.scale,
    )
    return dataclasses.replace(
        full,
        scenario={"split": full.split, **_written(full.scenario_options())},
        model=_written(full.model_options()),
        public=_written(full.public_options()) if full.public else {},
        method={"name": config.method["name"], **_written(full.options())},
        engine=_written(full.engine_options()),
        robust=_written(full.robust_options()),
        report=_written(full.report_options()),
    )


def _default_split(data: Mapping[str, Any], usual: str) -> str:
    """The default split of a run: that of its own files, else the usual split of the method."""
    if "files" in data and "text" not in data:
        return "files"
    if "images" in data and usual in ("columns", "rows"):  # images come with sites
        return "domains"
    if "files" in data and usual in ("tasks", "columns"):
        return "streams"
    columns = usual != "columns" or kind_of(str(data.get("name", ""))) not in ("image", "text")
    return usual if columns else "rows"  # images and texts have no columns to split


def _written(options: Any) -> dict[str, Any]:
    """Options as plain values, without unset ones."""
    return {
        option.name: _plain(getattr(options, option.name))
        for option in describe(type(options))
        if getattr(options, option.name) is not None
    }


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def to_toml(config: RunConfig) -> str:
    """Write the config as a TOML file that reproduces the run."""
    plain, tables = [], []
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            lines = [f"{key} = {_value(item)}" for key, item in value.items()]
            tables.append("\n".join([f"\n[{name}]", *lines]))
        else:
            plain.append(f"{name} = {_value(value)}")
    return "\n".join([*plain, *tables]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
