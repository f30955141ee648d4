"""Commands around data and configs: list, show, doctor, align, inspect, init."""

import json
import os
import platform
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from atoll import data, methods
from atoll.cli.console import aside, err, out
from atoll.cli.inspect import check, inspect_command
from atoll.cli.terminal import print_grid, print_pairs, size
from atoll.core import VERSION
from atoll.core.errors import UserError
from atoll.core.influence import RobustOptions
from atoll.core.options import Option, describe, nearest
from atoll.core.plugins import entry_names, is_foreign
from atoll.core.record import disk_errors, write_whole
from atoll.data import splits
from atoll.data.own import alignment, parties, sheets, texts
from atoll.data.own.images import ENDINGS
from atoll.data.own.matching import shared_ids
from atoll.data.own.suggestions import (
    Suggestion,
    examine,
    suggest_for_parties,
    suggest_for_texts,
)
from atoll.data.sources import fetch
from atoll.learning.models import ModelOptions
from atoll.runs.config import EngineOptions, ReportOptions, RunConfig, presets, read, resolve
from atoll.runs.draft import Wish, draft
from atoll.runs.result import Run, runs_in

__all__ = ["align_command", "drafted", "inspect_command", "register"]

WIDE = 140  # characters of a line from which options are shown with five columns
SCOPES = {  # how the remark of an option begins that has an effect on some data alone
    "tables": "table", "texts": "text", "image networks": "image",
    "plug-ins": "", "plug-ins with own first values": "",
}  # fmt: skip


def list_command(
    what: Annotated[str, typer.Argument(help="methods, data, splits, presets or runs")] = "methods",
) -> None:
    """List methods, data sets, splits, presets or runs."""
    kinds: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "methods": lambda: [
            (name, _first_line(name)) for name in [*methods.names(), *entry_names("atoll.methods")]
        ],
        "data": lambda: [(name, _data_line(name)) for name in data.names()],
        "splits": lambda: [
            (name, _split_line(name)) for name in [*splits.names(), *entry_names("atoll.splits")]
        ],
        "presets": lambda: [
            (name, path.read_text().splitlines()[0].lstrip("# "))
            for name, path in presets().items()
        ],
        "runs": lambda: [
            (str(home), _run_line(Run(home)))
            for folder in sorted(Path("runs").glob("*"))
            for home in runs_in(folder)
        ],
    }
    if what not in kinds:
        raise UserError(f"cannot list '{what}'", "atoll list", nearest(what, kinds))
    lines = kinds[what]()
    print_pairs(lines)
    if not lines:
        aside(f"no {what} here; atoll run writes to the folder runs")


def _run_line(run: Run) -> str:
    """Method, data and accuracy of a run, or what is wrong with its record."""
    try:
        line = f"{run.config['method']['name']} on {run.facts['data']['title']}"
        ended = (run.folder / "result.json").exists()
        return f"{line}, {run.score_name} {run.accuracy:.4f}" if ended else f"{line}, not finished"
    except UserError as error:
        return error.what


def _first_line(method: str) -> str:
    module = sys.modules[methods.load(method).client.__module__]
    return (module.__doc__ or "").splitlines()[0]


def _split_line(name: str) -> str:
    """What a split does, and its options."""
    kind = splits.load(name).options
    about = (sys.modules[kind.__module__].__doc__ or "").splitlines()[0]
    return f"{about} Options: {', '.join(option.name for option in describe(kind))}."


def show_command(
    what: Annotated[str, typer.Argument(help="a preset or a method", metavar="PRESET|METHOD")],
    every: Annotated[
        bool, typer.Option("--all", help="also options without an effect on its data")
    ] = False,
) -> None:
    """Show the options of a preset or method."""
    config = resolve(read(what), what)
    applies = (lambda table, option: True) if every else partial(_applies, config)
    method = methods.load(config.method["name"])
    out.print(f"{what}: {_first_line(config.method['name'])}")
    for title, kind, chosen in (
        ("run", RunConfig, vars(config)),
        ("scenario", splits.load(config.split).options, config.scenario),
        ("model", ModelOptions, config.model),
        ("method", method.options, config.method),
        ("engine", EngineOptions, config.engine),
        ("robust", RobustOptions, config.robust),
        ("report", ReportOptions, config.report),
    ):
        shown = [option for option in describe(kind) if applies(title, option)]
        _print_options("run" if kind is RunConfig else f"[{title}]", shown, chosen)


def _applies(config: RunConfig, table: str, option: Option) -> bool:
    """Whether an option has an effect on such data and such a method; its remark says on which."""
    scope, colon, _ = option.remark.partition(":")
    if table == "model" and option.name == "widths" and splits.load(config.split).vertical:
        return False
    if not colon or scope not in SCOPES:
        return True
    if scope.startswith("plug-ins"):
        return is_foreign(str(config.model["name"]), "atoll.models")
    return SCOPES[scope] == _kind(config)


def _kind(config: RunConfig) -> str:
    """The kind of data of a run: table, image or text; nothing is read."""
    name = str(config.data.get("name", ""))
    if "images" in config.data:
        return "image"
    if "files" in config.data or "parties" in config.data:
        return "text" if "text" in config.data else "table"
    return data.about(name).kind if name.replace("_", "-") in data.names() else ""


def _print_options(title: str, options: Sequence[Option], chosen: Mapping[str, Any]) -> None:
    rows = []
    if "split" in chosen:
        names = " | ".join(splits.names())
        rows.append(["split", json.dumps(chosen["split"]), names, "", "who holds what"])
    for option in options:
        value = chosen.get(option.name, option.default)
        if option.name == "data" or not isinstance(value, dict):  # other tables have their own
            cells = (option.name, json.dumps(value), option.kind, option.range, option.remark)
            rows.append(list(cells))
    if out.width >= WIDE:
        print_grid(title, ["option", "value", "type", "range", "what it is"], rows)
        return
    narrow = []
    for name, value, kind, limits, remark in rows:
        narrow.append(
            [name, value, f"{remark} ({' '.join(part for part in (kind, limits) if part)})"]
        )
    print_grid(title, ["option", "value", "what it is"], narrow)


def doctor_command() -> None:
    """Check the installation and suggest fixes."""
    packages = ("torch", "numpy", "pydantic", "safetensors", "scikit-learn", "pyarrow")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    print_pairs(
        [
            ("atoll", VERSION),
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
    column: Annotated[
        list[str] | None,
        typer.Option("--id", help="the column of ids; one name per file if names differ"),
    ] = None,
    to: Annotated[Path, typer.Option("--out", help="folder for the index files")] = Path("aligned"),
    exact: Annotated[bool, typer.Option(help="compare ids character by character")] = False,
    assume: Annotated[
        bool, typer.Option("--assume-aligned", help="rows already match: compare ids in plain text")
    ] = False,
) -> None:
    """Find the rows that several tables share, privately."""
    names = column or ["id"]
    if len(names) not in (1, len(files)):
        what = f"{len(files)} files, but {len(names)} columns of ids"
        raise UserError(what, "--id", "give --id once, or once for each file")
    pairs = zip(files, names * len(files) if len(names) == 1 else names, strict=True)
    tables = {path.stem: alignment.read_ids(path, name) for path, name in pairs}
    if len(tables) < max(2, len(files)):
        remedy = "give two or more files that have different names"
        raise UserError("two files of one name, or one alone", "atoll align", remedy)
    aligned = (
        alignment.assume_aligned(tables, exact)
        if assume
        else alignment.align(tables, hub.stem, exact)
    )
    with disk_errors(to):
        to.mkdir(parents=True, exist_ok=True)
    for name, rows in aligned.rows.items():
        lines = "".join(f"{row}\n" for row in rows)
        write_whole(to / f"{name}.index.csv", f"row\n{lines}".encode())
    moved = sum(len(message.content) for message in aligned.sent)
    count = len(next(iter(aligned.rows.values())))
    out.print(f"{count} rows in common, {size(moved)} moved; index files in {to}", soft_wrap=True)


def init_command(
    files: Annotated[
        list[str] | None, typer.Argument(help="one table, text file or image folder per site")
    ] = None,
    label: Annotated[str, typer.Option(help="the column to predict")] = "",
    site: Annotated[
        str, typer.Option(help="the column that names the site, if there is one file")
    ] = "",
    stage: Annotated[str, typer.Option(help="the column that names the stage")] = "",
    text: Annotated[str, typer.Option(help="the column with the texts")] = "",
    id: Annotated[str, typer.Option(help="the column of ids that parties share")] = "",
    method: Annotated[str, typer.Option(help="chfl, fedavg, alone or vleto, ...")] = "",
    to: Annotated[Path, typer.Option("-o", "--out", help="the config to write")] = Path("run.toml"),
) -> None:
    """Write a commented config for your own data.

    It contains settings that the files suggest. On a terminal it asks for what is missing.
    """
    if to.exists():
        raise UserError("the file is there already", str(to), "choose another with -o")
    asking = sys.stdin.isatty()
    files = _with_folders_of_files(files or ())
    images = bool(files) and all(_is_images(file) for file in files or ())
    if not (files and (label or images)) and not asking:
        raise UserError("no files or no label", "atoll init", "atoll init A.csv B.csv --label NAME")
    paths = files or str(typer.prompt("Files, one for each site, with blanks between")).split()
    texts = text or ("text" if all(file.endswith(".jsonl") for file in paths) else "")
    if not images:
        label = label or str(typer.prompt("The column to predict"))
    wish = _of_parties(Wish(tuple(paths), label, method, site, stage, texts, images, id))
    usual = "fccl" if images else "fedseit" if texts else "vleto" if wish.parties else "chfl"
    method = method or (str(typer.prompt("Method", default=usual)) if asking else usual)
    wish = replace(wish, method=method)
    config, problem = drafted(wish)
    with disk_errors(to):
        to.write_text(config, encoding="utf-8")
    if problem:
        err.print(f"fix this first: {problem}", soft_wrap=True, markup=False)
    _count_decisions(config, to)
    out.print(f"wrote {to}; next: atoll inspect {to}, then atoll run {to}", soft_wrap=True)


def _count_decisions(config: str, path: Path) -> None:
    """Print how many suggestions the user may uncomment."""
    commented = sum(line.startswith("# ") and "uncomment" in line for line in config.splitlines())
    if commented:
        lines = "1 suggestion" if commented == 1 else f"{commented} suggestions"
        verb = "is" if commented == 1 else "are"
        what = f"{lines} in {path} {verb} commented out: uncomment what is correct"
        err.print(what, soft_wrap=True)


def _of_parties(wish: Wish) -> Wish:
    """The wish, for parties where files have other columns of the same rows."""
    if wish.text or wish.images or wish.site:
        return wish
    ids = shared_ids(wish.paths, wish.label, wish.id)
    if ids is None:
        return wish
    return replace(wish, id=ids.column, ids=ids.names, parties=True, aligned=ids.aligned)


def _with_folders_of_files(paths: Sequence[str]) -> list[str]:
    """The files; a folder that has tables or texts, and no image, stands for these.

    Hidden entries do not count; a .txt file does where there is no other: it may be a note.
    """
    files = list[str]()
    for one in paths:
        inside = sorted(Path(one).iterdir()) if Path(one).is_dir() else []
        inside = [path for path in inside if not path.name.startswith(".")]
        tables = [path for path in inside if path.suffix.lower() in (*sheets.ENDINGS, ".jsonl")]
        tables = [path for path in tables if path.suffix.lower() != ".txt"] or tables
        pictures = any(path.is_dir() or path.suffix.lower() in ENDINGS for path in inside)
        files += [str(path) for path in tables] if tables and not pictures else [one]
    return files


def _is_images(file: str) -> bool:
    return Path(file).is_dir() or file.endswith(".npz")


def drafted(wish: Wish) -> tuple[str, str]:
    """The config with everything that the files suggest, and what is still wrong with it."""
    renames = _renames_of_ids(wish)
    values = tomllib.loads(draft(wish, renames))["data"]
    suggestions = [*renames, *_suggestions(wish, values)]
    config = draft(wish, suggestions)
    problem = _problem(config)
    if wish.text and problem.startswith("no column 'text'"):
        problem = f"{problem}; name the column of texts with --text"
    if problem and not _problem(re.sub(r"(?m)^# (?=.*; uncomment if correct$)", "", config)):
        problem = f"{problem}; uncommenting the suggestions below solves this: check them first"
    return (draft(wish, suggestions, problem), problem) if problem else (config, "")


def _problem(config: str) -> str:
    """What `atoll inspect` would complain about; empty if nothing."""
    try:
        check(resolve(tomllib.loads(config), "atoll init"))
    except UserError as error:
        return str(error)
    return ""


def _renames_of_ids(wish: Wish) -> list[Suggestion]:
    """One name for the ids of parties that call them differently."""
    return [
        Suggestion(
            "rename", {name: wish.id}, f"the ids are called {name} here", True, Path(files[0]).stem
        )
        for files, name in zip(wish.paths, wish.ids, strict=False)
        if name != wish.id
    ]


def _suggestions(wish: Wish, values: dict[str, Any]) -> list[Suggestion]:
    """What the files suggest; texts and parties that cannot be read suggest nothing."""
    if wish.images:
        return []
    if not (wish.text or wish.parties):
        return examine(**values)
    try:
        if wish.parties:
            return suggest_for_parties(parties.examine(**values))
        return suggest_for_texts(texts.examine(**values))
    except UserError:
        return []


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("list")(list_command)
    app.command("show")(show_command)
    app.command("doctor")(doctor_command)
    app.command("align")(align_command)
    app.command("inspect")(inspect_command)
    app.command("init")(init_command)
