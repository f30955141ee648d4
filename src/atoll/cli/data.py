"""Commands around data and configs: list, show, doctor, align, inspect, init."""

import json
import os
import platform
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from atoll import __version__, data, methods
from atoll.cli.terminal import counted, out, print_grid, print_pairs, size
from atoll.core.errors import UserError
from atoll.core.influence import RobustOptions
from atoll.core.options import describe, nearest
from atoll.core.record import disk_errors, write_whole
from atoll.data.own import alignment, tables
from atoll.data.sources import fetch
from atoll.data.splits import ScenarioOptions, own_sizes
from atoll.learning.models import ModelOptions
from atoll.runs.config import EngineOptions, RunConfig, assignment, change, presets, read, resolve
from atoll.runs.draft import draft
from atoll.runs.facts import holdings
from atoll.runs.parts import parts

__all__ = ["align_command", "inspect_command", "register"]


def list_command(
    what: Annotated[str, typer.Argument(help="methods, data or presets")] = "methods",
) -> None:
    """List methods, data sets or presets."""
    kinds: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "methods": lambda: [(name, _first_line(name)) for name in methods.names()],
        "data": lambda: [(name, _data_line(name)) for name in data.names()],
        "presets": lambda: [
            (name, path.read_text().splitlines()[0].lstrip("# "))
            for name, path in presets().items()
        ],
    }
    if what not in kinds:
        raise UserError(f"cannot list '{what}'", "atoll list", nearest(what, kinds))
    print_pairs(kinds[what]())


def _first_line(method: str) -> str:
    module = sys.modules[methods.load(method).client.__module__]
    return (module.__doc__ or "").splitlines()[0]


def show_command(
    what: Annotated[str, typer.Argument(help="a preset or a method", metavar="PRESET|METHOD")],
) -> None:
    """Show every option of a preset or method: default, range, remark."""
    config = resolve(read(what), what)
    method = methods.load(config.method["name"])
    out.print(f"{what}: {_first_line(config.method['name'])}", soft_wrap=True)
    for title, kind, chosen in (
        ("run", RunConfig, vars(config)),
        ("scenario", ScenarioOptions, config.scenario),
        ("model", ModelOptions, config.model),
        ("method", method.options, config.method),
        ("engine", EngineOptions, config.engine),
        ("robust", RobustOptions, config.robust),
    ):
        _print_options("run" if kind is RunConfig else f"[{title}]", kind, chosen)


def _print_options(title: str, kind: type, chosen: Mapping[str, Any]) -> None:
    shown = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in ("option", "value", "type", "range", "what it is"):
        shown.add_column(name, overflow="fold")
    for option in describe(kind):
        value = chosen.get(option.name, option.default)
        if option.name == "data" or not isinstance(value, dict):  # other tables have their own
            cells = (option.name, json.dumps(value), option.kind, option.range, option.remark)
            shown.add_row(*map(Text, cells))
    out.print(shown)


def doctor_command() -> None:
    """Say what is installed, what is found, and what mends what is missing."""
    packages = ("torch", "numpy", "pydantic", "safetensors", "scikit-learn", "pyarrow")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    print_pairs(
        [
            ("atoll", __version__),
            ("python", platform.python_version()),
            *((name, _version(name)) for name in packages),
            ("device", device),
            ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"),
            ("data folder", f"{fetch.folder()} (set ATOLL_DATA to change it)"),
        ]
    )
    print_pairs([(name, _data_line(name)) for name in data.names()], "data sets")


def _data_line(name: str) -> str:
    about = data.about(name)
    return " - ".join(part for part in (about.presence, about.line, about.where) if part)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"missing: pip install {name}"


def align_command(
    files: Annotated[list[Path], typer.Argument(help="one CSV or Parquet file for each party")],
    hub: Annotated[Path, typer.Option(help="the file of the party that has the labels")],
    column: Annotated[str, typer.Option("--id", help="the column of ids")] = "id",
    to: Annotated[Path, typer.Option("--out", help="folder for the index files")] = Path("aligned"),
    exact: Annotated[bool, typer.Option(help="compare ids as they are written")] = False,
    assume: Annotated[
        bool, typer.Option("--assume-aligned", help="rows already match: check ids, hide nothing")
    ] = False,
) -> None:
    """Find the rows that several tables share without showing the others."""
    tables = {path.stem: alignment.read_ids(path, column) for path in files}
    if len(tables) < max(2, len(files)):
        raise UserError("two files of one name, or one alone", "align", "name each party's file")
    made = (
        alignment.assume_aligned(tables, exact)
        if assume
        else alignment.align(tables, hub.stem, exact)
    )
    with disk_errors(to):
        to.mkdir(parents=True, exist_ok=True)
    for name, rows in made.rows.items():
        lines = "".join(f"{row}\n" for row in rows)
        write_whole(to / f"{name}.index.csv", f"row\n{lines}".encode())
    moved = sum(len(message.content) for message in made.sent)
    count = len(next(iter(made.rows.values())))
    out.print(f"{count} rows in common, {size(moved)} moved; index files in {to}", soft_wrap=True)


DEALT = ("train", "valid", "test", "common", "own")


def inspect_command(
    what: Annotated[
        str, typer.Argument(help="a preset, a method, or a .toml file", metavar="CONFIG")
    ],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
) -> None:
    """Show what each site holds and what will be done with it, before anything trains."""
    changes = dict(assignment(text) for text in set_ or [])
    config = resolve(change(read(what), changes), what)
    if config.scenario["split"] == "files":
        given = {key: value for key, value in config.data.items() if key != "name"}
        found = tables.survey(**given)
        _print_survey(found)
        rows = _to_be_dealt(found, config)
    else:
        made = parts(config)
        if made.dataset.layout is not None and made.dataset.layout.told:
            print_pairs(list(made.dataset.layout.told), "worth knowing")
        held = holdings(made)
        rows = [
            [
                id,
                *(f"{sum(site[part]):,}" for part in DEALT[:3]),
                str(held["common"]),
                str(site["own"]),
            ]
            for id, site in held["sites"].items()
        ]
    print_grid("rows and columns of numbers, as dealt", ["site", *DEALT], rows)


def _to_be_dealt(found: tables.Survey, config: RunConfig) -> list[list[str]]:
    """What each site will have, from the numbers of its rows: the file is not read again."""
    common, own = tables.widths(found)
    rows = []
    for site in found.sites:
        stages = {stage: site.stages.get(stage, 0) for stage in found.stages or ("",)}
        sizes = own_sizes(site.name, stages, config.scenario_options()).sum(0)
        rows.append([site.name, *(f"{n:,}" for n in sizes), str(common), str(own[site.name])])
    return rows


def _print_survey(found: tables.Survey) -> None:
    sites = [
        [site.name, site.file, f"{site.rows:,}", counted(site.classes), counted(site.stages)]
        for site in found.sites
    ]
    header = (
        ["site", "file", "rows", "classes", "stages"]
        if found.stages
        else ["site", "file", "rows", "classes"]
    )
    print_grid("sites", header, [row[: len(header)] for row in sites])
    columns = [
        [
            column.name,
            column.kind,
            column.where,
            ", ".join(column.sites) if column.where != "common" else "all",
            counted(column.missing),
            column.done,
        ]
        for column in found.columns
    ]
    print_grid("columns", ["column", "type", "", "sites", "missing", "what is done"], columns)
    if found.findings:
        print_pairs([(one.what, one.done) for one in found.findings], "worth knowing")
    print_pairs([("", line) for line in found.crossing], "sites tell each other before training")


def init_command(
    files: Annotated[list[str] | None, typer.Argument(help="one table a site")] = None,
    label: Annotated[str, typer.Option(help="the column to be predicted")] = "",
    site: Annotated[str, typer.Option(help="one file: the column of a row's site")] = "",
    stage: Annotated[str, typer.Option(help="the column of a row's stage")] = "",
    method: Annotated[str, typer.Option(help="chfl, fedavg or alone")] = "",
    to: Annotated[Path, typer.Option("-o", "--out", help="the config to write")] = Path("run.toml"),
) -> None:
    """Write a commented config for your own tables; what you do not give, you are asked."""
    if to.exists():
        raise UserError("the file is there already", str(to), "choose another with -o")
    asking = sys.stdin.isatty()
    if not (files and label) and not asking:
        raise UserError("no files or no label", "atoll init", "atoll init A.csv B.csv --label NAME")
    given = files or str(typer.prompt("Files, one for each site, with blanks between")).split()
    label = label or str(typer.prompt("The column to be predicted"))
    method = method or (str(typer.prompt("Method", default="chfl")) if asking else "chfl")
    text = draft(given, label, method, site, stage)
    tables.survey(**tomllib.loads(text)["data"])  # a mistake in the files is found now
    with disk_errors(to):
        to.write_text(text, encoding="utf-8")
    out.print(f"wrote {to}; next: atoll inspect {to}, then atoll run {to}", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("list")(list_command)
    app.command("show")(show_command)
    app.command("doctor")(doctor_command)
    app.command("align")(align_command)
    app.command("inspect")(inspect_command)
    app.command("init")(init_command)
